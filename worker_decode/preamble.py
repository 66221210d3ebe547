"""States within a prompt, stored by themselves for other prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model import Caches, Model
from scheduler.record import Job
from store.codec.header import Piece
from store.errors import StoreError
from store.store import Store
from worker_decode.hot import Held
from worker_decode.marks import cut_of
from worker_decode.saver import Saver
from worker_decode.states import export


class Sharing:
    """Stores states at the marks of prompts, each once. Used by the engine's thread alone."""

    def __init__(self, model: Model, store: Store, saver: Saver) -> None:
        self._model = model
        self._store = store
        self._saver = saver

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
        if self._saver.room and not self._known(job, ids):
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
            if self._saver.room and not self._known(job, ids):
                self._put(job, before, ids, rows, snapshot)
            before = len(ids)

    def _put(
        self, job: Job, before: int, ids: list[int], rows: Sequence[Piece], snapshot: Piece
    ) -> None:
        inside = len(ids) != cut_of(job, self._model.layout)
        self._saver.put_prefix(
            job.owner, ids, rows, snapshot,
            conversation=(job.conversation or "") if inside else "",
            gain=len(ids) - before if inside else 0,
        )  # fmt: skip

    def _known(self, job: Job, ids: list[int]) -> bool:
        try:
            found = self._store.longest_prefix([*ids, 0], job.owner)
        except StoreError:
            return True  # it says so itself when it is asked for a state
        return found is not None and found.tokens == len(ids)
