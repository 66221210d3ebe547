"""The format of what Tandem keeps in Redis: one number, settled before anything is read.

A Redis of an older format is brought to the present one, step by step, each step found under the
number it starts from; one of a newer format is refused and left alone. Fields that a record lacks
have defaults and fields that it has too many of are ignored, so the number changes only where an
old record would be misread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import redis

from scheduler.passwords import ConfigError

FORMAT = 1
KEY = "tandem:format"
MIGRATIONS: dict[int, Callable[[redis.Redis], None]] = {}
"""Steps may be repeated: one that was broken off is begun again."""


def settle(
    client: redis.Redis,
    wanted: int = FORMAT,
    steps: Mapping[int, Callable[[redis.Redis], None]] = MIGRATIONS,
) -> None:
    """See to it that Redis holds records of format `wanted`. Raises ConfigError, RedisError."""
    client.set(KEY, wanted, nx=True)
    value = cast("bytes | None", client.get(KEY)) or b""
    found = int(value) if value.isdigit() else 0
    if found > wanted:
        raise ConfigError(
            f"Redis holds records of format {found} and this program knows {wanted}: "
            "a newer Tandem has used it; update this machine, or restore the backup made before "
            "the update"
        )
    for number in range(found, wanted):
        if number not in steps:
            raise ConfigError(
                f"Redis holds records of format {number}, which this program cannot migrate: let "
                "the version that made them finish its jobs, then start with an empty Redis"
            )
        steps[number](client)
        client.set(KEY, number + 1)
