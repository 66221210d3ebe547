"""What a job is: its states, its record in Redis, and the errors that concern it.

A response, its job and its turn share one id. The record (`tandem:job:<id>`, a hash) is the truth;
RQ's jobs `<id>-p` and `<id>-d` are the visible shadows of its two stages.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast, get_args

from scheduler.ledger.notes import FIELD
from scheduler.owners import MARK
from scheduler.serializer import unpack

T = TypeVar("T")

Status = Literal[
    "queued",
    "prefilling",
    "handing_off",
    "decoding",
    "completed",
    "incomplete",
    "failed",
    "cancelled",
]
Stage = Literal["prefill", "decode"]
Priority = Literal["interactive", "normal", "batch"]

STATUSES: tuple[Status, ...] = get_args(Status)
TERMINAL: frozenset[Status] = frozenset(("completed", "incomplete", "failed", "cancelled"))
LIVE: frozenset[Status] = frozenset(STATUSES) - TERMINAL

#: What a list shows of a job: all of its record but its answer.
LISTED: tuple[str, ...] = (
    "status", "stage", "owner", "model", "request", "conversation", "previous", "node", "queue",
    "background", "priority", "created_at", *(f"t_{status}" for status in STATUSES),
    "t_first_token", "prompt_tokens", "held_tokens", "prefilled_tokens", "computed_tokens", "run",
    "worker", "attempts", "p_attempts", "cancel", "seq", "handoff", "usage", "error", "reason",
    "path", "enqueued_at", "taken_at", "route",
    "extend",
)  # fmt: skip

_PIECE = FIELD.encode()

RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}\Z")


class JobError(Exception):
    """A job cannot be accepted, found or continued; one line with cause and cure."""


class JobNotFound(JobError):
    """No record of that id: never accepted here, or older than jobs.result_days."""


class ConversationBusy(JobError):
    """The conversation has a live turn; `holder` is its response id."""

    def __init__(self, conversation: str, holder: str) -> None:
        super().__init__(
            f"conversation {conversation} is busy with {holder}: wait for it, cancel it, "
            "or branch with previous_response_id"
        )
        self.holder = holder


class HomeMoved(JobError):
    """The conversation went to another decode node while its prompt was made: make it again."""


class IdempotencyConflict(JobError):
    """The idempotency key was used before, with another request."""


class QueueFull(JobError):
    """As much waits as the configuration allows. `retry_after`: seconds, a guess."""

    def __init__(self, message: str, retry_after: float = 10.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def response_id(owner: str = "", key: str | None = None) -> str:
    """A new response id; with an idempotency key always the same one for `owner` and `key`."""
    if key is None:
        return f"resp_{uuid.uuid4().hex}"
    digest = hashlib.blake2b(digest_size=16, person=b"tandem-response")
    digest.update(struct.pack("<Q", len(owner.encode())) + owner.encode() + key.encode())
    return f"resp_{digest.hexdigest()}"


def pack_ids(ids: Sequence[int] | bytes) -> bytes:
    """Token ids as uint32 little-endian; bytes are taken to be that already."""
    if isinstance(ids, bytes):
        if len(ids) % 4:
            raise JobError(f"prompt of {len(ids)} bytes is not a row of 32-bit token ids")
        return ids
    values = array("I", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    values = array("I", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


@dataclass(frozen=True, slots=True)
class NewJob:
    """What `Jobs.accept` needs to know.

    `prompt_ids`: the whole prompt, cached part included; `held_tokens`: how many of them a state
    at the decode node covers, which saves work where that node computes the rest. `stage`:
    "prefill", or "decode" where the decode node `node` prefills by itself. `lock`: refuse a second
    live turn on `conversation`. `digest`: hash of the request body, which tells a repeated
    submission from another one under the same key. `deadline`: seconds from now within which the
    first token is wanted. `owner_waiting`: jobs of `owner` that may wait at once; 0 for no limit.
    `ledger`: the packed notes of its acceptance.
    `route`: where the new tokens of a held state are computed, and why (`scheduler.extension`).
    `home`: what the conversation's pointer said when `node` was chosen (`scheduler.homes`), "" for
    nothing; None, without looking, where there is one decode node. `past`: the conversation that
    `previous` is a turn of, where that is another one; `past_home`: as `home`, of that one.
    `client`: names the connection that waits for a foreground job (`Jobs.abandon`). `known`: only
    asks again for a job that was accepted, and has nothing that another could be made of.
    """

    id: str
    model: str
    request: Mapping[str, Any]
    prompt_ids: Sequence[int] | bytes
    owner: str = ""
    conversation: str | None = None
    previous: str | None = None
    lock: bool = False
    stage: Stage = "prefill"
    node: str = "local"
    held_tokens: int = 0
    background: bool = False
    priority: Priority = "normal"
    deadline: float | None = None
    digest: str = ""
    client: str = ""
    known: bool = False
    ledger: bytes = b""
    owner_waiting: int = 0
    home: str | None = None
    past: str = ""
    past_home: str | None = None
    route: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = (
        {"type": "response.created"},
        {"type": "response.queued"},
    )


@dataclass(frozen=True, slots=True)
class Accepted:
    """`duplicate`: the job existed already and nothing was changed. `client`: waits for it."""

    id: str
    duplicate: bool
    client: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where a waiting job stands now: `place` 0 is next; `start`: seconds until it begins.

    A guess at the present order and rate; jobs that come later may go before.
    """

    place: int
    start: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a decode ended. `events` are appended in the terminal step, before its event."""

    status: Literal["completed", "incomplete"] = "completed"
    reason: str = ""
    output: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    path: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A snapshot of a record. Times are seconds of Redis TIME.

    `ledger`: what each run has noted (`scheduler.ledger`), packed, by the run's name.
    `enqueued_at`, `taken_at`: when it last began to wait in a queue, and was last taken from one.
    """

    id: str
    status: Status
    stage: Stage
    owner: str
    model: str
    request: dict[str, Any]
    conversation: str | None
    previous: str | None
    node: str
    queue: str
    background: bool
    priority: Priority
    created_at: float
    times: dict[Status, float]
    first_token_at: float | None
    prompt_tokens: int
    held_tokens: int
    prefilled_tokens: int
    computed_tokens: int
    run: str
    worker: str
    attempts: int
    cancel: bool
    events: int
    handoff: dict[str, Any] | None
    output: dict[str, Any] | None
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    reason: str
    path: dict[str, Any]
    prompt: bytes = b""
    prefill_attempts: int = 0
    ledger: Mapping[str, bytes] = field(default_factory=dict)
    enqueued_at: float = 0.0
    taken_at: float = 0.0
    route: dict[str, Any] | None = None
    extend: str = ""
    damaged: tuple[str, ...] = ()

    def check_whole(self) -> None:
        """Raise JobError where parts of the record cannot be what was written."""
        if self.damaged:
            raise JobError(
                f"the record of {self.id} is damaged ({', '.join(self.damaged)}): send the request "
                "again, and check the disk that holds Redis' file"
            )

    @property
    def extends(self) -> bool:
        """Whether the prefill node extends a state that the decode node lends it."""
        return bool(self.previous and self.held_tokens and self.extend == "prefill")

    @property
    def attempts_by_stage(self) -> dict[Stage, int]:
        """How often each stage was started: 1 where nothing went wrong, 0 where it was skipped."""
        now = self.attempts if self.stage == "prefill" else 0
        return {"prefill": self.prefill_attempts + now, "decode": self.attempts - now}

    @property
    def ended(self) -> bool:
        """True in a terminal state."""
        return self.status in TERMINAL

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that no held state covers."""
        return self.prompt_tokens - self.held_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt; empty where the snapshot was read without them."""
        return unpack_ids(self.prompt)


