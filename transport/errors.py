"""What can go wrong on a link, as exceptions and as the short codes that travel on the wire."""

from __future__ import annotations

from typing import Literal, get_args

Code = Literal[
    "missing",  # the state that was asked for is not here
    "memory",  # the receiver has no room for the state
    "fingerprint",  # another model, quantisation or codec
    "busy",  # too many offers at once, or an older attempt is still being cleared away
    "stale",  # an attempt that is not newer than the one under way
    "corrupt",  # a checksum or a piece header did not verify
    "protocol",  # a frame or a message that the protocol does not allow
    "version",  # the two ends speak different versions
    "aborted",  # one end gave the transfer up
    "failed",  # the receiver's own code raised
    "lost",  # the peer is dead, frozen or too slow
]
CODES: frozenset[str] = frozenset(get_args(Code))


class LinkError(Exception):
    """A transfer or a link failed. `code` says how; offer again over a fresh link, or give up."""

    def __init__(self, message: str, code: Code = "lost") -> None:
        super().__init__(message)
        self.code: Code = code


class Refused(LinkError):
    """The receiver refused the offer before any payload byte left; the link itself is sound."""
