"""The OpenAPI document: what FastAPI finds, and the shapes of answers that routes make by hand.

Answers are plain dictionaries, made once and sent as they are; the models here only describe them,
and the tests hold every answer to them.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema


class Answer(BaseModel):
    """Base of all answers: what is named here is there, and there may be more."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Answer):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """A refusal or failure, as OpenAI's clients read it."""

    error: ErrorDetail


class AnthropicDetail(Answer):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(Answer):
    """A refusal or failure, as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicDetail


class Usage(Answer):
    """Token counts; `cached_tokens` skipped the model."""

    input_tokens: int = Field(ge=0)
    input_tokens_details: dict[str, int]
    output_tokens: int = Field(ge=0)
    output_tokens_details: dict[str, int]
    total_tokens: int = Field(ge=0)


class Response(Answer):
    """A response; `tandem` holds what OpenAI's object has no field for."""

    id: str = Field(pattern="^resp_[0-9a-f]{32}$")
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: Usage | None
    metadata: dict[str, str]
    tandem: dict[str, Any]


class Compaction(Answer):
    """User messages and one summary."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: Usage | None


class Conversation(Answer):
    """A conversation."""

    id: str = Field(pattern="^conv_[0-9a-f]{32}$")
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, Any]
    tandem: dict[str, Any]


class Choice(Answer):
    """The answer of a completion."""

    index: Literal[0]
    message: dict[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    logprobs: dict[str, Any] | None


class Completion(Answer):
    """A chat completion."""

    id: str = Field(pattern="^chatcmpl-[0-9a-f]{32}$")
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: dict[str, Any] | None


class Message(Answer):
    """A message, as Anthropic's clients read it."""

    id: str = Field(pattern="^msg_[0-9a-f]{32}$")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, Any]


class Count(Answer):
    """A count of tokens."""

    input_tokens: int = Field(ge=0)


class Page(Answer):
    """One page of a list."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class Deleted(Answer):
    """What was deleted."""

    id: str
    object: str
    deleted: Literal[True]


class Model(Answer):
    """The served model, for both clients."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    created: int
    created_at: str


ANSWERS: dict[str, type[BaseModel]] = {
    "post /v1/responses": Response,
    "get /v1/responses": Page,
    "get /v1/responses/{response_id}": Response,
    "post /v1/responses/{response_id}/cancel": Response,
    "delete /v1/responses/{response_id}": Deleted,
    "get /v1/responses/{response_id}/input_items": Page,
    "post /v1/responses/input_tokens": Count,
    "post /v1/responses/compact": Compaction,
    "post /v1/conversations": Conversation,
    "get /v1/conversations": Page,
    "get /v1/conversations/{conversation_id}": Conversation,
    "post /v1/conversations/{conversation_id}": Conversation,
    "delete /v1/conversations/{conversation_id}": Deleted,
    "post /v1/conversations/{conversation_id}/fork": Conversation,
    "post /v1/conversations/import": Conversation,
    "get /v1/conversations/{conversation_id}/items": Page,
    "post /v1/conversations/{conversation_id}/items": Page,
    "delete /v1/conversations/{conversation_id}/items/{item_id}": Conversation,
    "post /v1/chat/completions": Completion,
    "get /v1/chat/completions": Page,
    "get /v1/chat/completions/{completion_id}": Completion,
    "post /v1/chat/completions/{completion_id}": Completion,
    "delete /v1/chat/completions/{completion_id}": Deleted,
    "get /v1/chat/completions/{completion_id}/messages": Page,
    "post /v1/messages": Message,
    "post /v1/messages/count_tokens": Count,
    "get /v1/models": Page,
    "get /v1/models/{model}": Model,
}
PICTURES = ("get /v1/responses/{response_id}/ledger.svg",)
#: Of a stream OpenAPI 3.1 describes each event, as it has been taken apart.
EVENT = {
    "type": "object",
    "description": "one event; its data are JSON, or [DONE] at the end of a chat completion",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
STREAMS = (
    "post /v1/responses",
    "get /v1/responses/{response_id}",
    "post /v1/chat/completions",
    "post /v1/messages",
)


def document(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        models: list[type[BaseModel]] = [*{*ANSWERS.values()}, Error, AnthropicError]
        _, found = models_json_schema(
            [(model, "serialization") for model in models],
            ref_template="#/components/schemas/Answer{model}",
        )
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        schemas |= {f"Answer{name}": shape for name, shape in found["$defs"].items()}
        for path, methods in made["paths"].items():
            for method, operation in methods.items():
                _describe(f"{method} {path}", operation)
        app.openapi_schema = made
    return app.openapi_schema


def _describe(name: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # wrong bodies and parameters are answered with 400
    error = AnthropicError if name.split()[1].startswith("/v1/messages") else Error
    answers["default"] = {"description": "refused or failed", **_content(error)}
    if name in PICTURES:
        answers["200"]["content"] = {"image/svg+xml": {"schema": {"type": "string"}}}
    if (model := ANSWERS.get(name)) is not None:
        answers["200"] = {"description": model.__doc__ or "", **_content(model)}
        if name in STREAMS:
            answers["200"]["content"]["text/event-stream"] = {"schema": EVENT}


def _content(model: type[BaseModel]) -> dict[str, Any]:
    ref = {"$ref": f"#/components/schemas/Answer{model.__name__}"}
    return {"content": {"application/json": {"schema": ref}}}
