"""`EngineThread`: the thread that runs the engine, and the messages between it and the event loop.

The event loop puts `Submission`, `Cancel` and `Drain` messages into an `Inbox`; the thread returns `TokenDelta` and
`PromptScored` values. The thread also turns tokens into text and ends a choice at a stop string. Between two steps it
reads the inbox, so a cancelled request has no slot from the next step on. While there is nothing to do it sleeps in the
inbox.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from levanter.data.tokenizer import TextStream
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import NOT_FINITE, Engine
from levanter.inference.programs import PromptScores, ScorePromptFn
from levanter.inference.requests import ChoiceId, Event, Failed, FinishReason, Request, Token
from levanter.inference.scheduler import QueueFullError
from levanter.serving.metrics import EngineLoad


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """A choice has one more token, or has ended.

    Attributes:
        of: the choice.
        text: text to send now; empty while the text may still change.
        token: the token; None if the choice ended without one.
        reason: why it has ended; None while it goes on.
        matched: the stop string or the id that ended it.
        error: an error that ended it, or None.
        at: the time, by `time.monotonic`.
    """

    of: ChoiceId
    text: str = ""
    token: Token | None = None
    reason: FinishReason | None = None
    matched: str | int | None = None
    error: str | None = None
    at: float

    @property
    def last(self) -> bool:
        """Whether this is the last delta of its choice."""
        return self.reason is not None or self.error is not None

    @property
    def size(self) -> int:
        """Approximate bytes of memory while it waits for its client."""
        top = 0 if self.token is None else len(self.token.top)
        # Constants of CPython objects; only the order of magnitude matters for the limit.
        return 200 + len(self.text) * 4 + 60 * top


@dataclass(frozen=True, kw_only=True)
class PromptScored:
    """A prompt was scored.

    Attributes:
        request: id of its request.
        scores: log-probabilities of its tokens.
        error: why there are none, or None.
        at: the time.
    """

    request: str
    scores: PromptScores | None = None
    error: str | None = None
    at: float

    @property
    def size(self) -> int:
        """Approximate bytes of memory while it waits for its client."""
        return 0


Delivery: TypeAlias = TokenDelta | PromptScored


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request for the engine.

    Attributes:
        request: the request.
        score: whether its prompt is scored before it is continued; a request for no tokens is only scored.
    """

    request: Request
    score: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that it occupies in the queue."""
        return len(self.request.tokens) * self.request.params.n


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Ends a request whose client has left.

    Attributes:
        request: its id.
        choice: the choice; None for all.
    """

    request: str
    choice: int | None = None


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Ends all choices where they are, as if they had reached their `max_tokens`."""


EngineMessage: TypeAlias = Submission | Cancel | Drain


class InboxClosedError(Exception):
    """The engine's thread reads no more messages."""


