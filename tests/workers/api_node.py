"""The API over a real decode node: its engine and store, in the thread of the test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import model_dirs  # noqa: F401  # finds the kits of the scheduler's tests
from api_stack import Stack, Workers
from decode_kit import Node

from engine.model import Model
from engine.text import load_tokenizer
from scheduler.events import Replay
from scheduler.execution import Execution, Pending
from scheduler.record import Job, pack_ids, parse
from store.store import Store

T = TypeVar("T")


class EngineWorkers(Workers):
    """Takes jobs through both stages; `serve` computes them. Nothing of it is a thread."""

    node: Node

    def start(self) -> None:
        """Nothing runs by itself: a model belongs to the thread that loaded it."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def _prefill(self) -> bool:
        job = self.runs.take("prefill", "prefill-test", "prefill:local")
        if job is None:
            return False
        # Without a link: the decode node reads the prompt itself.
        self.runs.finish_prefill(job, {"path": "none"}, self.config.decode_queue, 0)
        return True

    def _decode(self) -> bool:
        job = self.runs.take(self.config.decode_queue, "decode-test", "decode:local")
        if job is None:
            return False
        self.prompts[job.id] = job.prompt_ids
        at = self.runs.client.xlen(f"tandem:events:{job.id}")

        def emit(_: Execution, pending: list[Pending]) -> None:
            nonlocal at
            outcome = self.runs.append(job, at, [event.data for event in pending], True)
            assert outcome == "ok", outcome
            at += len(pending)

        finished = self.node.run(Execution(job, Replay(), _emit=emit))
        assert finished.error is None, finished.error
        assert finished.result is not None
        if finished.commit is not None:
            finished.commit()
        self.runs.finish(job, finished.result)
        return True

    def serve(self, call: Callable[[], T]) -> T:
        """What a client's `call` gives, which is answered here meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            while not future.done():
                if not self._prefill() and not self._decode():
                    self.ended.wait(0.002)
            return future.result()


class ApiNode(Stack):
    """A stack whose answers a model computes."""

    workers: EngineWorkers

    def __init__(self, redis_url: str, model: Model, path: Path, **sections: Any) -> None:
        self._model = model
        self._path = path
        super().__init__(redis_url, model_dir=path, **sections)

    def open_store(self) -> Store:
        self.node = Node(self._model, load_tokenizer(self._path), self.dir)
        layout = self._model.layout
        self.node.store.serve(
            self._model.fingerprint, layout.block_tokens, rows_alone=layout.rows_alone
        )
        return self.node.store

    def make_workers(self) -> Workers:
        workers = EngineWorkers(self.config, self.store, self.tokenizer)
        workers.node = self.node
        return workers

    def job(self, response: str) -> Job:
        """A response's job with its prompt."""
        found: Any = self.workers.runs.client.hgetall(f"tandem:job:{response}")
        return parse(response, found, pack_ids(self.workers.prompts[response]))
