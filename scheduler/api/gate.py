"""What every request passes before a route sees it: who asks, from where, how often, how much."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import math
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.api.bodies import Tally
from scheduler.api.caller import Caller, acting, caller_of
from scheduler.api.faults import Fault
from scheduler.api.rates import Rates
from scheduler.audit import Audit
from scheduler.config import Config, is_loopback
from scheduler.ledger.arrival import arriving
from scheduler.owners import Owners

OPEN_PATHS = frozenset(("/health", "/ready"))
"""Say only whether the server lives and could serve, so they need no token."""
UPLOADS = "/v1/files"
IMPORT = "/v1/conversations/import"
COOKIE = "tandem_token"
BODY_SECONDS = 60.0
"""Longest silence within a body."""
AT_ONCE = 32
"""Requests that begin in one round of the event loop: when very many come together, streams that
run have their turn in between."""
_SAFE = ("GET", "HEAD")
_PAGES = ("/rq", "/metrics")
_NOBODY = Caller(operator=False, scoped=True, owner="nobody")


class Gate:
    """ASGI middleware: authentication, foreign web pages, rates, size of bodies.

    Sets the caller (see `scheduler.api.caller`) for all that follows.
    """

    def __init__(self, app: ASGIApp, config: Config, owners: Owners, audit: Audit) -> None:
        self._app = app
        self._owners = owners
        self._audit = audit
        self._rates = Rates()
        self._token = config.api.token
        self._limit = config.api.max_body_mb << 20
        self._values = config.api.max_values
        self._uploads = {
            UPLOADS: (config.api.max_file_mb << 20, "api.max_file_mb"),
            IMPORT: (config.api.max_bundle_mb << 20, "api.max_bundle_mb"),
        }
        self._hosts = {"localhost", config.api.host.lower()}
        self._exposed = not is_loopback(config.api.host)
        self._beginning = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in OPEN_PATHS:
            await self._beginning.acquire()
            asyncio.get_running_loop().call_soon(self._beginning.release)
        with arriving():
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        caller, fault = self._admit(scope, headers)
        if fault is None and scope["method"] not in _SAFE:
            if (upload := self._uploads.get(scope["path"].rstrip("/"))) is not None:
                # Read as it comes, and never held in memory as a whole.
                fault = self._too_long(headers, *upload)
                receive = _counted(receive, *upload)
            else:
                fault, receive = await self._whole(headers, receive)
        if fault is not None:
            answer = fault.response(scope["path"])
            if fault.status == 401 and _is_page(scope["path"]):
                answer.headers["WWW-Authenticate"] = 'Basic realm="tandem", charset="UTF-8"'
            await answer(scope, receive, send)
            return
        with acting(caller):
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> tuple[Caller, Fault | None]:
        """The caller, and why it is not let in where it is not."""
        address = (scope.get("client") or ("", 0))[0]
        path = scope["path"]
        kind, given = _credentials(headers)
        # Where others can connect, taking the last token away must not open the door.
        guarded = self._exposed or bool(self._token) or bool(self._owners.list())
        if guarded:
            caller = self._known(given, address)
            if caller is None:
                if path in OPEN_PATHS:
                    return _NOBODY, None
                return _NOBODY, Fault(
                    401,
                    "this server needs a token: send it as 'Authorization: Bearer <token>' or as "
                    "'x-api-key' (the `tandem` command takes it from TANDEM_API_TOKEN)",
                    code="invalid_api_key",
                )
        elif not self._is_local(headers.get("host", "")):
            # Without a token, whoever reaches us is let in: a web page must not be the one.
            return _NOBODY, Fault(
                403,
                "without api.token this server answers only to localhost: set api.token to use "
                "another name",
                code="host_not_allowed",
            )
        else:
            caller = Caller(address=address)
        # What a browser sends by itself says nothing about which page has asked for it.
        by_itself = not guarded or kind in ("basic", "cookie")
        if by_itself and scope["method"] not in _SAFE and is_foreign(headers):
            self._audit.note(
                "refused", path, owner=caller.owner, address=address,
                why="another site's page", method=scope["method"],
            )  # fmt: skip
            return caller, Fault(403, "requests from other sites are refused", code="cross_site")
        if _is_page(path) and not caller.operator:
            return caller, Fault(
                403,
                "this page shows all owners: it needs an operator's token",
                code="operator_only",
            )
        if wait := self._rates.wait(caller.owner, caller.per_minute):
            return caller, Fault(
                429,
                f"{caller.per_minute} requests a minute are allowed: try again in "
                f"{math.ceil(wait)} s",
                code="rate_limit_exceeded",
                after=wait,
            )
        return caller, None

    def _known(self, given: str, address: str) -> Caller | None:
        """Whose token this is. Every comparison is made, whichever one fits."""
        owner = self._owners.find(given)
        own = hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())
        if self._token and own:
            return Caller(address=address)
        return caller_of(owner, address) if owner is not None else None

    def _is_local(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return not name or name.lower() in self._hosts or is_loopback(name)

    async def _whole(
        self, headers: Mapping[str, str], receive: Receive
    ) -> tuple[Fault | None, Receive]:
        """The body read to its end, or why it was not."""
        fault = self._too_long(headers, self._limit, "api.max_body_mb")
        parts, size = bytearray(), 0
        tally = Tally()
        while fault is None:
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS)
            except TimeoutError:
                fault = _too_slow()
                break
            if message["type"] != "http.request":
                break
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._limit:
                fault = _too_large(self._limit, "api.max_body_mb")
            elif tally.values > self._values:
                # The rest is heard and forgotten: a client reads the answer when it has sent all.
                parts.clear()
            else:
                parts += piece
                tally.add(piece)
            if not message.get("more_body"):
                break
        if fault is None and tally.values > self._values:
            fault = too_many(self._values)
        return fault, receive if fault else _after(bytes(parts), receive)

    def _too_long(self, headers: Mapping[str, str], limit: int, key: str) -> Fault | None:
        length = headers.get("content-length", "")
        return _too_large(limit, key) if length.isdigit() and int(length) > limit else None


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another origin makes this request."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def _is_page(path: str) -> bool:
    return path == "/" or path in _PAGES or path.startswith("/rq/")


def _credentials(headers: Mapping[str, str]) -> tuple[str, str]:
    """(kind, token) that a request came with; the token is empty where there is none."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return "bearer", value.strip()
    if kind.lower() == "basic":
        try:
            return "basic", base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return "basic", ""
    if "x-api-key" in headers:
        return "key", headers["x-api-key"]
    if COOKIE in headers.get("cookie", ""):
        try:
            morsel = SimpleCookie(headers["cookie"]).get(COOKIE)
        except CookieError:
            morsel = None
        # A cookie travels by itself, so it does not count where another site sends it.
        site = headers.get("sec-fetch-site", "same-origin")
        if morsel is not None and site in ("same-origin", "none"):
            return "cookie", morsel.value
    return "none", ""


def _too_slow() -> Fault:
    return Fault(
        408, f"nothing more of the body came for {BODY_SECONDS:g} s: send it again", code="too_slow"
    )


def _too_large(limit: int, key: str) -> Fault:
    return Fault(
        413,
        f"the body is larger than {limit >> 20} MB: send less, or raise {key}",
        code="request_too_large",
    )


def too_many(limit: int) -> Fault:
    """413 for JSON of more values than are taken."""
    return Fault(
        413,
        f"the body holds more than {limit} JSON values: send fewer in one request, or raise "
        "api.max_values",
        code="too_many_values",
    )


def _counted(receive: Receive, limit: int, key: str) -> Receive:
    """`receive` that raises Fault 413 after more than `limit` bytes, 408 when no more come."""
    seen, whole = 0, False

    async def counting() -> Message:
        nonlocal seen, whole
        try:
            # After the body it is waited for the client to go, however long that takes.
            message = await asyncio.wait_for(receive(), None if whole else BODY_SECONDS)
        except TimeoutError:
            raise _too_slow() from None
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            whole = not message.get("more_body")
            if seen > limit:
                raise _too_large(limit, key)
        return message

    return counting


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
