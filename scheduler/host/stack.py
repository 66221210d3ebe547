"""The processes of one machine's stack: our Redis, the API, a prefill and a decode worker."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from scheduler.config import Config, ConfigError, find_model, resolved_environment
from scheduler.formats import settle
from scheduler.host import data_dir, redis_server
from scheduler.host.supervisor import Service, StackFailed, Supervisor
from scheduler.nodes import Nodes, Role
from scheduler.redis_client import AWAY, connect

MODULES = {
    "redis": ["scheduler.host.redis_server"],
    "api": ["scheduler.cli", "serve"],
    "prefill": ["worker_prefill"],
    "decode": ["worker_decode"],
}
WORKERS: tuple[Role, ...] = ("decode", "prefill")
ROLES = frozenset({"api", *WORKERS})
REDIS_SECONDS = 2.0
"""How long a configured Redis may take to answer."""
SAY_EVERY = 30.0
"""Seconds between two lines about what is still awaited."""
MAX_RESTARTS = 3
LOADING_SECONDS = 300.0
"""How long our own may take to read its append-only file."""
START_SECONDS = 600.0
"""How long a worker may take to load its model: minutes where it is hundreds of gigabytes."""


class Stack:
    """A running stack. Use `start`, then `run` or `wait_ready`, and always `stop`.

    Raises ConfigError before anything is started, StackFailed when a process cannot run.
    """

    def __init__(self, config: Config, roles: frozenset[str] = ROLES) -> None:
        """`roles` are those that run on this machine.

        Claims the data directory. With api.port 0 a free port is chosen: see `config`.
        """
        data_dir.prepare(config)
        self._claim = data_dir.Claim(config.data_dir)
        self.roles = roles
        try:
            if config.api.port == 0:
                api = config.api.model_copy(update={"port": free_port(config.api.host)})
                config = config.model_copy(update={"api": api})
            if "api" in roles:
                check_port(config)
        except BaseException:
            self._claim.release()
            raise
        self.config = config
        self._http = httpx.Client(
            base_url=config.api_url, headers=self._headers(), timeout=2, trust_env=False
        )
        self.supervisor = Supervisor(resolved_environment(config), config.jobs.drain_seconds)
        self.supervisor.log_bytes = config.upkeep.log_mb << 20
        self.supervisor.log_files = config.upkeep.log_files
        self.supervisor.own_log = config.data_dir / "logs" / "service.log"
        self._redis = connect(config.redis_url, timeout=2.0, patience=0)
        self._nodes = Nodes(self._redis)

    def start(
        self,
        say: Callable[[str], None] = lambda _: None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Start every process; returns when Redis answers, the others are still loading.

        `before` is called once Redis answers, before anything that needs the model.
        """
        if not self.config.redis.url:
            say(f"redis    {redis_server.find()}, append-only, {self.config.data_dir / 'redis'}")
            self._add("redis", stop_last=True)
        say(f"redis    {self._wait_for_redis(say)} answers")
        self.supervisor.wait_until(self._settled, LOADING_SECONDS, "Redis")
        before()
        for name in (*WORKERS, "api"):
            if name in self.roles:
                self._add(name)

    def await_model(self, say: Callable[[str], None]) -> None:
        """Wait until the model's files are on this machine; another machine may push them."""
        said = float("-inf")
        while (directory := find_model(self.config)) is None:
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                name = self.config.model
                say(f"model    waiting for {name}: run `tandem model push {name}` where it is")
            if self.supervisor.stopping:
                raise StackFailed("stopped before it was ready")
            self.supervisor.tick(0.5)
        self.config = self.config.model_copy(update={"model_dir": directory})
        self.supervisor.environment = resolved_environment(self.config)

    def wait_ready(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Supervise until everything that runs on this machine is ready for work.

        What is still awaited is said now and then: a large model takes minutes to load.
        """
        began = said = time.monotonic()

        def ready() -> bool:
            nonlocal said
            missing = self._missing()
            now = time.monotonic()
            if missing and now - said >= SAY_EVERY:
                said = now
                say(f"waiting  {' and '.join(missing)}: not ready after {now - began:.0f} s")
            return not missing

        self.supervisor.wait_until(ready, START_SECONDS, "the stack")

    def facts(self) -> dict[str, Any]:
        """What the API says about itself and its nodes; empty while it does not answer."""
        try:
            answer = self._http.get("/ready")
            return {"ready": answer.status_code == 200, **answer.json()}
        except (httpx.HTTPError, ValueError):
            return {}

    def switch(self, model: str) -> None:
        """Serve another model from now on: workers and API drain and start anew with it."""
        config = self.config.model_copy(update={"model": model, "model_dir": None})
        directory = find_model(config)
        if directory is None:
            raise ConfigError(f"there is no model {model} on this machine: push it first")
        self.config = config.model_copy(update={"model_dir": directory})
        self.supervisor.restart(resolved_environment(self.config))

    def is_ready(self) -> bool:
        """Whether everything that runs on this machine is ready for work."""
        return not self._missing()

    def stop(self) -> None:
        """Stop every process and give the data directory up. Harmless when called twice."""
        try:
            self.supervisor.stop()
            # A process that was killed left its socket.
            sockets = {"redis": self.config.redis_socket, "decode": self.config.store_socket}
            for service in self.supervisor.services:
                if service.name in sockets:
                    sockets[service.name].unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a worker of its own may use it
                self.config.runtime_dir.rmdir()
        finally:
            self._http.close()
            self._redis.close()
            self._claim.release()

    def _add(self, name: str, *, stop_last: bool = False) -> None:
        log_file = self.config.data_dir / "logs" / f"{name}.log"
        command = [sys.executable, "-P", "-m", *MODULES[name]]
        self.supervisor.add(Service(name, command, log_file, stop_last))

    def _settled(self) -> bool:
        """Whether the format of records is settled; not while Redis still reads its file."""
        try:
            settle(self._redis)
        except AWAY:
            return False
        return True

    def _wait_for_theirs(self, say: Callable[[str], None]) -> str:
        """Name and version of the configured server.

        A part of a stack waits for it, for it may start later than this machine; a whole stack
        does not.
        """
        said = float("-inf")
        while True:
            try:
                return redis_server.probe(self.config.redis_url, REDIS_SECONDS)
            except redis_server.RedisAway as error:
                if self.roles == ROLES:
                    raise ConfigError(str(error)) from None
                if time.monotonic() - said >= SAY_EVERY:
                    said = time.monotonic()
                    say(f"redis    waiting: {error}")
            except redis_server.RedisUnavailable as error:
                raise ConfigError(str(error)) from None
            if self.supervisor.stopping:
                raise StackFailed("stopped before it was ready")
            self.supervisor.tick(0.5)

    def _wait_for_redis(self, say: Callable[[str], None]) -> str:
        """Name and version of the server that answers."""
        if self.config.redis.url:
            return self._wait_for_theirs(say)
        found = ""
        service = self.supervisor.find("redis")

        def ready() -> bool:
            nonlocal found
            if service.restarts >= MAX_RESTARTS:
                raise StackFailed(f"our Redis keeps ending: {service.last_line()}")
            try:
                found = redis_server.probe(self.config.redis_url, 0.0)
            except redis_server.RedisUnavailable:
                return False
            return True

        self.supervisor.wait_until(ready, LOADING_SECONDS, "our Redis")
        return found

    def _missing(self) -> list[str]:
        """What is not ready for work of what runs on this machine."""
        found: list[str] = []
        for role in WORKERS:
            if role in self.roles:
                try:
                    node = self._nodes.get(role, self.config.node)
                except AWAY:
                    return ["redis"]
                # An entry may outlive its process by some seconds: the process must be ours.
                if node is None or node.state != "ready" or node.pid != self._pid(role):
                    found.append(role)
        # The API has its store when the decode worker is ready.
        if "api" in self.roles and not found and not self.facts().get("store"):
            found.append("api")
        return found

    def _pid(self, name: str) -> int | None:
        return self.supervisor.find(name).pid

    def _headers(self) -> dict[str, str]:
        token = self.config.api.token
        return {"Authorization": f"Bearer {token}"} if token else {}


def check_port(config: Config) -> None:
    """Raise ConfigError where the API could not listen."""
    with socket.socket(_family(config.api.host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.api.host, config.api.port))
        except OSError as error:
            wrong = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            cure = "correct api.host" if wrong else "stop what uses it, or pass --port"
            raise ConfigError(
                f"cannot listen on {config.api.host} port {config.api.port} "
                f"({error.strerror}): {cure}"
            ) from None


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on `host` now.

    From below those that systems hand out by themselves (Linux from 32768, macOS from 49152): the
    API listens there only some seconds later, and no connection made meanwhile may get it.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(
                    f"cannot listen on {host} ({error.strerror}): correct api.host"
                ) from None
            return port
    raise ConfigError(f"no port is free on {host}: pass --port")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


__all__ = ["Stack", "StackFailed", "check_port", "free_port"]
