"""Generated ids in the place of a client's rendering, whatever else the client has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from anthropic import Anthropic
from api_kit import FAMILIES, STOP, make_model_dir
from api_stack import Script, Stack
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from redis_kit import Server

from scheduler.api.prompt import build, messages_of
from scheduler.api.tokenizer import Tokenizer
from scheduler.api.weave import Answer
from scheduler.record import Job

Items = list[dict[str, Any]]
CALL = '<tool_call>\n{"name":"weather",  "arguments": {"city":"Bern"}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    base = tmp_path_factory.mktemp("models")
    return {name: Tokenizer.load(make_model_dir(base / name, name)) for name in FAMILIES}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def split_badly(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that say the text, one for each byte-level piece: not as the tokenizer would."""
    return [i for character in text for i in tokenizer.encode_text(character)]


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[n : n + len(part)]) == list(part) for n in range(len(ids) - len(part) + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_known_answers_are_their_ids(tokenizers: dict[str, Tokenizer], family: str) -> None:
    tok = tokenizers[family]
    items: Items = [user("Hi")]
    answers: list[Answer] = []
    for n in range(4):
        text = f"The capital of France is Paris {n}."
        ids = [*split_badly(tok, text), tok.special[STOP[family]]]
        answers.append(Answer(len(items), len(items) + 1, ids, [said(text)]))
        # The client trims what it sends back, and it knows one answer that nobody here wrote.
        items += [said(f" {text} " if n % 2 else text), user(f"And {n}?"), said("Mine."), user("?")]
    made = build(tok, items, instructions="Be brief.", answers=answers).ids
    for answer in answers:
        assert contains(made, answer.ids[:-1])
    rendered = tok.render(messages_of(items, "Be brief.")).text
    assert "".join(tok.decode(made).split()) == "".join(rendered.split())


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab <|im_end>\nstaruser", min_size=1), min_size=2, max_size=4),
    family=st.sampled_from(sorted(FAMILIES)),
    wrong=st.booleans(),
)
def test_any_answers(
    tokenizers: dict[str, Tokenizer], texts: list[str], family: str, wrong: bool
) -> None:
    tok = tokenizers[family]
    items: Items = [user("Hi")]
    answers: list[Answer] = []
    for text in texts:
        told = said(text)
        claimed = said("Another.") if wrong and not answers else told
        ids = split_badly(tok, claimed["content"])
        answers.append(Answer(len(items), len(items) + 1, ids, [claimed]))
        items += [told, user("Go on")]
    made = build(tok, items, answers=answers).ids
    plain = tok.encode(tok.render(messages_of(items)))
    # Whatever is spliced, the text is the template's, but for white space around answers.
    assert "".join(tok.decode(made).split()) == "".join(tok.decode(plain).split())


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Server() as server, Stack(server.url, family="tools") as running:
        running.workers.script = calling
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with stack.client() as made:
        yield made


def calling(job: Job) -> Script:
    """Thinks and calls, whatever it is told."""
    return [
        ("<think>\n", []),
        ("Let me look.", [("thinking", "Let me look.", "")]),
        ("\n</think>\n\n", [("thinking", "\n", "")]),
        (CALL, [("call", '{"city":"Bern"}', "weather")]),
    ]


def ask(client: OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(model="test-model", messages=messages, tools=[TOOL])


def answer_of(stack: Stack, made: Any) -> tuple[list[int], list[int]]:
    """(prompt, generated) token ids of a completion."""
    response = "resp_" + made.id.removeprefix("chatcmpl-")
    turn = stack.store.get_turn(response)
    assert turn is not None
    return stack.workers.prompts[response], turn.output_ids


def rendered(made: Any, *, thoughts: bool = True) -> dict[str, Any]:
    """An answer as a client lays it out anew."""
    message = made.choices[0].message
    again: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        again["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": '{ "city": "Bern" }'},
            }
            for call in message.tool_calls
        ]
    if thoughts and message.model_extra.get("reasoning_content"):
        again["reasoning_content"] = message.model_extra["reasoning_content"].strip()
    return again


def forget(stack: Stack) -> None:
    """The index of texts is lost, as it is some days after the turns."""
    for pattern in ("tandem:thread:*", "tandem:asked:*"):
        for key in stack.workers.runs.client.scan_iter(pattern):
            stack.workers.runs.client.delete(key)


def tool_loop(client: OpenAI, rounds: int, thoughts: bool = True) -> tuple[list[Any], list[Any]]:
    """(messages, completions) of a session in which the model calls a tool again and again."""
    messages: list[Any] = [
        {"role": "system", "content": "You are an agent. Request 1."},
        {"role": "user", "content": "How is it in Bern?"},
    ]
    made = []
    for number in range(rounds):
        made.append(ask(client, messages))
        call = made[-1].choices[0].message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": f"sunny {number}"}
        messages += [rendered(made[-1], thoughts=thoughts), result]
    return messages, made


