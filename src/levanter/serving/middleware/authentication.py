"""The door that looks at the key of requests."""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from levanter.serving.api_key import ApiKey
from levanter.serving.errors import ApiError
from levanter.serving.events import Observer
from levanter.serving.middleware.reject import turn_away, unobserved

OPEN_PATHS = ("/", "/health", "/ready")
"""What is answered without a key: the page, which says nothing of this server by itself, and probes."""

MISSING = ApiError(
    401,
    "this server asks for a key: send the header `Authorization: Bearer …`",
    reason="key",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
WRONG = ApiError(
    401,
    "the key in the header `Authorization` is not this server's",
    reason="key",
    code="invalid_api_key",
    headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
)


class RequireKey:
    """Lets in who carries the key.

    Args:
        app: what is behind the door.
        key: the key.
        observe: is told of whom is turned away.
        open_paths: what is answered without it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: ApiKey,
        observe: Observer = unobserved,
        open_paths: Collection[str] = OPEN_PATHS,
    ):
        self._app, self._key, self._observe, self._open = app, key, observe, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 401."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open):
            await self._app(scope, receive, send)
            return
        carried = self._key.is_in(scope["headers"])
        if carried:
            await self._app(scope, receive, send)
            return
        await turn_away(MISSING if carried is None else WRONG, scope, send, self._observe)
