"""`EngineThread`: the thread that runs the engine, and the messages between it and the event loop.

The event loop puts messages into an `Inbox`; the thread returns `TokenDelta` and
`PromptScored` values. The thread also turns tokens into text and ends a choice at a stop string. Between two steps it
reads the inbox, so a cancelled request has no slot from the next step on. While there is nothing to do it sleeps in the
inbox.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from levanter.data.tokenizer import TextStream
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import NOT_FINITE, Engine
from levanter.inference.programs import PromptScores, ScorePromptFn
from levanter.inference.requests import ChoiceId, Event, Failed, FinishReason, Request, Token
from levanter.inference.scheduler import QueueFullError
from levanter.inference.scheduler_state import count_shares
from levanter.serving.metrics import EngineLoad, ThroughputEstimate


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
        is_invalid: whether the error is the request's.
        at: the time, by `time.monotonic`.
    """

    of: ChoiceId
    text: str = ""
    token: Token | None = None
    reason: FinishReason | None = None
    matched: str | int | None = None
    error: str | None = None
    is_invalid: bool = False
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
    """

    request: str


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Ends all choices where they are, as if they had reached their `max_tokens`."""


EngineMessage: TypeAlias = Submission | Cancel | Drain


SHORT_SHARE = 16
"""A request of at most this part of `max_queued_tokens` may wait beyond it."""


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
        self._queued: Counter[tuple[str, ...]] = Counter()
        """Tokens of prompts that wait, by group of clients."""
        self._closed = False

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that wait, in the inbox or at the engine."""
        with self._changed:
            return self._queued.total()

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Puts requests in, all of them or none.

        Raises:
            QueueFullError: the limit on queued tokens is reached.
            InboxClosedError: the thread reads no more messages.
        """
        new = sum(submission.tokens for submission in submissions)
        group = submissions[0].request.client[:1] if submissions else ()
        with self._changed:
            if self._closed:
                raise InboxClosedError
            if not self._accepts(new, group):
                raise QueueFullError(
                    f"{self._queued.total()} prompt tokens are queued; {new} more would exceed the limit of "
                    f"{self.max_queued_tokens}"
                )
            # Added before the engine has read the messages, so that many requests at once cannot pass the limit
            # together.
            self._queued[group] += new
            self._messages += submissions
            self._changed.notify()

    def _accepts(self, new: int, group: tuple[str, ...]) -> bool:
        """Whether so many more tokens of a group of clients may wait."""
        total, most = self._queued.total(), self.max_queued_tokens
        # An empty queue takes any request, or one that is longer than the limit could never be served.
        if not total or total + new <= most:
            return True
        # A full queue does not shut out those who did not fill it: an address has its share of the limit in any case,
        # and a short request waits beyond the limit, as long as they are few.
        others = sum(count > 0 for name, count in self._queued.items() if name != group)
        within_share = others > 0 and self._queued[group] + new <= most // (others + 1)
        return within_share or (new <= most // SHORT_SHARE and total + new <= 2 * most)

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

    def report(self, waiting: "Counter[tuple[str, ...]]") -> None:
        """Sets the tokens that wait at the engine, by group, which has received all messages that were taken."""
        with self._changed:
            self._queued = Counter(waiting)
            for message in self._messages:
                # Messages that arrived since `take` are not known to the engine yet.
                if isinstance(message, Submission):
                    self._queued[message.request.client[:1]] += message.tokens


class Backlog:
    """Requests that wait for the engine: those of a client in order, the clients in turn.

    Groups of clients (see `Request.client`) take turns, and so do those inside a group. A request is removed by its id,
    and the totals are kept up to date, both in constant time.

    Args:
        context: positions of a sequence.
    """

    def __init__(self, context: int):
        self._context = context
        # Group → client → request id → request. The next in turn stands first.
        self._groups: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, Submission]]] = {}
        self._client_of: dict[str, tuple[str, ...]] = {}
        self._taken: dict[str, int] = {}
        """Request id → its choices that were taken already."""
        self.tokens = self.choices = self.new_tokens = 0
        self.tokens_of: Counter[tuple[str, ...]] = Counter()
        """Prompt tokens of each group."""

    def __bool__(self) -> bool:
        return bool(self._client_of)

    def append(self, submission: Submission) -> None:
        """Adds a request at the end of its client's."""
        request = submission.request
        clients = self._groups.setdefault(request.client[:1], {})
        clients.setdefault(request.client, {})[request.id] = submission
        self._client_of[request.id] = request.client
        self._count(request, request.params.n)

    def first(self, shares: "Counter[tuple[str, ...]] | None" = None) -> Submission:
        """The request that is next.

        Args:
            shares: how much of the engine each client and group has; those with the least are first.
        """
        counts = shares or Counter()
        # `min` takes the first of equals, so clients with the same share take turns.
        group = min(self._groups, key=counts.__getitem__)
        client = min(self._groups[group], key=counts.__getitem__)
        return next(iter(self._groups[group][client].values()))

    def pop(self, shares: "Counter[tuple[str, ...]] | None" = None) -> Submission:
        """Removes and returns the request that is next; see `first`."""
        submission = self._remove(self.first(shares).request.id)
        self._rotate(submission.request.client)
        return submission

    def _rotate(self, client: tuple[str, ...]) -> None:
        """Puts a client and its group last."""
        if (clients := self._groups.pop(client[:1], None)) is not None:
            self._groups[client[:1]] = clients
            if (requests := clients.pop(client, None)) is not None:
                clients[client] = requests

    def take(self, most: int, shares: "Counter[tuple[str, ...]] | None" = None) -> tuple[Request, range]:
        """Takes choices of the request that is next; it stays, as the last in turn, if it has more.

        Args:
            most: number of choices, at most.
            shares: see `first`.

        Returns:
            The request, and the numbers of the choices.
        """
        request = self.first(shares).request
        begin = self._taken.get(request.id, 0)
        taken = range(begin, min(request.params.n, begin + most))
        if taken.stop == request.params.n:
            self.pop(shares)
        else:
            self._taken[request.id] = taken.stop
            self._count(request, -len(taken))
            self._rotate(request.client)
        return request, taken

    def waiting_choices(self, request: Request) -> range:
        """The choices of a request that wait here."""
        return range(self._taken.get(request.id, 0), request.params.n)

    def discard(self, id: str) -> None:
        """Removes a request if it is in the backlog."""
        if id in self._client_of:
            self._remove(id)

    def requests(self) -> list[Request]:
        """All requests."""
        groups = (requests for clients in self._groups.values() for requests in clients.values())
        return [submission.request for requests in groups for submission in requests.values()]

    def clear(self) -> list[Request]:
        """Removes and returns all requests."""
        return [self.pop().request for _ in range(len(self._client_of))]

    def _remove(self, id: str) -> Submission:
        client = self._client_of.pop(id)
        clients = self._groups[client[:1]]
        submission = clients[client].pop(id)
        # Empty groups would be looked through for ever.
        if not clients[client]:
            del clients[client]
        if not clients:
            del self._groups[client[:1]]
        self._count(submission.request, -len(self.waiting_choices(submission.request)))
        self._taken.pop(id, None)
        return submission

    def _count(self, request: Request, choices: int) -> None:
        """Adds choices of a request to the totals: prompt tokens, choices, and tokens that the choices may get."""
        group, tokens = request.client[:1], choices * len(request.tokens)
        self.tokens += tokens
        self.tokens_of[group] += tokens
        if not self.tokens_of[group]:
            del self.tokens_of[group]
        self.choices += choices
        self.new_tokens += choices * request.new_tokens(self._context)


