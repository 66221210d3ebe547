"""Shapes of Anthropic Messages requests, and the same in the terms of the Responses API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from scheduler.api.faults import bad
from scheduler.api.schema import FIRST, MAX_IDS, FunctionName, Name, ResponseRequest, Shape, Text
from scheduler.api.translated import translated

_MEDIA = ("image", "document", "file", "container_upload")


class Source(Shape):
    """Where an image is, or its data."""

    type: Name | None = None
    media_type: Name | None = None
    data: Text | None = None
    url: Text | None = None


class Block(Shape):
    """A block of content; which fields count depends on its type."""

    type: Name
    text: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Any = None
    thinking: Text | None = None
    source: Source | None = None
    signature: Text | None = None


def _kind(value: Any) -> str:
    return "«text»" if isinstance(value, str) else "«blocks»"


Blocks = Annotated[
    Annotated[Text, Tag("«text»")]
    | Annotated[list[Block], FIRST, Field(max_length=MAX_IDS), Tag("«blocks»")],
    Discriminator(_kind),
]


class AnthropicMessage(Shape):
    """One message; `system` ones may stand between the others."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Sender(Shape):
    """Who asks."""

    user_id: Name | None = None


class AnthropicTool(Shape):
    """A function that the model may call; tools that Anthropic's servers run have other types."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Shape):
    """Whether tools may, must not or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Shape):
    """Whether the model is to think, and whether its thoughts are shown."""

    type: Name
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Shape):
    """Form of the text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Shape):
    """How much the model is to think, and the form of its text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Shape):
    """Body of POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[AnthropicMessage], FIRST, Field(min_length=1, max_length=MAX_IDS)]
    system: Blocks | None = None
    tools: Annotated[list[AnthropicTool], FIRST, Field(max_length=MAX_IDS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1024)]], FIRST, Field(max_length=16)
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    metadata: Sender | None = None
    service_tier: Name | None = None


def to_response_request(body: CountRequest) -> ResponseRequest:
    """The same request in the terms of the Responses API. Raises Fault for what is not served."""
    if body.messages[-1].role == "assistant":
        raise bad("the last message must be the user's: an answer cannot be begun for the model")
    items: list[dict[str, Any]] = []
    for index, message in enumerate(body.messages):
        items += _items(message, f"messages.{index}")
    fields: dict[str, Any] = {
        "model": body.model,
        "instructions": "\n\n".join(_texts(body.system, "system")) or None,
    }
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        fields["tool_choice"] = {
            "any": "required",
            "tool": {"type": "function", "name": choice.name},
        }.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    config = body.output_config or OutputConfig()
    if body.thinking is not None or config.effort is not None:
        off = body.thinking is not None and body.thinking.type == "disabled"
        fields["reasoning"] = {"effort": "none" if off else config.effort or "medium"}
    if config.format is not None:
        form = {"type": "json_schema", "name": "answer", "schema": config.format.json_schema}
        fields["text"] = {"format": form}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_output_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "user": body.metadata.user_id if body.metadata else None,
        }
    return translated(items, fields)


def _texts(content: str | Sequence[Block] | None, where: str) -> list[str]:
    """The text blocks of a content."""
    if isinstance(content, str):
        return [content] if content else []
    texts: list[str] = []
    for index, block in enumerate(content or []):
        if block.type in _MEDIA:
            raise bad(
                f"{where}.content.{index}: this model takes text only: leave out the {block.type}",
                code="unsupported_content",
            )
        if block.type == "text":
            texts.append(block.text or "")
    return texts


def _items(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """The items of one message; texts next to each other are one message."""
    items: list[dict[str, Any]] = []
    said = {"type": "message", "role": message.role}
    if isinstance(message.content, str):
        return [{**said, "content": message.content}]
    texts: list[dict[str, Any]] = []

    def close() -> None:
        if texts:
            items.append({**said, "content": list(texts)})
            texts.clear()

    for index, block in enumerate(message.content):
        at = f"{where}.content.{index}"
        if block.type == "tool_use":
            close()
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            call = {"call_id": _need(block.id, at, "id"), "name": _need(block.name, at, "name")}
            items.append({"type": "function_call", "arguments": arguments, **call})
        elif block.type == "tool_result":
            close()
            call_id = _need(block.tool_use_id, at, "tool_use_id")
            output = _result(block.content, at)
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        elif block.type == "thinking":
            close()
            thought = {"type": "reasoning_text", "text": block.thinking or ""}
            items.append({"type": "reasoning", "content": [thought]})
        elif block.type == "image" and message.role == "user":
            texts.append(_image(block.source, at))
        else:
            texts += [{"type": "text", "text": text} for text in _texts([block], at)]
    close()
    return items


def _image(source: Source | None, where: str) -> dict[str, Any]:
    """An image as a part of the Responses API."""
    if source is None or source.type not in ("base64", "url"):
        raise bad(f"{where}.source: give the image as base64 data or by its url")
    url = source.url
    if source.type == "base64":
        url = f"data:{source.media_type or 'image/png'};base64,{source.data or ''}"
    return {"type": "input_image", "image_url": url}


def _result(content: Any, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad(f"{where}.content: a string or a list of blocks is needed")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{where}.content: this model takes text only", code="unsupported_content")
    return "\n".join(part["text"] for part in content)


def _need(value: str | None, where: str, name: str) -> str:
    if not value:
        raise bad(f"{where}.{name} is missing")
    return value
