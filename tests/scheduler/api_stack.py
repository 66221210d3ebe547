"""A real API over a real Redis and a real store, with workers that only pretend to compute."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from api_kit import make_model_dir
from openai import OpenAI
from ports_kit import own_port
from redis_kit import eventually

from scheduler.api import backend, items, stream
from scheduler.api.app import create_app
from scheduler.api.backend import Backend
from scheduler.api.output import Output, Piece
from scheduler.api.tokenizer import Tokenizer
from scheduler.config import Config, decode_queue
from scheduler.nodes import Node, Nodes, Presence
from scheduler.record import Job, Result
from scheduler.redis_client import connect
from scheduler.runs import Runs
from scheduler.serializer import pack
from store.serving import serve
from store.store import Store
from store.turns import Turn

Say = Callable[[Job], str]
Script = list[tuple[str, list[Piece]]]
"""What a model writes, bit by bit, and what each bit means."""

# A busy machine is no defect: nobody gives up a store, or shows that a stream lives, so soon.
backend.STORE_TIMEOUT = 120.0
stream.KEEP_ALIVE = 30.0


class Gate(threading.Event):
    """Lets a stage take jobs; once closed, nothing more is taken, not even by a hand in the act."""

    def __init__(self) -> None:
        super().__init__()
        self._taking = threading.Lock()

    def clear(self) -> None:
        """Close, after the job that is just being taken, if any."""
        with self._taking:
            super().clear()

    def through(self, take: Callable[[], Job | None]) -> Job | None:
        """What is taken while the gate is open."""
        with self._taking:
            return take() if self.is_set() else None


class Workers(threading.Thread):
    """Takes jobs through both stages as the real workers do, and commits their turns."""

    def __init__(self, config: Config, store: Store, tokenizer: Tokenizer) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.store = store
        self.tokenizer = tokenizer
        self.runs = Runs(connect(config.redis_url, timeout=60.0, patience=0), config.jobs)
        self.say: Say = lambda job: f"You sent {job.prompt_tokens} tokens. 東京 👩‍👩‍👧 é!"
        self.script: Callable[[Job], Script] | None = None
        self.may_prefill = Gate()
        self.may_decode = Gate()
        self.may_finish = threading.Event()
        self.halfway = threading.Event()
        self.fail_with: str | None = None
        self.ended = threading.Event()
        self.prompts: dict[str, list[int]] = {}
        self.open()

    def open(self) -> None:
        """Let every stage run."""
        for gate in (self.may_prefill, self.may_decode, self.may_finish):
            gate.set()

    def stop(self) -> None:
        """End the thread."""
        self.open()
        self.ended.set()
        if self.is_alive():
            self.join(60)
            assert not self.is_alive(), "the workers do not end"

    def run(self) -> None:
        while not self.ended.is_set():
            worked = self._prefill()
            if not (self._decode() or worked):
                self.ended.wait(0.005)

    def _prefill(self) -> bool:
        job = self.may_prefill.through(
            lambda: self.runs.take("prefill", "prefill-test", "prefill:local")
        )
        if job is None:
            return False
        facts = {"bytes": 1000, "seconds": 0.01, "path": "tcp"}
        self.runs.finish_prefill(job, facts, decode_queue(job.node), job.prompt_tokens - 1)
        return True

    def _decode(self) -> bool:
        job = self.may_decode.through(
            lambda: self.runs.take(self.config.decode_queue, "decode-test", "decode:local")
        )
        if job is None:
            return False
        self.prompts[job.id] = job.prompt_ids
        if self.fail_with is not None:
            self.runs.fail(job, "server_error", self.fail_with)
            return True
        at = self.runs.client.xlen(f"tandem:events:{job.id}")
        if self.script is not None:
            self._write(job, at, self.script(job))
            return True
        text = self.say(job)
        pieces = self._pieces(text)
        stop = next(iter(sorted(self.tokenizer.eos_ids)))
        ids: list[int] = []
        at = self._emit(
            job, at, {"type": "response.output_item.added"}, {"type": "response.content_part.added"}
        )
        limit = job.request["params"]["max_output_tokens"]
        said, finish = "", "stop"
        for number, (piece, new) in enumerate(pieces):
            if number == len(pieces) // 2:
                self.halfway.set()
                if self._hold(job, self.may_finish):
                    self.runs.cancelled(job)
                    return True
            if len(ids) + len(new) >= limit:
                finish = "length"
                break
            ids += new
            said += piece
            event = {"type": "response.output_text.delta", "delta": piece, "ids": new}
            at = self._emit(job, at, event)
        done = "completed" if finish == "stop" else "incomplete"
        output = {"text": said, "finish": finish}
        ids += [stop] if finish == "stop" else []
        cached = job.held_tokens
        usage = {
            "input_tokens": job.prompt_tokens,
            "output_tokens": len(ids),
            "cached_tokens": cached,
        }
        if job.request["store"]:
            self._commit(job, ids, output, done, usage)
        self.runs.finish(
            job,
            Result(
                status=done,
                reason="max_output_tokens" if finish == "length" else "",
                output=output,
                usage=usage,
                path={"path": "hot" if cached else "cold"},
                events=[
                    {"type": "response.output_text.done", "text": said},
                    {"type": "response.content_part.done", "text": said},
                    {"type": "response.output_item.done", "text": said, "status": done},
                ],
                computed_tokens=job.prompt_tokens - cached,
            ),
        )
        return True

    def _write(self, job: Job, at: int, script: Script) -> None:
        """Say what a script says, as the real worker tells it."""
        output, ids = Output(job.id, plain=False), list[int]()
        for raw, pieces in script:
            new = self.tokenizer.encode(raw)
            ids += new
            if told := output.say(pieces, new):
                at = self._emit(job, at, *told)
        ids.append(min(self.tokenizer.eos_ids))
        closing = output.close("completed")
        usage = {
            "input_tokens": job.prompt_tokens,
            "output_tokens": len(ids),
            "cached_tokens": job.held_tokens,
            "reasoning_tokens": output.reasoning_tokens,
        }
        result = output.result("stop")
        if job.request["store"]:
            self._commit(job, ids, result, "completed", usage)
        path = {"path": "hot" if job.held_tokens else "cold"}
        self.runs.finish(
            job, Result("completed", output=result, usage=usage, path=path, events=closing)
        )

    def _pieces(self, text: str) -> list[tuple[str, list[int]]]:
        """The text in its own tokens, cut only where whole characters end."""
        pieces: list[tuple[str, list[int]]] = []
        new: list[int] = []
        for token in self.tokenizer.encode_text(text):
            new.append(token)
            piece = self.tokenizer.decode(new)
            if "\ufffd" not in piece:
                pieces.append((piece, new))
                new = []
        return pieces

    def _hold(self, job: Job, gate: threading.Event) -> bool:
        """Wait at a gate; True where the job was cancelled meanwhile."""
        while not gate.wait(0.01):
            if self.runs.client.hget(f"tandem:job:{job.id}", "cancel") == b"1":
                return True
            if self.ended.is_set():
                break
        return False

    def _emit(self, job: Job, first: int, *events: dict[str, Any]) -> int:
        tokens = any(event.get("ids") for event in events)
        outcome = self.runs.append(job, first, [pack(event) for event in events], tokens)
        assert outcome in ("ok", "cancel"), outcome
        return first + len(events)

    def _commit(
        self, job: Job, ids: list[int], output: dict[str, Any], status: str, usage: dict[str, int]
    ) -> None:
        request = job.request
        prompt = request["prompt"]
        own = job.prompt_ids if prompt["rebased"] else job.prompt_ids[prompt["shared"] :]
        assert job.conversation is not None
        self.store.put_turn(
            Turn(
                id=job.id,
                conversation=job.conversation,
                parent=job.previous,
                owner=job.owner,
                created=job.created_at,
                model=job.model,
                items=[*request["input"], *items.output_items(job.id, output, status)],
                params={k: v for k, v in request.items() if k != "input"},
                prompt_ids=own,
                output_ids=ids,
                rebased=prompt["rebased"],
                usage=usage,
                status=status,
                finish=output["finish"],
            )
        )


class Stack:
    """Everything that a client of the API can meet."""

    def __init__(
        self,
        redis_url: str,
        *,
        context: int = 4096,
        family: str = "chatml",
        model_dir: Path | None = None,
        **sections: Any,
    ) -> None:
        # Short, because the sockets' paths have to be.
        self.dir = Path(tempfile.mkdtemp(prefix="ta-"))
        self.config = Config.model_validate(
            {
                "data_dir": str(self.dir / "d"),
                "model": "test-model",
                "model_dir": str(
                    model_dir or make_model_dir(self.dir / "m", family, context=context)
                ),
                "redis": {"url": redis_url},
                "jobs": {"abandon_seconds": 0},
                **sections,
            }
        )
        self.config.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.store = self.open_store()
        self.rpc = serve(self.store, self.config.store_socket)
        assert self.config.model_dir is not None
        self.tokenizer = Tokenizer.load(self.config.model_dir)
        self.workers = self.make_workers()
        # Kept for as long as a busy machine may keep the thread that renews it from running.
        self.present = [
            Presence(redis_url, Node(role, "local", state="ready"), ttl=60)  # type: ignore[arg-type]  # role
            for role in ("prefill", "decode")
        ]
        self.server: uvicorn.Server
        self.thread: threading.Thread
        # Nobody else is given it while the API is started again.
        self.port = own_port()

    def open_store(self) -> Store:
        """The store that this process owns."""
        return Store.open(self.dir / "store", 256 << 20)

    def make_workers(self) -> Workers:
        """The workers; another kind in a subclass."""
        return Workers(self.config, self.store, self.tokenizer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> OpenAI:
        """The official client, which does not try again by itself."""
        options = {"api_key": self.config.api.token or "none", "max_retries": 0, **options}
        return OpenAI(base_url=f"{self.url}/v1", **options)

    def start_api(self) -> None:
        app = create_app(self.config)
        self.backend: Backend = app.state.backend
        self.server = uvicorn.Server(
            uvicorn.Config(
                app,
                port=self.port,
                log_level="warning",
                timeout_graceful_shutdown=1,
                ws="none",
                # Longer than clients keep an idle connection: none is closed as it is used again.
                timeout_keep_alive=60,
            )
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

        def started() -> bool:
            assert self.thread.is_alive(), "the API ended"
            return self.server.started

        eventually(started, "the API does not start")

    def stop_api(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def __enter__(self) -> Stack:
        for presence in self.present:
            presence.start()
        nodes = Nodes(self.workers.runs.client)
        eventually(
            lambda: {one.node.key for one in self.present} <= {node.key for node in nodes.list()},
            "the nodes are not published",
        )
        self.workers.start()
        self.start_api()
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.stop()
        self.workers.runs.client.close()
        self.stop_api()
        for presence in self.present:
            presence.stop()
        self.rpc.close()
        self.store.close()
        shutil.rmtree(self.dir, ignore_errors=True)
        for path in (self.config.store_socket, self.config.runtime_dir):
            if path.is_dir():
                os.rmdir(path)
