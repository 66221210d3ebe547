"""A copy of what a machine keeps, made while it runs, and put back while it does not.

Redis is copied first, then the store. A turn is in the store before its job is reported as ended,
so whatever the copy of Redis calls ended has its turn in the copy of the store; what it calls
running is run again after a restore, as after a crash. Each copy is proven by opening it: the store
by LMDB and its own check, Redis' by a server that loads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis

from scheduler.config import Config, ConfigError
from scheduler.host import data_dir, redis_server
from scheduler.passwords import write_private
from scheduler.redis_client import connect
from store.errors import StoreError, StoreUnavailable
from store.rpc import StoreClient
from store.store import Store

FORMAT = 1
MANIFEST = "tandem-backup.json"
KEPT = ("files", "batches")
"""Uploaded files, what batches have written, and how far batches are."""
SAVE_SECONDS = 600.0
_LOAD_SECONDS = 600.0
_BLOCK = 4 << 20

Say = Callable[[str], None]


def backup(config: Config, target: Path, say: Say) -> dict[str, Any]:
    """Copy Redis, the store and the configuration into the new directory `target`.

    Works while `tandem up` runs and while it does not. Raises ConfigError with cause and cure;
    `target` is then not there.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: a backup is a directory of its own")
    kept = ("redis", "store", "secrets", "tandem.toml", "owners.json", *KEPT)
    if not any((config.data_dir / name).exists() for name in kept):
        raise ConfigError(
            f"there is nothing to copy in {config.data_dir}: name the data directory with --data"
        )
    partial = target.with_name(target.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        found: dict[str, Any] = {"format": FORMAT, "tandem": version("tandem-serve")}
        found |= {"made": time.time(), "node": config.node}
        found["redis"] = _save_redis(config, partial, say)
        found["store"] = _save_store(config, partial, say)
        _save_files(config, partial)
        if found["redis"]:
            (partial / "redis" / "dump.rdb").chmod(0o600)
        say("checking the copy")
        _prove_store(partial)
        _prove_redis(partial, found["redis"])
        found["files"] = {
            str(path.relative_to(partial)): [path.stat().st_size, _digest(path)]
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        write_private(partial / MANIFEST, json.dumps(found, indent=1))
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(f"the backup cannot be written: {error}") from None
    except (StoreError, redis.RedisError) as error:
        raise ConfigError(f"the backup failed: {str(error).splitlines()[0]}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return found


def restore(config: Config, source: Path, say: Say, *, replace: bool = False) -> dict[str, Any]:
    """Put a backup into the data directory, which nothing may use and, unless told, nothing hold.

    With `replace` what is there is moved aside, into `before-restore-DATE`. Raises ConfigError,
    and then nothing has been changed.
    """
    found = check(source, say)
    with data_dir.Claim(config.data_dir):
        held = [name for name in ("redis", "store") if _holds(config.data_dir / name)]
        if held and not replace:
            raise ConfigError(
                f"{config.data_dir} holds a {' and a '.join(held)} already: pass --replace to move "
                "it aside, or choose another directory with --data"
            )
        needed = sum(size for size, _ in found["files"].values())
        if 2 * needed + (64 << 20) > shutil.disk_usage(config.data_dir).free:
            raise ConfigError(f"{config.data_dir} has no room for {2 * needed / 1e9:.1f} GB")
        fresh = Path(tempfile.mkdtemp(prefix="restore-", dir=config.data_dir))
        try:
            if found["store"]:
                say("the store")
                (fresh / "store").mkdir(mode=0o700)
                shutil.copyfile(source / "store" / "data.mdb", fresh / "store" / "data.mdb")
                (fresh / "store" / "data.mdb").chmod(0o600)
            if found["redis"]:
                say("Redis")
                _revive_redis(source, fresh)
            for name in KEPT:
                if (source / name).is_dir():
                    shutil.copytree(source / name, fresh / name)
            aside = config.data_dir / time.strftime("before-restore-%Y-%m-%d-%H%M%S")
            for name in ("redis", "store", *KEPT):
                if (config.data_dir / name).exists() and (fresh / name).exists():
                    aside.mkdir(mode=0o700, exist_ok=True)
                    os.replace(config.data_dir / name, aside / name)
                if (fresh / name).exists():
                    os.replace(fresh / name, config.data_dir / name)
        except OSError as error:
            raise ConfigError(f"the restore failed: {error}") from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return found


def check(source: Path, say: Say) -> dict[str, Any]:
    """Read a whole backup and compare it with its list. Raises ConfigError where it differs."""
    try:
        found: dict[str, Any] = json.loads((source / MANIFEST).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(
                f"{source} is a backup of format {found['format']}, made by Tandem "
                f"{found['tandem']}, and this program reads {FORMAT}: use that version"
            )
        say("reading the backup")
        for name, (size, digest) in found["files"].items():
            path = source / name
            if path.stat().st_size != size or _digest(path) != digest:
                raise ConfigError(f"{path} is damaged: use another backup")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} is not a whole backup of Tandem's ({error})") from None
    return found


# --- Redis ----------------------------------------------------------------------------------------


def _save_redis(config: Config, partial: Path, say: Say) -> dict[str, Any]:
    """A point in time of our own Redis; empty for one that Tandem does not run."""
    if config.redis.url:
        say("Redis: not this machine's own, so it is not in this backup")
        return {}
    (partial / "redis").mkdir(mode=0o700)
    if data_dir.owner(config.data_dir) is None:
        return _save_resting(config, partial)
    say("Redis: saving a point in time")
    with connect(config.redis_url_of("admin"), timeout=30.0, patience=0) as client:
        before = int(client.info("persistence")["rdb_last_save_time"])
        _await_save(client)
        started = time.time()
        client.bgsave()
        info = _await_save(client)
        if info["rdb_last_bgsave_status"] != "ok":
            raise ConfigError("Redis could not save a copy: look at redis.log, is its disk full?")
        if int(info["rdb_last_save_time"]) < max(before, int(started) - 1):
            raise ConfigError("Redis saved no new copy: look at redis.log")
        name = client.config_get("dbfilename")["dbfilename"]
        server = redis_server.probe(config.redis_url_of("admin"), 5.0)
    os.replace(config.data_dir / "redis" / name, partial / "redis" / "dump.rdb")
    return {"server": server}


def _await_save(client: redis.Redis) -> dict[str, Any]:
    end = time.monotonic() + SAVE_SECONDS
    while (info := dict(client.info("persistence")))["rdb_bgsave_in_progress"]:
        if time.monotonic() > end:
            raise ConfigError(f"Redis has not saved within {SAVE_SECONDS:.0f} s: try again")
        time.sleep(0.05)
    return info


def _save_resting(config: Config, partial: Path) -> dict[str, Any]:
    """The same from the files of a server that does not run, loaded by one that we start."""
    source = config.data_dir / "redis" / "appendonlydir"
    if not source.exists():
        return {}
    with tempfile.TemporaryDirectory(prefix="tandem-", dir=partial) as folder:
        shutil.copytree(source, Path(folder) / "appendonlydir")
        with _server(Path(folder), appendonly=True) as (client, server):
            client.save()
            shutil.move(Path(folder) / "dump.rdb", partial / "redis" / "dump.rdb")
    return {"server": server}


def _prove_redis(partial: Path, found: dict[str, Any]) -> None:
    """Load the copy into a server of its own and count its keys."""
    if found:
        with tempfile.TemporaryDirectory(prefix="tandem-", dir=partial) as folder:
            shutil.copyfile(partial / "redis" / "dump.rdb", Path(folder) / "dump.rdb")
            with _server(Path(folder), appendonly=False) as (client, _):
                found["keys"] = int(client.dbsize())


def _revive_redis(source: Path, fresh: Path) -> None:
    """An append-only file that holds what the copy does, made by the server itself."""
    folder = fresh / "redis"
    folder.mkdir(mode=0o700)
    shutil.copyfile(source / "redis" / "dump.rdb", folder / "dump.rdb")
    with _server(folder, appendonly=False) as (client, _):
        client.config_set("appendonly", "yes")
        end = time.monotonic() + SAVE_SECONDS
        while True:
            info = client.info("persistence")
            if not info["aof_rewrite_in_progress"] and not info.get("aof_rewrite_scheduled"):
                break
            if time.monotonic() > end:
                raise ConfigError("Redis has not written its append-only file in time")
            time.sleep(0.05)
        if info["aof_last_bgrewrite_status"] != "ok":
            raise ConfigError("Redis could not write its append-only file: is the disk full?")
    (folder / "dump.rdb").unlink()


@contextlib.contextmanager
def _server(folder: Path, *, appendonly: bool) -> Iterator[tuple[redis.Redis, str]]:
    """A private server on the files in `folder`; its client and its name and version."""
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        socket = f"{short}/r.sock"
        command = [
            str(redis_server.find().path), "--port", "0", "--unixsocket", socket,
            "--unixsocketperm", "700", "--dir", str(folder), "--save", "", "--daemonize", "no",
            "--appendonly", "yes" if appendonly else "no",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"unix://{socket}"
            try:
                server = redis_server.probe(url, _LOAD_SECONDS if process.poll() is None else 0.0)
            except redis_server.RedisUnavailable as error:
                raise ConfigError(f"the copy of Redis cannot be loaded: {error}") from None
            with connect(url, timeout=60.0, patience=0) as client:
                yield client, server
        finally:
            process.terminate()
            process.wait()


# --- the store, and files -------------------------------------------------------------------------


def _save_store(config: Config, partial: Path, say: Say) -> dict[str, Any]:
    """A consistent copy of the store, made by its owner or, where none runs, by us."""
    if not (config.data_dir / "store" / "data.mdb").exists():
        return {}
    say("the store: copying while it is in use")
    folder = partial / "store"
    folder.mkdir(mode=0o700)
    client = StoreClient(config.store_socket, timeout=24 * 3600.0)
    try:
        client.call("copy", path=str(folder))
    except StoreUnavailable:
        store = Store.open(config.data_dir / "store", 0, create=False)
        try:
            store.copy(folder)
        finally:
            store.close()
    finally:
        client.close()
    return {"bytes": (folder / "data.mdb").stat().st_size}


def _prove_store(partial: Path) -> None:
    """Open the copy and walk it; a save that was under way is cleared away, as after a crash."""
    folder = partial / "store"
    if not folder.exists():
        return
    store = Store.open(folder, 0, create=False)
    try:
        report = store.check(payload=False)
    finally:
        store.close()
    for name in ("lock.mdb", "owner.lock"):
        (folder / name).unlink(missing_ok=True)
    if not report.clean:
        raise ConfigError(
            f"the store has {report.found} problems, the first: {report.problems[0]}: run "
            "`tandem store check --repair`, then make the backup again"
        )


def _save_files(config: Config, partial: Path) -> None:
    """Configuration and secrets, where they lie in the data directory; files and batches."""
    for name in KEPT:
        if (config.data_dir / name).is_dir():
            (partial / name).mkdir(mode=0o700)
            for path in (config.data_dir / name).iterdir():
                # One may be deleted meanwhile; its record then leads to nothing, as it should.
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(path, partial / name / path.name)
                    (partial / name / path.name).chmod(0o600)
    for name in ("tandem.toml", "secrets", "owners.json"):
        path = config.data_dir / name
        if path.is_dir():
            shutil.copytree(path, partial / name)
        elif path.is_file():
            shutil.copyfile(path, partial / name)
            (partial / name).chmod(0o600)


def _holds(path: Path) -> bool:
    return path.exists() and any(
        file.suffix in (".mdb", ".aof", ".rdb", ".manifest") for file in path.rglob("*")
    )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
