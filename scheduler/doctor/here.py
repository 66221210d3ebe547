"""Whether what should run on this machine does: `tandem up`, its workers, its API.

Who should be there is known from what `tandem up` was told to run, not from who has reported: a
process that is frozen reports nothing and is missed by nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scheduler.config import Config
from scheduler.doctor.capture import Output
from scheduler.doctor.finding import Check, fail, ok, skip, warn
from scheduler.host import logs
from scheduler.host.stack import MODULES
from scheduler.nodes import Node

API_SECONDS = 5.0
"""How long each question to the API may take."""
PROCESSES = ("ps", "-A", "-ww", "-o", "pid=", "-o", "ppid=", "-o", "stat=", "-o", "args=")
START = "run `tandem up`, or `tandem service install` for good"
NOT_RUNNING = "not running: start it with `tandem up`"


@dataclass(frozen=True)
class Process:
    """A process of the stack. `stopped`: it exists and is given no time (SIGSTOP, a debugger)."""

    pid: int
    stopped: bool


@dataclass(frozen=True)
class Running:
    """What is known of the stack here. `up`: process id of `tandem up`, None where none runs.

    `children`: its processes by role, None where the system could not tell. `roles`: what it runs.
    """

    up: int | None
    roles: Sequence[str]
    children: Mapping[str, Process] | None = None
    logs: Path = field(default_factory=Path)


def children(up: int | None, listed: Output | None) -> dict[str, Process] | None:
    """The processes of the stack by role, from what `ps` has listed; None where it cannot tell."""
    rows = [line.split(None, 3) for line in listed.text.splitlines()] if listed else []
    rows = [row for row in rows if len(row) == 4]
    if up is None or str(up) not in [row[0] for row in rows]:
        return None
    found = {}
    for pid, parent, state, words in rows:
        for name, module in MODULES.items():
            if parent == str(up) and f" -m {' '.join(module)} " in f"{words} " and state[0] != "Z":
                found[name] = Process(int(pid), state[0] in "Tt")
    return found


def up(running: Running) -> Check:
    """`tandem up`: whether it runs here."""
    name = "tandem up"
    if running.up is None:
        return skip(name, "not running", "nobody has claimed the data directory", START)
    return ok(name, f"it runs {', '.join(running.roles)}", f"process {running.up}")


def worker(role: str, node: Node | None, running: Running, answers: bool) -> Check:
    """`prefill worker`, `decode worker`: whether this machine's lives. `node`: what it reported,
    `answers`: whether Redis could be asked for that."""
    name = f"{role} worker"
    if role not in running.roles:
        return skip(name, "not a part of this machine")
    if running.up is None and node is None:
        return skip(name, NOT_RUNNING)
    process = (running.children or {}).get(role)
    evidence = f"process {process.pid}" if process else f"`tandem up` is process {running.up}"
    if process and process.stopped:
        return _stopped(name, process)
    if running.up is not None and running.children is not None and process is None:
        return fail(
            name,
            "it has ended, or has not been started yet",
            evidence + _last_line(running, role),
            f"`tandem up` starts it by itself; if it is not there in half a minute: {_log(role)}",
        )
    if not answers:
        return skip(name, "Redis does not answer", evidence)
    if node is None:
        return fail(
            name,
            "it has not reported for seconds: it hangs, or has only just begun",
            evidence + _last_line(running, role),
            f"ask again; if it stays so: {_log(role)}, then start `tandem up` again",
        )
    if process and node.pid != process.pid:
        return fail(
            name,
            "it has been started anew and has not reported yet",
            f"{evidence}, what has reported was {node.pid}" + _last_line(running, role),
            f"ask again in half a minute; if it ends again and again: {_log(role)}",
        )
    if node.state != "ready":
        return warn(
            name, f"it is {node.state}", evidence, f"wait until its model is loaded; {_log(role)}"
        )
    return ok(name, "it is ready", f"process {node.pid}")


def without_model(role: str, name_of: str) -> Check:
    """A worker that `tandem up` starts once the model's files are here."""
    return warn(
        f"{role} worker",
        f"it waits for the files of {name_of}",
        "`tandem up` runs, and starts it as soon as they are here",
        f"run `tandem model push {name_of}` on the machine that has them",
    )


