"""Routes of /v1/conversations."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from scheduler.api import conversation_files
from scheduler.api.backend import Backend
from scheduler.api.bodies import BodyRoute
from scheduler.api.caller import current
from scheduler.api.faults import Fault, bad, missing
from scheduler.api.lineage import divided
from scheduler.api.lookup import Order, conversation_items, find_conversation, page
from scheduler.api.references import resolved
from scheduler.api.schema import ConversationUpdate, NewConversation, NewItems, items_of, media_at
from scheduler.record import LIVE

ConversationId = Annotated[str, Path(max_length=256)]


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/conversations", route_class=BodyRoute, tags=["conversations"])

    @routes.post("")
    def create_conversation(body: NewConversation | None = None) -> dict[str, Any]:
        body = body or NewConversation()
        items = body.items or []
        if (where := media_at(items)) is not None:
            raise bad(f"this model takes text only: leave out {where}", "items")
        stored = items_of(resolved(backend, items, "items"))
        with backend.store() as store:
            record = store.create_conversation(
                f"conv_{uuid.uuid4().hex}",
                owner=current().owner,
                metadata=dict(body.metadata or {}),
                items=stored,
                node=backend.decode_node(),
            )
        return conversation_object(record)

    @routes.get("")
    def list_conversations(
        limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        """An extension: OpenAI's API has no list of conversations."""
        if after is not None:
            find_conversation(backend, after)
        with backend.store() as store:
            caller = current()
            owner = caller.owner if caller.scoped else None
            records = store.list_conversations(owner, limit=limit + 1, after=after)
            full = [store.get_conversation(record["id"]) for record in records[:limit]]
            away = store.away
        data = [conversation_object(record) for record in full if record is not None]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(records) > limit,
            # What lies on these nodes is not in the list, and not lost.
            **({"tandem": {"away": away}} if away else {}),
        }

    conversation_files.add_to(routes, backend, conversation_object)

    @routes.get("/{conversation_id}")
    def retrieve_conversation(conversation_id: ConversationId) -> dict[str, Any]:
        return conversation_object(find_conversation(backend, conversation_id))

    @routes.post("/{conversation_id}")
    def update_conversation(
        conversation_id: ConversationId, body: ConversationUpdate
    ) -> dict[str, Any]:
        find_conversation(backend, conversation_id)
        changes: dict[str, Any] = {}
        if "metadata" in body.model_fields_set:
            changes["metadata"] = body.metadata or {}
        if body.pinned is not None:
            changes["pinned"] = body.pinned
        if not changes:
            raise bad("give metadata or pinned: there is nothing to change", "metadata")
        with backend.store() as store:
            record = store.update_conversation(conversation_id, **changes)
        return conversation_object(record)

    @routes.delete("/{conversation_id}")
    def delete_conversation(conversation_id: ConversationId) -> dict[str, Any]:
        find_conversation(backend, conversation_id)
        _refuse_busy(backend, conversation_id)
        backend.delete_conversation(conversation_id)
        backend.note("delete", conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @routes.get("/{conversation_id}/items")
    def list_items(
        conversation_id: ConversationId,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        return page(conversation_items(backend, conversation_id), limit, order, after)

    @routes.post("/{conversation_id}/items")
    def add_items(conversation_id: ConversationId, body: NewItems) -> dict[str, Any]:
        """Items that the next turn on this conversation begins with."""
        find_conversation(backend, conversation_id)
        if (where := media_at(body.items)) is not None:
            raise bad(f"this model takes text only: leave out {where}", "items")
        _refuse_busy(backend, conversation_id)
        items = items_of(resolved(backend, body.items, "items"))
        with backend.store() as store:
            store.update_conversation(conversation_id, add_items=items)
        return page(items, len(items), "asc", None)

    @routes.delete("/{conversation_id}/items/{item_id}")
    def delete_item(
        conversation_id: ConversationId, item_id: Annotated[str, Path(max_length=256)]
    ) -> dict[str, Any]:
        """Take back an item that no turn has seen yet."""
        record = find_conversation(backend, conversation_id)
        if all(item.get("id") != item_id for item in conversation_items(backend, conversation_id)):
            raise missing("Item", item_id[:80], "item_id")
        _refuse_busy(backend, conversation_id)
        seed, added = divided(record)
        free = [item.get("id") for item in (seed if record["head"] is None else added)]
        if item_id not in free:
            raise bad(
                "a turn was built on this item, so it stays: branch from an earlier response by "
                "previous_response_id instead",
                "item_id",
            )
        with backend.store() as store:
            record = store.update_conversation(conversation_id, remove_item=item_id)
        backend.note("delete", item_id, conversation=conversation_id)
        return conversation_object(record)

    @routes.get("/{conversation_id}/items/{item_id}")
    def retrieve_item(
        conversation_id: ConversationId, item_id: Annotated[str, Path(max_length=256)]
    ) -> dict[str, Any]:
        for item in conversation_items(backend, conversation_id):
            if item.get("id") == item_id:
                return item
        raise missing("Item", item_id[:80], "item_id")

    return routes


def _refuse_busy(backend: Backend, conversation: str) -> None:
    for job in backend.jobs.list(LIVE, limit=1000):
        if job.conversation == conversation:
            raise Fault(
                409,
                f"{job.id} is running on this conversation: wait for it or cancel it first",
                code="conversation_busy",
                retry=False,
            )


def conversation_object(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation as OpenAI's clients know it, with Tandem's facts beside."""
    return {
        "id": record["id"],
        "object": "conversation",
        "created_at": int(record["created"]),
        "metadata": record["metadata"],
        "tandem": {
            "head": record["head"],
            "turns": record["turns"],
            # What it began with, all that was said before where it is a fork.
            "first_items": len(record["items"]) - record.get("added", 0),
            "tokens": record["n_tokens"],
            "saved_tokens": record["saved"],
            "saved_bytes": record["bytes"],
            "last_used": record["last_used"],
            "pinned": record["pinned"],
        },
    }
