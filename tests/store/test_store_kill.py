"""The owner is killed at random points under load; nothing that was acknowledged may be missing."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import lmdb.verify
from kill_worker import SIZE, ids_of
from made_states import MODEL, make_state

from store.store import Store

KILLS = 200 if os.environ.get("TANDEM_SOAK") else 10
WORKER = Path(__file__).with_name("kill_worker.py")


@dataclass
class Told:
    """What the worker has acknowledged, over all its lives."""

    turns: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    begun: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Turns of which at least the beginning was told: one may be stored, and be continued by the
    next life, whose acknowledgement the kill cut off."""
    states: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    """The conversation whose deletion was begun last, until a look into the store decides."""
    operations: int = 0
    recovered: int = 0
    open_seconds: list[float] = field(default_factory=list)

    def read(self, lines: list[str]) -> None:
        begun: list[str] = []
        for line in lines:
            words = line.split()
            if words[0] == "ready":
                self.open_seconds.append(float(words[1]))
                self.recovered += int(words[2])
            elif words[0] == "?drop":
                self.dropped.add(words[1])
            elif words[0].startswith("?"):
                begun = words
                if words[0] == "?turn":
                    self.begun[words[1]] = (words[2], words[3], int(words[4]))
            else:
                self.operations += 1
                begun = []
                self.note(*words)
        # The last one begun may or may not have happened.
        self.doubtful = set(begun[1:2]) if begun[:1] == ["?gone"] else set()

    def note(self, kind: str, ident: str, *rest: str) -> None:
        if kind == "turn":
            self.turns[ident] = (rest[0], rest[1], int(rest[2]))
        elif kind == "state":
            self.states[ident] = int(rest[0])
        else:
            self.gone.add(ident)


def one_life(path: Path, seed: str, seconds: float) -> list[str]:
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(path), seed],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert worker.stdout is not None
    assert worker.stderr is not None
    with worker:
        first = worker.stdout.readline()
        timer = threading.Timer(seconds, worker.kill)
        timer.start()
        rest = worker.stdout.read()
        error = worker.stderr.read()
        timer.join()
    assert first.startswith("ready"), error
    assert not error, error
    return [first, *rest[: rest.rfind("\n") + 1].splitlines()]


def full_ids(told: Told, turn: str) -> list[int]:
    _, parent, count = told.begun[turn]
    return ([] if parent == "None" else full_ids(told, parent)) + ids_of(turn, count)


def verify(store: Store, told: Told, chance: random.Random) -> None:
    report = store.check()
    assert report.clean, report.problems
    assert store.stats()["pending"] == 0
    for conversation in told.doubtful:
        if store.get_conversation(conversation) is None:
            # It had gone when the kill came before that was told, and stays so in all later lives.
            told.gone.add(conversation)
    used = {}
    for turn, (conversation, _, _) in list(told.turns.items()):
        if conversation in told.gone:
            continue
        assert store.turn_ids(turn) == full_ids(told, turn)
        ref = store.find_state(turn)
        if turn in told.states:
            if ref is None:
                assert turn in told.dropped, "a saved state is missing that was never evicted"
                del told.states[turn]
            else:
                assert ref.tokens == told.states[turn]
                used[turn] = ref.used
    for turn in chance.sample(sorted(used), min(4, len(used))):
        reader = store.load_state(turn, MODEL)
        assert reader is not None
        pieces = list(reader)
        assert reader.report.complete
        size = len(pieces[-1].payload)
        rows, snapshot = make_state(
            full_ids(told, turn)[: told.states[turn]], row_bytes=7000, snapshot_bytes=size
        )
        for mine, theirs in zip((*rows, snapshot), pieces, strict=True):
            assert mine.payload == theirs.payload


def test_killed_at_random_points(tmp_path: Path) -> None:
    chance = random.Random(7)
    told = Told()
    path = tmp_path / "store"
    evicted = 0
    for life in itertools.count():
        # A slow machine gets more lives, each longer: all may have ended before they did anything.
        if life >= KILLS and told.operations > KILLS:
            break
        assert life < 10 * KILLS
        before = set(told.states)
        seconds = chance.uniform(0.05, 0.7) * max(1, life - KILLS)
        told.read(one_life(path, str(life), seconds))
        store = Store.open(path, SIZE)
        told.recovered += store.recovered
        verify(store, told, chance)
        evicted += len(before - set(told.states))
        store.close()
        if life % 4 == 0:
            assert not lmdb.verify.verify(str(path))
    print(
        f"{life} kills, {told.operations} acknowledged operations, {evicted} states evicted, "
        f"{told.recovered} unpublished objects freed, slowest start {max(told.open_seconds):.3f} s"
    )
