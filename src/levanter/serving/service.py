"""`Service`: a model and its engine as the event loop sees them; `PendingRequest`: a request and its results."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias, TypeVar

from levanter.inference.engine import Engine
from levanter.inference.programs import ScorePromptFn
from levanter.inference.prompts import PromptReader
from levanter.inference.requests import ChoiceId
from levanter.inference.scheduler import QueueFullError
from levanter.serving.engine_thread import (
    Cancel,
    Delivery,
    Drain,
    EngineThread,
    Inbox,
    InboxClosedError,
    PromptScored,
    Submission,
    TokenDelta,
)
from levanter.serving.errors import ApiError
from levanter.serving.metrics import (
    ChoiceEnded,
    EndReason,
    EngineLoad,
    Observer,
    RequestAdmitted,
    ServerEvent,
    TokensSampled,
)

MAX_UNREAD_BYTES = 1 << 20
"""Bytes that may wait for a client that reads a stream slowly."""
MAX_RETRY_SECONDS = 300
"""Seconds that a client is sent away for."""
MAX_DELIVERY_SECONDS = 1.0
"""Seconds that the engine waits at most until what it handed over is sent: an event loop that stands still for so long
does so for other reasons."""
PARSER_THREADS = 2
"""Threads that read requests and make tokens of them."""
T = TypeVar("T")
State: TypeAlias = Literal["starting", "ready", "draining", "ended"]


class PendingRequest:
    """What one HTTP request waits for: the choices of one or more requests to the engine.

    Args:
        submitted: these.
        route: the path that it came by.
        give_up: lets go of a request.
        streamed: whether what is not fetched in time counts against it.
    """

    def __init__(
        self,
        submitted: Sequence[Submission],
        *,
        route: str,
        give_up: Callable[[str], None],
        streamed: bool,
    ):
        self.submitted, self.route, self._give_up, self._streamed = tuple(submitted), route, give_up, streamed
        self.began = time.monotonic()
        requests = [each.request for each in submitted]
        self._open = {ChoiceId(r.id, n) for r in requests if r.params.max_tokens != 0 for n in range(r.params.n)}
        self._unscored = {each.request.id for each in submitted if each.score}
        self._arrived: deque[Delivery] = deque()
        self._behind = 0
        self._changed = asyncio.Event()
        self.cut = asyncio.Event()
        self.counts: dict[ChoiceId, int] = {}
        self.last_at: dict[ChoiceId, float] = {}

    @property
    def requests(self) -> set[str]:
        """The ids of its requests of which something is still to come."""
        return {of.request for of in self._open} | self._unscored

    @property
    def open(self) -> frozenset[ChoiceId]:
        """Its choices that go on."""
        return frozenset(self._open)

    @property
    def over(self) -> bool:
        """Whether all of it has come, and was fetched."""
        return not (self._arrived or self._open or self._unscored)

    def push(self, delivery: Delivery) -> None:
        """Takes what came of it."""
        if isinstance(delivery, PromptScored):
            self._unscored.discard(delivery.request)
            if delivery.error is not None:
                self._open = {of for of in self._open if of.request != delivery.request}
        elif delivery.last:
            self._open.discard(delivery.of)
        self._arrived.append(delivery)
        self._behind += delivery.size
        if self._streamed and self._behind > MAX_UNREAD_BYTES:
            self.cut.set()
        self._changed.set()

    async def deliveries(self) -> AsyncIterator[list[Delivery]]:
        """What comes of it, as it comes, until all of it has come."""
        while not self.over:
            await self._changed.wait()
            self._changed.clear()
            arrived, self._behind = list(self._arrived), 0
            self._arrived.clear()
            if arrived:
                yield arrived

    def close(self) -> None:
        """Gives up what has not come."""
        for request in self.requests:
            self._give_up(request)


def _draining_error() -> ApiError:
    return ApiError(503, "the server is ending", reason="draining", kind="server_error", code="draining")


class Service:
    """One model and its engine.

    Args:
        engine: the engine; its Programs are compiled.
        reader: makes requests of what is asked.
        names: what the model is called, the one that answers give first.
        max_queued_tokens: of prompts that wait.
        score: scores prompts; None where nobody may ask for that.
        chat_max_tokens: tokens of an answer in a conversation where the request does not say; None for as many as there
            is room for.
        observers: are told what happens.
    """

    def __init__(
        self,
        engine: Engine,
        reader: PromptReader,
        *,
        names: Sequence[str],
        max_queued_tokens: int,
        score: ScorePromptFn | None = None,
        chat_max_tokens: int | None = None,
        observers: Sequence[Observer] = (),
    ):
        self.reader, self.names, self.chat_max_tokens = reader, tuple(names), chat_max_tokens
        self.created = int(time.time())
        self.state: State = "starting"
        self.observers = list(observers)
        self._inbox = Inbox(max_queued_tokens)
        self._worker = EngineThread(
            engine, self._inbox, stream=reader.tokenizer.stream, score=score, deliver=self._hand_over, ended=self._ended
        )
        self._tickets: dict[str, PendingRequest] = {}
        self._readers = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="reading")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent = threading.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._on_end: list[Callable[[], None]] = []

    @property
    def context(self) -> int:
        """Positions of a sequence, at most."""
        return self.reader.schedule.context

    @property
    def load(self) -> EngineLoad:
        """What the engine is doing."""
        return self._worker.load

    @property
    def healthy(self) -> bool:
        """Whether the engine runs."""
        return self._worker.alive

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, where something did."""
        return self._worker.error

    @property
    def max_queued_tokens(self) -> int:
        """Tokens of prompts that may wait."""
        return self._inbox.max_queued_tokens

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Service"]:
        """The engine runs in the block, and answers are for the event loop that it is entered on."""
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        self.state = "ready"
        try:
            yield self
        finally:
            self.state = "ended"
            self._inbox.close()
            # The thread may be in a step, and what it delivers then comes to this loop.
            await asyncio.to_thread(self._worker.join)
            self._readers.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Does what takes longer than an event loop has time for."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def observe(self, event: ServerEvent) -> None:
        """Tells the observers what happened."""
        for observer in self.observers:
            observer(event)

    def ask(self, submitted: Sequence[Submission], *, route: str, streamed: bool) -> PendingRequest:
        """Puts requests into the queue, all of them or none.

        Raises:
            ApiError: too much waits (429), or the server is ending (503).
        """
        if self.state != "ready" or not self.healthy:
            raise _draining_error()
        ticket = PendingRequest(submitted, route=route, give_up=self._give_up, streamed=streamed)
        try:
            # Who only wants a prompt back has it already.
            self._inbox.submit([each for each in submitted if each.request.id in ticket.requests])
        except InboxClosedError:
            raise _draining_error() from None
        except QueueFullError as error:
            wait = {"Retry-After": str(self._retry_after(sum(each.tokens for each in submitted)))}
            raise ApiError(
                429, str(error), reason="queue_full", kind="rate_limit_error", code="queue_full", headers=wait
            ) from None
        for each in submitted:
            request = each.request
            if request.id in ticket.requests:
                self._tickets[request.id] = ticket
            self.observe(
                RequestAdmitted(
                    request=request.id,
                    route=route,
                    prompt_tokens=len(request.tokens),
                    choices=request.params.n,
                    at=ticket.began,
                )
            )
        if self._tickets:
            self._quiet.clear()
        return ticket

    def _retry_after(self, new: int) -> int:
        """Seconds after which the queue is likely to have room for so many tokens, by the pace of the engine."""
        queued = self._inbox.queued_tokens
        share = min(1.0, (queued + new - self.max_queued_tokens) / queued) if queued else 1.0
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(share * self.load.drain_seconds)))

    def _give_up(self, request: str) -> None:
        ticket = self._tickets.get(request)
        if ticket is None:
            return
        self._inbox.post(Cancel(request=request))
        for of in [of for of in ticket.open if of.request == request]:
            self._end(ticket, of, "cancelled", time.monotonic())
        self._forget(request)

    async def drain(self, seconds: float) -> None:
        """Takes no more requests; those that are there may go on for a while, and end where they are then."""
        self.state = "draining"
        if not self.healthy:
            return
        try:
            await asyncio.wait_for(self._quiet.wait(), seconds)
        except TimeoutError:
            self._inbox.post(Drain())
            await self._quiet.wait()

    def fail(self, said: str) -> None:
        """Tells all that wait why nothing more comes, and takes no more requests; returns at once, in any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail, said)

    def _fail(self, said: str) -> None:
        self.state, now = "ended", time.monotonic()
        for ticket in set(self._tickets.values()):
            open = [TokenDelta(of=of, error=said, at=now) for of in ticket.open]
            named = {piece.of.request for piece in open}
            # One whose prompt is being scored may have no choice.
            self._arrived([*open, *(PromptScored(request=r, error=said, at=now) for r in ticket.requests - named)])

    def on_end(self, call: Callable[[], None]) -> None:
        """Has something called on the event loop when the engine ends by itself."""
        self._on_end.append(call)

    def _hand_over(self, made: Sequence[Delivery]) -> None:
        """Brings what the engine's thread has to the event loop, and lets that have the interpreter until it is sent.

        The thread would take turns with it otherwise, at every write to a client: those that are written to last would
        hear of a step when the next one is made already, and sometimes two steps at a time.
        """
        assert self._loop is not None
        self._sent.clear()
        self._loop.call_soon_threadsafe(self._arrived, made)
        self._sent.wait(MAX_DELIVERY_SECONDS)

    def _ended(self) -> None:
        """Tells the event loop that the engine's thread is about to end."""
        assert self._loop is not None
        for call in self._on_end if self._worker.error is not None else ():
            self._loop.call_soon_threadsafe(call)

    def _arrived(self, made: Sequence[Delivery]) -> None:
        try:
            self._take(made)
        finally:
            # Behind the tasks that this has woken, each of which writes what it got.
            asyncio.get_running_loop().call_soon(self._sent.set)

    def _take(self, made: Sequence[Delivery]) -> None:
        for delivery in made:
            request = delivery.of.request if isinstance(delivery, TokenDelta) else delivery.request
            if (ticket := self._tickets.get(request)) is None:
                continue
            if isinstance(delivery, TokenDelta):
                self._count(ticket, delivery)
            elif delivery.error is not None:
                for of in [of for of in ticket.open if of.request == request]:
                    self._end(ticket, of, "failed", delivery.at)
            ticket.push(delivery)
            # A token behind which more come ends nothing; of those there are many.
            if (not isinstance(delivery, TokenDelta) or delivery.last) and request not in ticket.requests:
                self._forget(request)

    def _forget(self, request: str) -> None:
        self._tickets.pop(request, None)
        if not self._tickets:
            self._quiet.set()

    def _count(self, ticket: PendingRequest, piece: TokenDelta) -> None:
        """Tells the observers of a piece."""
        of, before = piece.of, ticket.last_at.get(piece.of, ticket.began)
        if piece.token is not None:
            first = of not in ticket.counts
            ticket.counts[of] = ticket.counts.get(of, 0) + 1
            ticket.last_at[of] = piece.at
            self.observe(
                TokensSampled(
                    request=of.request, choice=of.choice, tokens=1, first=first, since=piece.at - before, at=piece.at
                )
            )
        if piece.error is not None:
            self._end(ticket, of, "failed", piece.at)
        elif piece.reason is not None:
            self._end(ticket, of, piece.reason, piece.at)

    def _end(self, ticket: PendingRequest, of: ChoiceId, reason: EndReason, at: float) -> None:
        self.observe(
            ChoiceEnded(
                request=of.request,
                choice=of.choice,
                reason=reason,
                tokens=ticket.counts.get(of, 0),
                since=at - ticket.began,
                at=at,
            )
        )
