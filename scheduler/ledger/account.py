"""The ledger of a response, put together from the pieces that each process left with its record.

One axis, in seconds since the request arrived. Every moment between arrival and end belongs to
the most telling stretch that covers it (work before waiting, and both before what goes on beside
them), so the stages' shares and the remainder add up to the whole.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.ledger.notes import FIELD, Piece
from scheduler.prompt_facts import prompt_facts
from scheduler.record import Job
from scheduler.staying import LOOK

#: What may be left unexplained: this share of the whole, or these seconds where that is more.
SHARE, SECONDS = 0.02, 0.005
#: What the control plane may cost: round trips of a request, and more for each forward of its
#: prompt and each token of its answer (a step that brings tokens is told in one trip); bytes of a
#: request both ways, for each token of its prompt (four bytes, three times) and of its answer.
TRIPS, BYTES = (16, 1, 1), (20_000, 12, 600)
#: And besides, in trips and bytes: for each connection that was opened meanwhile, its greeting,
#: both of the client's names and the database; for each look of a prefill node that says the answer
#: whether another prompt waits, which it takes after a token, every `LOOK` seconds at the most.
OPENED, LOOKED = (4, 600), (1, 64)
LANES = ("api", "queue", "prefill", "link", "decode", "store")
_BEHIND = {"queue": 1, "link": 2, "store": 3}
_GAPS = 5


def ledger_of(job: Job, now: float | None = None) -> dict[str, Any]:
    """The whole ledger of a job as plain JSON types; `now` (Redis TIME) is the end of a live one.

    Raises nothing: what a damaged or missing piece would have explained is in the remainder.
    """
    pieces = pieces_of(job)
    ended = job.times.get(job.status) if job.ended else now
    spans = [
        {
            "stage": span.stage, "lane": str(span.facts.pop("lane", "") or piece.text("lane")),
            "node": piece.text("node"), "run": piece.name,
            "start": span.start, "seconds": span.seconds, **span.facts,
        }
        for piece in pieces for span in piece.spans()
    ]  # fmt: skip
    spans += _between(job, pieces, ended)
    origin = min((span["start"] for span in spans if span["lane"] == "api"), default=job.created_at)
    origin = min(origin, job.created_at)
    last = max((span["start"] + span["seconds"] for span in spans), default=origin)
    end = ended if ended is not None else max(last, origin)
    for span in spans:
        span["start"] = round(span["start"] - origin, 6)
        span["seconds"] = round(span["seconds"], 6)
    spans.sort(key=lambda span: (span["start"], LANES.index(span["lane"]), -span["seconds"]))
    total = max(0.0, end - origin)
    return {
        "object": "response.ledger",
        "id": job.id,
        "status": job.status,
        "model": job.model,
        "arrived_at": round(origin, 6),
        "seconds": round(total, 6),
        "first_token_s": None if job.first_token_at is None
        else round(job.first_token_at - origin, 6),
        "ended": job.ended,
        "whole": _is_whole(job, pieces),
        **_shares(spans, total),
        "clock_error_s": round(max((p.number("error") or 0.0 for p in pieces), default=0.0), 6),
        "spans": spans,
        "forks": [
            {"fork": name, "took": took, "why": why, "lane": piece.text("lane"),
             "node": piece.text("node")}
            for piece in pieces for name, took, why in piece.data.get("forks") or ()
        ],
        "shapes": _shapes(job, pieces),
        "tokens": _tokens(job),
        "bytes": _bytes(job, pieces),
        "work": _work(pieces),
        "nodes": {p.text("lane"): p.text("node") for p in pieces if p.text("node")},
        "runs": _runs(pieces),
        "details": {
            **{k: v for k, v in job.path.items() if k not in ("path", "cached_tokens")},
            **prompt_facts(job.request),
        },
        "path": job.path.get("path"),
        "priority": job.priority,
    }  # fmt: skip


def pieces_of(job: Job) -> list[Piece]:
    """The pieces of a job in the order in which their runs began."""
    found = [Piece.read(name, data) for name, data in job.ledger.items()]
    return sorted((piece for piece in found if piece is not None), key=lambda piece: piece.base)


def _is_whole(job: Job, pieces: Sequence[Piece]) -> bool:
    """Whether every run that is known of has left its piece: no run is under way or was lost."""
    return job.ended and bool(pieces) and not any(piece.data.get("lost") for piece in pieces)


def _between(job: Job, pieces: Sequence[Piece], ended: float | None) -> list[dict[str, Any]]:
    """What lies between the pieces: waiting in a queue, being taken, telling Redis of an end."""
    made: list[dict[str, Any]] = []
    runs = [piece for piece in pieces if piece.number("taken") is not None]

    def add(stage: str, lane: str, begun: float, until: float, **facts: Any) -> None:
        if until > begun:
            made.append({"stage": stage, "lane": lane, "start": begun, "seconds": until - begun,
                         **facts})  # fmt: skip

    # Waits that ended without a run: the decode node took the job over (`lua/take_over.lua`).
    alone = [(piece, moved) for piece in pieces if (moved := piece.number("moved")) is not None]
    for piece, moved in alone:
        add("no prefill node", "queue", piece.base, moved, queue=piece.text("queue"))
    for number, piece in enumerate(runs):
        taken, enqueued = piece.number("taken") or 0.0, piece.number("enqueued")
        about = {"node": piece.text("node"), "run": piece.name}
        if enqueued is not None:
            add("wait", "queue", enqueued, taken, queue=piece.text("queue"))
        if lost := piece.number("lost"):
            add("lost run", piece.text("lane"), taken, lost, **about)
            continue
        add("admit", piece.text("lane"), taken, piece.base, **about)
        following = runs[number + 1].number("enqueued") if number + 1 < len(runs) else None
        if following is None and number + 1 == len(runs):
            # A live job has told Redis of its run's end and waits, or runs, again.
            following = ended if job.ended else job.enqueued_at or None
        # Telling of a run put the job into the queue in which such a wait began.
        back = [wait.base for wait, _ in alone if taken < wait.base]
        if following is not None:
            add("tell", piece.text("lane"), piece.sent, min([following, *back]), **about)
    accepting = next((piece for piece in pieces if piece.name == "api"), None)
    if accepting is not None:
        add("accept", "api", accepting.sent, job.created_at, node=accepting.text("node"))
    if not runs and not job.run:
        since = job.enqueued_at or job.created_at
        add("wait", "queue", since, ended or since, queue=job.queue)
    elif job.run and not job.ended and ended is not None:
        if job.enqueued_at and job.taken_at:
            add("wait", "queue", job.enqueued_at, job.taken_at, queue=job.queue)
        add("running", job.stage, job.taken_at or job.created_at, ended, run=job.run)
    elif runs and not job.ended and ended is not None:
        add("wait", "queue", job.enqueued_at or runs[-1].sent, ended, queue=job.queue)
    elif runs and job.ended and ended is not None and job.enqueued_at > runs[-1].sent:
        # Cancelled while it waited for its next run.
        add("wait", "queue", job.enqueued_at, ended, queue=job.queue)
    return made


def _shares(spans: Sequence[Mapping[str, Any]], total: float) -> dict[str, Any]:
    """How the time divides: seconds of each stage's own, and what no stretch covers."""
    own, gaps = _sweep(spans, total)
    stages: dict[tuple[str, str], dict[str, Any]] = {}
    for index, span in enumerate(spans):
        key = (span["lane"], span["stage"])
        row = stages.setdefault(
            key,
            {"stage": span["stage"], "lane": span["lane"], "count": 0, "start": span["start"],
             "seconds": 0.0, "own_seconds": 0.0},
        )  # fmt: skip
        row["count"] += 1
        row["seconds"] = round(row["seconds"] + span["seconds"], 6)
        row["own_seconds"] = round(row["own_seconds"] + own[index], 6)
    for row in stages.values():
        row["share"] = round(row["own_seconds"] / total, 4) if total else 0.0
    left = sum(seconds for _, seconds in gaps)
    bound = max(SHARE * total, SECONDS)
    return {
        "remainder": {
            "seconds": round(left, 6),
            "share": round(left / total, 4) if total else 0.0,
            "bound_seconds": round(bound, 6),
            "within": left <= bound,
            "gaps": [
                {"start": round(start, 6), "seconds": round(seconds, 6),
                 "after": _neighbour(spans, start, before=True),
                 "before": _neighbour(spans, start + seconds, before=False)}
                for start, seconds in sorted(gaps, key=lambda gap: -gap[1])[:_GAPS]
            ],
        },
        "stages": sorted(stages.values(), key=lambda row: (row["start"], row["lane"])),
    }  # fmt: skip


