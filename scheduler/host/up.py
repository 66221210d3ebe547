"""`tandem up` runs a whole stack on this machine; `tandem worker` runs one role of a larger one."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from scheduler.command.flags import MODEL, config_flags, config_of
from scheduler.config import Config, ConfigError, find_file, find_model, resolved_environment
from scheduler.formats import settle
from scheduler.host import data_dir, model_files, redis_server
from scheduler.host.agent import Agent
from scheduler.host.duties import Nightly, Switching
from scheduler.host.stack import REDIS_SECONDS, ROLES, Stack, StackFailed, check_port
from scheduler.redis_client import connect

_UP = """\
Run Tandem on this machine: Redis (unless REDIS_URL names one), the API, one prefill worker and one
decode worker, each a process of its own, restarted when it dies. Ctrl-C drains and stops them all.

  tandem up                                 the small default model, port 8420
  tandem up --model ~/models/GLM-4bit       any directory or hub name that mlx-vlm loads

On two machines, with one Redis that both reach (redis.url in tandem.toml, or REDIS_URL):

  tandem up --only api,decode               on the machine that keeps the conversations
  tandem up --only prefill                  on the machine that prefills
"""
_WORKER = """\
Run one worker, for a machine of its own. It joins the Redis of the configuration (redis.url or
REDIS_URL) and needs the same model as its peer.

  tandem worker prefill --config tandem.toml
  tandem worker decode  --config tandem.toml
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `up` and `worker` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    up = subparsers.add_parser(
        "up", help="run a whole stack here", description=_UP, formatter_class=raw
    )
    config_flags(up, model=MODEL)
    up.add_argument("--port", type=int, help="port of the API (8420)")
    up.add_argument(
        "--only", metavar="ROLES", help="of api, prefill and decode, with commas (roles)"
    )
    up.set_defaults(run=run_up)
    worker = subparsers.add_parser(
        "worker", help="run one worker here", description=_WORKER, formatter_class=raw
    )
    worker.add_argument("role", choices=("prefill", "decode"), help="which one")
    config_flags(worker, model=MODEL)
    worker.set_defaults(run=run_worker)


def run_up(args: argparse.Namespace) -> int:
    """Run a stack until told to stop. Exit status 0 after a clean stop, 1 after a failure."""
    config = config_of(args, **{"model": args.model, "api.port": args.port})
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    roles = chosen_roles(args.only, config)
    data_dir.check_free(config.data_dir)  # before a download, and before the port it has taken
    if "api" in roles:
        check_port(config)
    if roles == ROLES or find_model(config) or model_files.is_fetchable(config.model):
        config = fetch_model(config, console)
    stack = Stack(config, roles)
    config = stack.config
    file = find_file(args.config, args.data)
    agent = Agent(config, roles, file)
    stack.supervisor.duties += [Switching(stack, agent, file), Nightly(config, roles)]
    stack.supervisor.install_signals()
    try:

        def before() -> None:
            agent.start()
            if config.model_dir is None:
                stack.await_model(console.print)

        stack.start(console.print, before)
        console.print(f"model    loading {stack.config.model_name}; logs in {config.data_dir}/logs")
        stack.wait_ready(console.print)
        agent.ready = stack.config.model_name
        if "api" in roles:
            console.print(f"api      {config.api_url}/v1   model {config.model_name}")
            console.print(f"status   {config.api_url}/   queues {config.api_url}/rq")
        console.print("ready; Ctrl-C drains and stops")
        stack.supervisor.run()
    except StackFailed as error:
        if stack.supervisor.stopping:
            return 0
        console.print(f"tandem: {error}", style="red", markup=False)
        return 1
    finally:
        drain = f"what runs has {config.jobs.drain_seconds:g} s to end"
        console.print(f"stopping: {drain}, then states are saved; Ctrl-C again cuts it short")
        agent.close()
        stack.stop()
        console.print("stopped")
    return 0


def chosen_roles(only: str | None, config: Config) -> frozenset[str]:
    """The roles that `--only`, else the configuration, names; else all. Raises ConfigError."""
    if only is None and not config.roles:
        return ROLES
    names = config.roles if only is None else only.split(",")
    roles = frozenset(name.strip() for name in names if name.strip())
    if not roles or roles - ROLES:
        raise ConfigError(
            f"--only = {only!r} is not accepted: name some of {', '.join(sorted(ROLES))}"
        )
    if roles != ROLES and not config.redis.url and not config.redis.listen:
        raise ConfigError(
            "a part of a stack needs a Redis that the other machine reaches: run `tandem init`, or "
            "set redis.listen here, or redis.url or REDIS_URL"
        )
    if "api" in roles and "decode" not in roles:
        raise ConfigError(
            "the API reads conversations from the decode worker's store on its own machine: "
            "use --only api,decode"
        )
    return roles


def run_worker(args: argparse.Namespace) -> int:
    """Become the worker process; does not return."""
    config = config_of(args, model=args.model)
    data_dir.prepare(config)
    try:
        redis_server.probe(config.redis_url, REDIS_SECONDS)
        with connect(config.redis_url) as client:
            settle(client)
    except redis_server.RedisUnavailable as error:
        raise ConfigError(str(error)) from None
    config = fetch_model(config, Console(stderr=True, highlight=False))
    command = [sys.executable, "-P", "-m", f"worker_{args.role}"]
    os.execve(command[0], command, resolved_environment(config))


def fetch_model(config: Config, console: Console) -> Config:
    """Make sure of the model's files, with a progress bar while that takes time."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total or None)
                if not shown:
                    console.print(f"model    {config.model_name}: {stage}")
            bar.update(tasks[stage], completed=done, total=total or None)

        return model_files.ensure(config, show)
