"""`tandem store ...`: look at, check and keep a store, whether or not a worker has it open."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from store.capacity import capacity
from store.compaction import compact
from store.errors import StoreError, StoreUnavailable
from store.paths import data_dir, socket_path, store_dir
from store.resident import resident_bytes
from store.rpc import StoreClient
from store.statistics import residency
from store.store import Store

_TEXT = """\
Look at the stored conversations on the machine that decodes, check them, and make room. Works while
`tandem up` runs and while it does not, but for compact.

  tandem store stats
  tandem store stats --capacity            what fits, by length
  tandem store check                       read everything, as every night
  tandem store evict 20G                   drop the least useful states; no conversation is lost
  tandem store export conv_77b0... sky.tandem

`tandem conversations` lists, exports and imports through the API, from any machine.
"""
_STATS = """\
  objects          blocks of rows, and snapshots
  values           places of equal size in the file, which hold their bytes
  payload bytes    bytes of states, as they were saved
  live bytes       the file's pages in use; live share: the part of the largest size
  file bytes       the file so far; map bytes: the largest that it may be (store.size_gb)
  resident bytes   what of the file lies in memory
  pending          blocks whose save has not ended
  in use           states that are being read or written, which are not evicted
  evicted          states dropped since the start, for room; those of other models among them
  preambles        stored beginnings that several prompts share
  inside prompts   snapshots inside prompts; hits: since the start, those that saved computing
  prefix hits      since the start, prompts that went on from any stored beginning
  written          bytes written today and in the last days that are counted
  over daily budget  states not saved since the start, by store.daily_gb
  recovered        blocks of a broken save, taken back at the start
  damaged          blocks found damaged since the start
  copies           how restored bytes are copied and checked: by which instructions, or in turns
