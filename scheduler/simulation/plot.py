"""Queue lengths and utilisation over time as a picture: SVG, or PNG where resvg is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from scheduler.record import JobError
from scheduler.simulation.pipeline import Pipeline

WIDTH, HEIGHT, LEFT, RIGHT, GAP = 900, 230, 70, 190, 46
COLOURS = ("#1f6fb2", "#d1672a", "#3a8f4d", "#8a4fa3", "#b33a5b", "#6b6b6b")
#: Columns over which busy times are averaged.
BINS = 120

Points = Sequence[tuple[float, float]]


def check(path: Path) -> None:
    """Raises JobError for a kind of picture that cannot be written; the file's ending names it."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise JobError(f"{path}: pictures are written as .svg or .png")
    if kind == ".png":
        _resvg()
    if not path.parent.is_dir():
        raise JobError(f"{path} cannot be written: there is no directory {path.parent}")


def draw(path: Path, sim: Pipeline) -> None:
    """Write the picture of a run that has ended.

    Raises JobError for a kind that `check` refuses, and where it cannot be written.
    """
    check(path)
    kind = path.suffix.lower()
    svg = picture(sim)
    data = svg.encode() if kind == ".svg" else _png(svg)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}") from None


def picture(sim: Pipeline) -> str:
    """The run as SVG: what waited above, how busy each machine was below."""
    start = min(turn.at for turn in sim.turns)
    stop = max(turn.ended for turn in sim.turns)
    queues = {name: _steps(points, stop) for name, points in sorted(sim.lengths.items())}
    busy = {node.name: node.busy.spans for node in sim.prefill}
    busy |= {name: node.busy.spans for name, node in sim.decode.items()}
    used = {name: _share(spans, start, stop) for name, spans in busy.items()}
    most = max((y for points in queues.values() for _, y in points), default=1)
    total = 2 * (HEIGHT + GAP) + 20
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" '
            f'viewBox="0 0 {WIDTH} {total}" font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
        *_panel("waiting requests", queues, (start, stop), max(1.0, most), 0, percent=False),
        *_panel("busy", used, (start, stop), 1.0, HEIGHT + GAP, percent=True),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(
    title: str,
    lines: Mapping[str, Points],
    span: tuple[float, float],
    most: float,
    top: int,
    *,
    percent: bool,
) -> list[str]:
    start, stop = span
    wide, high, base = WIDTH - LEFT - RIGHT, HEIGHT - 40, top + HEIGHT

    def x(at: float) -> float:
        return LEFT + wide * (at - start) / max(stop - start, 1e-9)

    def y(value: float) -> float:
        return base - high * value / most

    parts = [f'<text x="{LEFT}" y="{top + 26}" font-weight="bold">{escape(title)}</text>']
    for quarter in range(5):
        value, at = most * quarter / 4, start + (stop - start) * quarter / 4
        label = f"{value:.0%}" if percent else f"{value:.3g}"
        parts += [
            (
                f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
                'stroke="#dddddd"/>'
            ),
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>',
            f'<text x="{x(at):.1f}" y="{base + 18}" text-anchor="middle">{at - start:.4g} s</text>',
        ]
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        shape = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts += [
            f'<polyline points="{shape}" fill="none" stroke="{colour}" stroke-width="1.4"/>',
            (
                f'<rect x="{LEFT + wide + 16}" y="{top + 44 + 20 * number}" width="12" height="12" '
                f'fill="{colour}"/>'
            ),
            f'<text x="{LEFT + wide + 34}" y="{top + 54 + 20 * number}">{escape(name)}</text>',
        ]
    return parts


def _steps(points: Points, stop: float) -> Points:
    """A line that holds its value until the next; of very many points only some."""
    found: list[tuple[float, float]] = []
    every = max(1, len(points) // 4000)
    for at, value in points[::every]:
        if found:
            found.append((at, found[-1][1]))
        found.append((at, value))
    return [*found, (stop, found[-1][1])] if found else []


def _share(spans: Points, start: float, stop: float) -> Points:
    """Part of each column's time that was spent in `spans`."""
    wide = max(stop - start, 1e-9) / BINS
    busy = [0.0] * BINS
    for begin, end in spans:
        column = int((begin - start) / wide)
        while begin < end and column < BINS:
            edge = min(end, start + (column + 1) * wide)
            busy[column] += max(edge - begin, 0.0)
            begin, column = edge, column + 1
    return [(start + (k + 0.5) * wide, min(1.0, busy[k] / wide)) for k in range(BINS)]


def _png(svg: str) -> bytes:
    return bytes(_resvg().svg_to_bytes(svg_string=svg))


def _resvg() -> Any:
    try:
        import resvg_py
    except ImportError:
        raise JobError(
            "PNG needs resvg: pip install 'tandem-serve[png]', or write an .svg"
        ) from None
    return resvg_py
