"""Two owners on one server: every route, and nothing of one can be told by the other."""

from __future__ import annotations

import json
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from api_stack import Stack
from fastapi.routing import APIRoute
from redis_kit import eventually
from starlette.routing import Mount, Route

from scheduler import owners
from scheduler.api.app import create_app
from scheduler.api.rates import Rates
from scheduler.cli import main
from scheduler.config import ConfigError
from scheduler.jobs import Jobs
from scheduler.owners import Owners, OwnersError
from scheduler.record import NewJob, response_id

SECRET = "the colour of the door is heliotrope"


@dataclass
class World:
    """A stack with two owners, and what the first of them has."""

    stack: Stack
    alice: str
    bob: str
    ids: dict[str, str] = field(default_factory=dict)
    talk: tuple[str, Any] = ("", None)  # a conversation of two turns, its first response
    # One for all requests: making one costs more than a request.
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def call(self, token: str, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **options.pop("headers", {})}
        url = self.stack.url + path
        return self.http.request(method, url, headers=headers, **options)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    from redis_kit import Server

    with Server() as server, Stack(server.url) as stack:
        data = stack.config.data_dir
        found = World(stack, owners.add(data, "alice"), owners.add(data, "bob"))
        client = stack.client(api_key=found.alice)
        conversation = client.conversations.create(
            items=[{"type": "message", "role": "user", "content": SECRET}]
        )
        items = client.conversations.items.list(conversation.id)
        done = client.responses.create(model="test-model", input=SECRET)
        chat = client.chat.completions.create(
            model="test-model", messages=[{"role": "user", "content": SECRET}], store=True
        )
        file = client.files.create(file=b'{"custom_id":"a"}', purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
        )
        eventually(
            lambda: client.batches.retrieve(batch.id).status == "completed", "the batch goes on"
        )
        talk = client.conversations.create().id
        first = client.responses.create(model="test-model", input="One", conversation=talk)
        client.responses.create(model="test-model", input="Two", conversation=talk)
        found.talk = (talk, first)
        stack.workers.may_prefill.clear()
        live = client.responses.create(model="test-model", input=SECRET, background=True)
        found.ids = {
            "response_id": done.id,
            "live": live.id,
            "conversation_id": conversation.id,
            "item_id": items.data[0].id,
            "completion_id": chat.id,
            "file_id": file.id,
            "batch_id": batch.id,
        }
        yield found
        found.http.close()
        stack.workers.open()


def stranger(name: str) -> str:
    """An id of the same kind that nobody has."""
    kind = name[: -len(name.partition("_")[2] or name.partition("-")[2])]
    return kind + secrets.token_hex(16)


# What to send to each route. Every route of the app stands here, or in OPEN.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("GET", "/v1/responses/{response_id}"): {},
    ("POST", "/v1/responses/{response_id}/cancel"): {},
    ("DELETE", "/v1/responses/{response_id}"): {},
    ("GET", "/v1/responses/{response_id}/input_items"): {},
    ("GET", "/v1/conversations/{conversation_id}"): {},
    ("POST", "/v1/conversations/{conversation_id}"): {"json": {"metadata": {"a": "b"}}},
    ("DELETE", "/v1/conversations/{conversation_id}"): {},
    ("GET", "/v1/conversations/{conversation_id}/items"): {},
    ("POST", "/v1/conversations/{conversation_id}/items"): {
        "json": {"items": [{"type": "message", "role": "user", "content": "mine now"}]}
    },
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): {},
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): {},
    ("GET", "/v1/responses/{response_id}/ledger"): {},
    ("GET", "/v1/responses/{response_id}/ledger.svg"): {},
    ("GET", "/v1/conversations/{conversation_id}/export"): {},
    ("POST", "/v1/conversations/{conversation_id}/fork"): {},
    ("GET", "/v1/chat/completions/{completion_id}"): {},
    ("POST", "/v1/chat/completions/{completion_id}"): {"json": {"metadata": {"a": "b"}}},
    ("DELETE", "/v1/chat/completions/{completion_id}"): {},
    ("GET", "/v1/chat/completions/{completion_id}/messages"): {},
    ("GET", "/v1/files/{file_id}"): {},
    ("GET", "/v1/files/{file_id}/content"): {},
    ("DELETE", "/v1/files/{file_id}"): {},
    ("GET", "/v1/batches/{batch_id}"): {},
    ("POST", "/v1/batches/{batch_id}/cancel"): {},
}
LISTS = (
    "/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches", "/v1/chat/completions",
)  # fmt: skip
# They name no thing of an owner in their path; what their bodies name is tried below.
MAKES = {
    ("POST", "/v1/responses"), ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/conversations"), ("POST", "/v1/chat/completions"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/files"), ("POST", "/v1/batches"),
    ("POST", "/v1/responses/compact"), ("POST", "/v1/conversations/import"),
}  # fmt: skip
SHARED = {
    ("GET", "/v1/models"), ("GET", "/v1/models/{model:path}"), ("GET", "/openapi.json"),
    ("GET", "/health"), ("GET", "/ready"),
}  # fmt: skip
OPERATORS = {("GET", "/"), ("GET", "/metrics"), ("GET", "/rq")}