"""
LOOKUP_SECONDS = 10.0
"""An owner that does not say in this time that it is there is stopped or stuck."""
STATS_SECONDS = 60.0
"""Counting in a large store whose pages lie on the disk."""
LONG_SECONDS = 24 * 3600.0
"""A check of a full store reads all of it; the owner answers when it is through."""
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}


def register(subparsers: Any) -> None:
    """Add `store` and its commands to the parsers of `tandem`."""
    parser = subparsers.add_parser(
        "store", help="look at, check and keep the stored conversations", description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="store_command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int], more: str = "") -> Any:
        command = commands.add_parser(
            name, help=text, description=f"{text}\n\n{more}" if more else text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument(
            "--config", type=Path, metavar="FILE",
            help="tandem.toml to read (TANDEM_CONFIG, ./tandem.toml, or the data directory's)",
        )  # fmt: skip
        command.add_argument(
            "--data", metavar="DIR", help="data directory (the configuration's, or the usual)"
        )
        command.add_argument("--node", help="node whose store it is (the configuration's)")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        # The configuration is not for this room to read: whoever calls fills in data and node.
        command.set_defaults(run=lambda arguments: _said(run, arguments), asks_store=True)
        return command

    command = add("stats", "what is stored and how full the store is", _stats, _STATS)
    command.add_argument("--capacity", action="store_true", help="what fits, by length")
    command.add_argument("--size", type=size, default=0, help="... in a store of so many bytes")
    command.add_argument(
        "--recent", type=int, default=0, metavar="N", help="how much of the N latest is in memory"
    )
    command = add("check", "walk everything: references, totals, hashes, orphans", _check)
    command.add_argument("--repair", action="store_true", help="put right what can be")
    command.add_argument("--quick", action="store_true", help="do not read the stored bytes")
    command = add("evict", "drop the least useful states until so much is free", _evict)
    command.add_argument("bytes", type=size, metavar="SIZE", help="to make free, such as 20G")
    add("compact", "give free disk space back (the store must not be in use)", _compact)
    command = add("export", "write one conversation to a file", _export)
    command.add_argument("conversation", metavar="ID", help="conv_...")
    command.add_argument("file", type=Path, metavar="FILE", help="the file")
    command = add("import", "store a conversation from such a file", _import)
    command.add_argument("file", type=Path, metavar="FILE", help="the file")


def size(text: str) -> int:
    """Bytes from a number with an optional unit K, M, G or T (powers of 1000)."""
    number, unit = text.rstrip("kKmMgGtT"), text[len(text.rstrip("kKmMgGtT")) :].lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 20G") from error


def _said(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except StoreError as error:
        print(f"tandem store: {error}", file=sys.stderr)
        return 1


@contextmanager
def _asking(
    arguments: argparse.Namespace, within: float = LONG_SECONDS
) -> Iterator[Callable[..., Any]]:
    """A function that calls a method of the store: at its owner if one runs, else here.

    An owner that is there has `within` seconds for each call.
    """
    data = data_dir(arguments.data)
    client = StoreClient(socket_path(data, arguments.node or "local"), timeout=LOOKUP_SECONDS)
    there = client.ping()
    client.close()
    if there:
        with closing(client.patient(within)) as patient:
            yield patient.call
        return
    try:
        store = Store.open(store_dir(data), 0, create=False)
    except StoreError as error:
        if owner := _owner(error):
            raise StoreUnavailable(
                f"{owner} owns the store but does not answer: it is starting, stopped or stuck; "
                "try again shortly, else end it and start Tandem again (`tandem up`)"
            ) from error
        raise
    try:
        yield lambda method, **given: _here(store, method, given)
    finally:
        store.close()


def _owner(error: StoreError) -> str:
    """The process that owns the store, where that is why it was refused; else empty."""
    name, owns, _ = str(error).partition(" owns the store")
    return name if owns else ""


def _here(store: Store, method: str, given: dict[str, Any]) -> Any:
    if method == "capacity":
        return capacity(store, **given)
    if method == "residency":
        return residency(store, **given)
    if method == "check":
        return store.check(**given).to_dict()
    if method == "export":
        return store.export_conversation(given["ident"], Path(given["path"]))
    if method == "import":
        return store.import_conversation(Path(given["path"]))
    return getattr(store, method)(**given)


def _stats(arguments: argparse.Namespace) -> int:
    with _asking(arguments, STATS_SECONDS) as ask:
        if arguments.capacity:
            return _capacity(arguments, ask("capacity", size_bytes=arguments.size))
        if arguments.recent:
            return _residency(arguments, ask("residency", limit=arguments.recent))
        found = ask("stats")
    data = store_dir(data_dir(arguments.data)) / "data.mdb"
    found["resident_bytes"] = resident_bytes(data)
    if arguments.json:
        print(json.dumps(found))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        if name.endswith("bytes"):
            value = f"{value:,} ({value / 1e9:.2f} GB)"
        elif name.endswith("share"):
            value = f"{value:.1%}"
        print(f"{name.replace('_', ' '):>{width}}  {value}")
    return 0


def _residency(arguments: argparse.Namespace, table: list[dict[str, Any]]) -> int:
    if arguments.json:
        print(json.dumps({"residency": table}))
        return 0
    print(f"{'state at the end of':<38} {'conversation':<38} {'MB':>10} {'in memory':>10}")
    for row in table:
        share = row["resident_bytes"] / row["bytes"] if row["bytes"] else 1.0
        turn = row["turn"] if row["turn"].startswith("resp_") else "(inside a prompt)"
        name = row["conversation"] or "(a shared preamble)"
        print(f"{turn:<38} {name:<38} {row['bytes'] / 1e6:>10,.1f} {share:>10.1%}")
    return 0


def _capacity(arguments: argparse.Namespace, table: list[dict[str, Any]]) -> int:
    if arguments.json:
        print(json.dumps({"capacity": table}))
        return 0
    if not table:
        raise StoreError("no state is stored yet whose sizes the table could follow: run a turn")
    print(f"{'tokens each':>12} {'MB each':>10} {'conversations':>14} {'tokens':>16}")
    for row in table:
        print(
            f"{row['tokens']:>12,} {row['bytes'] / 1e6:>10,.1f} {row['conversations']:>14,} "
            f"{row['total_tokens']:>16,}"
        )
    return 0


def _check(arguments: argparse.Namespace) -> int:
    with _asking(arguments) as ask:
        found = ask("check", repair=arguments.repair, payload=not arguments.quick)
    if arguments.json:
        print(json.dumps(found))
    else:
        for problem in found["problems"]:
            print(problem)
        for turn in found["dropped"]:
            print(f"state of {turn}: {'dropped' if arguments.repair else 'unusable'}")
        for turn in found["lost"]:
            print(f"{turn}: its record is damaged and cannot be restored")
        print(
            f"{found['conversations']} conversations, {found['turns']} turns, {found['states']} "
            f"states, {found['objects']} blocks, {found['bytes_read']:,} bytes read in "
            f"{found['seconds']:.1f} s: {found['found'] or 'no'} problems"
            + (" (repaired)" if found["repaired"] else "")
        )
    return 0 if found["clean"] or (found["repaired"] and not found["lost"]) else 1


def _evict(arguments: argparse.Namespace) -> int:
    with _asking(arguments) as ask:
        count = ask("evict", bytes_free=arguments.bytes)
        live = ask("stats")["live_share"]
    _tell(arguments, {"evicted": count, "live_share": live if arguments.json else f"{live:.2%}"})
    return 0


def _compact(arguments: argparse.Namespace) -> int:
    try:
        before, after = compact(store_dir(data_dir(arguments.data)))
    except StoreError as error:
        if owner := _owner(error):
            raise StoreError(
                f"{owner} owns the store, which must not be in use: stop Tandem here first (Ctrl-C "
                "where `tandem up` runs, or the service), then compact and start it again"
            ) from error
        raise
    _tell(arguments, {"bytes_before": before, "bytes_after": after})
    return 0


def _export(arguments: argparse.Namespace) -> int:
    with _asking(arguments) as ask:
        path = str(arguments.file.absolute())
        _tell(arguments, ask("export", ident=arguments.conversation, path=path))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    with _asking(arguments) as ask:
        found = ask("import", path=str(arguments.file.absolute()))
    names = found["renamed"]
    if not arguments.json:
        found = {**found, "renamed": f"{len(names)} ids" if names else "nothing"}
    _tell(arguments, found)
    return 0


def _tell(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items()))
