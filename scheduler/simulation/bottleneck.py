"""Where requests wait, what would help, and what would not, from what was recorded in a window.

Waits and utilisation come from the records alone. What a change would do comes from the simulator,
run on the same requests with the change and without; beside it stands the textbook estimate for
every queue, so that a prediction can be checked by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from scheduler.config import JobsConfig
from scheduler.record import JobError
from scheduler.simulation.cluster import Cluster, Link, Machine, Shelf, Turn
from scheduler.simulation.history import Past
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import Profile
from scheduler.simulation.report import spread
from scheduler.simulation.workload import from_history

#: Allen and Cunneen's estimate of the mean wait for c servers: M/M/c by Erlang's formula, corrected
#: by how much arrivals and services vary.
FORMULA = (
    "wait = C(c, a) / (c - a) * service * (ca2 + cs2) / 2, with a = arrivals/s * service, "
    "C(c, a) Erlang's probability of having to wait, ca2 and cs2 the squared coefficients of "
    "variation of the times between arrivals and of the services"
)
#: Waiting below this part of all time spent is no bottleneck.
WORTH = 0.05
#: A change that shortens the mean by less is not worth its price.
GAIN = 0.05
FEWEST = 5
#: What could be bought; a bigger chunk is free, and named by its size.
MORE_PREFILL, MORE_DECODE = "one more prefill node", "one more decode node"
FASTER_LINK, STORE = "a link twice as fast", "a store that loses nothing"
#: Tokens per chunk where nothing says how many.
DEFAULT_CHUNK = 2048


@dataclass(frozen=True)
class Window:
    """What was recorded, and the machines it ran on.

    Without `prefill` or `decode` their rates are taken from the records themselves, which know one
    chunk size and one batch width only. `shared`: a prefill and a decode node run on one machine,
    and slow each other down as the profiles say. `named`: what to call it where it is too short.
    """

    pasts: Sequence[Past]
    seconds: float
    prefill_nodes: int = 1
    decode_nodes: int = 1
    slots: int = 8
    chunk: int = 0
    prefill: Profile | None = None
    decode: Profile | None = None
    settings: JobsConfig = field(default_factory=JobsConfig)
    shared: bool = False
    named: str = "the window"


@dataclass(frozen=True)
class Stage:
    """One queue: who came when, how long each waited, and how long each was served."""

    name: str
    servers: int
    at: Sequence[float]
    waits: Sequence[float]
    services: Sequence[float]

    def facts(self, seconds: float) -> dict[str, Any]:
        """The figures of this stage over `seconds`."""
        served = sum(self.services)
        mean = served / len(self.services) if self.services else 0.0
        rate = len(self.at) / seconds
        return {
            "stage": self.name,
            "requests": len(self.at),
            "arrivals_s": round(rate, 5),
            "service_s": round(mean, 4),
            "servers": self.servers,
            "service_rate_s": round(self.servers / mean, 5) if mean else None,
            "utilisation": round(served / (seconds * self.servers), 4),
            "wait_s": spread(self.waits),
            "waited_s": round(sum(self.waits), 3),
            "estimated_wait_s": _rounded(estimate(self, seconds)),
        }


def estimate(stage: Stage, seconds: float) -> float:
    """Mean wait by `FORMULA`; infinite where more comes than can be served."""
    if not stage.services or not sum(stage.services):
        return 0.0
    service = sum(stage.services) / len(stage.services)
    offered, servers = len(stage.at) / seconds * service, stage.servers
    if offered >= servers:
        return math.inf
    term, total = 1.0, 1.0
    for k in range(1, servers):
        term *= offered / k
        total += term
    term *= offered / servers * servers / (servers - offered)
    chance = term / (total + term)
    at = sorted(stage.at)
    between = [later - earlier for earlier, later in pairwise(at)]
    varied = (_variation(between) + _variation(stage.services)) / 2
    return chance / (servers - offered) * service * varied


def stages(window: Window) -> list[Stage]:
    """The queues of the pipeline, in the order in which a request meets them."""
    prompts = [p for p in window.pasts if p.stage == "prefill" and "handing_off" in p.times]
    handed = [p for p in prompts if "decoding" in p.times]
    direct = [p for p in window.pasts if p.stage == "decode"]
    decode, link = machines(window)[1], link_of(window)
    began = {p.id: p.times["decoding"] for p in handed}
    began |= {p.id: p.times.get("prefilling", 0.0) for p in direct}
    rows = [*handed, *direct]
    lost = [p for p in window.pasts if recomputed(p)]
    said = [p for p in window.pasts if p.output_tokens > 1 and p.ttft is not None and p.ended]
    return [
        Stage(
            "prefill queue",
            window.prefill_nodes,
            [p.at for p in prompts],
            [p.times.get("prefilling", 0.0) for p in prompts],
            [p.times["handing_off"] - p.times.get("prefilling", 0.0) for p in prompts],
        ),
        Stage(
            "link",
            window.decode_nodes,
            [p.at + p.times["handing_off"] for p in handed],
            [p.exposed_s for p in handed],
            [p.bytes / link.rate for p in handed],
        ),
        Stage(
            "decode queue",
            window.decode_nodes * window.slots,
            [p.at + began[p.id] for p in rows],
            [
                max(0.0, began[p.id] - p.times["handing_off"] - p.exposed_s)
                if p.stage == "prefill"
                else began[p.id]
                for p in rows
            ],
            [(p.ended or began[p.id]) - began[p.id] for p in rows],
        ),
        # Rows of one batch slow each other down, by so much against a row alone.
        Stage(
            "decode batch",
            window.decode_nodes * window.slots,
            [p.at + (p.ttft or 0.0) for p in said],
            [_slowed(p, decode) for p in said],
            [],
        ),
        # What the store no longer had is computed again, by the decode node.
        Stage(
            "store",
            window.decode_nodes,
            [p.at for p in lost],
            [decode.prefill_s(0, p.prompt_tokens - 1, decode.chunk) for p in lost],
            [],
        ),
    ]


def _slowed(past: Past, decode: Profile) -> float:
    """Seconds that an answer took longer than a row alone would have."""
    steps = past.output_tokens - 1
    alone = steps * decode.step_s(1, past.prompt_tokens + past.output_tokens / 2)
    return max(0.0, (past.ended or 0.0) - (past.ttft or 0.0) - alone)


def recomputed(past: Past) -> bool:
    """Whether a turn of a conversation found no state of it."""
    return past.path == "recomputed" and past.stage == "decode"


def analyse(window: Window) -> dict[str, Any]:
    """The whole answer. Raises JobError where too little was recorded."""
    if len(window.pasts) < FEWEST:
        raise JobError(
            f"{len(window.pasts)} requests ended in {window.named}, at least {FEWEST} are needed: "
            "take a longer --window, or serve more first"
        )
    found = [stage.facts(window.seconds) for stage in stages(window)]
    spent = sum(past.ended or 0.0 for past in window.pasts)
    worst = max(found, key=lambda stage: float(stage["waited_s"]))
    part = worst["waited_s"] / spent if spent else 0.0
    waits = part >= WORTH
    base, changes = predict(window)
    recorded = _means(window)
    helps = [c for c in changes if c["gain"] >= GAIN]
    return {
        "window_s": window.seconds,
        "requests": len(window.pasts),
        "bottleneck": worst["stage"] if waits else None,
        "why": (
            f"{part:.0%} of all time that requests took was spent waiting at the {worst['stage']}"
            if waits
            else f"requests hardly wait: at most {part:.0%} of their time, at the {worst['stage']}"
        ),
        "stages": found,
        "formula": FORMULA,
        "speed_ups": [c for c in changes if not c["topology"]],
        "topology": [c for c in changes if c["topology"]],
        "do": [c["change"] for c in sorted(helps, key=lambda c: -c["gain"])],
        "do_not": [f"{c['change']}: {c['gain']:+.1%}" for c in changes if c not in helps],
        "model": {
            "rates": "calibrated" if window.prefill and window.decode else "taken from the window",
            "simulated": base,
            "recorded": recorded,
            "ratio": round(base["total_mean_s"] / recorded["total_mean_s"], 4),
        },
    }


# --- predictions -------------------------------------------------------------------------------


def predict(window: Window) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means as they are simulated, and what each change does to them.

    `gain` is the part of the mean time to the end that a change saves. A change that cannot be
    told from what is known is left out.
    """
    prefill, decode = machines(window)
    cluster = Cluster(
        tuple(Machine(f"p{k}", prefill, window.chunk) for k in range(window.prefill_nodes)),
        tuple(Machine(f"d{k}", decode, slots=window.slots) for k in range(window.decode_nodes)),
        link=link_of(window),
        store=Shelf(),
        settings=window.settings,
        shared=window.shared,
    )
    turns = from_history(window.pasts)
    base = _run(cluster, turns)
    changes: list[tuple[str, bool, Cluster, Callable[[list[Turn]], None] | None]] = [
        (FASTER_LINK, False, replace(cluster, link=_twice(cluster.link)), None),
        (MORE_DECODE, True, cluster.more("decode"), None),
    ]
    if cluster.prefill:
        changes.append((MORE_PREFILL, True, cluster.more("prefill"), None))
        if chunk := bigger_chunk(prefill, cluster.prefill[0].forward):
            larger = tuple(replace(machine, chunk=chunk) for machine in cluster.prefill)
            changes.insert(
                0, (f"chunks of {chunk} tokens", False, replace(cluster, prefill=larger), None)
            )
    changes.insert(1, (STORE, False, cluster, _found))
    by_formula = _by_formula(window, prefill)
    found = []
    for change, topology, changed, also in changes:
        mine = [replace(turn) for turn in turns]
        if also:
            also(mine)
        after = _run(changed, mine)
        gain = 1 - after["total_mean_s"] / base["total_mean_s"]
        row = {"change": change, "topology": topology, "gain": round(gain, 4), **after}
        found.append({**row, "by_formula": by_formula(change)})
    return base, found


