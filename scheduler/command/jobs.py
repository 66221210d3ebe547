"""The commands that people use on a running stack, and `tandem serve`."""

from __future__ import annotations

import argparse
import json
import logging
import mimetypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.command import watch
from scheduler.command.client import Client, ClientError
from scheduler.config import RESOLVED, ConfigError, load
from scheduler.host import data_dir
from scheduler.host.supervisor import CONFIGURATION
from scheduler.images import data_url

_SUBMIT = """\
Submit the text of a file (or of standard input) and show the answer as it comes. The job stays
when this command is interrupted: `tandem show ID` finds it again.

  tandem submit question.txt
  echo "Why is the sky blue?" | tandem submit - --max-tokens 200
  echo "What is this?" | tandem submit - --image photo.jpg
  tandem submit report.txt --instructions "Summarise in five lines." --json
"""
_RESUME = """\
Go on from an earlier answer. With a response's ID (resp_...) the conversation continues after
exactly that answer, as a branch if it has gone on since; with a conversation's ID (conv_...) after
its newest.

  tandem resume resp_3f2a... "And why at sunset?"
  tandem resume conv_77b0... - < follow-up.txt
"""
_JOBS = """\
List what waits, runs and has ended, newest first.

  tandem jobs
  tandem jobs --status live --json
"""
_SHOW = """\
Show a response (resp_...) with where it is and what it cost, or a conversation (conv_...) with
everything said in it.

  tandem show resp_3f2a...
"""
_CANCEL = """\
Cancel a job that waits or runs. What it has written so far is kept.

  tandem cancel resp_3f2a...
"""
_SERVE = """\
Run the API alone, for a machine where the workers and Redis run elsewhere or by themselves.
`tandem up` runs everything at once.

  REDIS_URL=redis://10.0.0.1:6379 tandem serve --config tandem.toml
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add submit, resume, jobs, show, cancel and serve to the command line."""
    submit = _add(subparsers, "submit", "submit a prompt and show the answer", _SUBMIT, run_submit)
    submit.add_argument("file", metavar="FILE", help="text file, or - for standard input")
    submit.add_argument("--conversation", metavar="ID", help="put it at the end of a conversation")
    _asking_flags(submit)
    resume = _add(subparsers, "resume", "continue by ID", _RESUME, run_resume)
    resume.add_argument("id", metavar="ID", help="resp_... or conv_...")
    resume.add_argument("text", metavar="TEXT", help="what to say next, or - for standard input")
    _asking_flags(resume)
    jobs = _add(subparsers, "jobs", "list what waits, runs and has ended", _JOBS, run_jobs)
    jobs.add_argument("--status", metavar="STAGE", help="queued, decoding, ..., or live")
    jobs.add_argument("--limit", type=int, default=30, metavar="N", help="at most N (30)")
    show = _add(subparsers, "show", "show a response or a conversation", _SHOW, run_show)
    show.add_argument("id", metavar="ID", help="resp_... or conv_...")
    show.add_argument("--wait", action="store_true", help="wait for a response's end first")
    cancel = _add(subparsers, "cancel", "cancel a job", _CANCEL, run_cancel)
    cancel.add_argument("id", metavar="ID", help="resp_...")
    serve = subparsers.add_parser(
        "serve",
        help="run the API alone",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="tandem.toml to read")
    serve.add_argument("--data", type=data_dir.directory, metavar="DIR", help="data directory")
    serve.add_argument("--model", metavar="NAME", help="model: a name, hub name or directory")
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (8420)")
    serve.set_defaults(run=run_serve)


