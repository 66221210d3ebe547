"""Finding the longest stored beginning of a prompt, for its owner alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from made_states import MODEL, conversation_id, make_state, make_turn, payloads
from redis_kit import eventually

from store.codec.header import Piece
from store.environment import VALUE_BYTES, Txn
from store.prefixes import LEAST_TOKENS, Prefix, ends_in
from store.quotas import Limits
from store.rpc import StoreClient
from store.serving import serve
from store.states import PREAMBLE
from store.store import Store

BLOCK = 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store", 256 << 20)
    opened.serve(MODEL, BLOCK)
    yield opened
    opened.close()


def put(
    store: Store, ids: Sequence[int], tokens: int, *, owner: str = "anna", ends: int = 0
) -> str:
    """A turn of its own conversation whose state holds `tokens` of `ids`; `ends`: every so many
    tokens a forward ended."""
    turn = make_turn(ids[:-1], ids[-1:], conversation=conversation_id(), owner=owner)
    store.put_turn(turn)
    pieces, snapshot = make_state(ids[:tokens], snapshot_bytes=100_000)
    store.save_state(turn.id, [with_ends(piece, ends) for piece in pieces], snapshot)
    return turn.id


def with_ends(piece: Piece, every: int) -> Piece:
    if not every:
        return piece
    start, stop = piece.header.start, piece.header.stop
    at = [end - start for end in range(every, stop + 1, every) if end > start]
    steps = [[b - a, 1] for a, b in zip([0, *at], at, strict=False)]
    return Piece(replace(piece.header, extra={"ends": steps}), piece.payload)


def found(store: Store, ids: Sequence[int], owner: str = "anna", beyond: int = 0) -> int:
    prefix = store.longest_prefix(ids, owner, beyond)
    return 0 if prefix is None else prefix.tokens


@pytest.mark.parametrize("tokens", [16, 17, 31, 32, 33, 160, 199])
def test_a_state_is_found_by_the_prompts_that_begin_with_it(store: Store, tokens: int) -> None:
    turn = put(store, range(200), tokens)
    assert store.longest_prefix([*range(tokens), 7], "anna") == Prefix(tokens, turn)
    assert store.longest_prefix([*range(tokens), *range(900, 999)], "anna") == Prefix(tokens, turn)
    assert found(store, range(tokens)) == 0, "its last token has to be computed"
    assert found(store, [*range(tokens - 1), 7, 8]) == 0
    assert found(store, [*range(tokens), 7], beyond=tokens) == 0
    reader = store.load_prefix(Prefix(tokens, turn), [*range(tokens), 7])
    assert reader is not None
    with reader:
        given = [bytes(piece.payload) for piece in reader]
    assert given == payloads(*make_state(range(tokens), snapshot_bytes=100_000))
    assert reader.report.complete


def test_what_is_found_is_what_a_search_through_everything_finds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and states over two symbols, so that beginnings agree by chance."""
    monkeypatch.setattr("store.prefixes.LEAST_TOKENS", 2)
    rng = random.Random(5)
    states: list[tuple[str, list[int]]] = []
    for _ in range(60):
        base = list(rng.choice(states)[1]) if states and rng.random() < 0.7 else []
        base = base[: rng.randrange(len(base) + 1)]
        ids = [*base, *(rng.randrange(2) for _ in range(rng.randrange(1, 40)))]
        owner = rng.choice(("anna", "bert"))
        states.append((owner, ids))
        put(store, [*ids, 0], len(ids), owner=owner)
    hits = 0
    for _ in range(300):
        base = rng.choice(states)[1]
        prompt = [*base[: rng.randrange(len(base) + 1)], *(rng.randrange(2) for _ in range(9))]
        for owner in ("anna", "bert"):
            expected = max(
                (
                    len(ids)
                    for whose, ids in states
                    if whose == owner and 2 <= len(ids) < len(prompt)
                    and prompt[: len(ids)] == ids
                ),
                default=0,
            )  # fmt: skip
            assert found(store, prompt, owner) == expected
            hits += expected > 0
    assert hits > 50
    assert store.check().clean


