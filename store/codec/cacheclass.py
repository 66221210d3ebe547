"""What a row of the table of cache classes is, and the checks that rows share.

A row says, of one cache object:

- `rows`: the arrays that only grow along the token axis, and how many tokens a row covers;
- `state`: everything that is overwritten, live rows only, as arrays and plain scalars;
- `config`: what the constructor fixed, which must agree on both sides;
- `length`: how many tokens the object has seen, or None where it does not know;
- `restore`: how rows and state go into a fresh object of the same class.

Shapes: B batch (1 for a conversation), H heads, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from store.codec.header import CodecError

Rows = Mapping[str, "mx.array | None"]
State = dict[str, Any]


class Growing(NamedTuple):
    """An array that only grows: `axis` is its token axis, one row covers `ratio` tokens.

    `exact` arrays are taken whole by their class, so their buffer has no spare capacity.
    """

    name: str
    axis: int
    ratio: int = 1
    exact: bool = False


class CacheClass:
    """One row of the table. The default is a class with no rows and no state."""

    free_axes: ClassVar[tuple[int, ...] | None] = ()
    """Axes in which a state array may differ from the model's own; None: all of it may."""

    def config(self, cache: Any) -> State:
        """Settings that a fresh cache of the same model has too."""
        return {}

    def rows(self, cache: Any) -> tuple[Growing, ...]:
        """The growing arrays, in a fixed order; depends on `config` alone."""
        return ()

    def array(self, cache: Any, name: str) -> mx.array | None:
        """The buffer of a growing array, with its slack, or None where it is unset."""
        found: mx.array | None = getattr(cache, name)
        return found

    def length(self, cache: Any) -> int | None:
        """Tokens seen, or None where the class does not count or is still unset."""
        return None

    def state(self, cache: Any) -> State:
        """Overwritten arrays (live rows only) and scalars, by name."""
        return {}

    def window(self, cache: Any) -> int | None:
        """Tokens after which `state` stops growing with the sequence; 0: it never grows."""
        return 0

    def restore(self, cache: Any, rows: Rows, state: State, tokens: int) -> None:
        """Put `tokens` tokens of rows and the state into the fresh `cache`."""


def live(array: mx.array | None, length: int, axis: int = 2) -> mx.array | None:
    """The first `length` rows of a buffer along `axis`."""
    if array is None or array.shape[axis] == length:
        return array
    return array[(slice(None),) * axis + (slice(length),)]


def padded(array: mx.array | None, length: int, axis: int) -> mx.array | None:
    """A buffer of `length` rows along `axis` that begins with `array`, zeros after."""
    if array is None or array.shape[axis] >= length:
        return array
    shape = list(array.shape)
    shape[axis] = length - shape[axis]
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=axis)


def array_in(state: State, name: str, ndim: int | None = None) -> mx.array | None:
    """The array `name` of a restored state, or None. Raises CodecError on anything else."""
    value = state[name]
    if value is not None and not isinstance(value, mx.array):
        raise CodecError(f"{name} is not an array: recompute this state")
    if value is not None and ndim is not None and value.ndim != ndim:
        raise CodecError(f"{name} has {value.ndim} axes, not {ndim}: recompute this state")
    return value


def int_in(state: State, name: str, most: int, *, exact: bool = False) -> int:
    """The integer `name` of a restored state, in [0, most] (or `most` itself)."""
    value = state[name]
    if type(value) is not int or not 0 <= value <= most or (exact and value != most):
        raise CodecError(f"{name} is {value!r}, out of range: recompute this state")
    return value


def list_in(state: State, name: str, size: int) -> list[Any]:
    """The list `name` of `size` restored values."""
    value = state[name]
    if not isinstance(value, list) or len(value) != size:
        raise CodecError(f"{name} is not a list of {size}: recompute this state")
    return list(value)
