"""The processes of `tandem bench stream`: the API, a bare server beside it, the clients.

`python -P -m scheduler.bench.stream_parts ROLE JSON`. Servers answer each line on standard input
with the CPU seconds they have used.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from scheduler.redis_client import connect_async

STEPS = "bench:steps"
_MARK = b'"delta":"'
_DIGITS = 20


def stamp() -> str:
    """The time now, as text of fixed length that survives JSON; one clock for all processes."""
    return f"{time.monotonic_ns():0{_DIGITS}d}"


def write_model_dir(path: Path) -> None:
    """A model directory with the least tokenizer there can be: nothing is tokenised here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"x": 0, "<end>": 1}, unk_token="x"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="x")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(str(path))
    (path / "config.json").write_text('{"max_position_embeddings": 100000}')


def bare_app(url: str) -> Starlette:
    """The measure: ten lines of server-sent events over one multiplexed stream."""
    queues: dict[str, asyncio.Queue[bytes]] = {}

    async def read() -> None:
        client = connect_async(url)
        last: Any = "0-0"  # all of it: between two reads of "$" steps would be lost
        while True:
            answer: Any = await client.xread({STEPS: last}, block=1000)
            for _, entries in answer or ():
                for entry, fields in entries:
                    last = entry
                    for name, data in msgpack.unpackb(fields[b"e"]):
                        queues[name].put_nowait(data)

    async def events(request: Request) -> StreamingResponse:
        queue = queues.setdefault(request.path_params["name"], asyncio.Queue())

        async def frames() -> AsyncIterator[bytes]:
            yield b": open\n\n"
            while data := await queue.get():
                yield data

        return StreamingResponse(frames(), media_type="text/event-stream")

    tasks: list[asyncio.Task[None]] = []

    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks.append(asyncio.create_task(read()))
        yield
        tasks[0].cancel()

    return Starlette(routes=[Route("/{name}", events)], lifespan=asynccontextmanager(lifespan))


def serve(app: Any) -> None:
    """Run a server on a free port, which is printed first."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)  # who reads the port connects, though the server has yet to begin
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))

    def answer() -> None:
        for _ in sys.stdin:
            print(json.dumps(time.process_time()), flush=True)
        server.should_exit = True

    threading.Thread(target=answer, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])


async def clients(port: int, paths: list[str]) -> dict[str, Any]:
    """Read all streams at once to their ends; delays from stamp to here, in seconds."""
    delays: list[float] = []
    opened = 0

    async def one(path: str) -> None:
        nonlocal opened
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        seen = False
        while line := await reader.readline():
            if not seen and line.startswith((b": open", b"event: ")):
                seen = True
                opened += 1
                if opened == len(paths):
                    print("open", flush=True)
            at = line.find(_MARK)
            if at >= 0:
                start = at + len(_MARK)
                delays.append((time.monotonic_ns() - int(line[start : start + _DIGITS])) / 1e9)
            elif line == b"0\r\n":
                break
        writer.close()

    await asyncio.gather(*(one(path) for path in paths))
    return {"delays": delays}


def main(role: str, text: str) -> None:
    """Be one of the processes."""
    spec = json.loads(text)
    if role == "clients":
        print(json.dumps(asyncio.run(clients(spec["port"], spec["paths"]))), flush=True)
    elif role == "bare":
        serve(bare_app(spec["url"]))
    else:
        from scheduler.api.app import create_app
        from scheduler.config import Config

        serve(create_app(Config.model_validate(spec)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
