"""What two hosts hold while they run, sampled from /proc, and whether it stays flat."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import redis

from scheduler.bench.hosts import TwoHosts
from scheduler.passwords import Passwords, with_password
from store.errors import StoreError
from store.rpc import StoreClient

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: By how much the last quarter may be above the second: memory is measured with its fragments.
TOLERANCE = 0.15
#: ... or by this much, where a number is small. One commit may use 64 MB of pages that were free.
SLACK = {
    "processes": 1.0,
    "threads": 6.0,
    "descriptors": 12.0,
    "memory_mb": 40.0,
    "shm_files": 0.0,
    "shm_mb": 0.0,
    "store_mb": 64.0,
    "store_live_mb": 8.0,
    "redis_mb": 6.0,
    "redis_keys": 60.0,
    "files": 6.0,
}


@dataclass(frozen=True)
class Sample:
    """Sums over both hosts, `at` seconds after the start."""

    at: float
    processes: float
    threads: float
    descriptors: float
    memory_mb: float
    shm_files: float
    shm_mb: float
    store_mb: float
    store_live_mb: float
    redis_mb: float
    redis_keys: float
    files: float


def take(hosts: TwoHosts, began: float) -> Sample:
    """One sample. Processes that end meanwhile are left out."""
    processes = threads = descriptors = memory = 0
    for host in (hosts.decode, hosts.prefill):
        for pid in host.pids():
            at = Path(f"/proc/{pid}")
            with contextlib.suppress(OSError, IndexError):
                # Without what is mapped of files: the store's lies in the page cache, once.
                _, resident, shared, *_ = (at / "statm").read_text().split()
                memory += (int(resident) - int(shared)) * _PAGE
                descriptors += len(os.listdir(at / "fd"))
                threads += len(os.listdir(at / "task"))
                processes += 1
    shm = list(Path("/dev/shm").glob("*tandem*")) if os.path.isdir("/dev/shm") else []
    sizes = 0
    for entry in shm:
        with contextlib.suppress(OSError):
            sizes += entry.stat().st_size
    store = hosts.decode.data / "store" / "data.mdb"
    memory_redis, keys = _redis(hosts)
    files = sum(
        len(names)
        for host in (hosts.decode, hosts.prefill)
        for _, _, names in os.walk(host.directory)
    )
    return Sample(
        at=time.monotonic() - began,
        processes=processes,
        threads=threads,
        descriptors=descriptors,
        memory_mb=memory / 1e6,
        shm_files=len(shm),
        shm_mb=sizes / 1e6,
        store_mb=store.stat().st_size / 1e6 if store.exists() else 0.0,
        store_live_mb=_live(hosts) / 1e6,
        redis_mb=memory_redis / 1e6,
        redis_keys=keys,
        files=files,
    )


def _live(hosts: TwoHosts) -> float:
    """Bytes of the store that are in use: its file never shrinks."""
    for path in hosts.decode.runtime.glob("tandem-*/store-*.sock"):
        client = StoreClient(path, timeout=3.0)
        try:
            return float(client.stats()["live_bytes"])
        except StoreError:
            continue
        finally:
            client.close()
    return 0.0


def _redis(hosts: TwoHosts) -> tuple[float, float]:
    for path in hosts.decode.runtime.glob("tandem-*/redis.sock"):
        words = Passwords.read(hosts.decode.data / "secrets" / "redis")
        url = with_password(f"unix://{path}?db=0", words, "admin")
        with (
            contextlib.suppress(redis.RedisError, OSError),
            redis.Redis.from_url(url, socket_timeout=3) as client,
        ):
            return float(client.info("memory")["used_memory"]), float(client.dbsize())
    return 0.0, 0.0


@dataclass(frozen=True)
class Course:
    """A number's median in the second and in the last quarter, its largest, and the verdict."""

    name: str
    early: float
    late: float
    most: float
    flat: bool


def courses(samples: list[Sample]) -> list[Course]:
    """How each number went after the first quarter, which is the warm-up."""
    if len(samples) < 8:
        return []
    last = samples[-1].at
    second = [asdict(one) for one in samples if last / 4 <= one.at < last / 2]
    fourth = [asdict(one) for one in samples if one.at >= last * 3 / 4]
    found = []
    for field in fields(Sample):
        if field.name == "at" or not second or not fourth:
            continue
        early = statistics.median(one[field.name] for one in second)
        late = statistics.median(one[field.name] for one in fourth)
        most = max(asdict(one)[field.name] for one in samples)
        allowed = early + max(SLACK[field.name], TOLERANCE * early)
        found.append(Course(field.name, early, late, most, late <= allowed))
    return found
