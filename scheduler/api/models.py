"""Routes of /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from scheduler.api.backend import Backend


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/models", tags=["models"])

    def served() -> dict[str, Any]:
        return {
            "id": backend.config.model_name,
            "object": "model",
            "created": backend.started,
            "owned_by": "tandem",
            "context_length": backend.tokenizer.context_length,
        }

    @routes.get("")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [served()]}

    # Hub names have a slash, so the name may be the rest of the path.
    @routes.get("/{model:path}")
    def retrieve_model(model: str) -> dict[str, Any]:
        backend.model(model)
        return served()

    return routes
