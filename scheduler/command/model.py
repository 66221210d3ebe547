"""`tandem model`: bring a model to the other machine, check its files, serve another one."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from scheduler.command.flags import config_flags, config_of, json_flag, no_redis
from scheduler.config import Config, ConfigError, find_model
from scheduler.host.agent import ANSWER_SECONDS, SWITCH, Machine
from scheduler.record import LIVE
from scheduler.redis_client import connect
from scheduler.serializer import pack, unpack
from transport.files import listing, verify
from transport.manifest import NAME
from transport.push import FileClient

_TEXT = """\
Models on both machines. Both need the same files; `tandem up` must run on the other machine.

  tandem model list               what lies on both machines
  tandem model push NAME          bring it to the other machine; again after a break: it goes on
  tandem model verify NAME        read every byte here and there, and compare
  tandem model use NAME           drain, then serve it on both machines

NAME is a directory in models_dir; push takes the path of any directory as well.
"""
PAUSED = "tandem:paused"
PAUSE_SECONDS = 60
ASK_SECONDS = 180.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `model` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "model", help="push, verify and switch models", description=_TEXT, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="model_command", required=True, metavar="COMMAND")
    for name, text, run in (
        ("list", "what lies on both machines", run_list),
        ("push", "bring a model to the other machine", run_push),
        ("verify", "read a model's files here and there, and compare", run_verify),
        ("use", "drain, then serve another model on both machines", run_use),
    ):
        command = commands.add_parser(name, help=text, description=text)
        config_flags(command)
        json_flag(command)
        command.set_defaults(run=run)
        if name != "list":
            command.add_argument("model", metavar="NAME")
        if name == "push":
            command.add_argument("--name", dest="to", help="its name on the other machine")
        if name == "verify":
            command.add_argument("--here", action="store_true", help="only on this machine")
        if name == "use":
            command.add_argument(
                "--wait", type=float, default=3600.0, metavar="SECONDS",
                help="how long jobs that wait or run may take to end (3600)",
            )  # fmt: skip


def run_list(args: argparse.Namespace) -> int:
    """Models here and on the other machine."""
    config = config_of(args)
    found = {config.node: listing(config.models_dir)}
    try:
        with _peer(config) as (machine, client):
            found[machine.node] = client.models()
    except ConfigError as error:
        if not args.json:
            print(f"only this machine: {error}", file=sys.stderr)
    served = _served(config)
    if args.json:
        serving = config.model_name if config.model_name in served.values() else ""
        configured = config.model_name
        print(json.dumps({"models": found, "configured": configured, "serving": serving}))
        return 0
    for node, models in found.items():
        for model in models:
            state = "configured" if model["name"] == config.model_name else ""
            if model["name"] == served.get(node):
                state = "serves"
            elif model["partial"]:
                state = "in part"
            print(f"{node:<10} {model['name']:<40} {model['bytes'] / 1e9:>8.2f} GB  {state}")
    return 0


def _served(config: Config) -> dict[str, str]:
    """The model that each machine serves now, by name of the machine; none where nothing runs."""
    with suppress(ConfigError), _redis(config) as client:
        return {one.node: one.ready for one in Machine.all(client)}
    return {}


def run_push(args: argparse.Namespace) -> int:
    """Bring a directory to the other machine."""
    config = config_of(args)
    directory = _directory(config, args.model)
    name = args.to or directory.name
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a model's name there: give one with --name")
    began = time.monotonic()
    with _peer(config) as (machine, client), _bar(args.json) as report:
        digest = client.push(directory, name, report)
    told = {"model": name, "to": machine.node, "digest": digest}
    _say(args, told, f"{name} is whole on {machine.node}, every byte read back and compared "
                     f"({time.monotonic() - began:.0f} s)")  # fmt: skip
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Read and compare; 1 where anything differs."""
    config = config_of(args)
    directory = _directory(config, args.model)
    here = args.here or config.alone
    with _bar(args.json) as report:
        mine, problems = verify(directory, lambda done, total: report("verifying", done, total))
        told: dict[str, Any] = {"model": directory.name, config.node: mine, "problems": problems}
        if not here:
            with _peer(config) as (machine, client):
                theirs, trouble = client.digest(directory.name, report)
            told |= {machine.node: theirs}
            problems += [f"on {machine.node}: {line}" for line in trouble]
            if theirs != mine and not problems:
                problems.append(f"{machine.node} has other files than {config.node}")
    good = f"{directory.name} is whole" + ("" if here else " and the same on both machines")
    if config.alone and not args.here:
        good += "; there is no other machine to compare with"
    cure = "remove the directory that is wrong and push the other one's there"
    if config.alone:
        cure = "remove the directory and fetch or convert the model again"
    _say(args, told, "\n".join([*problems, f"cure: {cure}"]) if problems else good)
    return 1 if problems else 0