def _sweep(
    spans: Sequence[Mapping[str, Any]], total: float
) -> tuple[list[float], list[tuple[float, float]]]:
    """Seconds that each span has for its own in [0, total], and the gaps (start, seconds)."""
    own = [0.0] * len(spans)
    gaps: list[tuple[float, float]] = []
    order = sorted(range(len(spans)), key=lambda i: spans[i]["start"])
    edges = sorted({0.0, total, *(
        min(max(edge, 0.0), total)
        for span in spans for edge in (span["start"], span["start"] + span["seconds"])
    )})  # fmt: skip
    active: list[tuple[int, float, int]] = []
    at = 0
    for start, stop in itertools.pairwise(edges):
        while at < len(order) and spans[order[at]]["start"] <= start + 1e-9:
            index = order[at]
            span = spans[index]
            heapq.heappush(
                active,
                (_BEHIND.get(span["lane"], 0), span["start"] + span["seconds"], index),
            )
            at += 1
        while active and active[0][1] <= start + 1e-9:
            heapq.heappop(active)
        if active:
            own[active[0][2]] += stop - start
        elif stop > start:
            if gaps and abs(gaps[-1][0] + gaps[-1][1] - start) < 1e-9:
                gaps[-1] = (gaps[-1][0], gaps[-1][1] + stop - start)
            else:
                gaps.append((start, stop - start))
    return own, gaps


