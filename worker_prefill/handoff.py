"""Hand-offs to decode nodes: one link per node, formed when needed, formed anew when it breaks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.config import LinkConfig
from scheduler.nodes import Node, Nodes
from scheduler.record import Job
from scheduler.redis_client import AWAY
from store.codec.header import Piece
from transport.desk import Desk
from transport.errors import LinkError, Refused
from transport.link import Link, Rdma
from transport.outbound import Transfer
from worker_prefill.borrow import Loan, Loans

log = logging.getLogger("tandem.prefill")

ATTEMPTS = 3
#: Room for what a snapshot holds beyond the layout's estimate.
_SLACK = 1 << 20
_TELLING = 64 << 10
#: Refusals of a loan that another link would not change.
_FINAL = ("missing", "memory", "busy", "fingerprint", "version")


@dataclass(frozen=True)
class Borrowed:
    """A state that a decode node has lent: its pieces, snapshot last, and what it cost."""

    pieces: list[Piece]
    facts: dict[str, Any]


class Links:
    """The links of this prefill node, by decode node. Thread-safe.

    `reason`: why they are of the kind they are, for reports.
    """

    reason = ""

    def __init__(
        self, nodes: Nodes, config: LinkConfig, node: str, rdma: Rdma | None = None
    ) -> None:
        """`rdma` is what an rdma link needs where this machine has it."""
        self._rdma = rdma
        self._nodes = nodes
        self._config = config
        self._node = node
        self._lock = threading.Lock()
        self._links: dict[str, tuple[str, Link]] = {}
        self._loans = Loans()
        self._desk = Desk(self._loans, config.deadline_seconds)

    def begin(
        self,
        job: Job,
        *,
        fingerprint: bytes,
        tokens: int,
        nbytes: int,
        block_tokens: int,
        start: int = 0,
        apart: int = 0,
    ) -> Handoff:
        """A hand-off of `tokens` positions to the job's decode node, offered at once if it is up.

        Where it is not, pieces are kept and offered again at the end of the prefill. Rows before
        `start` are there already. `apart`: bytes of snapshots within the prompt, which are left
        out where the decode node has no memory for them.
        """
        offer = {
            "response": job.id,
            "fingerprint": fingerprint,
            "tokens": tokens,
            "nbytes": nbytes + _SLACK,
            "block_tokens": block_tokens,
            "start": start,
        }
        # A job that runs again makes a new transfer: its older one may have been acknowledged.
        return Handoff(self, job.node, f"{job.id}-{job.run[:8]}", offer, apart)

    def borrow(
        self, job: Job, *, fingerprint: bytes, nbytes: int, check: Callable[[], None]
    ) -> Borrowed:
        """The state before the job's new turn, of at most `nbytes`, from its decode node.

        What `check` raises while this waits passes. A link that breaks is formed anew, once.
        Raises LinkError: with code "missing" where the decode node has no such state.
        """
        begun = time.monotonic()
        try:
            pieces, path = self._borrow(job, "loan", fingerprint, nbytes, check)
        except LinkError as error:
            if error.code in _FINAL:
                raise
            log.warning("loan for %s: %s; asking again", job.id, error)
            pieces, path = self._borrow(job, "loan-2", fingerprint, nbytes, check)
        moved = sum(piece.payload.nbytes for piece in pieces)
        seconds = time.monotonic() - begun
        tokens = pieces[-1].header.stop
        return Borrowed(
            pieces, {"tokens": tokens, "bytes": moved, "seconds": seconds, "path": path}
        )

    def _borrow(
        self, job: Job, suffix: str, fingerprint: bytes, nbytes: int, check: Callable[[], None]
    ) -> tuple[list[Piece], str]:
        if not job.previous:
            raise LinkError("the job continues no turn", "missing")
        name = f"{job.id}-{job.run[:8]}-{suffix}"
        loan = Loan(fingerprint, job.held_tokens, nbytes + _SLACK)
        with self._loans.expect(name, loan):
            try:
                path = self.link(job.node).ask(
                    name,
                    turn=job.previous,
                    response=job.id,
                    fingerprint=fingerprint,
                    tokens=job.held_tokens,
                    refused=loan.fail,
                )
                pieces = loan.wait(self._config.deadline_seconds, check)
            except BaseException as error:
                self._desk.abort(name, f"not wanted any more: {error}")
                raise
        return pieces, path

    def link(self, name: str) -> Link:
        """The link to decode node `name` as it runs now. Raises LinkError where there is none."""
        try:
            node = self._nodes.get("decode", name)
        except AWAY as error:
            raise LinkError(f"Redis, where decode nodes are listed, is away: {error}") from error
        if node is None or not node.link:
            raise LinkError(f"decode node {name!r} is not there, or still loading its model")
        with self._lock:
            boot, link = self._links.get(name, ("", None))
            if link is not None and boot == node.boot:
                return link
            made = self._to(node)
            self._links[name] = (node.boot, made)
        if link is not None:
            link.close()
        return made

    def wait(self, name: str) -> None:
        """Wait until decode node `name` is ready, at most the link's deadline."""
        with contextlib.suppress(TimeoutError, *AWAY):
            self._nodes.wait_for("decode", name, self._config.deadline_seconds)

    def close(self) -> None:
        """End all links."""
        with self._lock:
            links = [link for _, link in self._links.values()]
            self._links.clear()
        self._desk.close()
        for link in links:
            link.close()
        self._desk.join(self._config.deadline_seconds)

    def _to(self, node: Node) -> Link:
        host, _, port = node.link.rpartition(":")
        return Link(
            (host, int(port)),
            bytes.fromhex(node.secret),
            backend=self._config.backend,
            rdma=self._rdma,
            deadline=self._config.deadline_seconds,
            streams=self._config.streams,
            node=self._node,
            desk=self._desk,
        )


