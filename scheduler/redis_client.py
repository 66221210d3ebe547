"""Connections to Redis with timeouts and retries that fit who uses them.

redis-py's defaults (5 s socket timeout, ten retries) turn one blocking read into a minute of
silence. Here a command waits `timeout` seconds, and is sent again for about `patience` seconds
while the server is away; every script that may be sent twice recognises its second arrival.
"""

from __future__ import annotations

import functools
from typing import Any

import redis
import redis.asyncio
from redis._parsers.base import BaseParser
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from store import meter

#: Errors that mean "not now" (away, loading, out of memory, read-only), as opposed to "no": what is
#: being written is kept and tried again.
AWAY = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    ConnectionError,
)

# "MISCONF": the server cannot write its append-only file. redis-py knows no class for it.
BaseParser.EXCEPTION_CLASSES["MISCONF"] = ReadOnlyError

#: Longest time in seconds that one blocking command waits on the server.
MAX_BLOCK = 1.0

_RETRY_EVERY = 0.25


def connect(url: str, *, timeout: float = 5.0, patience: float = 15.0) -> redis.Redis:
    """A client with its own pool. `timeout` and `patience` in seconds; patience 0: no retry.

    Its commands, round trips and bytes are counted by `store.meter`.
    """
    client = redis.Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        health_check_interval=0,
        retry=Retry(ConstantBackoff(_RETRY_EVERY), int(patience / _RETRY_EVERY)),
    )
    pool = client.connection_pool
    pool.connection_class = _counted(pool.connection_class)
    return client


def connect_async(url: str, *, timeout: float = 5.0, patience: float = 5.0) -> redis.asyncio.Redis:
    """The asyncio counterpart of `connect`."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        health_check_interval=0,
        retry=AsyncRetry(ConstantBackoff(_RETRY_EVERY), int(patience / _RETRY_EVERY)),
    )


def subscription(client: redis.asyncio.Redis) -> redis.asyncio.client.PubSub:
    """Subscribe to channels: messages are handed on as they come.

    By itself redis-py makes a line for its log of each whole message, whether it is kept or not.
    """
    # The older protocol, which an address may ask for, has no handler for messages.
    older = str(client.connection_pool.connection_kwargs.get("protocol", 3)) == "2"
    return client.pubsub() if older else client.pubsub(push_handler_func=_as_it_is)


async def _as_it_is(message: Any) -> Any:
    return message


class _CountedSocket:
    """A socket whose received bytes are counted; everything else is passed on."""

    __slots__ = ("_socket", "recv", "sendall")

    def __init__(self, inner: Any) -> None:
        self._socket = inner
        self.sendall = inner.sendall
        receive = inner.recv

        def recv(*args: Any) -> Any:
            data = receive(*args)
            meter.current().received += len(data)
            return data

        self.recv = recv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


@functools.cache
def _counted(kind: type[Any]) -> type[Any]:
    """A connection class of redis-py that counts what it sends and receives."""

    class Counted(kind):  # type: ignore[misc]  # redis-py decides at run time which class it is
        def send_command(self, *args: Any, **kwargs: Any) -> Any:
            meter.current().commands += 1
            return super().send_command(*args, **kwargs)

        def pack_commands(self, commands: Any) -> Any:
            meter.current().commands += len(commands)
            return super().pack_commands(commands)

        def send_packed_command(self, command: Any, check_health: bool = True) -> Any:
            counts = meter.current()
            counts.trips += 1
            counts.sent += sum(map(len, [command] if isinstance(command, str) else command))
            return super().send_packed_command(command, check_health=check_health)

        def _connect(self) -> Any:
            meter.work("redis_connections")
            return _CountedSocket(super()._connect())

    return Counted
