"""Records a run of a real stack, with the profiles of its two workers, for `test_replay.py`.

    python -P tests/scheduler/record_history.py MODEL_DIR OUTPUT_DIR [--shared]

Every worker has a processor core of its own from its start (a matrix library makes a thread for
every core that it may use, and too many of them on one core disturb each other); with --shared both
have all cores, as `tandem up` runs them. Either way what the workers cost each other is measured.

Everything that the replay is told is measured before the run, or on other requests: rates by
`tandem calibrate`'s own code, costs in service from a few requests that are sent one after another.
The rates are measured once more after the run. Where they differ by more than a tenth from those
before, the machine was not quiet: nothing is written, and the status is 1. Not run by the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from scheduler.cli import main as tandem
from scheduler.config import Config
from scheduler.host.stack import Stack, free_port
from scheduler.host.supervisor import Service
from scheduler.redis_client import connect
from scheduler.simulation import history

REQUESTS, EVERY = 70, 1.0
ALONE = 14
QUIET = 0.10
CORES = {"prefill": 0, "decode": 1}
CHUNK = 128
#: Chunks, tokens to prefill, widths, contexts, lengths of short forwards: those that the run has.
PLAN: Any = ([CHUNK // 2, CHUNK], 256, [1, 2, 4], [64, 320], [16, 32, 48])
WORDS = ("river", "was", "wide", "and", "slow", "nobody", "on", "the", "far", "bank", "had", "seen")


def pinned(core: int | None) -> list[str]:
    """How a command line begins that is to run on one core; on all of them for None."""
    return [] if core is None else ["taskset", "-c", str(core)]


# --- rates ---------------------------------------------------------------------------------------


def calibrate(model: Path, shared: bool, *, beside: bool) -> dict[str, dict[str, Any]]:
    """A profile for each role, measured as its worker will run, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if shared and found:
            found[role] = found[other]
            break
        command = pinned(None if shared else CORES[role])
        command += [sys.executable, "-P", __file__, str(model), "-", "--measure", role]
        command += ["--shared"] if shared else []
        command += ["--beside"] if beside else []
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        found[role] = json.loads(out)
    return found


def measure(model_dir: Path, role: str, shared: bool, beside: bool) -> None:
    """What `tandem calibrate --beside` does, for fewer sizes, in a process of its own."""
    from engine.device import prepare

    device = prepare()  # before anything imports MLX
    from engine import neighbour
    from engine.calibrate import measure
    from engine.model import load

    model = load(model_dir, device)
    facts = measure(model, *PLAN).facts()
    if beside:
        other = CORES["decode" if role == "prefill" else "prefill"]
        roles = neighbour.ROLES if shared else (role,)
        facts["beside"] = neighbour.beside(
            model, CHUNK, roles=roles, prefix=pinned(None if shared else other)
        )
    print(json.dumps({"version": 1, "source": "measured before the recorded run", **facts}))


def change(one: dict[str, Any], other: dict[str, Any], kind: str, value: str) -> float:
    """By how much the measurements of one kind have changed, in the middle: 1 for not at all."""
    pairs = zip(one[kind], other[kind], strict=True)
    return statistics.median(second[value] / first[value] for first, second in pairs)


