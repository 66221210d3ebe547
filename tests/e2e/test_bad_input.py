"""Wrong input ends in one clear line with the cause and the cure, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ports_kit import own_port
from stack_kit import Running


def tandem(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "REDIS_URL"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, **environment},
        timeout=120,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("tandem: ")]
    assert len(told) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return told[0]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def test_port_taken(data: str, model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = tandem("up", "--data", data, "--model", str(model_dir), "--port", port)
    assert done.returncode == 2
    assert port in one_line(done)
    assert "--port" in one_line(done)
    assert not Path(data).exists()


def test_data_directory_not_writable(tmp_path: Path, model_dir: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    done = tandem("up", "--data", str(in_the_way / "data"), "--model", str(model_dir),
                  "--port", str(own_port()))  # fmt: skip
    assert done.returncode == 2
    assert "--data" in one_line(done)


def test_data_directory_without_a_name(model_dir: Path) -> None:
    done = tandem("up", "--data", "", "--model", str(model_dir))
    assert done.returncode == 2
    assert "--data" in done.stderr


def test_data_directory_used_by_another_tandem(stack: Running) -> None:
    pids = [stack.pid(name) for name in ("api", "redis", "decode", "prefill")]
    done = tandem("up", "--data", str(stack.config.data_dir),
                  "--model", str(stack.config.model_dir), "--port", str(own_port()))  # fmt: skip
    assert done.returncode == 2
    assert "in use by another Tandem" in one_line(done)
    stack.until(lambda: stack.stack.facts().get("ready"), "the other one to be ready")
    assert [stack.pid(name) for name in ("api", "redis", "decode", "prefill")] == pids


def test_redis_not_reachable(data: str, model_dir: Path) -> None:
    url = f"redis://:secret@127.0.0.1:{own_port()}/0"
    done = tandem("up", "--data", data, "--model", str(model_dir), "--port", str(own_port()),
                  REDIS_URL=url)  # fmt: skip
    assert done.returncode == 2
    assert "not reachable" in one_line(done)
    assert "REDIS_URL" in one_line(done)
    assert "secret" not in done.stderr


def test_model_directory_incomplete(data: str, tmp_path: Path) -> None:
    half = tmp_path / "model"
    half.mkdir()
    (half / "config.json").write_text('{"model_type": "llama"}')
    done = tandem("up", "--data", data, "--model", str(half), "--port", str(own_port()))
    assert done.returncode == 2
    assert "safetensors" in one_line(done)
    assert not Path(data).exists()


def test_unknown_model_name(data: str) -> None:
    done = tandem("up", "--data", data, "--model", "no-such-model", "--port", str(own_port()))
    assert done.returncode == 2
    assert "no-such-model" in one_line(done)


def test_api_not_running() -> None:
    done = tandem("jobs", "--url", f"http://127.0.0.1:{own_port()}")
    assert done.returncode == 1
    assert "tandem up" in one_line(done)


def test_requests_that_cannot_be_served(stack: Running) -> None:
    def post(**body: object) -> tuple[int, str]:
        answer = stack.http.post("/v1/responses", json=body)
        error = answer.json()["error"]
        return answer.status_code, error["message"]

    assert post(input="")[0] == 400
    status, message = post(input="word " * 9000)
    assert status == 400
    assert str(8192) in message
    status, message = post(input="hello", model="gpt-unknown")
    assert status == 404
    assert stack.config.model_name in message
    assert post(input="hello", previous_response_id="resp_" + "0" * 32)[0] == 404
    assert post(input="hello", conversation="conv_" + "0" * 32)[0] == 404
    assert stack.http.get("/v1/responses/resp_" + "0" * 32).status_code == 404


def test_commands_against_a_running_stack(stack: Running, tmp_path: Path) -> None:
    url = stack.config.api_url
    question = tmp_path / "question.txt"
    question.write_text("Say hello.")
    done = tandem("submit", str(question), "--max-tokens", "6", "--json", "--url", url)
    assert done.returncode == 0, done.stderr
    identity = json.loads(done.stdout)["id"]
    done = tandem("resume", identity, "Again.", "--max-tokens", "6", "--url", url)
    assert done.returncode == 0, done.stderr
    assert identity in tandem("jobs", "--json", "--url", url).stdout
    shown = tandem("show", identity, "--url", url)
    assert shown.returncode == 0
    assert "cold" in shown.stdout
    missing = tandem("show", "resp_" + "0" * 32, "--url", url)
    assert missing.returncode != 0
    one_line(missing)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "empty" in one_line(tandem("submit", str(empty), "--url", url))
