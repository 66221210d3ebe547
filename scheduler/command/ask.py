"""`tandem submit` and `tandem resume`: ask, and watch the answer come."""

from __future__ import annotations

import argparse
import mimetypes
import sys
from pathlib import Path
from typing import Any

from scheduler.command import watch
from scheduler.command.client import ClientError
from scheduler.command.flags import client_flags, client_of
from scheduler.command.printing import print_json
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


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add submit and resume to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    submit = subparsers.add_parser(
        "submit",
        help="submit a prompt and show the answer",
        description=_SUBMIT,
        formatter_class=raw,
    )
    submit.add_argument("file", metavar="FILE", help="text file, or - for standard input")
    submit.add_argument("--conversation", metavar="ID", help="go on in conv_... after its newest")
    resume = subparsers.add_parser(
        "resume", help="continue by ID", description=_RESUME, formatter_class=raw
    )
    resume.add_argument("id", metavar="ID", help="resp_... or conv_...")
    resume.add_argument("text", metavar="TEXT", help="what to say next, or - for standard input")
    for parser, run in ((submit, run_submit), (resume, run_resume)):
        client_flags(parser)
        _asking_flags(parser)
        parser.set_defaults(run=run)


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
    parser.add_argument(
        "--max-tokens", type=int, metavar="N",
        help="write at most N tokens (decode.max_output_tokens)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, metavar="T", help="0 (the default) is greedy")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    parser.add_argument("--model", metavar="NAME", help="name of the served model")
    parser.add_argument(
        "--priority", choices=("priority", "default", "flex"),
        help="priority goes before default; flex (batch work) gives way to both",
    )  # fmt: skip
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
    with client_of(args) as client:
        name = args.id
        if name.startswith("conv_"):
            name = client.conversation(name)["tandem"]["head"]
        return client.retrieve(name)["instructions"] if name else None


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
    with client_of(args) as client:
        response = client.create(body)
        if args.no_wait:
            if args.json:
                return print_json(response)
            print(response["id"])
            return 0
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
