"""The prompt of a turn: built on what it continues, and made to fit the model's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler.api.backend import Backend
from scheduler.api.faults import Fault, bad
from scheduler.api.lineage import Lineage
from scheduler.api.prompt import Prompt, build, common_prefix
from scheduler.api.recall import own_answers
from scheduler.api.schema import ResponseRequest
from scheduler.api.shaping import Shaping
from scheduler.api.tokenizer import TemplateError, TooLong
from scheduler.api.truncation import shorten
from scheduler.api.weave import Answer


def turn_prompt(
    backend: Backend, body: ResponseRequest, lineage: Lineage, shaping: Shaping
) -> Prompt:
    """The prompt of a turn. Raises Fault 400 where it does not fit or the template refuses it."""
    items = lineage.items
    tokenizer = backend.tokenizer
    limit = tokenizer.context_length
    shortened = body.truncation == "auto"
    try:
        prompt = build(
            tokenizer,
            [*lineage.seed, *items],
            instructions=body.instructions,
            parent=lineage.parent,
            tools=shaping.tools,
            options=shaping.options,
            answers=lineage.answers,
            most=limit,
        )
    except TooLong as error:
        if shortened and (found := _shorter(backend, body, lineage, shaping)) is not None:
            return found
        raise _too_long(
            f"is too long to be counted: by its characters it has at least {error.least} tokens, "
            "perhaps many times more,",
            limit,
        ) from None
    except TemplateError as error:
        raise bad(str(error), "input") from error
    prompt = backend.pictures.place(prompt, [*lineage.seed, *items], lineage.parent)
    if len(prompt.ids) >= limit:
        if shortened and (found := _shorter(backend, body, lineage, shaping)) is not None:
            return found
        raise _too_long(f"has {len(prompt.ids)} tokens", limit)
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
            most=tokenizer.context_length,
        )
        return backend.pictures.place(prompt, items, None)

    try:
        found = shorten([*past, *lineage.items], known, made, tokenizer.context_length)
    except TemplateError as error:
        raise bad(str(error), "input") from error
    if found is None or parent is None:
        return found
    return replace(found, shared=common_prefix(found.ids, parent.ids), rebased=True)


def _too_long(why: str, limit: int) -> Fault:
    return bad(
        f"the prompt {why} and the model's context is {limit} tokens, of which one at least is "
        "for the answer: send less text or start a new conversation",
        "input",
        "context_length_exceeded",
    )
