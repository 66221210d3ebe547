"""Every fault at every stage by either end over every backend: bounded, contained, made good.

The state is a tiny model's. However often it has to be offered, or if it is given up: what is
decoded in the end is what one process alone answers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from fault_cells import Cell, FaultySink, Hands, cells, children
from link_parts import (
    FINGERPRINT,
    LONG,
    SECRET,
    contents,
    link_threads,
    make_state,
    open_files,
    receiving,
)
from link_redis import client, redis_socket
from model_dirs import make_tiny_model
from redis_kit import eventually

from engine.decode import Batch
from engine.device import prepare
from engine.model import Model, load
from engine.prefill import Prefill
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.solo import answer
from store.codec.header import Piece
from store.codec.pack import Exporter
from store.codec.unpack import Importer
from transport import batch, exchange, sidecar
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.link import Link, Rdma
from transport.receiver import Receiver
from transport.sender import Sender

__all__ = ["client", "redis_socket"]

DEADLINE = 3.0
"""Of the link that meets the fault."""
SOUND = LONG
"""Of the others: a machine that stalls is no fault of theirs."""
PART = 16 << 10
SLOT = 64 << 10
"""Small batches, so that a small state has many: where the fault strikes is then a choice."""
BOUND = 240.0
TRIES = 3
HERE = Path(__file__).parent
PARAMS = SamplingParams(max_tokens=4)
SOAK = bool(os.environ.get("TANDEM_SOAK"))


class Node:
    """Both nodes of a cell: a receiver, and links to it as they are formed anew."""

    def __init__(self, cell: Cell, client: redis.Redis, stack: contextlib.ExitStack) -> None:
        self.cell = cell
        self.hands = Hands(cell)
        self.sink = FaultySink(self.hands)
        self.rdma: Rdma | None = None
        epochs = None
        command: tuple[str, ...] = ()
        if cell.way != "tcp":
            mesh = f"{tempfile.gettempdir()}/tandem-mesh-{secrets.token_hex(6)}"
            command = (
                sys.executable, "-P", str(HERE / "fault_child.py"),
                str(self.hands.trigger), mesh if cell.way == "jaccl" else "", str(SLOT),
            )  # fmt: skip
            ends = Epochs(client, "prefill-1"), Epochs(client, "decode-1")
            for end in ends:
                end.start()
                stack.callback(end.stop)
            self.rdma = Rdma(ends[0], "ring", command=command)
            epochs = ends[1]
        more = {"epochs": epochs, "command": command} if epochs else {}
        self.receiver: Receiver = stack.enter_context(
            receiving(self.sink, SOUND, part=PART, **more)
        )
        self.links: list[Link] = []
        stack.callback(lambda: [link.close() for link in self.links])
        stack.callback(self.hands.released.set)
        self.problems: list[BaseException] = []

    def link(self, *, first: bool) -> Link:
        """A link of the cell's backend; later ones fall back to tcp, but in the long run."""
        backend = "tcp" if self.rdma is None or (not first and not SOAK) else "rdma"
        made = Link(
            self.receiver.address, SECRET, backend=backend, rdma=self.rdma,
            deadline=DEADLINE if first else SOUND, node="prefill-1",
        )  # fmt: skip
        self.links.append(made)
        return made

    def first(self, link: Link, state: list[Piece]) -> None:
        """The first attempt, which meets the fault."""
        try:
            self._deliver(link, state)
        except LinkError:
            pass
        except BaseException as error:
            self.problems.append(error)

    def _reach(self, stage: str) -> None:
        hands, cell = self.hands, self.cell
        if stage != cell.stage:
            return
        later = cell.side == "receiver" and stage in ("ready", "mid", "ack")
        if later and cell.fault in ("die", "freeze", "stall", "epoch", "abort", "refuse"):
            return  # the sink does it, at exactly that stage
        if cell.fault == "abort" and cell.side == "sender":
            raise LinkError("given up", "aborted")
        hands.arm()
        if stage == "idle" or (later and stage != "ack"):
            hands.struck.wait(DEADLINE)  # a message has to pass

    def _arrived(self, count: int) -> None:
        """Wait until so many pieces have been taken, or the link has broken before."""
        sender = self.hands.sender
        eventually(
            lambda: not sender.alive or self.sink.events.count(("piece", "t-1")) >= count,
            f"not {count} pieces",
        )

    def _deliver(self, link: Link, state: list[Piece]) -> None:
        rows, snapshot = state[:-1], state[-1]
        nbytes = sum(piece.payload.nbytes for piece in state)
        header = snapshot.header
        transfer = None
        try:
            self._reach("idle")
            self._reach("offer")
            transfer = link.offer(
                "t-1", fingerprint=header.fingerprint, tokens=header.stop, nbytes=nbytes
            )
            self._reach("ready")
            transfer.send(rows[:6])
            if self.cell.stage == "mid":
                self._arrived(3)
            self._reach("mid")
            transfer.send(rows[6:])
            if self.cell.stage == "ack" and self.cell.by_data:
                self._arrived(len(rows))
            self._reach("ack")
            transfer.finish(snapshot)
        except LinkError as error:
            if transfer is not None:
                transfer.abort(str(error))
            elif self.cell.fault == "abort":
                link.drop()
            raise

    def again(self, state: list[Piece]) -> int:
        """Offer the same state again until it is acknowledged; how many attempts it took."""
        header = state[-1].header
        nbytes = sum(piece.payload.nbytes for piece in state)
        for attempt in range(2, 6):
            link = self.link(first=False)
            try:
                transfer = link.offer(
                    "t-1", fingerprint=header.fingerprint, tokens=header.stop, nbytes=nbytes,
                    attempt=attempt,
                )  # fmt: skip
                transfer.send(state[:-1])
                transfer.finish(state[-1])
                return attempt
            except LinkError:
                link.close()
        raise AssertionError("the state never arrived")


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch, exchange, sidecar):
        monkeypatch.setattr(module, "SLOT", SLOT)