def test_owners_share_nothing(store: Store) -> None:
    put(store, range(200), 160, owner="anna")
    put(store, range(200), 160, owner="bert")
    for owner in ("", "carl"):
        assert found(store, range(300), owner) == 0
    assert found(store, range(300), "anna") == found(store, range(300), "bert") == 160
    assert store.stats()["objects"] == 2 * 11, "ten blocks and a snapshot for each"
    # Nor may one build on what the other has stored.
    turn = make_turn(range(199), [7], conversation=conversation_id(), owner="carl")
    store.put_turn(turn)
    pieces, snapshot = make_state(range(190), start=160, snapshot_bytes=100_000)
    with pytest.raises(Exception, match="nothing stored ends at token 160"):
        store.save_state(turn.id, pieces, snapshot)
    assert store.check().clean


def test_a_preamble_is_stored_once_and_belongs_to_no_turn(store: Store) -> None:
    ids = list(range(64))
    pieces, snapshot = make_state(ids, snapshot_bytes=100_000)
    report = store.save_prefix("anna", ids, pieces, snapshot)
    assert (report.blocks_new, report.blocks_shared) == (4, 0)
    assert store.save_prefix("anna", ids, pieces, snapshot).bytes_written == 0
    before = store.stats()["objects"]
    for number in range(10):
        put(store, [*ids, *range(1000 * number, 1000 * number + 20)], 80)
    assert store.stats()["objects"] == before + 10 * 2, "a block and a snapshot each"
    assert found(store, [*ids, 5, 6]) == 64
    assert store.check().clean
    store.close()
    again = Store.open(store.environment.path, 0)
    again.serve(MODEL, BLOCK)
    assert found(again, [*ids, 5, 6]) == 64
    again.close()


def test_damaged_ids_of_a_preamble_are_reported(store: Store) -> None:
    ids = list(range(64))
    store.save_prefix("anna", ids, *make_state(ids))
    (state,) = _states(store)
    blocks = store.blocks

    def work(txn: Txn) -> None:
        record = blocks.get(txn, state.head)
        assert record is not None
        changed = record._replace(chain=b"\1" * 16)
        txn.put(state.head, changed.pack(), db=store.environment.blk)

    store.environment.write(work)
    report = store.check(payload=False)
    assert any("token ids" in problem for problem in report.problems), report.problems
    assert report.dropped == [state.turn]
    store.check(repair=True)
    assert store.check().clean
    assert found(store, [*ids, 5]) == 0


def _states(store: Store) -> list[object]:
    with store.environment.read() as txn:
        return list(store.states.every(txn))


def test_other_models_are_never_found(store: Store) -> None:
    put(store, range(200), 160)
    store.serve(b"another model   ", BLOCK)
    assert found(store, range(300)) == 0
    store.serve(MODEL)
    assert found(store, range(300)) == 0, "without the size of its blocks nothing is looked for"


@pytest.mark.usefixtures("quick")
def test_a_preamble_that_is_shared_is_evicted_last(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 48 << 20)
    store.serve(MODEL, BLOCK)
    try:
        shared, alone = list(range(32)), list(range(500, 532))
        for ids in (shared, alone):
            store.save_prefix("anna", ids, *make_state(ids, snapshot_bytes=3_000_000))
        for number in range(2):
            put(store, [*shared, *range(100 * number, 100 * number + 20)], 48)
        for number in range(40):
            start = 10_000 + 1000 * number
            ids = range(start, start + 100)
            turn = make_turn(ids[:-1], ids[-1:], conversation=conversation_id())
            store.put_turn(turn)
            store.save_state(turn.id, *make_state(ids[:90], snapshot_bytes=3_000_000))
            if number < 3:
                for n in range(2):  # used as others are
                    assert found(store, [*shared, 100 * n, 5]) == 32
        assert store.stats()["evicted"] > 20
        assert found(store, [*shared, 5, 6]) == 32
        assert found(store, [*alone, 5, 6]) == 0
        assert store.check().clean
    finally:
        store.close()