def _add(subparsers: Any, name: str, summary: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    client_flags(parser)
    parser.set_defaults(run=run)
    return parser


def client_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that speaks to the API."""
    parser.add_argument("--url", help="the API (TANDEM_URL, or the configuration's address)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="tandem.toml to read")
    parser.add_argument("--data", type=data_dir.directory, metavar="DIR", help="data directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _asking_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instructions", metavar="TEXT", help="the system prompt (resume: as before, if not given)"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show an image; may be repeated",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="write at most N tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 (the default) is greedy")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    parser.add_argument("--model", metavar="NAME", help="name of the served model")
    parser.add_argument(
        "--priority", choices=("priority", "default", "flex"), help="class in the queue"
    )
    parser.add_argument("--no-wait", action="store_true", help="print the ID and leave")


def run_submit(args: argparse.Namespace) -> int:
    """Submit a file's text."""
    more = {"conversation": args.conversation} if args.conversation else {}
    return _ask(args, _read(args.file), more)


def run_resume(args: argparse.Namespace) -> int:
    """Continue a response or a conversation."""
    if args.id.startswith("conv_"):
        more = {"conversation": args.id}
    elif args.id.startswith("resp_"):
        more = {"previous_response_id": args.id}
    else:
        raise ClientError(f"{args.id!r} is no ID: it begins with resp_ or conv_", 2)
    if args.instructions is None:
        args.instructions = _instructions_of(args)
    return _ask(args, _read("-") if args.text == "-" else args.text, more)


def _instructions_of(args: argparse.Namespace) -> str | None:
    """What the turn to be continued was told: the API itself carries no instructions over."""
    with client_for(args) as client:
        name = args.id
        if name.startswith("conv_"):
            name = client.conversation(name)["tandem"]["head"]
        return client.retrieve(name)["instructions"] if name else None


def run_jobs(args: argparse.Namespace) -> int:
    """List responses."""
    with client_for(args) as client:
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
            job["id"], _stage(facts), _place(facts), f"{facts['prompt_tokens']:,}",
            f"{facts['cached_tokens']:,}", str(usage.get("output_tokens", "")),
            age(now - job["created_at"]), conversation,
        )  # fmt: skip
    _out().print(table)
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Show one response or one conversation."""
    with client_for(args) as client:
        if args.id.startswith("conv_"):
            return _show_conversation(args, client)
        if args.wait:
            watch.wait(client, args.id, watch.stderr(), to_end=True)
        response = client.retrieve(args.id)
        if args.json:
            return print_json(response)
        inputs = client.input_items(args.id)
    facts = response["tandem"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "id": response["id"],
        "status": " ".join(filter(None, [response["status"], _reason(response)])),
        "stage": " ".join(filter(None, [_stage(facts), _place(facts)])),
        "conversation": (response["conversation"] or {}).get("id", ""),
        "continues": response["previous_response_id"] or "",
        "prompt": f"{facts['prompt_tokens']:,} tokens, {facts['cached_tokens']:,} cached, "
        f"{facts['new_tokens']:,} new",
        "path": facts["path"] or "",
        "hand-off": _handoff(facts["handoff"]),
        "times": ", ".join(f"{k} {v:.2f} s" for k, v in facts["times"].items()),
        "attempts": ", ".join(f"{count} {stage}" for stage, count in facts["attempts"].items()),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    out = _out()
    out.print(table)
    _print_items(out, [*inputs, *response["output"]])
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Cancel one job."""
    with client_for(args) as client:
        response = client.cancel(args.id)
    if args.json:
        return print_json(response)
    print(f"{response['id']} {response['status']}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """Be the API process until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    supervised = RESOLVED in os.environ
    try:
        flags = {"data_dir": args.data, "model": args.model}
        flags.update({"api.host": args.host, "api.port": args.port})
        config = load(args.config, flags)
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


def _ask(args: argparse.Namespace, text: str, more: dict[str, Any]) -> int:
    wanted = {
        "instructions": args.instructions,
        "max_output_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
        "model": args.model,
        "service_tier": args.priority,
    }
    body = {"input": _with_images(text, args.image), "background": True, **more}
    body.update({key: value for key, value in wanted.items() if value is not None})
    console = watch.stderr()
    with client_for(args) as client:
        response = client.create(body)
        if args.no_wait:
            return print_json(response) if args.json else _print(response["id"])
        try:
            if args.json:
                watch.wait(client, response["id"], console, to_end=True)
                response = client.retrieve(response["id"])
                print_json(response)
            else:
                response = watch.follow(client, response["id"], sys.stdout, console)
        except KeyboardInterrupt:
            print(
                f"\n{response['id']} goes on: `tandem show {response['id']}` shows it, "
                f"`tandem cancel {response['id']}` stops it",
                file=sys.stderr,
            )
            return 130
    console.print(watch.summary(response), style="dim", markup=False)
    if response["status"] == "failed":
        raise ClientError(f"{response['id']} failed: {response['error']['message']}")
    if not args.json:
        console.print(f'continue: tandem resume {response["id"]} "..."', style="dim", markup=False)
    return 0 if response["status"] in ("completed", "incomplete") else 1


def client_for(args: argparse.Namespace) -> Client:
    """The API that the flags of `client_flags` name."""
    return Client.of(load(args.config, {"data_dir": args.data}), args.url)


def _with_images(text: str, files: list[str]) -> str | list[dict[str, Any]]:
    """A request's input: the text, or a message of images and the text."""
    if not files:
        return text
    parts: list[dict[str, Any]] = []
    for name in files:
        kind = mimetypes.guess_type(name)[0] or "image/png"
        try:
            shown = data_url(Path(name).read_bytes(), kind)
        except OSError as error:
            raise ClientError(f"{name} cannot be read: {error.strerror or error}", 2) from error
        parts.append({"type": "input_image", "image_url": shown})
    parts.append({"type": "input_text", "text": text})
    return [{"type": "message", "role": "user", "content": parts}]


def _read(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        # A text file's last newline is not part of what is asked: it would change the answer.
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ClientError(f"{name} cannot be read: {error.strerror or error}", 2) from error
    except UnicodeDecodeError as error:
        raise ClientError(
            f"{name} is not UTF-8 text (byte {error.start}): convert it", 2
        ) from error


def _show_conversation(args: argparse.Namespace, client: Client) -> int:
    conversation, items = client.conversation(args.id), client.items(args.id)
    if args.json:
        return print_json({**conversation, "items": items})
    facts = conversation["tandem"]
    out = _out()
    out.print(
        f"{conversation['id']}  {facts['turns']} turns, {facts['tokens']:,} tokens, "
        f"{facts['saved_bytes']:,} bytes saved; newest: {facts['head'] or 'none'}",
        markup=False,
    )
    _print_items(out, items)
    return 0


def _print_items(out: Console, items: list[dict[str, Any]]) -> None:
    for item in items:
        role = item.get("role") or item["type"]
        parts = item.get("content") or item.get("output") or item.get("arguments") or ""
        text = parts if isinstance(parts, str) else "".join(_shown(part) for part in parts)
        out.print(f"\n[{role}]", style="bold", markup=False)
        out.print(text, markup=False)


def _shown(part: dict[str, Any]) -> str:
    return "[image]" if part.get("type") == "input_image" else str(part.get("text") or "")


def _out() -> Console:
    # A pipe gets whole lines; a terminal gets what fits.
    width = None if sys.stdout.isatty() else 240
    return Console(highlight=False, width=width, soft_wrap=not sys.stdout.isatty())


def _print(text: str) -> int:
    print(text)
    return 0


def print_json(value: Any) -> int:
    """Print one JSON object; returns exit status 0."""
    return _print(json.dumps(value, ensure_ascii=False, indent=2))


def _stage(facts: dict[str, Any]) -> str:
    return str(facts["stage"])


def _place(facts: dict[str, Any]) -> str:
    if facts["stage"] == "queued":
        before = facts["queue_position"]
        place = "next" if before == 0 else f"{before} before" if before else ""
        start = facts["predicted_start_s"]
        return f"{place}, in about {start:.0f} s" if place and start >= 1 else place
    if facts["stage"] == "prefilling":
        return f"{100 * facts['prefill']['done'] // max(1, facts['prefill']['total'])} %"
    return ""


def _reason(response: dict[str, Any]) -> str:
    if response["error"]:
        return f"({response['error']['message']})"
    details = response["incomplete_details"]
    return f"({details['reason']})" if details else ""


def _handoff(facts: dict[str, Any] | None) -> str:
    if not facts or facts.get("path") in (None, "none"):
        return ""
    return f"{facts.get('bytes', 0):,} bytes in {facts.get('seconds', 0):.3f} s by {facts['path']}"


def age(seconds: float) -> str:
    """A length of time in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