def prompt_digest(prompt: bytes, owner: str) -> str:
    """What a packed prompt is found by; no owner with a token finds another's."""
    key = owner.encode() if owner.startswith(MARK) else b""
    return hashlib.blake2b(prompt, digest_size=16, key=key).hexdigest()


def parse(resp: str, raw: Mapping[bytes, bytes], prompt: bytes = b"") -> Job:
    """A Job from the fields of its record. Raises JobNotFound when there are none.

    Redis' file has no checksums: what cannot be read is left empty, and named in `damaged`.
    """
    if b"status" not in raw:
        raise JobNotFound(f"no job {resp}: check the id; results are kept for jobs.result_days")
    damaged: list[str] = []

    def read(name: str, how: Callable[[bytes], T], otherwise: T) -> T:
        data = raw.get(name.encode())
        if not data:
            return otherwise
        try:
            return how(data)
        except (ValueError, RecursionError):
            damaged.append(name)
            return otherwise

    def text(name: str) -> str:
        return read(name, bytes.decode, "")

    def number(name: str) -> int:
        return read(name, int, 0)

    def moment(name: str) -> float:
        return read(name, float, 0.0)

    def packed(name: str) -> dict[str, Any] | None:
        return read(name, _unpacked, None)

    if prompt and raw.get(b"prompt_digest", b"") not in (
        b"",
        prompt_digest(prompt, text("owner")).encode(),
    ):
        damaged.append("prompt")
    job = Job(
        id=resp,
        status=cast(Status, text("status")),
        stage=cast(Stage, text("stage")),
        owner=text("owner"),
        model=text("model"),
        request=packed("request") or {},
        conversation=text("conversation") or None,
        previous=text("previous") or None,
        node=text("node"),
        queue=text("queue"),
        background=text("background") == "1",
        priority=cast(Priority, text("priority")),
        created_at=moment("created_at"),
        times={s: at for s in STATUSES if (at := moment(f"t_{s}"))},
        first_token_at=moment("t_first_token") or None,
        prompt_tokens=number("prompt_tokens"),
        held_tokens=number("held_tokens"),
        prefilled_tokens=number("prefilled_tokens"),
        computed_tokens=number("computed_tokens"),
        run=text("run"),
        worker=text("worker"),
        attempts=number("attempts"),
        cancel=text("cancel") == "1",
        events=number("seq"),
        handoff=packed("handoff"),
        output=packed("output"),
        usage=packed("usage"),
        error=packed("error"),
        reason=text("reason"),
        path=packed("path") or {},
        prompt=prompt,
        prefill_attempts=number("p_attempts"),
        ledger={k.decode()[len(FIELD) :]: v for k, v in raw.items() if k.startswith(_PIECE)},
        enqueued_at=moment("enqueued_at"),
        taken_at=moment("taken_at"),
        route=packed("route"),
        extend=text("extend"),
    )
    return replace(job, damaged=tuple(damaged)) if damaged else job


def _unpacked(data: bytes) -> dict[str, Any]:
    found = unpack(data)
    if not isinstance(found, dict):
        raise ValueError("not what was packed")
    return found
