"""States cross an rdma link: child processes with a real two-rank group, here over ring.

Every fault is tried on plain ring and on ring with JACCL's failure semantics, where nothing is
ever raised and only a deadline from outside ends a wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from fault_cells import children
from link_parts import (
    FINGERPRINT,
    LONG,
    SECRET,
    MemorySink,
    contents,
    deliver,
    link_threads,
    make_state,
    open_files,
    receiving,
    session_of,
)
from link_redis import client, redis_socket
from link_rogues import RogueSender

from transport import rdma, sidecar
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.protocol import Form, Meet
from transport.receiver import Receiver
from transport.sender import Sender
from transport.sidecar import COMMAND, Plan, Sidecar

__all__ = ["client", "redis_socket"]

DEADLINE = 3.0
"""For who is found out by it, from then on; until then, and between sound ends, it is LONG."""
SOAK = bool(os.environ.get("TANDEM_SOAK"))
HERE = Path(__file__).parent
STATE = make_state([1_000_000] * 20 + [40_000_000, 20_000_000], seed=5)
"""More than the slots of both ends hold, so that a blow always comes before the last batch."""


@dataclass
class Ends:
    """Both nodes' epochs, and how their children are started."""

    sender: Epochs
    receiver: Epochs

    def connect(self, receiver: Receiver, command: tuple[str, ...] = COMMAND) -> Sender:
        receiver._command = command
        return rdma.connect(
            receiver.address, SECRET, self.sender, LONG, fabric="ring", command=command
        )


@pytest.fixture
def ends(client: redis.Redis) -> Iterator[Ends]:
    """Two live nodes; afterwards no child, thread or descriptor of theirs is left."""
    client.connection_pool.disconnect()
    files = open_files()
    made = Ends(Epochs(client, "prefill-1"), Epochs(client, "decode-1"))
    made.sender.start()
    made.receiver.start()
    yield made
    made.sender.stop()
    made.receiver.stop()
    assert link_threads() == []  # each ends its child
    assert children() == {}
    client.connection_pool.disconnect()
    assert open_files() <= files


def faulty(fault: str, shim: bool) -> tuple[str, ...]:
    path = f"{tempfile.gettempdir()}/tandem-mesh-{secrets.token_hex(6)}" if shim else ""
    return (sys.executable, "-P", str(HERE / "fault_child.py"), fault, path)


@pytest.mark.parametrize("shim", [False, True], ids=["ring", "jaccl"])
def test_states_cross_and_the_epoch_is_up(ends: Ends, shim: bool) -> None:
    sink = MemorySink()
    states = [STATE, make_state([0]), make_state([1, 0, 5]), make_state([3_000_000] * 9)]
    with receiving(sink, epochs=ends.receiver) as receiver:
        sender = ends.connect(receiver, faulty("none", shim))
        assert ends.sender.record("prefill-1", "decode-1").state == "up"
        for i, state in enumerate(states):
            report = deliver(sender, f"t-{i}", state)
            assert report.path == "rdma"
            assert contents(sink.finished[f"t-{i}"]) == contents(state)
        sender.close()
    assert ends.sender.record("prefill-1", "decode-1").state == "over"


def test_two_transfers_at_once_share_a_link(ends: Ends) -> None:
    sink = MemorySink()
    first, second = make_state([4_000_000] * 6, 1), make_state([5_000_000] * 5, 2)
    with receiving(sink, epochs=ends.receiver) as receiver:
        sender = ends.connect(receiver)
        thread = threading.Thread(target=deliver, args=(sender, "t-a", first))
        thread.start()
        deliver(sender, "t-b", second)
        thread.join(60)
        sender.close()
    assert contents(sink.finished["t-a"]) == contents(first)
    assert contents(sink.finished["t-b"]) == contents(second)


@pytest.mark.rotate(2)
@pytest.mark.parametrize("shim", [False, True], ids=["ring", "jaccl"])
def test_a_damaged_batch_header_is_noticed(ends: Ends, shim: bool) -> None:
    """The other faults are in test_fault_matrix."""
    sink = MemorySink()
    with receiving(sink, epochs=ends.receiver) as receiver:
        sender = ends.connect(receiver, faulty("header", shim))
        with pytest.raises(LinkError):
            deliver(sender, "t-1", STATE)
        sender.close()
        sink.wait_for("abort", "t-1")
        again = ends.connect(receiver)
        deliver(again, "t-1", STATE, attempt=2)
        again.close()
    assert contents(sink.finished["t-1"]) == contents(STATE)
    assert sink.events.count(("done", "t-1")) == 1
    assert sink.held == 0


