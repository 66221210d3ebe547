"""From a request to an accepted job: check it, find what it continues, build its prompt."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.backend import Backend
from scheduler.faults import Fault, bad, missing
from scheduler.items import split
from scheduler.prompt import Parent, Prompt, build, is_empty, text_of
from scheduler.record import (
    Accepted,
    ConversationBusy,
    IdempotencyConflict,
    JobNotFound,
    NewJob,
    Priority,
    QueueFull,
    response_id,
)
from scheduler.schema import ResponseRequest, items_of, media_at
from scheduler.tokenizer import TemplateError
from store.turns import Turn

_PRIORITIES: dict[str, Priority] = {"priority": "interactive", "flex": "batch", "batch": "batch"}
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_TRIES = 3


@dataclass(frozen=True)
class Lineage:
    """What a turn continues: nothing, a conversation's first items, or another turn."""

    conversation: str
    previous: str | None = None
    parent: Parent | None = None
    seed: Sequence[dict[str, Any]] = field(default=())
    new: bool = False


def accept(backend: Backend, body: ResponseRequest, key: str | None = None) -> Accepted:
    """Check a request and put it into its queue. Blocking: tokenises, asks Redis and the store.

    `key` is the client's idempotency key: the same one with the same body names the same job.
    Raises Fault; then nothing was recorded.
    """
    model = backend.model(body.model)
    _refuse_unsupported(body, model)
    owner = body.user or body.safety_identifier or body.prompt_cache_key or ""
    digest = _digest(body)
    if key is not None and (known := _known(backend, response_id(owner, key), model, digest)):
        return known
    items = items_of(body.input)
    if is_empty(items):
        raise bad("the prompt is empty: give at least one message with text", "input")
    for _ in range(_TRIES):
        lineage = find_lineage(backend, body)
        prompt = _prompt(backend, body, items, lineage)
        fields = _job(backend, body, items, lineage, prompt, model)
        job = NewJob(id=response_id(owner, key), owner=owner, digest=digest, **fields)
        accepted = _submit(backend, job)
        if accepted.duplicate or not job.lock or _still_head(backend, lineage):
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


def find_lineage(backend: Backend, body: ResponseRequest) -> Lineage:
    """What the request continues, from the store. Raises Fault 404, 409 or 400."""
    conversation = body.conversation_id
    if conversation is not None and body.previous_response_id is not None:
        raise bad(
            "give either conversation or previous_response_id, not both", "previous_response_id"
        )
    if body.previous_response_id is not None:
        return _after_response(backend, body.previous_response_id)
    if conversation is None:
        return Lineage(f"conv_{uuid.uuid4().hex}", new=True)
    with backend.store() as store:
        record = store.get_conversation(conversation) if is_id(conversation) else None
    if record is None:
        raise missing("Conversation", conversation[:80], "conversation")
    if record["head"] is None:
        return Lineage(conversation, seed=record["items"])
    return _after_turn(backend, record["head"], record["items"])


def _after_response(backend: Backend, response: str) -> Lineage:
    param = "previous_response_id"
    if not is_id(response) or backend.deleted(response):
        raise missing("Response", response[:80], param)
    with backend.store() as store:
        turn = store.get_turn(response)
    if turn is not None:
        return _after_turn(backend, response)
    try:
        job = backend.jobs.get(response)
    except JobNotFound:
        raise missing("Response", response[:80], param) from None
    if not job.ended:
        raise Fault(
            409,
            f"{response} is still {job.status}: wait for its end, then continue it",
            code="response_in_progress",
            param=param,
        )
    if job.status in ("failed", "cancelled"):
        raise bad(f"{response} was {job.status} and has no answer to continue", param)
    raise missing("Response", response[:80], param)


def _after_turn(
    backend: Backend, turn_id: str, seed: Sequence[dict[str, Any]] | None = None
) -> Lineage:
    with backend.store() as store:
        path: list[Turn] = store.path_of(turn_id)
        if seed is None:
            first = store.get_conversation(path[0].conversation)
            seed = first["items"] if first else ()
    last = path[-1]
    inputs, outputs = split(last.id, last.items)
    before = [item for turn in path[:-1] for item in turn.items]
    ids: list[int] = []
    for turn in path:
        ids = [*([] if turn.rebased else ids), *turn.prompt_ids, *turn.output_ids]
    parent = Parent(
        items=[*seed, *before, *inputs],
        answer=outputs,
        ids=ids,
        generated=len(last.output_ids),
        instructions=last.params.get("instructions"),
    )
    return Lineage(last.conversation, last.id, parent)


