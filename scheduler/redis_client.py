"""Connections to Redis with timeouts and retries that fit who uses them.

redis-py's defaults (5 s socket timeout, ten retries) turn one blocking read into a minute of
silence. Here a command waits `timeout` seconds, and is sent again for about `patience` seconds
while the server is away; every script that may be sent twice recognises its second arrival.
"""

from __future__ import annotations

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

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

#: Longest time in seconds that one blocking command waits on the server.
MAX_BLOCK = 1.0

_RETRY_EVERY = 0.25


def connect(url: str, *, timeout: float = 5.0, patience: float = 15.0) -> redis.Redis:
    """A client with its own pool. `timeout` and `patience` in seconds; patience 0: no retry."""
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        health_check_interval=0,
        retry=Retry(ConstantBackoff(_RETRY_EVERY), int(patience / _RETRY_EVERY)),
    )


def connect_async(url: str, *, timeout: float = 5.0, patience: float = 5.0) -> redis.asyncio.Redis:
    """The asyncio counterpart of `connect`."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        health_check_interval=0,
        retry=AsyncRetry(ConstantBackoff(_RETRY_EVERY), int(patience / _RETRY_EVERY)),
    )
