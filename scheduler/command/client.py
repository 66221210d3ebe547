"""A small client of Tandem's API, for the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote

import httpx

from scheduler.config import Config

URL = "TANDEM_URL"
TRANSFER = 660.0
"""Seconds without a byte after which a transfer of a whole conversation is given up."""
LOOKUP = 12.0
"""The same for what is only looked up: a little more than the API waits for a store, so that its
own word of one that is silent comes first."""
HEALTH = 3.0
"""The same for whether the API lives at all, asked where it did not answer in time."""


class ClientError(Exception):
    """The API refused, failed, or could not be reached. `exit_status`: 2 for bad input, else 1."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class Client:
    """Speaks to one API. Every method raises ClientError with one line: cause and cure."""

    def __init__(self, url: str, token: str = "", start: str = "tandem up") -> None:
        """`start`: the command that starts what is spoken to, named where nothing answers."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.away: list[str] = []
        self._start = start
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(30.0, read=60.0),
                # A proxy of the environment is not meant for a server on the own network.
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ClientError(f"{url!r} is not a URL: {error}", 2) from error

    @classmethod
    def of(cls, config: Config, url: str | None = None, start: str = "tandem up") -> Client:
        """The client for a URL given, the one of TANDEM_URL, or the configuration's."""
        return cls(url or os.environ.get(URL) or config.api_url, config.api.token, start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Submit a response and return it as it is accepted."""
        return self._call("POST", "/v1/responses", json=body)

    def retrieve(self, response: str, *, patient: bool = False) -> dict[str, Any]:
        """A response as it is now; `patient` for who follows it, and waits longer than a moment."""
        path = f"/v1/responses/{_segment(response)}"
        return self._call("GET", path) if patient else self._look_up(path)

    def ledger(self, response: str) -> dict[str, Any]:
        """Where a response's time and bytes went, up to now."""
        return self._look_up(f"/v1/responses/{_segment(response)}/ledger")

    def cancel(self, response: str) -> dict[str, Any]:
        """Cancel a response, also one that somebody waits for, and return it."""
        return self._call(
            "POST", f"/v1/responses/{_segment(response)}/cancel", params={"force": True}
        )

    def jobs(self, status: str | None = None, limit: int = 50) -> list[dict[str, Any]]:
        """Responses, newest first; `status` is one of Tandem's stages or "live"."""
        params = {"limit": limit, **({"status": status} if status else {})}
        data: list[dict[str, Any]] = self._look_up("/v1/responses", params)["data"]
        return data

    def conversation(self, conversation: str) -> dict[str, Any]:
        """A conversation."""
        return self._look_up(f"/v1/conversations/{_segment(conversation)}")

    def conversations(self, limit: int = 50) -> list[dict[str, Any]]:
        """Conversations, newest first. Decode nodes whose conversations are not among them, as
        they are away, are then in `self.away`."""
        data: list[dict[str, Any]] = []
        params: dict[str, Any] = {"limit": min(limit, 100)}
        while len(data) < limit:
            page = self._look_up("/v1/conversations", params)
            data += page["data"]
            self.away = (page.get("tandem") or {}).get("away") or []
            if not page["has_more"]:
                break
            params["after"] = page["last_id"]
        return data[:limit]

    def update_conversation(self, conversation: str, **changes: Any) -> dict[str, Any]:
        """Change a conversation's metadata or whether it is pinned."""
        return self._call("POST", f"/v1/conversations/{_segment(conversation)}", json=changes)

    def delete_conversation(self, conversation: str) -> dict[str, Any]:
        """Delete a conversation with everything in it."""
        return self._call("DELETE", f"/v1/conversations/{_segment(conversation)}")

    def fork_conversation(self, conversation: str, response: str | None) -> dict[str, Any]:
        """A new conversation that begins as this one, up to a response."""
        body = {"response_id": response} if response else {}
        return self._call("POST", f"/v1/conversations/{_segment(conversation)}/fork", json=body)

    def export_conversation(self, conversation: str, file: IO[bytes]) -> int:
        """Write a conversation with its state to `file`; returns the bytes."""
        path = f"/v1/conversations/{_segment(conversation)}/export"
        written = 0
        try:
            with self._http.stream("GET", path, timeout=TRANSFER) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _refused(answer)
                for chunk in answer.iter_bytes(1 << 20):
                    written += file.write(chunk)
                if written != int(answer.headers["content-length"]):
                    raise ClientError("the file was cut short on its way: try again")
        except httpx.TransportError as error:
            raise self._lost(error) from error
        return written

    def import_conversation(self, file: IO[bytes]) -> dict[str, Any]:
        """Store a conversation from a file that an export gave."""
        chunks = iter(lambda: file.read(1 << 20), b"")
        return self._call(
            "POST",
            "/v1/conversations/import",
            content=chunks,
            headers={"content-type": "application/octet-stream"},
            timeout=TRANSFER,
        )

    def items(self, conversation: str) -> list[dict[str, Any]]:
        """All items of a conversation, oldest first."""
        return self._pages(f"/v1/conversations/{_segment(conversation)}/items")

    def input_items(self, response: str) -> list[dict[str, Any]]:
        """A response's own input, oldest first."""
        return self._pages(f"/v1/responses/{_segment(response)}/input_items")

    def events(self, response: str, after: int = -1) -> Iterator[dict[str, Any]]:
        """Events numbered above `after`, to the end; joins again where the connection drops."""
        failures = 0
        while True:
            try:
                for event in self._stream(response, after):
                    yield event
                    failures = 0
                    if event["type"] == "error":
                        raise ClientError(str(event["message"]))
                    after = event["sequence_number"]
                    if event["type"].removeprefix("response.") in (
                        "completed",
                        "incomplete",
                        "failed",
                    ):
                        return
            except httpx.TransportError as error:
                failures += 1
                if failures > 3:
                    raise self._lost(error) from error

    def _stream(self, response: str, after: int) -> Iterator[dict[str, Any]]:
        params: dict[str, str | int] = {"stream": "true", "starting_after": after}
        with self._http.stream(
            "GET", f"/v1/responses/{_segment(response)}", params=params
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                raise _refused(answer)
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    def _pages(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {"order": "asc", "limit": 100}
        while True:
            page = self._look_up(path, params)
            found += page["data"]
            if not page["has_more"]:
                return found
            params["after"] = page["last_id"]

    def _look_up(self, path: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call("GET", path, params=params, timeout=LOOKUP)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._lost(error) from error
        except ValueError as error:
            raise ClientError(
                f"this cannot be sent ({error}): use UTF-8 text and finite numbers", 2
            ) from error
        if answer.status_code >= 400:
            raise _refused(answer)
        try:
            body: dict[str, Any] = answer.json()
        except ValueError as error:
            raise ClientError(
                f"{self.url} answers, but it is not Tandem: check --url and {URL}"
            ) from error
        return body

    def _lost(self, error: Exception) -> ClientError:
        if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
            return ClientError(f"{self.url!r} is not a usable URL: it begins with http://", 2)
        if isinstance(error, httpx.ReadTimeout):
            return ClientError(self._silent())
        return ClientError(
            f"no Tandem answers at {self.url}: start it with `{self._start}`, or name it with "
            f"--url or {URL}"
        )

    def _silent(self) -> str:
        """Why no answer came in time: the API itself is stuck, or what stands behind it is."""
        try:
            self._http.get("/health", timeout=HEALTH)
        except httpx.HTTPError:
            return (
                f"the API at {self.url} takes connections but does not answer: its process is "
                "stopped or overloaded; see `tandem service logs api`, or start Tandem again"
            )
        return (
            f"the API at {self.url} lives but did not answer this in time: it waits for Redis or "
            f"the decode worker; {self.url}/ready says for which, `tandem doctor` what to do"
        )


def _segment(name: str) -> str:
    """An ID as one segment of a path, whatever is in it."""
    if not name.strip("."):
        raise ClientError(f"{name!r} is no ID: it begins with resp_ or conv_", 2)
    return quote(name, safe="", errors="surrogateescape")


def _refused(answer: httpx.Response) -> ClientError:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {answer.status_code}: is this Tandem? check --url"
    return ClientError(message, 2 if answer.status_code in (400, 404, 413, 422) else 1)
