"""The processes of one machine's stack: our Redis, the API, a prefill and a decode worker."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from scheduler import data_dir, redis_server
from scheduler.config import Config, ConfigError, resolved_environment
from scheduler.nodes import Nodes, Role
from scheduler.redis_client import connect
from scheduler.supervisor import Service, StackFailed, Supervisor

MODULES = {
    "redis": ["scheduler.redis_server"],
    "api": ["scheduler.cli", "serve"],
    "prefill": ["worker_prefill"],
    "decode": ["worker_decode"],
}
WORKERS: tuple[Role, ...] = ("decode", "prefill")
ROLES = frozenset({"api", *WORKERS})
START_SECONDS = 600.0
"""How long a worker may take to load its model: minutes where it is hundreds of gigabytes."""


class Stack:
    """A running stack. Use `start`, then `run` or `wait_ready`, and always `stop`.

    Raises ConfigError before anything is started, StackFailed when a process cannot run.
    """

    def __init__(self, config: Config, roles: frozenset[str] = ROLES) -> None:
        """`roles` are those that run on this machine."""
        self.config = config
        self.roles = roles
        if "api" in roles:
            check_port(config)
        data_dir.prepare(config)
        self._claim = data_dir.Claim(config.data_dir)
        self.supervisor = Supervisor(resolved_environment(config), config.jobs.drain_seconds)
        self._nodes = Nodes(connect(config.redis_url))

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Start every process; returns when Redis answers, the others are still loading."""
        if not self.config.redis.url:
            say(f"redis    {redis_server.find()}, append-only, {self.config.data_dir / 'redis'}")
            self._add("redis", stop_last=True)
        say(f"redis    {self._wait_for_redis()} answers")
        for name in (*WORKERS, "api"):
            if name in self.roles:
                self._add(name)

    def wait_ready(self) -> None:
        """Supervise until everything that runs on this machine is ready for work."""
        self.supervisor.wait_until(self._ready, START_SECONDS, "the stack")

    def facts(self) -> dict[str, Any]:
        """What the API says about itself and its nodes; empty while it does not answer."""
        try:
            answer = httpx.get(f"{self.config.api_url}/ready", headers=self._headers(), timeout=2)
            return {"ready": answer.status_code == 200, **answer.json()}
        except (httpx.HTTPError, ValueError):
            return {}

    def stop(self) -> None:
        """Stop every process and give the data directory up."""
        self.supervisor.stop()
        self._claim.release()

    def _add(self, name: str, *, stop_last: bool = False) -> None:
        log_file = self.config.data_dir / "logs" / f"{name}.log"
        command = [sys.executable, "-P", "-m", *MODULES[name]]
        self.supervisor.add(Service(name, command, log_file, stop_last))

    def _wait_for_redis(self) -> str:
        end = time.monotonic() + (0.0 if self.config.redis.url else 20.0)
        while True:
            try:
                return redis_server.probe(self.config.redis_url, 0.2)
            except redis_server.RedisUnavailable as error:
                if time.monotonic() >= end:
                    raise ConfigError(str(error)) from None
                self.supervisor.tick(0.05)

    def _ready(self) -> bool:
        for role in WORKERS:
            if role in self.roles:
                node = self._nodes.get(role, self.config.node)
                # An entry may outlive its process by some seconds: the process must be ours.
                if node is None or node.state != "ready" or node.pid != self._pid(role):
                    return False
        return "api" not in self.roles or bool(self.facts().get("store"))

    def _pid(self, name: str) -> int | None:
        return self.supervisor.find(name).pid

    def _headers(self) -> dict[str, str]:
        token = self.config.api.token
        return {"Authorization": f"Bearer {token}"} if token else {}


def check_port(config: Config) -> None:
    """Raise ConfigError where the API could not listen."""
    family = socket.AF_INET6 if ":" in config.api.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.api.host, config.api.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.api.host} port {config.api.port} "
                f"({os.strerror(error.errno or 0)}): stop what uses it, or pass --port"
            ) from None


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


__all__ = ["Stack", "StackFailed", "check_port", "free_port"]
