"""Clients of the soak: random conversations, each answer checked against the solo oracle."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scheduler.bench.hosts import Host
from scheduler.command.demo_run import leading
from store.errors import StoreError
from store.rpc import StoreClient

WORDS = Path(__file__).parent.parent / "data" / "alice.txt"
TERMINAL = frozenset(("completed", "incomplete", "failed", "cancelled"))
#: Longest time in seconds that a job may take before it counts as lost; faults included.
LOST_SECONDS = 600.0
KEPT = 6
MAX_TURNS = 4
VERIFY_AT = 40


@dataclass
class Tally:
    """What the clients saw. Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    accepted: int = 0
    refused: int = 0
    unknown: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    unchecked: int = 0


@dataclass
class _Talk:
    conversation: str
    head: str
    answers: dict[str, str]


class Client(threading.Thread):
    """One user: talks in a handful of conversations until told to stop."""

    def __init__(self, number: int, seed: int, url: str, token: str, oracle: Oracle) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._random = random.Random(f"{seed}-{number}")
        self._words = WORDS.read_text(encoding="utf-8").split()
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(20.0, connect=3.0),
            trust_env=False,
        )
        self._oracle = oracle
        self._tally = oracle.tally
        self._talks: list[_Talk] = []
        self.stop = threading.Event()

    def run(self) -> None:
        """Turn after turn; at the end every conversation is checked and deleted."""
        while not self.stop.is_set():
            self._turn()
            if len(self._talks) > KEPT:
                self._leave(self._talks.pop(0))
            self.stop.wait(self._random.expovariate(1 / 0.5))
        for talk in self._talks:
            self._leave(talk)
        self._http.close()

    def _turn(self) -> None:
        pick = self._random
        again = bool(self._talks) and pick.random() < 0.5
        talk = pick.choice(self._talks) if again else None
        if talk is not None and len(talk.answers) >= MAX_TURNS:
            self._talks.remove(talk)
            self._leave(talk)
            return
        words = pick.randrange(3, 60) if talk else int(pick.paretovariate(1.1) * 12)
        body: dict[str, Any] = {
            "input": " ".join(pick.choice(self._words) for _ in range(min(words, 350))),
            "max_output_tokens": pick.randrange(3, 32),
            "temperature": 0,
            "background": True,
            "service_tier": pick.choice(("priority", "default", "flex")),
        }
        if talk is not None:
            body["previous_response_id"] = talk.head
        ident = self._submit(body)
        if ident is None:
            return
        if pick.random() < 0.05:
            self._call("POST", f"/v1/responses/{ident}/cancel", params={"force": True})
        ended = self._await(ident)
        if ended is None or ended["status"] not in ("completed", "incomplete"):
            return
        if talk is None:
            talk = _Talk(str((ended.get("conversation") or {}).get("id", "")), "", {})
            self._talks.append(talk)
        talk.head = ident
        talk.answers[ident] = _text(ended)

    def _submit(self, body: dict[str, Any]) -> str | None:
        try:
            answer = self._http.post("/v1/responses", json=body)
        except httpx.ConnectError:
            answer = None
        except httpx.HTTPError:
            with self._tally.lock:
                self._tally.unknown += 1  # it may have been accepted or not
            return None
        if answer is None or answer.status_code != 200:
            with self._tally.lock:
                self._tally.refused += 1
            self.stop.wait(0.5)
            return None
        with self._tally.lock:
            self._tally.accepted += 1
        return str(answer.json()["id"])

    def _await(self, ident: str) -> dict[str, Any] | None:
        end = time.monotonic() + LOST_SECONDS
        while time.monotonic() < end:
            found = self._call("GET", f"/v1/responses/{ident}")
            if found is not None and found.get("status") in TERMINAL:
                with self._tally.lock:
                    self._tally.ended[found["status"]] += 1
                    about = found.get("tandem") or {}
                    self._tally.paths[str(about.get("path"))] += found["status"] != "cancelled"
                    if found["status"] == "failed":
                        self._tally.failed.append(f"{ident}: {found.get('error')}")
                return found
            time.sleep(0.2)
        with self._tally.lock:
            self._tally.lost.append(ident)
        return None

    def _leave(self, talk: _Talk) -> None:
        """Have every turn checked, then delete the conversation."""
        self._oracle.check(talk.answers)
        if talk.conversation:
            self._call("DELETE", f"/v1/conversations/{talk.conversation}", tries=20)

    def _call(self, method: str, path: str, tries: int = 1, **more: Any) -> dict[str, Any] | None:
        for left in range(tries, 0, -1):
            try:
                answer = self._http.request(method, path, **more)
                if answer.status_code < 500:
                    found: dict[str, Any] = answer.json()
                    return found
            except (httpx.HTTPError, ValueError):
                pass
            if left > 1:
                time.sleep(1.0)
        return None


class Oracle:
    """Computes stored turns again, alone and without a cache, and compares. Thread-safe."""

    def __init__(self, host: Host, model: Path, tally: Tally) -> None:
        self._host = host
        self._model = model
        self.tally = tally
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []

    def check(self, answers: dict[str, str]) -> None:
        """Note turns for the next comparison, as they are stored now."""
        runs = [run for ident, text in answers.items() if (run := self._recorded(ident, text))]
        with self._lock:
            self._waiting += runs
            batch = self._waiting if len(self._waiting) >= VERIFY_AT else []
            self._waiting = self._waiting if not batch else []
        if batch:
            self._compare(batch)

    def finish(self) -> None:
        """Compare what is left."""
        with self._lock:
            batch, self._waiting = self._waiting, []
        if batch:
            self._compare(batch)

    def _recorded(self, ident: str, text: str) -> dict[str, Any] | None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for path in self._host.runtime.glob("tandem-*/store-*.sock"):
                client = StoreClient(path)
                try:
                    turn = client.get_turn(ident)
                    ids = client.turn_ids(ident) if turn is not None else []
                except StoreError:
                    continue
                finally:
                    client.close()
                if turn is None:
                    with self.tally.lock:
                        self.tally.lost.append(f"{ident}: its turn is not stored")
                    return None
                prompt = ids[: len(ids) - len(turn.output_ids)]
                return {
                    "id": ident,
                    "text": text,
                    "output": list(turn.output_ids),
                    "ids": prompt,
                    "schedule": leading(turn.schedule, len(prompt) - 1),
                    "params": {"max_tokens": int(turn.params["params"]["max_output_tokens"])},
                }
            time.sleep(0.5)
        with self.tally.lock:
            self.tally.unchecked += 1
        return None

    def _compare(self, batch: list[dict[str, Any]]) -> None:
        keys = ("ids", "schedule", "params")
        runs = [{key: run[key] for key in keys} for run in batch]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "engine.solo"],
            input=json.dumps({"model": str(self._model), "runs": runs}),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        if done.returncode:
            with self.tally.lock:
                self.tally.unchecked += len(batch)
            return
        for run, alone in zip(batch, json.loads(done.stdout)["runs"], strict=True):
            same = alone["tokens"] == run["output"] and alone["text"] == run["text"]
            with self.tally.lock:
                self.tally.checked += 1
                if not same:
                    self.tally.wrong.append(
                        f"{run['id']}: served {run['output']} {run['text']!r}, "
                        f"alone {alone['tokens']} {alone['text']!r}"
                    )


def _text(response: dict[str, Any]) -> str:
    parts = [
        part.get("text", "")
        for item in response.get("output", ())
        if item.get("type") == "message"
        for part in item.get("content", ())
    ]
    return "".join(parts)