def ask_api(url: str) -> dict[str, Any]:
    """What /ready says, after /health; `problem` where one gives no answer in time, `lives` where
    that is /ready: it asks the others."""
    path = "/health"
    try:
        with httpx.Client(base_url=url, timeout=API_SECONDS, trust_env=False) as client:
            client.get(path).raise_for_status()
            path = "/ready"
            found = client.get(path).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        lines = str(error).splitlines()
        problem = f"{url}{path}: {lines[0] if lines else type(error).__name__}"
        return {"problem": problem, "lives": path == "/ready"}
    return found if isinstance(found, dict) else {"problem": f"{url}{path}: no object"}


def api(found: Mapping[str, Any] | None, running: Running, nodes: Sequence[Node]) -> Check:
    """`api`: whether this machine's answers, and what it says is missing. `found`: of `ask_api`."""
    name = "api"
    if "api" not in running.roles:
        return skip(name, "not a part of this machine")
    if running.up is None:
        return skip(name, NOT_RUNNING)
    process = (running.children or {}).get("api")
    if process and process.stopped:
        return _stopped(name, process)
    if found is None:
        return skip(name, "where it listens is not known")
    if found.get("lives"):
        return fail(
            name,
            f"it lives, and does not say within {API_SECONDS:g} s whether it is ready",
            str(found["problem"]),
            "a part that it asks hangs: see `decode worker` and `redis`",
        )
    if "problem" in found:
        return fail(
            name,
            f"it gives no answer within {API_SECONDS:g} s: no request is served",
            str(found["problem"]) + _last_line(running, "api"),
            f"wait where it has only just been started; else {_log('api')}, then start "
            "`tandem up` again",
        )
    missing = "; ".join(str(what) for what in found.get("missing", ()))
    if found.get("ready"):
        return ok(name, "it answers, and nothing is missing")
    if found.get("redis") and found.get("store") and found.get("decode"):
        return warn(
            name, "it answers; no prefill worker is ready, which is slower", missing,
            "see `peer` and `prefill worker`",
        )  # fmt: skip
    if any(node.role == "decode" and node.state == "starting" for node in nodes):
        return warn(name, "it answers, requests wait", missing, "wait until the model is loaded")
    return fail(
        name, "it answers, and no request is served", missing, "see `decode worker` and `redis`"
    )


def redis_away(running: Running, where: str, problem: str) -> Check:
    """`redis`: Tandem's own does not answer although `tandem up` runs."""
    process = (running.children or {}).get("redis")
    if process and process.stopped:
        return _stopped("redis", process)
    return fail(
        "redis",
        "it does not answer: nothing can be served",
        f"{where}: {problem}" + _last_line(running, "redis"),
        f"`tandem up` starts it by itself; if it does not answer in half a minute: {_log('redis')}",
    )


def roles_of(config: Config) -> tuple[str, ...]:
    """What this machine is configured to run."""
    return tuple(config.roles or ("api", "prefill", "decode"))


def is_stopped(running: Running, role: str) -> bool:
    """Whether the process of a role exists and is given no time."""
    process = (running.children or {}).get(role)
    return process is not None and process.stopped


def _stopped(name: str, process: Process) -> Check:
    return fail(
        name,
        "its process is stopped and does nothing",
        f"process {process.pid} got SIGSTOP, or a debugger holds it",
        f"let it go on: `kill -CONT {process.pid}`",
    )


def _log(role: str) -> str:
    return f"see `tandem service logs {role}`"


def _last_line(running: Running, role: str) -> str:
    last = logs.tail(running.logs / f"{role}.log", 1)
    return f"; its log ends: {last[0].strip()[:160]}" if last else ""
