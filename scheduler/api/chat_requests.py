"""Shapes of chat completion requests, and the same in the terms of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from scheduler.api.faults import bad
from scheduler.api.schema import (
    FIRST,
    MAX_IDS,
    Bias,
    FunctionName,
    Metadata,
    Name,
    Penalty,
    ResponseRequest,
    Shape,
    Stop,
    Text,
    check_metadata,
    unserved,
)
from scheduler.api.translated import translated


class ImageUrl(Shape):
    """Where an image is, or its data."""

    url: Text | None = None
    detail: Name | None = None


class ChatPart(Shape):
    """A part of a message's content."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | None = None


def _kind_of_content(value: Any) -> str:
    return "«text»" if isinstance(value, str) or value is None else "«parts»"


ChatContent = Annotated[
    Annotated[Text | None, Tag("«text»")]
    | Annotated[list[ChatPart], FIRST, Field(max_length=MAX_IDS), Tag("«parts»")],
    Discriminator(_kind_of_content),
]


class ChatFunction(Shape):
    """The function of a tool call."""

    name: Name
    arguments: Text = "{}"


class ChatCall(Shape):
    """A tool call that an assistant made."""

    id: Name
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatMessage(Shape):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ChatContent = None
    tool_calls: Annotated[list[ChatCall], FIRST, Field(max_length=MAX_IDS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None


class StreamOptions(Shape):
    """What a stream tells besides text."""

    include_usage: bool | None = None


class ToolFunction(Shape):
    """A function as chat describes it."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchema(Shape):
    """A schema under its name."""

    name: Name | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: Text | None = None


class ResponseFormat(Shape):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatTool(Shape):
    """A function that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class TemplateOptions(Shape):
    """Variables of the chat template."""

    enable_thinking: bool | None = None


class ChatRequest(Shape):
    """Body of POST /v1/chat/completions."""

    model: Name | None = None
    messages: Annotated[list[ChatMessage], FIRST, Field(min_length=1, max_length=MAX_IDS)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = Field(None, description="extension")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="extension")
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop = None
    n: int | None = None
    store: bool | None = Field(
        None, description="true: can be retrieved; false: nothing of it is kept"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Name | None = None
    tools: Annotated[list[ChatTool], FIRST, Field(max_length=MAX_IDS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: TemplateOptions | None = Field(None, description="extension")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = Field(
        None, description="extension"
    )
    logit_bias: Bias | None = None
    modalities: Annotated[list[Name], FIRST, Field(max_length=16)] | None = None
    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    _check_metadata = field_validator("metadata")(check_metadata)

    _check_audio = field_validator("audio")(unserved("answers here are text: leave audio out"))
    _check_search = field_validator("web_search_options")(
        unserved("nothing is searched here: give the model a tool for it")
    )
    _check_functions = field_validator("functions", "function_call")(
        unserved("send functions as tools, and which of them is to be called as tool_choice")
    )

    @field_validator("modalities")
    @classmethod
    def _text(cls, value: list[str] | None) -> list[str] | None:
        if any(kind != "text" for kind in value or ()):
            raise ValueError("answers here are text: leave modalities out")
        return value

    @field_validator("n")
    @classmethod
    def _one(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("one choice is made here: leave n out, or send the request again")
        return value


def to_response_request(body: ChatRequest) -> ResponseRequest:
    """The same request in the terms of the Responses API. Raises Fault for what is not served."""
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    fields: dict[str, Any] = {
        name: getattr(body, name)
        for name in (
            "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "metadata", "user",
            "safety_identifier", "prompt_cache_key", "service_tier", "tool_choice",
            "parallel_tool_calls", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "logit_bias", "store",
        )
    }  # fmt: skip
    items = [item for i, m in enumerate(body.messages) for item in _items(m, i)]
    fields["max_output_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.tools:
        fields["tools"] = [{"type": "function", **t.function.model_dump()} for t in body.tools]
    if body.logprobs:
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": body.top_logprobs}
    if body.response_format is not None:
        fields["text"] = {"format": _format(body.response_format)}
    thinking = body.chat_template_kwargs and body.chat_template_kwargs.enable_thinking
    effort = body.reasoning_effort
    if thinking is not None:
        effort = "medium" if thinking else "none"
    if effort is not None:
        fields["reasoning"] = {"effort": effort}
    return translated(items, fields)


def _format(wanted: ResponseFormat) -> dict[str, Any]:
    """The same format in the terms of the Responses API."""
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise bad("response_format has no json_schema.schema", "response_format")
    return {"type": "json_schema", **wanted.json_schema.model_dump(by_alias=True)}


def _part(part: ChatPart) -> dict[str, Any]:
    if part.type != "image_url":
        return {"type": "text", "text": part.text or part.refusal or ""}
    found = part.image_url or ImageUrl()
    return {"type": "input_image", "image_url": found.url, "detail": found.detail}


def _items(message: ChatMessage, index: int) -> list[dict[str, Any]]:
    """The items of one message."""
    content = message.content
    parts = [ChatPart(type="text", text=content)] if isinstance(content, str) else content or []
    for j, part in enumerate(parts):
        taken = ("text", "refusal", "image_url") if message.role == "user" else ("text", "refusal")
        if part.type not in taken:
            where = f"messages[{index}].content[{j}]"
            raise bad(
                f"text, and images in the user's messages, are taken: leave out {where}",
                where,
                "unsupported_content",
            )
    texts = [_part(part) for part in parts]
    if message.role == "tool":
        if not message.tool_call_id:
            where = f"messages[{index}].tool_call_id"
            raise bad(f"{where} is missing: name the call that this answers", where)
        text = "\n".join(part["text"] for part in texts)
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": text}]
    items: list[dict[str, Any]] = []
    if message.reasoning_content:
        thought = {"type": "reasoning_text", "text": message.reasoning_content}
        items.append({"type": "reasoning", "content": [thought]})
    calls = message.tool_calls or []
    if texts or not calls:
        items.append({"type": "message", "role": message.role, "content": texts})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": call.function.arguments,
        }
        for call in calls
    ]
    return items
