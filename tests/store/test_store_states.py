from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made_states import MODEL, conversation_id, feeding, make_state, make_turn, payloads

from store.codec.header import CodecError
from store.codec.stored import Stored
from store.environment import VALUE_BYTES
from store.errors import StoreError, StoreFull, StoreGap
from store.objects import SMALL_BYTES
from store.parts import PART_BYTES
from store.store import Store

SIZE = 256 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", SIZE)
    yield opened
    opened.close()


def loaded(store: Store, turn: str, fingerprint: bytes = MODEL) -> list[bytes]:
    reader = store.load_state(turn, fingerprint)
    assert reader is not None
    with reader:
        result = [bytes(piece.payload) for piece in reader]
    assert reader.report.complete, reader.report
    return result


def add_turn(
    store: Store, ids: range, parent: str | None = None, conversation: str = "conv_a"
) -> str:
    turn = make_turn(ids[:-4], ids[-4:], conversation=conversation, parent=parent)
    store.put_turn(turn)
    return turn.id


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33, 160])
@pytest.mark.parametrize(
    "snapshot_bytes",
    [0, 1, SMALL_BYTES, SMALL_BYTES + 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7],
)
def test_round_trip(store: Store, tokens: int, snapshot_bytes: int) -> None:
    turn = add_turn(store, range(200))
    pieces, snapshot = make_state(range(tokens), snapshot_bytes=snapshot_bytes)
    report = store.save_state(turn, pieces, snapshot)
    assert (report.blocks_new, report.blocks_shared) == (len(pieces), 0)
    reader = store.load_state(turn, MODEL)
    assert reader is not None
    found = list(reader)
    assert [piece.header for piece in found] == [piece.header for piece in (*pieces, snapshot)]
    assert [bytes(piece.payload) for piece in found] == payloads(pieces, snapshot)
    ref = store.find_state(turn)
    assert ref is not None
    assert ref.tokens == tokens
    assert ref.nbytes == sum(len(one) for one in payloads(pieces, snapshot))


def test_every_bulk_value_has_one_size(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(77), row_bytes=60_000, snapshot_bytes=5_000_000))
    environment = store.environment
    with environment.read() as txn:
        sizes = {len(value) for value in txn.cursor(db=environment.dat).iternext(False, True)}
        stat = txn.stat(environment.dat)
    assert sizes == {VALUE_BYTES}
    assert stat["overflow_pages"] == stat["entries"] * environment.value_pages


def test_a_turn_adds_only_its_rows_and_a_snapshot(store: Store) -> None:
    first = add_turn(store, range(1000))
    store.save_state(first, *make_state(range(999), row_bytes=65_532))
    second = add_turn(store, range(1000, 1100), first)
    pieces, snapshot = make_state(range(1099), start=992, row_bytes=65_532)
    report = store.save_state(second, pieces, snapshot)
    assert (report.blocks_new, report.blocks_shared) == (7, 0)
    ideal = sum(len(one) for one in payloads(pieces, snapshot))
    assert report.bytes_written <= 9 * VALUE_BYTES
    assert report.bytes_written >= ideal
    assert loaded(store, second) == payloads(*make_state(range(1099), row_bytes=65_532))
    assert loaded(store, first) == payloads(*make_state(range(999), row_bytes=65_532))


def test_equal_prefixes_are_stored_once(store: Store) -> None:
    preamble = range(320)
    for number in range(10):
        ids = [*preamble, *range(1000 * number, 1000 * number + 8)]
        turn = make_turn(ids, [1], conversation=f"conv_{number}")
        store.put_turn(turn)
        report = store.save_state(turn.id, *make_state(ids))
        assert report.blocks_new == (21 if number == 0 else 1)
    assert store.stats()["values"] == 10  # snapshots; rows of this size are small
    assert store.stats()["objects"] == 20 + 10 + 10


