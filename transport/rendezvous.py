"""How the two ranks of a JACCL group meet: an all-gather over Redis, bounded and fenced by epoch.

It replaces the coordinator's socket, which waits for ever and takes any stranger for a rank. Every
message has a list of its own, named by link, epoch, nonce, step and both ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from transport.errors import LinkError

Gather = Callable[[bytes, int], bytes]


def side_channel(setting: Mapping[str, Any]) -> Callable[[int, int], Gather]:
    """The `all_gather_factory` of mx.distributed.init for one epoch.

    `setting` is the child's: redis_url, link, epoch, nonce (hex), deadline (seconds for all steps).
    """
    import redis

    seconds = float(setting["deadline"])
    client = redis.Redis.from_url(setting["redis_url"], socket_timeout=seconds + 5)
    prefix = f"tandem:link:meet:{setting['link']}:{setting['epoch']}:{setting['nonce']}"
    limit = time.monotonic() + seconds
    return lambda rank, size: _Meeting(client, prefix, limit, rank, size).gather


class _Meeting:
    def __init__(self, client: Any, prefix: str, limit: float, rank: int, size: int) -> None:
        self._client = client
        self._prefix = prefix
        self._limit = limit
        self._rank = rank
        self._size = size
        self._step = 0

    def gather(self, mine: bytes, nbytes: int) -> bytes:
        """Everybody's bytes in rank order; raises LinkError when a rank does not come in time."""
        self._step += 1
        for other in range(self._size):
            if other != self._rank:
                key = self._key(self._rank, other)
                with self._client.pipeline(transaction=False) as pipe:
                    pipe.rpush(key, bytes(mine)).expire(key, 60).execute()
        return b"".join(
            bytes(mine) if rank == self._rank else self._take(rank, nbytes)
            for rank in range(self._size)
        )

    def _take(self, rank: int, nbytes: int) -> bytes:
        left = self._limit - time.monotonic()
        got = self._client.blpop([self._key(rank, self._rank)], timeout=max(0.1, left))
        if got is None:
            raise LinkError(f"rank {rank} did not come to the meeting in time")
        if len(got[1]) != nbytes:
            raise LinkError(
                f"rank {rank} sent {len(got[1])} bytes, not {nbytes}: another mlx or cable map",
                "version",
            )
        return bytes(got[1])

    def _key(self, source: int, target: int) -> str:
        return f"{self._prefix}:{self._step}:{source}>{target}"