def _by_formula(window: Window, prefill: Profile) -> Callable[[str], dict[str, Any]]:
    """The mean wait at the stage that a change is about, by `FORMULA`, without it and with it.

    For the store it is what was computed again, and nothing of that. None: it grows without end.
    """
    queue, link, decode, _, store = stages(window)
    now = window.chunk or prefill.chunk

    def changed(change: str) -> dict[str, Any]:
        stage, after = queue, queue
        if change == MORE_PREFILL:
            after = replace(queue, servers=queue.servers + 1)
        elif change == MORE_DECODE:
            stage, after = decode, replace(decode, servers=decode.servers + window.slots)
        elif change == FASTER_LINK:
            stage, after = link, replace(link, services=[s / 2 for s in link.services])
        elif change == STORE:
            lost = sum(store.waits) / len(store.waits) if store.waits else 0.0
            return {"stage": store.name, "wait_s": round(lost, 4), "then_s": 0.0}
        else:
            part = prefill.rate(now) / prefill.rate(bigger_chunk(prefill, now))
            after = replace(queue, services=[s * part for s in queue.services])
        return {
            "stage": stage.name,
            "wait_s": _rounded(estimate(stage, window.seconds)),
            "then_s": _rounded(estimate(after, window.seconds)),
        }

    return changed