def quiet(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    """Whether the rates after the run are those before it; says so."""
    good = True
    for role in CORES:
        for kind, value in (("prefill", "rate"), ("forwards", "seconds"), ("decode", "rate")):
            found = change(before[role], after[role], kind, value)
            good = good and abs(found - 1) <= QUIET
            print(f"{role} worker, {kind}: {found:.3f} times the {value} of before", flush=True)
    return good


# --- requests ------------------------------------------------------------------------------------


def prompt(chance: random.Random, head: str) -> str:
    """Text of about 30 to 200 tokens."""
    words = int(chance.choice((10, 20, 40, 60, 110, 170)) * chance.uniform(0.7, 1.2))
    return " ".join([head, *(chance.choice(WORDS) for _ in range(words))])


def ended(http: httpx.Client, response: str) -> bool:
    status: str = http.get(f"/v1/responses/{response}").json()["status"]
    assert status != "failed", response
    return status in ("completed", "incomplete")


def send(http: httpx.Client, text: str, tokens: int, **more: Any) -> str:
    body = {"background": True, "temperature": 0, "max_output_tokens": tokens, "input": text}
    answer = http.post("/v1/responses", json={**body, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def one_by_one(http: httpx.Client) -> None:
    """Requests that each have the stack for themselves."""
    chance = random.Random(3)
    for number in range(ALONE):
        response = send(http, prompt(chance, f"Alone {number}."), chance.randint(3, 8))
        while not ended(http, response):
            time.sleep(0.1)


def drive(http: httpx.Client) -> None:
    """Requests of many lengths at random times; one in five continues an earlier answer."""
    chance = random.Random(11)
    ids: list[str] = []
    begin, at = time.monotonic(), 0.0
    for number in range(REQUESTS):
        at += chance.expovariate(1 / EVERY)
        text, tokens = prompt(chance, f"Note {number}."), chance.randint(3, 8)
        continued, pick = chance.random() < 0.2, chance.random()
        time.sleep(max(0.0, begin + at - time.monotonic()))
        more = {}
        if continued and number > 10:
            done = [response for response in ids[:-3] if ended(http, response)]
            more["previous_response_id"] = done[int(pick * len(done))]
            text = " ".join(text.split()[:15])
        ids.append(send(http, text, tokens, **more))
    for response in ids:
        while not ended(http, response):
            time.sleep(0.2)


# --- the run -------------------------------------------------------------------------------------


class Pinned(Stack):
    """A stack each of whose workers has a core of its own from its first moment on."""

    def _add(self, name: str, *, stop_last: bool = False) -> None:
        add = self.supervisor.add

        def onto(service: Service) -> Service:
            service.command = [*pinned(CORES.get(name)), *service.command]
            return add(service)

        self.supervisor.add = onto  # type: ignore[method-assign]  # for this one service
        try:
            super()._add(name, stop_last=stop_last)
        finally:
            self.supervisor.add = add  # type: ignore[method-assign]


def serve(model: Path, folder: Path, shared: bool) -> tuple[list[history.Past], list[history.Past]]:
    """Requests that were alone, and the recorded run."""
    config = Config.model_validate(
        {
            "data_dir": folder / "data",
            "model_dir": model,
            "model": "smollm2-135m-instruct",
            "api": {"port": free_port()},
            # Every answer is handed off, so that what the way to its first token costs is learned.
            "prefill": {"chunk": CHUNK, "handoff": "prompt"},
            "store": {"size_gb": 4.0},
        }
    )
    stack = Stack(config) if shared else Pinned(config)
    try:
        stack.start()
        stack.wait_ready()
        print("load before", os.getloadavg(), flush=True)
        with (
            httpx.Client(base_url=config.api_url, timeout=60, trust_env=False) as http,
            connect(config.redis_url) as client,
        ):
            for _ in range(3):  # compile and warm
                http.post("/v1/responses", json={"input": "warm " * 200, "max_output_tokens": 8})
            found = []
            for requests in (one_by_one, drive):
                time.sleep(2)
                begin = float(client.time()[0])  # type: ignore[index]  # seconds, microseconds
                requests(http)
                pasts = history.collect(client, float(client.time()[0]) - begin + 1)  # type: ignore[index]
                found.append(pasts)
        print("load after", os.getloadavg(), flush=True)
        return found[0], found[1]
    finally:
        stack.stop()


def beside_it(model: Path, profile: dict[str, Any], folder: Path) -> Path:
    """The model with a profile beside it, by which the workers decide as well."""
    found = folder / "model"
    found.mkdir()
    for path in model.iterdir():
        if path.is_file() and path.name != ".tandem-profile":
            (found / path.name).symlink_to(path.resolve())
    from dataclasses import fields

    from engine.profile import NAME, Profile

    known = {field.name for field in fields(Profile)} | {"version"}
    kept = {name: value for name, value in profile.items() if name in known}
    (found / NAME).write_text(json.dumps(kept))
    return found


def run(model: Path, out: Path, shared: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        folder = Path(name)
        kept = folder / "kept"
        kept.mkdir()
        before = calibrate(model, shared, beside=True)
        for role, profile in before.items():
            print(role, "worker beside the other:", profile["beside"], flush=True)
            (kept / f"{role}.json").write_text(json.dumps(profile, indent=1) + "\n")
        alone, pasts = serve(beside_it(model, before["decode"], folder), folder, shared)
        history.write(folder / "alone.jsonl", alone)
        history.write(kept / "history.jsonl", pasts)
        flags = ["--chunk", str(CHUNK), "--shared"]
        (kept / "flags.json").write_text(json.dumps(flags) + "\n")
        profiles = []
        for role in CORES:
            profiles += [f"--{role}", str(kept / f"{role}.json")]
        if tandem(["history", "rates", str(folder / "alone.jsonl"), *profiles, *flags[:2]]):
            return 1
        words = ["simulate", "--history", str(kept / "history.jsonl"), *profiles, *flags]
        if tandem([*words, "--compare"]):
            return 1
        if not quiet(before, calibrate(model, shared, beside=False)):
            print(
                f"rates changed by more than {QUIET:.0%} while the run was recorded: other "
                "programs ran on this machine. Nothing is written; record again when it is quiet.",
                file=sys.stderr,
            )
            return 1
        shutil.copytree(kept, out, dirs_exist_ok=True)
        print(f"written to {out}")
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shared", action="store_true", help="all cores for both workers")
    parser.add_argument("--measure", choices=sorted(CORES), help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.model, args.measure, args.shared, args.beside)
        return 0
    return run(args.model.resolve(), args.out, args.shared)


if __name__ == "__main__":
    sys.exit(main())
