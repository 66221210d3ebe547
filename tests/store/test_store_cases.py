"""Reports from people who stored state before, as tests of this store.

- S01: restored, yet all recomputed. Here: `test_architectures_store` and `test_starts` count what
  passes through the model; `tandem bench resume` prints it.
- S02: off by one at the window. Here: `test_rings` of the codec round trips W-1, W, W+1, 2W.
- S04: the whole prompt is sent again. Here: a state must leave a token to feed
  (`test_other_token_ids`); `test_an_answer_to_a_long_message_is_asked_for_again` computes one.
- S05, S06: state of others comes back. Here: token ids are compared, not names:
  `test_other_token_ids`, `test_states_of_other_token_ids_are_declined`, and
  `test_many_conversations_come_back_as_they_were`.
- S07: a failed save stays visible. Here: `test_a_save_that_fails_half_way_leaves_no_trace`,
  `test_store_kill`, `test_store_torn`.
- S09: a part-filled tail is merged with an older one. Here: `test_every_tail_stays_what_it_was`.
- S11: evicted between lookup and read. Here: `test_evicted_between_finding_and_reading`.
- S12: lookups that pin for ever. Here: `test_readers_that_are_dropped_leave_no_pin`.
- S13: a view outlives its record. Here: `test_feeding_gives_the_same_bytes` (views are
  released), `test_readers_and_a_writer_at_once`.
- S15: two users of one entry overwrite each other. Here: `test_a_branch_shares_what_is_stored`;
  a hot state has one owner, `take` hands it over.
- S16: adapters known by name. Here: cannot apply: there are no adapters; weights changed in
  place are another fingerprint, see `test_fingerprint` of the codec.
- S18: keys depend on the process's hash seed. Here: `test_keys_do_not_depend_on_the_hash_seed`.
- S19: two prefixes hash alike. Here: `test_store_states`, the test of a collision.
- S20: interrupted answers. Here: the state handed back names its ids exactly
  (`test_a_cancelled_row_holds_its_ids_exactly`); the importer refuses positions beside them.
- S21: templates drop old thinking. Here: `test_stripped_thinking_reuses_up_to_the_seam`,
  `test_thoughts_that_the_template_drops`.
- S22: text is tokenised otherwise than it was generated. Here: by id and by text that is sent back
  the generated ids stand: `test_generated_ids_stand_even_where_text_would_tokenise_otherwise`,
  `test_known_answers_are_their_ids`, `test_any_answers`.
- S23: a template marks a turn by its place. Here:
  `test_a_template_that_marks_the_last_message_is_followed`.
- S24: states of a former model fill the disk. Here: `test_states_of_a_former_model_go_first`.
- S25: a retry on a half-extended state. Here: stored state is immutable and copied for each
  attempt; `test_a_forward_that_fails_leaves_the_stored_state_as_it_was`,
  `test_a_row_that_cannot_start_leaves_the_state_in_memory`.

`test_every_test_named_above_exists` holds this list to the tests.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_states import MODEL, conversation_id, make_state, make_turn, payloads

from store.environment import Environment
from store.errors import StoreError, StoreFull
from store.parts import PART_BYTES
from store.store import Store

SIZE = 96 << 20
OTHER = hashlib.blake2b(b"another model", digest_size=16).digest()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store", SIZE)
    yield store
    store.close()


def add(store: Store, ids: range | list[int], **how: object) -> str:
    turn = make_turn(list(ids)[:-1], [ids[-1]], conversation=conversation_id(), **how)  # type: ignore[arg-type]
    store.put_turn(turn)
    return turn.id


def loaded(store: Store, turn: str) -> list[bytes]:
    reader = store.load_state(turn, MODEL)
    assert reader is not None
    pieces = list(reader)
    assert reader.report.complete
    return [bytes(piece.payload) for piece in pieces]


def test_many_conversations_come_back_as_they_were(tmp_path: Path) -> None:
    chance = random.Random(5)
    store = Store.open(tmp_path / "store", SIZE)
    states = {}
    for number in range(20):
        ids = [chance.randrange(50_000) for _ in range(chance.randrange(20, 60))]
        turn = add(store, ids)
        states[turn] = make_state(ids[:-1], seed=bytes([number]))
        store.save_state(turn, *states[turn])
    store.close()
    store = Store.open(tmp_path / "store", SIZE)
    order = list(states)
    chance.shuffle(order)
    for turn in order:
        brief = add(store, range(3))
        store.save_state(brief, *make_state(range(2), snapshot_bytes=100))
        assert loaded(store, turn) == payloads(*states[turn])
    store.close()


def test_every_tail_stays_what_it_was(store: Store) -> None:
    base = list(range(40))
    first = make_turn(base[:-1], base[-1:], conversation="conv_t", ident="resp_base")
    store.put_turn(first)
    states = {first.id: make_state(base[:-1])}
    store.save_state(first.id, *states[first.id])
    for more in range(1, 17):
        ids = list(range(100, 100 + more))
        turn = make_turn(
            ids[:-1], ids[-1:], conversation="conv_t", parent=first.id, ident=f"resp_{more}"
        )
        store.put_turn(turn)
        whole = store.turn_ids(turn.id)[:-1]
        report = store.save_state(turn.id, *make_state(whole, start=32), base=first.id)
        assert report.blocks_new <= 2
        states[turn.id] = make_state(whole)
    for turn_id, state in states.items():
        assert loaded(store, turn_id) == payloads(*state)
    assert store.check().clean


def test_a_save_that_fails_half_way_leaves_no_trace(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills at the second of several transactions."""
    turn = add(store, range(400))
    before = store.stats()
    state = make_state(range(399), row_bytes=4096, snapshot_bytes=70 * PART_BYTES)
    write, calls = Environment.write, []

    def failing(environment: Environment, work: object) -> object:
        calls.append(work)
        if len(calls) == 2:
            raise StoreFull("the disk is full")
        return write(environment, work)  # type: ignore[arg-type]

    monkeypatch.setattr(Environment, "write", failing)
    with pytest.raises(StoreFull):
        store.save_state(turn, *state)
    monkeypatch.undo()
    assert len(calls) > 2
    assert store.find_state(turn) is None
    assert store.load_state(turn, MODEL) is None
    after = store.stats()
    assert (after["objects"], after["values"], after["pending"]) == (before["objects"], 0, 0)
    store.save_state(turn, *make_state(range(399)))
    assert loaded(store, turn) == payloads(*make_state(range(399)))
    assert store.check().clean