def routes_of(stack: Stack) -> set[tuple[str, str]]:
    """Every (method, path) of the application."""
    found = set()
    app: Any = stack.server.config.app
    for outer in app.routes:
        inner = getattr(outer, "original_router", None)
        for route in inner.routes if inner is not None else [outer]:
            if isinstance(route, Mount):
                found.add(("GET", route.path))
            elif isinstance(route, APIRoute | Route):
                found |= {(m, route.path) for m in (route.methods or ()) if m != "HEAD"}
    return found


def test_no_route_is_forgotten(world: World) -> None:
    known = set(BODIES) | {("GET", path) for path in LISTS} | MAKES | SHARED | OPERATORS
    found = routes_of(world.stack)
    assert found - known == set(), "say above what another owner may see of it"
    assert known - found == set()


class Costs:
    """What a request costs: commands of Redis and calls of the store, as counted by them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._calls = 0
        client = stack.backend.stores._alone
        inner = client.call

        def counted(method: str, **arguments: Any) -> Any:
            self._calls += 1
            return inner(method, **arguments)

        client.call = counted  # type: ignore[method-assign]  # counts what passes

    def of(self, world: World, method: str, path: str, options: dict[str, Any]) -> tuple[Any, int]:
        """(the answer, calls of the store) of one request by bob."""
        before = self._calls
        answer = world.call(world.bob, method, path, **options)
        return answer, self._calls - before


@pytest.fixture(scope="module")
def costs(world: World) -> Costs:
    return Costs(world.stack)


def masked(answer: httpx.Response, ids: list[str]) -> tuple[int, str, set[str]]:
    text = answer.text
    for ident in ids:
        text = text.replace(ident, "ID")
    return answer.status_code, text, set(answer.headers) - {"date"}


@pytest.mark.parametrize(("method", "path"), sorted(BODIES))
def test_what_is_anothers_looks_like_what_does_not_exist(
    world: World, costs: Costs, method: str, path: str
) -> None:
    names = re.findall(r"\{(\w+)\}", path)
    real = {name: world.ids[name] for name in names}
    none = {name: stranger(world.ids[name]) for name in names}
    options = BODIES[method, path]
    theirs, work = costs.of(world, method, path.format(**real), options)
    nobodys, usual = costs.of(world, method, path.format(**none), options)
    assert theirs.status_code == 404
    same = masked(theirs, list(real.values()))
    assert same == masked(nobodys, list(none.values()))
    assert work == usual, "one costs more work than the other"
    assert SECRET not in theirs.text
    if method == "GET":  # there is something to be seen
        assert world.call(world.alice, method, path.format(**real)).status_code == 200


def test_a_running_response_cannot_be_seen_followed_or_cancelled(world: World) -> None:
    live, none = world.ids["live"], stranger(world.ids["live"])
    for method, path in (
        ("GET", "/v1/responses/{}"), ("GET", "/v1/responses/{}?stream=true&starting_after=0"),
        ("POST", "/v1/responses/{}/cancel"), ("POST", "/v1/responses/{}/cancel?force=true"),
        ("DELETE", "/v1/responses/{}"), ("GET", "/v1/responses/{}/input_items"),
    ):  # fmt: skip
        theirs = world.call(world.bob, method, path.format(live))
        nobodys = world.call(world.bob, method, path.format(none))
        assert theirs.status_code == 404
        assert masked(theirs, [live]) == masked(nobodys, [none]), path
    assert not Jobs(world.stack.workers.runs.client).get(live).cancel


@pytest.mark.parametrize("path", LISTS)
def test_lists_hold_only_ones_own(world: World, path: str) -> None:
    assert world.call(world.alice, "GET", path).json()["data"]
    answer = world.call(world.bob, "GET", path)
    assert answer.json()["data"] == []
    for name, ident in world.ids.items():
        after = world.call(world.bob, "GET", path, params={"after": ident})
        unknown = world.call(world.bob, "GET", path, params={"after": stranger(ident)})
        assert after.status_code == unknown.status_code, name
        assert ident not in after.text.replace(f"'{ident}'", "")


def test_bodies_cannot_name_what_is_anothers(world: World) -> None:
    ids = world.ids
    tries: list[tuple[str, str, str]] = [
        ("/v1/responses", "previous_response_id", ids["response_id"]),
        ("/v1/responses", "previous_response_id", ids["live"]),
        ("/v1/responses", "conversation", ids["conversation_id"]),
        ("/v1/responses/input_tokens", "previous_response_id", ids["response_id"]),
        ("/v1/responses/input_tokens", "conversation", ids["conversation_id"]),
        ("/v1/batches", "input_file_id", ids["file_id"]),
    ]
    for path, name, ident in tries:
        body: dict[str, Any] = {"input": "Hi", "background": True}
        if path == "/v1/batches":
            body = {"endpoint": "/v1/responses", "completion_window": "24h"}
        none = stranger(ident)
        theirs = world.call(world.bob, "POST", path, json={**body, name: ident})
        nobodys = world.call(world.bob, "POST", path, json={**body, name: none})
        assert theirs.status_code == 404, (path, name)
        assert masked(theirs, [ident]) == masked(nobodys, [none]), (path, name)


def test_a_prefix_of_another_is_not_found_nor_shown_by_its_speed(world: World) -> None:
    stack = world.stack
    stack.workers.open()
    first = [{"role": "user", "content": SECRET}]

    def turn(token: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": "test-model", "messages": messages}
        made: dict[str, Any] = world.call(token, "POST", "/v1/chat/completions", json=body).json()
        return made

    said = turn(world.alice, first)["choices"][0]["message"]["content"]
    again = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "More"}]
    mine, theirs = turn(world.alice, again), turn(world.bob, again)
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert theirs["tandem"]["cached_tokens"] == 0
    assert theirs["tandem"]["path"] == "cold"
    assert theirs["tandem"]["new_tokens"] == theirs["tandem"]["prompt_tokens"]
    # Messages, too; and what the other's own turn left behind is found by itself alone.
    body = {"model": "m", "max_tokens": 20, "messages": again}
    body["model"] = "test-model"
    usage = world.call(world.bob, "POST", "/v1/messages", json=body).json()["usage"]
    assert usage.get("cache_read_input_tokens", 0) == 0
    stack.workers.may_prefill.clear()


def test_unfinished_work_for_the_same_prompt_is_apart(world: World) -> None:
    jobs = Jobs(world.stack.workers.runs.client)
    digests = set()
    for owner in ("@alice", "@bob", "alice", ""):
        name = response_id()
        jobs.accept(NewJob(name, "m", {}, [1, 2, 3], owner=owner))
        digests.add(jobs.client.hget(f"tandem:job:{name}", "prompt_digest"))
        jobs.cancel(name)
    assert len(digests) == 3  # names that clients give themselves keep nobody apart


def test_the_same_idempotency_key_is_another_job(world: World) -> None:
    body = {"input": "Hi", "background": True}
    ids = [
        world.call(token, "POST", "/v1/responses", json=body, headers={"Idempotency-Key": "k"})
        for token in (world.alice, world.bob, world.alice)
    ]
    names = [answer.json()["id"] for answer in ids]
    assert names[0] == names[2] != names[1]


def test_no_client_can_call_itself_somebody_else(world: World) -> None:
    body = {"input": "Hi", "background": True, "user": "@alice"}
    made = world.call(world.bob, "POST", "/v1/responses", json=body).json()
    assert made["user"] == "@alice"  # as it was sent, and it means nothing
    assert world.call(world.alice, "GET", f"/v1/responses/{made['id']}").status_code == 404


def test_who_comes_in(world: World) -> None:
    stack = world.stack
    for headers in (
        {}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"},
        {"Authorization": "Bearer"}, {"x-api-key": ""},
    ):  # fmt: skip
        answer = world.http.get(f"{stack.url}/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    message = world.http.post(f"{stack.url}/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert message.json()["error"]["type"] == "authentication_error"
    assert world.http.get(f"{stack.url}/v1/models", headers={"x-api-key": world.bob}).is_success
    assert world.http.get(f"{stack.url}/health").json() == {"ok": True}
    told = world.http.get(f"{stack.url}/ready").json()
    assert set(told) == {"ready", "redis", "store", "prefill", "decode", "missing"}
    for _, path in OPERATORS:
        assert world.call(world.bob, "GET", path, follow_redirects=True).status_code == 403


def test_tokens_come_and_go_while_it_runs(world: World) -> None:
    data = world.stack.config.data_dir
    token = owners.add(data, "carol")
    assert world.call(token, "GET", "/v1/models").is_success
    second = owners.add(data, "carol", operator=True)
    for word in (token, second):
        assert world.call(word, "GET", "/metrics").is_success
    owners.remove(data, "carol")
    for word in (token, second):
        assert world.call(word, "GET", "/v1/models").status_code == 401
    path = data / owners.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token not in path.read_text()
    # A file that has become unusable changes nothing, and lets nobody in.
    good = path.read_text()
    path.write_text("{")
    assert world.call(world.bob, "GET", "/v1/models").is_success
    assert world.call("nobody", "GET", "/v1/models").status_code == 401
    path.write_text(good)


def test_the_last_token_taken_away_opens_no_door(redis_url: str, tmp_path: Any) -> None:
    from starlette.testclient import TestClient

    with Stack(redis_url) as stack:
        data = stack.config.data_dir
        token = owners.add(data, "alice")
        api = stack.config.api.model_copy(update={"host": "0.0.0.0"})
        app = create_app(stack.config.model_copy(update={"api": api}))
        client = TestClient(app, base_url="http://localhost")
        assert client.get("/v1/models", headers={"x-api-key": token}).status_code == 200
        owners.remove(data, "alice")
        assert client.get("/v1/models").status_code == 401
        with pytest.raises(ConfigError, match="reachable"):
            create_app(stack.config.model_copy(update={"api": api}))
        (data / owners.FILE).write_text("{")
        with pytest.raises(ConfigError, match="not a file of owners"):
            create_app(stack.config)


def test_limits_are_told_in_each_clients_words(world: World) -> None:
    stack = world.stack
    stack.workers.may_prefill.clear()
    token = owners.add(stack.config.data_dir, "dave", max_waiting=2, stored_gb=1e-6)
    client = stack.client(api_key=token)
    for _ in range(2):
        client.responses.create(model="test-model", input="Hi", background=True)
    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(model="test-model", input="Hi", background=True)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    body = {"model": "test-model", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    answer = world.call(token, "POST", "/v1/messages", json=body)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"]
    # Another owner is not held up by that.
    assert world.call(world.bob, "POST", "/v1/responses", json={"input": "x", "background": True})
    with pytest.raises(openai.RateLimitError) as full:
        client.files.create(file=b"x" * 2000, purpose="batch")
    assert full.value.code == "storage_quota_exceeded"
    slow = owners.add(stack.config.data_dir, "erin", per_minute=1)
    answers = [world.call(slow, "GET", "/v1/models") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert 1 <= int(answers[1].headers["retry-after"]) <= 60
    assert answers[1].json()["error"]["code"] == "rate_limit_exceeded"


def test_a_batch_runs_as_its_owner(world: World) -> None:
    world.stack.workers.open()
    client = world.stack.client(api_key=world.bob)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses"}
    spy = {"input": "Hi", "previous_response_id": world.ids["response_id"]}
    lines = [{**line, "body": {"input": "Hi"}}, {**line, "custom_id": "b", "body": spy}]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    done = eventually(
        lambda: b if (b := client.batches.retrieve(batch.id)).status == "completed" else None,
        "the batch does not end",
    )
    assert done.output_file_id is not None
    made = json.loads(client.files.content(done.output_file_id).text)["response"]["body"]
    error = json.loads(client.files.content(done.error_file_id).text)["response"]
    assert error["status_code"] == 404
    assert client.responses.retrieve(made["id"]).id == made["id"]
    for path in (f"/v1/responses/{made['id']}", f"/v1/files/{done.output_file_id}"):
        assert world.call(world.alice, "GET", path).status_code == 404
    world.stack.workers.may_prefill.clear()


def test_every_action_leaves_a_line(world: World) -> None:
    path = world.stack.config.data_dir / "logs" / "audit.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for wanted in (
        ("submit", world.ids["live"]), ("upload", world.ids["file_id"]),
        ("batch", world.ids["batch_id"]),
    ):  # fmt: skip
        assert wanted in [(line["action"], line["id"]) for line in lines]
    assert {line["owner"] for line in lines if line["id"] == world.ids["live"]} == {"@alice"}
    assert any(line["action"] == "resume" for line in lines)
    assert SECRET not in text
    assert world.alice not in text


def test_a_bucket_fills_evenly() -> None:
    now = 0.0
    rates = Rates(clock=lambda: now)
    assert [rates.wait("a", 2) for _ in range(3)] == [0.0, 0.0, 30.0]
    now = 29.0
    assert rates.wait("a", 2) == pytest.approx(1.0)
    now = 30.0
    assert rates.wait("a", 2) == 0.0
    assert rates.wait("b", 2) == 0.0
    assert [rates.wait("c", 0) for _ in range(1000)] == [0.0] * 1000


def test_the_command_keeps_owners(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(tmp_path)]
    assert main(["owners", "add", "alice", "--per-minute", "5", *data]) == 0
    said = capsys.readouterr()
    token = said.out.strip()
    for words in ("first owner", "api.token", "--operator", "TANDEM_API_TOKEN"):
        assert words in said.err
    assert main(["owners", "add", "alice", *data]) == 0
    assert "first owner" not in capsys.readouterr().err
    found = Owners(tmp_path).find(token)
    assert found is not None
    assert (found.name, found.per_minute, found.max_waiting) == ("alice", 5, 0)
    assert Owners(tmp_path).find(token + "x") is None
    assert main(["owners", "list", "--json", *data]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["owners"][0]["name"] == "alice"
    assert token not in out
    assert main(["owners", "add", "../x", *data]) == 2
    assert "small letters" in capsys.readouterr().err
    assert main(["owners", "remove", "alice", *data]) == 0
    assert main(["owners", "remove", "alice", *data]) == 2
    assert Owners(tmp_path).list() == ()
    (tmp_path / owners.FILE).chmod(0o644)
    with pytest.raises(OwnersError, match="chmod 600"):
        Owners(tmp_path)


def test_owners_are_added_where_the_api_reads_them(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tandem.toml"
    add = ["owners", "add", "alice", "--config", str(file), "--data", str(tmp_path)]
    file.write_text('roles = ["prefill"]\n[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    assert main(add) == 2
    assert "no API runs on this machine" in capsys.readouterr().err
    assert not (tmp_path / owners.FILE).exists()
    file.write_text('[api]\ntoken = "the operator has one"\n')
    assert main(add) == 0
    assert "first owner" not in capsys.readouterr().err


def test_another_owners_conversation_comes_in_under_new_ids(world: World) -> None:
    origin, first = world.talk
    url = "/v1/conversations"
    data = world.call(world.alice, "GET", f"{url}/{origin}/export").content
    again = [world.call(world.bob, "POST", f"{url}/import", content=data) for _ in range(2)]
    for answer in again:
        assert answer.status_code == 200, answer.text
        assert answer.json()["id"] == again[0].json()["id"] != origin
    made = again[0].json()
    names = made["imported"]["renamed"]
    assert names[origin] == made["id"]
    assert world.call(world.bob, "GET", f"{url}/{origin}").status_code == 404
    items = world.call(world.bob, "GET", f"{url}/{made['id']}/items").json()["data"]
    assert len(items) == 4
    got = world.call(world.bob, "GET", f"/v1/responses/{names[first.id]}").json()
    assert got["output"][0]["content"][0]["text"] == first.output_text
    assert got["output"][0]["id"] == "msg_" + names[first.id].removeprefix("resp_")
    store = world.stack.store
    assert store.turn_ids(names[first.id]) == store.turn_ids(first.id)
    kept = world.call(world.alice, "GET", f"{url}/{origin}/items").json()["data"]
    assert len(kept) == 4
    # What is the owner's own comes back under its ids, and can be asked for again.
    assert world.call(world.alice, "DELETE", f"{url}/{origin}").status_code == 200
    assert world.call(world.alice, "GET", f"/v1/responses/{first.id}").status_code == 404
    back = world.call(world.alice, "POST", f"{url}/import", content=data).json()
    assert (back["id"], back["imported"]["renamed"]) == (origin, {})
    assert world.call(world.alice, "GET", f"/v1/responses/{first.id}").status_code == 200
