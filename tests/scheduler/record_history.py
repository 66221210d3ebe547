"""Records a run of a real stack, with the profiles of its two workers, for `test_replay.py`.

    python -P tests/scheduler/record_history.py MODEL_DIR OUTPUT_DIR

Every worker has a processor core of its own, so that it computes at the rate that `tandem
calibrate` measures on that core while the other core is as busy. It is measured before and after
the run: where both differ by much, the machine was not quiet, and the record is of no use. Not run
by the tests.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from scheduler.config import Config
from scheduler.host.stack import Stack, free_port
from scheduler.redis_client import connect
from scheduler.simulation import history

REQUESTS = 70
EVERY = 1.0
CORES = {"prefill": 0, "decode": 1}
CHUNK = 128
#: Chunks, tokens to prefill, widths, contexts: those that the run has.
PLAN: Any = ([CHUNK // 2, CHUNK], 256, [1, 2, 4], [64, 320])
WORDS = ("river", "was", "wide", "and", "slow", "nobody", "on", "the", "far", "bank", "had", "seen")


def settle(pid: int, core: int) -> None:
    """All threads of a process on one core."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {core})


def calibrate(model: Path) -> dict[str, Any]:
    """The profile of either core, both measured at the same time, as they will run."""
    running, found = {}, {}
    for role, core in CORES.items():
        command = ["taskset", "-c", str(core), sys.executable, "-P", __file__, str(model)]
        running[role] = subprocess.Popen(command, stdout=subprocess.PIPE)
    for role, process in running.items():
        out, _ = process.communicate()
        found[role] = json.loads(out)
    return found


def measure(model: Path) -> None:
    """What `tandem calibrate` does, for fewer sizes, in a process of its own."""
    from engine.device import prepare

    device = prepare()  # before anything imports MLX
    from engine.calibrate import measure
    from engine.model import load

    profile = measure(load(model, device), *PLAN)
    print(json.dumps({"version": 1, **profile.facts()}))


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The less disturbed of two measurements of every point."""
    for kind in ("prefill", "decode"):
        for first, second in zip(one[kind], other[kind], strict=True):
            first["rate"] = max(first["rate"], second["rate"])
    return one


def changes(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """How the rates changed from one measurement to the other."""
    pairs = [p for kind in ("prefill", "decode") for p in zip(one[kind], other[kind], strict=True)]
    return [round(second["rate"] / first["rate"], 3) for first, second in pairs]


def drive(http: httpx.Client) -> None:
    """Requests of many lengths at random times; one in five continues an earlier answer."""
    chance = random.Random(11)
    ids: list[str] = []
    begin, at = time.monotonic(), 0.0
    for number in range(REQUESTS):
        at += chance.expovariate(1 / EVERY)
        words = int(chance.choice((10, 20, 40, 60, 110, 170)) * chance.uniform(0.7, 1.2))
        body: dict[str, Any] = {
            "background": True,
            "temperature": 0,
            "max_output_tokens": chance.randint(3, 8),
        }
        continued = chance.random() < 0.2
        pick = chance.random()
        seed = [f"Note {number}."] + [chance.choice(WORDS) for _ in range(words)]
        time.sleep(max(0.0, begin + at - time.monotonic()))
        if continued and number > 10:
            done = [r for r in ids[:-3] if http.get(f"/v1/responses/{r}").json()["status"]
                    in ("completed", "incomplete")]  # fmt: skip
            body["previous_response_id"] = done[int(pick * len(done))]
            seed = seed[:15]
        answer = http.post("/v1/responses", json={**body, "input": " ".join(seed)})
        assert answer.status_code == 200, answer.text
        ids.append(answer.json()["id"])
    for response in ids:
        while http.get(f"/v1/responses/{response}").json()["status"] in ("queued", "in_progress"):
            time.sleep(0.2)


def main() -> None:
    if len(sys.argv) == 2:
        measure(Path(sys.argv[1]))
        return
    model, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    out.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="t-"))
    config = Config.model_validate(
        {
            "data_dir": directory,
            "model_dir": model,
            "model": "smollm2-135m-instruct",
            "api": {"port": free_port()},
            "prefill": {"chunk": CHUNK},
            "store": {"size_gb": 4.0},
        }
    )
    before = calibrate(model)
    stack = Stack(config)
    try:
        stack.start()
        stack.wait_ready()
        for name, core in CORES.items():
            pid = stack.supervisor.find(name).pid
            assert pid
            settle(pid, core)
        print("load before", os.getloadavg(), flush=True)
        with httpx.Client(base_url=config.api_url, timeout=60, trust_env=False) as http:
            for _ in range(3):  # compile and warm
                http.post("/v1/responses", json={"input": "warm " * 200, "max_output_tokens": 8})
            time.sleep(1)
            begin = time.time()
            drive(http)
        print("load after", os.getloadavg(), flush=True)
        with connect(config.redis_url) as client:
            pasts = history.collect(client, time.time() - begin)
        history.write(out / "history.jsonl", pasts)
    finally:
        stack.stop()
        shutil.rmtree(directory, ignore_errors=True)
    after = calibrate(model)
    for role in CORES:
        print(role, "after against before", changes(before[role], after[role]), flush=True)
        profile = better(before[role], after[role])
        (out / f"{role}.json").write_text(json.dumps(profile, indent=1) + "\n")
    (out / "flags.json").write_text(json.dumps(["--chunk", str(CHUNK)]) + "\n")


if __name__ == "__main__":
    main()
