"""Files and batches as the official client drives them: exact results, whatever restarts."""

from __future__ import annotations

import io
import itertools
import json
import socket
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_stack import Stack, Workers
from openai.types import Batch
from redis.exceptions import ConnectionError as RedisConnectionError
from redis_kit import Server, eventually

from scheduler.api import batch_driver, batch_run, gate
from scheduler.api.batch_driver import BatchDriver
from scheduler.api.batch_journal import Journal
from scheduler.record import Job
from scheduler.redis_client import connect


@pytest.fixture
def stack(redis_url: str) -> Iterator[Stack]:
    with Stack(redis_url) as running:
        yield running


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "test-model", "input": f"Say {number}.", "max_output_tokens": 40}
    entry = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/responses", "body": body}
    return {**entry, **changes}


def jsonl(*entries: Any) -> bytes:
    lines = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in entries]
    return b"\n".join(lines) + b"\n"


def start(stack: Stack, data: bytes, endpoint: str = "/v1/responses") -> Batch:
    client = stack.client()
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]  # tests send wrong ones, too
        completion_window="24h",
        metadata={"for": "test"},
    )


def end(stack: Stack, ident: str, seconds: float = 180.0) -> Batch:
    client = stack.client()
    ended = ("completed", "failed", "expired", "cancelled")

    def look() -> Batch | None:
        batch = client.batches.retrieve(ident)
        return batch if batch.status in ended else None

    found: Batch = eventually(look, "the batch does not end", seconds)
    return found


def contents(stack: Stack, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(row) for row in stack.client().files.content(file).text.splitlines()]


