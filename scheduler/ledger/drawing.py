"""A ledger as a timeline: one row a lane, for a web page (SVG) or a terminal (cells)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from scheduler.ledger.account import LANES

#: Colours of stages, legible on white and on black; stages that are not named share the last.
COLOURS: dict[str, str] = {
    "wait": "#9e9e9e", "no prefill node": "#616161", "admit": "#bdbdbd",
    "tokenise": "#7e57c2", "find": "#9575cd",
    "prefill": "#1e88e5", "pack": "#00acc1", "send": "#26c6da", "between": "#90caf9",
    "offer": "#4dd0e1", "hand off": "#00897b", "wire": "#26a69a", "unpack": "#43a047",
    "restore": "#7cb342", "take over": "#9ccc65", "set up": "#c0ca33", "first decode": "#fb8c00",
    "decode": "#ffb300", "flush": "#e64a19", "record": "#d81b60", "copy": "#ad1457",
    "save": "#8e24aa", "lost run": "#e53935", "running": "#64b5f6",
}  # fmt: skip
OTHER = "#78909c"
GAP = "#f44336"
_ROW, _BAR, _LEFT, _TOP = 22, 14, 64, 20
_MOST = 1500


def colour(stage: str) -> str:
    """The colour of a stage."""
    return COLOURS.get(stage, OTHER)


def lanes_of(ledger: Mapping[str, Any]) -> list[str]:
    """The lanes that a ledger has something in, from the request to the store."""
    used = {span["lane"] for span in ledger["spans"]}
    return [lane for lane in LANES if lane in used]


def length(ledger: Mapping[str, Any]) -> float:
    """Seconds that a drawing spans: to the end of the response, or of what followed it at once.

    A state that is saved long after the end would leave nothing to be seen of the rest: at most a
    quarter is added for what came after the end.
    """
    total = float(ledger["seconds"])
    last = max((s["start"] + s["seconds"] for s in ledger["spans"]), default=total)
    return max(total, min(last, 1.25 * total)) or 1e-6


def svg(ledger: Mapping[str, Any], width: int = 960) -> str:
    """The timeline as one SVG element, to be put into a page as it is or served alone.

    `ledger` is what `ledger_of` returns. All text in it is escaped; it holds no script, no style
    sheet and no reference to anything outside.
    """
    lanes, whole = lanes_of(ledger), length(ledger)
    scale = (width - _LEFT - 8) / whole
    height = _TOP + _ROW * (len(lanes) + 1) + 8
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
        f"<title>{escape(str(ledger['id']))}: {_number(ledger['seconds'])} s</title>",
    ]
    for tick in _ticks(whole):
        x = _LEFT + tick * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{height - 8}" '
            f'stroke="#8884" /><text x="{x:.1f}" y="12" fill="currentColor" '
            f'text-anchor="middle">{tick:g} s</text>'
        )
    for row, lane in enumerate(lanes):
        y = _TOP + _ROW * row
        parts.append(f'<text x="4" y="{y + 12}" fill="currentColor">{escape(lane)}</text>')
        spans = [span for span in ledger["spans"] if span["lane"] == lane]
        for span in _widest(spans):
            parts.append(_bar(span, y, scale, whole))
    y = _TOP + _ROW * len(lanes)
    parts.append(f'<text x="4" y="{y + 12}" fill="currentColor">unknown</text>')
    for gap in ledger["remainder"]["gaps"]:
        about = {**gap, "stage": f"not explained, between {gap['after']} and {gap['before']}"}
        parts.append(_bar(about, y, scale, whole, GAP))
    return "".join([*parts, "</svg>"])


def _bar(
    span: Mapping[str, Any], y: float, scale: float, whole: float, fill: str | None = None
) -> str:
    start = min(max(0.0, _finite(span["start"])), whole)
    seconds = min(max(0.0, _finite(span["seconds"])), whole - start)
    stage = str(span["stage"])
    told = f"{stage}: {_number(span['seconds'])} s from {_number(span['start'])} s"
    for name in ("tokens", "bytes", "queue", "node"):
        if span.get(name):
            told += f", {name} {span[name]}"
    return (
        f'<rect x="{_LEFT + start * scale:.2f}" y="{y}" width="{max(0.6, seconds * scale):.2f}" '
        f'height="{_BAR}" fill="{fill or colour(stage)}"><title>{escape(told)}</title></rect>'
    )


def _widest(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most so many bars a lane, the longest ones, in their order."""
    if len(spans) <= _MOST:
        return list(spans)
    kept = sorted(spans, key=lambda span: -span["seconds"])[:_MOST]
    return sorted(kept, key=lambda span: span["start"])


def _ticks(whole: float) -> list[float]:
    step: float = 10 ** math.floor(math.log10(whole))
    for factor in (0.2, 0.5, 1.0):
        if whole / (step * factor) <= 10:
            step *= factor
            break
    return [round(step * i, 9) for i in range(int(whole / step) + 1)]


def cells(ledger: Mapping[str, Any], lane: str, width: int) -> list[str | None]:
    """A lane in so many cells: the stage that covers most of each, or None where none does."""
    whole = length(ledger)
    cell = whole / width
    covered: list[dict[str, float]] = [{} for _ in range(width)]
    for span in ledger["spans"]:
        if span["lane"] != lane:
            continue
        start, stop = span["start"], span["start"] + span["seconds"]
        for index in range(max(0, int(start / cell)), min(width - 1, int(stop / cell)) + 1):
            part = min(stop, (index + 1) * cell) - max(start, index * cell)
            if part > 0:
                found = covered[index]
                found[span["stage"]] = found.get(span["stage"], 0.0) + part
    return [max(found, key=found.__getitem__) if found else None for found in covered]


def _finite(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else 0.0


def _number(value: Any) -> str:
    return f"{_finite(value):.3f}"
