"""`HttpServer`: an application at an address, from the first connection to the end of the last one.

It ends when it is told to (`stop`, from a signal), or when its engine does. Told once, it takes no more requests, lets
those that are there go on for a while, and ends them then.
"""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from levanter.serving.connections import bounded
from levanter.serving.limits import LimitsConfig
from levanter.serving.service import Service

BACKLOG = 2048
"""Connections that wait to be accepted."""
CLOSING_SECONDS = 5
"""How long clients may take, at the end, to read what they were sent."""

logger = logging.getLogger(__name__)


class AddressError(ValueError):
    """An address that cannot be listened on."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds an address; nobody is listened to yet.

    Raises:
        AddressError: somebody else has it, or it is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise AddressError(
            f"host, port: {host}:{port} cannot be listened on ({error.strerror or error})\n"
            "  → port: 0 takes any that is free"
        ) from error
    return made


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it, and says when it listens."""

    def __init__(self, config: uvicorn.Config, opened: Callable[[], None]):
        super().__init__(config)
        self._opened = opened

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does."""
        await super().startup(sockets)
        self._opened()


class HttpServer:
    """Serves an application.

    Args:
        application: made by `app`.
        service: whose.
        drain_seconds: how long requests may go on when the server is told to end.
        limits: of connections.
        opened: is called when connections are answered.
    """

    def __init__(
        self,
        application: Starlette,
        service: Service,
        *,
        drain_seconds: float,
        limits: LimitsConfig | None = None,
        opened: Callable[[], None] = lambda: None,
    ):
        limits = limits or LimitsConfig()
        self._service, self._drain_seconds, self._opened_by = service, drain_seconds, opened
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: socket.socket | None = None
        self._ending: asyncio.Task[None] | None = None
        self._told = 0
        config = uvicorn.Config(
            application,
            loop="asyncio",
            http=bounded(limits),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # `bounded` closes connections before that.
            timeout_keep_alive=2 * math.ceil(limits.idle_seconds),
            timeout_graceful_shutdown=CLOSING_SECONDS,
            # asyncio accepts so many at a turn. Were it all that wait, twenty requests that come at once would be read
            # and refused one behind the other, and who is being answered would wait for all of them. `_opened` has the
            # others wait at the socket.
            backlog=1,
        )
        self._server = _Uvicorn(config, self._opened)

    def run(self, listening: socket.socket) -> None:
        """Serves until it is told to end, or the engine ends.

        Args:
            listening: made by `bound`; closed at the end.

        Raises:
            AddressError: somebody else listens there by now.
            BaseException: what ended the engine.
        """
        try:
            listening.listen(BACKLOG)
        except OSError as error:
            raise AddressError(f"host, port: somebody else listens there by now ({error.strerror})") from error
        self._listening = listening
        with asyncio.Runner() as runner:
            runner.run(self._serve(listening))
        if self._service.error is not None:
            raise self._service.error

    def stop(self) -> None:
        """Tells it to end; may be called in a signal handler.

        Raises:
            KeyboardInterrupt: it was told before.
        """
        self._told += 1
        if self._told > 1:
            raise KeyboardInterrupt
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def _serve(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._service.on_end(self._end)
        if self._told:
            self._end()
        await self._server.serve([listening])
        if self._ending is not None:
            await self._ending

    def _opened(self) -> None:
        assert self._listening is not None
        self._listening.listen(BACKLOG)
        self._opened_by()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if self._service.healthy:
            logger.info("ending: requests that are there have %g s", self._drain_seconds)
        await self._service.drain(self._drain_seconds)
        self._server.should_exit = True
