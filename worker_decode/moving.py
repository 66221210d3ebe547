"""Sending live answers on to another decode node: their conversation's records, then their state.

Records go through the other store's RPC and are kilobytes; they are put there turn by turn, which
may be repeated. The state goes over a link like a prefill node's, as TCP: what is sent in a drain
is not worth a second cable map.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from engine.model import Model
from engine.prefill import ends_of
from engine.rows import Event
from scheduler.config import Config
from scheduler.homes import Homes, store_of, successor
from scheduler.leaving import Stays
from scheduler.nodes import Node, Nodes
from scheduler.record import Job
from scheduler.runs import Runs
from store.codec.header import Piece
from store.codec.pack import Exporter
from store.errors import StoreError
from store.outlet import Outlet
from store.rpc import StoreClient
from store.store import Store
from store.turns import Turn
from worker_decode.sealing import Seals
from worker_decode.starts import Start
from worker_decode.turns import conversation_of
from worker_prefill.handoff import Links

log = logging.getLogger("tandem.decode")

_LOOK = 0.5
_PATIENCE = 10.0
_LONG = 600.0


class Sender(Protocol):
    """What an engine needs to send its answers on."""

    def send(self, job: Job, heir: str, pieces: Sequence[Piece]) -> Mapping[str, Any]:
        """See Moving."""
        ...


def state_of(model: Model, event: Event, start: Start) -> list[Piece]:
    """The state of a row that was taken out, copied, snapshot last; empty where there is none.

    It tells how many tokens of the prompt no model had to compute for this turn. Runs on the
    engine's thread.
    """
    if event.caches is None or not event.ids:
        return []
    exporter = Exporter(model.layout, event.ids)
    ends = ends_of(event.schedule)
    pieces = exporter.rows(event.caches, len(event.ids), last=True, ends=ends)
    extra: dict[str, Any] = {"schedule": event.schedule, "rope_delta": start.after}
    if start.path != "cold" and start.cached:
        extra["lent"] = start.cached
    return [*pieces, exporter.snapshot(event.caches, extra)]


class Moving:
    """What a decode node leaves by. Thread-safe. See scheduler.leaving.Mover."""

    def __init__(
        self,
        config: Config,
        model: Model,
        store: Store,
        nodes: Nodes,
        runs: Runs,
        forget: Callable[[Iterable[str]], None],
        settle: Callable[[], None] = lambda: None,
        save: Callable[[str], None] = lambda turn: None,
    ) -> None:
        """`nodes`, `runs` have connections of their own; `forget(turns)` drops states from the
        engine's memory, `settle()` brings what is told of ended turns into the store, and
        `save(turn)` a turn's state, if it can."""
        self._config = config
        self._model = model
        self._store = store
        self._nodes = nodes
        self._runs = runs
        self._homes = Homes(runs.client)
        self._forget = forget
        self._settle = settle
        self._save = save
        self._lock = threading.Lock()
        self._links: Links | None = None
        #: Of each job: the node that has a copy of its conversation, and what was copied.
        self._copied: dict[str, tuple[str, Any]] = {}
        self._moving: set[str] = set()
        self.seals = Seals()
        self._outlet = Outlet(store, store.environment.path / "moves")
        self._node: Node | None = None
        self._looked = 0.0
        self._stopped = threading.Event()

    def heir(self) -> str:
        """The node that takes over; looked up at most twice a second."""
        now = time.monotonic()
        if now - self._looked >= _LOOK or self._looked == 0.0:
            found = successor(
                self._nodes.list("decode"), self._config.node, self._model.fingerprint.hex()
            )
            self._looked, self._node = now, found
        return self._node.name if self._node is not None else ""

    def prepare(self, job: Job, heir: str) -> None:
        """Copy the records of the job's conversation. Raises Stays, StoreError."""
        if not self._runs.alone(job):
            raise Stays("another answer of its conversation, or a branch of it, is under way")
        ident = conversation_of(job, self._store)
        now, node = self.heir(), self._node
        if node is None or now != heir:
            raise Stays(f"decode node {heir} is not there any more")
        self._settle()
        if not self._homes.claim(ident, self._config.node):
            raise Stays("an old copy of its conversation is being deleted")
        if self._store.get_conversation(ident) is not None:
            self._homes.settle(ident, self._config.node)  # else the copy might be taken for it
        with closing(store_of(node, _PATIENCE)) as there:
            self._copied[job.id] = heir, self._copy(there, ident, job.previous)

    def send(self, job: Job, heir: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Send a state, snapshot last, to decode node `heir`; the facts once it is there.

        Raises LinkError. No pieces are a state of no tokens, which need not go.
        """
        if not pieces:
            return {"path": "none", "reason": "nothing was computed yet"}
        *rows, snapshot = pieces
        handoff = self._linked().begin(
            replace(job, node=heir),
            fingerprint=self._model.fingerprint,
            tokens=snapshot.header.stop,
            nbytes=sum(piece.payload.nbytes for piece in pieces),
            block_tokens=self._model.layout.block_tokens,
        )
        if handoff.hopeless:
            handoff.give_up()
        handoff.send(rows)
        return handoff.finish(snapshot)

    def update(self, ident: str, **changes: Any) -> dict[str, Any]:
        """As `Store.update_conversation`; waits while the conversation's home changes."""
        return self.seals.change(ident, lambda: self._store.update_conversation(ident, **changes))

    @contextmanager
    def still(self, job: Job, heir: str) -> Iterator[None]:
        """Meanwhile nobody changes the conversation, whose copy at `heir` is brought up to date."""
        ident = conversation_of(job, self._store)
        with self.seals.sealed(ident):
            if self._copied.get(job.id) != (heir, self._known(ident)):  # renamed, say, since then
                node = self._nodes.get("decode", heir)
                if node is None:
                    raise StoreError(f"decode node {heir} is not there any more")
                with closing(store_of(node, _PATIENCE)) as there:
                    self._copied[job.id] = heir, self._copy(there, ident, job.previous)
            yield

    def left(self, job: Job) -> None:
        """Delete what is here of the conversation; its turns that others branch from stay."""
        ident = conversation_of(job, self._store)
        self._copied.pop(job.id, None)
        self._forget([job.id, *self._store.conversation_turns(ident)])
        self._store.delete_conversation(ident)
        self._homes.release(ident)

    def move(self, ident: str, to: str) -> dict[str, Any]:
        """Bring an idle conversation with its stored states to decode node `to`; what it was.

        Its pointer moves once all of it is there and verified; then what is here goes. Raises
        StoreError, and nothing has changed: where it is busy, or the other node cannot take it.
        """
        with self._lock:
            if ident in self._moving:
                raise StoreError(f"{ident} is on its way already")
            self._moving.add(ident)
        try:
            return self._move(ident, to)
        finally:
            with self._lock:
                self._moving.discard(ident)

    def _move(self, ident: str, to: str) -> dict[str, Any]:
        began, own = time.monotonic(), self._config.node
        node = self._nodes.get("decode", to)
        if node is None or node.state != "ready" or to == own:
            raise StoreError(f"decode node {to} is not another one that is ready")
        if node.fingerprint != self._model.fingerprint.hex():
            raise StoreError(f"decode node {to} serves another model")
        count, home = self._homes.count(ident), self._homes.of(ident)
        record = self._store.get_conversation(ident)
        if record is None or home not in ("", own):
            raise StoreError(f"{ident} is not at home on decode node {own}")
        if record["head"]:
            self._save(record["head"])
        self._settle()
        if not self._homes.claim(ident, own):
            raise StoreError(f"an old copy of {ident} is being deleted: try again")
        self._homes.settle(ident, own)  # else the copy might be taken for it
        with closing(store_of(node, _LONG)) as there:
            sent = send_bundle(there, ident, self._outlet)
            before = self._copy(there, ident)
            self._switch(there, ident, to, count, before)
        log.info("%s is at home on %s now", ident, to)
        seconds = round(time.monotonic() - began, 3)
        return {"conversation": ident, "from": own, "to": to, "seconds": seconds, **sent}

    def _switch(self, there: StoreClient, ident: str, to: str, count: int, copied: Any) -> None:
        """Have the copy be the conversation, and delete this one. Raises StoreError."""
        own = self._config.node
        with self.seals.sealed(ident):
            if self._known(ident) != copied:  # renamed, say, in the meantime
                self._copy(there, ident)
            moved = self._homes.switch(ident, own, to, count)
            if self._store.get_conversation(ident) is None and (
                moved or self._homes.of(ident) in ("", own)
            ):
                # Who deleted it did so before the copy was there, or does so now.
                there.delete_conversation(ident)
                self._homes.forget(ident)
                self._homes.release(ident)
                raise StoreError(f"{ident} was deleted while it was copied")
            if not moved:
                raise StoreError(f"{ident} is busy: try again when its answer has ended")
            self._forget(self._store.conversation_turns(ident))
            self._store.delete_conversation(ident)
            self._homes.release(ident)

    def _copy(self, there: StoreClient, ident: str, previous: str | None = None) -> Any:
        own, before = self._config.node, self._known(ident)
        copy_records(self._store, there, ident, previous, lambda o: self._homes.settle(o, own))
        return before

    def _known(self, ident: str) -> Any:
        return self._store.get_conversation(ident), self._store.conversation_turns(ident)

    def clear(self) -> None:
        """Delete what earlier moves have left here; logs what goes wrong."""
        try:
            own = self._config.node
            gone = clear_strays(
                self._store, self._homes, self._nodes, own, self._forget, self._stopped.is_set
            )
            if gone:
                log.info("%d conversations had gone to other nodes", gone)
        except Exception as error:
            log.warning("copies of conversations that moved were not looked for: %s", error)

    def stop(self) -> None:
        """Look for no more copies."""
        self._stopped.set()

    def close(self) -> None:
        """End the links."""
        if self._links is not None:
            self._links.close()

    def _linked(self) -> Links:
        with self._lock:
            if self._links is None:
                link = self._config.link.model_copy(update={"backend": "tcp"})
                self._links = Links(self._nodes, link, self._config.node)
            return self._links


def copy_records(
    store: Store,
    there: StoreClient,
    conversation: str,
    previous: str | None,
    settle: Callable[[str], None],
) -> None:
    """Put a conversation, and what its turns and `previous` go on from, into another store too.

    `settle(conversation)` is told of others that the turns come from, before they are copied: those
    stay at home here. Raises StoreError.
    """
    turns: dict[str, Turn] = {}
    record = store.get_conversation(conversation)
    known = store.conversation_turns(conversation) if record is not None else []
    for name in [*known, *([previous] if previous else [])]:
        if name not in turns:
            turns |= {turn.id: turn for turn in store.path(name)}
    for other in {turn.conversation for turn in turns.values()} - {conversation}:
        settle(other)
    if record is not None:
        added = int(record.get("added", 0))
        items = record["items"]
        first, later = items[: len(items) - added], items[len(items) - added :]
        there.call(
            "create_conversation",
            ident=conversation, owner=record["owner"], metadata=record["metadata"],
            items=first, created=record["created"],
        )  # fmt: skip
    for turn in turns.values():
        there.put_turn(turn)
    if record is None:
        return
    copied = there.get_conversation(conversation) or {}
    missing = later[int(copied.get("added", 0)) :]
    there.update_conversation(
        conversation,
        metadata=record["metadata"],
        pinned=record["pinned"],
        last_used=record["last_used"],
        **({"add_items": missing} if missing else {}),
    )


def send_bundle(there: StoreClient, ident: str, outlet: Outlet) -> dict[str, Any]:
    """Put a conversation with its states into another store: counts. Raises StoreError."""
    made = outlet.open(ident)
    name, done = made["name"], 0
    try:
        inlet = there.call("import_open", nbytes=made["bytes"])
        try:
            while part := outlet.read(name, done):
                there.call("import_write", name=inlet, data=part)
                done += len(part)
            found: dict[str, Any] = there.call("import_end", name=inlet)
        finally:
            with suppress(StoreError):
                there.call("import_close", name=inlet)
    finally:
        outlet.close(name)
    if found.get("renamed"):
        there.delete_conversation(found["conversation"])
        raise StoreError(f"the ids of {ident} are taken by something else there")
    return {"turns": found["turns"], "states": found["states"], "bytes": made["bytes"]}


def clear_strays(
    store: Store,
    homes: Homes,
    nodes: Nodes,
    own: str,
    forget: Callable[[Iterable[str]], None],
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Delete copies of conversations whose home is another node, which has all of their turns.

    They are what a move leaves where a process died in it. Returns how many there were.
    """
    others = {
        node.name: store_of(node, _PATIENCE) for node in nodes.list("decode") if node.name != own
    }
    found = 0
    before: tuple[str, float] | None = None
    while others and (page := store.list_conversations(None, 500, None, before)):
        before = (page[-1]["id"], float(page[-1]["created"]))
        for record, home in zip(page, homes.of_all([one["id"] for one in page]), strict=True):
            if stopped():
                return found
            if home not in others:
                continue
            ident = record["id"]
            theirs = set(others[home].conversation_turns(ident))
            ours = store.conversation_turns(ident)
            if others[home].get_conversation(ident) is None or not theirs.issuperset(ours):
                log.warning("%s is at home on %s, which does not have all of it", ident, home)
                continue
            if not homes.clearing(ident, own):
                continue  # it is on its way here
            try:
                if homes.of(ident) == home:
                    forget(ours)
                    found += bool(store.delete_conversation(ident))
            finally:
                homes.release(ident)
    for client in others.values():
        client.close()
    return found
