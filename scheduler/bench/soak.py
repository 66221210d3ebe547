"""`tandem bench soak`: two hosts under random load, kills and cable cuts; every answer is checked.

What is random follows from the seed; when processes meet is the machine's. One fault at a time,
and the next comes when the service is ready again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scheduler.bench.hosts import Host, HostsFailed, TwoHosts, set_up
from scheduler.bench.soak_load import Client, Oracle, Tally
from scheduler.bench.soak_measure import Course, Sample, courses, take
from scheduler.bench.soak_report import markdown
from scheduler.config import load
from scheduler.host.model_files import ensure

READY_SECONDS = 240.0
SAMPLE_SECONDS = 5.0
SECTIONS: dict[str, dict[str, Any]] = {
    "store": {"size_gb": 0.2, "idle_seconds": 2.0, "hot_gb": 1, "warm_gb": 0.1},
    # Records of ended jobs must come and go within the run.
    "jobs": {"lease_seconds": 5, "drain_seconds": 5, "max_attempts": 100, "result_days": 0.003},
    "prefill": {"chunk": 64},
    "link": {"deadline_seconds": 6.0},
}


@dataclass
class Result:
    """What a soak found."""

    minutes: float
    seed: int
    model: str
    cables: bool
    tally: Tally
    faults: Counter[str] = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    live: int = -1
    trouble: list[str] = field(default_factory=list)

    @property
    def courses(self) -> list[Course]:
        """How the sampled numbers went."""
        return courses(self.samples)

    @property
    def good(self) -> bool:
        """Nothing lost, nothing wrong, nothing failed, nothing left, everything flat."""
        tally = self.tally
        bad = tally.lost or tally.wrong or tally.failed or tally.unchecked or self.trouble
        return not bad and self.live == 0 and all(one.flat for one in self.courses)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        tally = self.tally
        return {
            "minutes": self.minutes, "seed": self.seed, "model": self.model, "good": self.good,
            "cables": self.cables, "accepted": tally.accepted, "refused": tally.refused,
            "unknown": tally.unknown, "ended": dict(tally.ended), "paths": dict(tally.paths),
            "checked": tally.checked, "wrong": tally.wrong, "lost": tally.lost,
            "failed": tally.failed, "unchecked": tally.unchecked, "left_live": self.live,
            "faults": dict(self.faults), "trouble": self.trouble,
            "recovery_median_s": statistics.median(self.recovery) if self.recovery else None,
            "recovery_max_s": max(self.recovery, default=None),
            "courses": [asdict(one) for one in self.courses],
        }  # fmt: skip


class Soak:
    """One run. `say` is told a line now and then."""

    def __init__(self, hosts: TwoHosts, model: Path, seed: int, say: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._model = model
        self._say = say
        self._random = random.Random(f"faults-{seed}")
        self.result = Result(0.0, seed, model.name, hosts.cables, Tally())
        self._began = time.monotonic()
        self._token = ""

    def run(self, minutes: float, clients: int, pause: float) -> Result:
        """Set the hosts up, then load and break them for `minutes`; see Result."""
        hosts, result = self._hosts, self.result
        self._token = set_up(hosts, self._model, **SECTIONS)
        hosts.decode.up()
        hosts.prefill.up()
        self._ready()
        self._say(f"both hosts are ready; cables can be cut: {hosts.cables}")
        self._began = time.monotonic()
        oracle = Oracle(hosts.decode, self._model, result.tally)
        crowd = [Client(i, result.seed, self.url, self._token, oracle) for i in range(clients)]
        sampler = threading.Thread(target=self._sample, daemon=True)
        for thread in (*crowd, sampler):
            thread.start()
        try:
            self._break(minutes * 60, pause)
        except HostsFailed as error:
            result.trouble.append(str(error))
            self._say(f"trouble: {error}\n{hosts.decode.logs()}\n{hosts.prefill.logs()}")
        finally:
            result.minutes = (time.monotonic() - self._began) / 60
            self._say(f"the load ends after {result.minutes:.1f} minutes; its answers are checked")
            for client in crowd:
                client.stop.set()
            for client in crowd:
                client.join(900)
            oracle.finish()
        result.live = self._live()
        return result

    @property
    def url(self) -> str:
        """The API of the first host."""
        return f"http://{self._hosts.outside}:8420"

    def _break(self, seconds: float, pause: float) -> None:
        faults: dict[str, Callable[[], None]] = {
            "kill prefill worker": lambda: self._kill(self._hosts.prefill, "worker_prefill"),
            "kill decode worker": lambda: self._kill(self._hosts.decode, "worker_decode"),
            "kill API": lambda: self._kill(self._hosts.decode, "\0serve"),
            "kill Redis": lambda: self._kill(self._hosts.decode, "-server"),
            "freeze prefill worker": lambda: self._freeze(self._hosts.prefill, "worker_prefill"),
            "power off the prefill host": lambda: self._reboot(self._hosts.prefill),
            "power off the decode host": lambda: self._reboot(self._hosts.decode),
            "restart the prefill host": lambda: self._restart(self._hosts.prefill),
            "restart the decode host": lambda: self._restart(self._hosts.decode),
        }
        if self._hosts.cables:
            faults["cut the cable"] = self._cut
            faults["cut the cable briefly"] = lambda: self._cut(2.0)
        names = sorted(faults)
        while (left := self._began + seconds - time.monotonic()) > 0:
            time.sleep(min(left, self._random.expovariate(1 / pause)))
            if time.monotonic() >= self._began + seconds:
                break
            name = self._random.choice(names)
            tally = self.result.tally
            self._say(
                f"{time.monotonic() - self._began:6.0f} s  {name}; {tally.accepted} accepted, "
                f"{sum(tally.ended.values())} ended, {tally.checked} checked, "
                f"{len(tally.wrong)} wrong"
            )
            faults[name]()
            began = time.monotonic()
            self._ready()
            self.result.faults[name] += 1
            self.result.recovery.append(time.monotonic() - began)

    def _kill(self, host: Host, word: str) -> None:
        pid = host.service(word)
        if pid is None:
            raise HostsFailed(f"{word.strip()} does not run on the {host.name} host")
        os.kill(pid, signal.SIGKILL)

    def _freeze(self, host: Host, word: str) -> None:
        pid = host.service(word)
        if pid is None:
            raise HostsFailed(f"{word} does not run on the {host.name} host")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(1, 12))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    def _reboot(self, host: Host) -> None:
        host.crash()
        time.sleep(self._random.uniform(0, 8))
        host.up()

    def _restart(self, host: Host) -> None:
        host.down()
        host.up()

    def _cut(self, seconds: float = 0.0) -> None:
        self._hosts.cut()
        time.sleep(seconds or self._random.uniform(5, 30))
        self._hosts.mend()

    def _ready(self) -> None:
        """Wait until a request would be served. Raises HostsFailed."""
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            time.sleep(0.5)
            try:
                if httpx.get(f"{self.url}/ready", headers=self._headers(), timeout=5).is_success:
                    return
            except httpx.HTTPError:
                continue
        raise HostsFailed(f"not ready within {READY_SECONDS:.0f} s")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _live(self) -> int:
        """Jobs that are still waiting or running when all clients have gone; unknown ones end."""
        for _ in range(120):
            try:
                answer = httpx.get(
                    f"{self.url}/v1/responses", params={"status": "live"}, headers=self._headers(),
                    timeout=20,
                )  # fmt: skip
                left = len(answer.json()["data"])
            except (httpx.HTTPError, ValueError, KeyError):
                left = -1
            if left == 0:
                return 0
            time.sleep(1)
        return left

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            sample = take(self._hosts, self._began)
            if sample.processes:
                self.result.samples.append(sample)


def register(subparsers: Any) -> None:
    """Add `soak` to the benchmarks."""
    parser = subparsers.add_parser(
        "soak",
        help="two hosts under load, kills and cable cuts, for half an hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--pause", type=float, default=30.0, help="mean seconds between faults")
    parser.add_argument("--model", metavar="NAME", help="the configured one, the small default")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a Markdown report")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when nothing was lost or wrong and everything stayed flat."""
    config = ensure(load(None, {"model": args.model}), lambda *_: None)
    assert config.model_dir is not None
    directory = Path(tempfile.mkdtemp(prefix="tandem-soak-"))

    def say(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    try:
        with TwoHosts(directory) as hosts:
            soak = Soak(hosts, config.model_dir, args.seed, say)
            result = soak.run(args.minutes, args.clients, args.pause)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if args.report:
        args.report.write_text(markdown(result.to_dict()), encoding="utf-8")
    print(json.dumps(result.to_dict()) if args.json else markdown(result.to_dict()))
    return 0 if result.good else 1