def test_files_are_kept_listed_read_and_deleted(stack: Stack) -> None:
    client = stack.client()
    data = jsonl(line(1), line(2))
    made = client.files.create(file=("../../etc/in.jsonl", data), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "in.jsonl", "batch")
    assert made.expires_at is not None
    short = client.files.create(
        file=("b.jsonl", b"x"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert short.expires_at == short.created_at + 3600
    assert [file.id for file in client.files.list()] == [short.id, made.id]
    assert [file.id for file in client.files.list(order="asc", limit=1)] == [made.id, short.id]
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == data
    path = stack.config.data_dir / "files" / made.id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert client.files.delete(made.id).deleted
    assert not path.exists()
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    with pytest.raises(openai.BadRequestError, match="batch"):
        client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("..%2f..%2ftandem.lock")


def test_an_upload_is_bounded_before_it_is_kept(redis_url: str) -> None:
    with Stack(redis_url, api={"max_file_mb": 1, "files_gb": 0.002}) as stack:
        client = stack.client()
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=b"x" * (1 << 20), purpose="batch")
        assert caught.value.status_code == 413
        for _ in range(2):
            client.files.create(file=b"x" * 900_000, purpose="batch")
        with pytest.raises(openai.RateLimitError, match="files_gb") as refused:
            client.files.create(file=b"x" * 900_000, purpose="batch")
        assert refused.value.response.headers["retry-after"]
        assert len(list((stack.config.data_dir / "files").iterdir())) == 2


def test_200_lines_with_bad_ones_end_in_exact_files(stack: Stack) -> None:
    stack.workers.say = lambda job: f"You sent {job.prompt_tokens} tokens."
    entries: list[Any] = [line(n) for n in range(1, 201)]
    bad = {
        3: (b"{not json", None, "invalid_json_line"),
        17: ({"method": "POST", "url": "/v1/responses", "body": {}}, None, "missing_custom_id"),
        40: (line(1), "q1", "duplicate_custom_id"),
        41: (line(41, method="GET"), "q41", "invalid_method"),
        80: (line(80, url="/v1/embeddings"), "q80", "invalid_url"),
        81: (line(81, body="text"), "q81", "invalid_request"),
        120: (b"[" * 200_000, None, "invalid_json_line"),
        121: (b"\xff\xfe\x00", None, "invalid_json_line"),
    }
    wrong = {
        150: (line(150, body={"input": "Hi", "model": "other"}), 404, "model_not_found"),
        151: (line(151, body={"input": "Hi", "stream": True}), 400, "invalid_value"),
        152: (line(152, body={"input": "Hi", "temperature": 9}), 400, "invalid_type"),
        200: (line(200, body={}), 400, "missing_required_parameter"),
    }
    for number, (entry, *_) in {**bad, **wrong}.items():
        entries[number - 1] = entry
    batch = end(stack, start(stack, jsonl(*entries[:100], b"", *entries[100:])).id)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "test"}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 200, "completed": 188, "failed": 12}
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    output = contents(stack, batch.output_file_id)
    good = [n for n in range(1, 201) if n not in bad and n not in wrong]
    assert [row["custom_id"] for row in output] == [f"q{n}" for n in good]
    for row in output:
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        body = row["response"]["body"]
        assert body["object"] == "response"
        assert body["status"] == "completed"
        text = body["output"][0]["content"][0]["text"]
        assert text == f"You sent {body['usage']['input_tokens']} tokens."
        assert row["response"]["request_id"] == body["id"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(
        row["response"]["body"]["usage"]["output_tokens"] for row in output
    )
    errors = contents(stack, batch.error_file_id)
    numbers = sorted({**bad, **wrong})
    assert len(errors) == len(numbers)
    for number, row in zip(numbers, errors, strict=True):
        # A blank line counts as a line of the file, and is no request.
        shown = number + (number > 100)
        if number in bad:
            _, custom, code = bad[number]
            assert (row["custom_id"], row["error"]["code"]) == (custom, code)
            assert f"line {shown}" in row["error"]["message"]
            assert row["response"] is None
        else:
            _, status, code = wrong[number]
            assert row["custom_id"] == f"q{number}"
            assert row["response"]["status_code"] == status
            assert row["response"]["body"]["error"]["code"] == code
    ids = [row["id"] for row in output + errors]
    assert len(set(ids)) == 200
    # It goes once the batch is told to have ended.
    folder = stack.config.data_dir / "batches"
    eventually(lambda: not list(folder.glob("batch_*")), "the journal stays")


def test_chat_lines_give_chat_completions(stack: Stack) -> None:
    def chat(number: int, **body: Any) -> dict[str, Any]:
        told = {"model": "test-model", "messages": [{"role": "user", "content": "Hi"}], **body}
        return line(number, url="/v1/chat/completions", body=told)

    lines = jsonl(chat(1), chat(2, max_tokens=3, store=False), chat(3, messages=[]))
    batch = end(stack, start(stack, lines, "/v1/chat/completions").id)
    rows = contents(stack, batch.output_file_id)
    bodies = [row["response"]["body"] for row in rows]
    assert [body["object"] for body in bodies] == ["chat.completion"] * 2
    assert [body["choices"][0]["finish_reason"] for body in bodies] == ["stop", "length"]
    (error,) = contents(stack, batch.error_file_id)
    assert error["response"]["body"]["error"]["type"] == "invalid_request_error"


def test_a_failed_job_and_one_that_was_cancelled_stand_in_the_error_file(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    batch = start(stack, jsonl(line(1), line(2)))
    client = stack.client()

    def submitted() -> Any:
        found = client.get("/responses?status=queued", cast_to=dict[str, Any])["data"]
        return found if len(found) == 2 else None

    waiting = eventually(submitted, "the lines are not submitted")
    client.responses.cancel(waiting[0]["id"])
    stack.workers.fail_with = "the model broke"
    stack.workers.open()
    done = end(stack, batch.id)
    assert (done.status, done.output_file_id) == ("completed", None)
    rows = contents(stack, done.error_file_id)
    codes = sorted(
        row["error"]["code"] if row["error"] else row["response"]["body"]["error"]["message"]
        for row in rows
    )
    assert codes == ["request_cancelled", "the model broke"]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_an_early_end_leaves_what_was_done_and_says_what_was_not(stack: Stack, how: str) -> None:
    done = 0
    asked_to_end = threading.Event()

    def say(job: Job) -> str:
        nonlocal done
        done += 1
        if done == 5:
            stack.workers.may_finish.clear()
            assert asked_to_end.wait(120)  # the batch cannot end before it is looked at
        return "Done."

    stack.workers.say = say
    batch = start(stack, jsonl(*(line(n) for n in range(1, 61))))
    eventually(lambda: done >= 5, "nothing runs")
    client = connect(stack.config.redis_url)
    if how == "cancelled":
        asked = stack.client().batches.cancel(batch.id)
        assert asked.status == "cancelling"
        assert asked.cancelling_at is not None
    else:
        client.hset(f"tandem:batch:{batch.id}", "expires", "1.0")
    asked_to_end.set()
    batch = end(stack, batch.id)
    client.close()
    assert batch.status == how
    assert batch.request_counts is not None
    counts = batch.request_counts
    output, errors = contents(stack, batch.output_file_id), contents(stack, batch.error_file_id)
    assert (len(output), len(errors)) == (counts.completed, counts.failed)
    assert len(output) == 4
    assert counts.total == 60 == len(output) + len(errors)
    assert {row["error"]["code"] for row in errors} == {f"batch_{how}"}
    assert sorted(int(row["custom_id"][1:]) for row in output + errors) == list(range(1, 61))
    assert not stack.client().get("/responses?status=live", cast_to=dict[str, Any])["data"]
    with pytest.raises(openai.BadRequestError, match=how):
        stack.client().batches.cancel(batch.id)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_body_that_stops_is_given_up(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.2)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    )
    with socket.create_connection(("127.0.0.1", stack.port), timeout=120) as connection:
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"too_slow" in answer


def test_what_an_upload_that_was_cut_short_counted_is_given_back(stack: Stack) -> None:
    files = stack.backend.files
    made = files.put(io.BytesIO(b"abc"), owner="@a", name="f", purpose="batch")
    stack.backend.redis.hincrby("tandem:files:bytes", "@a", 1000)
    stack.backend.redis.hincrby("tandem:files:bytes", "@b", 1000)
    assert files.sweep() == 0
    assert (files.used("@a"), files.used("@b"), files.used_by_all()) == (3, 0, 3)
    files.delete(made)
    assert files.used_by_all() == 0


def test_requests_that_make_no_batch(stack: Stack) -> None:
    client = stack.client()
    file = client.files.create(file=jsonl(line(1)), purpose="batch")
    make: Any = client.batches.create
    good = {"input_file_id": file.id, "endpoint": "/v1/responses", "completion_window": "24h"}
    for change in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}):
        with pytest.raises(openai.BadRequestError):
            make(**{**good, **change})
    with pytest.raises(openai.NotFoundError):
        make(**{**good, "input_file_id": "file-" + "0" * 32})
    empty = end(stack, start(stack, b"\n \n").id)
    assert empty.status == "failed"
    assert empty.errors is not None
    assert empty.errors.data is not None
    assert empty.errors.data[0].code == "empty_file"
    pages = [batch.id for batch in client.batches.list(limit=1)]
    assert pages == [empty.id]


