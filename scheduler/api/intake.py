"""From a request to an accepted job: check it, find what it continues, build its prompt."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from scheduler.api import heads, sessions
from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.edits import before_last
from scheduler.api.faults import Fault, bad
from scheduler.api.lineage import Lineage, find_lineage
from scheduler.api.prompt import Prompt, build, common_prefix, is_empty
from scheduler.api.recall import own_answers
from scheduler.api.said import text_of
from scheduler.api.schema import ResponseRequest, items_of, media_at
from scheduler.api.shaping import Shaping, shape
from scheduler.api.tokenizer import TemplateError
from scheduler.api.truncation import shorten
from scheduler.api.weave import Answer
from scheduler.audit import Action
from scheduler.extension import FEW, METADATA, Costs, choose, measure, parse, worth_resuming
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
    Priority,
    QueueFull,
    response_id,
)
from store.errors import StoreError

_PRIORITIES: dict[str, Priority] = {"priority": "interactive", "flex": "batch", "batch": "batch"}
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_TRIES = 3
PREFIX = "tandem_prefix"
"""Key of a request's metadata: "off" computes a prompt whole, whatever is stored of it."""
LEAST_STORED = 256
"""A stored beginning of fewer tokens is computed sooner than it is fetched."""
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
    if key is not None and (known := _known(backend, response_id(owner, key), model, digest)):
        return known
    items = items_of(body.input)
    if is_empty(items):
        raise bad(EMPTY, "input")
    with notes.stage("pictures"):
        backend.pictures.take_in(items)
    with notes.stage("shape"):
        shaping = shape(backend.tokenizer, body)
    for _ in range(_TRIES):
        with notes.stage("find"):
            lineage = find_lineage(backend, body, items)
        with notes.stage("tokenise") as facts:
            prompt = prompt_of(backend, body, lineage, shaping)
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
    items = items_of(body.input)
    if is_empty(items):
        raise bad(EMPTY, "input")
    backend.pictures.take_in(items)
    shaping = shape(backend.tokenizer, body)
    return len(prompt_of(backend, body, find_lineage(backend, body, items), shaping).ids)


def _enter(backend: Backend, response: str, body: ResponseRequest, lineage: Lineage) -> None:
    parent = lineage.parent
    past = [*parent.items, *parent.answer] if parent else [*lineage.seed]
    # The job is accepted: that it may not be found again by its text is no reason to refuse it.
    with contextlib.suppress(RedisError):
        backend.threads.enter(
            response, [*past, *lineage.items], body.instructions, current().share or None
        )


def prompt_of(
    backend: Backend, body: ResponseRequest, lineage: Lineage, shaping: Shaping
) -> Prompt:
    """The prompt of a turn. Raises Fault 400 where it does not fit or the template refuses it."""
    items = lineage.items
    tokenizer = backend.tokenizer
    limit = tokenizer.context_length
    shortened = body.truncation == "auto"
    own = sum(len(text_of(item.get("content") or item.get("output") or "")) for item in items)
    if (least := tokenizer.least_tokens(own)) >= limit:
        if shortened and (found := _shorter(backend, body, lineage, shaping)) is not None:
            return found
        raise _too_long(f"at least {least}", limit)
    try:
        prompt = build(
            tokenizer,
            [*lineage.seed, *items],
            instructions=body.instructions,
            parent=lineage.parent,
            tools=shaping.tools,
            options=shaping.options,
            answers=lineage.answers,
        )
    except TemplateError as error:
        raise bad(str(error), "input") from error
    prompt = backend.pictures.place(prompt, [*lineage.seed, *items], lineage.parent)
    if len(prompt.ids) >= limit:
        if shortened and (found := _shorter(backend, body, lineage, shaping)) is not None:
            return found
        raise _too_long(str(len(prompt.ids)), limit)
    return prompt


