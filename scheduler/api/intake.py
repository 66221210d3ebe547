"""From a request to an accepted job: check it, find what it continues, build its prompt."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from scheduler.api import heads, sessions
from scheduler.api.backend import Backend
from scheduler.api.bodies import shortened
from scheduler.api.caller import current
from scheduler.api.clients import new_client
from scheduler.api.faults import Fault, bad
from scheduler.api.lineage import Lineage, find_lineage
from scheduler.api.placement import find_place, priority_of
from scheduler.api.prompt import Prompt, is_empty
from scheduler.api.references import resolved
from scheduler.api.schema import ResponseRequest, items_of, media_at
from scheduler.api.shaping import Shaping, shape
from scheduler.api.turn_prompt import turn_prompt
from scheduler.audit import Action
from scheduler.ledger.arrival import arrived
from scheduler.ledger.clock import GOOD
from scheduler.ledger.notes import Notes
from scheduler.record import (
    Accepted,
    ConversationBusy,
    HomeMoved,
    IdempotencyConflict,
    JobNotFound,
    NewJob,
    QueueFull,
    response_id,
)

_TRIES = 3
EMPTY = "the prompt is empty: give at least one message with text"


def accept(
    backend: Backend,
    body: ResponseRequest,
    key: str | None = None,
    about: Mapping[str, Any] | None = None,
    session: str | None = None,
) -> Accepted:
    """Check a request and put it into its queue. Blocking: tokenises, asks Redis and the store.

    `key` is the client's idempotency key: the same one with the same body names the same job.
    `about`: what else is remembered with the turn. `session`: which one the client says it is of.
    Raises Fault; then nothing was recorded.
    """
    notes = arrived()
    body, normalised = heads.normalise(backend.config.api.normalise_head, body)
    model = backend.model(body.model)
    _refuse_unsupported(backend, body, model)
    caller = current()
    owner = owner_of(body)
    with notes.stage("check"):
        digest = _digest(body)
    background = bool(body.background)
    client = "" if background else new_client()
    if key is not None and backend.jobs.known(resp := response_id(owner, key)):
        repeated = NewJob(
            resp, model, {}, [0], digest=digest, background=background, client=client, known=True
        )
        with contextlib.suppress(JobNotFound):  # it may have been kept for long enough just now
            return _submit(backend, repeated)
    items = items_of(resolved(backend, body.input))
    _refuse_empty(body, items, waiting=body.conversation_id is not None)
    with notes.stage("pictures"):
        backend.pictures.take_in(items)
    with notes.stage("shape"):
        shaping = shape(backend.tokenizer, body)
    for _ in range(_TRIES):
        with notes.stage("find"):
            lineage = find_lineage(backend, body, items)
            _refuse_empty(body, _new(lineage))
        with notes.stage("tokenise") as facts:
            prompt = turn_prompt(backend, body, lineage, shaping)
            facts.update(tokens=len(prompt.ids) - prompt.shared)
        with notes.stage("place"):
            fields = _job(backend, body, lineage, prompt, model, shaping)
            fields["request"]["params"]["about"].update(about or {}, session=session)
            fields["request"]["prompt"]["normalised"] = normalised
            sessions.steer(backend, owner, session, fields)
        with notes.stage("compare"):
            past = lineage.parent.ids if lineage.parent is not None else ()
            heads.describe(backend, owner, session, past, fields)
        if route := fields["route"]:
            notes.fork("extend", str(route["extend"]), str(route["reason"]))
        job = NewJob(
            id=response_id(owner, key),
            owner=owner,
            digest=digest,
            client=client,
            owner_waiting=caller.max_waiting,
            ledger=_noted(backend, notes),
            **fields,
        )
        try:
            accepted = _submit(backend, job)
        except HomeMoved:
            continue
        if accepted.duplicate or not job.lock or _still_head(backend, lineage, accepted.id):
            if not accepted.duplicate and body.store is not False:
                _enter(backend, accepted.id, body, lineage)
                heads.remember(backend, owner, session, accepted.id)
                sessions.note(backend, owner, session, accepted.id, fields["node"])
            action: Action = "submit" if lineage.new else "resume"
            again = {"again": True} if accepted.duplicate else {}
            backend.note(action, accepted.id, conversation=lineage.conversation, **again)
            return accepted
        # A turn ended between our look at the conversation and our lock on it.
        backend.jobs.cancel(accepted.id)
        if key is not None:
            break
    raise Fault(
        409,
        f"conversation {lineage.conversation} changed while this turn was prepared: send it again",
        code="conversation_busy",
        param="conversation",
    )


def owner_of(body: ResponseRequest) -> str:
    """Whose job this request becomes."""
    return current().submits_for(body.user or body.safety_identifier)


def _noted(backend: Backend, notes: Notes) -> bytes:
    """What has been done for the request so far; travels with the step that accepts it."""
    clock = backend.jobs.clock
    if clock.error > GOOD:
        with notes.stage("ask the time"):
            clock.settle(backend.redis)
    return notes.packed(clock, lane="api", node=backend.config.node)


def count_tokens(backend: Backend, body: ResponseRequest) -> int:
    """Tokens that the prompt of this request would have. Raises Fault as `accept` does."""
    body, _ = heads.normalise(backend.config.api.normalise_head, body)
    _refuse_unsupported(backend, body, backend.model(body.model))
    items = items_of(resolved(backend, body.input))
    _refuse_empty(body, items, waiting=body.conversation_id is not None)
    backend.pictures.take_in(items)
    shaping = shape(backend.tokenizer, body)
    lineage = find_lineage(backend, body, items)
    _refuse_empty(body, _new(lineage))
    return len(turn_prompt(backend, body, lineage, shaping).ids)


def _enter(backend: Backend, response: str, body: ResponseRequest, lineage: Lineage) -> None:
    parent = lineage.parent
    past = [*parent.items, *parent.answer] if parent else [*lineage.seed]
    # The job is accepted: that it may not be found again by its text is no reason to refuse it.
    with contextlib.suppress(RedisError):
        backend.threads.enter(
            response, [*past, *lineage.items], body.instructions, current().share or None
        )


def _job(
    backend: Backend,
    body: ResponseRequest,
    lineage: Lineage,
    prompt: Prompt,
    model: str,
    shaping: Shaping,
) -> dict[str, Any]:
    config = backend.config.decode
    room = backend.tokenizer.context_length - len(prompt.ids)
    place = find_place(backend, body, owner_of(body), lineage, prompt, shaping)
    seed = body.seed if body.seed is not None else uuid.uuid4().int
    params = {
        "max_output_tokens": min(body.max_output_tokens or config.max_output_tokens, room),
        "temperature": body.temperature if body.temperature is not None else 0.0,
        "top_p": body.top_p if body.top_p is not None else 1.0,
        "top_k": body.top_k or 0,
        "min_p": body.min_p or 0.0,
        "seed": seed % (1 << 63),
        "stop": body.stop or [],
        **({"truncation": "auto"} if body.truncation == "auto" else {}),
        **shaping.params,
        # Beside the sampling, so that it is stored with the turn.
        "about": {
            "metadata": body.metadata or {},
            "user": body.user,
            "by_response": body.previous_response_id is not None,
            "new_conversation": lineage.new,
            "stateless": lineage.stateless,
        },
    }
    return {
        "model": model,
        "request": {
            "input": list(lineage.items),
            "instructions": body.instructions,
            "tools": shaping.tools,
            "options": shaping.options,
            "params": params,
            "store": body.store is not False,
            "prompt": {
                "dropped": prompt.dropped,
                "rebased": prompt.rebased,
                "shared": prompt.shared,
                "preamble": place.preamble,
                "last": place.last,
            },
        },
        "prompt_ids": prompt.ids,
        "conversation": lineage.conversation,
        "previous": lineage.previous,
        "past": lineage.past,
        "past_home": place.past_home,
        "lock": body.conversation_id is not None,
        "stage": "decode" if place.route.get("extend") == "decode" else "prefill",
        "route": place.route,
        "node": place.node,
        "home": None if lineage.new and body.store is False else place.home,
        "held_tokens": place.held,
        "background": bool(body.background),
        "priority": priority_of(body),
    }


def _submit(backend: Backend, job: NewJob) -> Accepted:
    try:
        return backend.jobs.accept(job)
    except ConversationBusy as error:
        raise Fault(
            409, str(error), code="conversation_busy", param="conversation", retry=False
        ) from error
    except IdempotencyConflict as error:
        raise Fault(409, str(error), code="idempotency_conflict", retry=False) from error
    except QueueFull as error:
        raise Fault(429, str(error), code="queue_full", after=error.retry_after) from error


def _still_head(backend: Backend, lineage: Lineage, response: str) -> bool:
    """Whether a turn was locked as it was looked at; it may have ended already, and be the head."""
    with backend.store() as store:
        record = store.get_conversation(lineage.conversation)
        if record is None or record["head"] in (lineage.previous, response):
            return record is not None
        return response in store.conversation_turns(lineage.conversation)


def _digest(body: ResponseRequest) -> str:
    try:
        text = json.dumps(shortened(body.model_dump(mode="json")), sort_keys=True)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeError):
            raise bad(
                "a name in the body holds half of a character (one of \\ud800 to \\udfff alone): "
                "send whole Unicode characters"
            ) from error
        # Only what is passed through as it is, such as `tools`, can be like this.
        raise bad("the body is nested too deeply: send plainer JSON") from error
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _refuse_empty(
    body: ResponseRequest, items: Sequence[Mapping[str, Any]], *, waiting: bool = False
) -> None:
    """Fault 400 where nothing is said; with `waiting` a conversation may hold what is."""
    if (waiting and not items) or not is_empty(items):
        return
    given = "input" in body.model_fields_set
    raise bad(EMPTY, "input", "invalid_value" if given else "missing_required_parameter")


def _new(lineage: Lineage) -> list[dict[str, Any]]:
    """What this turn is the first to answer."""
    return [*(lineage.seed if lineage.parent is None else ()), *lineage.items]


def _refuse_unsupported(backend: Backend, body: ResponseRequest, model: str) -> None:
    """Say no to what would otherwise be left out silently."""
    images = backend.pictures.taken
    if (where := media_at(body.input, images=images)) is not None:
        takes = "text, and images in the user's messages" if images else "text"
        raise bad(
            f"model '{model}' takes {takes} only: leave out what else there is",
            where,
            "unsupported_content",
        )