@pytest.fixture(autouse=True)
def _nothing_is_left(client: redis.Redis) -> Iterator[None]:
    client.connection_pool.disconnect()
    files = open_files()
    yield
    client.connection_pool.disconnect()
    assert link_threads() == []  # each ends its child
    assert children() == {}
    assert open_files() <= files


def form(node: Node, link: Link) -> None:
    """Connect; once more where a stall of the machine was too long for that."""
    try:
        link._connected()
    except LinkError:
        sessions = node.receiver._sessions
        eventually(lambda: len(sessions) == 1, "more than the bystander's link is left")
        link._connected()


def run_cell(cell: Cell, client: redis.Redis, state: list[Piece]) -> list[Piece] | None:
    """Play a cell to its end; returns what the receiver has then.

    None where the fault has not come about: the link broke before, as on a machine that stalls.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        node = Node(cell, client, stack)
        node.sink.models.add(state[-1].header.fingerprint)
        bystander = Sender.connect(node.receiver.address, SECRET, SOUND, node="other")
        stack.callback(bystander.close)
        aside = make_state([1000] * 6 + [2000], seed=3)
        other = bystander.offer("t-other", fingerprint=FINGERPRINT, tokens=96, nbytes=8000)
        other.send(aside[:2])
        link = node.link(first=True)
        node.receiver.deadline = DEADLINE  # of the link that is formed now
        form(node, link)
        node.receiver.deadline = SOUND
        node.hands.seize(link, node.receiver)
        first = threading.Thread(target=node.first, args=(link, state))
        first.start()
        frozen = cell.side == "sender" and cell.fault == "freeze"
        if frozen and node.hands.struck.wait(20):
            sessions = node.receiver._sessions
            limit = time.monotonic() + 60
            while node.hands.session in sessions.values():  # its own end is of no help
                assert time.monotonic() < limit, "the receiver holds on to a frozen sender"
                time.sleep(0.02)
        else:
            first.join(BOUND)
            assert not first.is_alive(), "the first attempt hangs"
        if cell.side == "receiver":
            node.hands.released.set()  # one that is stuck takes nothing until it goes on
        else:
            other.send(aside[2:4])
        attempts = node.again(state)
        other.send(aside[4:6] if cell.side == "sender" else aside[2:6])
        other.finish(aside[6])
        node.hands.released.set()
        first.join(BOUND)
        assert not first.is_alive()
        assert not node.problems, node.problems
        node.hands.trigger.unlink(missing_ok=True)
        if not node.hands.struck.is_set() and cell.fault != "abort":
            return None
        assert time.monotonic() - begun < BOUND
        assert attempts <= 4
        sink = node.sink
    assert contents(sink.finished["t-other"]) == contents(aside)
    assert sink.events.count(("done", "t-1")) <= 2
    assert sink.held == 0
    return sink.finished["t-1"]


TCP = [cell for cell in cells() if cell.way == "tcp"]
RDMA = [cell for cell in cells() if cell.way != "tcp"]


@dataclass
class Solo:
    """A tiny model, a prompt, its state as a prefill node sends it, and what it answers alone."""

    model: Model
    ids: list[int]
    state: list[Piece]
    tokens: list[int]


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Solo:
    model = load(make_tiny_model(tmp_path_factory.mktemp("matrix") / "tiny"), prepare())
    model.layout = replace(model.layout, value_bytes=20_000)
    ids = [3 + i * 7 % 200 for i in range(260)]
    prefill = Prefill(model, ids)
    prefill.run()
    exporter = Exporter(model.layout, ids)
    rows = exporter.rows(prefill.caches, len(ids) - 1, last=True)
    state = [*rows, exporter.snapshot(prefill.caches, {"schedule": [], "rope_delta": 0})]
    assert len(rows) >= 10
    alone = answer(model, ids, prefill.schedule, PARAMS)
    return Solo(model, ids, state, alone.tokens)


def check(cell: Cell, client: redis.Redis, solo: Solo) -> None:
    """Play a cell; what arrived in the end must decode to what one process answers alone."""
    for _ in range(TRIES):
        arrived = run_cell(cell, client, solo.state)
        if arrived is not None:
            break
    else:
        raise AssertionError("the fault has never come about")
    model = solo.model
    importer = Importer(model.layout, model.fresh_cache(), model.fingerprint, len(solo.ids))
    importer.add_all(arrived[:-1])
    caches = list(importer.finish(arrived[-1]))
    decoding = Batch(model, 1)
    decoding.add(Row(caches, solo.ids[:-1], solo.ids[-1:], PARAMS))
    tokens: list[int] = []
    while len(decoding):
        tokens += [event.token for event in decoding.step() if event.token is not None]
    assert tokens == solo.tokens


@pytest.mark.rotate(10)
@pytest.mark.parametrize("cell", TCP, ids=lambda cell: cell.id)
def test_over_tcp(cell: Cell, client: redis.Redis, solo: Solo) -> None:
    check(cell, client, solo)


@pytest.mark.rotate(40)
@pytest.mark.parametrize("cell", RDMA, ids=lambda cell: cell.id)
def test_over_rdma(cell: Cell, client: redis.Redis, solo: Solo, small_slots: None) -> None:
    check(cell, client, solo)
