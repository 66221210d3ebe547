"""msgpack as RQ's only serializer; importing this module takes pickle out of RQ's reach.

RQ falls back to pickle wherever a caller names no serializer (its own registries, `Worker.all`,
rq-dashboard). The fallback is looked up in a module global at call time, so replacing that global
once per process closes every such path: bytes from Redis are never unpickled.
"""

from __future__ import annotations

from typing import Any

import msgpack
import rq.serializers


def pack(obj: Any) -> bytes:
    """msgpack bytes of plain data (None, bool, int, float, str, bytes, list, dict)."""
    return bytes(msgpack.packb(obj, use_bin_type=True))


def unpack(data: bytes) -> Any:
    """Plain data from msgpack bytes. Raises ValueError on anything malformed."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


class Msgpack:
    """The two functions RQ asks of a serializer."""

    @staticmethod
    def dumps(obj: Any, /) -> bytes:
        return pack(obj)

    @staticmethod
    def loads(data: bytes, /) -> Any:
        return unpack(data)


def _forbid_pickle() -> None:
    for name in ("PickleSerializer", "DefaultSerializer"):
        setattr(rq.serializers, name, Msgpack)
    rq.serializers.SERIALIZER_ALIASES.update(pickle=Msgpack, msgpack=Msgpack)


_forbid_pickle()