@pytest.mark.usefixtures("quick")
def test_a_state_inside_a_prompt_gives_way_before_any_conversation(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 48 << 20)
    store.serve(MODEL, BLOCK)
    try:
        kept = []
        for number in range(40):
            start = 10_000 + 1000 * number
            ids = list(range(start, start + 100))
            if number < 4:  # the first two save little for their bytes, the others much
                place, gain = ids[:80], 70 if number > 1 else 5
                state = make_state(place, snapshot_bytes=3_000_000)
                store.save_prefix("", place, *state, conversation=f"conv_{number}", gain=gain)
            turn = make_turn(ids[:-1], ids[-1:], conversation=f"conv_{number}")
            store.put_turn(turn)
            store.save_state(turn.id, *make_state(ids[:90], snapshot_bytes=3_000_000))
            kept.append(
                [
                    found(store, [*range(10_000 + 1000 * n, 10_080 + 1000 * n), 5], "")
                    for n in range(4)
                ]
            )
            stats = store.stats()
            if stats["inside_prompts"]:
                assert stats["evicted"] <= 4, "a conversation went first"
                assert stats["inside_prompts_bytes"] == stats["inside_prompts"] * 3 * VALUE_BYTES
        assert kept[3] == [80] * 4
        assert kept[-1] == [0] * 4
        assert [0, 0, 80, 80] in kept
        assert store.check().clean
    finally:
        store.close()


def test_a_state_inside_a_prompt_goes_with_its_conversation(store: Store) -> None:
    ids = list(range(128))
    for stop in (48, 112):
        state = make_state(ids[:stop])
        store.save_prefix("anna", ids[:stop], *state, conversation="conv_a", gain=40)
    store.save_prefix("anna", ids[:32], *make_state(ids[:32]), conversation="conv_b", gain=30)
    for conversation in ("conv_a", "conv_b"):
        store.put_turn(make_turn(ids[:-1], ids[-1:], conversation=conversation, owner="anna"))
    assert found(store, [*ids[:112], 5]) == 112
    assert store.stats()["inside_prompts"] == 3
    store.delete_conversation("conv_a")
    assert found(store, [*ids, 5]) == 32
    store.delete_conversation("conv_b")
    assert found(store, [*ids, 5]) == 0
    assert store.stats()["objects"] == 0
    assert store.check().clean


def preamble(store: Store, ids: list[int], conversation: str) -> str:
    """Save a preamble that a turn of `conversation` brings; its name."""
    store.save_prefix("anna", ids, *make_state(ids), conversation=conversation)
    with store.environment.read() as txn:
        return next(s.turn for s in store.states.named(txn, PREAMBLE) if s.tokens == len(ids))


def test_a_preamble_goes_unless_a_turn_is_kept_that_begins_with_it(store: Store) -> None:
    alone, kept, followed = list(range(64)), list(range(500, 548)), list(range(900, 932))
    names = [preamble(store, ids, f"conv_{ids[0]}") for ids in (alone, kept, followed)]
    put(store, [*followed, 7, 7, 7, 7], 34)
    assert store.check().clean, "their turns may be under way"
    assert not store.settle_preamble(names[1], kept=True)
    assert preamble(store, kept, "conv_later") == names[1]
    assert [store.settle_preamble(name, kept=False) for name in names] == [True, False, False]
    assert found(store, [*alone, 5]) == 0
    assert found(store, [*kept, 5]) == 48
    assert found(store, [*followed, 5]) == 32
    assert not store.settle_preamble(names[0], kept=False), "it is gone"
    assert store.check().clean
    assert store.sweep() == 0