class Inbox:
    """Messages for the engine's thread, with a limit on queued prompt tokens.

    Args:
        max_queued_tokens: limit on tokens of prompts that wait; a single request may have more.
    """

    def __init__(self, max_queued_tokens: int):
        self.max_queued_tokens = max_queued_tokens
        # Guards all fields below, and wakes the engine's thread.
        self._changed = threading.Condition()
        self._messages: list[EngineMessage] = []
        self._queued = 0
        self._closed = False

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that wait, in the inbox or at the engine."""
        with self._changed:
            return self._queued

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Puts requests in, all of them or none.

        Raises:
            QueueFullError: the limit on queued tokens is reached.
            InboxClosedError: the thread reads no more messages.
        """
        new = sum(submission.tokens for submission in submissions)
        with self._changed:
            if self._closed:
                raise InboxClosedError
            # An empty queue takes any request, or one that is longer than the limit could never be served.
            if self._queued and self._queued + new > self.max_queued_tokens:
                raise QueueFullError(
                    f"{self._queued} prompt tokens are queued; {new} more would exceed the limit of "
                    f"{self.max_queued_tokens}"
                )
            # Added before the engine has read the messages, so that many requests at once cannot pass the limit
            # together.
            self._queued += new
            self._messages += submissions
            self._changed.notify()

    def post(self, message: Cancel | Drain) -> None:
        """Puts in a message that no limit applies to."""
        with self._changed:
            # No check of `_closed`: after the end of the engine messages are added to a list that is never read.
            self._messages.append(message)
            self._changed.notify()

    def close(self) -> None:
        """Ends the engine's thread; `submit` fails from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    # Both under one lock: a request that is submitted at this moment is either returned here or refused.
    def close_and_flush(self) -> list[EngineMessage]:
        """Closes the inbox and returns the messages that were not read."""
        with self._changed:
            self._closed = True
            unread, self._messages = self._messages, []
            return unread

    def take(self, *, wait: bool) -> list[EngineMessage] | None:
        """All messages; None if the inbox is closed.

        Args:
            wait: whether to sleep until there are some.
        """
        with self._changed:
            # `wait` releases the lock while it sleeps; it may also return without a notification.
            while wait and not self._messages and not self._closed:
                self._changed.wait()
            if self._closed:
                # Unread messages stay for `close_and_flush`, which ends their requests with an error.
                return None
            messages, self._messages = self._messages, []
            return messages

    def report(self, waiting: int) -> None:
        """Sets the tokens that wait at the engine, which has received all messages that were taken."""
        with self._changed:
            unread = (message.tokens for message in self._messages if isinstance(message, Submission))
            # Messages that arrived since `take` are not known to the engine yet.
            self._queued = waiting + sum(unread)


class Backlog:
    """Requests that wait for the engine, in order.

    A request is removed by its id, and the totals are kept up to date, both in constant time.

    Args:
        context: positions of a sequence.
    """

    def __init__(self, context: int):
        self._context = context
        self._requests: dict[str, Submission] = {}
        self.tokens = self.choices = self.new_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._requests)

    def append(self, submission: Submission) -> None:
        """Adds a request at the end."""
        self._requests[submission.request.id] = submission
        self._count(submission, 1)

    def pop(self) -> Submission:
        """Removes and returns the first request."""
        return self._remove(next(iter(self._requests)))

    def discard(self, id: str) -> None:
        """Removes a request if it is in the backlog."""
        # The request may have been passed to the engine already.
        if id in self._requests:
            self._remove(id)

    def clear(self) -> list[Request]:
        """Removes and returns all requests."""
        return [self.pop().request for _ in range(len(self._requests))]

    def _remove(self, id: str) -> Submission:
        submission = self._requests.pop(id)
        self._count(submission, -1)
        return submission

    def _count(self, submission: Submission, sign: int) -> None:
        """Updates the totals: prompt tokens, choices, and tokens that the choices may get."""
        request = submission.request
        self.tokens += sign * submission.tokens
        self.choices += sign * request.params.n
        self.new_tokens += sign * request.params.n * request.new_tokens(self._context)


SMOOTHING = 0.1
"""Weight of the last step in the moving averages of `ThroughputEstimate`."""


@dataclass(frozen=True, kw_only=True)
class ThroughputEstimate:
    """Moving averages of step times, from which `Retry-After` is computed; 0 before the first step.

    Attributes:
        token_seconds: time of a step in which every running slot gets its next tokens.
        prompt_seconds: time to compute one token of a prompt.
    """

    token_seconds: float = 0.0
    prompt_seconds: float = 0.0

    def after(self, seconds: float, *, rows: int, prompt_tokens: int) -> "ThroughputEstimate":
        """The estimate after another step.

        Args:
            seconds: time of the step.
            rows: slots that got tokens.
            prompt_tokens: prompt tokens that were computed.
        """
        # Only steps without a prefill call measure decoding alone.
        if rows and not prompt_tokens:
            return replace(self, token_seconds=_smooth(self.token_seconds, seconds))
        if prompt_tokens:
            # The decode call of a step takes as long with a prefill call as without; the rest is the prefill's.
            prefill_seconds = max(0.0, seconds - (self.token_seconds if rows else 0.0))
            return replace(self, prompt_seconds=_smooth(self.prompt_seconds, prefill_seconds / prompt_tokens))
        return self

    def drained_in(self, *, rows: int, remaining: int, prompt_tokens: int) -> float:
        """Seconds until all known requests are done, if every slot runs all the time.

        Args:
            rows: number of slots.
            remaining: tokens that running and waiting choices may still get.
            prompt_tokens: tokens of the prompts that wait.
        """
        return remaining / rows * self.token_seconds + prompt_tokens * self.prompt_seconds


def _smooth(before: float, now: float) -> float:
    # The first measurement is taken as it is, instead of averaging it with 0.
    return now if not before else (1 - SMOOTHING) * before + SMOOTHING * now


class EngineThread:
    """Runs an engine in its own thread.

    Args:
        engine: the engine; nothing else uses it while the thread runs.
        inbox: messages for the thread.
        stream: makes a detokenizer for one choice.
        score: scores prompts; None if no request may have its prompt scored.
        deliver: receives the results of a step, in the thread.
        ended: is called in the thread when it ends.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        *,
        stream: Callable[[], TextStream],
        score: ScorePromptFn | None,
        deliver: Callable[[Sequence[Delivery]], None],
        ended: Callable[[], None] = lambda: None,
    ):
        self._engine, self._inbox, self._score = engine, inbox, score
        self._stream, self._deliver, self._ended = stream, deliver, ended
        schedule = engine.schedule
        self._backlog, self._to_score = Backlog(schedule.context), Backlog(schedule.context)
        self._texts: dict[str, dict[int, ChoiceText]] = {}
        """Request id → the choices that go on, by number."""
        self._outbox: list[Delivery] = []
        self._throughput = ThroughputEstimate()
        pages = schedule.pages * schedule.shards
        self.load = EngineLoad(slots=schedule.rows, pages=pages, pages_free=pages)
        self.error: BaseException | None = None
        # A daemon: a step that hangs on a device must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits until the thread has ended; the inbox must be closed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            # In this order a cancelled request is removed before it is offered, and a new one runs in this step.
            while (messages := self._inbox.take(wait=self._idle)) is not None:
                for message in messages:
                    self._handle(message)
                self._score_one()
                self._offer()
                self._step()
                self._report()
        # Nothing may be lost here: without this thread every request would wait for ever.
        except BaseException as error:  # noqa: BLE001 - the server raises it when it has shut down
            self.error = error
        finally:
            self._abandon()

    @property
    def _idle(self) -> bool:
        return self._engine.idle and not (self._backlog or self._to_score)

    def _step(self) -> None:
        """Runs a step of the engine, and processes the events of earlier steps that it returns."""
        # The time of a step covers calls that were dispatched earlier: in a steady state these take as long as its own.
        began, computed = time.monotonic(), self._engine.computed_tokens
        # The step is complete only when the iterator is exhausted.
        for event in self._engine.step():
            self._process(event)
        rows = sum(row is not None and not row.prefilling for row in self._engine.state.rows)
        new = self._engine.computed_tokens - computed
        self._throughput = self._throughput.after(time.monotonic() - began, rows=rows, prompt_tokens=new)

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Submission):
            # A prompt is scored before its first token is sampled; the request moves to the backlog when it has its
            # scores.
            (self._to_score if message.score else self._backlog).append(message)
            request = message.request
            if request.params.max_tokens != 0:
                # A request for no tokens has no choices; only its prompt is scored.
                self._texts[request.id] = {n: self._text(request) for n in range(request.params.n)}
        elif isinstance(message, Cancel):
            if message.choice is None:
                # A single choice of a request in the backlog is dropped by `_offer`.
                self._backlog.discard(message.request)
                self._to_score.discard(message.request)
            # A list, because `_end` removes entries.
            for n, text in list(self._texts.get(message.request, {}).items()):
                if message.choice in (None, n):
                    of = ChoiceId(message.request, n)
                    self._end(of, TokenDelta(of=of, reason=text.cancel().reason, at=time.monotonic()))
        else:
            for of, text in self._open():
                piece = text.cancel()
                self._end(of, TokenDelta(of=of, text=piece.text, reason="length", at=time.monotonic()))
            # Their choices have ended above with what they had, which is nothing; the scores will not come.
            for request in self._to_score.clear():
                error = "the server shut down before the prompt was scored"
                self._outbox.append(PromptScored(request=request.id, error=error, at=time.monotonic()))
            self._backlog.clear()

    def _open(self) -> list[tuple[ChoiceId, ChoiceText]]:
        """All choices that go on."""
        return [(ChoiceId(id, n), text) for id, texts in self._texts.items() for n, text in texts.items()]

    def _text(self, request: Request) -> ChoiceText:
        return ChoiceText.for_request(request, self._stream(), limit=request.new_tokens(self._engine.schedule.context))

    def _end(self, of: ChoiceId, delta: TokenDelta) -> None:
        # Also after a normal end: a stop string ends a choice that the engine would go on with.
        self._engine.cancel(of)
        texts = self._texts.get(of.request, {})
        # From here on `_process` ignores tokens of calls that are still in flight.
        texts.pop(of.choice, None)
        if not texts:
            self._texts.pop(of.request, None)
        self._outbox.append(delta)

    def _score_one(self) -> None:
        """Scores at most one prompt, so that running choices wait for no more than that."""
        if not self._to_score:
            return
        assert self._score is not None, "a prompt is to be scored, and the plan has no Program for that"
        submission = self._to_score.pop()
        request = submission.request
        scores = self._score(request.tokens, request.params.logprobs or 0)
        # JSON has no NaN; a model that overflowed has no scores.
        if not all(map(math.isfinite, scores.logprobs)):
            self._outbox.append(PromptScored(request=request.id, error=NOT_FINITE, at=time.monotonic()))
            # `_process` has nothing to do for it, as the request is never offered to the engine.
            self._texts.pop(request.id, None)
            return
        self._outbox.append(PromptScored(request=request.id, scores=scores, at=time.monotonic()))
        if request.params.max_tokens != 0:
            self._backlog.append(replace(submission, score=False))

    def _offer(self) -> None:
        """Offers requests to the engine until its queue has as many choices as there are slots.

        The others stay in the backlog, where cancelling one costs nothing.
        """
        engine = self._engine
        while self._backlog and len(engine.state.queue) < engine.schedule.rows:
            request = self._backlog.pop().request
            engine.offer(request)
            for n in range(request.params.n):
                # The choice was cancelled while its request was in the backlog.
                if n not in self._texts.get(request.id, {}):
                    engine.cancel(ChoiceId(request.id, n))

    def _process(self, event: Event) -> None:
        text = self._texts.get(event.of.request, {}).get(event.of.choice)
        if text is None:
            # The choice has ended by a stop string, or was cancelled, while the engine computed further tokens.
            return
        if isinstance(event, Failed):
            self._end(event.of, TokenDelta(of=event.of, error=event.error, at=time.monotonic()))
        elif isinstance(event, Token):
            piece = text.push(event.id)
            delta = TokenDelta(
                of=event.of,
                text=piece.text,
                token=event,
                reason=piece.reason,
                matched=piece.matched,
                at=time.monotonic(),
            )
            if piece.reason is None:
                self._outbox.append(delta)
            else:
                self._end(event.of, delta)

    def _report(self) -> None:
        """Reports the queue to the inbox, updates the load, and delivers the results of the step."""
        state, schedule = self._engine.state, self._engine.schedule
        rows = [row for row in state.rows if row is not None]
        free, running = sum(pool.available for pool in state.pools), len(rows)
        backlogs = (self._backlog, self._to_score)
        waiting = sum(backlog.tokens for backlog in backlogs) + state.queued_tokens
        self._inbox.report(waiting)
        self.load = replace(
            self.load,
            running=running,
            waiting=len(state.queue) + sum(backlog.choices for backlog in backlogs),
            waiting_tokens=waiting,
            drain_seconds=self._throughput.drained_in(
                rows=schedule.rows,
                # Upper bounds: choices usually end by a stop before their limit, so `Retry-After` is on the long side.
                remaining=sum(row.unplanned for row in (*rows, *state.queue))
                + sum(backlog.new_tokens for backlog in backlogs),
                prompt_tokens=waiting,
            ),
            # With a fixed cache the pools are never used: each running slot owns its share of the pages.
            pages_free=free - running * (schedule.pages // schedule.rows_per_shard) if schedule.fixed else free,
            computed_tokens=self._engine.computed_tokens,
            shared_tokens=self._engine.shared_tokens,
        )
        if self._outbox:
            deliveries, self._outbox = self._outbox, []
            # After the load is updated, so that a client that receives its last token finds it counted in no slot.
            self._deliver(deliveries)

    def _abandon(self) -> None:
        """Ends all open choices with an error."""
        message = "the server has shut down" if self.error is None else f"the engine failed: {_first_line(self.error)}"
        now = time.monotonic()
        # Requests that were never read get an error as well.
        for unread in self._inbox.close_and_flush():
            if isinstance(unread, Submission):
                self._handle(unread)
        self._outbox += [TokenDelta(of=of, error=message, at=now) for of, _ in self._open()]
        self._outbox += [PromptScored(request=request.id, error=message, at=now) for request in self._to_score.clear()]
        self._texts.clear()
        self._backlog.clear()
        # Every open request gets an end, so that no client waits for a thread that is gone.
        self._deliver(self._outbox)
        self._ended()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
