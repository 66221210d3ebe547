"""Shapes of the requests that the API accepts: OpenAI's Responses and Conversations.

Unknown fields are ignored, wrong types are refused. What Tandem adds to OpenAI's fields (`seed`,
`stop`, `top_k`, `min_p`) is named so below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from scheduler.api.items import new_id
from scheduler.api.summary import unseal

MAX_IDS = 10_000
Text = Annotated[str, Field(max_length=32 * 1024 * 1024)]
Name = Annotated[str, Field(max_length=256)]
FIRST = Field(fail_fast=True)
"""Of a list: what is wrong is told of its first wrong element, not of all."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]


class Shape(BaseModel):
    """Base of all shapes: strict types, no NaN, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class TextPart(Shape):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalPart(Shape):
    """A refusal that an assistant wrote earlier."""

    type: Literal["refusal"]
    refusal: Text


class ImagePart(Shape):
    """An image, as data or by its URL: refused by models that take text only."""

    type: Literal["input_image", "image_url"]
    image_url: Text | None = None
    detail: Name | None = None


class MediaPart(Shape):
    """A file or sound: known, and refused."""

    type: Literal["input_file", "input_audio"]


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("input_image", "image_url"):
        return "«image»"
    if kind in ("input_file", "input_audio"):
        return "«media»"
    return "«refusal»" if kind == "refusal" else "«text»"


Part = Annotated[
    Annotated[TextPart, Tag("«text»")]
    | Annotated[RefusalPart, Tag("«refusal»")]
    | Annotated[ImagePart, Tag("«image»")]
    | Annotated[MediaPart, Tag("«media»")],
    Discriminator(_kind_of_part),
]


def _kind_of_content(value: Any) -> str:
    return "«text»" if isinstance(value, str) else "«parts»"


Content = Annotated[
    Annotated[Text, Tag("«text»")]
    | Annotated[list[Part], FIRST, Field(max_length=MAX_IDS), Tag("«parts»")],
    Discriminator(_kind_of_content),
]


class MessageItem(Shape):
    """A message of any role."""

    type: Literal["message"] = "message"
    id: Name | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Shape):
    """A function call that the model made."""

    type: Literal["function_call"]
    id: Name | None = None
    call_id: Name
    name: Name
    arguments: Text


class CallOutputItem(Shape):
    """What a called function returned."""

    type: Literal["function_call_output"]
    id: Name | None = None
    call_id: Name
    output: Content


class ReasoningText(Shape):
    """A piece of reasoning or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Shape):
    """Reasoning that the model wrote before an answer."""

    type: Literal["reasoning"]
    id: Name | None = None
    content: Annotated[list[ReasoningText], FIRST, Field(max_length=MAX_IDS)] | None = None
    summary: Annotated[list[ReasoningText], FIRST, Field(max_length=MAX_IDS)] | None = None


class CompactionItem(Shape):
    """A summary of what was said before, as POST /v1/responses/compact gave it."""

    type: Literal["compaction"]
    id: Name | None = None
    encrypted_content: Text

    @field_validator("encrypted_content")
    @classmethod
    def _ours(cls, value: str) -> str:
        unseal(value)
        return value


class ItemReference(Shape):
    """What a response wrote, by the id of the item alone."""

    type: Literal["item_reference"] | None = None
    id: Name


def _kind_of_item(value: Any) -> str:
    if not isinstance(value, dict):
        return f"«{getattr(value, 'type', None) or 'item_reference'}»"
    bare = "id" in value and "role" not in value and "content" not in value
    kind = value.get("type") or ("item_reference" if bare else "message")
    return f"«{kind}»"


Item = Annotated[
    Annotated[MessageItem, Tag("«message»")]
    | Annotated[CallItem, Tag("«function_call»")]
    | Annotated[CallOutputItem, Tag("«function_call_output»")]
    | Annotated[ReasoningItem, Tag("«reasoning»")]
    | Annotated[CompactionItem, Tag("«compaction»")]
    | Annotated[ItemReference, Tag("«item_reference»")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_type",
        custom_error_message="items here are message, function_call, function_call_output, "
        "reasoning, compaction or item_reference",
    ),
]
Items = Annotated[list[Item], FIRST, Field(max_length=MAX_IDS)]


def _kind_of_input(value: Any) -> str:
    return "«text»" if isinstance(value, str) else "«items»"


Input = Annotated[
    Annotated[Text, Tag("«text»")] | Annotated[Items, Tag("«items»")],
    Discriminator(_kind_of_input),
]


class ConversationRef(Shape):
    """A conversation by its id."""

    id: Name


def _kind_of_ref(value: Any) -> str:
    return "«id»" if isinstance(value, str) else "«object»"


Conversation = Annotated[
    Annotated[Name, Tag("«id»")] | Annotated[ConversationRef, Tag("«object»")],
    Discriminator(_kind_of_ref),
]


def few(most: int) -> BeforeValidator:
    """Validator of an object that has too many entries to look at each."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} entries are taken, not {len(value)}")
        return value

    return BeforeValidator(check)


Metadata = Annotated[dict[str, str], few(1000)]
Bias = Annotated[dict[str, float], few(10_000)]


def check_metadata(value: dict[str, str] | None) -> dict[str, str] | None:
    """Metadata within OpenAI's limits."""
    if value is not None:
        if len(value) > 16:
            raise ValueError(f"at most 16 pairs, not {len(value)}")
        for key, text in value.items():
            if len(key) > 64 or len(text) > 512:
                raise ValueError("keys have at most 64 characters, values at most 512")
            try:
                (key + text).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"not Unicode text: {error.reason}") from error
    return value