def _neighbour(spans: Sequence[Mapping[str, Any]], edge: float, *, before: bool) -> str:
    """Name of the stretch that ends (or begins) nearest to an edge of a gap."""

    def distance(span: Mapping[str, Any]) -> float:
        at = span["start"] + (span["seconds"] if before else 0.0)
        return abs(float(at) - edge)

    nearest = min(spans, key=distance, default=None)
    return "" if nearest is None else f"{nearest['lane']} {nearest['stage']}"


def _shapes(job: Job, pieces: Iterable[Piece]) -> dict[str, Any]:
    """The forwards that ran: prompt chunks as [tokens, count], decode steps by batch width."""
    lengths: list[list[int]] = []
    for piece in pieces:
        for row in piece.data.get("chunks") or ():
            tokens, count = int(row[-2]), int(row[-1])
            if count == 1 and lengths and lengths[-1][0] == tokens:
                lengths[-1][1] += 1
            elif tokens and count:
                lengths.append([tokens // count, count])
    return {"prefill": lengths, "decode_widths": job.path.get("widths") or {}}


def _tokens(job: Job) -> dict[str, int]:
    told = job.usage or {}
    cached = int(told.get("cached_tokens", job.held_tokens))
    return {
        "prompt": job.prompt_tokens,
        "cached": cached,
        "new": job.prompt_tokens - cached,
        "computed": job.computed_tokens,
        "output": int(told.get("output_tokens", 0)),
    }


def _bytes(job: Job, pieces: Sequence[Piece]) -> dict[str, Any]:
    control: dict[str, float] = {"commands": 0, "round_trips": 0, "sent": 0, "received": 0}
    lanes: dict[str, float] = {}
    for piece in pieces:
        told = piece.data.get("control") or {}
        for name in control:
            control[name] = round(control[name] + (told.get(name) or 0), 2)
        if told:
            lane = piece.text("lane")
            lanes[lane] = round(lanes.get(lane, 0) + (told.get("round_trips") or 0), 2)
    stretches = (span for piece in pieces for span in piece.spans())
    wire = sum(int(s.facts.get("bytes") or 0) for s in stretches if s.facts.get("lane") == "link")
    facts: dict[str, int] = {"store_written": 0, "store_read": 0}
    for piece in pieces:
        for name in facts:
            facts[name] += int((piece.data.get("facts") or {}).get(name) or 0)
    for piece in pieces:
        if piece.number("taken") is not None or piece.name == "api":
            # The step that carried the count could not be in it.
            control["commands"] += 1
            control["round_trips"] += 1
            control["sent"] += len(job.ledger[piece.name])
    control_facts = {
        **control,
        "round_trips_by_lane": lanes,
        "budget": _budget(job, pieces, control),
    }
    return {"wire": wire, **facts, "control": control_facts}


def _budget(job: Job, pieces: Sequence[Piece], control: Mapping[str, float]) -> dict[str, Any]:
    """What a request like this may cost in Redis, and whether it did not cost more."""
    forwards = sum(int(row[-1]) for piece in pieces for row in piece.data.get("chunks") or ())
    written = _tokens(job)["output"]
    runs = max(1, sum(piece.number("taken") is not None for piece in pieces) - 1)
    trips = TRIPS[0] * runs + TRIPS[1] * forwards + TRIPS[2] * written
    nbytes = BYTES[0] * runs + BYTES[1] * job.prompt_tokens * runs + BYTES[2] * written
    opened = _work(pieces).get("redis_connections", 0)
    late = (job.handoff or {}).get("late") or {}
    looks = min(int(late.get("tokens") or 0), int((late.get("seconds") or 0.0) / LOOK)) + bool(late)
    trips += OPENED[0] * opened + LOOKED[0] * looks
    nbytes += OPENED[1] * opened + LOOKED[1] * looks
    return {
        "round_trips": trips,
        "bytes": nbytes,
        "within": control["round_trips"] <= trips
        and control["sent"] + control["received"] <= nbytes,
    }


def _work(pieces: Iterable[Piece]) -> dict[str, int]:
    found: dict[str, int] = {}
    for piece in pieces:
        for name, count in (piece.data.get("work") or {}).items():
            found[name] = found.get(name, 0) + int(count)
    return found


def _runs(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    return [
        {
            "run": piece.name,
            "lane": piece.text("lane"),
            "node": piece.text("node"),
            "taken": piece.number("taken"),
            "outcome": piece.text("outcome"),
        }
        for piece in pieces
        if piece.number("taken") is not None
    ]


def fields_of(raw: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The pieces among the fields of a job's record, by the name of their run."""
    return {
        name.decode()[len(FIELD) :]: value
        for name, value in raw.items()
        if name.startswith(FIELD.encode())
    }
