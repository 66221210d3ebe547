"""`tandem serve`: the API alone."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from scheduler.command import watch
from scheduler.command.flags import MODEL, config_flags, config_of
from scheduler.config import RESOLVED, ConfigError
from scheduler.host.supervisor import CONFIGURATION

_SERVE = """\
Run the API alone, for a machine where the workers and Redis run elsewhere or by themselves.
`tandem up` runs everything at once.

  REDIS_URL=redis://10.0.0.1:6379 tandem serve --config tandem.toml
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add serve to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="run the API alone",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_flags(parser, model=MODEL)
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8420)")
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Be the API process until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    supervised = RESOLVED in os.environ
    try:
        flags = {"model": args.model, "api.host": args.host, "api.port": args.port}
        config = config_of(args, **flags)
        # Both bring in half of the web; the other commands do without.
        from scheduler.api import app as api
        from scheduler.api.tokenizer import TokenizerError
        from scheduler.host import data_dir, up

        config = up.fetch_model(config, watch.stderr())
        data_dir.prepare(config)
        try:
            return api.serve(config)
        except TokenizerError as error:
            raise ConfigError(str(error)) from error
    except ConfigError as error:
        if not supervised:
            raise
        print(f"tandem: {error}", file=sys.stderr)
        return CONFIGURATION
