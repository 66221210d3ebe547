"""The Lua scripts: every change of a job is one call of one of them, atomic in Redis."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import redis
from redis.exceptions import NoScriptError
from rq.defaults import RQ_KEY_PREFIX

if not re.fullmatch(r"[A-Za-z0-9_.:-]+", RQ_KEY_PREFIX):
    raise ImportError(
        f"RQ_KEY_PREFIX={RQ_KEY_PREFIX!r}: use only letters, digits, '_', '.', ':' and '-'"
    )


_FOLDER = Path(__file__).parent / "lua"


@functools.cache
def source(name: str) -> str:
    """Text of script `name`, shared functions included."""
    parts = ("lib.lua", "policy.lua", f"{name}.lua")
    text = "".join((_FOLDER / part).read_text(encoding="utf-8") for part in parts)
    return text.replace("@RQ@", RQ_KEY_PREFIX)


@functools.cache
def digest(name: str) -> str:
    """The server's name for the script: SHA-1 of its text."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def load(client: redis.Redis) -> int:
    """Give the server all scripts that it does not have; how many that were.

    A server that has started anew has none. Whoever calls one first would send its text, about
    18,000 bytes, while a request waits.
    """
    lacking = [
        name
        for name, there in zip(names(), client.script_exists(*map(digest, names())), strict=True)
        if not there
    ]
    for name in lacking:
        client.script_load(source(name))
    return len(lacking)


@functools.cache
def names() -> tuple[str, ...]:
    """Those that are called while requests are served: not the shared parts, nor a simulation's."""
    found = {path.stem for path in _FOLDER.glob("*.lua")}
    return tuple(sorted(found - {"lib", "policy", "simulate"}))


def _argument(args: Mapping[str, Any]) -> bytes:
    # Lua's cmsgpack knows the raw types only, not msgpack's later bin and str8.
    return bytes(msgpack.packb(args, use_bin_type=False))


def call(client: redis.Redis, name: str, args: Mapping[str, Any], *raw: bytes) -> Any:
    """Run one script. `args` travel as one msgpack map, `raw` as further arguments."""
    argv = (_argument(args), *raw)
    try:
        return client.evalsha(digest(name), 0, *argv)
    except NoScriptError:
        return client.eval(source(name), 0, *argv)
