"""Routes of /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from scheduler.api.backend import Backend


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/models", tags=["models"])

    def served() -> dict[str, Any]:
        """The model in the terms of both OpenAI's and Anthropic's clients."""
        since = datetime.fromtimestamp(backend.started, UTC)
        limit = backend.tokenizer.context_length
        return {
            "id": backend.config.model_name,
            "object": "model",
            "created": backend.started,
            "owned_by": "tandem",
            "context_length": limit,
            "type": "model",
            "display_name": backend.config.model_name,
            "created_at": since.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": limit,
            "max_tokens": limit,
        }

    @routes.get("")
    def list_models() -> dict[str, Any]:
        one = served()
        names = {"first_id": one["id"], "last_id": one["id"]}
        return {"object": "list", "data": [one], "has_more": False, **names}

    # Hub names have a slash, so the name may be the rest of the path.
    @routes.get("/{model:path}")
    def retrieve_model(model: str) -> dict[str, Any]:
        backend.model(model)
        return served()

    return routes
