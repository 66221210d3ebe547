"""The published set-up of two machines, simulated: what it does, and what it would do otherwise.

Every rate is a claim (see the profiles' `source`). Nothing is fitted to the times of requests.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from scheduler.simulation.cluster import Cluster, Turn
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.profile import Profile, load
from store.environment import LIVE_CEILING

PROMPT, OUTPUT = 17_500, 256
#: Free for conversations on the machine that decodes, as claimed.
ROOM = 300e9
LENGTHS = (4_000, 17_500, 100_000)
#: Requests of the mixed load; prompts and answers of these lengths, at random times.
MIXED, MIXED_PROMPTS, MIXED_LOADS = 300, (1_000, 4_000, 8_000, 17_500), (0.2, 0.5, 0.8)
ASSUMPTIONS = """\
The M5's 988 tokens/s in the split against 1,042 alone are taken to be the price of handing \
over (0.92 s for 17,500 tokens), paid by the prefill node when the state leaves it; an answer \
that stays does not pay it before its end.
Of the 18.5 s to the split's first token, 0.75 s are not explained by prefill and transfer: they \
are taken to be spent at the decode node after the M5 is free (0.72 s from the state's arrival to \
the first step, then that step).
No rate is known for several rows in one batch: rows take turns, so that all of them together \
get the rate of one. The mixed load is run at the other extreme as well.
""".splitlines()


def lone(cluster: Cluster, prompt: int = PROMPT, output: int = OUTPUT) -> Turn:
    """One request and nothing else."""
    return back_to_back(cluster, 1, prompt, output)[0]


def back_to_back(cluster: Cluster, count: int, prompt: int, output: int) -> list[Turn]:
    """`count` equal requests that all come at once."""
    turns = [Turn(k, 0.0, prompt, output) for k in range(count)]
    Pipeline(cluster, turns).run()
    return turns


def interval(cluster: Cluster, count: int = 6) -> float:
    """Seconds between two answers of a queue that is never empty."""
    ended = [turn.ended for turn in back_to_back(cluster, count, PROMPT, OUTPUT)]
    # The last one has nobody behind it.
    return (ended[-2] - ended[0]) / (count - 2)


def seed() -> dict[str, Any]:
    """The published set-up: an M5 Ultra prefills, an M3 Ultra decodes GLM-5.3-Flash."""
    m5, m3 = load("m5-ultra"), load("m3-ultra")
    split = Cluster.of([m5], [m3])
    late = replace(split, handoff="late")
    alone = {"m5_alone": Cluster.of([], [m5]), "m3_alone": Cluster.of([], [m3])}
    first, stayed = lone(split), lone(late)
    found: dict[str, Any] = {
        "split": {
            "ttft_s": round(first.ttft, 3),
            "total_s": round(first.ended, 3),
            "prefill_free_s": round(first.prefilled + PROMPT * m5.handing_over_s, 3),
            "interval_s": round(interval(split), 3),
            "bytes": round(first.moved),
        }
    }
    for name, cluster in alone.items():
        turn = lone(cluster)
        found[name] = {"ttft_s": round(turn.ttft, 3), "total_s": round(turn.ended, 3)}
        last = max(t.ended for t in back_to_back(cluster, 6, PROMPT, OUTPUT))
        found[name]["interval_s"] = round(last / 6, 3)
    found["late"] = {
        "lone_total_s": round(stayed.ended, 3),
        "lone_total_vs_m5": round(stayed.ended / found["m5_alone"]["total_s"], 4),
        "interval_s": round(interval(late), 3),
        "interval_vs_split": round(interval(late) / found["split"]["interval_s"], 4),
        "mixed": [
            {"rows": rows, **_mixed(load, first, second)}
            for rows, (first, second) in {
                "take turns": (m5, m3),
                "cost nothing": (_free(m5), _free(m3)),
            }.items()
            for load in MIXED_LOADS
        ],
    }
    found["capacity"] = [capacity(tokens, m3) for tokens in LENGTHS]
    found["assumptions"] = ASSUMPTIONS
    found["sources"] = {profile.name: profile.source for profile in (m5, m3)}
    return found


def _free(profile: Profile) -> Profile:
    """The other extreme of what is not known: a step takes as long for eight rows as for one."""
    ((_, context, rate),) = profile.decode
    widths = tuple((width, context, width * rate) for width in (1, 2, 8))
    return replace(profile, decode=widths)


def _mixed(load: float, first: Profile, second: Profile) -> dict[str, Any]:
    """Mean seconds from arrival to the last token, for prompts that keep `first` so busy."""
    split = Cluster.of([first], [second])
    late = replace(split, handoff="late")
    clusters = {"late": late, "split": split, "m5_alone": Cluster.of([], [first])}
    chance = random.Random(7)
    mean = sum(first.prefill_s(0, tokens, first.chunk) for tokens in MIXED_PROMPTS) / 4
    at, turns = 0.0, []
    for number in range(MIXED):
        at += chance.expovariate(load / mean)
        prompt, output = chance.choice(MIXED_PROMPTS), chance.randint(32, 2 * OUTPUT)
        turns.append(Turn(number, at, prompt, output))
    found: dict[str, Any] = {"load": load, "mean_completion_s": {}}
    for name, cluster in clusters.items():
        mine = [replace(turn) for turn in turns]
        Pipeline(cluster, mine).run()
        seconds = sum(turn.ended - turn.at for turn in mine) / len(mine)
        found["mean_completion_s"][name] = round(seconds, 2)
    return found


def capacity(tokens: int, profile: Profile, room: float = ROOM) -> dict[str, Any]:
    """How many conversations of a length fit, by the size law: fixed bytes and so many a token.

    `stored_*`: in a store of that size, which keeps a part free.
    """
    each = profile.state_bytes(tokens)
    count, stored = int(room / each), int(room * LIVE_CEILING / each)
    return {
        "tokens": tokens,
        "bytes": round(each),
        "conversations": count,
        "million_tokens": round(count * tokens / 1e6, 2),
        "stored_conversations": stored,
        "stored_million_tokens": round(stored * tokens / 1e6, 2),
    }
