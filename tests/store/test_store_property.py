"""Any sequence of saving, branching, resuming, evicting, deleting and crashing leaves a clean store
whose surviving conversations equal a twin kept in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from made_states import MODEL, conversation_id, make_state, make_turn, payloads

from store.errors import StoreError, StoreFull
from store.objects import owner_tag
from store.prefixes import Prefix, state_name
from store.store import Store

SOAK = bool(os.environ.get("TANDEM_SOAK"))
SIZE = 32 << 20
SNAPSHOT = st.sampled_from([0, 300, 70_000, 2_500_000, 7_000_000])
SAVE = st.one_of(st.none(), st.tuples(SNAPSHOT, st.booleans()))


class Crash(BaseException):
    """Stands for the death of the process: no transaction commits after it."""


class Twin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tdm-twin-"))
        self.store = Store.open(self.path, SIZE)
        self.store.serve(MODEL, 16)
        self.turns: dict[str, tuple[str, list[int]]] = {}
        self.parents: dict[str, str | None] = {}
        self.states: dict[str, list[bytes]] = {}
        self.preambles: dict[str, tuple[int, list[bytes]]] = {}
        self.inside: dict[str, tuple[str, list[int], list[bytes]]] = {}
        self.next_id = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)

    def pick(self, number: int) -> str:
        return list(self.turns)[number % len(self.turns)]

    def forget_evicted(self) -> None:
        self.states = {
            turn: one for turn, one in self.states.items() if self.store.find_state(turn)
        }
        self.preambles = {
            name: one for name, one in self.preambles.items() if self.store.find_state(name)
        }
        self.inside = {
            name: one for name, one in self.inside.items() if self.store.find_state(name)
        }

    # ------------------------------------------------------------------ rules

    @rule(n=st.integers(1, 60), out=st.integers(1, 9), same=st.booleans(), save=SAVE)
    def new_conversation(self, n: int, out: int, same: bool, save: tuple[int, bool] | None) -> None:
        """Conversations share their first ids when `same`, as under one system prompt."""
        ids = list(range(n + out)) if same else [self.fresh() for _ in range(n + out)]
        self.add(conversation_id(), None, ids, n, save)

    @rule(blocks=st.integers(1, 3), snapshot=SNAPSHOT)
    def share(self, blocks: int, snapshot: int) -> None:
        """The end of the preamble that conversations with the same first ids begin with."""
        ids = range(16 * blocks)
        state = make_state(ids, row_bytes=9000, snapshot_bytes=snapshot)
        with contextlib.suppress(StoreFull):
            self.store.save_prefix("anna", ids, *state)
            name = state_name(owner_tag("anna"), state[1].header.chain)
            self.preambles[name] = len(ids), payloads(*state)
        self.forget_evicted()

    @precondition(lambda self: self.turns)
    @rule(pick=st.integers(0, 99), blocks=st.integers(1, 3), snapshot=SNAPSHOT)
    def keep_inside(self, pick: int, blocks: int, snapshot: int) -> None:
        """A place inside a prompt, with the bits of whoever computed it."""
        turn = self.pick(pick)
        conversation, ids = self.turns[turn]
        ids = ids[: 16 * blocks]
        if len(ids) < 16 * blocks:
            return
        state = make_state(ids, row_bytes=9000, snapshot_bytes=snapshot)
        name = state_name(owner_tag("anna"), state[1].header.chain, inside=True)
        with contextlib.suppress(StoreFull):
            self.store.save_prefix("anna", ids, *state, conversation=conversation, gain=16)
            self.inside[name] = conversation, ids, payloads(*state)
        self.forget_evicted()

    @precondition(lambda self: self.turns)
    @rule(
        pick=st.integers(0, 99),
        n=st.integers(1, 40),
        out=st.integers(1, 9),
        away=st.booleans(),
        save=SAVE,
    )
    def continue_or_branch(
        self, pick: int, n: int, out: int, away: bool, save: tuple[int, bool] | None
    ) -> None:
        parent = self.pick(pick)
        conversation = conversation_id() if away else self.turns[parent][0]
        self.add(conversation, parent, [self.fresh() for _ in range(n + out)], n, save)

    @precondition(lambda self: self.turns)
    @rule(
        pick=st.integers(0, 99),
        snapshot=SNAPSHOT,
        other_bits=st.booleans(),
        delta=st.booleans(),
        crash_after=st.one_of(st.none(), st.integers(0, 4)),
    )
    def save_again(
        self, pick: int, snapshot: int, other_bits: bool, delta: bool, crash_after: int | None
    ) -> None:
        self.save(self.pick(pick), snapshot, other_bits, delta, crash_after)

    def save(
        self, turn: str, snapshot: int, other_bits: bool, delta: bool, crash_after: int | None
    ) -> None:
        ids = self.turns[turn][1][:-1]
        if not ids:
            return
        seed = turn.encode() if other_bits else b""
        start, base = 0, self.parents[turn]
        if delta and base in self.states and not other_bits:
            start = (len(self.turns[base][1]) - 1) // 16 * 16
        state = make_state(ids, start=start, row_bytes=9000, snapshot_bytes=snapshot, seed=seed)
        wanted = payloads(*state)
        if start:
            # Named, as whoever went on from it does: the turn may have rows of its own before.
            wanted = self.states[base][: start // 16] + wanted
        else:
            base = None
        try:
            if crash_after is None:
                self.store.save_state(turn, *state, base=base)
            else:
                self.crash_in(crash_after, lambda: self.store.save_state(turn, *state, base=base))
        except StoreFull:
            self.forget_evicted()  # the state is larger than what may be evicted for it
            return
        self.forget_evicted()
        if crash_after is None:
            assert self.store.find_state(turn) is not None
            self.states[turn] = wanted
        elif (reader := self.store.load_state(turn, MODEL)) is not None:
            # All or nothing: the state before the save, or that after it.
            found = [bytes(piece.payload) for piece in reader]
            assert found == wanted or found == self.states[turn]
            self.states[turn] = found

    @precondition(lambda self: self.turns)
    @rule(pick=st.integers(0, 99), crash_after=st.one_of(st.none(), st.integers(0, 1)))
    def delete(self, pick: int, crash_after: int | None) -> None:
        conversation = self.turns[self.pick(pick)][0]
        if crash_after is None:
            assert self.store.delete_conversation(conversation)
        else:
            self.crash_in(crash_after, lambda: self.store.delete_conversation(conversation))
        if self.store.get_conversation(conversation) is None:
            for turn in [turn for turn, one in self.turns.items() if one[0] == conversation]:
                self.states.pop(turn, None)
                del self.turns[turn]
            assert not any(one[0] == conversation for one in self.kept_inside().values())
        self.forget_evicted()  # a preamble goes with the last conversation that begins with it

    def kept_inside(self) -> dict[str, tuple[str, list[int], list[bytes]]]:
        self.forget_evicted()
        return self.inside

    @rule(share=st.floats(0.05, 0.85))
    def evict(self, share: float) -> None:
        self.store.evict(int(SIZE * share))
        assert self.store.stats()["live_share"] <= 0.88 - share + 0.01
        self.forget_evicted()

    @precondition(lambda self: self.states)
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        turn = list(self.states)[pick % len(self.states)]
        assert self.store.drop_state(turn)
        del self.states[turn]

    @rule(repair=st.booleans())
    def reopen(self, repair: bool) -> None:
        self.store.close()
        self.store = Store.open(self.path, SIZE, create=False)
        self.store.serve(MODEL, 16)
        assert self.store.check(repair=repair).clean

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def equal_to_the_twin(self) -> None:
        report = self.store.check()
        assert report.clean, report.problems
        for turn, wanted in self.states.items():
            reader = self.store.load_state(turn, MODEL)
            assert reader is not None
            assert [bytes(piece.payload) for piece in reader] == wanted
            assert reader.report.complete
        assert self.store.stats()["states"] == sum(
            map(len, (self.states, self.preambles, self.inside))
        )
        assert self.store.stats()["inside_prompts"] == len(self.inside)
        for name, (_, ids, wanted) in self.inside.items():
            prompt = [*ids, 7]
            found = self.store.longest_prefix(prompt, "anna")
            assert found is not None
            assert found.tokens == len(ids)
            reader = self.store.load_prefix(Prefix(len(ids), name), prompt)
            assert reader is not None
            assert [bytes(piece.payload) for piece in reader] == wanted
        prompt = [*range(48), 7]
        found = self.store.longest_prefix(prompt, "anna")
        longest = max((tokens for tokens, _ in self.preambles.values()), default=0)
        assert (found.tokens if found else 0) >= longest
        for name, (tokens, wanted) in self.preambles.items():
            reader = self.store.load_prefix(Prefix(tokens, name), prompt)
            assert reader is not None
            assert [bytes(piece.payload) for piece in reader] == wanted
        for turn, (_, ids) in self.turns.items():
            assert self.store.turn_ids(turn) == ids
        assert self.store.stats()["in_use"] == 0

    # ------------------------------------------------------------------ help

    def fresh(self) -> int:
        self.next_id += 1
        return 1000 + self.next_id

    def add(
        self,
        conversation: str,
        parent: str | None,
        ids: list[int],
        n: int,
        save: tuple[int, bool] | None,
    ) -> None:
        turn = make_turn(ids[:n], ids[n:], conversation=conversation, parent=parent)
        self.store.put_turn(turn)
        before = self.turns[parent][1] if parent else []
        self.turns[turn.id] = (conversation, before + ids)
        self.parents[turn.id] = parent
        if save:
            self.save(turn.id, save[0], False, save[1], None)

    def crash_in(self, commits: int, work: Callable[[], Any]) -> None:
        """Let `work` commit `commits` transactions, then die and start again."""
        environment = self.store.environment
        write = environment.write
        left = commits

        def dying(task: Callable[[Any], Any]) -> Any:
            nonlocal left
            if left == 0:
                raise Crash
            left -= 1
            return write(task)

        environment.write = dying  # type: ignore[method-assign]
        with contextlib.suppress(Crash, StoreError):
            work()
        environment.close()
        self.store = Store.open(self.path, SIZE, create=False)
        self.store.serve(MODEL, 16)


Twin.TestCase.settings = settings(
    max_examples=400 if SOAK else 20,
    stateful_step_count=40 if SOAK else 25,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestTwin = Twin.TestCase
