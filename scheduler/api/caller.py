"""Who asks: set once by the gate, for everything that is done for one request.

The caller is a context variable, so that no route can forget to hand it on: whatever looks
something up asks here whether the one who asks may see it. Without owners everything belongs to
whoever reaches the server, and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from scheduler.owners import MARK, Owner, claimed


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner`: what is made belongs to it ("" without owners). `scoped`: sees that alone.

    `operator`: may see the dashboards, which show everything. Limits of 0 mean none. `address`:
    where the request came from.
    """

    owner: str = ""
    scoped: bool = False
    operator: bool = True
    max_waiting: int = 0
    stored_bytes: int = 0
    per_minute: int = 0
    address: str = ""

    def may_see(self, owner: str) -> bool:
        """Whether something that belongs to `owner` exists for this caller."""
        return not self.scoped or owner == self.owner

    def submits_for(self, name: str | None) -> str:
        """Owner of a job; `name` is what the request calls its user, which counts if unscoped."""
        return self.owner if self.scoped else claimed(name)

    @property
    def share(self) -> str:
        """Whose prefixes may be continued: the owner's, or everybody's where all are one."""
        return self.owner if self.scoped else ""


def caller_of(owner: Owner, address: str = "") -> Caller:
    """The caller that has one of this owner's tokens."""
    return Caller(
        owner=owner.key,
        scoped=True,
        operator=owner.operator,
        max_waiting=owner.max_waiting,
        stored_bytes=owner.stored_bytes,
        per_minute=owner.per_minute,
        address=address,
    )


_NOW: ContextVar[Caller] = ContextVar("tandem_caller")


def current() -> Caller:
    """The caller of the request that is being served. Raises LookupError outside of one."""
    return _NOW.get()


@contextmanager
def acting(caller: Caller) -> Iterator[None]:
    """Do something for `caller`."""
    token = _NOW.set(caller)
    try:
        yield
    finally:
        _NOW.reset(token)


def is_owned(owner: str) -> bool:
    """Whether a record belongs to an owner with a token."""
    return owner.startswith(MARK)