def test_other_bits_are_another_block(store: Store) -> None:
    """Sharing must not swap one computation's bits for another's."""
    one, two = add_turn(store, range(50)), add_turn(store, range(50), conversation="conv_b")
    store.save_state(one, *make_state(range(49), seed=b"one"))
    report = store.save_state(two, *make_state(range(49), seed=b"two"))
    assert report.blocks_shared == 0
    assert loaded(store, one) == payloads(*make_state(range(49), seed=b"one"))
    assert loaded(store, two) == payloads(*make_state(range(49), seed=b"two"))
    child = add_turn(store, range(50, 70), two, "conv_b")
    pieces, snapshot = make_state(range(69), start=48, seed=b"two")
    store.save_state(child, pieces, snapshot)
    assert loaded(store, child) == payloads(*make_state(range(69), seed=b"two"))


def test_saving_again_writes_nothing_and_replacing_frees(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(50), snapshot_bytes=3_000_000))
    values = store.stats()["values"]
    report = store.save_state(turn, *make_state(range(50), snapshot_bytes=3_000_000))
    assert (report.bytes_written, report.blocks_new) == (0, 0)
    store.save_state(turn, *make_state(range(99), snapshot_bytes=3_000_000))
    assert store.stats()["values"] == values
    assert loaded(store, turn) == payloads(*make_state(range(99), snapshot_bytes=3_000_000))
    assert store.drop_state(turn)
    assert not store.drop_state(turn)
    assert store.stats()["objects"] == store.stats()["values"] == 0
    assert store.find_state(turn) is None
    assert store.turn_ids(turn) == list(range(100))


def test_a_save_without_its_base_is_a_gap(store: Store) -> None:
    turn = add_turn(store, range(100))
    pieces, snapshot = make_state(range(99), start=32)
    with pytest.raises(StoreGap):
        store.save_state(turn, pieces, snapshot)
    assert store.stats()["objects"] == 0


def test_another_model_is_a_miss(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(60)))
    assert store.load_state(turn, b"\7" * 16) is None
    with pytest.raises(StoreError, match="fingerprint"):
        store.save_state(turn, *make_state(range(60), fingerprint=b"\7" * 16))
    assert store.nearest_state(turn, b"\7" * 16) is None


def test_nearest_state_is_an_ancestors(store: Store) -> None:
    first = add_turn(store, range(50))
    second = add_turn(store, range(50, 60), first)
    third = add_turn(store, range(60, 70), second)
    assert store.nearest_state(third) is None
    store.save_state(first, *make_state(range(49)))
    found = store.nearest_state(third)
    assert found is not None
    assert (found.turn, found.tokens) == (first, 49)


def test_pieces_that_do_not_fit_are_refused(store: Store) -> None:
    turn = add_turn(store, range(100))
    pieces, snapshot = make_state(range(60))
    with pytest.raises(StoreError, match="do not join"):
        store.save_state(turn, [pieces[0], pieces[2], pieces[3]], snapshot)
    with pytest.raises(StoreError, match="do not end"):
        store.save_state(turn, pieces[:-1], snapshot)
    with pytest.raises(StoreError, match="for a turn of 100"):
        store.save_state(turn, *make_state(range(101)))
    with pytest.raises(StoreError, match="no turn"):
        store.save_state("resp_none", pieces, snapshot)
    broken = replace(pieces[1], payload=memoryview(bytes(len(pieces[1].payload))))
    with pytest.raises(CodecError, match="checksum"):
        store.save_state(turn, [pieces[0], broken, *pieces[2:]], snapshot)
    assert store.stats()["objects"] == 0


