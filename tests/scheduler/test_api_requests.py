"""What the API refuses and how it says so; disconnects, repeats, access, health."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_stack import Stack
from jobs_kit import Server, eventually
from llguidance import LLMatcher, LLTokenizer

from scheduler.api import intake
from scheduler.api.app import create_app
from scheduler.api.shaping import MAX_OPTIONAL
from scheduler.config import Config, ConfigError
from scheduler.jobs import RETRIEVED_WITHIN, Jobs
from scheduler.record import LIVE
from store.serving import serve


@pytest.fixture(scope="module")
def shared() -> Iterator[Stack]:
    """One stack for the tests that leave nothing behind; its workers see no other's jobs."""
    with Server() as server, Stack(server.url, context=300) as running:
        yield running


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url, jobs={"abandon_seconds": 0}) as running:
        yield running


def jobs(stack: Stack) -> Jobs:
    return Jobs(stack.workers.runs.client)


def post(stack: Stack, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/responses", json=body, timeout=120, **options)


def optional(count: int) -> dict[str, Any]:
    """A schema of so many properties, of which none has to be there."""
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


BAD = [
    ({}, "input", "missing_required_parameter"),
    ({"input": ""}, "input", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": " \n"}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": ""}]}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": []}]}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content", "invalid_type"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": [5]}, "input[0]", "invalid_type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "invalid_type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
        "input[0].content[0].text",
        "invalid_type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "unsupported_content",
    ),
    ({"input": "x", "temperature": "hot"}, "temperature", "invalid_type"),
    ({"input": "x", "temperature": 3}, "temperature", "invalid_type"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "invalid_type"),
    ({"input": "x", "max_output_tokens": True}, "max_output_tokens", "invalid_type"),
    ({"input": "x", "background": "yes"}, "background", "invalid_type"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata", "invalid_type"),
    ({"input": "x", "stop": [""]}, "stop[0]", "invalid_type"),
    ({"input": "x", "seed": 1 << 64}, "seed", "invalid_type"),
    (
        {"input": "x", "tools": [{"type": "function"}]},
        "tools[0].name",
        "missing_required_parameter",
    ),
    (
        {"input": "x", "tools": [{"type": "function", "name": "f"}]},
        "tools",
        "unsupported_parameter",
    ),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "invalid_value",
    ),
    (
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
        },
        "text.format.schema",
        "invalid_value",
    ),
    *(
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "schema": schema}}},
            "text.format.schema",
            "invalid_value",
        )
        for schema in (optional(MAX_OPTIONAL + 1), {"anyOf": [optional(400) for _ in range(13)]})
    ),
    ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt", "invalid_type"),
    ({"input": "x", "top_p": -0.1}, "top_p", "invalid_type"),
    ({"input": "x", "logit_bias": {"x": 1.0}}, "logit_bias", "invalid_value"),
    ({"input": "x", "logit_bias": {"99999": 1.0}}, "logit_bias", "invalid_value"),
    ({"input": "x", "presence_penalty": 3.0}, "presence_penalty", "invalid_type"),
    (
        {"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"},
        "previous_response_id",
        "invalid_value",
    ),
]


def test_as_many_optional_properties_as_are_taken_can_be_followed() -> None:
    schema = json.dumps(optional(MAX_OPTIONAL))
    made = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))
    made.compute_bitmask()
    told = f'{{"k{MAX_OPTIONAL - 1}":"x"}}'.encode()
    assert made.try_consume_tokens(list(told)) == len(told), made.get_error()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "code"), BAD)
