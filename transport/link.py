"""A link that stays: connects when it is needed, picks its backend, and falls back.

`auto` takes rdma where it is configured, the versions fit and its self-test passes, otherwise tcp.
After an rdma failure it is tcp for half a minute, after three within a window for longer and with
an alert.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transport import rdma
from transport.desk import Desk
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.outbound import Transfer
from transport.sender import Address, Sender
from transport.sidecar import COMMAND, Fabric

log = logging.getLogger("tandem.transport")

Backend = Literal["auto", "tcp", "rdma"]
FAILURES = 3
WINDOW_SECONDS = 300.0
REST_SECONDS = 600.0
RETRY_SECONDS = 30.0
"""How long tcp is kept after one rdma failure: a group that cannot form takes its time."""


@dataclass(frozen=True)
class Rdma:
    """What an rdma link needs beyond an address: epochs, and the cable map for JACCL."""

    epochs: Epochs
    fabric: Fabric = "jaccl"
    devices: str = ""
    host: str = "127.0.0.1"
    command: Sequence[str] = field(default=COMMAND)


@dataclass(frozen=True)
class LinkStatus:
    """For metrics and `tandem doctor`: `path` is "" while nothing is connected."""

    path: str
    connected: bool
    rdma_failures: int
    resting: bool
    alert: str


class Link:
    """The way from this node to one receiver. All methods may be called by any thread.

    `backend` "rdma" never falls back; "auto" without `rdma` is tcp. Nothing is connected before
    the first offer; a link that broke is formed anew by the next. States that are asked for come
    to `desk`.
    """

    def __init__(
        self,
        address: Address | list[Address],
        secret: bytes,
        *,
        backend: Backend = "auto",
        rdma: Rdma | None = None,
        deadline: float = 10.0,
        streams: int = 2,
        node: str = "local",
        desk: Desk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if backend == "rdma" and rdma is None:
            raise LinkError("backend rdma needs epochs in Redis and a cable map", "failed")
        self._addresses = [address] if isinstance(address, tuple) else list(address)
        self._secret = secret
        self._backend = backend
        self._rdma = rdma if backend != "tcp" else None
        self._deadline = deadline
        self._streams = streams
        self._node = node
        self._desk = desk
        self._clock = clock
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        self._counted: Sender | None = None
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._rests_until = float("-inf")
        self._retry_at = float("-inf")
        self._alert = ""
        self._closed = False

    def offer(self, transfer: str, **more: Any) -> Transfer:
        """Sender.offer over the link as it stands, formed first if need be.

        Raises Refused, or LinkError: offer again with a higher attempt, or do without.
        """
        return self._connected().offer(transfer, **more)

    def ask(self, transfer: str, **more: Any) -> str:
        """Sender.ask over the link as it stands, formed first if need be; returns its path.

        Raises LinkError.
        """
        sender = self._connected()
        sender.ask(transfer, **more)
        return sender.path

    def status(self) -> LinkStatus:
        """Which way the link takes now, and what it remembers."""
        with self._lock:
            self._note_death()
            sender = self._sender
            connected = sender is not None and sender.alive
            return LinkStatus(
                path=sender.path if sender is not None and connected else "",
                connected=connected,
                rdma_failures=self._recent(),
                resting=self._resting(),
                alert=self._alert,
            )

    def drop(self) -> None:
        """End what is connected now; the next offer connects anew."""
        with self._lock:
            sender = self._sender
        if sender is not None:
            sender.close()

    def close(self) -> None:
        """End the link for good; transfers still open fail."""
        with self._lock:
            self._closed = True
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _connected(self) -> Sender:
        with self._lock:
            if self._closed:
                raise LinkError("the link was closed", "aborted")
            held = self._sender
            if held is not None and held.alive:
                if held.path == "tcp" and not held.busy and self._rdma_is_due():
                    self._sender = self._try_rdma() or held
                    if self._sender is not held:
                        held.close()
                return self._sender or held
            self._note_death()
            self._sender = None
            if held is not None:
                held.close()
            self._sender = self._form()
            return self._sender

    def _rdma_is_due(self) -> bool:
        return self._rdma is not None and not self._resting() and self._clock() >= self._retry_at

    def _try_rdma(self) -> Sender | None:
        try:
            return self._form_rdma(self._rdma) if self._rdma is not None else None
        except LinkError as error:
            if self._backend == "rdma":
                raise
            self._failed(str(error))
            return None

    def _form(self) -> Sender:
        if self._backend == "rdma" or self._rdma_is_due():
            made = self._try_rdma()
            if made is not None:
                return made
        return Sender.connect(
            self._addresses,
            self._secret,
            self._deadline,
            streams=self._streams,
            node=self._node,
            desk=self._desk,
        )

    def _form_rdma(self, how: Rdma) -> Sender:
        return rdma.connect(
            self._addresses[0],
            self._secret,
            how.epochs,
            self._deadline,
            fabric=how.fabric,
            devices=how.devices,
            host=how.host,
            command=how.command,
            desk=self._desk,
        )

    def _note_death(self) -> None:
        """Count an rdma link that broke since we last looked, once."""
        sender = self._sender
        if sender is None or sender.alive or sender is self._counted:
            return
        self._counted = sender
        if sender.path == "rdma":
            self._failed(str(sender.error))

    def _failed(self, reason: str) -> None:
        now = self._clock()
        self._retry_at = now + RETRY_SECONDS
        self._failures.append(now)
        log.warning("rdma failed, %d in the last %g s: %s", self._recent(), WINDOW_SECONDS, reason)
        if self._backend == "auto" and self._recent() >= FAILURES:
            self._rests_until = now + REST_SECONDS
            self._alert = f"rdma failed {FAILURES} times, tcp for {REST_SECONDS:g} s: {reason}"
            self._failures.clear()
            log.error("%s", self._alert)

    def _recent(self) -> int:
        now = self._clock()
        return sum(now - at <= WINDOW_SECONDS for at in self._failures)

    def _resting(self) -> bool:
        if self._clock() < self._rests_until:
            return True
        self._alert = ""
        return False
