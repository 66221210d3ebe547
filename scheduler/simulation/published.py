"""Two published systems, each predicted from its own published rates. Nothing is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scheduler.simulation.cluster import Cluster, Link
from scheduler.simulation.profile import Profile
from scheduler.simulation.scenario import back_to_back, lone


def _profile(
    name: str, prefill: Sequence[tuple[int, float]], decode: float, **more: Any
) -> Profile:
    """From published rates: prefill by prompt length, decode of one row."""
    context = prefill[-1][0]
    return Profile(
        name,
        tuple((tokens, tokens, rate) for tokens, rate in prefill),
        ((1, context, decode),),
        default_chunk=more.pop("chunk", context),
        **more,
    )


def omlx() -> dict[str, Any]:
    """A phase split over two Macs on Qwen3.8-27B: an M5 Max prefills, an M3 Ultra decodes.

    Published: 30,000 tokens at 871.82 tokens/s, 4,096 at 1,005.74; states of 2.120 GB and 422.38
    MB; 324 ms on the wire at 30,000 tokens; 31.21 and 27.37 tokens/s of decode on the M3 Ultra,
    30.15 on the M5 Max. The transfer begins when the prompt is done.
    """
    state = (422_379_520 - 4096 * 65_536.0, 65_536.0)
    link = Link(rate=2_120_024_064 / 0.323979, latency=0.0, overlap=False)
    m5 = _profile("m5-max", [(4096, 1005.74)], 30.15, state=state)
    m3 = _profile("m3-ultra-256", [(4096, 302.33)], 31.21, state=state)
    m5_long = _profile("m5-max", [(30_000, 871.82)], 30.15, state=state)
    m3_long = _profile("m3-ultra-256", [(30_000, 302.33)], 27.37, state=state)
    split = replace(Cluster.of([m5], [m3]), link=link)
    serial = Cluster.of([], [m5])
    gains = {}
    for count, measured in ((2, 1.2025), (4, 1.3139), (8, 1.3773)):
        pipeline = max(t.ended for t in back_to_back(split, count, 4096, 64))
        alone = count * lone(serial, 4096, 64).ended
        gains[f"gain_of_{count}"] = _against(alone / pipeline, measured)
    long = lone(replace(Cluster.of([m5_long], [m3_long]), link=link), 30_000, 64)
    return {
        **gains,
        "pipeline_of_8_s": _against(max(t.ended for t in back_to_back(split, 8, 4096, 64)), 36.699),
        "handoff_of_9410_tokens_s": _against((state[0] + state[1] * 9410) / link.rate, 0.105),
        "total_of_30000_tokens_s": _against(long.ended, 30_000 / 871.82 + 0.324 + 64 / 27.37),
    }


def exo() -> dict[str, Any]:
    """DGX Spark and M3 Ultra on Llama-3.1-8B in 16 bit, 8,192 tokens of prompt and 32 of answer.

    Published: 1.47 s of prefill on the Spark, 5.57 s of prefill and 0.85 s of decode on the M3
    Ultra, which alone takes 6.42 s; 2.32 s together, over 10 Gb/s, layers leaving one by one. 128
    KiB a token follow from the model's configuration. Here chunks of 1,024 leave one by one.
    """
    state = (0.0, 131_072.0)
    spark = _profile("spark", [(8192, 8192 / 1.47)], 32 / 2.87, state=state, chunk=1024)
    m3 = _profile("m3-ultra", [(8192, 8192 / 5.57)], 32 / 0.85, state=state)
    split = replace(Cluster.of([spark], [m3]), link=Link(rate=10e9 / 8, latency=0.0005))
    together, alone = lone(split, 8192, 32).ended, lone(Cluster.of([], [m3]), 8192, 32).ended
    return {
        "total_s": _against(together, 2.32),
        "alone_s": _against(alone, 6.42),
        "gain": _against(alone / together, 6.42 / 2.32),
    }


def _against(predicted: float, published: float) -> dict[str, float]:
    return {
        "predicted": round(predicted, 4),
        "published": round(published, 4),
        "ratio": round(predicted / published, 4),
    }


def published() -> dict[str, Any]:
    """Both systems, each predicted from its own rates."""
    return {"omlx": omlx(), "exo": exo()}
