"""`Service`: a model and its engine as the event loop uses them; `PendingRequest`: a request and its results."""

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
"""Largest value of `Retry-After`."""
MAX_DELIVERY_SECONDS = 1.0
"""How long the engine's thread waits until its results are sent. An event loop that blocks for longer does so for
another reason."""
PARSER_THREADS = 2
"""Threads that parse and tokenize requests."""
T = TypeVar("T")
State: TypeAlias = Literal["starting", "ready", "draining", "ended"]


class PendingRequest:
    """One HTTP request that waits for the choices of one or more engine requests.

    Args:
        submitted: the engine requests.
        route: the path of its route.
        cancel: cancels an engine request by its id.
        streamed: whether the request is cut off if too much of its response is unread.
    """

    def __init__(
        self,
        submitted: Sequence[Submission],
        *,
        route: str,
        cancel: Callable[[str], None],
        streamed: bool,
    ):
        self.submitted, self.route, self._cancel, self._streamed = tuple(submitted), route, cancel, streamed
        self.began = time.monotonic()
        requests = [submission.request for submission in submitted]
        # Choices without an end, and prompts without scores: the request is over when both are empty.
        self._open = {ChoiceId(r.id, n) for r in requests if r.params.max_tokens != 0 for n in range(r.params.n)}
        self._unscored = {submission.request.id for submission in submitted if submission.score}
        # Results that have arrived and were not written to the client yet; only the event loop touches them.
        self._unread: deque[Delivery] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self.cut = asyncio.Event()
        self.counts: dict[ChoiceId, int] = {}
        self.last_at: dict[ChoiceId, float] = {}

    @property
    def requests(self) -> set[str]:
        """The ids of its engine requests that have open choices or an unscored prompt."""
        return {of.request for of in self._open} | self._unscored

    @property
    def open(self) -> frozenset[ChoiceId]:
        """Its choices that go on."""
        return frozenset(self._open)

    @property
    def over(self) -> bool:
        """Whether all results have arrived and were read."""
        return not (self._unread or self._open or self._unscored)

    def push(self, delivery: Delivery) -> None:
        """Adds a result."""
        if isinstance(delivery, PromptScored):
            self._unscored.discard(delivery.request)
            if delivery.error is not None:
                # A prompt without scores fails its choices too: they are never submitted.
                self._open = {of for of in self._open if of.request != delivery.request}
        elif delivery.last:
            self._open.discard(delivery.of)
        self._unread.append(delivery)
        self._unread_bytes += delivery.size
        # A response that is one object keeps everything until its end anyway, so the limit is for streams.
        if self._streamed and self._unread_bytes > MAX_UNREAD_BYTES:
            self.cut.set()
        self._changed.set()

    async def deliveries(self) -> AsyncIterator[list[Delivery]]:
        """Results in the batches in which they arrive, until all have arrived."""
        while not self.over:
            # One wait for all choices: results of a step arrive together, and become one write.
            await self._changed.wait()
            # Cleared before the results are taken: a result that arrives later sets it again.
            self._changed.clear()
            batch, self._unread_bytes = list(self._unread), 0
            self._unread.clear()
            if batch:
                yield batch

    def close(self) -> None:
        """Cancels what has not arrived."""
        for request in self.requests:
            self._cancel(request)


def _draining_error() -> ApiError:
    return ApiError(503, "the server is shutting down", reason="draining", kind="server_error", code="draining")