def _rate(nbytes: int, seconds: float) -> dict[str, float]:
    """The link's bytes per second, from a transfer that is long enough to tell."""
    return {"link_rate": nbytes / seconds} if nbytes >= _TELLING and seconds > 0 else {}


class Handoff:
    """One state on its way. `send` never raises: a link that fails is tried again at the end."""

    def __init__(
        self, links: Links, node: str, name: str, offer: dict[str, Any], apart: int = 0
    ) -> None:
        self._links = links
        self._apart = apart
        self._bare = False  # snapshots within the prompt are left out
        self._node = node
        self._name = name
        self._offer = offer
        self._pieces: list[Piece] = []
        self._attempt = 0
        self._transfer: Transfer | None = None
        self._errors: list[str] = []
        self._try_offer()

    def send(self, pieces: Sequence[Piece]) -> None:
        """Queue rows; they leave in the background. Kept until the receiver has acknowledged."""
        if self._bare:
            pieces = _rows(pieces)
        self._pieces += pieces
        if self._transfer is not None:
            self._push(pieces)

    def finish(self, snapshot: Piece) -> dict[str, Any]:
        """Send what is left and wait for the last word; returns the facts of the hand-off.

        Waits for a decode node that is starting. Raises LinkError when `ATTEMPTS` attempts have
        failed: the decode node computes then.
        """
        while self._transfer is not None or self._attempt < ATTEMPTS:
            if self._transfer is None:
                self._links.wait(self._node)
                self._try_offer()
                self._push(self._pieces)
            if self._transfer is None:
                continue
            try:
                report = self._transfer.finish(snapshot)
            except LinkError as error:
                self._failed(error)
                continue
            moved = sum(piece.payload.nbytes for piece in (*self._pieces, snapshot))
            self._pieces.clear()
            return {
                "bytes": moved if report.duplicate else report.bytes,
                "seconds": report.seconds,
                "exposed_seconds": report.exposed_seconds,
                "path": report.path,
                **_rate(report.exposed_bytes, report.exposed_seconds),
                "streams": report.streams,
                "attempts": self._attempt,
                **({"errors": self._errors} if self._errors else {}),
            }
        self._pieces.clear()
        raise LinkError(self._errors[-1] if self._errors else "the link failed")

    @property
    def hopeless(self) -> bool:
        """True once no attempt is left: the two nodes do not serve the same model."""
        return self._transfer is None and self._attempt >= ATTEMPTS

    def give_up(self) -> dict[str, Any]:
        """Raises the LinkError that made the hand-off hopeless."""
        raise LinkError(self._errors[-1])

    def abandon(self, reason: str) -> None:
        """Give the state up: nobody will decode it."""
        self._pieces.clear()
        if self._transfer is not None:
            self._transfer.abort(reason)

    def _try_offer(self) -> None:
        self._attempt += 1
        try:
            link = self._links.link(self._node)
            offer = {**self._offer, "nbytes": self._offer["nbytes"] + self._apart}
            self._transfer = link.offer(self._name, attempt=self._attempt, **offer)
        except LinkError as error:
            self._failed(error)
            if isinstance(error, Refused) and error.code in ("fingerprint", "version"):
                self._attempt = ATTEMPTS  # no later attempt would fare better
            elif isinstance(error, Refused) and error.code == "memory" and self._apart:
                self._apart, self._bare = 0, True
                self._pieces = _rows(self._pieces)

    def _push(self, pieces: Sequence[Piece]) -> None:
        if self._transfer is None:
            return
        try:
            self._transfer.send(pieces)
        except LinkError as error:
            self._failed(error)

    def _failed(self, error: LinkError) -> None:
        if self._transfer is not None:
            self._transfer.abort(str(error))  # the receiver frees what it has of it
            self._transfer = None
        self._errors.append(str(error))
        log.warning("hand-off of %s, attempt %d: %s", self._name, self._attempt, error)


def _rows(pieces: Sequence[Piece]) -> list[Piece]:
    """Without the snapshots within a prompt."""
    return [piece for piece in pieces if piece.header.kind == "rows"]
