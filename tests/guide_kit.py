"""The commands of deploy/README.md, block by block, and how each is run on two hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GUIDE = Path(__file__).parent.parent / "deploy" / "README.md"
WHERE = ("decode", "prefill", "both", "mac-only", "install")


@dataclass(frozen=True)
class Command:
    """One line of a block: where it runs, its words as they stand, and its line number."""

    where: str
    text: str
    line: int


def commands() -> list[Command]:
    """Every command of the guide in order. Fails on a block that does not say where it runs."""
    found: list[Command] = []
    tag: str | None = None
    for number, line in enumerate(GUIDE.read_text(encoding="utf-8").splitlines(), 1):
        if fence := re.match(r"```(\S*)\s*(\S*)$", line):
            if tag is not None:
                tag = None
                continue
            language, tag = fence[1], fence[2]
            assert language in ("sh", "json"), f"line {number}: a block of {language!r}"
            if language == "json":
                tag = "json"
            else:
                assert tag in WHERE, f"line {number}: where do these commands run? {tag!r}"
        elif tag and tag != "json" and line.strip():
            found.append(Command(tag, line.strip(), number))
    assert tag is None, "a block does not end"
    return found