def test_the_same_hash_for_other_tokens_is_a_miss(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = b"\5" * 16
    monkeypatch.setattr(
        "made_states.Chain", lambda *_: type("One", (), {"at": lambda *_: constant})()
    )
    one = add_turn(store, range(16))
    store.save_state(one, *make_state(range(16)))
    two = add_turn(store, range(500, 516), conversation="conv_b")
    with pytest.raises(StoreError, match="collision"):
        store.save_state(two, *make_state(range(500, 516)))
    assert store.load_state(two, MODEL) is None
    assert loaded(store, one) == payloads(*make_state(range(16)))


@pytest.mark.usefixtures("quick")
def test_oldest_states_go_first_and_records_stay(store: Store) -> None:
    turns = []
    for number in range(40):
        ids = range(1000 * number, 1000 * number + 40)
        turns.append(add_turn(store, ids, conversation=conversation_id()))
        store.save_state(turns[-1], *make_state(ids[:-1], snapshot_bytes=10 * PART_BYTES))
        store.touch(turns[0])
        store.flush()
    kept = [turn for turn in turns if store.find_state(turn)]
    assert kept == [turns[0], *turns[-(len(kept) - 1) :]]
    assert 15 < len(kept) < 25
    assert store.stats()["live_share"] <= 0.88
    assert store.stats()["turns"] == 40
    assert loaded(store, turns[0]) == payloads(
        *make_state(range(39), snapshot_bytes=10 * PART_BYTES)
    )


def test_a_state_that_cannot_fit_is_refused_and_loses_nothing(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(60)))
    big = add_turn(store, range(100), conversation="conv_b")
    with pytest.raises(StoreFull):
        store.save_state(big, *make_state(range(60), snapshot_bytes=SIZE))
    assert loaded(store, turn) == payloads(*make_state(range(60)))


def test_what_is_being_read_is_not_evicted(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(99), snapshot_bytes=100 * PART_BYTES))
    reader = store.load_state(turn, MODEL)
    assert reader is not None
    first = next(reader)
    other = add_turn(store, range(100), conversation="conv_b")
    big = make_state(range(50), snapshot_bytes=150 * PART_BYTES, seed=b"b")
    with pytest.raises(StoreFull, match="in use"):
        store.save_state(other, *big)
    rest = list(reader)
    assert reader.report.complete
    assert payloads([first, *rest[:-1]], rest[-1]) == payloads(
        *make_state(range(99), snapshot_bytes=100 * PART_BYTES)
    )
    store.save_state(other, *big)
    assert store.find_state(turn) is None


def test_readers_that_are_dropped_leave_no_pin(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(60)))
    for number in range(1000):
        assert store.find_state(turn)
        reader = store.load_state(turn, MODEL)
        assert reader is not None
        for _ in range(number % 3):
            next(reader)
        if number % 2:
            reader.close()
    del reader
    assert store.stats()["in_use"] == 0
    assert store.evict(SIZE // 2) == 0


def test_deleting_under_a_reader_ends_it_early(store: Store) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(60), row_bytes=65_000))
    reader = store.load_state(turn, MODEL)
    assert reader is not None
    first = next(reader)
    store.delete_conversation("conv_a")
    other = add_turn(store, range(500, 600), conversation="conv_b")
    store.save_state(other, *make_state(range(500, 560), row_bytes=65_000))
    assert list(reader) == []
    assert not reader.report.complete
    assert reader.report.tokens == 16
    assert bytes(first.payload) == payloads(*make_state(range(60), row_bytes=65_000))[0]


