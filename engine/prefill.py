"""Chunked prefill of one conversation, handed over one token before its end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from engine.errors import ModelError
from engine.images import Embedded
from engine.memory import fit_chunk
from engine.model import Caches, Model, evaluate
from engine.names import SEEN
from store.codec.twin import twin

# Some models (glm5_next) compute forwards of up to 8 tokens by another path than longer ones, with
# other rounding. A chunk is therefore never that short by accident.
SHORT = 8
MIN_CHUNK = 2 * SHORT + 1


def plan(start: int, stop: int, chunk: int) -> list[int]:
    """The lengths of the forwards that compute tokens [start, stop), none longer than `chunk`.

    All are `chunk` long but the last; a last one of at most 8 tokens is joined with the one before
    and the sum halved. So a forward of 8 tokens or fewer occurs only where the whole is that short.
    Raises `ValueError` for a chunk below 17 or a negative range.
    """
    if chunk < MIN_CHUNK:
        raise ValueError(f"a prefill chunk has at least {MIN_CHUNK} tokens, not {chunk}")
    if stop < start:
        raise ValueError(f"cannot prefill backwards from {start} to {stop}")
    whole, rest = divmod(stop - start, chunk)
    lengths = [chunk] * whole
    if whole and 0 < rest <= SHORT:
        both = chunk + rest
        lengths[-1:] = [both - both // 2, both // 2]
    elif rest:
        lengths.append(rest)
    return lengths


def plan_through(start: int, stop: int, chunk: int, cuts: Sequence[int]) -> list[int]:
    """As `plan`, with a forward that ends at each of the positions `cuts` that lie between."""
    lengths: list[int] = []
    for cut in [*sorted(cut for cut in set(cuts) if start < cut < stop), stop]:
        lengths += plan(start, cut, chunk)
        start = cut
    return lengths


def ends_of(schedule: Sequence[Sequence[int] | int]) -> list[int]:
    """The positions at which the forwards of a schedule end, from token 0 on."""
    return list(accumulate(expand_schedule(schedule)))


def append_schedule(schedule: list[list[int]], length: int) -> None:
    """Add one forward of `length` tokens to a run-length schedule [[length, count], ...]."""
    if schedule and schedule[-1][0] == length:
        schedule[-1][1] += 1
    else:
        schedule.append([length, 1])


def expand_schedule(schedule: Sequence[Sequence[int] | int]) -> list[int]:
    """The lengths of a schedule of plain lengths, [length, count] pairs, or both."""
    lengths: list[int] = []
    for item in schedule:
        if isinstance(item, int):
            lengths.append(item)
        else:
            length, count = item
            lengths += [length] * count
    return lengths


class Prefill:
    """Computes the state of `ids` up to and without the last token, chunk by chunk.

    `caches` hold the first `start` tokens (a fresh list when start is 0). After each `step` the
    caches hold exactly `position` tokens and are evaluated, so that stopping there (to cancel, to
    preempt) needs nothing else. `cuts` are positions where a forward has to end, since a snapshot
    is taken there. `lengths` may give the forwards' lengths instead of the chunk and cuts,
    `embedded` the embeddings of a prompt with images; `rope_delta` is then the one after it.
    """

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        start: int = 0,
        caches: Caches | None = None,
        chunk: int = 0,
        *,
        rope_delta: int = 0,
        lengths: Sequence[int] | None = None,
        embedded: Embedded | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        """Raises `ModelError` for an empty prompt, foreign token ids or one beyond the context."""
        if not ids:
            raise ModelError("the prompt is empty; give at least one token")
        if len(ids) > model.context_length:
            raise ModelError(
                f"the prompt has {len(ids)} tokens and the model's context {model.context_length}; "
                "shorten it"
            )
        if not 0 <= start <= len(ids) - 1 or (start and caches is None):
            raise ValueError(f"cannot start at {start} of {len(ids)} tokens without their state")
        model.check_ids(ids)
        stop = len(ids) - 1
        self.model = model
        self.ids = list(ids)
        self.caches: Caches = model.fresh_cache() if caches is None else caches
        self.position = start
        self.rope_delta = rope_delta if embedded is None else embedded.rope_delta
        self._embedded = embedded
        self.schedule: list[int] = []
        self.inherited = 0
        """Tokens of the state that were computed for another prompt."""
        self._cuts = tuple(cuts)
        self._left = (
            list(lengths)
            if lengths is not None
            else plan_through(start, stop, chunk or model.chunk, self._cuts)
        )
        if sum(self._left) != stop - start or any(length < 1 for length in self._left):
            raise ValueError(f"the schedule does not cover tokens {start} to {stop}")
        self._left.reverse()
        self._bounded = lengths is None

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the hand-over."""
        return len(self.ids) - 1 - self.position

    def twin(self) -> Prefill:
        """Another prefill that stands where this one does; both may go on by themselves.

        They share memory until either grows.
        """
        model, at = self.model, self.position
        fresh = list(twin(model.layout, self.caches, model.fresh_cache(), at))
        lengths = self._left[::-1]
        other = Prefill(
            model, self.ids, at, fresh, rope_delta=self.rope_delta, lengths=lengths,
            embedded=self._embedded, cuts=self._cuts,
        )  # fmt: skip
        other.schedule, other.inherited = list(self.schedule), at
        return other

    @property
    def offset(self) -> int:
        """The offset of positions where this stands; `rope_delta` is the one at the end."""
        return self.rope_delta if self._embedded is None else self._embedded.offset(self.position)

    def see(self, embedded: Embedded) -> None:
        """Take the features of the images that are still to come."""
        self._embedded, self.rope_delta = embedded, embedded.rope_delta

    def replan(self, chunk: int) -> None:
        """Go on with chunks of another size, for instance while a short job waits."""
        self._left = plan_through(self.position, len(self.ids) - 1, chunk, self._cuts)[::-1]

    def step(self) -> tuple[int, int]:
        """Compute and evaluate the next chunk; returns its range [start, stop).

        A chunk that would not fit into memory is halved first, and the rest planned anew. Raises
        `StopIteration` when nothing remains, `ModelError` when no useful chunk fits.
        """
        if not self._left:
            raise StopIteration
        start = self.position
        if self._embedded is None and any(token >= SEEN for token in self.ids[start:]):
            raise ModelError("the images of the prompt are not here; send them again")
        if self._bounded:
            size = fit_chunk(self.model, self._left[-1], start)
            if size < self._left[-1]:
                self.replan(size)
        length = self._left.pop()
        tokens = self.model.tokens(self.ids[start : start + length])
        arguments = None
        if self._embedded is not None:
            arguments = self._embedded.arguments(start, start + length)
        self.model.forward(
            tokens, self.caches, [self.rope_delta], logits=False, arguments=arguments
        )
        evaluate(self.caches)
        self.position = start + length
        self.schedule.append(length)
        return start, self.position

    def run(self) -> Caches:
        """Compute all that remains and return the caches."""
        while self._left:
            self.step()
        return self.caches
