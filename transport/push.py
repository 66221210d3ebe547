"""The pushing side: connects to the other machine's file server and sends what it lacks."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transport import auth, manifest
from transport.errors import LinkError
from transport.files import DEADLINE, receive, send
from transport.wire import Connection

Report = Callable[[str, int, int], None]
"""Stage ("sending", "checking", "verifying"), bytes done, bytes in all."""


class FileClient:
    """One connection to a FileServer. Raises LinkError: not there, or not of this secret."""

    def __init__(self, address: tuple[str, int], secret: bytes, deadline: float = DEADLINE) -> None:
        self._connection = Connection.dial(address, min(deadline, 10.0))
        try:
            self._connection.set_deadline(deadline)
            link = secrets.token_bytes(16)
            auth.prove(self._connection, auth.check_secret(secret), auth.CONTROL, 0, link)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def models(self) -> list[dict[str, Any]]:
        """Models on the other machine: name, bytes, partial."""
        send(self._connection, {"type": "list"})
        found: list[dict[str, Any]] = receive(self._connection)["models"]
        return found

    def digest(self, name: str, report: Report) -> tuple[str, list[str]]:
        """Have the other machine read a model; its digest, and what differs from its record."""
        send(self._connection, {"type": "digest", "name": name})
        answer = self._wait(report)
        return str(answer["digest"]), list(answer["problems"])

    def push(self, directory: Path, name: str, report: Report) -> str:
        """Bring `directory` to the other machine as `name`; returns the digest of what is there.

        Chunks that are there already are compared by hash and not sent. Raises LinkError; another
        push goes on where this one was broken off.
        """
        entries = manifest.scan(directory)
        total = sum(entry.size for entry in entries)
        files = [[entry.path, entry.size] for entry in entries]
        send(self._connection, {"type": "push", "name": name, "files": files})
        answer = self._wait(report)
        if answer["state"] == "whole":
            mine = manifest.digest(
                manifest.measure(directory, lambda done, _: report("checking", done, total))
            )
            if mine != answer["digest"]:
                raise LinkError(
                    f"the other machine has another model of the name {name}: push it under "
                    "another with --name, or remove that directory there",
                    "failed",
                )
            return mine
        sent = [{int(number): str(known) for number, known in have} for have in answer["have"]]
        if len(sent) != len(entries):
            raise LinkError("the other machine answered for other files", "protocol")
        done = 0
        for index, entry in enumerate(entries):
            with (directory / entry.path).open("rb") as file:
                for number in range(entry.chunks):
                    start, size = entry.span(number)
                    file.seek(start)
                    data = file.read(size)
                    if len(data) != size:
                        raise LinkError(f"{entry.path} changed while it was read", "failed")
                    known = manifest.digest_chunk(data)
                    if sent[index].get(number) != known:
                        head = {"type": "chunk", "file": index, "chunk": number, "hash": known}
                        self._send(head, data)
                    done += size
                    report("sending", done, total)
        send(self._connection, {"type": "end"})
        return str(self._wait(report)["digest"])

    def _send(self, head: dict[str, Any], data: bytes) -> None:
        try:
            send(self._connection, head, memoryview(data))
        except LinkError as lost:
            try:
                self._wait(lambda *_: None)  # it may have said why before it hung up
            except LinkError as said:
                raise (said if said.code == "failed" else lost) from None
            raise

    def _wait(self, report: Report) -> dict[str, Any]:
        """The next answer that is not a sign of progress."""
        while "verified" in (answer := receive(self._connection)):
            report("verifying", int(answer["verified"]), int(answer["total"]))
        return answer
