"""What goes wrong with a request, in the shape that OpenAI's clients understand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

RETRY_SECONDS = 2
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_BEGINS = {"Response": "resp_", "Conversation": "conv_"}
ANTHROPIC = "/v1/messages"
"""Below this path the answers have Anthropic's shape."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Fault(Exception):
    """A request that cannot be served.

    `message` is one line with cause and cure and holds no path, secret or traceback. `param` is
    the field at fault, `code` a word for programs. `retry` is False where sending the same
    request again cannot help or would repeat work. `after`: seconds to wait before that.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool | None = None,
        after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry = retry
        self.after = after

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON body of the answer, as clients of the API at `path` expect it."""
        if path.startswith(ANTHROPIC):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that tell a client whether and when to try again."""
        headers: dict[str, str] = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(math.ceil(self.after or RETRY_SECONDS))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        return headers

    def response(self, path: str = "") -> JSONResponse:
        """The answer itself."""
        return JSONResponse(self.body(path), self.status, self.headers())


def bad(message: str, param: str | None = None, code: str | None = None) -> Fault:
    """400: the request is wrong."""
    return Fault(400, message, param=param, code=code or "invalid_value")


def missing(what: str, name: str, param: str | None = None) -> Fault:
    """404: there is no such thing; said apart where an ID's form shows that there never was."""
    begins = _BEGINS.get(what)
    if begins is not None and re.fullmatch(begins + "[0-9a-f]{32}", name) is None:
        why = f"is no ID of one, which is {begins} and 32 hex digits: give all of it"
    else:
        why = "does not exist here: check the ID; it may have been deleted or expired"
    return Fault(
        404,
        f"{what} '{name}' {why}",
        param=param,
        code=f"{what.lower().replace(' ', '_')}_not_found",
    )


def unavailable(what: str, cure: str) -> Fault:
    """503: a part that the answer needs cannot be reached now."""
    return Fault(503, f"{what} cannot be reached: {cure}", code="service_unavailable", retry=True)


async def on_fault(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for Fault."""
    assert isinstance(error, Fault)
    return error.response(request.url.path)


async def on_http(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for the framework's own errors (unknown path, wrong method)."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"no such path: {request.method} {request.url.path}",
        405: f"method {request.method} is not allowed here",
        400: "the body is not valid JSON",
    }
    fault = Fault(error.status_code, words.get(error.status_code, str(error.detail)))
    answer = fault.response(request.url.path)
    answer.headers.update(error.headers or {})
    return answer


async def on_validation(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for bodies and parameters of the wrong type."""
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response(request.url.path)


def from_validation(errors: Any) -> Fault:
    """A Fault of the first of pydantic's errors: the one that went deepest into the request."""
    first: Mapping[str, Any] = max(errors, key=lambda e: len(e["loc"]))
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return bad(f"the body is not valid JSON: {reason}", code="invalid_json")
    # Locations also hold the tags of unions, which are no part of the request.
    param = ""
    for part in first["loc"][1:]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not part.startswith("«"):
            param += f".{part}" if param else str(part)
    text = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] in ("model_type", "model_attributes_type"):
        text = "should be an object"  # pydantic names the class
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_type"
    return bad(f"{param or 'the body'}: {text}", param or None, code)


async def on_crash(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of last resort: says nothing about the inside."""
    fault = Fault(500, "internal error; the API's log has the details", code="internal_error")
    return fault.response(request.url.path)