class Service:
    """One model and its engine, for an event loop.

    Args:
        engine: the engine.
        reader: makes engine requests of prompts.
        names: names of the model; responses contain the first.
        max_queued_tokens: limit on tokens of prompts that wait.
        score: scores prompts; None if no request may have its prompt scored.
        chat_max_tokens: default `max_tokens` of a chat completion; None for the rest of the context.
        observers: receive the server's events.
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
        self._engine_thread = EngineThread(
            engine, self._inbox, stream=reader.tokenizer.stream, score=score, deliver=self._deliver, ended=self._ended
        )
        self._pending: dict[str, PendingRequest] = {}
        """Engine request id → the HTTP request that waits for it."""
        # Few threads: they compete with the event loop and the engine's thread for the interpreter.
        self._parsers = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parsing")
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
        """The load of the engine."""
        return self._engine_thread.load

    @property
    def healthy(self) -> bool:
        """Whether the engine runs."""
        return self._engine_thread.alive

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the engine, if any."""
        return self._engine_thread.error

    @property
    def max_queued_tokens(self) -> int:
        """Limit on tokens of prompts that wait."""
        return self._inbox.max_queued_tokens

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Service"]:
        """Runs the engine within the block, and delivers results to the event loop that entered it."""
        self._loop = asyncio.get_running_loop()
        # After the loop is known: the thread may deliver at once.
        self._engine_thread.start()
        self.state = "ready"
        try:
            yield self
        finally:
            self.state = "ended"
            # Wakes the thread, which ends all open choices with an error before it returns.
            self._inbox.close()
            # The thread may be in a step whose results it delivers to this loop: joining it here would be a deadlock.
            await asyncio.to_thread(self._engine_thread.join)
            self._parsers.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Runs a function in a thread, because it would block the event loop for too long."""
        return await asyncio.get_running_loop().run_in_executor(self._parsers, work)

    def observe(self, event: ServerEvent) -> None:
        """Passes an event to the observers."""
        for observer in self.observers:
            observer(event)

    def submit(self, submitted: Sequence[Submission], *, route: str, streamed: bool) -> PendingRequest:
        """Puts requests into the queue, all of them or none.

        Raises:
            ApiError: the queue is full (429), or the server is shutting down (503).
        """
        # Checked on the event loop, where the state changes: a request after `drain` began is refused.
        if self.state != "ready" or not self.healthy:
            raise _draining_error()
        # Registered below only after the queue has accepted it. Results cannot arrive in between, as they are routed on
        # this loop.
        pending = PendingRequest(submitted, route=route, cancel=self._cancel, streamed=streamed)
        try:
            # A request for no tokens and no scores is complete already: its response is its prompt.
            self._inbox.submit([submission for submission in submitted if submission.request.id in pending.requests])
        except InboxClosedError:
            # The engine ended between the check above and this call.
            raise _draining_error() from None
        except QueueFullError as error:
            wait = {"Retry-After": str(self._retry_after(sum(submission.tokens for submission in submitted)))}
            raise ApiError(
                429, str(error), reason="queue_full", kind="rate_limit_error", code="queue_full", headers=wait
            ) from None
        for submission in submitted:
            request = submission.request
            if request.id in pending.requests:
                self._pending[request.id] = pending
            self.observe(
                RequestAdmitted(
                    request=request.id,
                    route=route,
                    prompt_tokens=len(request.tokens),
                    choices=request.params.n,
                    at=pending.began,
                )
            )
        if self._pending:
            self._quiet.clear()
        return pending

    def _retry_after(self, new: int) -> int:
        """Seconds after which the queue is likely to have room for so many tokens, from the engine's throughput."""
        queued = self._inbox.queued_tokens
        # The part of the queue that has to be processed before the new request fits.
        share = min(1.0, (queued + new - self.max_queued_tokens) / queued) if queued else 1.0
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(share * self.load.drain_seconds)))

    def _cancel(self, request: str) -> None:
        pending = self._pending.get(request)
        # It has ended: `close` is called for complete responses too.
        if pending is None:
            return
        # The client is gone, so its choices end here at once; the engine's results for them find no request and are
        # dropped.
        self._inbox.post(Cancel(request=request))
        for of in [of for of in pending.open if of.request == request]:
            self._end(pending, of, "cancelled", time.monotonic())
        self._forget(request)

    async def drain(self, seconds: float) -> None:
        """Admits no more requests; running ones may go on for `seconds`, and are then ended where they are."""
        self.state = "draining"
        if not self.healthy:
            return
        try:
            # Quiet: no request waits for results.
            await asyncio.wait_for(self._quiet.wait(), seconds)
        except TimeoutError:
            # Time is up: the engine's thread ends all choices, and their deliveries make the service quiet.
            self._inbox.post(Drain())
            await self._quiet.wait()

    def fail(self, message: str) -> None:
        """Ends all requests with an error and admits no more; returns at once, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._fail, message)

    def _fail(self, message: str) -> None:
        self.state, now = "ended", time.monotonic()
        # A set: one HTTP request may wait for several engine requests.
        for pending in set(self._pending.values()):
            # The engine's thread may be blocked in a call that never returns, so its results are made here.
            deltas = [TokenDelta(of=of, error=message, at=now) for of in pending.open]
            covered = {delta.of.request for delta in deltas}
            # A request whose prompt is being scored may have no open choice.
            unscored = pending.requests - covered
            self._receive([*deltas, *(PromptScored(request=r, error=message, at=now) for r in unscored)])

    def on_end(self, call: Callable[[], None]) -> None:
        """Registers a function that is called on the event loop if the engine ends by an error."""
        self._on_end.append(call)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Passes results from the engine's thread to the event loop, and waits until they are sent.

        Without the wait, the thread would compete for the interpreter with the event loop at every write to a client:
        the last clients would receive a step when the next one is done already, and sometimes two steps at a time.
        """
        assert self._loop is not None
        # Cleared before the call is scheduled, which may run at once in the other thread.
        self._sent.clear()
        self._loop.call_soon_threadsafe(self._receive, deliveries)
        # With a limit, so that an event loop that has ended cannot hold the thread for ever.
        self._sent.wait(MAX_DELIVERY_SECONDS)

    def _ended(self) -> None:
        """Notifies the event loop that the engine's thread is about to end."""
        assert self._loop is not None
        for call in self._on_end if self._engine_thread.error is not None else ():
            # Runs in the engine's thread; the callbacks belong to the loop.
            self._loop.call_soon_threadsafe(call)

    def _receive(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self._route(deliveries)
        finally:
            # `call_soon` is first in, first out: the tasks that were woken above write their tokens before this call.
            asyncio.get_running_loop().call_soon(self._sent.set)

    def _route(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            request = delivery.of.request if isinstance(delivery, TokenDelta) else delivery.request
            # Cancelled since the engine computed it.
            if (pending := self._pending.get(request)) is None:
                continue
            if isinstance(delivery, TokenDelta):
                self._count(pending, delivery)
            elif delivery.error is not None:
                for of in [of for of in pending.open if of.request == request]:
                    self._end(pending, of, "failed", delivery.at)
            # After the events, so that an observer has counted a token before its client can see it.
            pending.push(delivery)
            # Most deliveries are tokens in the middle of a choice, which end nothing: they skip `pending.requests`.
            if (not isinstance(delivery, TokenDelta) or delivery.last) and request not in pending.requests:
                self._forget(request)

    def _forget(self, request: str) -> None:
        # The last request that ends makes the service quiet, which `drain` waits for.
        self._pending.pop(request, None)
        if not self._pending:
            self._quiet.set()

    def _count(self, pending: PendingRequest, delta: TokenDelta) -> None:
        """Reports a delta to the observers."""
        of, before = delta.of, pending.last_at.get(delta.of, pending.began)
        if delta.token is not None:
            first = of not in pending.counts
            pending.counts[of] = pending.counts.get(of, 0) + 1
            pending.last_at[of] = delta.at
            self.observe(
                TokensSampled(
                    request=of.request, choice=of.choice, tokens=1, first=first, since=delta.at - before, at=delta.at
                )
            )
        if delta.error is not None:
            self._end(pending, of, "failed", delta.at)
        elif delta.reason is not None:
            self._end(pending, of, delta.reason, delta.at)

    def _end(self, pending: PendingRequest, of: ChoiceId, reason: EndReason, at: float) -> None:
        self.observe(
            ChoiceEnded(
                request=of.request,
                choice=of.choice,
                reason=reason,
                tokens=pending.counts.get(of, 0),
                since=at - pending.began,
                at=at,
            )
        )
