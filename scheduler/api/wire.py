"""Pieces of a streamed answer straight into its connection, as the HTTP server would write them.

Every token of every client passes here. h11 holds each piece against the state of the whole
exchange, which a further piece of a body does not change, and that takes most of a write's time.
"""

from __future__ import annotations

from starlette.types import Receive, Scope
from uvicorn.protocols.http.h11_impl import RequestResponseCycle


class Wire:
    """The connection of a chunked answer. Whatever is not plain is left to the server."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> Wire | None:
        """The wire of a request as the server hands it over; None where it cannot be used.

        For an answer whose headers name no length: over HTTP/1.1 it is sent in chunks.
        """
        cycle = getattr(receive, "__self__", None)
        plain = scope.get("http_version") == "1.1" and scope["method"] != "HEAD"
        return cls(cycle) if plain and isinstance(cycle, RequestResponseCycle) else None

    def write(self, piece: bytes) -> bool:
        """Write a piece of the body; False where the server has to, which may wait or refuse."""
        cycle = self._cycle
        if (
            not piece  # an empty chunk ends the body
            or cycle.flow.write_paused
            or cycle.disconnected
            or not cycle.response_started
            or cycle.response_complete
        ):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True