def is_id(name: str) -> bool:
    """Whether `name` could be an id at all."""
    return _ID.fullmatch(name) is not None


def _prompt(
    backend: Backend, body: ResponseRequest, items: list[dict[str, Any]], lineage: Lineage
) -> Prompt:
    tokenizer = backend.tokenizer
    limit = tokenizer.context_length
    own = sum(len(text_of(item.get("content") or item.get("output") or "")) for item in items)
    if (least := tokenizer.least_tokens(own)) >= limit:
        raise _too_long(f"at least {least}", limit)
    try:
        prompt = build(
            tokenizer,
            [*lineage.seed, *items],
            instructions=body.instructions,
            parent=lineage.parent,
        )
    except TemplateError as error:
        raise bad(str(error), "input") from error
    if len(prompt.ids) >= limit:
        raise _too_long(str(len(prompt.ids)), limit)
    return prompt


def _too_long(tokens: str, limit: int) -> Fault:
    return bad(
        f"the prompt has {tokens} tokens and the model's context is {limit} tokens, of which one "
        "at least is for the answer: send less text or start a new conversation",
        "input",
        "context_length_exceeded",
    )


def _job(
    backend: Backend,
    body: ResponseRequest,
    items: list[dict[str, Any]],
    lineage: Lineage,
    prompt: Prompt,
    model: str,
) -> dict[str, Any]:
    config = backend.config.decode
    tokens = len(prompt.ids)
    room = backend.tokenizer.context_length - tokens
    held = 0
    if lineage.parent is not None:
        # A state ends before its pending token, and is of use only if nothing of it changed.
        state = len(lineage.parent.ids) - 1
        held = min(state, tokens - 1) if prompt.shared >= state else 0
    # The state of a turn that is continued lies on its decode node, which computes what is new.
    local = held > 0
    seed = body.seed if body.seed is not None else uuid.uuid4().int
    params = {
        "max_output_tokens": min(body.max_output_tokens or config.max_output_tokens, room),
        "temperature": body.temperature if body.temperature is not None else 0.0,
        "top_p": body.top_p if body.top_p is not None else 1.0,
        "top_k": body.top_k or 0,
        "min_p": body.min_p or 0.0,
        "seed": seed % (1 << 63),
        "stop": body.stop or [],
    }
    return {
        "model": model,
        "request": {
            "input": items,
            "instructions": body.instructions,
            "params": params,
            "metadata": body.metadata or {},
            "store": body.store is not False,
            "by_response": body.previous_response_id is not None,
            "new_conversation": lineage.new,
            "prompt": {"rebased": prompt.rebased, "shared": prompt.shared},
        },
        "prompt_ids": prompt.ids,
        "conversation": lineage.conversation,
        "previous": lineage.previous,
        "lock": body.conversation_id is not None,
        "stage": "decode" if local else "prefill",
        "node": backend.decode_node(),
        "held_tokens": held,
        "background": bool(body.background),
        "priority": _PRIORITIES.get(body.service_tier or "", "normal"),
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
        raise Fault(429, str(error), code="queue_full") from error


def _known(backend: Backend, response: str, model: str, digest: str) -> Accepted | None:
    """The job that this idempotency key named before, or None."""
    try:
        backend.jobs.get(response)
    except JobNotFound:
        return None
    return _submit(backend, NewJob(response, model, {}, [0], digest=digest))


def _still_head(backend: Backend, lineage: Lineage) -> bool:
    with backend.store() as store:
        record = store.get_conversation(lineage.conversation)
    return record is not None and record["head"] == lineage.previous


def _digest(body: ResponseRequest) -> str:
    text = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _refuse_unsupported(body: ResponseRequest, model: str) -> None:
    """Say no to what would otherwise be left out silently."""
    if (where := media_at(body.input)) is not None:
        raise bad(
            f"model '{model}' takes text only: send text instead of {where}",
            where,
            "unsupported_content",
        )
    if body.tools and body.tool_choice != "none":
        raise bad("tools are not supported: leave them out", "tools", "unsupported_parameter")
    if body.text and body.text.format and body.text.format.type != "text":
        raise bad(
            f"text.format '{body.text.format.type}' is not supported: use 'text'",
            "text.format",
            "unsupported_parameter",
        )
    if body.top_logprobs:
        raise bad("top_logprobs is not supported: leave it out", "top_logprobs")