def _shorter(
    backend: Backend, body: ResponseRequest, lineage: Lineage, shaping: Shaping
) -> Prompt | None:
    """The prompt without the oldest messages, or None where that does not help."""
    tokenizer, parent = backend.tokenizer, lineage.parent
    past = [*parent.items, *parent.answer] if parent is not None else [*lineage.seed]
    known = own_answers(backend, past) if parent is not None else [*lineage.answers]

    def made(items: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> Prompt:
        prompt = build(
            tokenizer,
            items,
            instructions=body.instructions,
            tools=shaping.tools,
            options=shaping.options,
            answers=answers,
        )
        return backend.pictures.place(prompt, items, None)

    try:
        found = shorten(
            [*past, *lineage.items], known, made, tokenizer.least_tokens, tokenizer.context_length
        )
    except TemplateError as error:
        raise bad(str(error), "input") from error
    if found is None or parent is None:
        return found
    return replace(found, shared=common_prefix(found.ids, parent.ids), rebased=True)


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
    lineage: Lineage,
    prompt: Prompt,
    model: str,
    shaping: Shaping,
) -> dict[str, Any]:
    config = backend.config.decode
    tokens = len(prompt.ids)
    room = backend.tokenizer.context_length - tokens
    held = 0
    if lineage.parent is not None:
        # A state ends before its pending token, and is of use only if nothing of it changed.
        state = len(lineage.parent.ids) - 1
        held = min(state, tokens - 1) if prompt.shared >= state else 0
    node, home = _home(backend, lineage)
    # The state of a turn that is continued lies on its decode node.
    route = _route(backend, body, node, held, tokens - held) if held else {}
    preamble = last = 0
    if not held and _may_share(body):
        held, route, there = _stored(backend, body, node, prompt.ids)
        if held and lineage.new and lineage.previous is None:
            node = there  # a new conversation begins where its prompt's beginning is stored
        elif there != node:
            held, route = 0, {}
        if not held:
            preamble = backend.preambles.tokens(
                prompt.ids,
                [*(lineage.parent.items if lineage.parent else lineage.seed), *lineage.items],
                instructions=body.instructions,
                tools=shaping.tools,
                options=shaping.options,
            )
        parent = lineage.parent
        last = before_last(
            backend.tokenizer,
            prompt.ids,
            [*([*parent.items, *parent.answer] if parent else lineage.seed), *lineage.items],
            held,
            instructions=body.instructions,
            tools=shaping.tools,
            options=shaping.options,
        )
    elif tokens - held >= LEAST_STORED and _may_share(body):
        # A long message that is sent once more: its own state may be stored.
        more, way, there = _stored(backend, body, node, prompt.ids)
        if there == node and more - held >= LEAST_STORED:
            held, route = more, way
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
                "preamble": preamble,
                "last": last,
            },
        },
        "prompt_ids": prompt.ids,
        "conversation": lineage.conversation,
        "previous": lineage.previous,
        "lock": body.conversation_id is not None,
        "stage": "decode" if route.get("extend") == "decode" else "prefill",
        "route": route,
        "node": node,
        "home": None if lineage.new and body.store is False else home,
        "held_tokens": held,
        "background": bool(body.background),
        "priority": _PRIORITIES.get(body.service_tier or "", "normal"),
    }


def _home(backend: Backend, lineage: Lineage) -> tuple[str, str | None]:
    """The decode node of a turn, and what the conversation's pointer says: see scheduler.homes."""
    if not backend.stores.several:
        return backend.decode_node(), None
    with backend.store() as store:
        home = "" if lineage.new else store.home(lineage.conversation)
        past = store.node_of(lineage.previous) if lineage.previous is not None else ""
    return home or past or backend.decode_node(), home


def _route(
    backend: Backend, body: ResponseRequest, node: str, held: int, new: int
) -> dict[str, Any]:
    """Where the new tokens of a held state are computed, and why; see scheduler.extension."""
    mode = backend.config.routing.extend
    asked = (body.metadata or {}).get(METADATA)
    if asked is not None:
        try:
            mode = parse(asked)
        except ValueError as error:
            raise bad(f"metadata.{METADATA} {error}", "metadata") from error
    costs = Costs(held, new)
    if mode == "auto" and new > FEW:
        priority = _PRIORITIES.get(body.service_tier or "", "normal")
        with contextlib.suppress(RedisError):  # who asks it next will hear of that
            costs = measure(
                backend.jobs, backend.present(), node, held, new, owner_of(body), priority
            )
    return choose(mode, costs)


def _may_share(body: ResponseRequest) -> bool:
    """Whether what is stored of other prompts may be used. Fault 400 for an unknown wish."""
    asked = (body.metadata or {}).get(PREFIX, "auto")
    if asked not in ("auto", "off"):
        raise bad(f"metadata.{PREFIX} is {str(asked)[:40]!r}, not one of auto, off", "metadata")
    return asked == "auto"


def _stored(
    backend: Backend, body: ResponseRequest, node: str, ids: list[int]
) -> tuple[int, dict[str, Any], str]:
    """Tokens of the longest beginning that this owner has stored, if it is worth going on from,
    the route, and the node; nothing where no store can be asked: the prompt is computed then."""
    owner = owner_of(body)
    try:
        with backend.store() as store:
            held, there = store.longest_prefix(ids, owner, node)
    except (Fault, StoreError):
        return 0, {}, node
    if held < LEAST_STORED:
        return 0, {}, node
    costs, local = Costs(held, len(ids) - held), backend.config.decode.local_prefill_tokens
    if costs.new > local:
        priority = _PRIORITIES.get(body.service_tier or "", "normal")
        with contextlib.suppress(RedisError):
            nodes = backend.present()
            costs = measure(backend.jobs, nodes, there, held, costs.new, owner, priority)
    if not worth_resuming(costs, local):
        return 0, {}, node
    return held, {"extend": "decode", "reason": f"{held} tokens of the prompt are stored"}, there


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


def _known(backend: Backend, response: str, model: str, digest: str) -> Accepted | None:
    """The job that this idempotency key named before, or None."""
    try:
        backend.jobs.get(response)
    except JobNotFound:
        return None
    return _submit(backend, NewJob(response, model, {}, [0], digest=digest))


def _still_head(backend: Backend, lineage: Lineage, response: str) -> bool:
    """Whether a turn was locked as it was looked at; it may have ended already, and be the head."""
    with backend.store() as store:
        record = store.get_conversation(lineage.conversation)
        if record is None or record["head"] in (lineage.previous, response):
            return record is not None
        return response in store.conversation_turns(lineage.conversation)


def _digest(body: ResponseRequest) -> str:
    try:
        text = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    except (ValueError, RecursionError) as error:
        # Only what is passed through as it is, such as `tools`, can be like this.
        raise bad("the body is nested too deeply: send plainer JSON") from error
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
