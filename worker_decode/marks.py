"""Where within a prompt a snapshot is taken, so that another prompt can go on from there.

Rows can be cut wherever a forward ended; recurrent state is what it is at one position, and going
back means a snapshot that was taken there. Four places are worth one: the end of the preamble,
which other conversations share; before the last of the user's messages, which is edited and sent
again; the end of the prompt, from which an answer is asked for once more; and, on a long way
between these, a sparse lattice for whoever goes back further. Each has to save the forwards of
enough tokens for its bytes. Where the state is rows alone nothing is stored for the last two, since
any end of a forward will do.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.names import SEEN
from scheduler.record import Job
from store.codec.layout import Layout

MOST_SNAPSHOT = 4
"""A snapshot that is larger than so many times the rows before it takes more room than it saves
work: for GLM-5.3-Flash one is kept from about 3,200 tokens on."""
ROWLESS = 8192
"""What a token counts, in bytes, where a model has recurrent state and no rows at all."""
LEAST_TOKENS = 256
"""Fewer tokens within a prompt are computed again rather than stored apart."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Positions at which a state is kept, 0 or none where none is.

    All but `end` are whole numbers of blocks, so that what goes on from there shares the blocks
    before; what is left of the preamble or of a message is computed with the rest.
    """

    preamble: int = 0
    inside: tuple[int, ...] = ()
    end: int = 0
    """The position before the prompt's last token."""

    @property
    def before(self) -> tuple[int, ...]:
        """All positions before the prompt's end, in order."""
        return tuple(sorted({*self.inside, *([self.preamble] if self.preamble else [])}))

    @property
    def every(self) -> tuple[int, ...]:
        """All positions, in order."""
        return (*self.before, *([self.end] if self.end else []))


def marks_of(job: Job, layout: Layout, most: int, held: int = 0) -> Marks:
    """The marks of a job's prompt of which the first `held` tokens have a state already.

    `most` bounds those that are no preamble's. Nothing is kept of a request that is not stored,
    and nothing inside a prompt with images: its positions stand elsewhere.
    """
    if not job.request.get("store", True):
        return Marks()
    preamble = cut_of(job, layout)
    if not most or any(token >= SEEN for token in job.prompt_ids):
        return Marks(preamble)
    at = max(preamble, held)
    last = _told(job, "last", layout)
    inside = [last] if pays(layout, at, last) else []
    if layout.rows_alone:
        return Marks(preamble, tuple(inside))
    stop = job.prompt_tokens - 1
    end = stop if len(inside) < most and pays(layout, max([at, *inside]), stop) else 0
    room = most - len(inside) - bool(end)
    lattice = _lattice(layout, at, max(inside, default=stop), room)
    return Marks(preamble, tuple(sorted({*inside, *lattice})), end)


def cut_of(job: Job, layout: Layout) -> int:
    """The end of the job's preamble in whole blocks; 0 where no state is kept there."""
    if not job.request.get("store", True):
        return 0
    cut = _told(job, "preamble", layout)
    return cut if _snapshot(layout, cut) <= MOST_SNAPSHOT * _rows(layout, 0, cut) else 0


def pays(layout: Layout, at: int, position: int) -> bool:
    """Whether a snapshot at `position` is worth its bytes where the nearest one before is `at`."""
    if position - at < LEAST_TOKENS:
        return False
    return _snapshot(layout, position) <= MOST_SNAPSHOT * _rows(layout, at, position)


def _lattice(layout: Layout, at: int, stop: int, room: int) -> list[int]:
    """Up to `room` positions evenly between two others, each with at least as many bytes of rows
    before it as its snapshot has."""
    block, span = layout.block_tokens, stop - at
    each = layout.row_bytes or ROWLESS
    spacing = max(LEAST_TOKENS, block, -(-_snapshot(layout, stop) // each))
    count = min(room, span // spacing - 1)
    found = [at + span * number // (count + 1) for number in range(1, count + 1)]
    return [position - position % block for position in found]


def _told(job: Job, name: str, layout: Layout) -> int:
    """A position that came with the job, in whole blocks."""
    told = (job.request.get("prompt") or {}).get(name)
    if type(told) is not int:
        return 0
    cut = max(0, min(told, job.prompt_tokens - 2))
    return cut - cut % layout.block_tokens


def _rows(layout: Layout, start: int, stop: int) -> int:
    """Bytes of the rows of some tokens, or what they stand for where a model has none."""
    return layout.rows_bytes(start, stop) or ROWLESS * (stop - start)


def _snapshot(layout: Layout, position: int) -> int:
    """Bytes of the snapshot at a position."""
    return layout.state_bytes(position) - layout.rows_bytes(0, position)
