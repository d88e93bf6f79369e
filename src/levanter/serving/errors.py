"""`ApiError`: why a request is not answered, as OpenAI's clients read it.

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
"""Why nothing was begun: no valid request, more than the context, a body that is too large, too much waits, the server
is ending, no key or a wrong one, too many requests or too slow ones, from a page of another site, or no such model or
route."""
INVALID = "invalid_request_error"
JSON_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
"""Writes JSON in ASCII: some clients take U+2028 in a stream for the end of a line."""
_PARAM = re.compile(r"([A-Za-z_][\w.\[\]]{0,100}): ")


class ApiError(Exception):
    """A request that is not answered.

    Attributes:
        status: of the answer.
        message: what is wrong, all of it.
        reason: which kind of refusal it is, for metrics; None for what failed later.
        kind: OpenAI's `type`.
        param: the field that is wrong.
        code: OpenAI's `code`.
        headers: that the answer has beside.
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
        """The JSON of it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid_request(message: str, *, code: str | None = None, reason: RejectReason = "invalid") -> ApiError:
    """A request that cannot be used; `param` is the first field that the message names."""
    found = _PARAM.match(message)
    return ApiError(400, message, reason=reason, param=None if found is None else found[1], code=code)


def failed_request(message: str) -> ApiError:
    """A request that was begun and could not be finished."""
    return ApiError(500, message, kind="server_error")


def json_bytes(value: Mapping[str, Json]) -> bytes:
    """Encodes an object as JSON."""
    return JSON_ENCODER.encode(value).encode()


class JsonResponse(Response):
    """An object as an answer."""

    media_type = "application/json"

    def __init__(self, value: Mapping[str, Json], *, status: int = 200, headers: Mapping[str, str] | None = None):
        super().__init__(json_bytes(value), status_code=status, headers=headers)


async def api_error_response(request: Request, error: Exception) -> Response:
    """The answer to a request that is refused.

    Like the others here it is no plain function: such a one is called in a thread of a pool, where nobody counts safely
    and which takes the interpreter from the engine.
    """
    del request
    assert isinstance(error, ApiError)
    return JsonResponse(error.body, status=error.status, headers=error.headers)


async def http_error_response(request: Request, error: Exception) -> Response:
    """The answer to a path that does not exist, or a method that a path does not have."""
    assert isinstance(error, HTTPException)
    known = sorted({getattr(route, "path", "") for route in request.app.routes} - {""})
    said = {404: f"no such path; there are {', '.join(known)}", 405: f"{request.method} is not a method of this path"}
    message = f"{request.url.path}: {said.get(error.status_code, error.detail)}"
    answer = ApiError(error.status_code, message, headers=error.headers)
    return JsonResponse(answer.body, status=answer.status, headers=answer.headers)


async def internal_error_response(request: Request, error: Exception) -> Response:
    """The answer where something of ours is wrong; what it is goes to the log, and not to the client."""
    del request, error
    answer = failed_request("internal error; the server's log says more")
    return JsonResponse(answer.body, status=answer.status)
