"""The lines of a batch: from a line of its input to a request, from an ended job to a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic import ValidationError

from scheduler.api.bodies import read, values_of
from scheduler.api.chat import completion
from scheduler.api.chat_requests import ChatRequest, to_response_request
from scheduler.api.faults import Fault, bad, from_validation
from scheduler.api.schema import ResponseRequest
from scheduler.api.view import response_object
from scheduler.batches import Batch, Endpoint
from scheduler.record import Job

MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
Entry = dict[str, Any]


class LineError(Exception):
    """A line that is no request; `code` for programs, one line of text for people."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch; `number` counts from 1, as editors do."""

    number: int
    custom_id: str
    body: dict[str, Any]


def raw_lines(source: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """(number, contents) of every line that is not blank; cut to `limit` + 1 bytes where longer."""
    number = 0
    while piece := source.readline(limit + 1):
        number += 1
        line = piece
        while piece and not piece.endswith(b"\n"):  # the rest of a line that is too long
            piece = source.readline(limit + 1)
        if line.strip():
            yield number, line


class Lines:
    """Reads lines in order; knows which custom ids have been used."""

    def __init__(self, endpoint: Endpoint, limit: int, values: int) -> None:
        """At most `limit` bytes, and so many JSON values, are taken of a line."""
        self._endpoint = endpoint
        self._limit = limit
        self._values = values
        self._seen: set[bytes] = set()

    def read(self, number: int, raw: bytes) -> Line:
        """The request on one line. Raises LineError."""
        if len(raw) > self._limit:
            raise LineError(
                "line_too_long", f"line {number} is longer than {self._limit >> 20} MB: send less"
            )
        if values_of(raw, self._values) > self._values:
            raise LineError(
                "too_many_values",
                f"line {number} holds more than {self._values} JSON values: send fewer, or raise "
                "api.max_values",
            )
        try:
            entry = read(raw)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, json.JSONDecodeError) else "it cannot be read"
            raise LineError("invalid_json_line", f"line {number} is not JSON: {why}") from None
        if not isinstance(entry, dict):
            raise LineError("invalid_request", f"line {number} is not a JSON object")
        custom = entry.get("custom_id")
        if not isinstance(custom, str) or not 0 < len(custom) <= MAX_CUSTOM_ID:
            raise LineError(
                "missing_custom_id",
                f"line {number} needs a custom_id: a text of 1 to {MAX_CUSTOM_ID} characters",
            )
        custom = custom.encode("utf-8", "replace").decode()
        mark = hashlib.blake2b(custom.encode(), digest_size=12).digest()
        if mark in self._seen:
            raise LineError(
                "duplicate_custom_id",
                f"line {number}: the custom_id '{custom[:80]}' was used on an earlier line",
                custom,
            )
        self._seen.add(mark)
        if entry.get("method") != "POST":
            raise LineError("invalid_method", f"line {number}: the method must be POST", custom)
        if entry.get("url") != self._endpoint:
            raise LineError(
                "invalid_url",
                f"line {number}: the url must be the batch's {self._endpoint}",
                custom,
            )
        body = entry.get("body")
        if not isinstance(body, dict):
            raise LineError("invalid_request", f"line {number} needs a body: an object", custom)
        return Line(number, custom, body)


def request_of(batch: Batch, body: dict[str, Any]) -> tuple[ResponseRequest, dict[str, Any]]:
    """(the request in a line's body as a job of the batch class, what is remembered with it).

    Raises Fault 400.
    """
    about: dict[str, Any] = {"batch": batch.id}
    try:
        if batch.endpoint == "/v1/chat/completions":
            chat = ChatRequest.model_validate(body)
            about |= {"chat": True} if chat.store else {}
            streams, made = chat.stream, to_response_request(chat)
        else:
            made = ResponseRequest.model_validate(body)
            streams = made.stream
    except ValidationError as error:
        found = [{**e, "loc": ("body", *e["loc"])} for e in error.errors(include_url=False)]
        raise from_validation(found) from None
    if streams:
        raise bad("a batch has no streams: leave out stream", "stream")
    update = {"background": True, "service_tier": "batch", "stream": None}
    return made.model_copy(update=update), about


def entry_id(batch: Batch, number: int) -> str:
    """Id of the answer to a line: always the same one."""
    digest = hashlib.blake2b(f"{batch.id}:{number}".encode(), digest_size=12)
    return f"batch_req_{digest.hexdigest()}"


def refused(batch: Batch, number: int, custom_id: str | None, fault: Fault) -> Entry:
    """What the error file says of a request that was answered with an error."""
    return _entry(batch, number, custom_id, fault.status, fault.body(batch.endpoint))


def unserved(batch: Batch, number: int, custom_id: str | None, code: str, message: str) -> Entry:
    """What the error file says of a line that was never a request, or was not executed."""
    return {
        "id": entry_id(batch, number),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def answered(batch: Batch, number: int, custom_id: str, job: Job) -> tuple[bool, Entry]:
    """(whether it succeeded, the line of the output or error file) of an ended job."""
    made = response_object(job)
    if job.status == "failed":
        error = made["error"]
        fault = Fault(500, error["message"], code=error["code"])
        return False, refused(batch, number, custom_id, fault)
    body = completion(made) if batch.endpoint == "/v1/chat/completions" else made
    return True, _entry(batch, number, custom_id, 200, body, job.id)


def _entry(
    batch: Batch,
    number: int,
    custom_id: str | None,
    status: int,
    body: dict[str, Any],
    request: str | None = None,
) -> Entry:
    ident = entry_id(batch, number)
    response = {"status_code": status, "request_id": request or ident, "body": body}
    return {"id": ident, "custom_id": custom_id, "response": response, "error": None}