def test_evicted_between_finding_and_reading(store: Store) -> None:
    turn = add(store, range(100))
    store.save_state(turn, *make_state(range(99)))
    assert store.find_state(turn)
    store.evict(int(SIZE * 0.87))
    assert store.load_state(turn, MODEL) is None
    assert store.turn_ids(turn) == list(range(100))


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from made_states import make_state\n"
        "from store.objects import ROOT, object_id\n"
        "rows, snapshot = make_state(range(50))\n"
        "print([object_id(ROOT, piece.header).hex() for piece in (*rows, snapshot)])\n"
    )
    here = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(here)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(said) == 1


def test_states_of_a_former_model_go_first(store: Store) -> None:
    def fill(model: bytes, first: int, count: int) -> list[str]:
        turns = []
        for number in range(first, first + count):
            ids = range(1000 * number, 1000 * number + 20)
            turns.append(add(store, ids, fingerprint=model))
            state = make_state(ids[:-1], fingerprint=model, snapshot_bytes=5 * PART_BYTES)
            store.save_state(turns[-1], *state)
        return turns

    store.serve(MODEL)
    kept = fill(MODEL, 0, 4)
    fill(OTHER, 10, 7)
    pinned = fill(OTHER, 20, 1)
    found = store.get_turn(pinned[0])
    assert found is not None
    store.update_conversation(found.conversation, pinned=True)
    more = fill(MODEL, 30, 8)
    assert all(store.find_state(turn) for turn in (*kept, *more, *pinned))
    stats = store.stats()
    assert stats["evicted_of_other_models"] >= 3
    assert stats["live_share"] <= 0.88
    fill(MODEL, 40, 30)
    assert store.stats()["live_share"] <= 0.88
    assert store.find_state(pinned[0])
    with pytest.raises(StoreError, match="no turn"):
        store.turn_ids("resp_never")
    assert store.check().clean


def test_every_test_named_above_exists() -> None:
    tests = Path(__file__).parents[1]
    files = {path.stem: path.read_text() for path in tests.rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", __doc__ or ""))
    assert len(named) > 20
    text = "\n".join(files.values())
    missing = {name for name in named if name not in files and f"def {name}(" not in text}
    assert not missing
