"""`tandem bench seam`: what a client notices when its answer moves to the decode node.

A private stack answers a long request on the prefill node, until something waits for that node: an
entry of the queue that is nobody's job, since a prompt would be computed on the same cores in the
very moment that is measured. The gap between the last token said there and the first one said here
is set against two decode steps and the time of the wire, and told by its parts; where the longest
gap elsewhere is as long, something else had the cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
import redis
from rq.defaults import RQ_KEY_PREFIX

from engine.errors import ModelError
from engine.library import DEFAULT_MODEL, resolve
from scheduler.config import Config
from scheduler.host.stack import Stack, StackFailed, free_port
from scheduler.queue import PREFILL
from scheduler.redis_client import connect
from store.paths import models_dir

if TYPE_CHECKING:
    from engine.profile import Profile

TOKENS, BEFORE, ROUNDS = 96, 24, 3
PROMPT = "Tell me a long story about a dog, a river and a bridge. " * 20
_DELTA = "response.output_text.delta"


def run(
    model_dir: Path, folder: Path, rounds: int = ROUNDS, tokens: int = TOKENS
) -> dict[str, Any]:
    """Move `rounds` answers of `tokens` tokens; raises ModelError where one did not move."""
    copy = folder / "model"
    copy.mkdir()
    for path in model_dir.iterdir():
        if path.is_file():
            (copy / path.name).symlink_to(path.resolve())
    from engine.profile import record

    record(copy, _even())  # one machine decodes as fast as itself
    stack = Stack(_config(copy, folder / "data"))
    try:
        stack.start()
        stack.wait_ready()
        queue = connect(stack.config.redis_url)
        with httpx.Client(base_url=stack.config.api_url, timeout=600) as client:
            found = [_one(client, queue, number, tokens) for number in range(rounds)]
    finally:
        stack.stop()
    ratios = sorted(each["gap_vs_bound"] for each in found)
    return {
        "bench": "seam",
        "model": model_dir.name,
        "rounds": found,
        "worst": round(ratios[-1], 3),
        "ratios": {"gap_vs_bound": round(ratios[len(ratios) // 2], 3)},
    }


def _one(client: httpx.Client, queue: redis.Redis, number: int, tokens: int) -> dict[str, Any]:
    """One answer that moves after `BEFORE` tokens: its gaps, in seconds."""
    # Each prompt is new from its beginning: a stored one would be continued by the decode node.
    body = {
        "instructions": f"Round {number}.",
        "input": PROMPT,
        "max_output_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    at: list[float] = []
    identity = ""
    with client.stream("POST", "/v1/responses", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "response.created":
                identity = event["response"]["id"]
            if event["type"] == _DELTA:
                at.append(time.perf_counter())
                if len(at) == BEFORE:
                    queue.rpush(f"{RQ_KEY_PREFIX}:queue:{PREFILL}", "nobody")
    handoff = client.get(f"/v1/responses/{identity}").json()["tandem"]["handoff"] or {}
    late = handoff.get("late") or {}
    said = int(late.get("tokens") or 0)
    if not (late.get("stayed") and late.get("left") and BEFORE <= said < len(at) - 4):
        raise ModelError(f"the answer did not move in the middle: {late or handoff}")
    gaps = [b - a for a, b in pairwise(at)]
    # Tokens may share an event; the seam's gap is the longest one around the token that moved.
    seam = max(gaps[said - 3 : said + 3])
    others = gaps[: said - 3] + gaps[said + 3 :]
    step = median(others)
    wire = float(handoff["exposed_seconds"])
    return {
        "said_there": said,
        "gap_s": seam,
        "step_s": step,
        "wire_s": wire,
        "elsewhere_s": max(others),
        "parts_s": _parts(client.get(f"/v1/responses/{identity}/ledger").json()["stages"]),
        "gap_vs_bound": seam / (2 * step + wire),
    }


def _parts(stages: list[dict[str, Any]]) -> dict[str, float]:
    """What the ledger says the seam was made of: from the last step there to the first one here.

    Raises ModelError where the two workers' clocks differ by more than a part of it lasted.
    """
    by = {(row["lane"], row["stage"]): row for row in stages}
    said, first = by["prefill", "decode"], by["decode", "first decode"]
    sent, taken = by["prefill", "settle"]["start"], by.get(("decode", "admit"), {}).get("start", 0)
    parts: dict[str, float] = {
        "pack": sent - said["start"] - said["seconds"],
        "hand over": taken - sent,
        "take up": first["start"] - taken,
        "first step": first["seconds"],
    }
    if min(parts.values()) < 0:  # the ledger leaves out what would have ended before it began
        raise ModelError("the clocks of the workers differ too much to tell the seam: run it again")
    return parts


def _even() -> Profile:
    from engine.device import prepare
    from engine.profile import Profile

    device = prepare()
    prefill = [{"chunk": float(device.chunk), "context": 512.0, "rate": 300.0}]
    decode = [{"width": width, "context": 64.0, "rate": 30.0} for width in (1.0, 8.0)]
    return Profile(device.name, device.mlx, device.dtype, prefill, decode)


def _config(model_dir: Path, data: Path) -> Config:
    return Config.model_validate(
        {
            "data_dir": data,
            "model_dir": model_dir,
            "api": {"port": free_port()},
            "decode": {"drafter": "off"},
            "store": {"size_gb": 1.0},
        }
    )


def register(subparsers: Any) -> None:
    """Add `tandem bench seam`; loads no MLX."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "seam",
        help="the gap that a client sees when its answer moves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model directory or name")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-seam-") as folder:
            found = run(
                resolve(arguments.model, models_dir()), Path(folder), max(1, arguments.rounds)
            )
    except (ModelError, StackFailed, httpx.HTTPError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found))
        return 0
    for each in found["rounds"]:
        print(
            f"moved after {each['said_there']} tokens: gap {each['gap_s'] * 1000:.1f} ms, "
            f"step {each['step_s'] * 1000:.1f} ms, wire {each['wire_s'] * 1000:.1f} ms, "
            f"longest gap elsewhere {each['elsewhere_s'] * 1000:.1f} ms"
        )
        parts = (f"{name} {seconds * 1000:.1f}" for name, seconds in each["parts_s"].items())
        print(f"   of it, by the ledger: {', '.join(parts)} ms")
    middle, worst = found["ratios"]["gap_vs_bound"], found["worst"]
    print(f"gap against two steps and the wire: {middle}, at worst {worst}")
    return 0