class EngineThread:
    """Runs an engine in its own thread.

    Args:
        engine: the engine; nothing else uses it while the thread runs.
        inbox: messages for the thread.
        stream: makes a detokenizer for one choice, from the ids that it continues.
        score: scores prompts; None if no request may have its prompt scored.
        deliver: receives the results of a step, in the thread.
        ended: is called in the thread when it ends.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        *,
        stream: Callable[[Sequence[int]], TextStream],
        score: ScorePromptFn | None,
        deliver: Callable[[Sequence[Delivery]], None],
        ended: Callable[[], None] = lambda: None,
    ):
        self._engine, self._inbox, self._score = engine, inbox, score
        self._stream, self._deliver, self._ended = stream, deliver, ended
        schedule = engine.schedule
        self._backlog, self._to_score = Backlog(schedule.context), Backlog(schedule.context)
        self._texts: dict[str, dict[int, ChoiceText]] = {}
        """Id of a request that was offered to the engine → its choices that go on, by number."""
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
        elif isinstance(message, Cancel):
            self._to_score.discard(message.request)
            self._backlog.discard(message.request)
            # Nobody reads the end of its choices: the service has forgotten them.
            if self._texts.pop(message.request, None) is not None:
                self._engine.cancel_request(message.request)
        else:
            assert isinstance(message, Drain)
            for of, text in self._open():
                piece = text.cancel()
                self._end(of, TokenDelta(of=of, text=piece.text, reason="length", at=time.monotonic()))
            # Choices that wait end with what they have, which is nothing; scores of their prompts will not come.
            for of in self._clear_choices():
                self._outbox.append(TokenDelta(of=of, reason="length", at=time.monotonic()))
            for request in self._to_score.clear():
                error = "the server shut down before the prompt was scored"
                self._outbox.append(PromptScored(request=request.id, error=error, at=time.monotonic()))

    def _open(self) -> list[tuple[ChoiceId, ChoiceText]]:
        """All choices that the engine knows and that go on."""
        return [(ChoiceId(id, n), text) for id, texts in self._texts.items() for n, text in texts.items()]

    def _text(self, request: Request) -> ChoiceText:
        return ChoiceText.for_request(request, self._stream, limit=request.new_tokens(self._engine.schedule.context))

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
            return
        self._outbox.append(PromptScored(request=request.id, scores=scores, at=time.monotonic()))
        if request.params.max_tokens != 0:
            self._backlog.append(replace(submission, score=False))

    def _offer(self) -> None:
        """Offers requests to the engine until its queue has as many choices as there are slots, or a few times that.

        The others stay in the backlog, where cancelling one costs nothing.
        """
        engine = self._engine
        if not self._backlog:
            return
        rows, shares = engine.schedule.rows, engine.state.shares(waiting=True)
        while self._backlog:
            request = self._backlog.first(shares).request
            # Clients without a choice at the engine find room beyond that of the others: the schedule gives them a row
            # before those who have one, but only where they are in its queue.
            most_waiting = rows * (1 if shares[request.client] else 2 if shares[request.client[:1]] else 3)
            if len(engine.state.queue) >= most_waiting:
                return
            # A part of the choices at a time, or those of one request would fill the queue.
            request, choices = self._backlog.take(rows, shares)
            engine.offer(request, choices)
            texts = self._texts.setdefault(request.id, {})
            texts.update((n, self._text(request)) for n in choices)
            shares += count_shares([request.client] * len(choices))

    def _clear_choices(self) -> list[ChoiceId]:
        """The choices that the engine does not know yet; empties the backlog, and leaves prompts to be scored."""
        waiting = [(request, self._backlog.waiting_choices(request)) for request in self._backlog.requests()]
        waiting += [(request, self._to_score.waiting_choices(request)) for request in self._to_score.requests()]
        self._backlog.clear()
        # A request for no tokens has no choices; only its prompt is scored.
        return [ChoiceId(r.id, n) for r, choices in waiting if r.params.max_tokens != 0 for n in choices]

    def _process(self, event: Event) -> None:
        text = self._texts.get(event.of.request, {}).get(event.of.choice)
        if text is None:
            # The choice has ended by a stop string, or was cancelled, while the engine computed further tokens.
            return
        if isinstance(event, Failed):
            failed = TokenDelta(of=event.of, error=event.error, is_invalid=event.is_invalid, at=time.monotonic())
            self._end(event.of, failed)
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
        waiting_of = self._backlog.tokens_of + self._to_score.tokens_of
        for row in state.queue:
            if not row.preempted:
                waiting_of[row.request.client[:1]] += len(row.request.tokens)
        waiting = waiting_of.total()
        self._inbox.report(waiting_of)
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
        choices = (*(of for of, _ in self._open()), *self._clear_choices())
        self._outbox += [TokenDelta(of=of, error=message, at=now) for of in choices]
        self._outbox += [PromptScored(request=request.id, error=message, at=now) for request in self._to_score.clear()]
        self._texts.clear()
        # Every open request gets an end, so that no client waits for a thread that is gone.
        self._deliver(self._outbox)
        self._ended()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
