"""Bodies of requests: how much they may hold, and where they are read.

Reading JSON and checking its shape hold the interpreter, so that nobody else is served meanwhile.
What that takes grows with the number of values, not with the length: a large image is one string.
So the values are counted while a body comes, and larger bodies are read outside the event loop,
one after the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, ParamSpec, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

SMALL = 32 << 10
"""Bytes that are read at once, in less time than handing them to a thread is worth."""
LARGE = 1 << 20
"""Bytes of a body from which its request has to wait for others as large."""
MAX_DIGITS = 400
"""Of a whole number: the time that one takes grows with their square."""
LONG = 1 << 20
"""Characters of a text that is too long to be dealt with in one step."""
SLICE = 256 << 10
"""Bytes whose values are counted without letting others in between."""
_BEGIN = (b",", b"[", b"{")

P = ParamSpec("P")
T = TypeVar("T")


class Tally:
    """Counts the values of a JSON text while it comes, without reading it.

    `values` is never less than what a reader would make: one for each element of an array or an
    object, and one for each array or object that is empty.
    """

    def __init__(self) -> None:
        self.values = 1
        self._inside = False  # a string
        self._open = b""  # a backslash whose partner has not come

    def add(self, piece: bytes) -> int:
        """Count a further piece; the values so far. What stands in strings does not count."""
        piece = self._open + piece
        bare = piece.rstrip(b"\\")
        self._open = b"\\" if (len(piece) - len(bare)) % 2 else b""
        piece = piece[:-1] if self._open else piece
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = plain.split(b'"')
        outside = b"".join(parts[1::2] if self._inside else parts[::2])
        self._inside ^= len(parts) % 2 == 0
        self.values += sum(map(outside.count, _BEGIN))
        return self.values


def values_of(raw: bytes, limit: int) -> int:
    """The values of a JSON text as `Tally` counts them, or some number above `limit`."""
    tally = Tally()
    view = memoryview(raw)
    for at in range(0, len(raw), SLICE):
        if tally.add(bytes(view[at : at + SLICE])) > limit:
            break
    return tally.values


def read(raw: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError, RecursionError."""
    # In another encoding the bytes that were counted would not be the characters that are read.
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass")
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise json.JSONDecodeError(f"a number has more than {MAX_DIGITS} digits", "", 0)
    return int(digits)


def shortened(value: Any) -> Any:
    """The value with digests in place of long texts: writing one as JSON is a single step, in
    which nobody else is served. Raises UnicodeError for half a character, RecursionError."""
    if isinstance(value, str) and len(value) > LONG:
        digest = hashlib.blake2b(digest_size=16)
        for at in range(0, len(value), LONG):
            digest.update(value[at : at + LONG].encode())
        return f"blake2b {len(value)} {digest.hexdigest()}"
    if isinstance(value, dict):
        return {key: shortened(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shortened(part) for part in value]
    return value


class Turns:
    """How many larger bodies are dealt with at once; lives in one event loop."""

    def __init__(self) -> None:
        self.reading = asyncio.Semaphore(1)
        self.serving = asyncio.Semaphore(2)


class _Body(Request):
    """A request whose JSON may have been read already."""

    failure: Exception | None = None

    async def read(self, shape: TypeAdapter[Any]) -> None:
        """Read and check a larger body. Raises RequestValidationError."""
        raw = await self.body()
        if len(raw) <= SMALL or not _is_json(self.headers.get("content-type", "")):
            return
        turns: Turns = self.app.state.turns
        try:
            async with turns.reading:
                self._json = await run_in_threadpool(_checked, raw, shape)
        except RequestValidationError:
            raise
        except (ValueError, RecursionError) as error:
            self.failure = error

    async def json(self) -> Any:
        if self.failure is not None:
            raise self.failure  # FastAPI says it in its own way
        if not hasattr(self, "_json"):
            self._json = read(await self.body())
        return self._json


def _checked(raw: bytes, shape: TypeAdapter[Any]) -> Any:
    value = read(raw)
    try:
        return shape.validate_python(value, from_attributes=True)  # as FastAPI has it
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in found]) from None


class BodyRoute(APIRoute):
    """A route whose body is read outside the event loop where it is larger."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        shape: TypeAdapter[Any] | None = None
        if field is not None and (kind := field.field_info.annotation) is not None:
            shape = TypeAdapter(kind)

        async def handler(request: Request) -> Response:
            body = _Body(request.scope, request.receive)
            if shape is not None:
                await body.read(shape)
            return await handle(body)

        return handler


async def in_turn(
    request: Request, function: Callable[P, T], *args: P.args, **options: P.kwargs
) -> T:
    """Call a blocking function for a request in a thread; few at once where the body is large."""
    if len(await request.body()) <= LARGE:
        return await run_in_threadpool(function, *args, **options)
    turns: Turns = request.app.state.turns
    async with turns.serving:
        return await run_in_threadpool(function, *args, **options)


def _is_json(kind: str) -> bool:
    message = Message()
    message["content-type"] = kind or "text/plain"
    subtype = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (subtype == "json" or subtype.endswith("+json"))
