"""Power cuts, replayed at the level of the file.

While a store is worked on, every commit's changed 4 KiB sectors are recorded by comparing the file
before and after. LMDB with metasync off writes a commit's data pages, flushes them, then writes
its meta page, which becomes durable with the next flush at the latest. A cut during commit k+1 thus
leaves: all data up to commit k; the meta page of commit k or, if that was still in the disk's
cache, that of k-1; and any subset of the sectors of commit k+1. Each such file must open, check
clean and hold everything acknowledged up to k, or k-1. (The model takes the device's word for a
flush and a sector write as atomic.)
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb.verify
import numpy as np
from kill_worker import ids_of
from made_states import MODEL, make_state, make_turn, turn_id

from store.store import Store

CUTS = 260 if os.environ.get("TANDEM_SOAK") else 16
SECTOR = 4096
SIZE = 32 << 20
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class Commit:
    """The sectors that one commit changed, the file's length and both meta pages after it."""

    length: int
    sectors: dict[int, bytes]
    meta: tuple[bytes, bytes]
    acked: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Records what every commit of a store changes in its file."""

    def __init__(self, store: Store) -> None:
        self.path = store.environment.path / "data.mdb"
        self.page = store.environment.page_size
        self.image = self.read()
        self.first = self.image.copy()
        self.commits: list[Commit] = []
        self._write = store.environment.write
        store.environment.write = self.write  # type: ignore[method-assign]

    def read(self) -> Bytes:
        """The file as rows of one sector; its length is a multiple of the page size."""
        return np.fromfile(self.path, np.uint8).reshape(-1, SECTOR)

    def metas(self) -> tuple[bytes, bytes]:
        flat = self.image.reshape(-1)
        return flat[: self.page].tobytes(), flat[self.page : 2 * self.page].tobytes()

    def write(self, work: Callable[[Any], Any]) -> Any:
        result = self._write(work)
        new = self.read()
        both = min(len(new), len(self.image))
        words = new[:both].view(np.uint64) != self.image[:both].view(np.uint64)
        changed = [*np.flatnonzero(words.any(axis=1)), *range(both, len(new))]
        first_data = 2 * self.page // SECTOR
        self.image = new
        sectors = {int(at): new[at].tobytes() for at in changed if at >= first_data}
        self.commits.append(Commit(new.size, sectors, self.metas()))
        return result


def work_on(store: Store, recorder: Recorder) -> None:
    """Turns, states, branches, deletions and evictions; acknowledgements go to the last commit."""
    chance = random.Random(5)
    acked: dict[str, int] = {}
    turns: list[tuple[str, str]] = []
    for step in range(30):
        conversation, parent = (
            turns[-1] if turns and chance.random() < 0.6 else (f"conv_{step}", None)
        )
        turn = turn_id()
        own = ids_of(turn, chance.randint(2, 50))
        store.put_turn(
            make_turn(own[:-1], own[-1:], conversation=conversation, parent=parent, ident=turn)
        )
        acked[turn] = 0
        recorder.commits[-1].acked = dict(acked)
        turns.append((conversation, turn))
        ids = store.turn_ids(turn)[:-1]
        state = make_state(ids, row_bytes=7000, snapshot_bytes=chance.choice([100, 1_500_000]))
        store.save_state(turn, *state)
        acked[turn] = len(ids)
        recorder.commits[-1].acked = dict(acked)
        if step % 9 == 8:
            gone, _ = chance.choice(turns)
            for dead in store.conversation_turns(gone):
                acked.pop(dead, None)
            store.delete_conversation(gone)
            turns = [one for one in turns if one[0] != gone]
            recorder.commits[-1].acked = dict(acked)
    for before, after in zip(recorder.commits, recorder.commits[1:], strict=False):
        after.acked = after.acked or before.acked


class Disk:
    """What is durable on the disk, advanced commit by commit."""

    def __init__(self, recorder: Recorder) -> None:
        self.commits = recorder.commits
        self.content = recorder.first.reshape(-1).copy()
        self.done = 0

    def advance(self, number: int) -> None:
        """Make the data of all commits before `number` durable."""
        for commit in self.commits[self.done : number]:
            self.content = overlaid(self.content, commit.sectors, commit.length)
        self.done = number

    def cut(self, number: int, chance: random.Random, path: Path) -> dict[str, int]:
        """Write the file that a cut during commit `number` leaves; returns what was acknowledged.

        `number` never falls.
        """
        self.advance(number)
        survive = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        torn = {
            at: one for at, one in self.commits[number].sectors.items() if chance.random() < survive
        }
        late = chance.random() < 0.5  # the meta page of the commit before was not flushed yet
        durable = self.commits[number - 2] if late else self.commits[number - 1]
        body = overlaid(self.content, torn, len(self.content))
        head = b"".join(durable.meta)
        body[: len(head)] = np.frombuffer(head, np.uint8)
        path.mkdir()
        body.tofile(path / "data.mdb")
        return durable.acked


def overlaid(content: Bytes, sectors: dict[int, bytes], length: int) -> Bytes:
    """A copy of `content`, at least `length` bytes long, with some sectors replaced."""
    end = max([length, len(content), *((at + 1) * SECTOR for at in sectors)])
    result = np.zeros(end, np.uint8)
    result[: len(content)] = content
    for at, one in sectors.items():
        result[at * SECTOR : (at + 1) * SECTOR] = np.frombuffer(one, np.uint8)
    return result


def test_power_cuts_at_random_points(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", SIZE)
    recorder = Recorder(store)
    work_on(store, recorder)
    store.close()
    assert store.evictor.evicted > 0
    chance = random.Random(11)
    disk = Disk(recorder)
    freed = 0
    cuts = sorted(chance.randrange(2, len(recorder.commits)) for _ in range(CUTS))
    for number, at in enumerate(cuts):
        path = tmp_path / f"cut{number}"
        acked = disk.cut(at, chance, path)
        if number % 5 == 0:
            assert not lmdb.verify.verify(str(path))
        after = Store.open(path, SIZE, create=False)
        freed += after.recovered
        report = after.check()
        assert report.clean, (at, report.problems)
        assert [turn for turn in acked if after.get_turn(turn) is None] == []
        for turn in chance.sample(sorted(acked), min(2, len(acked))):
            reader = after.load_state(turn, MODEL)
            if reader is not None:
                assert list(reader)
                assert reader.report.complete
        after.put_turn(make_turn([1], [2], conversation="conv_after"))
        after.close()
        (path / "data.mdb").unlink()
    print(f"{CUTS} cuts in {len(recorder.commits)} commits, {freed} unpublished objects freed")


def test_a_flushed_sector_that_is_lost_is_noticed(tmp_path: Path) -> None:
    """The replay can fail: a device that loses what it said was durable is found out."""
    store = Store.open(tmp_path / "store", SIZE)
    recorder = Recorder(store)
    turn = turn_id()
    ids = ids_of(turn, 50)
    store.put_turn(make_turn(ids[:-1], ids[-1:], conversation="conv_a", ident=turn))
    store.save_state(turn, *make_state(ids[:-1], row_bytes=7000, snapshot_bytes=1_500_000))
    store.close()
    bulk = max(recorder.commits, key=lambda commit: len(commit.sectors)).sectors
    chance = random.Random(1)
    found = 0
    for _ in range(10):
        body = bytearray((tmp_path / "store" / "data.mdb").read_bytes())
        at = chance.choice([at for at, one in bulk.items() if any(one[100:])])
        body[at * SECTOR + 100 : (at + 1) * SECTOR] = bytes(SECTOR - 100)
        copy = tmp_path / f"lost{_}"
        copy.mkdir()
        (copy / "data.mdb").write_bytes(body)
        after = Store.open(copy, SIZE, create=False)
        found += not after.check().clean
        after.close()
    assert found == 10
