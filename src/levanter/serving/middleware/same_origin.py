"""The door that other sites do not come through.

A page that somebody visits can make the browser send requests to this machine, also to a name of its own that it lets
point here. Where a key is asked for, neither has it; where there is none, the names in `Host` and `Origin` tell.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from levanter.serving.errors import ApiError
from levanter.serving.events import Observer
from levanter.serving.middleware.reject import turn_away, unobserved

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""What a server that only this machine reaches is called by its clients."""


class SameOrigin:
    """Turns away what pages of other sites make a browser send.

    Args:
        app: what is behind the door.
        names: by which clients may call this server.
        observe: is told of whom is turned away.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Collection[str] = LOCAL_NAMES,
        observe: Observer = unobserved,
    ):
        self._app, self._observe = app, observe
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # Browsers name the host; who names none is no browser.
        host, origin = headers.get(b"host"), headers.get(b"origin")
        problem = None
        if host is not None and _name(f"//{host}") not in self._names:
            problem = f"this server is not called {host!r}: it answers this machine alone, as {LOCAL_NAMES[0]}"
        elif origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            problem = "pages of other sites may not ask this server"
        if problem is None:
            await self._app(scope, receive, send)
            return
        await turn_away(ApiError(403, problem, reason="origin", code="origin"), scope, send, self._observe)


def _name(url: str) -> str | None:
    """The host of a URL, in lower case; None where there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
