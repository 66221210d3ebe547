"""What every request passes before a route sees it: who asks, from where, and how much."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.api.faults import Fault
from scheduler.config import Config, is_loopback

OPEN_PATHS = frozenset(("/health",))
COOKIE = "tandem_token"


class Gate:
    """ASGI middleware: authentication, foreign web pages, size of bodies."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._token = config.api.token
        self._limit = config.api.max_body_mb << 20
        self._hosts = {"localhost", config.api.host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        fault = self._refusal(scope, headers)
        body: bytes | None = None
        if fault is None and scope["method"] not in ("GET", "HEAD"):
            body = await self._body(headers, receive)
            if body is None:
                fault = Fault(
                    413,
                    f"the body is larger than {self._limit >> 20} MB: send less, or raise "
                    "api.max_body_mb",
                    code="request_too_large",
                )
        if fault is not None:
            answer = fault.response(scope["path"])
            if fault.status == 401 and scope["path"].startswith("/rq"):
                answer.headers["WWW-Authenticate"] = 'Basic realm="tandem", charset="UTF-8"'
            await answer(scope, receive, send)
            return
        await self._app(scope, receive if body is None else _after(body, receive), send)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> Fault | None:
        if self._token:
            if scope["path"] in OPEN_PATHS or self._knows(headers):
                return None
            return Fault(
                401,
                "this server needs its token: send it as 'Authorization: Bearer <api.token>'",
                code="invalid_api_key",
            )
        # Without a token, whoever reaches us is let in: a web page must not be the one that does.
        if not self._is_local(headers.get("host", "")):
            return Fault(
                403,
                "without api.token this server answers only to localhost: set api.token to use "
                "another name",
                code="host_not_allowed",
            )
        if headers.get("sec-fetch-site") == "cross-site" and scope["method"] not in ("GET", "HEAD"):
            return Fault(403, "requests from other sites are refused", code="cross_site")
        return None

    def _is_local(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return not name or name.lower() in self._hosts or is_loopback(name)

    def _knows(self, headers: Mapping[str, str]) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = ""
        if kind.lower() == "bearer":
            given = value.strip()
        elif kind.lower() == "basic":
            try:
                given = base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                given = ""
        elif "x-api-key" in headers:
            given = headers["x-api-key"]
        elif "cookie" in headers and COOKIE in headers["cookie"]:
            try:
                morsel = SimpleCookie(headers["cookie"]).get(COOKIE)
            except CookieError:
                morsel = None
            # A cookie travels by itself, so it does not count where another site sends it.
            site = headers.get("sec-fetch-site", "same-origin")
            if morsel is not None and site in ("same-origin", "none"):
                given = morsel.value
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        """The whole body, or None where it is over the limit."""
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            return None
        parts = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return bytes(parts)
            parts += message.get("body", b"")
            if len(parts) > self._limit:
                return None
            if not message.get("more_body"):
                return bytes(parts)


def _after(body: bytes, receive: Receive) -> Receive:
    """`receive` with a body that was read from it put back in front."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