@pytest.mark.parametrize("thoughts", [True, False])
def test_a_session_with_thinking_computes_only_what_is_new(
    stack: Stack, client: OpenAI, thoughts: bool
) -> None:
    _, made = tool_loop(client, 3, thoughts)
    before: list[int] = []
    for one in made:
        prompt, generated = answer_of(stack, one)
        assert prompt[: len(before)] == before
        assert one.usage.prompt_tokens_details.cached_tokens == max(0, len(before) - 1)
        before = [*prompt, *generated]


def test_answers_are_found_by_the_ids_of_their_calls(stack: Stack, client: OpenAI) -> None:
    messages, made = tool_loop(client, 2)
    forget(stack)
    told = ask(client, messages)
    last = [ids for part in answer_of(stack, made[-1]) for ids in part]
    assert answer_of(stack, told)[0][: len(last)] == last
    assert told.usage.prompt_tokens_details.cached_tokens == len(last) - 1


def test_a_changed_head_leaves_the_answers_as_they_were(stack: Stack, client: OpenAI) -> None:
    messages, made = tool_loop(client, 3)
    for lost in (False, True):
        if lost:
            forget(stack)
        messages[0] = {"role": "system", "content": f"You are an agent. Request {lost + 2}."}
        told = ask(client, messages)
        prompt = answer_of(stack, told)[0]
        for one in made:
            assert contains(prompt, answer_of(stack, one)[1][:-1])
        # As long as the head is, nothing of it was changed.
        text = stack.tokenizer.decode(prompt)
        assert text.count("Let me look.") == 3
        assert text.count(CALL) == 3
    assert stack.store.get_turn("resp_" + told.id.removeprefix("chatcmpl-")).parent is None


def test_what_came_earlier_may_be_cut_short(stack: Stack, client: OpenAI) -> None:
    messages, made = tool_loop(client, 3)
    result = next(m for m in messages if m["role"] == "tool")
    messages[messages.index(result)] = {**result, "content": "[removed]"}
    prompt = answer_of(stack, ask(client, messages))[0]
    first = [ids for part in answer_of(stack, made[0]) for ids in part]
    assert prompt[: len(first)] == first
    for one in made:
        assert contains(prompt, answer_of(stack, one)[1][:-1])
    assert "[removed]" in stack.tokenizer.decode(prompt)
    assert "sunny 0" not in stack.tokenizer.decode(prompt)


def test_thoughts_that_the_template_drops(stack: Stack, client: OpenAI) -> None:
    messages, made = tool_loop(client, 2)
    messages[0] = {"role": "system", "content": "Another."}
    messages += [{"role": "assistant", "content": "Mine."}, {"role": "user", "content": "Thanks"}]
    prompt = answer_of(stack, ask(client, messages))[0]
    text = stack.tokenizer.decode(prompt)
    assert "Let me look." not in text
    assert text.count(CALL) == 2
    (end,) = stack.tokenizer.encode("</think>")
    for one in made:
        generated = answer_of(stack, one)[1]
        shown = generated[generated.index(end) + 1 : -1]
        while not stack.tokenizer.decode(shown[:1]).strip():
            del shown[0]
        assert contains(prompt, shown)


def test_nobody_elses_answers(stack: Stack, client: OpenAI) -> None:
    messages, made = tool_loop(client, 1)
    call = made[0].choices[0].message.tool_calls[0]
    # A call that names a response which said something else is the client's own word.
    messages[2]["tool_calls"][0]["function"]["name"] = "other"
    messages[3]["tool_call_id"] = call.id
    prompt = answer_of(stack, ask(client, messages))[0]
    assert not contains(prompt, answer_of(stack, made[0])[1][:-1])
    assert '"name": "other"' in stack.tokenizer.decode(prompt)


def test_messages_of_the_other_client(stack: Stack) -> None:
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    with Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "How is it in Bern?"}]
        generated = []
        for number in range(2):
            made = client.messages.create(
                model="test-model", max_tokens=200, messages=messages, tools=tools,
                system=f"Billing {number}.",
            )  # fmt: skip
            turn = stack.store.get_turn("resp_" + made.id.removeprefix("msg_"))
            assert turn is not None
            prompt = stack.workers.prompts[turn.id]
            for ids in generated:
                assert contains(prompt, ids[:-1])
            generated.append(turn.output_ids)
            use = next(block for block in made.content if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
            messages += [made.to_param(), {"role": "user", "content": [result]}]
