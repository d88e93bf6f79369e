"""`ApiError`: an error response in the form that OpenAI's clients read.

{"error": {"message": "…", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

import json
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from levanter.base.bounded_json import Json

RejectReason: TypeAlias = Literal[
    "invalid", "too_long", "too_large", "queue_full", "draining", "key", "limit", "origin", "absent"
]
"""Why a request was rejected: it is invalid, longer than the context, or has too large a body; the queue is full; the
server is shutting down; the key is missing or wrong; the client exceeds a limit of rate or time; the request comes from
a page of another site; or the model or route does not exist."""
INVALID = "invalid_request_error"
JSON_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
"""Writes JSON in ASCII: some clients take U+2028 in a stream for the end of a line."""
_PARAM = re.compile(r"([A-Za-z_][\w.\[\]]{0,100}): ")


class ApiError(Exception):
    """A request that gets an error response.

    Attributes:
        status: HTTP status of the response.
        message: every problem of the request, a line each.
        reason: the reason that metrics count; None for a failure after the request was admitted.
        kind: OpenAI's `type`.
        param: the field that is wrong.
        code: OpenAI's `code`.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: RejectReason | None = None,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message = status, message
        self.reason: RejectReason | None = reason
        self.kind, self.param, self.code, self.headers = kind, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Json]:
        """The JSON body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


MAX_MESSAGE = 8000
"""Characters of an error message: names and values of a request are shortened, and there may be many."""


def invalid_request(message: str, *, code: str | None = None, reason: RejectReason | None = "invalid") -> ApiError:
    """An error 400; `param` is the first field that the message names. See `ApiError` for `reason`."""
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
    # Messages begin with the path of the field, as `temperature: …`.
    match = _PARAM.match(message)
    return ApiError(400, message, reason=reason, param=None if match is None else match[1], code=code)


def failed_request(message: str) -> ApiError:
    """An error 500: a request that was admitted and could not be finished."""
    return ApiError(500, message, kind="server_error")


def json_bytes(value: Mapping[str, Json]) -> bytes:
    """Encodes an object as JSON."""
    return JSON_ENCODER.encode(value).encode()


class JsonResponse(Response):
    """A response with a JSON object as its body."""

    media_type = "application/json"

    def __init__(self, value: Mapping[str, Json], *, status: int = 200, headers: Mapping[str, str] | None = None):
        super().__init__(json_bytes(value), status_code=status, headers=headers)


async def api_error_response(request: Request, error: Exception) -> Response:
    """Handles an `ApiError`.

    This and the other handlers are coroutines because Starlette calls plain functions in a thread pool, where counters
    are not safe and which takes the interpreter from the engine.
    """
    del request
    assert isinstance(error, ApiError)
    return JsonResponse(error.body, status=error.status, headers=error.headers)


async def http_error_response(request: Request, error: Exception) -> Response:
    """Handles a path that does not exist, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    # Mounted applications and other routes may have no path.
    known = sorted({getattr(route, "path", "") for route in request.app.routes} - {""})
    details = {
        404: f"no such path; the paths are {', '.join(known)}",
        405: f"this path does not have the method {request.method}",
    }
    message = f"{request.url.path}: {details.get(error.status_code, error.detail)}"
    answer = ApiError(error.status_code, message, headers=error.headers)
    return JsonResponse(answer.body, status=answer.status, headers=answer.headers)


async def internal_error_response(request: Request, error: Exception) -> Response:
    """Handles an internal error; its details go to the log, and not to the client."""
    del request, error
    answer = failed_request("internal error; the server's log has the details")
    return JsonResponse(answer.body, status=answer.status)
