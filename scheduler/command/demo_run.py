"""What the demo does, step by step, as a client of a stack that it also kills and checks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler.config import Config
from scheduler.host.stack import Stack, StackFailed
from store.rpc import StoreClient

FIRST_QUESTION = "In one or two sentences: whom does Alice follow, and where does she fall?"
SECOND_QUESTION = "And what did she find on the glass table?"
MIN_TOKENS = 2000
SAVE_SECONDS = 120.0
RESTART_SECONDS = 600.0
SAY_EVERY = 20.0
"""Seconds between two lines of the step that computes alone: minutes on a slow machine."""


class Demo:
    """A private stack and one conversation on it. `run` once, always `close`."""

    def __init__(self, config: Config, console: Console, tokens: int, words: int = 0) -> None:
        self._config = config
        self._console = console
        self._tokens = tokens
        self._words = words
        self._stack = Stack(config)
        self._http = httpx.Client(base_url=config.api_url, timeout=600)
        self._store = StoreClient(config.store_socket)
        self._done = threading.Event()
        self._failure: StackFailed | None = None
        self._keeper = threading.Thread(target=self._supervise, name="supervise", daemon=True)

    def run(self) -> dict[str, Any]:
        """The whole demo; returns what `--json` prints."""
        say = self._console.print
        with self._step("starting Redis, the API, a prefill worker and a decode worker"):
            self._stack.start()
            self._stack.wait_ready()
        self._keeper.start()
        text = files("scheduler").joinpath("data/alice.txt").read_text(encoding="utf-8")
        if self._words:
            text = " ".join(text.split()[: self._words])
        say(f"\n[bold]1. a long prompt[/]: {len(text.split())} words, then: {FIRST_QUESTION}")
        cold = self._ask(f"{text}\n\n{FIRST_QUESTION}")
        with self._step("idle: the conversation moves from the model's memory to the store"):
            saved = self._wait_saved(cold["id"])
        say(f"   saved {saved['nbytes']:,} bytes for {saved['tokens']:,} tokens")
        say("\n[bold]2. the decode worker dies[/] (SIGKILL) and is started again")
        with self._step("waiting for it"):
            self._kill_decode()
        say(f"\n[bold]3. resume[/] {cold['id']}: {SECOND_QUESTION}")
        resumed = self._ask(SECOND_QUESTION, previous=cold["id"])
        say("\n[bold]4. the same two answers alone[/]: one process, no cache")
        with self._step("computing"):
            solo = self._solo([cold["id"], resumed["id"]])
        return self._outcome(cold, resumed, saved, solo)

    def wait(self) -> None:
        """Keep the stack running until the process is interrupted."""
        while not self._done.wait(1.0):
            self._check()

    def close(self) -> None:
        """Stop the stack; nothing of it is left."""
        self._done.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self._http.close()
        self._store.close()
        self._stack.stop()

    def show_logs(self) -> None:
        """The last lines of every process, to standard error."""
        for path in sorted((self._config.data_dir / "logs").glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            print(f"--- {path.name}", *lines, sep="\n", file=sys.stderr)

    # --- steps ----------------------------------------------------------------------------------

    def _ask(self, text: str, previous: str | None = None) -> dict[str, Any]:
        """Stream one answer, drawing its progress; returns the response and its times."""
        body = {
            "input": text,
            "max_output_tokens": self._tokens,
            "temperature": 0,
            "stream": True,
            **({"previous_response_id": previous} if previous else {}),
        }
        began = time.monotonic()
        first: float | None = None
        identity = ""
        final: dict[str, Any] = {}
        columns = (
            TextColumn("   {task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} tokens"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=False) as bar:
            task = bar.add_task("queued", total=None)
            for event in self._events(body):
                self._check()
                if event is None:
                    if identity:
                        self._draw(bar, task, identity)
                    continue
                kind = event["type"]
                if kind == "response.created":
                    identity = event["response"]["id"]
                elif kind == "response.output_text.delta":
                    if first is None:
                        first = time.monotonic() - began
                        facts = self._facts(identity)
                        self._draw(bar, task, identity, facts)
                        bar.stop()
                        self._tell_start(facts, first)
                    self._console.print(event["delta"], end="", markup=False, soft_wrap=True)
                elif "response" in event and kind not in ("response.queued",):
                    final = event["response"]
        self._console.print()
        if final.get("status") not in ("completed", "incomplete") or first is None:
            raise StackFailed(
                f"{identity or 'the response'} ended as {final.get('status')}: {final.get('error')}"
            )
        return {**final, "ttft": first, "text": final["output"][0]["content"][0]["text"]}

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Server-sent events of a streamed request; None whenever a moment passed without one."""
        arrived: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue()

        def read() -> None:
            try:
                with self._http.stream("POST", "/v1/responses", json=body) as answer:
                    if answer.status_code != 200:
                        answer.read()
                        raise StackFailed(f"the API answered {answer.status_code}: {answer.text}")
                    for line in answer.iter_lines():
                        if line.startswith("data: "):
                            arrived.put(json.loads(line[6:]))
            except BaseException as error:
                arrived.put(error)
            arrived.put(None)

        threading.Thread(target=read, name="stream", daemon=True).start()
        while True:
            try:
                event = arrived.get(timeout=0.15)
            except queue.Empty:
                yield None
                continue
            if event is None:
                return
            if isinstance(event, BaseException):
                raise StackFailed(f"the stream broke: {event}")
            yield event

    def _facts(self, identity: str) -> dict[str, Any]:
        facts: dict[str, Any] = self._http.get(f"/v1/responses/{identity}").json()["tandem"]
        return facts

    def _draw(
        self, bar: Progress, task: Any, identity: str, facts: dict[str, Any] | None = None
    ) -> None:
        facts = facts or self._facts(identity)
        done, total = facts["prefill"]["done"], facts["prefill"]["total"]
        if facts["stage"] == "decoding":
            done = total
        bar.update(task, description=facts["stage"], completed=done, total=total)

    def _tell_start(self, facts: dict[str, Any], first: float) -> None:
        handoff = facts.get("handoff") or {}
        if handoff.get("bytes"):
            self._console.print(
                f"   handed off {handoff['bytes']:,} bytes over {handoff['path']}, "
                f"{handoff['exposed_seconds'] * 1000:.1f} ms after the last chunk"
            )
        self._console.print(f"   first token after {first:.2f} s\n")

    def _wait_saved(self, turn: str) -> dict[str, Any]:
        end = time.monotonic() + SAVE_SECONDS
        while time.monotonic() < end:
            self._check()
            state = self._store.find_state(turn)
            if state is not None:
                return {"tokens": state["tokens"], "nbytes": state["nbytes"]}
            time.sleep(0.1)
        raise StackFailed(f"the state of {turn} was not saved within {SAVE_SECONDS:.0f} s")

    def _kill_decode(self) -> None:
        pid = self._stack.supervisor.find("decode").pid
        if pid is None:
            raise StackFailed("the decode worker is not running")
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + RESTART_SECONDS
        while time.monotonic() < end:
            self._check()
            facts = self._stack.facts()
            nodes = [node for node in facts.get("nodes", ()) if node["role"] == "decode"]
            if facts.get("ready") and any(node["pid"] != pid for node in nodes):
                return
            time.sleep(0.1)
        raise StackFailed(f"the decode worker was not back within {RESTART_SECONDS:.0f} s")

    def _solo(self, turns: list[str]) -> list[dict[str, Any]]:
        """Both answers by the engine's oracle, with the chunk lengths that were recorded."""
        runs: list[dict[str, Any]] = []
        expected: list[list[int]] = []
        for identity in turns:
            turn = self._store.get_turn(identity)
            if turn is None:
                raise StackFailed(f"{identity} is not in the store")
            ids = self._store.turn_ids(identity)
            prompt = ids[: len(ids) - len(turn.output_ids)]
            runs.append(
                {
                    "ids": prompt,
                    "schedule": leading(turn.schedule, len(prompt) - 1),
                    "params": {"max_tokens": self._tokens},
                }
            )
            expected.append(list(turn.output_ids))
        request = {"model": str(self._config.model_dir), "runs": runs}
        size = " and ".join(f"{len(run['ids']):,}" for run in runs)

        def say(seconds: float) -> None:
            self._console.print(f"   still at it after {seconds:.0f} s: prompts of {size} tokens")

        done = run_saying(
            [sys.executable, "-P", "-m", "engine.solo"], json.dumps(request), say, SAY_EVERY
        )
        if done.returncode != 0:
            raise StackFailed(f"the solo run failed: {done.stderr.strip().splitlines()[-1:]}")
        answers = json.loads(done.stdout)["runs"]
        return [
            {**answer, "tokens_equal": answer["tokens"] == tokens}
            for answer, tokens in zip(answers, expected, strict=True)
        ]

    def _outcome(
        self,
        cold: dict[str, Any],
        resumed: dict[str, Any],
        saved: dict[str, Any],
        solo: list[dict[str, Any]],
    ) -> dict[str, Any]:
        equal = [
            alone["tokens_equal"] and alone["text"] == turn["text"]
            for turn, alone in zip((cold, resumed), solo, strict=True)
        ]
        new = resumed["tandem"]["prompt_tokens"] - saved["tokens"]
        computed = resumed["tandem"]["computed_tokens"]
        handoff = cold["tandem"]["handoff"] or {}
        long_enough = bool(self._words) or cold["tandem"]["prompt_tokens"] >= MIN_TOKENS
        moved = handoff.get("path") not in (None, "none")
        restored = resumed["tandem"]["path"] == "restored"
        return {
            "ok": all(equal) and computed == new and long_enough and moved and restored,
            "answers_equal_solo": all(equal),
            "model": cold["model"],
            "cold": {
                "id": cold["id"],
                "prompt_tokens": cold["tandem"]["prompt_tokens"],
                "computed_tokens": cold["tandem"]["computed_tokens"],
                "ttft_seconds": round(cold["ttft"], 4),
                "path": cold["tandem"]["path"],
                "equal_solo": equal[0],
                "text": cold["text"],
            },
            "handoff": {
                "bytes": handoff.get("bytes", 0),
                "seconds": handoff.get("exposed_seconds"),
                "streamed_over_seconds": handoff.get("seconds"),
                "path": handoff.get("path", "none"),
            },
            "saved": {"bytes": saved["nbytes"], "tokens": saved["tokens"]},
            "resume": {
                "id": resumed["id"],
                "prompt_tokens": resumed["tandem"]["prompt_tokens"],
                "new_tokens": new,
                "computed_tokens": computed,
                "excess_tokens": computed - new,
                "ttft_seconds": round(resumed["ttft"], 4),
                "ttft_resumed_vs_cold": round(resumed["ttft"] / cold["ttft"], 4),
                "path": resumed["tandem"]["path"],
                "equal_solo": equal[1],
                "text": resumed["text"],
            },
        }

    # --- the stack ------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            while not self._done.is_set():
                self._stack.supervisor.tick(0.1)
        except StackFailed as error:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        with self._console.status(f"   {what}"):
            yield
        self._console.print(f"   {what}: {time.monotonic() - began:.1f} s")


def run_saying(
    command: list[str], text: str, say: Callable[[float], None], every: float
) -> subprocess.CompletedProcess[str]:
    """Run a command with `text` as its input; calls `say` with the seconds gone, all `every` ones.

    The command is killed where anything is raised meanwhile.
    """
    began = time.monotonic()
    rest: str | None = text  # is sent by the first call alone, whether it ends in time or not
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    out, err = process.communicate(rest, timeout=every)
                except subprocess.TimeoutExpired:
                    rest = None
                    say(time.monotonic() - began)
                else:
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
        except BaseException:
            process.kill()
            raise


def leading(schedule: list[list[int]], tokens: int) -> list[list[int]]:
    """The forwards of a schedule that cover its first `tokens` tokens exactly.

    Raises StackFailed where a forward crosses that position: then the record is wrong.
    """
    found: list[list[int]] = []
    left = tokens
    for length, count in schedule:
        take = min(count, left // length)
        if take:
            found.append([length, take])
        left -= length * take
        if take < count:
            break
    if left:
        raise StackFailed(f"the recorded schedule does not stop at token {tokens}")
    return found
