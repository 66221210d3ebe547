"""How long a machine takes: from the file that `tandem calibrate` writes, or a shipped one.

A shipped profile says in `source` whose claims it holds. Between measured points, time is
interpolated; nothing is fitted to the times of whole requests.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Self

from scheduler.record import JobError

VERSION = 1
#: A chunk within so much of the best rate is as good: the smallest of those is used, as the engine
#: does.
CLOSE = 0.97
#: No forward of so few tokens or fewer, unless the whole is that short, as the engine plans.
SHORT = 8
BUILT_IN = ("m3-ultra", "m5-ultra")


@dataclass(frozen=True)
class Profile:
    """Rates of one machine for one model.

    `prefill`: (chunk, context, tokens/s over the whole context); `decode`: (rows, context, tokens/s
    of all rows). `state`: bytes of an empty state and per token. `forwards`: (tokens, context,
    seconds) of single forwards shorter than any chunk. `prompt_s`: what a prompt costs the prefill
    node besides its forwards. `start_s`: from the arrival of a state to the first step.
    `handing_over_s`: what handing a state over costs the prefill node, seconds a token. `beside`:
    how many times as long prefill and decode take while the other role works on the same machine.
    """

    name: str
    prefill: tuple[tuple[int, int, float], ...]
    decode: tuple[tuple[int, int, float], ...]
    state: tuple[float, float] = (0.0, 0.0)
    source: str = ""
    default_chunk: int = 0
    start_s: float = 0.0
    handing_over_s: float = 0.0
    forwards: tuple[tuple[int, int, float], ...] = ()
    prompt_s: float = 0.0
    beside: tuple[float, float] = (1.0, 1.0)
    _steps: dict[tuple[int, int], float] = field(
        init=False, default_factory=dict, repr=False, compare=False, hash=False
    )

    @classmethod
    def parse(cls, name: str, raw: Mapping[str, Any]) -> Self:
        """From the file's JSON. Raises JobError where it is none or holds no rates."""
        try:
            if raw["version"] != VERSION:
                raise JobError(f"{name}: a profile of version {raw['version']}, not {VERSION}")
            prefill = [(int(p["chunk"]), int(p["context"]), p["rate"]) for p in raw["prefill"]]
            decode = [(int(p["width"]), int(p["context"]), p["rate"]) for p in raw["decode"]]
            state = raw.get("state") or {}
            beside = raw.get("beside") or {}
            forwards = [
                (int(p["tokens"]), int(p["context"]), float(p["seconds"]))
                for p in raw.get("forwards") or ()
            ]
            found = cls(
                name,
                tuple(sorted(prefill)),
                tuple(sorted(decode)),
                (float(state.get("fixed", 0)), float(state.get("per_token", 0))),
                str(raw.get("source", "")),
                int(raw.get("default_chunk", 0)),
                float(raw.get("start_s", 0)),
                float(raw.get("handing_over_s_per_token", 0)),
                tuple(sorted(forwards)),
                float(raw.get("prompt_s", 0)),
                (float(beside.get("prefill", 1)), float(beside.get("decode", 1))),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise JobError(f"{name} is not a profile: make one with tandem calibrate") from None
        points = [*found.prefill, *found.decode]
        if not (found.prefill and found.decode) or not _all_above(0, *points):
            raise JobError(f"{name} holds no rates: make it with tandem calibrate")
        if not _all_above(0, *((tokens, seconds) for tokens, _, seconds in found.forwards)):
            raise JobError(f"{name} holds forwards of no length or no time")
        if not all(value >= 1 for value in found.beside):
            raise JobError(f"{name}: work beside other work takes no less time than alone")
        times = (found.start_s, found.handing_over_s, found.prompt_s, *found.state)
        if not all(value >= 0 for value in times):
            raise JobError(f"{name} holds a negative time or size")
        return found

    @property
    def chunk(self) -> int:
        """Tokens per forward where nothing else is asked for."""
        if self.default_chunk:
            return self.default_chunk
        best = max(rate for _, _, rate in self.prefill)
        return min(chunk for chunk, _, rate in self.prefill if rate >= CLOSE * best)

    def rate(self, chunk: int) -> float:
        """Prefill tokens per second at the contexts measured, for chunks of `chunk` tokens."""
        return chunk / self._forward(chunk, 0)

    def chunk_s(self, start: int, length: int) -> float:
        """Seconds of one prefill forward of tokens [start, start + length)."""
        return self._forward(length, start)

    def prefill_s(self, start: int, stop: int, chunk: int) -> float:
        """Seconds of the forwards that compute tokens [start, stop)."""
        seconds = 0.0
        while start < stop:
            length = next_chunk(start, stop, chunk)
            seconds += self.chunk_s(start, length)
            start += length
        return seconds

    def step_s(self, width: int, context: float) -> float:
        """Seconds of one decode step of `width` rows, the longest of which holds `context` tokens.

        Few rows run one after another where that was faster than merged. Beyond the widths that
        were measured time grows as between the last two; with one width alone, rows take turns.
        """
        if width < self.merge_from:
            return width * self._step(1, context)
        return self._step(width, context)

    @cached_property
    def merge_from(self) -> int:
        """The least number of rows that are faster merged, at every context; 2 unless measured."""
        rates = {(w, c): rate for w, c, rate in self.decode}
        contexts = {c for _, c, _ in self.decode}
        for width in self._widths:
            if width > 1 and all(
                rates.get((width, c), 0) >= rates.get((1, c), 0) for c in contexts
            ):
                return width
        return self._widths[-1] + 1 if len(self._widths) > 1 else 2

    def state_bytes(self, tokens: int) -> float:
        """Bytes of a state of `tokens` tokens."""
        return self.state[0] + self.state[1] * tokens

    # --- interpolation -----------------------------------------------------------------------

    @cached_property
    def _widths(self) -> list[int]:
        return sorted({width for width, _, _ in self.decode})

    @cached_property
    def _lines(self) -> dict[int, tuple[float, float]]:
        """Per length of a forward: seconds per token at position 0, and what each position adds.

        Over a whole context of T tokens 1/rate = a + b T / 2, so two contexts give both; with one
        the cost is taken to grow as it does for other lengths.
        """
        lines = {}
        for chunk in sorted({chunk for chunk, _, _ in self.prefill}):
            points = [(t, 1 / rate) for c, t, rate in self.prefill if c == chunk]
            slope = 0.0
            if len(points) > 1:
                (t0, y0), (t1, y1) = points[0], points[-1]
                slope = max(0.0, (y1 - y0) / (t1 - t0))
            lines[chunk] = (max(points[0][1] - slope * points[0][0], 0.0), 2 * slope)
        # A size that was measured at one context only grows as the others do.
        growth = max(slope for _, slope in lines.values())
        for chunk, (base, slope) in lines.items():
            if growth and not slope:
                context = next(t for c, t, _ in self.prefill if c == chunk)
                lines[chunk] = (max(base - growth * context / 2, base / 2), growth)
        short = {
            tokens: (max(each - growth * (context + tokens / 2), each / 2), growth)
            for tokens, context, seconds in self.forwards
            if tokens < min(lines) and (each := seconds / tokens)
        }
        return dict(sorted({**short, **lines}.items()))

    def _forward(self, length: int, start: int) -> float:
        """Seconds of a forward of `length` tokens at position `start`."""

        def at(chunk: int) -> float:
            base, slope = self._lines[chunk]
            return chunk * (base + slope * (start + chunk / 2))

        sizes = list(self._lines)
        if length <= sizes[0]:
            step = self._step(1, start)
            if self.forwards:  # measured down to here: below it a step is the other end
                return max(line([(1, step), (sizes[0], at(sizes[0]))], length), step)
            # In proportion, but a forward costs as much as a step at least.
            return max(length / sizes[0] * at(sizes[0]), self._step(1, 0))
        if length >= sizes[-1]:
            return length / sizes[-1] * at(sizes[-1])
        right = bisect_right(sizes, length)
        low, high = sizes[right - 1], sizes[right]
        return at(low) + (at(high) - at(low)) * (length - low) / (high - low)

    def _step(self, width: int, context: float) -> float:
        key = (width, int(context))
        known = self._steps.get(key)
        if known is None:
            times = [(w, self._at_context(w, context)) for w in self._widths]
            known = times[0][1] * width / times[0][0] if len(times) == 1 else line(times, width)
            if len(self._steps) < 1_000_000:
                self._steps[key] = known
        return known

    def _at_context(self, width: int, context: float) -> float:
        points = [(c, w / rate) for w, c, rate in self.decode if w == width]
        if len(points) == 1:
            return points[0][1]
        return max(line(points, context), points[0][1])


def _all_above(least: float, *points: Sequence[float]) -> bool:
    """Whether all numbers are; what is no number is not."""
    return all(value > least for point in points for value in point)


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines between sorted points, the outer ones prolonged."""
    at = min(max(1, bisect_right(points, (x, float("inf")))), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def next_chunk(start: int, stop: int, chunk: int) -> int:
    """Length of the next forward of tokens [start, stop): `chunk`, or less at the end."""
    left = stop - start
    if left <= chunk:
        return left
    if left - chunk <= SHORT:
        return left - left // 2
    return chunk


def load(name: str) -> Profile:
    """A shipped profile by name, or one from a file. Raises JobError naming what there is."""
    if name in BUILT_IN:
        file = resources.files("scheduler.data") / "profiles" / f"{name}.json"
        return Profile.parse(name, json.loads(file.read_text(encoding="utf-8")))
    try:
        raw = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError:
        raise JobError(
            f"no profile {name!r}: name a file that tandem calibrate wrote, or one of "
            f"{', '.join(BUILT_IN)}"
        ) from None
    except ValueError:
        raise JobError(f"{name} is not a profile: make one with tandem calibrate") from None
    if not isinstance(raw, dict):
        raise JobError(f"{name} is not a profile: make one with tandem calibrate")
    return Profile.parse(Path(name).stem, raw)