def unserved(instead: str) -> Callable[[Any], None]:
    """Validator of a field that means more than can be left out in silence; null is no wish."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(instead)

    return check


def _one_stop(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], FIRST, Field(max_length=16)
    ]
    | None,
    BeforeValidator(_one_stop),
]


class Format(Shape):
    """Form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: Text | None = None


class FunctionTool(Shape):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Reasoning(Shape):
    """How much the model is to think."""

    effort: Name | None = None


class TextConfig(Shape):
    """How the answer's text is formed."""

    format: Format | None = None


class ResponseRequest(Shape):
    """Body of POST /v1/responses."""

    model: Name | None = None
    input: Input = Field([], description="may be left out where items of a conversation wait")
    instructions: Text | None = None
    previous_response_id: Name | None = None
    conversation: Conversation | None = None
    background: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = Field(None, description="extension")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="extension")
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = Field(
        None, description="extension: the same seed and prompt give the same answer"
    )
    stop: Stop = Field(None, description="extension: a string, or strings, that end the answer")
    metadata: Metadata | None = None
    service_tier: Name | None = None
    user: Name | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    tools: Annotated[list[FunctionTool], FIRST, Field(max_length=MAX_IDS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Name], FIRST, Field(max_length=64)] | None = None
    presence_penalty: Penalty | None = Field(None, description="extension")
    frequency_penalty: Penalty | None = Field(None, description="extension")
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = Field(
        None, description="extension"
    )
    logit_bias: Bias | None = Field(None, description="extension")
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt: Any = Field(None, exclude=True)

    _check_metadata = field_validator("metadata")(check_metadata)
    _check_prompt = field_validator("prompt")(
        unserved("no prompt templates are kept here: send instructions and input")
    )

    @property
    def conversation_id(self) -> str | None:
        """The id in either of the two forms of `conversation`."""
        ref = self.conversation
        return ref.id if isinstance(ref, ConversationRef) else ref


class NewConversation(Shape):
    """Body of POST /v1/conversations."""

    items: Annotated[list[Item], FIRST, Field(max_length=20)] | None = None
    metadata: Metadata | None = None

    _check_metadata = field_validator("metadata")(check_metadata)


class ConversationUpdate(Shape):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata | None = None
    pinned: bool | None = Field(None, description="extension: never evict its state")

    _check_metadata = field_validator("metadata")(check_metadata)


class NewItems(Shape):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[list[Item], FIRST, Field(min_length=1, max_length=20)]


AnyItem = MessageItem | CallItem | CallOutputItem | ReasoningItem | CompactionItem | ItemReference


def items_of(value: str | list[AnyItem]) -> list[dict[str, Any]]:
    """Input in its stored form: a list of items, each with an id of its own.

    What is named only must have been put in its place (`scheduler.api.references`).
    """
    if isinstance(value, str):
        value = [MessageItem(role="user", content=[TextPart(type="input_text", text=value)])]
    return [_stored(item) for item in value]


def _stored(item: AnyItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        written = "output_text" if item.role == "assistant" else "input_text"
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": item.role,
            "status": "completed",
            "content": _parts(item.content, written),
        }
    assert not isinstance(item, ItemReference), "a reference is resolved before"
    stored = item.model_dump(exclude_none=True)
    if isinstance(item, CallOutputItem):
        if not isinstance(item.output, str):
            stored["output"] = _parts(item.output, "input_text")
        stored["id"] = new_id("fco")
    elif isinstance(item, ReasoningItem):
        stored["id"] = new_id("rs")
        stored.setdefault("summary", [])
        return stored
    elif isinstance(item, CompactionItem):
        return {**stored, "id": new_id("cmp")}
    else:
        stored["id"] = new_id("fc")
    return {**stored, "status": "completed"}


def _parts(content: str | list[Any], written: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [TextPart(type="text", text=content)]
    out: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, TextPart):
            shape: dict[str, Any] = {"type": written, "text": part.text}
            out.append({**shape, "annotations": []} if written == "output_text" else shape)
        elif isinstance(part, RefusalPart):
            out.append({"type": "refusal", "refusal": part.refusal})
        elif isinstance(part, ImagePart):
            shown = {"image_url": part.image_url, "detail": part.detail or "auto"}
            out.append({"type": "input_image", **shown})
    return out


def media_at(items: str | list[AnyItem], *, images: bool = False) -> str | None:
    """Where the first part stands that is not taken, or None.

    Files and sounds are never taken; with `images`, images are in the user's messages.
    """
    if isinstance(items, str):
        return None
    for i, item in enumerate(items):
        content = getattr(item, "content", None) or getattr(item, "output", None)
        shown = images and isinstance(item, MessageItem) and item.role == "user"
        if isinstance(content, list):
            for j, part in enumerate(content):
                if isinstance(part, MediaPart) or (isinstance(part, ImagePart) and not shown):
                    return f"input[{i}].content[{j}]"
    return None