def machines(window: Window) -> tuple[Profile, Profile]:
    """The profiles of prefill and decode nodes: calibrated, or from the records."""
    return window.prefill or _prefill_seen(window), window.decode or _decode_seen(window)


def link_of(window: Window) -> Link:
    """The link as it was seen: what was left to send after the last chunk (its rows and the
    snapshot), over the time that took; the median of all transfers."""
    moved = [past for past in window.pasts if past.bytes and past.exposed_s > 0]
    fixed, per_token = window.prefill.state if window.prefill else (0.0, 0.0)
    if not fixed and not per_token:
        fixed, per_token = _state(moved)
    chunk = window.chunk or (window.prefill.chunk if window.prefill else DEFAULT_CHUNK)
    rates = [(fixed + per_token * min(chunk, p.new_tokens)) / p.exposed_s for p in moved]
    rate = median(rates) if rates else 0.0
    return Link(rate=rate, latency=0.0) if rate else Link()


def bigger_chunk(profile: Profile, now: int) -> int:
    """The fastest measured chunk above `now` if it is faster than that, else 0."""
    sizes = {chunk: profile.rate(chunk) for chunk, _, _ in profile.prefill if chunk > now}
    best = max(sizes, key=lambda chunk: sizes[chunk], default=0)
    return best if best and sizes[best] > profile.rate(now) else 0


