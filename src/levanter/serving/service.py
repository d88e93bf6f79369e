"""`Service`: a model and its engine as the event loop uses them; `PendingRequest`: a request and its results."""

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

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
"""Threads that parse and tokenize large requests, and write large responses."""
T = TypeVar("T")
State: TypeAlias = Literal["starting", "ready", "draining", "ended"]


class PendingRequest:
    """One HTTP request that waits for the choices of one or more engine requests.

    Args:
        submitted: the engine requests.
        route: the path of its route.
        cancel: cancels an engine request by its id.
        streamed: whether the request is cut off if too much of its response is unread.
        client: who it is from.
    """

    def __init__(
        self,
        submitted: Sequence[Submission],
        *,
        route: str,
        cancel: Callable[[str], None],
        streamed: bool,
        client: tuple[str, ...] = (),
    ):
        self.submitted, self.route, self._cancel, self._streamed = tuple(submitted), route, cancel, streamed
        self.began, self.client = time.monotonic(), client
        requests = [submission.request for submission in submitted]
        # Choices without an end, and prompts without scores: the request is over when both are empty.
        self._open = {ChoiceId(r.id, n) for r in requests if r.params.max_tokens != 0 for n in range(r.params.n)}
        # By request, so that the end of one of many choices costs no look at the others.
        self._open_of = Counter(of.request for of in self._open)
        self._choices = {r.id: r.params.n for r in requests}
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
        return {request for request in self._choices if self.waits_for(request)}

    def waits_for(self, request: str) -> bool:
        """Whether an engine request has open choices or an unscored prompt."""
        return self._open_of[request] > 0 or request in self._unscored

    def open_choices(self, request: str) -> list[ChoiceId]:
        """The choices of an engine request that go on."""
        choices = (ChoiceId(request, n) for n in range(self._choices.get(request, 0)))
        return [of for of in choices if of in self._open]

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
                self._open.difference_update(self.open_choices(delivery.request))
                self._open_of[delivery.request] = 0
        elif delivery.last and delivery.of in self._open:
            self._open.discard(delivery.of)
            self._open_of[delivery.of.request] -= 1
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


@dataclass(frozen=True, kw_only=True)
class ClientWork(Generic[T]):
    """A function that is called in a thread for a client.

    Attributes:
        call: the function.
        client: who it is for; see `Request.client`.
        is_short: whether it takes some ten milliseconds at most.
    """

    call: Callable[[], T]
    client: tuple[str, ...]
    is_short: bool = False

    def __call__(self) -> T:
        """Calls the function."""
        return self.call()


_Work: TypeAlias = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class WorkQueue:
    """Runs functions in a few threads; those of different clients take turns.

    Work that waits is dropped if its task is cancelled; work that runs goes on to its end. All methods are called on
    the event loop.

    Args:
        threads: number of threads.
        name: prefix of their names.
    """

    def __init__(self, threads: int, *, name: str):
        self._threads, self._executor = threads, ThreadPoolExecutor(threads, thread_name_prefix=name)
        # Group of clients → client → its work in order; the next in turn stands first.
        self._waiting: dict[tuple[str, ...], dict[tuple[str, ...], deque[_Work]]] = {}
        self._running: Counter[tuple[str, ...]] = Counter()

    async def run(self, work: Callable[[], T], client: tuple[str, ...] = ()) -> T:
        """The result of a function that runs in a thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        clients = self._waiting.setdefault(client[:1], {})
        clients.setdefault(client, deque()).append((work, future))
        self._start()
        return await future

    def close(self) -> None:
        """Starts no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for clients in self._waiting.values():
            for waiting in clients.values():
                for _, future in waiting:
                    future.cancel()
        self._waiting.clear()

    def _start(self) -> None:
        """Gives work to threads that have none."""
        while self._waiting and self._running.total() < self._threads:
            # The group for which the fewest threads work; of equals, the one whose turn is the longest ago.
            group = min(self._waiting, key=self._running.__getitem__)
            clients = self._waiting.pop(group)
            client = next(iter(clients))
            waiting = clients.pop(client)
            work, future = waiting.popleft()
            if waiting:
                clients[client] = waiting
            if clients:
                self._waiting[group] = clients
            # Its client has left.
            if future.cancelled():
                continue
            self._running[group] += 1
            started = asyncio.get_running_loop().run_in_executor(self._executor, work)
            started.add_done_callback(lambda done, future=future, group=group: self._end(done, future, group))

    def _end(self, done: "asyncio.Future[Any]", future: "asyncio.Future[Any]", group: tuple[str, ...]) -> None:
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]
        error = None if done.cancelled() else done.exception()
        # Whoever waited for it may have left meanwhile.
        if not future.done():
            if done.cancelled():
                future.cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())
        self._start()


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
        self._long_work = WorkQueue(PARSER_THREADS, name="parsing")
        # What is short does not wait for what is long, whoever it is from.
        self._short_work = WorkQueue(1, name="short-parsing")
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
            self._long_work.close()
            self._short_work.close()

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Runs a function in a thread, because it would block the event loop for too long.

        Args:
            work: the function; a `ClientWork` says who it is for, and different clients take turns.
        """
        client, is_short = (work.client, work.is_short) if isinstance(work, ClientWork) else ((), False)
        return await (self._short_work if is_short else self._long_work).run(work, client)

    def observe(self, event: ServerEvent) -> None:
        """Passes an event to the observers."""
        for observer in self.observers:
            observer(event)

    def submit(
        self, submitted: Sequence[Submission], *, route: str, streamed: bool, client: tuple[str, ...] = ()
    ) -> PendingRequest:
        """Puts requests into the queue, all of them or none.

        Args:
            submitted: the requests.
            route: the path of their route.
            streamed: whether the response is streamed.
            client: who they are from; see `Request.client`.

        Raises:
            ApiError: the queue is full (429), or the server is shutting down (503).
        """
        # Checked on the event loop, where the state changes: a request after `drain` began is refused.
        if self.state != "ready" or not self.healthy:
            raise _draining_error()
        # Registered below only after the queue has accepted it. Results cannot arrive in between, as they are routed on
        # this loop.
        pending = PendingRequest(submitted, route=route, cancel=self._cancel, streamed=streamed, client=client)
        try:
            # A request for no tokens and no scores is complete already: its response is its prompt.
            self._inbox.submit(
                [
                    replace(submission, request=replace(submission.request, client=client))
                    for submission in submitted
                    if pending.waits_for(submission.request.id)
                ]
            )
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
            if pending.waits_for(request.id):
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
        for of in pending.open_choices(request):
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
            choices = [of for request in pending.requests for of in pending.open_choices(request)]
            deltas = [TokenDelta(of=of, error=message, at=now) for of in choices]
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
                for of in pending.open_choices(request):
                    self._end(pending, of, "failed", delivery.at)
            # After the events, so that an observer has counted a token before its client can see it.
            pending.push(delivery)
            # Most deliveries are tokens in the middle of a choice, which end nothing.
            if (not isinstance(delivery, TokenDelta) or delivery.last) and not pending.waits_for(request):
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