def damage(store: Store, number: int, offset: int = 100_000) -> None:
    """Flip one byte of the bulk value `number` on disk, behind LMDB's back."""
    environment = store.environment
    with environment.read() as txn:
        value = list(txn.cursor(db=environment.dat).iternext(keys=False, values=True))[number]
        pattern = bytes(value[offset : offset + 64])
    path = environment.path / "data.mdb"
    content = path.read_bytes()
    assert content.count(pattern) == 1
    with path.open("r+b") as file:
        file.seek(content.index(pattern))
        file.write(bytes([pattern[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def test_damage_gives_the_verified_prefix_and_is_healed_by_the_next_save(store: Store) -> None:
    turn = add_turn(store, range(100))
    state = make_state(range(90), row_bytes=65_000)
    store.save_state(turn, *state)
    wanted = payloads(*state)
    for number in range(store.stats()["values"]):
        damage(store, number)
        reader = store.load_state(turn, MODEL)
        assert reader is not None
        got = [bytes(piece.payload) for piece in reader]
        report = reader.report
        assert got == wanted[: len(got)]
        assert len(got) < len(wanted)
        assert not report.complete
        assert report.tokens == min(16 * len(got), 90)
        assert "other bytes than were saved" in report.damage[0]
        healed = store.save_state(turn, *state)
        assert healed.bytes_written >= VALUE_BYTES
        assert loaded(store, turn) == wanted
        assert store.stats()["damaged"] == 0


def test_an_interrupted_save_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = add_turn(store, range(100))
    store.save_state(turn, *make_state(range(40)))
    monkeypatch.setattr("store.saving.PARTS_PER_COMMIT", 1)
    calls = 0
    original = store.blocks.values.write

    def failing(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("the disk said no")
        original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(store.blocks.values, "write", failing)
    with pytest.raises(OSError, match="said no"):
        store.save_state(turn, *make_state(range(90), snapshot_bytes=6 * PART_BYTES))
    assert store.stats()["pending"] == 0
    assert store.stats()["objects"] == 4
    assert loaded(store, turn) == payloads(*make_state(range(40)))


def test_readers_and_a_writer_at_once(store: Store) -> None:
    turns = [add_turn(store, range(100), conversation=conversation_id()) for _ in range(4)]
    states = [make_state(range(90), seed=bytes([number])) for number in range(4)]
    for turn, state in zip(turns, states, strict=True):
        store.save_state(turn, *state)
    failures: list[str] = []
    stop = threading.Event()

    def read(turn: str, wanted: list[bytes]) -> None:
        while not stop.is_set():
            reader = store.load_state(turn, MODEL)
            if reader is None or [bytes(piece.payload) for piece in reader] != wanted:
                failures.append(turn)

    threads = [
        threading.Thread(target=read, args=(turn, payloads(*state)))
        for turn, state in zip(turns, states, strict=True)
    ]
    for thread in threads:
        thread.start()
    for number in range(15):
        other = add_turn(store, range(500, 600), conversation="conv_w")
        store.save_state(other, *make_state(range(500, 590), seed=bytes([number])))
        store.drop_state(other)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_feeding_gives_the_same_bytes(store: Store) -> None:
    turn = add_turn(store, range(200))
    state = make_state(range(190), row_bytes=60_000, snapshot_bytes=3_000_000)
    store.save_state(turn, *state)
    parts: list[int] = []

    def take(rows: Iterator[Stored], snapshot: Stored | None) -> list[bytes]:
        assert snapshot is not None
        parts.append(len(snapshot.parts))
        return feeding(rows, snapshot)

    reader = store.load_state(turn, MODEL)
    assert reader is not None
    assert reader.feed(take) == payloads(*state)
    assert parts == [3]
    assert reader.report.complete
    assert reader.report.tokens == 190
    assert reader.report.nbytes == sum(map(len, payloads(*state)))
    assert store.stats()["in_use"] == 0

    damage(store, 7)
    reader = store.load_state(turn, MODEL)
    assert reader is not None
    assert reader.feed(take) is None
    assert "other bytes" in reader.report.damage[0]
    assert store.stats()["damaged"] == 1
    assert store.stats()["in_use"] == 0
    store.save_state(turn, *state)
    assert loaded(store, turn) == payloads(*state)


def test_what_is_refused_though_every_byte_is_right_is_no_damage(store: Store) -> None:
    turn = add_turn(store, range(200))
    store.save_state(turn, *make_state(range(190)))

    def refuse(rows: Iterator[Stored], snapshot: Stored | None) -> None:
        next(rows)
        raise CodecError("another model's")

    reader = store.load_state(turn, MODEL)
    assert reader is not None
    with pytest.raises(CodecError, match="another model's"):
        reader.feed(refuse)
    assert not reader.report.damage
    assert store.stats()["damaged"] == store.stats()["in_use"] == 0