def _prefill_seen(window: Window) -> Profile:
    done = [p for p in window.pasts if p.stage == "prefill" and "handing_off" in p.times]
    tokens = sum(p.new_tokens for p in done)
    seconds = sum(p.times["handing_off"] - p.times.get("prefilling", 0.0) for p in done)
    rate = tokens / seconds if tokens and seconds > 0 else 1000.0
    chunk = window.chunk or DEFAULT_CHUNK
    context = max(1, tokens // max(1, len(done)))
    return Profile("seen", ((chunk, context, rate),), ((1, context, rate),), _state(done))


def _decode_seen(window: Window) -> Profile:
    """Steps as they were on average, whatever the width of the batch was."""
    said = [p for p in window.pasts if p.output_tokens > 1 and p.ttft is not None and p.ended]
    tokens = sum(p.output_tokens - 1 for p in said)
    seconds = sum((p.ended or 0.0) - (p.ttft or 0.0) for p in said)
    step = seconds / tokens if tokens and seconds > 0 else 0.05
    context = max(1, sum(p.prompt_tokens for p in window.pasts) // len(window.pasts))
    local = [p for p in window.pasts if p.stage == "decode" and p.ttft is not None]
    spent = sum((p.ttft or 0.0) - p.times.get("prefilling", 0.0) for p in local)
    computed = sum(p.new_tokens for p in local)
    rate = computed / spent if computed and spent > 0 else 1 / step
    chunk = window.chunk or DEFAULT_CHUNK
    widths = sorted({1, 2, max(2, window.slots)})
    steps = tuple((width, context, width / step) for width in widths)
    return Profile("seen", ((chunk, context, rate),), steps, _state(window.pasts))


def _state(pasts: Sequence[Past]) -> tuple[float, float]:
    """Bytes of an empty state and per token: the line through what was handed off."""
    points = [(p.prompt_tokens, p.bytes) for p in pasts if p.bytes]
    if not points:
        return 0.0, 0.0
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    wide = sum((tokens - x) ** 2 for tokens, _ in points)
    slope = sum((tokens - x) * (size - y) for tokens, size in points) / wide if wide else y / x
    return max(0.0, y - slope * x), max(0.0, slope)


def _run(cluster: Cluster, turns: Sequence[Turn]) -> dict[str, float]:
    mine = [replace(turn) for turn in turns]
    Pipeline(cluster, mine).run()
    total = spread(turn.ended - turn.at for turn in mine)
    first = spread(turn.ttft for turn in mine)
    assert total
    assert first
    return {
        "ttft_mean_s": first["mean"],
        "total_mean_s": total["mean"],
        "total_p95_s": total["p95"],
    }


def _found(turns: list[Turn]) -> None:
    """Every state is where its conversation left it."""
    for turn in turns:
        if turn.stage == "decode" and not turn.cached:
            turn.cached = -1


def _twice(link: Link) -> Link:
    return replace(link, rate=2 * link.rate)


def _means(window: Window) -> dict[str, float]:
    total = spread(past.ended for past in window.pasts if past.ended is not None)
    first = spread(past.ttft for past in window.pasts if past.ttft is not None)
    if not total or not first:
        raise JobError("none of the requests in the window was answered")
    return {
        "ttft_mean_s": first["mean"],
        "total_mean_s": total["mean"],
        "total_p95_s": total["p95"],
    }


def _variation(values: Sequence[float]) -> float:
    """Squared coefficient of variation; 1, as of random arrivals, where it is not known."""
    if len(values) < 2:
        return 1.0
    mean = sum(values) / len(values)
    if not mean:
        return 1.0
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def _rounded(seconds: float) -> float | None:
    """JSON has no infinity: None says that the queue grows without end."""
    return round(seconds, 4) if math.isfinite(seconds) else None
