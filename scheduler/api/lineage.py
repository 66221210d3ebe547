"""What a request continues: a response, a conversation, or the turn that it repeats."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.faults import Fault, bad, missing
from scheduler.api.items import split
from scheduler.api.prompt import Parent, messages_of
from scheduler.api.recall import Recalled, own_answers, recall
from scheduler.api.schema import ResponseRequest
from scheduler.api.threads import same_answer, same_past
from scheduler.api.weave import Answer
from scheduler.record import JobNotFound
from store.turns import Turn

_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
Items = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Lineage:
    """What a turn continues: nothing, a conversation's first items, or another turn.

    `items` are the turn's own: what the request sent, less what it repeats of earlier turns.
    `stateless`: the request named no ID. `answers`: what was generated here, by
    places in `seed` and `items` together. `past`: the conversation of `previous`, where that is
    another one.
    """

    conversation: str
    items: Items
    previous: str | None = None
    parent: Parent | None = None
    seed: Items = field(default=())
    new: bool = False
    stateless: bool = False
    answers: Sequence[Answer] = ()
    past: str = ""


def find_lineage(backend: Backend, body: ResponseRequest, items: Items) -> Lineage:
    """What a request that sent `items` continues. Raises Fault 404, 409 or 400."""
    conversation = body.conversation_id
    if conversation is not None and body.previous_response_id is not None:
        raise bad(
            "give either conversation or previous_response_id, not both", "previous_response_id"
        )
    if body.previous_response_id is not None:
        return _after_response(backend, body.previous_response_id, items)
    if conversation is None:
        return _repeated(backend, body, items) or Lineage(
            new_conversation(), items, new=True, stateless=True
        )
    with backend.store() as store:
        record = store.get_conversation(conversation) if is_id(conversation) else None
    if record is None or not current().may_see(record["owner"]):
        raise missing("Conversation", conversation[:80], "conversation")
    if record["head"] is None:
        return Lineage(
            conversation, items, seed=record["items"], answers=own_answers(backend, record["items"])
        )
    seed, added = divided(record)
    return _after_turn(backend, record["head"], [*added, *items], seed)


def divided(record: dict[str, Any]) -> tuple[Items, Items]:
    """A conversation's first items, and those that were added and wait for the next turn."""
    items: Items = record["items"]
    first = len(items) - record.get("added", 0)
    return items[:first], items[first:]


def new_conversation() -> str:
    """A new conversation id."""
    return f"conv_{uuid.uuid4().hex}"


def _repeated(backend: Backend, body: ResponseRequest, items: Items) -> Lineage | None:
    """The turn whose past and answer the request repeats, and later answers that are known."""
    found = _continued(backend, body, items)
    first = len(items) - len(found.items) if found is not None else 0
    recalled = recall(backend, items, first)
    if found is None and recalled and _same_past(backend, body, items, recalled[-1]):
        # It was not found by its text: that is remembered for a time only.
        return _on(backend, recalled[-1].turn, items[recalled[-1].stop :])
    known = tuple(one.answer(first) for one in recalled)
    if found is not None:
        return replace(found, answers=known)
    if known:
        return Lineage(new_conversation(), items, new=True, stateless=True, answers=known)
    return None


def _same_past(backend: Backend, body: ResponseRequest, items: Items, one: Recalled) -> bool:
    with backend.store() as store:
        path = store.path_of(one.turn.id)
        first = store.get_conversation(path[0].conversation)
    past = [item for turn in path[:-1] for item in turn.items]
    inputs = split(one.turn.id, one.turn.items)[0]
    stored = [*(divided(first)[0] if first else ()), *past, *inputs]
    return same_past(
        messages_of(items[: one.start], body.instructions),
        messages_of(stored, one.turn.params.get("instructions")),
    )


def _continued(backend: Backend, body: ResponseRequest, items: Items) -> Lineage | None:
    """The turn whose past and answer the request repeats, found by its text, or None."""
    caller = current()
    known = backend.threads.candidates(items, body.instructions, caller.share or None)
    for name, start, stop in known:
        if backend.deleted(name):
            continue
        try:
            with backend.store() as store:
                turn = store.get_turn(name)
        except Fault:
            return None  # nobody asked for this turn by name: the prompt can be computed anew
        if turn is None or not caller.may_see(turn.owner) or other_model(backend, turn):
            continue
        if not same_answer(items[start:stop], split(turn.id, turn.items)[1]):
            continue
        return _on(backend, turn, items[stop:])
    return None


def _on(backend: Backend, turn: Turn, items: Items) -> Lineage:
    """On from a turn that nobody named."""
    found = _after_turn(backend, turn.id, items)
    about = turn.params.get("params", {}).get("about", {})
    # A conversation that has been given a name goes on only when it is named.
    if about.get("stateless"):
        return replace(found, stateless=True)
    new, past = new_conversation(), found.conversation
    return replace(found, stateless=True, conversation=new, new=True, past=past)


def _after_response(backend: Backend, response: str, items: Items) -> Lineage:
    param = "previous_response_id"
    if not is_id(response) or backend.deleted(response):
        raise missing("Response", response[:80], param)
    with backend.store() as store:
        turn = store.get_turn(response)
    caller = current()
    if turn is not None and caller.may_see(turn.owner):
        return _after_turn(backend, response, items)
    try:
        job = backend.jobs.get(response)
    except JobNotFound:
        raise missing("Response", response[:80], param) from None
    if not caller.may_see(job.owner):
        raise missing("Response", response[:80], param)
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


def _after_turn(backend: Backend, turn_id: str, items: Items, seed: Items | None = None) -> Lineage:
    with backend.store() as store:
        path: list[Turn] = store.path_of(turn_id)
        if seed is None:
            first = store.get_conversation(path[0].conversation)
            seed = divided(first)[0] if first else ()
    last = path[-1]
    if other_model(backend, last):
        raise Fault(
            409,
            f"this conversation was held with the model '{last.model}', which is not served now: "
            f"start a new one, or have it served by `tandem model use {last.model}`",
            code="other_model",
            retry=False,
        )
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
        tools=last.params.get("tools"),
        options=last.params.get("options"),
    )
    return Lineage(last.conversation, items, last.id, parent)


def other_model(backend: Backend, turn: Turn) -> bool:
    """Whether a turn's token ids are another model's, and mean nothing to the one that is served.

    The same model under another fingerprint (a new format of states) is not: ids are kept.
    """
    if not turn.model or turn.model == backend.config.model_name:
        return False
    served = {node.fingerprint for node in backend.present() if node.role == "decode"} - {""}
    return turn.fingerprint.hex() not in served


def is_id(name: str) -> bool:
    """Whether `name` could be an id at all."""
    return _ID.fullmatch(name) is not None
