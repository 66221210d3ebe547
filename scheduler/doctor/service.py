"""Checks of Redis, the peer and the store: facts are asked once, then judged by pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import store as store_package
from scheduler.doctor.finding import Check, fail, ok, skip, warn
from scheduler.nodes import Node

#: Seconds that two clocks may differ; durations in reports come from Redis' clock alone.
SKEW_WARN, SKEW_FAIL = 1.0, 30.0
#: Days after which a report of the nightly check is too old.
OLD_DAYS = 3.0


def redis_settings(config: Mapping[str, str] | None, info: Mapping[str, Any], ours: bool) -> Check:
    """`redis settings`: persistence and eviction of the server in use."""
    name = "redis settings"
    if config is None:
        found = {
            "appendonly": "yes" if info.get("aof_enabled") else "no",
            "maxmemory-policy": str(info.get("maxmemory_policy", "")) or "unknown",
        }
    else:
        found = dict(config)
    evidence = ", ".join(f"{key} {value}" for key, value in sorted(found.items()))
    policy = found.get("maxmemory-policy", "unknown")
    if policy not in ("noeviction", "unknown"):
        return fail(
            name,
            f"it may throw jobs away: maxmemory-policy {policy}",
            evidence,
            "run `CONFIG SET maxmemory-policy noeviction`, and set it in redis.conf",
        )
    if found.get("appendonly") != "yes":
        return fail(
            name,
            "jobs are lost when it restarts: no append-only file",
            evidence,
            "run `CONFIG SET appendonly yes`, and set it in redis.conf",
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return fail(
            name,
            "it cannot write its append-only file",
            evidence,
            "free space on its disk: jobs are refused until it can write",
        )
    if found.get("appendfsync", "everysec") == "no":
        return warn(
            name,
            "a power cut may lose half a minute: appendfsync no",
            evidence,
            "run `CONFIG SET appendfsync everysec`",
        )
    return ok(name, "append-only, no eviction" + (", Tandem's own" if ours else ""), evidence)


def clock(skew: float | None, reach: float) -> Check:
    """`clock`: this machine's clock against Redis', `reach` seconds being the round trip."""
    name = "clock"
    if skew is None:
        return skip(name, "Redis does not answer")
    evidence = f"{skew:+.3f} s against Redis' machine, measured to {reach / 2:.3f} s"
    cure = "turn on setting the time automatically on both machines"
    if abs(skew) > SKEW_FAIL:
        return fail(name, f"the clocks differ by {abs(skew):.0f} s", evidence, cure)
    if abs(skew) > SKEW_WARN:
        return warn(name, f"the clocks differ by {abs(skew):.1f} s", evidence, cure)
    return ok(name, f"the clocks differ by {abs(skew) * 1000:.0f} ms", evidence)


def peer(
    nodes: Sequence[Node],
    mine: str,
    roles: Sequence[str],
    reached: str | None,
    away: Sequence[str] = (),
) -> Check:
    """`peer`: the other machine's workers. `reached` is "" where its link answers, else why not;
    None where there is nothing to connect to. `away`: other machines' workers that are
    known and do not report."""
    name = "peer"
    wanted = [role for role in ("prefill", "decode") if role not in roles]
    if not wanted and not away:
        return skip(name, "this machine does everything")
    found = [node for node in nodes if node.role in wanted]
    evidence = ", ".join(f"{n.role} {n.name} on {n.host}: {n.state}" for n in found) or "none"
    if wanted and not found:
        return warn(
            name,
            f"no {wanted[0]} worker has reported",
            evidence,
            f"run `tandem up` on the other machine, or `tandem doctor` where it runs ({mine} waits "
            "for it)",
        )
    if reached:
        return fail(
            name,
            "its link cannot be reached",
            f"{evidence}; {reached}",
            "check the cable and link.host on the decode machine; a firewall on it must "
            "let Python listen",
        )
    if away:
        return warn(
            name,
            f"{', '.join(away)} does not report",
            "known to this Redis",
            "run `tandem doctor` and `tandem up` on its machine; a decode node that does not come "
            "back: `tandem node forget NAME`",
        )
    if any(node.state != "ready" for node in found):
        return warn(name, "it is not ready yet", evidence, "wait until its model is loaded")
    return ok(
        name,
        f"the {wanted[0]} worker is ready" + (", its link answers" * (reached == "")),
        evidence,
    )


def trouble(nodes: Sequence[Node], silent: Sequence[str] = ()) -> Check:
    """`serving`: what workers say of themselves: a full disk, no memory. `silent`: those of this
    machine that should say something, and do not."""
    name = "serving"
    if not nodes:
        return skip(name, "no worker reports")
    said = [
        f"{node.role} {node.name}: {text}" for node in nodes if (text := node.facts.get("trouble"))
    ]
    if said:
        return warn(
            name,
            "it serves, with less than it should",
            "; ".join(said),
            "free some disk, or end other programs; answers stay right meanwhile",
        )
    if silent:
        return skip(name, f"no answer from the {' and the '.join(silent)}: see there")
    told = ", ".join(f"{node.role} {node.name}" for node in nodes)
    return ok(name, "no worker that reports complains", told)


def versions(told: Mapping[str, Mapping[str, str]], *, alone: bool = False) -> Check:
    """`versions`: what each machine told of itself, by its name; the same is needed.

    `alone`: there is no other machine, only what runs here and what would be started now.
    """
    name = "versions"
    if len(told) < 2:
        if alone:
            return skip(name, "there is no other machine to compare with")
        return skip(name, "start both machines: their versions are compared")
    first, *others = told.values()
    evidence = "; ".join(
        f"{who}: tandem {about.get('tandem')}, mlx {about.get('mlx')}, {about.get('system')}"
        for who, about in told.items()
    )
    for key, severe in (
        ("protocol", True),
        ("codec", True),
        ("tandem", False),
        ("mlx", False),
        ("mlx_vlm", False),
        ("system", False),
    ):
        if any(other.get(key) != first.get(key) for other in others):
            cure = "install the same Tandem with the same constraints.txt on both machines"
            if alone:
                cure = "start `tandem up` again: it runs what was installed before"
            elif key == "system":
                cure = "update both machines to the same macOS build; until then use TCP"
            judge = fail if severe else warn
            return judge(name, f"they differ in {key}", evidence, cure)
    same = "all that runs here is the same; there is no other machine"
    return ok(name, same if alone else "both machines run the same", evidence)


def drift(told: Mapping[str, Mapping[str, Any]]) -> Check:
    """`drift`: the logits of a fixed prompt on both machines. Told, never an error."""
    name = "drift"
    if len(told) < 2:
        return skip(name, "start both workers: the logits of a fixed prompt are compared")
    (one, first), (two, second) = list(told.items())[:2]
    left = dict(zip(first.get("ids", ()), first.get("logits", ()), strict=False))
    right = dict(zip(second.get("ids", ()), second.get("logits", ()), strict=False))
    shared = left.keys() & right.keys()
    if not shared:
        return warn(
            name,
            "no best token in common: these are two models",
            f"{one}, {two}",
            "run `tandem model verify` on both machines",
        )
    most = max(abs(left[token] - right[token]) for token in shared)
    same = first["ids"][:1] == second["ids"][:1]
    evidence = (
        f"{one} ({first.get('device')}) and {two} ({second.get('device')}): largest difference "
        f"{most:.6f} over {len(shared)} logits, "
        + ("the same best token" if same else "another best token")
    )
    if most == 0:
        return ok(name, "the same bits", evidence)
    return ok(
        name, f"logits differ by up to {most:.4g}: chips or builds round differently", evidence
    )


def store(
    stats: Mapping[str, Any] | None,
    report: Mapping[str, Any] | None,
    now: float,
    *,
    running: bool = False,
) -> Check:
    """`store health`: what the owner says, and the last nightly check. `running`: it should say
    something."""
    name = "store health"
    if report and not report.get("clean", True):
        return fail(
            name,
            f"the last check found {report.get('found')} problems",
            "; ".join(report.get("problems", [])[:3]),
            "run `tandem store check --repair` (states that are dropped are computed again)",
        )
    evidence = []
    if stats:
        evidence.append(
            f"{stats['conversations']} conversations, {stats['live_share']:.0%} of the map in use, "
            f"{stats['damaged']} damaged blocks seen since the start"
        )
    if report:
        days = (now - float(report.get("at", now))) / 86_400
        evidence.append(f"checked {days:.1f} days ago: clean")
        if days > OLD_DAYS:
            return warn(
                name,
                f"it was last checked {days:.0f} days ago",
                "; ".join(evidence),
                "run `tandem store check`, and let `tandem up` run at night",
            )
    if stats and stats["damaged"]:
        return fail(
            name,
            "stored bytes are damaged",
            "; ".join(evidence),
            "run `tandem store check --repair`, and check the disk",
        )
    if not stats and running:
        return warn(
            name,
            "the store does not answer",
            "; ".join(evidence) or "never checked",
            "see `decode worker`; a model that is being loaded takes minutes",
        )
    if not stats and not report:
        return skip(name, "the store is not open: it is asked while `tandem up` runs")
    return ok(name, "no damage known", "; ".join(evidence))


def copies(stats: Mapping[str, Any] | None) -> Check:
    """`store copies`: how stored states come back to memory, copied and checked.

    The store says it; one that is not open is judged by whether the part is there.
    """
    name = "store copies"
    if stats and "copies" in stats:
        built = stats["copies"] != "in turns"
        evidence = f"the store says: {stats['copies']}"
    else:
        found = _built()
        built, evidence = bool(found), f"built: {found}" if found else "the store is not open"
    if built:
        return ok(name, "states are copied and checked in one pass", evidence)
    return warn(
        name,
        "states are moved and restored more slowly than they could be: copied, then checked",
        f"store/codec/_scatter is not built: there was no C compiler, or no Python headers; "
        f"{evidence}",
        f"install them (on a Mac: `xcode-select --install`), then {_build_again()}",
    )


def _built() -> str:
    """File of the built part; the codec itself is not imported."""
    places = [str(Path(place) / "codec") for place in store_package.__path__]
    spec = PathFinder.find_spec("store.codec._scatter", places)
    return Path(spec.origin).name if spec is not None and spec.origin else ""


def _build_again() -> str:
    """The command that builds it where Tandem is installed."""
    pip = Path(sys.executable).parent / "pip"
    root = Path(store_package.__path__[0]).parent
    if (root / "pyproject.toml").is_file():
        shown = ".venv/bin/pip" if pip.is_relative_to(root / ".venv") else str(pip)
        return f"run in {root}: `{shown} install --no-deps -e .`"
    return (
        f"run in the directory that it was installed from: `{pip} install --force-reinstall "
        "--no-deps .`"
    )


def keepalive(nodes: Sequence[Node], seconds: float, metal: bool) -> Check:
    """`gpu keep-alive`: an idle GPU takes over a second to wake, which looks like a flaky link."""
    name = "gpu keep-alive"
    if not metal:
        return skip(name, "only on Metal")
    if seconds == 0:
        return warn(
            name,
            "pulses are off: the first job after a pause waits for the GPU",
            "device.keepalive_seconds 0",
            "set device.keepalive_seconds to -1",
        )
    pulses = [node.facts.get("pulses") for node in nodes if node.facts.get("pulses") is not None]
    return ok(name, "pulses keep the GPU awake", f"pulses so far: {pulses or 'not started'}")
