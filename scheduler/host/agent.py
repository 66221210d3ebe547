"""What `tandem up` does beside supervising: tells of this machine, takes models, hears of switches.

A thread, so that a Redis that is away never holds up the supervisor. It restarts nothing itself:
what the stack is to do is left in `wanted`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis

from scheduler.config import Config, find_model
from scheduler.doctor.machine import survey
from scheduler.host.late_bind import is_here
from scheduler.nodes import Node
from scheduler.redis_client import connect
from scheduler.serializer import pack, unpack
from transport.errors import LinkError
from transport.files import FileServer
from transport.manifest import digest, read_record, untouched

log = logging.getLogger("tandem.agent")

EVERY_SECONDS = 1.0
TTL_SECONDS = 8
ANSWER_SECONDS = 900
SWITCH = "tandem:switch"


@dataclass(frozen=True)
class Machine:
    """A machine that runs `tandem up`: what it runs, serves, and where it takes files."""

    node: str
    host: str
    pid: int
    roles: tuple[str, ...]
    model: str
    ready: str
    files: str = ""
    secret: str = ""

    @classmethod
    def all(cls, client: redis.Redis) -> list[Machine]:
        """Every machine that has told of itself within the last seconds."""
        found = []
        for key in sorted(client.scan_iter("tandem:machine:*")):
            if value := cast("bytes | None", client.get(key)):
                fields = unpack(value)
                found.append(cls(**{**fields, "roles": tuple(fields["roles"])}))
        return found

    def silent(self, nodes: Sequence[Node]) -> list[str]:
        """Its roles whose worker reports nothing: it hangs, or waits for the model's files."""
        seen = {(node.role, node.name) for node in nodes}
        return [role for role in self.roles if role != "api" and (role, self.node) not in seen]


def api_key(node: str) -> str:
    """Redis key of the URL of a machine's API, which `--port` may have moved."""
    return f"tandem:api:{node}"


class Agent:
    """Started with the stack, closed before it; the stack changes `serving` when it switches."""

    def __init__(self, config: Config, roles: frozenset[str], file: Path | None) -> None:
        self._config = config
        self._roles = tuple(sorted(roles))
        self._file = file
        self.serving = config.model_name
        self.ready = ""
        self.wanted: str | None = None
        self._heard = ""
        self._secret = secrets.token_bytes(32)
        self._server: FileServer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)

    def start(self) -> None:
        """Begin to tell and to listen."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and the file server."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        client = connect(self._config.redis_url, timeout=2.0, patience=0)
        while True:
            try:
                self._listen()
                self._tell(client)
                self._hear(client)
            except (redis.RedisError, OSError):
                pass  # it is away: everybody says so
            except Exception:
                log.exception("the machine's agent")
            if self._stop.wait(EVERY_SECONDS):
                break
        with contextlib.suppress(redis.RedisError, OSError):
            client.delete(f"tandem:machine:{self._config.node}", api_key(self._config.node))
        client.close()

    def _listen(self) -> None:
        """Take models as soon as the cable's address is there; a machine alone has no peer."""
        host = self._config.link.host
        if self._server is None and self._config.roles and is_here(host):
            try:
                self._server = FileServer(host, self._secret, self._config.models_dir)
            except LinkError as error:
                log.warning("models cannot be received yet: %s", error)

    def _tell(self, client: redis.Redis) -> None:
        host, port = self._server.address if self._server is not None else ("", 0)
        machine = {
            "node": self._config.node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "roles": list(self._roles),
            "model": self.serving,
            "ready": self.ready,
            "files": f"{host}:{port}" if port else "",
            "secret": self._secret.hex() if port else "",
        }
        client.set(f"tandem:machine:{self._config.node}", pack(machine), ex=TTL_SECONDS)
        if "api" in self._roles:
            client.set(api_key(self._config.node), self._config.api_url, ex=TTL_SECONDS)

    def _hear(self, client: redis.Redis) -> None:
        value = cast("bytes | None", client.get(SWITCH))
        order: dict[str, Any] = unpack(value) if value else {}
        step = f"{order.get('id')}:{order.get('phase')}"
        if not order or step == self._heard:
            return
        name = str(order.get("name", ""))
        if order.get("phase") == "ask":
            answer = self._answer(name)
            key = f"{SWITCH}:{order['id']}:{self._config.node}"
            client.set(key, pack(answer), ex=ANSWER_SECONDS)
        elif order.get("phase") == "go" and name != self.serving:
            log.info("the model %s is to be served", name)
            self.wanted = name
        self._heard = step

    def _answer(self, name: str) -> dict[str, str]:
        """Whether this machine could serve `name`, and a digest of its files where it is known."""
        if self._file is None:
            return {"problem": "it has no configuration file to keep the choice in: `tandem init`"}
        if os.environ.get("TANDEM_MODEL"):
            return {"problem": "TANDEM_MODEL in its environment names the model: unset it"}
        directory = find_model(self._config.model_copy(update={"model": name, "model_dir": None}))
        if directory is None:
            return {"problem": f"it has no model {name}: `tandem model push {name}` from the other"}
        found = survey(directory)
        if "error" in found or not found.get("whole"):
            return {"problem": str(found.get("error") or found.get("problem"))}
        working = found["device"]["working_set_bytes"]
        if found["weights"] > working:
            return {
                "problem": f"{found['weights'] / 1e9:.0f} GB of weights do not fit its working set "
                f"of {working / 1e9:.0f} GB"
            }
        known = read_record(directory)
        return {"problem": "", "digest": digest(known) if known and untouched(directory) else ""}
