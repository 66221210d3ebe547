"""States within a prompt, stored by themselves for other prompts that begin alike."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from engine.model import Caches, Model
from scheduler.record import Job
from store.codec.chain import Chain
from store.codec.header import Piece, root
from store.errors import StoreError
from store.objects import owner_tag
from store.prefixes import state_name
from store.store import Store
from worker_decode.hot import Held
from worker_decode.loose import Loose
from worker_decode.marks import cut_of
from worker_decode.saver import Saver
from worker_decode.states import export
from worker_decode.turns import conversation_of

log = logging.getLogger("tandem.decode")


class Sharing:
    """Stores states at the marks of prompts, each once. Used by the engine's thread alone, but for
    `ended`.

    They are stored before it is known whether the turn is kept: whoever ends one says so, and
    behind what is queued to be saved the states of one that was not kept are dropped, its preamble
    (see `Loose`) after `patience` seconds.
    """

    def __init__(self, model: Model, store: Store, saver: Saver, patience: float) -> None:
        self._model = model
        self._store = store
        self._saver = saver
        self.loose = Loose(store, saver, patience)
        self._put_for: dict[str, tuple[str, list[str]]] = {}
        self._ended: deque[tuple[str, bool]] = deque()

    def begins(self, job: Job) -> None:
        """A turn is under way: its preamble may be stored already, or by another turn, although
        nothing of it came with this one's state."""
        layout = self._model.layout
        if cut := cut_of(job, layout):
            chain = Chain(root(self._model.fingerprint), job.prompt_ids, layout.block_tokens)
            self.loose.used(job.id, state_name(owner_tag(job.owner), chain.at(cut)))

    def computed(
        self,
        job: Job,
        places: Sequence[int],
        caches: Caches,
        ids: list[int],
        schedule: list[list[int]],
    ) -> None:
        """One of the marks `places` is reached here: copy its state and store it."""
        before = max((place for place in places if place < len(ids)), default=0)
        if not self._known(job, ids) and self._saver.room:
            rows, snapshot = export(self._model, Held("", caches, ids, [], schedule, 0, 0))
            self._put(job, before, ids, rows, snapshot)

    def arrived(self, job: Job, states: Sequence[Sequence[Piece]], held: int) -> None:
        """States of the prompt's beginnings have come with that of all of it, shortest first; the
        snapshot of each is its last piece. The first `held` tokens had a state before.

        Where too much waits for the disk, a later prompt that begins so brings them again.
        """
        cut = cut_of(job, self._model.layout)
        before = held
        for *rows, snapshot in states:
            ids = job.prompt_ids[: snapshot.header.stop]
            before = max(before, cut if cut < len(ids) else 0)
            if not self._known(job, ids) and self._saver.room:
                self._put(job, before, ids, rows, snapshot)
            before = len(ids)

    def _put(
        self, job: Job, before: int, ids: list[int], rows: Sequence[Piece], snapshot: Piece
    ) -> None:
        inside = len(ids) != cut_of(job, self._model.layout)
        try:
            conversation = conversation_of(job, self._store)
        except StoreError as error:  # its row has begun: it ends by itself
            log.warning("nothing inside the prompt of %s is kept: %s", job.id, error)
            return
        name = state_name(owner_tag(job.owner), snapshot.header.chain, inside=inside)
        if inside:
            self._put_for.setdefault(job.id, (conversation, []))[1].append(name)
        else:
            self.loose.brought(job.id, name)
        self._saver.put_prefix(
            job.owner, ids, rows, snapshot,
            conversation=conversation, gain=max(1, len(ids) - before) if inside else 0,
        )  # fmt: skip

    def ended(self, turn: str, *, kept: bool) -> None:
        """A turn is durable, or is not kept. Any thread; what follows is done by `look_after`."""
        self._ended.append((turn, kept))

    def look_after(self, *, wait: bool = False) -> None:
        """Have what ended turns left behind dropped, while the saver has room, or `wait` for it."""
        while self._ended and (wait or self._saver.room):
            turn, kept = self._ended.popleft()
            if (found := self._put_for.pop(turn, None)) is not None:
                self._saver.do(partial(self._settle, *found, kept))
            self.loose.ended(turn, kept=kept)
        self.loose.look_after(wait=wait)

    def _settle(self, conversation: str, names: list[str], kept: bool) -> None:
        """On the saver's thread."""
        try:
            self._store.settle_inside(conversation, names, kept=kept)
        except StoreError as error:
            log.warning("states of a prompt that was not kept stay until the next start: %s", error)

    def _known(self, job: Job, ids: list[int]) -> bool:
        """Whether the state of `ids` is stored; the job begins with it then."""
        try:
            found = self._store.longest_prefix([*ids, 0], job.owner)
        except StoreError:
            return True  # it says so itself when it is asked for a state
        if found is None or found.tokens != len(ids):
            return False
        self.loose.used(job.id, found.name)
        return True