def test_nothing_is_left_after_many_failures(ends: Ends) -> None:
    sink = MemorySink()
    state = make_state([3_000_000] * 6 + [10])
    with receiving(sink, epochs=ends.receiver) as receiver:
        for i in range(100 if SOAK else 5):
            sender = ends.connect(receiver)
            transfer = sender.offer(
                "t-1", fingerprint=FINGERPRINT, tokens=1, nbytes=18_000_010, attempt=i + 1
            )
            transfer.send(state[: i % 7])
            if i % 2:
                os.kill(children()[i // 2 % 2], signal.SIGKILL)
            sender.close()
            sink.wait_for("abort", "t-1", i + 1)
    assert sink.held == 0


def test_two_ranks_never_have_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([20_001, 20_001, 20_001, 20_002])
    monkeypatch.setattr(sidecar, "free_port", lambda host: next(draws))
    first = sidecar.ring_address("127.0.0.1")
    assert sidecar.ring_address("127.0.0.1", first) == "127.0.0.1:20002"


def test_a_child_does_not_outlive_its_parent_nor_does_a_file(tmp_path: Path) -> None:
    code = (
        "import time; from transport.sidecar import *;"
        "hosts = tuple(f'127.0.0.1:{free_port(\"127.0.0.1\")}' for _ in range(2));"
        "s = Sidecar(Plan('ring', 0, 1, bytes(16), hosts), 2.0);"
        "print(s.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    limit = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < limit, "the child is still there"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_held_for_a_child_that_ends_before_it_is_told_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = subprocess.Popen

    def ended(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = started(*command, **options)
        child.wait(60)
        return child

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", ended)
    files = open_files()
    plan = Plan("ring", 0, 1, bytes(16), ("127.0.0.1:1", "127.0.0.1:2"), command=("false",))
    with pytest.raises(LinkError, match="has ended"):
        Sidecar(plan)
    assert open_files() <= files
    assert link_threads() == []
    assert list(tmp_path.iterdir()) == []


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def test_mlx_versions_that_differ_are_named(ends: Ends) -> None:
    with receiving(MemorySink(), epochs=ends.receiver) as receiver:
        receiver.hello = replace(receiver.hello, mlx="9.9.9")
        with pytest.raises(LinkError, match=r"the same mlx .* here, 9\.9\.9 on decode-1") as caught:
            ends.connect(receiver)
        assert caught.value.code == "version"


def test_a_receiver_without_epochs_forms_no_group(ends: Ends) -> None:
    with (
        receiving(MemorySink(), node="decode-1") as receiver,
        pytest.raises(LinkError, match="not alive"),
    ):
        ends.connect(receiver)


def test_a_form_of_another_epoch_is_refused(ends: Ends) -> None:
    with receiving(MemorySink(), epochs=ends.receiver) as receiver:
        rogue = RogueSender(receiver.address, streams=0, node="prefill-1")
        ends.sender.form("decode-1", ends.receiver.boot, bytes(16))
        rogue.control.send(Form(2, bytes(16), "ring", "127.0.0.1:1"))
        assert rogue.ended()
        rogue.close()
    assert children() == {}


def test_a_group_whose_other_member_never_comes_is_given_up(ends: Ends) -> None:
    with receiving(MemorySink(), epochs=ends.receiver) as receiver:
        rogue = RogueSender(receiver.address, streams=0, node="prefill-1")
        epoch = ends.sender.form("decode-1", ends.receiver.boot, bytes(16))
        rogue.control.send(Form(epoch, bytes(16), "ring", "127.0.0.1:1"))
        assert isinstance(rogue.answer(), Meet)
        session_of(receiver, "prefill-1").deadline = DEADLINE
        assert rogue.ended()  # it sends no sign of life either
        rogue.close()
    assert ends.sender.record("prefill-1", "decode-1").state == "over"


def test_what_a_hand_off_costs_the_control_plane(ends: Ends, client: redis.Redis) -> None:
    state = make_state([1_048_512] * 30 + [15_000_000])
    with receiving(MemorySink(), epochs=ends.receiver) as receiver:
        ends.sender.stop()
        ends.receiver.stop()
        before = client.info("commandstats")
        sender = ends.connect(receiver)
        deliver(sender, "t-1", state)
        used = sender.control_bytes
        sender.close()
    after = client.info("commandstats")
    trips = {
        name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"]
        for name in ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_set")
        if name in after
    }
    assert sum(trips.values()) <= 30, trips
    assert used <= 64 << 10
