"""What the supervisor does now and then: the nightly check of the store, a switch of the model.

A duty is called in every tick and returns at once; what takes time runs as a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from scheduler.config import Config, ConfigError, keep_model
from scheduler.host import logs, reports
from scheduler.host.agent import Agent
from scheduler.host.stack import Stack

log = logging.getLogger("tandem.duties")


def last_due(now: float, hour: int) -> float:
    """The latest moment at or before `now` at which the local clock showed `hour`:00."""
    at = time.localtime(now)
    today = time.mktime((at.tm_year, at.tm_mon, at.tm_mday, hour, 0, 0, 0, 0, -1))
    if today <= now:
        return today
    return time.mktime((at.tm_year, at.tm_mon, at.tm_mday - 1, hour, 0, 0, 0, 0, -1))


class Nightly:
    """Runs `tandem store check` at the configured hour and keeps its report.

    A night that the machine slept through is made up for when it runs again. The first check
    comes with the first night, not with the first start.
    """

    def __init__(self, config: Config, roles: frozenset[str]) -> None:
        self._config = config
        self._hour = config.upkeep.check_hour if "decode" in roles else -1
        found = reports.newest(config.data_dir)
        self._last = float(found["at"]) if found and "at" in found else time.time()
        self._process: subprocess.Popen[bytes] | None = None
        self._output = reports.directory(config.data_dir) / "running"

    def __call__(self) -> None:
        """Start a check that is due, or take the report of one that has ended."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._finish()
        elif self._hour >= 0 and self._last < last_due(time.time(), self._hour):
            self._start()

    def _start(self) -> None:
        self._last = time.time()
        config = self._config
        command = [sys.executable, "-P", "-m", "scheduler.cli", "store", "check", "--json"]
        command += ["--data", str(config.data_dir), "--node", config.node]
        log.info("the nightly check of the store begins")
        reports.directory(config.data_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["nice", "-n", "10", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )

    def _finish(self) -> None:
        assert self._process is not None
        lines = logs.tail(self._output, 1)
        self._output.unlink(missing_ok=True)
        self._process = None
        try:
            report = json.loads(lines[-1])
            path = reports.keep(self._config.data_dir, report, self._config.upkeep.keep_reports)
        except (ValueError, IndexError, OSError) as error:
            log.error("the nightly check failed: %s", lines[-1] if lines else error)
            return
        if report.get("clean"):
            log.info("the store is whole (%s)", path)
        else:
            log.error("the store has %s problems: %s", report.get("found"), path)


class Switching:
    """Has the stack serve the model that the agent was told of, and keeps the choice."""

    def __init__(self, stack: Stack, agent: Agent, file: Path | None) -> None:
        self._stack = stack
        self._agent = agent
        self._file = file
        self._awaited = False

    def __call__(self) -> None:
        """Switch where that is wanted; note when the new model is ready."""
        name, self._agent.wanted = self._agent.wanted, None
        if name is not None and self._file is not None:
            try:
                keep_model(self._file, name)
                self._agent.ready = ""
                self._stack.switch(name)
            except ConfigError as error:
                log.error("the model is not switched: %s", error)
                return
            self._agent.serving = self._stack.config.model_name
            self._awaited = True
        if self._awaited and self._stack.is_ready():
            self._agent.ready = self._agent.serving
            self._awaited = False
