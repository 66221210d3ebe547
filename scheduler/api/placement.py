"""Where a turn's prompt is computed: on which node, and from which stored state on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.edits import before_last
from scheduler.api.faults import Fault, bad
from scheduler.api.lineage import Lineage
from scheduler.api.prompt import Prompt
from scheduler.api.schema import ResponseRequest
from scheduler.api.shaping import Shaping
from scheduler.extension import FEW, METADATA, Costs, choose, measure, parse, worth_resuming
from scheduler.homes import takes_new
from scheduler.record import Priority
from store.errors import StoreError

_PRIORITIES: dict[str, Priority] = {"priority": "interactive", "flex": "batch", "batch": "batch"}
PREFIX = "tandem_prefix"
"""Key of a request's metadata: "off" computes a prompt whole, whatever is stored of it."""
LEAST_STORED = 256
"""A stored beginning of fewer tokens is computed sooner than it is fetched."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn goes.

    `node`: its decode node; `home`: what the conversation's pointer says (None: there is none),
    `past_home`: what that of the conversation says which it branches from;
    `held`: prompt tokens that a stored state covers; `route`: where the others are computed, and
    why; `preamble`, `last`: tokens up to the end of the preamble and to the last message, where a
    state is to be kept (0: none).
    """

    node: str
    home: str | None
    past_home: str | None
    held: int
    route: dict[str, Any]
    preamble: int
    last: int


def priority_of(body: ResponseRequest) -> Priority:
    """The queue class that a request asks for."""
    return _PRIORITIES.get(body.service_tier or "", "normal")


def find_place(
    backend: Backend,
    body: ResponseRequest,
    owner: str,
    lineage: Lineage,
    prompt: Prompt,
    shaping: Shaping,
) -> Place:
    """Where the prompt is computed, and from which stored state on. Raises Fault 400."""
    tokens = len(prompt.ids)
    held = 0
    if lineage.parent is not None:
        # A state ends before its pending token, and is of use only if nothing of it changed.
        state = len(lineage.parent.ids) - 1
        held = min(state, tokens - 1) if prompt.shared >= state else 0
    node, home, past_home = _home(backend, lineage)
    # The state of a turn that is continued lies on its decode node.
    route = _route(backend, body, owner, node, held, tokens - held) if held else {}
    preamble = last = 0
    if not held and _may_share(body):
        held, route, there = _stored(backend, body, owner, node, prompt.ids)
        free = lineage.new and lineage.previous is None
        if held and free and (there == node or _takes_new(backend, there)):
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
        more, way, there = _stored(backend, body, owner, node, prompt.ids)
        if there == node and more - held >= LEAST_STORED:
            held, route = more, way
    return Place(node, home, past_home, held, route, preamble, last)


def _home(backend: Backend, lineage: Lineage) -> tuple[str, str | None, str | None]:
    """The decode node of a turn, and what the pointers say of its conversation and of the one that
    it branches from: see scheduler.homes."""
    if not backend.stores.several:
        return backend.decode_node(), None, None
    past_home: str | None = None
    with backend.store() as store:
        home = "" if lineage.new else store.home(lineage.conversation)
        if lineage.past and lineage.previous is not None:
            past_home = store.home(lineage.past)
            store.get_turn(lineage.previous)  # it may have moved since it was found
        past = store.node_of(lineage.previous) if lineage.previous is not None else ""
    return home or past or backend.decode_node(), home, past_home


def _takes_new(backend: Backend, name: str) -> bool:
    return any(takes_new(node) for node in backend.present() if node.name == name)


def _route(
    backend: Backend, body: ResponseRequest, owner: str, node: str, held: int, new: int
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
        priority = priority_of(body)
        with contextlib.suppress(RedisError):  # who asks it next will hear of that
            costs = measure(backend.jobs, backend.present(), node, held, new, owner, priority)
    return choose(mode, costs)


def _may_share(body: ResponseRequest) -> bool:
    """Whether what is stored of other prompts may be used. Fault 400 for an unknown wish."""
    asked = (body.metadata or {}).get(PREFIX, "auto")
    if asked not in ("auto", "off"):
        raise bad(f"metadata.{PREFIX} is {str(asked)[:40]!r}, not one of auto, off", "metadata")
    return asked == "auto"


def _stored(
    backend: Backend, body: ResponseRequest, owner: str, node: str, ids: list[int]
) -> tuple[int, dict[str, Any], str]:
    """Tokens of the longest beginning that this owner has stored, if it is worth going on from,
    the route, and the node; nothing where no store can be asked: the prompt is computed then."""
    try:
        with backend.store() as store:
            held, there = store.longest_prefix(ids, owner, node)
    except (Fault, StoreError):
        return 0, {}, node
    if held < LEAST_STORED:
        return 0, {}, node
    costs, local = Costs(held, len(ids) - held), backend.config.decode.local_prefill_tokens
    if costs.new > local:
        priority = priority_of(body)
        with contextlib.suppress(RedisError):
            nodes = backend.present()
            costs = measure(backend.jobs, nodes, there, held, costs.new, owner, priority)
    if not worth_resuming(costs, local):
        return 0, {}, node
    return held, {"extend": "decode", "reason": f"{held} tokens of the prompt are stored"}, there
