"""A device's measured rates for one model, and what follows from them."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.device import Device
from engine.errors import ModelError

NAME = ".tandem-profile"  # beside the model; without a suffix, so that no digest takes it in
VERSION = 1
# A smaller chunk is preempted sooner and its rows leave sooner: it wins unless slower by more.
CLOSE = 0.97


@dataclass(frozen=True)
class Profile:
    """What `tandem calibrate` measured. Rates are tokens per second.

    `prefill` has {chunk, context, rate}, `decode` {width, context, rate} with the width of a merged
    batch, `compiled` what a compiled decode step gave beside a plain one, `state` the bytes of a
    state: `fixed`, and `per_token` more. `forwards` has {tokens, context, seconds} of single short
    forwards, `prompt_s` is what a prompt costs besides its forwards. `spread`: how much rounds of a
    measurement differed at most, as a part. `beside`: how many times as long prefill and decode
    take while the other role works on the same machine. `start_s`: from the arrival of a state to
    the first step, which only service shows (`tandem history rates`). `device`, `mlx` and `dtype`
    say where; elsewhere the profile does not count.
    """

    device: str
    mlx: str
    dtype: str
    prefill: list[dict[str, float]] = field(default_factory=list)
    decode: list[dict[str, float]] = field(default_factory=list)
    compiled: dict[str, Any] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    forwards: list[dict[str, float]] = field(default_factory=list)
    prompt_s: float = 0.0
    spread: float = 0.0
    beside: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0

    @property
    def chunk(self) -> int:
        """The smallest prefill chunk within 3 % of the best rate; 0 without measurements."""
        best = max((point["rate"] for point in self.prefill), default=0)
        good = [int(p["chunk"]) for p in self.prefill if p["rate"] >= CLOSE * best]
        return min(good, default=0)

    @property
    def merge_from(self) -> int:
        """The least number of rows that are faster merged than one after another, at any context.

        2 without measurements; more than any width measured where merging never pays.
        """
        widths = sorted({int(point["width"]) for point in self.decode})
        rates = {(int(p["width"]), int(p["context"])): p["rate"] for p in self.decode}
        contexts = {context for _, context in rates}
        for width in widths:
            if width > 1 and all(
                rates.get((width, c), 0) >= rates.get((1, c), 0) for c in contexts
            ):
                return width
        return widths[-1] + 1 if len(widths) > 1 else 2

    def row_rate(self, width: int, context: int) -> float:
        """Tokens per second that one of `width` rows gets, each of `context` tokens; 0 if unknown.

        Of the measured contexts the nearest; between two widths the step time is interpolated.
        """
        contexts = {int(point["context"]) for point in self.decode}
        if not contexts:
            return 0.0
        near = min(contexts, key=lambda c: (abs(c - context), c))
        steps = sorted(
            (int(p["width"]), p["width"] / p["rate"])
            for p in self.decode
            if p["context"] == near and p["rate"] > 0
        )
        if not steps:
            return 0.0
        below = [step for step in steps if step[0] <= width] or steps[:1]
        above = [step for step in steps if step[0] >= width] or steps[-1:]
        (w0, s0), (w1, s1) = below[-1], above[0]
        if w0 == w1:
            return 1.0 / s0
        return 1.0 / (s0 + (s1 - s0) * (width - w0) / (w1 - w0))

    def facts(self) -> dict[str, Any]:
        """For reports."""
        return {**asdict(self), "chunk": self.chunk, "merge_from": self.merge_from}


def find(model_dir: Path, device: Device) -> Profile | None:
    """The profile beside the model, if it was made on this kind of device with this MLX."""
    try:
        data = json.loads((model_dir / NAME).read_text(encoding="utf-8"))
        if data.pop("version") != VERSION:
            return None
        profile = Profile(**data)
        if (profile.device, profile.mlx, profile.dtype) != (device.name, device.mlx, device.dtype):
            return None
        return profile if profile.chunk >= 0 and profile.merge_from > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or one that another version wrote: the defaults hold


def prefill_rate(profile: Profile | None) -> float:
    """The best measured rate of prefill in tokens per second; 0 without measurements."""
    return max((point["rate"] for point in profile.prefill), default=0.0) if profile else 0.0


def record(model_dir: Path, profile: Profile) -> Path:
    """Write the profile beside the model, at once or not at all; returns where.

    Raises `ModelError` when the directory cannot be written.
    """
    return write(model_dir / NAME, profile)


def write(path: Path, profile: Profile) -> Path:
    """Write the profile to a file, at once or not at all; returns where. Raises `ModelError`."""
    folder = path.parent
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=NAME, delete=False) as file:
            json.dump({"version": VERSION, **asdict(profile)}, file)
        os.replace(file.name, path)
    except OSError as error:
        raise ModelError(f"the profile cannot be written to {folder} ({error})") from error
    return path
