"""Every second, byte and fork of real requests, on each path, and nothing done twice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_dirs import make_tiny_model
from stack_kit import Running, running, short_directory

from scheduler import cli
from scheduler.nodes import Nodes
from scheduler.redis_client import connect
from scheduler.serializer import pack

TEXT = " ".join(f"word{number}" for number in range(60))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
#: A remainder is what no mark covers; another process may take the processor between two marks, and
#: on a busy machine does so for most requests. So one that is explained is waited for (seconds).
PATIENCE = 240.0
_NUMBERS = itertools.count(100)


@pytest.fixture(scope="module")
def stack() -> Iterator[Running]:
    directory = short_directory()
    model = make_tiny_model(directory / "model")
    yield from running(
        model,
        prefill={"chunk": 32, "handoff": "prompt"},
        store={"idle_seconds": 1.0, "save": "idle"},
    )
    shutil.rmtree(directory, ignore_errors=True)


def ledger(stack: Running, response: str) -> dict[str, Any]:
    answer = stack.http.get(f"/v1/responses/{response}/ledger")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(stack: Running, said: str = TEXT, **body: Any) -> str:
    """The id of a new request that begins like no other one."""
    said = f"{next(_NUMBERS)} {said}"
    return str(stack.post(input=said, max_output_tokens=6, **body)["id"])


def fork(found: dict[str, Any], name: str) -> str:
    """Which way was taken at a fork, the last one where there were several."""
    return [str(each["took"]) for each in found["forks"] if each["fork"] == name][-1]


def bounded(
    stack: Running, make: Callable[[], str], path: str | None, api: Collection[str] = ()
) -> dict[str, Any]:
    """The ledger of a request that took `path`, with no more unexplained than may be.

    `api`: stages of the API that are not shorter than its clock is wrong against that of Redis.
    """
    seen: deque[tuple[str, dict[str, Any]]] = deque(maxlen=8)
    until = time.monotonic() + PATIENCE
    while not seen or time.monotonic() < until:
        found = ledger(stack, make())
        assert found["ended"]
        assert found["whole"]
        total = sum(row["own_seconds"] for row in found["stages"]) + found["remainder"]["seconds"]
        assert total == pytest.approx(found["seconds"], abs=1e-3)
        if (
            found["path"] == path
            and found["remainder"]["within"]
            and {*api} <= {*stages(found, "api")}
        ):
            return found
        seen.append((found["path"], found["remainder"]))
    raise AssertionError(f"not {path}, or too much is unexplained: {list(seen)}")


def stages(found: dict[str, Any], lane: str) -> list[str]:
    return [row["stage"] for row in found["stages"] if row["lane"] == lane]


def test_cold_is_explained_from_arrival_to_end(stack: Running) -> None:
    arrival = {"receive", "tokenise", "accept"}
    found = bounded(stack, lambda: ask(stack), "cold", arrival)
    assert arrival <= set(stages(found, "api"))
    assert stages(found, "queue") == ["wait"]
    assert {"offer", "prefill", "pack", "hand off"} <= set(stages(found, "prefill"))
    assert stages(found, "link") == ["wire"]
    wanted = {"unpack", "first decode", "decode", "flush", "record"}
    assert wanted <= set(stages(found, "decode"))
    assert fork(found, "link") == "tcp"
    assert fork(found, "state") == "cold"
    assert fork(found, "chunk") == "32"
    assert fork(found, "kernels") in ("metal", "fallback")
    chunks = sum(tokens * count for tokens, count in found["shapes"]["prefill"])
    assert chunks == found["tokens"]["prompt"] - 1
    assert sum(found["shapes"]["decode_widths"].values()) > 0
    assert found["bytes"]["wire"] == stack.get(found["id"])["tandem"]["handoff"]["bytes"]
    assert found["nodes"].keys() >= {"api", "prefill", "decode"}
    times = [span["start"] for span in found["spans"]]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_hot_restored_and_recomputed_are_explained(stack: Running) -> None:
    def hot() -> str:
        return ask(stack, "and?", previous_response_id=ask(stack))

    assert "take over" in stages(bounded(stack, hot, "hot"), "decode")

    def gone(drop: bool) -> str:
        first = ask(stack)
        stack.saved(first)
        stack.wait_left(first)
        if drop:
            assert stack.store.call("drop_state", turn_id=first)
        return ask(stack, "and?", previous_response_id=first)

    restored = bounded(stack, lambda: gone(False), "restored")
    assert "restore" in stages(restored, "decode")
    assert restored["bytes"]["store_read"] > 0
    recomputed = bounded(stack, lambda: gone(True), "recomputed")
    assert "prefill" in stages(recomputed, "decode")
    why = [each["why"] for each in recomputed["forks"] if each["fork"] == "state"]
    assert "no stored state" in why[0]


def test_a_prompt_that_its_decode_node_computes_says_why(stack: Running) -> None:
    with connect(stack.config.redis_url) as client:
        node = stack.until(lambda: Nodes(client).get("decode", "local"), "the decode node")
        away = dataclasses.replace(node, link="127.0.0.1:9", boot="another")
        told, reached = pack(dataclasses.asdict(away)), threading.Event()

        def keep_off() -> None:
            # Its own signs of life, which come every two seconds, stand for a moment only.
            while not reached.wait(0.005):
                client.set(node.key, told, px=6000)

        keeper = threading.Thread(target=keep_off)
        keeper.start()
        try:
            found = bounded(stack, lambda: ask(stack), "recomputed")
        finally:
            reached.set()
            keeper.join()

        def is_back() -> bool:
            now = Nodes(client).get("decode", "local")
            return now is not None and now.boot == node.boot

        stack.until(is_back, "the decode node's own sign of life")
    assert fork(found, "link") == "none"
    assert found["bytes"]["wire"] == 0
    assert {"prefill", "first decode"} <= set(stages(found, "decode"))


def test_a_cancelled_answer_is_explained_to_where_it_stopped(stack: Running) -> None:
    def cancel() -> str:
        def begun(response: str) -> bool:
            return str(stack.get(response)["tandem"]["stage"]) == "decoding"

        name = stack.standing("decode", begun, input=TEXT, max_output_tokens=3000)
        running_yet = ledger(stack, name)
        assert not running_yet["ended"]
        assert running_yet["seconds"] > 0
        stack.go_on("decode")
        stack.http.post(f"/v1/responses/{name}/cancel")
        assert stack.ended(name)["status"] == "cancelled"
        return name

    found = bounded(stack, cancel, None)
    assert found["status"] == "cancelled"
    assert [run["outcome"] for run in found["runs"]] == ["handed off", "cancelled"]


def test_the_second_request_repeats_nothing_and_keeps_to_its_budget(stack: Running) -> None:
    form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}
    for number in range(3):
        first = ask(stack, f"{TEXT} {number}", **form)
    assert ledger(stack, first)["work"] == {}
    until, within = time.monotonic() + PATIENCE, False
    while not within and time.monotonic() < until:
        found = ledger(stack, ask(stack, TEXT, **form))
        assert found["work"] == {}
        control = found["bytes"]["control"]
        # A look at all nodes once a second is charged to whoever asks just then.
        within = control["budget"]["within"]
    print(control)
    assert within
    assert control["commands"] >= control["round_trips"] >= 8
    new = {**SCHEMA, "properties": {"b": {"type": "null"}}, "required": ["b"]}
    form["text"]["format"]["schema"] = new
    assert ledger(stack, ask(stack, TEXT, **form))["work"] == {"grammar_compiles": 1}


def test_the_store_explains_what_redis_has_forgotten(
    stack: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until, same = time.monotonic() + PATIENCE, False
    while not same and time.monotonic() < until:
        name = str(bounded(stack, lambda: ask(stack), "cold")["id"])
        stack.saved(name)

        def kept(name: str = name) -> Any:
            turn = stack.store.get_turn(name)
            return turn is not None and turn.ledger

        stack.until(kept, "the ledger in the store")
        before = ledger(stack, name)
        assert stages(before, "store") == ["copy", "save"]
        assert before["bytes"]["store_written"] > 0
        facts = stack.get(name)["tandem"]
        with connect(stack.config.redis_url) as client:
            client.delete(f"tandem:job:{name}")
        after = ledger(stack, name)
        for part in ("forks", "bytes", "tokens", "shapes", "runs", "work"):
            assert after[part] == before[part], part
        # The worker notes the end when it hears of it, so its thread must have gone on at once.
        same = after["seconds"] == pytest.approx(before["seconds"], abs=0.005)
    assert same, (before["seconds"], after["seconds"])
    assert after["remainder"]["within"]
    old = stack.get(name)["tandem"]
    assert old["handoff"] == facts["handoff"]
    assert old["path"] == "cold"
    command = ["explain", name, "--url", stack.config.api_url]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    for word in ("first decode", "not explained", "tcp", "on the wire", "done again"):
        assert word in told
    picture = stack.http.get(f"/v1/responses/{name}/ledger.svg")
    assert picture.headers["content-type"] == "image/svg+xml"
    assert picture.text.startswith("<svg ")
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == after
    assert cli.main([*command, "--json", "--legend"]) == 0
    legend = json.loads(capsys.readouterr().out)["legend"]
    assert legend["stages"].keys() == {row["stage"] for row in after["stages"]}
    assert legend["forks"].keys() == {each["fork"] for each in after["forks"]}
    assert cli.main([*command, "--legend"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for names in legend.values() for name in names)
    file = tmp_path / "timeline.svg"
    assert cli.main([*command, "--svg", str(file)]) == 0
    assert file.read_text() == picture.text
    assert cli.main(["explain", "conv_1", "--url", stack.config.api_url]) == 2
    assert "no response's ID" in capsys.readouterr().err
    assert stack.http.get(f"/v1/responses/resp_{'0' * 32}/ledger").status_code == 404
