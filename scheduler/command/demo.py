"""`tandem demo`: the main job on a private stack, and the proof that its answers are right."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from scheduler.command.demo_run import Demo
from scheduler.command.demo_table import show
from scheduler.command.flags import MODEL, config_flags
from scheduler.config import Config, ConfigError, load
from scheduler.host.stack import StackFailed, free_port
from scheduler.host.up import fetch_model

_HELP = """\
Shows Tandem's main job and checks it. Starts a private stack in a temporary directory, submits a
prompt of more than 2,000 tokens, follows its prefill, hand-off and answer; lets the conversation
become idle and be saved; kills the decode worker (SIGKILL) and waits for its restart; resumes the
conversation by its ID; and computes both answers again alone in one process without any cache.

Exit status 0 only if both answers equal that solo run and the resume computed exactly the new
turn's tokens.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="run the main job end to end and check it",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_flags(parser, model=MODEL, data="make the private directory there")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no more")
    parser.add_argument("--keep", action="store_true", help="leave the stack running until Ctrl-C")
    parser.add_argument("--tokens", type=int, default=64, help="length of each answer (64)")
    parser.add_argument(
        "--words", type=int, default=0, help="read so many words of the story only (0: all, 1616)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; the exit status is its verdict."""
    if args.tokens < 1:
        raise ConfigError(f"--tokens = {args.tokens} is not accepted: give 1 or more")
    if args.words < 0:
        raise ConfigError(f"--words = {args.words} is not accepted: give 0 (all) or more")
    user = load(args.config, {"model": args.model})
    console = Console(stderr=args.json, highlight=False, quiet=args.json)
    base = args.data.expanduser() if args.data else Path(tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="tandem-demo-", dir=base))
    console.print(f"private stack in {directory}")
    demo: Demo | None = None
    # The death that the supervisor would report is part of the show.
    logging.getLogger("tandem.supervisor").setLevel(logging.ERROR)
    _end_like_ctrl_c()
    try:
        config = fetch_model(demo_config(user, directory), Console(stderr=True))
        demo = Demo(config, console, args.tokens, args.words)
        outcome = demo.run()
        show(outcome, console)
        if args.json:
            print(json.dumps(outcome, indent=2))
        if args.keep:
            _keep(config, console, demo)
        return 0 if outcome["ok"] else 1
    except StackFailed as error:
        print(f"tandem: {error}", file=sys.stderr)
        if demo is not None:
            demo.show_logs()
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if demo is not None:
            demo.close()
        shutil.rmtree(directory, ignore_errors=True)


def demo_config(user: Config, directory: Path) -> Config:
    """A stack of its own: nothing of the user's but the model."""
    tree: dict[str, Any] = {
        "data_dir": directory,
        "models_dir": user.models_dir,
        "model": user.model,
        "model_dir": user.model_dir,
        "prefill": user.prefill.model_dump(),
        "api": {"port": free_port()},
        "store": {"idle_seconds": 0.5, "size_gb": 2.0, "hot_gb": user.store.hot_gb},
        "jobs": {"drain_seconds": 5.0},
    }
    return Config.model_validate(tree)


def _end_like_ctrl_c() -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _keep(config: Config, console: Console, demo: Demo) -> None:
    say: Callable[..., None] = Console(stderr=True, highlight=False).print
    say(f"api        {config.api_url}/v1")
    say(f"dashboard  {config.api_url}/rq")
    say("Ctrl-C stops the stack and removes its directory")
    demo.wait()
