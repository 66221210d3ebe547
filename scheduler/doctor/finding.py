"""What a check says: one line each of finding and cure, and the evidence it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One line of `tandem doctor`. `cure` is empty where nothing is to be done."""

    name: str
    status: Status
    finding: str
    evidence: str = ""
    cure: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain JSON."""
        return asdict(self)


def ok(name: str, finding: str, evidence: str = "") -> Check:
    """As it should be."""
    return Check(name, "ok", finding, evidence)


def warn(name: str, finding: str, evidence: str, cure: str) -> Check:
    """It works, and could be better or fail later."""
    return Check(name, "warn", finding, evidence, cure)


def fail(name: str, finding: str, evidence: str, cure: str) -> Check:
    """It will not work like this."""
    return Check(name, "fail", finding, evidence, cure)


def skip(name: str, finding: str, evidence: str = "", cure: str = "") -> Check:
    """Not looked at, and why. With a `cure`, it is a line that is always shown."""
    return Check(name, "skip", finding, evidence, cure)
