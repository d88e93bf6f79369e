"""The door that only HTTP comes through that is spoken here."""

from starlette.types import ASGIApp, Receive, Scope, Send

from levanter.serving.errors import ApiError
from levanter.serving.events import Observer
from levanter.serving.middleware.reject import turn_away, unobserved

SPOKEN = ("1.0", "1.1")


class HttpVersionCheck:
    """Turns away requests of other versions of HTTP: what they mean by the same words is not known.

    Args:
        app: what is behind the door.
        observe: is told of whom is turned away.
    """

    def __init__(self, app: ASGIApp, *, observe: Observer = unobserved):
        self._app, self._observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 400."""
        version = scope.get("http_version", SPOKEN[-1])
        if scope["type"] != "http" or version in SPOKEN:
            await self._app(scope, receive, send)
            return
        said = f"HTTP/{version} is not spoken here, HTTP/{' and HTTP/'.join(SPOKEN)} are"
        error = ApiError(400, said, reason="invalid", headers={"Connection": "close"})
        await turn_away(error, scope, send, self._observe)