def test_a_preamble_is_swept_with_the_process_that_could_not_settle_it(tmp_path: Path) -> None:
    ids, kept = list(range(64)), list(range(500, 548))
    store = Store.open(tmp_path / "store", 128 << 20)
    turn = make_turn([*kept, 1], [2], conversation="conv_b", owner="anna")
    preamble(store, ids, "conv_a")
    name = preamble(store, kept, "conv_b")
    store.put_turn(turn)
    store.close()
    store = Store.open(tmp_path / "store", 128 << 20, create=False)
    try:
        report = store.check()
        assert report.problems[0].startswith("orphan: the state pre_")
        assert len(report.dropped) == 1
        assert store.sweep() == 1
        assert store.check().clean
        store.serve(MODEL, BLOCK)
        assert found(store, [*ids, 5]) == 0
        assert found(store, [*kept, 5]) == 48
        assert not store.settle_preamble(name, kept=False), "its turn was kept"
    finally:
        store.close()


def test_a_preamble_that_a_stored_state_goes_on_from_outlives_a_crash(tmp_path: Path) -> None:
    """Not one from which only states go on that go themselves, nor one of those within it."""
    ids, alone = list(range(64)), list(range(500, 564))
    inside = [*alone, *range(32)]
    store = Store.open(tmp_path / "store", 128 << 20)
    preamble(store, ids[:32], "conv_a")
    name = preamble(store, ids, "conv_a")
    turn = put(store, [*ids, *range(900, 940)], 100)
    preamble(store, alone[:32], "conv_b")
    preamble(store, alone, "conv_b")
    store.save_prefix("anna", inside, *make_state(inside), conversation="conv_b", gain=32)
    store.close()
    store = Store.open(tmp_path / "store", 128 << 20, create=False)
    try:
        report = store.check()
        assert len(report.dropped) == 3
        assert all(line.startswith("orphan: ") for line in report.problems[:3])
        copied = Store.open(_copy(store, tmp_path / "copy"), 128 << 20, create=False)
        assert copied.check(repair=True).dropped == report.dropped
        assert copied.check().clean
        copied.close()
        assert store.sweep() == 3
        report = store.check()
        assert report.clean, report.problems
        store.serve(MODEL, BLOCK)
        assert store.drop_state(turn)
        assert found(store, [*ids, 5]) == 64
        assert found(store, [*ids[:32], 5]) == 32
        assert found(store, [*alone, 5]) == 0
        assert not store.settle_preamble(name, kept=False)
    finally:
        store.close()


def _copy(store: Store, folder: Path) -> Path:
    folder.mkdir()
    store.copy(folder)
    return folder


def test_a_preamble_of_a_later_turn_that_a_crash_cut_off_is_swept(tmp_path: Path) -> None:
    """Its conversation is stored, and no turn of it begins so."""
    ids, kept = list(range(64)), list(range(500, 548))
    store = Store.open(tmp_path / "store", 128 << 20)
    store.put_turn(make_turn([*kept, 1], [2], conversation="conv_a", owner="anna"))
    preamble(store, ids, "conv_a")
    preamble(store, kept, "conv_a")
    store.close()
    store = Store.open(tmp_path / "store", 128 << 20, create=False)
    try:
        assert store.check().clean
        assert store.sweep() == 1
        assert store.check().clean
        store.serve(MODEL, BLOCK)
        assert found(store, [*ids, 5]) == 0
        assert found(store, [*kept, 5]) == 48
    finally:
        store.close()


def test_deleting_a_conversation_leaves_its_preamble_to_who_goes_on_from_it(store: Store) -> None:
    """Also before it is known whether its turn is kept."""
    ids, alone = list(range(64)), list(range(500, 548))
    store.put_turn(make_turn([1, 2, 3], [4], conversation="conv_a", owner="anna"))
    names = [preamble(store, each, "conv_a") for each in (ids, alone)]
    turn = put(store, [*ids, *range(900, 940)], 100)
    store.delete_conversation("conv_a")
    report = store.check()
    assert report.clean, report.problems
    assert found(store, [*alone, 5]) == 0
    assert [store.settle_preamble(name, kept=False) for name in names] == [False, False]
    assert store.drop_state(turn)
    assert found(store, [*ids, 5]) == 64
    assert store.check().clean


