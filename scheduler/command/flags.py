"""The flags that commands share, and what they name: a configuration, and the API it describes."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from scheduler.command.client import URL, Client, ClientError
from scheduler.config import Config, load
from scheduler.host import data_dir

#: Help of `--model` where it names what is served.
MODEL = "model: a name, hub name or directory"
_CONFIG = "tandem.toml to read (TANDEM_CONFIG, ./tandem.toml, or the data directory's)"
_DATA = "data directory (TANDEM_DATA, or the platform's; see the README)"


def config_flags(
    parser: argparse.ArgumentParser, *, model: str = "", config: str = _CONFIG, data: str = _DATA
) -> None:
    """Add `--config` and `--data`, and with a help text `model` also `--model`.

    `config` and `data` are their help, for a command that uses them otherwise.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    parser.add_argument("--data", type=data_dir.directory, metavar="DIR", help=data)
    if model:
        parser.add_argument("--model", metavar="NAME", help=model)


def json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def client_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that speaks to the API."""
    parser.add_argument("--url", help=f"the API ({URL}, or the configuration's address)")
    config_flags(parser)
    json_flag(parser)


def config_of(args: argparse.Namespace, **more: Any) -> Config:
    """The configuration that the flags of `config_flags` name; `more` holds further keys.

    Raises ConfigError.
    """
    return load(args.config, {"data_dir": args.data, **more})


def client_of(args: argparse.Namespace) -> Client:
    """The API that the flags of `client_flags` name. Raises ConfigError and ClientError."""
    config = config_of(args)
    named = args.url or os.environ.get(URL)
    if not named and (cause := without_api(config)):
        raise ClientError(f"{cause}: ask on the other one, or name its API with --url or {URL}", 2)
    return Client.of(config, named, start=up_command(args))


def up_command(args: argparse.Namespace) -> str:
    """The `tandem up` that starts what the flags of `config_flags` name."""
    words = ["tandem", "up"]
    for flag, value in (("--config", args.config), ("--data", args.data)):
        words += [flag, str(value)] if value is not None else []
    return shlex.join(words)


def without_api(config: Config) -> str:
    """Says that no API runs on this machine; empty where one does."""
    if not config.roles or "api" in config.roles:
        return ""
    return f"no API runs on this machine, which does {' and '.join(config.roles)}"


def no_redis(config: Config, error: Exception) -> str:
    """What to say where Redis answers no command: that no Tandem runs here, or where to look."""
    lines = str(error).splitlines()
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    if config.redis.url:
        return (
            f"Redis does not answer ({reason}): is `tandem up` running on the machine that has it, "
            "and the cable in? See `tandem doctor`"
        )
    if data_dir.owner(config.data_dir) is None:
        return f"no Tandem runs here: start it with `tandem up` (Redis: {reason})"
    return f"Redis does not answer ({reason}): see `tandem doctor` and `tandem service logs redis`"
