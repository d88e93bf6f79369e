"""The door that counts the requests of each client address."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from levanter.serving.errors import ApiError
from levanter.serving.events import Observer
from levanter.serving.middleware.reject import turn_away, unobserved

REMEMBERED_CLIENTS = 10_000
"""Addresses that are counted at most; those that were not heard of for longest are forgotten first."""


class RequestRate:
    """Requests of one client address within a minute, as a bucket that fills evenly.

    Args:
        app: what is behind the door.
        per_minute: requests; so many may come at once, too.
        observe: is told of whom is turned away.
        now: a clock in seconds.
        open_paths: what is not counted: probes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        per_minute: int,
        observe: Observer = unobserved,
        now: Callable[[], float] = time.monotonic,
        open_paths: Collection[str] = ("/health", "/ready", "/metrics"),
    ):
        self._app, self._per_minute, self._observe, self._now = app, per_minute, observe, now
        self._open = frozenset(open_paths)
        self._known: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with 429 and the seconds after which the next one is taken."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        wait = self.wait_of(client[0] if client else "")
        if wait is None:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            429,
            f"more than {self._per_minute:,} requests a minute from this address; the next in {wait} s",
            reason="limit",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait)},
        )
        await turn_away(error, scope, send, self._observe)

    def wait_of(self, address: str) -> int | None:
        """Counts a request of an address.

        Returns:
            None if it is taken, else the whole seconds after which one will be.
        """
        now, a_second = self._now(), self._per_minute / 60
        there, since = self._known.pop(address, (float(self._per_minute), now))
        there = min(float(self._per_minute), there + (now - since) * a_second)
        taken = there >= 1
        self._known[address] = (there - 1 if taken else there, now)
        while len(self._known) > REMEMBERED_CLIENTS:
            self._known.popitem(last=False)
        return None if taken else max(1, math.ceil((1 - there) / a_second))
