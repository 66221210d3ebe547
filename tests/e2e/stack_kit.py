"""A whole stack for tests: every process real, the default model, a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from ports_kit import own_port

from scheduler.command.demo_run import leading
from scheduler.config import Config
from scheduler.host.stack import Stack
from store.rpc import StoreClient

#: A safety net, not a measure: nothing here takes so long.
DEADLINE = 240.0
ENDED = ("completed", "incomplete", "failed", "cancelled")
#: For stacks whose Redis is killed.
QUICK = {"drain_seconds": 5.0, "lease_seconds": 20}
#: How often a request is made anew that was over before its worker stood still.
TRIES = 4


def short_directory() -> Path:
    """A new directory whose path leaves room for a socket's name."""
    return Path(tempfile.mkdtemp(prefix="t-"))


class Running:
    """A stack that is up, supervised by a thread."""

    def __init__(self, model_dir: Path, directory: Path, **sections: Any) -> None:
        tree: dict[str, Any] = {
            "data_dir": directory,
            "model_dir": model_dir,
            "api": {"port": own_port()},
            "prefill": {"chunk": 64},
            "store": {"idle_seconds": 0.2, "size_gb": 1.0},
            # A lease that outlasts a machine that stalls: what a worker that dies here ran is free
            # when its successor starts. Where Redis dies, all wait for one lease (QUICK).
            "jobs": {"drain_seconds": 30.0, "lease_seconds": 30},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        self.config = Config.model_validate(tree)
        self.stack = Stack(self.config)
        self.http = httpx.Client(base_url=self.config.api_url, timeout=DEADLINE)
        self.store = StoreClient(self.config.store_socket)
        self._done = threading.Event()
        self._keeper = threading.Thread(target=self._supervise, daemon=True)
        try:
            self.stack.start()
            self.stack.wait_ready()
        except BaseException:
            self.print_logs()
            self.stack.stop()
            raise
        self._keeper.start()

    def _supervise(self) -> None:
        while not self._done.is_set():
            self.stack.supervisor.tick(0.1)

    def close(self) -> None:
        """Stop everything."""
        self._done.set()
        self._keeper.join()
        self.http.close()
        self.store.close()
        self.stack.stop()

    def print_logs(self) -> None:
        """What the processes said, for a failing test."""
        for path in sorted((self.config.data_dir / "logs").glob("*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")

    # --- requests -------------------------------------------------------------------------------

    def post(self, **body: Any) -> dict[str, Any]:
        """POST /v1/responses; greedy unless told otherwise."""
        answer = self.http.post("/v1/responses", json={"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, response: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/responses/{response}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Ask again until `condition()` is true; its value."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.02)
        self.print_logs()
        raise AssertionError(f"waited in vain for {what}")

    def ended(self, response: str) -> dict[str, Any]:
        """The response once it has ended."""

        def look() -> dict[str, Any] | None:
            found = self.get(response)
            return found if found["status"] in ENDED else None

        found: dict[str, Any] = self.until(look, f"the end of {response}")
        return found

    def saved(self, response: str) -> dict[str, Any]:
        """The stored state of a turn, once it is stored."""
        found: dict[str, Any] = self.until(
            lambda: self.store.find_state(response), f"the state of {response}"
        )
        return found

    def wait_left(self, response: str) -> None:
        """Wait until the state of a turn that is stored has left memory as well.

        That is a step later, and only the log tells it.
        """
        log = self.config.data_dir / "logs" / "decode.log"
        self.until(
            lambda: f"saved {response}:" in log.read_text(errors="replace"),
            f"the state of {response} to leave memory",
        )

    def events(self, response: str, after: int = -1) -> list[dict[str, Any]]:
        """All events of a response with a number above `after`, to its end."""
        url = f"/v1/responses/{response}"
        query = {"stream": "true", "starting_after": after}
        with self.http.stream("GET", url, params=query) as answer:
            return [json.loads(line[6:]) for line in answer.iter_lines() if line[:6] == "data: "]

    # --- faults ---------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Process id of a running service."""
        found: int = self.until(lambda: self.stack.supervisor.find(name).pid, f"{name} to run")
        return found

    def kill(self, name: str) -> int:
        """SIGKILL a service that may be stopped; returns its process id."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """A service stands still meanwhile, so that nothing that is done here comes too late."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def standing(self, name: str, there: Callable[[str], Any], **body: Any) -> str:
        """The id of a new request in the background, with a service that stands still at once.

        `there(response)` says that the request is where it is wanted. On a machine that stalls it
        may have gone on before the service stood: then another one is made.
        """
        for _ in range(TRIES):
            made = str(self.post(background=True, **body)["id"])
            self.until(
                lambda made=made: there(made) or self.get(made)["status"] in ENDED,
                f"{made} to come to where it is wanted",
            )
            os.kill(self.pid(name), signal.SIGSTOP)
            if there(made):
                return made
            self.go_on(name)
            self.ended(made)
        raise AssertionError(f"{name} was too quick {TRIES} times")

    def go_on(self, name: str) -> None:
        """Let a service that stands still go on."""
        os.kill(self.pid(name), signal.SIGCONT)

    def wait_back(self, name: str, old: int) -> None:
        """Wait until another process serves under `name` and the stack is ready."""
        self.until(
            lambda: (
                self.stack.supervisor.find(name).pid not in (None, old)
                and self.stack.facts().get("ready")
            ),
            f"{name} to be back",
        )

    # --- the oracle -----------------------------------------------------------------------------

    def solo(self, response: str) -> list[int]:
        """The solo oracle's tokens for a stored turn: the recorded forwards in one process."""
        ids, schedule, limit = self.recorded(response)
        run = {"ids": ids, "schedule": schedule, "params": {"max_tokens": limit}}
        return solo(self.config, [run])[0]["tokens"]

    def recorded(self, response: str) -> tuple[list[int], list[list[int]], int]:
        """Prompt ids, the forwards that computed all but the last of them, and the token limit."""
        turn = self.store.get_turn(response)
        assert turn is not None
        ids = self.store.turn_ids(response)
        prompt = ids[: len(ids) - len(turn.output_ids)]
        limit = int(turn.params["params"]["max_output_tokens"])
        return prompt, leading(turn.schedule, len(prompt) - 1), limit

    def output_ids(self, response: str) -> list[int]:
        """The token ids that a stored turn generated."""
        turn = self.store.get_turn(response)
        assert turn is not None
        return list(turn.output_ids)


def solo(config: Config, runs: list[dict[str, Any]]) -> list[Any]:
    """Answers of the engine's oracle in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.solo"],
        input=json.dumps({"model": str(config.model_dir), "runs": runs}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)["runs"]
    return found


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's message."""
    return str(response["output"][0]["content"][0]["text"])


def running(model_dir: Path, **sections: Any) -> Iterator[Running]:
    """A stack in a new directory, for a fixture."""
    directory = short_directory()
    stack = Running(model_dir, directory, **sections)
    try:
        yield stack
    finally:
        stack.close()
        shutil.rmtree(directory, ignore_errors=True)
