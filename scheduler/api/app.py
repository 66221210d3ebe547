"""The API process: one FastAPI application over the jobs, the store and the event logs."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request

from scheduler.api import (
    batches,
    chat,
    conversations,
    faults,
    files,
    messages,
    models,
    responses,
    status,
)
from scheduler.api.backend import Backend
from scheduler.api.batch_driver import BatchDriver
from scheduler.api.bodies import Turns
from scheduler.api.dashboard import Dashboard
from scheduler.api.document import document
from scheduler.api.gate import Gate
from scheduler.api.meter import Meter
from scheduler.api.metrics import Metrics
from scheduler.api.situation import Looker
from scheduler.config import Config, ConfigError, is_loopback
from scheduler.host import lifeline
from scheduler.owners import Owners, OwnersError
from scheduler.redis_client import AWAY

log = logging.getLogger("tandem.api")

VERSION = "0.1.0"
#: How long a thread may hold the interpreter while the event loop waits for it.
SWITCH_SECONDS = 0.0005


def create_app(config: Config) -> FastAPI:
    """The application for `config`, whose model_dir must be set. Loads the tokenizer.

    Raises TokenizerError, and ConfigError where it would be open to others without a token.
    """
    try:
        named = bool(config.api.token or Owners(config.data_dir).list())
    except OwnersError as error:
        raise ConfigError(str(error)) from None
    if not named and not is_loopback(config.api.host):
        raise ConfigError(
            f"api.host = {config.api.host!r} is reachable from other machines, and api.token is "
            "empty: set api.token, name owners with `tandem owners add`, or listen on 127.0.0.1"
        )
    backend = Backend(config)
    driver = BatchDriver(backend)
    looker = Looker(backend)
    metrics = Metrics(backend, looker)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        app.state.turns = Turns()
        backend.hub.start()
        backend.clients.start()
        driver.start()
        # What is loaded by now stays: a full collection that walks it would hold up every stream.
        gc.collect()
        gc.freeze()
        # Nor may a thread that looks at Redis hold up the loop for the usual five milliseconds.
        sys.setswitchinterval(SWITCH_SECONDS)
        yield
        await run_in_threadpool(driver.stop)
        await run_in_threadpool(backend.clients.close)
        await backend.close()

    app = FastAPI(
        title="Tandem",
        version=VERSION,
        description="Responses that resume by ID, on two machines.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.backend = backend
    app.add_middleware(Gate, config=config, owners=backend.owners, audit=backend.audit)
    app.add_middleware(Meter, metrics=metrics)
    app.add_exception_handler(faults.Fault, faults.on_fault)
    app.add_exception_handler(RequestValidationError, faults.on_validation)
    app.add_exception_handler(HTTPException, faults.on_http)
    app.add_exception_handler(RedisError, _on_redis)
    app.add_exception_handler(Exception, faults.on_crash)
    for room in (responses, conversations, chat, messages, models, files):
        app.include_router(room.router(backend))
    app.include_router(batches.router(backend, driver.kick))
    app.include_router(status.router(backend, looker, metrics))
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # as FastAPI documents it
    app.mount(
        "/rq",
        Dashboard(
            config.redis_url_of("dashboard"),
            backend.redis,
            backend.audit,
            backend.jobs,
            cancel=config.api.dashboard == "cancel",
        ),
    )
    return app


async def _on_redis(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, AWAY):
        fault = faults.unavailable("Redis", "check that it runs; try again shortly")
        return fault.response(request.url.path)
    log.error("Redis refused a command: %s", error)
    return await faults.on_crash(request, error)


def serve(config: Config) -> int:
    """Run the API in this process until it is told to stop; returns its exit status.

    Raises ConfigError where it cannot listen, TokenizerError where the model's files are wrong.
    """
    app = create_app(config)
    listener = _listen(config)
    lifeline.watch()
    log.info("the API listens on %s", config.api_url)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
    )
    # uvicorn raises the signal that stopped it once more when it is done; a clean stop is no crash.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    server.run(sockets=[listener])
    return 0


def _listen(config: Config) -> socket.socket:
    """The listening socket, taken before anything else is started."""
    host, port = config.api.host, config.api.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}): stop what uses it, or "
            "choose another port with --port"
        ) from None
    return listener