def test_bad_requests(
    shared: Stack, body: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    answer = post(shared, {**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b'{"input": "\\ud800"}',
        b'{"input":' + b"[" * 9999,
        b'{"input": "x", "tool_choice": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"input": "x", "metadata": {"a": "\\ud800"}}',
    ],
)
def test_bodies_that_are_no_request(shared: Stack, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{shared.url}/v1/responses", content=raw, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": "x", "model": "other"}, "model_not_found"),
        ({"input": "x", "previous_response_id": "resp_" + "0" * 32}, "response_not_found"),
        ({"input": "x", "previous_response_id": "../../x y"}, "response_not_found"),
        ({"input": "x", "conversation": "conv_" + "0" * 32}, "conversation_not_found"),
        ({"input": "x", "conversation": {"id": "é"}}, "conversation_not_found"),
    ],
)
def test_unknown_names(shared: Stack, body: dict[str, Any], code: str) -> None:
    answer = post(shared, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/v1/responses/x%20y",
        "/v1/responses/resp_1?stream=true",
        "/v1/responses/resp_1/input_items",
        "/v1/conversations/conv_1",
        "/v1/conversations/conv_1/items",
        "/v1/models/x",
        "/v1/nothing",
    ],
)
def test_unknown_paths(shared: Stack, path: str) -> None:
    answer = httpx.get(shared.url + path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_fields_are_ignored(shared: Stack) -> None:
    body = {"input": "x", "reasoning": {"effort": "low"}, "include": [], "new_field": {"a": 1}}
    assert post(shared, body).json()["status"] == "completed"


def test_prompts_that_do_not_fit_name_both_numbers(shared: Stack) -> None:
    refused = post(shared, {"input": "word " * 400, "stream": True})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "300" in error["message"]
    huge = post(shared, {"input": "x" * (8 << 20)})
    assert "perhaps many times more, and" in huge.json()["error"]["message"]
    ruled = post(shared, {"input": "x", "instructions": "語" * 100_000})
    assert "at least" in ruled.json()["error"]["message"]
    # Growing by turns: the turn that no longer fits is refused and leaves the rest as it was.
    previous, sizes = None, []
    while True:
        answer = post(shared, {"input": "Tell me more.", "previous_response_id": previous})
        if answer.status_code == 400:
            break
        sizes.append(answer.json()["usage"]["input_tokens"])
        assert answer.json()["usage"]["total_tokens"] <= 300
        if answer.json()["status"] == "incomplete":
            break
        previous = answer.json()["id"]
    assert sizes == sorted(sizes)
    short = post(shared, {"input": "Hi", "previous_response_id": previous, "max_output_tokens": 1})
    assert short.status_code in (200, 400)


def test_the_answer_is_clamped_to_the_context(shared: Stack) -> None:
    made = post(shared, {"input": "Hi", "max_output_tokens": 5000}).json()
    assert made["max_output_tokens"] == 300 - made["usage"]["input_tokens"]


def test_idempotency_key(stack: Stack) -> None:
    headers = {"Idempotency-Key": "k1"}
    one = post(stack, {"input": "Hi"}, headers=headers).json()
    two = post(stack, {"input": "Hi"}, headers=headers).json()
    assert one["id"] == two["id"]
    assert len(jobs(stack).list()) == 1
    other = post(stack, {"input": "Ho"}, headers=headers)
    assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")
    assert post(stack, {"input": "Hi"}).json()["id"] != one["id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["queued", "decoding"])
def test_a_client_that_leaves_stops_foreground_work(stack: Stack, stream: bool, where: str) -> None:
    gate = stack.workers.may_prefill if where == "queued" else stack.workers.may_finish
    gate.clear()
    raw = json.dumps({"input": "Hi", "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        if where == "queued":
            eventually(lambda: jobs(stack).list(LIVE), "no job")
        else:
            assert stack.workers.halfway.wait(60)
    eventually(lambda: jobs(stack).list(["cancelled"]), "the job goes on")
    assert httpx.get(f"{stack.url}/health").status_code == 200


def test_a_key_whose_job_goes_just_as_it_is_found_names_a_new_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record's time was over between the two looks."""
    monkeypatch.setattr(Jobs, "known", lambda *_: True)
    headers = {"Idempotency-Key": "just gone"}
    answer = httpx.post(
        f"{stack.url}/v1/responses", json={"input": "Hi"}, headers=headers, timeout=120
    ).json()
    assert answer["status"] == "completed"
    assert answer["usage"]["input_tokens"] > 1


def test_the_same_request_goes_on_where_its_client_left(redis_url: str) -> None:
    body = {"input": "Hi", "user": "ada"}
    raw = json.dumps(body).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    with Stack(redis_url, jobs={"abandon_seconds": 600}) as stack:
        stack.workers.may_prefill.clear()

        def missed() -> bool:
            return bool(jobs(stack).client.zcard("tandem:abandoned"))

        for _ in range(2):
            with socket.create_connection(("127.0.0.1", stack.port)) as connection:
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
                eventually(lambda: jobs(stack).list(LIVE) and not missed(), "not attached")
            eventually(missed, "the API did not notice")
        (job,) = jobs(stack).list(LIVE)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(httpx.post, f"{stack.url}/v1/responses", json=body, timeout=120)
            eventually(lambda: not missed(), "not attached")
            stack.workers.open()
            answer = asked.result(120).json()
        assert (answer["id"], answer["status"]) == (job.id, "completed")
        assert len(jobs(stack).list()) == 1


@pytest.mark.parametrize("stays", [True, False])
def test_a_reader_of_a_foreground_response_waits_for_it_too(stack: Stack, stays: bool) -> None:
    stack.workers.may_finish.clear()
    waiting = jobs(stack).client.zcard
    raw = json.dumps({"input": "Hi"}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        assert stack.workers.halfway.wait(60)
        (job,) = jobs(stack).list(LIVE)
        address = f"{stack.url}/v1/responses/{job.id}"
        reader = httpx.stream("GET", address, params={"stream": "true"}, timeout=120)
        with reader as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created"
            assert waiting(f"tandem:waiting:{job.id}") == 2
            connection.close()
            eventually(lambda: waiting(f"tandem:waiting:{job.id}") == 1, "it is not missed")
            if stays:
                stack.workers.open()
                assert "event: response.completed" in list(lines)
    end = "completed" if stays else "cancelled"
    eventually(lambda: jobs(stack).list([end]), "the job goes on")
    assert not jobs(stack).client.exists("tandem:attended")


def test_clients_of_an_api_that_stops_may_come_again(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, stack, {"input": "Hi"})
        eventually(lambda: jobs(stack).client.exists("tandem:attended"), "no client")
        stack.stop_api()
        with pytest.raises(httpx.HTTPError):
            asked.result(120).raise_for_status()
    (job,) = jobs(stack).list(LIVE)
    redis = jobs(stack).client
    assert redis.zscore("tandem:attended", job.id) - redis.time()[0] > RETRIEVED_WITHIN - 120
    stack.workers.open()
    eventually(lambda: jobs(stack).list(["completed"]), "the job did not end")


def test_a_client_that_leaves_does_not_stop_background_work(stack: Stack) -> None:
    stack.workers.may_finish.clear()
    body = {"input": "Hi", "stream": True, "background": True}
    with httpx.stream("POST", f"{stack.url}/v1/responses", json=body) as answer:
        assert next(answer.iter_lines()) == "event: response.created"
    assert stack.workers.halfway.wait(60)
    stack.workers.open()
    eventually(lambda: jobs(stack).list(["completed"]), "the job did not end")


def test_cancelling_a_foreground_response_is_refused_in_words(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    thread = threading.Thread(target=post, args=(stack, {"input": "Hi"}))
    thread.start()
    (job,) = eventually(lambda: jobs(stack).list(LIVE), "no job")
    answer = httpx.post(f"{stack.url}/v1/responses/{job.id}/cancel")
    assert answer.status_code == 400
    assert "only background responses" in answer.json()["error"]["message"]
    forced = httpx.post(f"{stack.url}/v1/responses/{job.id}/cancel?force=true")
    assert forced.json()["status"] == "cancelled"
    thread.join(60)
    assert not thread.is_alive()


def test_facts_of_a_response(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    first = post(stack, {"input": "Hi", "background": True}).json()
    second = post(stack, {"input": "Hi", "background": True, "service_tier": "flex"}).json()
    assert (first["tandem"]["queue_position"], second["tandem"]["queue_position"]) == (0, 1)
    assert second["service_tier"] == "flex"
    stack.workers.open()
    jobs(stack).wait(first["id"], 60)
    job = jobs(stack).wait(second["id"], 60)
    done = httpx.get(f"{stack.url}/v1/responses/{second['id']}").json()
    facts = done["tandem"]
    tokens = job.prompt_tokens
    assert facts["path"] == "cold"
    assert facts["handoff"] == {"bytes": 1000, "seconds": 0.01, "path": "tcp"}
    assert facts["prompt_tokens"] == facts["new_tokens"] == facts["computed_tokens"] == tokens
    assert list(facts["times"])[:2] == ["queued", "prefilling"]
    follow = post(stack, {"input": "On", "previous_response_id": second["id"]}).json()
    facts, usage = follow["tandem"], follow["usage"]
    assert facts["path"] == "hot"
    assert facts["queue"] == "decode"
    assert facts["cached_tokens"] == usage["input_tokens_details"]["cached_tokens"] > tokens
    assert facts["new_tokens"] == facts["computed_tokens"]
    assert facts["new_tokens"] + facts["cached_tokens"] == facts["prompt_tokens"]
    listed = httpx.get(f"{stack.url}/v1/responses", params={"status": "completed"}).json()
    assert [r["id"] for r in listed["data"]] == [follow["id"], second["id"], first["id"]]


def test_lists_have_pages(shared: Stack) -> None:
    texts = [f"number {n}" for n in range(5)]
    items = [{"role": "user", "content": text} for text in texts]
    made = httpx.post(f"{shared.url}/v1/conversations", json={"items": items}).json()
    path = f"{shared.url}/v1/conversations/{made['id']}/items"
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        got = httpx.get(path, params={"order": "asc", "limit": 2, **after}).json()
        seen += [item["content"][0]["text"] for item in got["data"]]
        if not got["has_more"]:
            break
        after = {"after": got["last_id"]}
    assert seen == texts
    newest = httpx.get(path, params={"limit": 1}).json()["data"][0]
    assert newest["content"][0]["text"] == texts[-1]
    assert httpx.get(path, params={"after": "msg_x"}).status_code == 400
    assert httpx.get(path, params={"limit": 0}).status_code == 400
    listed = httpx.get(f"{shared.url}/v1/conversations").json()
    assert made["id"] in [c["id"] for c in listed["data"]]


def test_redis_or_store_away(durable_redis: Server) -> None:
    with Stack(durable_redis.url) as stack:
        made = post(stack, {"input": "Hi"}).json()
        ready_at = f"{stack.url}/ready"  # says no where Redis is slow by two seconds
        eventually(lambda: httpx.get(ready_at).status_code == 200, "it is not ready")
        stack.rpc.close()
        answer = post(stack, {"input": "x", "previous_response_id": made["id"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "store" in answer.json()["error"]["message"]
        ready = httpx.get(ready_at)
        assert (ready.status_code, ready.json()["store"]) == (503, False)
        stack.rpc = serve(stack.store, stack.config.store_socket)
        again = post(stack, {"input": "x", "previous_response_id": made["id"]})
        assert again.status_code == 200

        stack.workers.stop()
        durable_redis.kill()
        answer = post(stack, {"input": "Hi"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "Redis cannot be reached" in answer.json()["error"]["message"]
        ready = httpx.get(f"{stack.url}/ready", timeout=120)
        assert (ready.status_code, ready.json()["redis"]) == (503, False)
        assert httpx.get(f"{stack.url}/health").json() == {"ok": True}
        durable_redis.start()
        back = httpx.get(f"{stack.url}/v1/responses/{made['id']}").json()
        assert back["output"] == made["output"]


def test_access_by_token(redis_url: str) -> None:
    with Stack(redis_url, api={"token": "s3cret"}) as stack:
        path = f"{stack.url}/v1/models"
        assert httpx.get(f"{stack.url}/health").status_code == 200
        refused = httpx.get(path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        wrong = {"Authorization": "Bearer s3cre"}
        assert httpx.get(path, headers=wrong).status_code == 401
        assert httpx.get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(path, headers={"x-api-key": "s3cret"}).status_code == 200
        assert httpx.get(path, headers={"Cookie": "tandem_token=s3cret"}).status_code == 200
        site = {"Cookie": "tandem_token=s3cret", "Sec-Fetch-Site": "cross-site"}
        assert httpx.get(path, headers=site).status_code == 401
        basic = base64.b64encode(b"any:s3cret").decode()
        rq = httpx.get(f"{stack.url}/rq/")
        assert (rq.status_code, rq.headers["www-authenticate"][:5]) == (401, "Basic")
        login = {"Authorization": f"Basic {basic}"}
        assert httpx.get(f"{stack.url}/rq/", headers=login).status_code == 200
        assert [m.id for m in stack.client().models.list()] == ["test-model"]


def test_other_names_for_the_model(redis_url: str) -> None:
    with Stack(redis_url, api={"aliases": "gpt-*, claude-small"}) as stack:
        for name in ("gpt-4o", "claude-small", "default", "test-model"):
            made = post(stack, {"input": "x", "model": name}).json()
            assert (made["status"], made["model"]) == ("completed", "test-model")
        refused = post(stack, {"input": "x", "model": "claude-large"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
        assert "api.aliases" in refused.json()["error"]["message"]


def test_foreign_pages_are_kept_out(shared: Stack) -> None:
    path = f"{shared.url}/v1/models"
    assert httpx.get(path, headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(path, headers={"Host": f"localhost:{shared.port}"}).status_code == 200
    answer = post(shared, {"input": "x"}, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403


def test_bodies_are_bounded(redis_url: str) -> None:
    with Stack(redis_url, api={"max_body_mb": 1}) as stack:
        raw = json.dumps({"input": "x" * (2 << 20)}).encode()
        answer = httpx.post(f"{stack.url}/v1/responses", content=raw)
        assert answer.status_code == 413
        chunked = httpx.post(f"{stack.url}/v1/responses", content=iter([raw[:9], raw[9:]]))
        assert chunked.status_code == 413


def test_never_open_to_others_without_a_token(tmp_path: Path) -> None:
    open_to_all = Config.model_validate(
        {"data_dir": tmp_path, "model_dir": tmp_path, "api": {"host": "0.0.0.0"}}
    )
    with pytest.raises(ConfigError, match=r"api\.token"):
        create_app(open_to_all)


def test_importing_the_api_never_loads_mlx() -> None:
    code = (
        "import sys, scheduler.api.app, scheduler.command.jobs, scheduler.cli\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_vlm', 'engine')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_long_predicted_wait_is_refused_with_the_time_to_come_back(redis_url: str) -> None:
    with Stack(redis_url, jobs={"max_wait_seconds": 0.01}) as stack:
        stack.workers.may_prefill.clear()
        for _ in range(3):
            post(stack, {"input": "Hi there " * 50, "background": True})
        answer = post(stack, {"input": "Hi " * 1000, "service_tier": "priority"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert "predicted wait" in answer.json()["error"]["message"]
        rows = httpx.get(f"{stack.url}/v1/responses").json()["data"]
        starts = sorted(
            row["tandem"]["predicted_start_s"] for row in rows if row["status"] == "queued"
        )
        assert starts == sorted(set(starts)) or starts[0] == 0.0
        stack.workers.open()


def test_a_turn_that_ends_before_it_is_looked_at_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be faster than the request that brought the work."""
    conversation = httpx.post(f"{stack.url}/v1/conversations", json={}).json()["id"]
    look = intake._still_head

    def later(backend: Any, lineage: Any, response: str) -> bool:
        backend.jobs.wait(response, 60)
        return look(backend, lineage, response)

    monkeypatch.setattr(intake, "_still_head", later)
    for number in range(2):
        body = {"input": f"Turn {number}", "conversation": conversation}
        assert httpx.post(f"{stack.url}/v1/responses", json=body, timeout=120).status_code == 200
    assert len(stack.store.conversation_turns(conversation)) == 2