def test_deleting_the_last_conversation_deletes_its_preamble(store: Store) -> None:
    ids = list(range(64))
    store.save_prefix("anna", ids, *make_state(ids))
    store.save_prefix("bert", ids, *make_state(ids))
    turns = [put(store, [*ids, *range(n, n + 20)], 80) for n in (100, 200)]
    conversations = [store.get_turn(turn).conversation for turn in turns]  # type: ignore[union-attr]
    store.delete_conversation(conversations[0])
    assert found(store, [*ids, 5]) == 64
    store.delete_conversation(conversations[1])
    assert found(store, [*ids, 5]) == 0
    assert found(store, [*ids, 5], "bert") == 64
    assert store.check().clean


def test_a_quota_counts_a_preamble_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 256 << 20, limits=Limits(owner_bytes=64 << 20))
    store.serve(MODEL, BLOCK)
    try:
        ids = list(range(32))
        store.save_prefix("anna", ids, *make_state(ids, snapshot_bytes=3_000_000))
        alone = store.quotas.used("anna")
        assert alone > 3_000_000
        put(store, [*ids, *range(100, 120)], 48)
        assert store.quotas.used("anna") < alone + 1_200_000
        assert store.quotas.used("bert") == 0
    finally:
        store.close()


# --- rows alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [5, 16, 24, 1000])
def test_rows_alone_are_cut_where_a_forward_ended(store: Store, every: int) -> None:
    store.serve(MODEL, BLOCK, rows_alone=True)
    put(store, range(200), 160, ends=every)
    for same in (40, 64, 100, 160):
        prompt = [*range(same), *range(900, 950)]
        expected = (same // BLOCK * BLOCK) // every * every
        if same == 160:
            expected = 160
        assert found(store, prompt) == (expected if expected >= LEAST_TOKENS else 0)
        prefix = store.longest_prefix(prompt, "anna")
        if prefix is None or prefix.name:
            continue
        reader = store.load_prefix(prefix, prompt)
        assert reader is not None
        rows = [piece.header for piece in reader]
        assert rows[-1].start < prefix.tokens <= rows[-1].stop <= same
        assert not reader.report.damage


def test_rows_that_do_not_tell_their_forwards_are_left(store: Store) -> None:
    store.serve(MODEL, BLOCK, rows_alone=True)
    put(store, range(200), 160)
    assert found(store, [*range(100), 900]) == 0


@pytest.mark.parametrize(
    "told", [None, {}, {"ends": 3}, {"ends": [[0, 1]]}, {"ends": [[1, 1 << 40]]}, {"ends": [[1]]}]
)
def test_ends_that_make_no_sense_are_none(told: object) -> None:
    assert ends_in(told) == []


def test_rows_that_are_evicted_while_they_are_read_are_no_damage(store: Store) -> None:
    store.serve(MODEL, BLOCK, rows_alone=True)
    turn = put(store, range(200), 160, ends=BLOCK)
    prompt = [*range(100), 900]
    prefix = store.longest_prefix(prompt, "anna")
    assert prefix is not None
    reader = store.load_prefix(prefix, prompt)
    assert reader is not None
    next(reader)
    store.drop_state(turn)
    assert list(reader) == []
    assert "evicted meanwhile" in reader.report.damage[0]
    assert not store.damaged
    assert store.load_prefix(prefix, prompt) is None


def test_the_answer_over_the_socket(store: Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    socket = Path(tempfile.mkdtemp(prefix="st")) / "s"
    server = serve(store, socket)
    client = StoreClient(socket, 300.0)
    try:
        put(store, range(200), 160)
        assert client.longest_prefix([*range(160), 5], "anna") == 160
        assert client.longest_prefix([*range(160), 5]) == 0
        assert client.longest_prefix([*range(160), 5], "anna", beyond=160) == 0
        eventually(client.ping, "the store does not answer")
    finally:
        client.close()
        server.close()
        socket.parent.rmdir()
