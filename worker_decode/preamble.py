"""The end of the preamble that a prompt shares with others, where its state is kept by itself."""

from __future__ import annotations

from engine.model import Caches, Model
from scheduler.record import Job
from store.codec.header import Piece
from store.codec.layout import Layout
from store.errors import StoreError
from store.store import Store
from worker_decode.hot import Held
from worker_decode.saver import Saver
from worker_decode.states import export

MOST_SNAPSHOT = 4
"""A snapshot that is larger than so many times the rows before it takes more room than it saves
work: for GLM-5.3-Flash a preamble is kept from about 3,200 tokens on."""


def cut_of(job: Job, layout: Layout) -> int:
    """The position at which a state is kept for prompts that begin alike; 0 where none is.

    A whole number of blocks, so that each conversation goes on from the stored ones; what is left
    of the preamble is computed with the rest. Nothing is kept of a request that is not stored.
    """
    block_tokens = layout.block_tokens
    told = (job.request.get("prompt") or {}).get("preamble")
    if type(told) is not int or not job.request.get("store", True):
        return 0
    cut = min(told, job.prompt_tokens - 2)
    cut = max(0, cut - cut % block_tokens)
    rows = layout.rows_bytes(0, cut)
    return cut if layout.state_bytes(cut) - rows <= MOST_SNAPSHOT * rows else 0


class Sharing:
    """Stores the ends of preambles, each once. Used by the engine's thread alone."""

    def __init__(self, model: Model, store: Store, saver: Saver) -> None:
        self._model = model
        self._store = store
        self._saver = saver

    def computed(self, job: Job, caches: Caches, ids: list[int], schedule: list[list[int]]) -> None:
        """The end of a preamble is computed here: copy its state and store it."""
        if self._saver.room and not self._known(job, ids):
            rows, snapshot = export(self._model, Held("", caches, ids, [], schedule, 0, 0))
            self._saver.put_prefix(job.owner, ids, rows, snapshot)

    def arrived(self, job: Job, pieces: list[Piece]) -> None:
        """The state of a preamble has come with that of a prompt; its snapshot is the last piece.

        Where too much waits for the disk, a later prompt with this preamble brings it again.
        """
        ids = job.prompt_ids[: pieces[-1].header.stop]
        if self._saver.room and not self._known(job, ids):
            self._saver.put_prefix(job.owner, ids, pieces[:-1], pieces[-1])

    def _known(self, job: Job, ids: list[int]) -> bool:
        try:
            found = self._store.longest_prefix([*ids, 0], job.owner)
        except StoreError:
            return True  # it says so itself when it is asked for a state
        return found is not None and found.tokens == len(ids)