def run_use(args: argparse.Namespace) -> int:
    """Ask both machines, drain, switch, wait until both serve it."""
    config = config_of(args)
    with _redis(config) as client:
        machines = Machine.all(client)
        if not machines:
            raise ConfigError("no machine runs `tandem up`: start it, or edit `model` in the file")
        order = {"id": secrets.token_hex(6), "name": args.model, "phase": "ask"}
        try:
            client.set(SWITCH, pack(order), ex=ANSWER_SECONDS)
            _agree(client, order, machines)
            reason = f"the model is being changed to {args.model}"
            _drain(client, reason, args.wait, args.json)
            client.set(SWITCH, pack({**order, "phase": "go"}), ex=ANSWER_SECONDS)
            _until(
                client,
                lambda: (
                    all(one.ready == args.model for one in Machine.all(client))
                    and len(Machine.all(client)) >= len(machines)
                ),
                reason,
                ANSWER_SECONDS,
                "the machines did not get ready in time: see `tandem service logs`",
            )
        finally:
            client.delete(SWITCH, PAUSED)
    names = [one.node for one in machines]
    told = {"model": args.model, "machines": names}
    _say(args, told, f"{' and '.join(names)} serve {args.model}")
    return 0


def _agree(client: redis.Redis, order: dict[str, Any], machines: list[Machine]) -> None:
    """Every machine could serve the model, and those that know its digest know the same one."""
    end = time.monotonic() + ASK_SECONDS
    digests: dict[str, str] = {}
    for machine in machines:
        key = f"{SWITCH}:{order['id']}:{machine.node}"
        while not (value := cast("bytes | None", client.get(key))):
            if time.monotonic() > end:
                raise ConfigError(f"{machine.node} does not answer: look at `tandem service logs`")
            time.sleep(0.2)
        answer = unpack(value)
        if answer["problem"]:
            raise ConfigError(f"{machine.node} cannot serve {order['name']}: {answer['problem']}")
        if answer.get("digest"):
            digests[machine.node] = answer["digest"]
    if len(set(digests.values())) > 1:
        raise ConfigError(
            f"the machines have different files of {order['name']}: run `tandem model verify`"
        )


def _drain(client: redis.Redis, reason: str, wait: float, quiet: bool) -> None:
    """Accept nothing more and wait until what was accepted has ended."""
    told = -1

    def empty() -> bool:
        nonlocal told
        left = sum([client.zcard(f"tandem:jobs:{status}") for status in LIVE])
        if left != told and not quiet:
            print(f"{left} jobs are still to end", flush=True)
        told = left
        return left == 0

    _until(client, empty, reason, wait, f"jobs did not end within {wait:.0f} s: nothing is changed")


def _until(
    client: redis.Redis, ready: Callable[[], bool], reason: str, seconds: float, failure: str
) -> None:
    """Wait with the intake paused; the pause ends by itself where this process does."""
    end = time.monotonic() + seconds
    while True:
        client.set(PAUSED, reason, ex=PAUSE_SECONDS)
        if ready():
            return
        if time.monotonic() > end:
            raise ConfigError(failure)
        time.sleep(0.3)


def _directory(config: Config, name: str) -> Path:
    found = find_model(config.model_copy(update={"model": name, "model_dir": None}))
    if found is None:
        there = ", ".join(model["name"] for model in listing(config.models_dir)) or "none"
        raise ConfigError(
            f"there is no directory {name}, nor a model of that name in {config.models_dir} "
            f"(there: {there})"
        )
    return found


@contextmanager
def _redis(config: Config) -> Iterator[redis.Redis]:
    try:
        with connect(config.redis_url_of("api"), timeout=5.0, patience=1.0) as client:
            yield client
    except RedisError as error:
        raise ConfigError(no_redis(config, error)) from None


@contextmanager
def _peer(config: Config) -> Iterator[tuple[Machine, FileClient]]:
    """The other machine and a connection to it. Raises ConfigError."""
    if config.alone:
        raise ConfigError(
            "there is no other machine: this one is set up to do everything (`tandem init` sets up "
            "two)"
        )
    with _redis(config) as client:
        others = [one for one in Machine.all(client) if one.node != config.node and one.files]
    if not others:
        raise ConfigError(
            "the other machine takes no models now: run `tandem up` there, and check that the "
            "cable is in (`tandem doctor`)"
        )
    host, _, port = others[0].files.rpartition(":")
    files = FileClient((host, int(port)), bytes.fromhex(others[0].secret))
    try:
        yield others[0], files
    finally:
        files.close()


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal; elsewhere a line now and then on standard error."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    shown = console.is_terminal and not quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        tasks: dict[str, Any] = {}
        said = time.monotonic()

        def report(stage: str, done: int, total: int) -> None:
            nonlocal said
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)
            if not shown and not quiet and time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{stage}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", file=sys.stderr)

        yield report


def _say(args: argparse.Namespace, found: dict[str, Any], text: str) -> None:
    print(json.dumps(found) if args.json else text)
