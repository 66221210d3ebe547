"""`tandem jobs` and `tandem cancel`: what waits, runs and has ended, and ending one."""

from __future__ import annotations

import argparse
import time

from rich.table import Table

from scheduler.command.flags import client_flags, client_of
from scheduler.command.printing import age, out, place, print_json
from scheduler.record import STATUSES, TERMINAL

_JOBS = """\
List what waits, runs and has ended, newest first.

  tandem jobs
  tandem jobs --status live --json
"""
_CANCEL = """\
Cancel a job that waits or runs. What it has written so far is kept.

  tandem cancel resp_3f2a...
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add jobs and cancel to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    jobs = subparsers.add_parser(
        "jobs", help="list what waits, runs and has ended", description=_JOBS, formatter_class=raw
    )
    client_flags(jobs)
    jobs.add_argument(
        "--status", metavar="STAGE", help=f"{', '.join(STATUSES)}, or live: what has not ended"
    )
    jobs.add_argument("--limit", type=int, default=30, metavar="N", help="at most N (30)")
    jobs.set_defaults(run=run_jobs)
    cancel = subparsers.add_parser(
        "cancel", help="cancel a job", description=_CANCEL, formatter_class=raw
    )
    client_flags(cancel)
    cancel.add_argument("id", metavar="ID", help="resp_...")
    cancel.set_defaults(run=run_cancel)


def run_jobs(args: argparse.Namespace) -> int:
    """List responses."""
    with client_of(args) as client:
        jobs = client.jobs(args.status, args.limit)
    if args.json:
        return print_json({"object": "list", "data": jobs})
    if not jobs:
        print("no jobs")
        return 0
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "stage", "queue", "prompt", "cached", "written", "age", "conversation"):
        table.add_column(name, no_wrap=True, overflow="fold")
    now = time.time()
    for job in jobs:
        facts, usage = job["tandem"], job["usage"] or {}
        conversation = (job["conversation"] or {}).get("id", "")
        table.add_row(
            job["id"], str(facts["stage"]), place(facts), f"{facts['prompt_tokens']:,}",
            f"{facts['cached_tokens']:,}", str(usage.get("output_tokens", "")),
            age(now - job["created_at"]), conversation,
        )  # fmt: skip
    out().print(table)
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Cancel one job."""
    with client_of(args) as client:
        before = client.retrieve(args.id)["status"]
        response = client.cancel(args.id)
    if args.json:
        return print_json(response)
    if before in TERMINAL:
        print(f"{response['id']} had ended before ({before}): there was nothing to cancel")
    else:
        print(f"{response['id']} {response['status']}")
    return 0
