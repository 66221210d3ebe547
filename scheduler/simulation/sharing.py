"""Two workers on one machine: each is slower while the other works.

On two machines there is nothing of it. By how much is measured (`tandem calibrate --beside`) and
stands in the profiles.
"""

from __future__ import annotations


class Sharer:
    """A worker that another one may share its machine with."""

    mate: Sharer | None = None
    working = False
    cost = 1.0
    """How many times as long its work takes while its mate works."""

    @property
    def pace(self) -> float:
        """By how much its work takes longer at this moment."""
        return self.cost if self.mate is not None and self.mate.working else 1.0

    def works(self, working: bool) -> None:
        """It has begun to work, or has ended; its mate is told."""
        if working != self.working:
            self.working = working
            if self.mate is not None:
                self.mate.disturbed()

    def disturbed(self) -> None:
        """The mate has begun or ended: what is under way goes on at another pace."""


def share(one: Sharer, other: Sharer) -> None:
    """Let two workers be on one machine."""
    one.mate, other.mate = other, one