def test_a_batch_goes_on_over_restarts_of_everything(durable_redis: Server) -> None:
    runs: Counter[str] = Counter()

    def say(job: Job) -> str:
        runs[job.id] += 1
        return f"{job.prompt_tokens}"

    with Stack(durable_redis.url, api={"batch_lines": 6}) as stack:
        stack.workers.say = say
        batch = start(stack, jsonl(*(line(n) for n in range(1, 41)), b"oops"))
        for already in (5, 15, 30):
            eventually(lambda enough=already: len(runs) >= enough, "it does not go on")
            stack.workers.stop()
            stack.stop_api()
            durable_redis.kill()
            durable_redis.start()
            stack.start_api()
            stack.workers = Workers(stack.config, stack.store, stack.tokenizer)
            stack.workers.say = say
            stack.workers.start()
        done = end(stack, batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 41, "completed": 40, "failed": 1}
        rows = contents(stack, done.output_file_id)
        assert [row["custom_id"] for row in rows] == [f"q{n}" for n in range(1, 41)]
        assert Counter({row["response"]["body"]["id"]: 1 for row in rows}) == runs


def test_a_line_whose_answer_is_lost_is_not_run_again(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    batch = start(stack, jsonl(line(1)))
    client = connect(stack.config.redis_url)
    sent = f"tandem:batch:{batch.id}:sent"
    eventually(lambda: client.getbit(sent, 1), "the line is not submitted")
    stack.stop_api()
    (key,) = client.keys("tandem:job:*")
    client.delete(key)
    client.close()
    stack.start_api()
    done = end(stack, batch.id)
    (row,) = contents(stack, done.error_file_id)
    assert row["error"]["code"] == "result_lost"


def test_errors_on_the_way_lose_no_line(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: Counter[str] = Counter()
    inner = batch_run.accept

    def accept(backend: Any, body: Any, key: str, about: Any) -> Any:
        number = int(key.rpartition(":")[2])
        tries[str(number)] += 1
        if number == 3:
            raise RuntimeError("a fault of ours")
        if number in (5, 8) and tries[str(number)] == 1:
            raise (RedisConnectionError if number == 5 else OSError)("not now")
        if number == 9 and tries["9"] == 1:
            inner(backend, body, key, about)
            raise RedisConnectionError("the answer is lost")
        return inner(backend, body, key, about)

    monkeypatch.setattr(batch_run, "accept", accept)
    monkeypatch.setattr(batch_driver, "AWAY_SECONDS", 0.01)
    done = end(stack, start(stack, jsonl(*(line(n) for n in range(1, 21)))).id)
    output, errors = contents(stack, done.output_file_id), contents(stack, done.error_file_id)
    assert [row["custom_id"] for row in output] == [f"q{n}" for n in range(1, 21) if n != 3]
    (error,) = errors
    assert error["response"]["status_code"] == 500
    assert "fault of ours" not in json.dumps(error)
    assert (tries["5"], tries["8"], tries["9"]) == (2, 2, 1)


def test_a_file_stays_while_a_batch_reads_it(stack: Stack) -> None:
    stack.workers.may_prefill.clear()
    batch = start(stack, jsonl(line(1)))
    client = stack.client()
    with pytest.raises(openai.ConflictError, match="reads this file"):
        client.files.delete(batch.input_file_id)
    redis = connect(stack.config.redis_url)
    redis.hset(f"tandem:file:{batch.input_file_id}", "expires", "1.0")
    redis.close()
    stack.stop_api()
    stack.start_api()
    stack.workers.open()
    assert end(stack, batch.id).status == "completed"


def test_a_journal_drops_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.add(2, True, {"a": 2})
        journal.add(1, False, {"a": 1})
        whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":3,"ok":true,"li')
    with Journal(path) as journal:
        assert (len(journal), journal.completed, journal.failed) == (2, 1, 1)
        assert 3 not in journal
        journal.add(3, True, {"a": 3})
        assert list(journal.answers(True)) == [{"a": 2}, {"a": 3}]
        assert list(journal.answers(False)) == [{"a": 1}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_drivers_never_share_a_journal(stack: Stack) -> None:
    backend = stack.backend
    second = BatchDriver(backend)
    second.start()
    batch = end(stack, start(stack, jsonl(*(line(n) for n in range(1, 20)))).id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 19
    second.stop()


ODD = {
    "deep": b"[" * 200_000,
    "deeper": b'{"a":' * 100_000,
    "binary": b"\xff\xfe",
    "empty": b"",
    "null": b"null",
    "huge": b'{"input_file_id": 1e999}',
    "surrogate": b'{"input_file_id": "\\ud800", "endpoint": "x", "completion_window": "24h"}',
    "cut": b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n',
}


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files"])
def test_bodies_that_no_client_sends(stack: Stack, path: str) -> None:
    kinds = ("application/json", "multipart/form-data; boundary=b", "text/plain")
    with httpx.Client() as http:
        for name, kind in itertools.product(ODD, kinds):
            answer = http.post(stack.url + path, content=ODD[name], headers={"content-type": kind})
            assert 400 <= answer.status_code < 500, (name, kind, answer.text)
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "Traceback" not in answer.text
            assert str(stack.config.data_dir) not in answer.text
