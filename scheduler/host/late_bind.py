"""Let our Redis listen on an address that appears after it has started.

The address of a cable is there only while the cable is. The server starts without it, serves this
machine over its socket, and is told to listen once the address can be bound.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from scheduler.config import Config, ConfigError

EVERY_SECONDS = 3.0


def keep_listening(config: Config) -> None:
    """See to it that the server listens on `redis.listen`; never returns."""
    where = config.redis.listen_address
    assert where is not None
    while True:
        time.sleep(EVERY_SECONDS)
        if not _answers(where) and is_here(where[0]):
            with contextlib.suppress(redis.RedisError, OSError, ConfigError):
                _bind(config, where[0])
                print(f"listening on {config.redis.listen}, which was not there before",
                      file=sys.stderr, flush=True)  # fmt: skip


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _answers(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, timeout=2).close()
    except OSError:
        return False
    return True


def _bind(config: Config, host: str) -> None:
    url = config.redis_url_of("admin")
    with redis.Redis.from_url(url, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
        client.config_set("bind", host)
