"""`Delivery`: what the engine's thread has for who asked.

`Inbox`: what the event loop has for the engine's thread. That thread sleeps in it while there is nothing to do.

`Backlog`: requests that have not come to the engine yet, in their order.

How fast an engine is, and how long what waits will take: what `Retry-After` is made of.

`EngineThread`: the thread that runs the engine; it makes text of tokens, too, and stops a row where its text ends.

Between two steps it reads the inbox, so who is given up has no row from the next step on. While nothing is asked it
sleeps there.
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
        text: what may be shown now; nothing where the text may still change.
        token: the token; None where the choice ended without one.
        reason: why it has ended; None while it goes on.
        matched: the stop string or the id that ended it.
        error: why it cannot go on; None where it can.
        at: when, by `time.monotonic`.
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
        """Whether no more comes of its choice."""
        return self.reason is not None or self.error is not None

    @property
    def size(self) -> int:
        """About how many bytes it takes while it waits for its client."""
        likeliest = 0 if self.token is None else len(self.token.top)
        return 200 + len(self.text) * 4 + 60 * likeliest


@dataclass(frozen=True, kw_only=True)
class PromptScored:
    """A prompt was scored.

    Attributes:
        request: whose it is.
        scores: how likely its tokens were.
        error: why that is not known.
        at: when.
    """

    request: str
    scores: PromptScores | None = None
    error: str | None = None
    at: float

    @property
    def size(self) -> int:
        """About how many bytes it takes while it waits for its client."""
        return 0


Delivery: TypeAlias = TokenDelta | PromptScored


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request to be answered.

    Attributes:
        request: the request.
        score: whether its prompt is scored before it is gone on with; a request for no tokens is only scored.
    """

    request: Request
    score: bool = False

    @property
    def tokens(self) -> int:
        """What of the queue it takes."""
        return len(self.request.tokens) * self.request.params.n


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Nobody wants more of a request.

    Attributes:
        request: its id.
        choice: which choice; None for all.
    """

    request: str
    choice: int | None = None


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Everything that is going on ends where it is, as if it had reached its `max_tokens`."""


EngineMessage: TypeAlias = Submission | Cancel | Drain


class InboxClosedError(Exception):
    """Nobody reads letters any more."""


class Inbox:
    """Letters for the engine's thread, and a bound on what waits.

    Args:
        max_queued_tokens: of prompts that wait; a single request may have more.
    """

    def __init__(self, max_queued_tokens: int):
        self.max_queued_tokens = max_queued_tokens
        self._changed = threading.Condition()
        self._letters: list[EngineMessage] = []
        self._queued = 0
        self._closed = False

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that wait, in here or at the engine."""
        with self._changed:
            return self._queued

    def submit(self, submitted: Sequence[Submission]) -> None:
        """Puts requests in, all of them or none.

        Raises:
            QueueFullError: too much waits already.
            InboxClosedError: nobody reads them any more.
        """
        new = sum(each.tokens for each in submitted)
        with self._changed:
            if self._closed:
                raise InboxClosedError
            if self._queued and self._queued + new > self.max_queued_tokens:
                raise QueueFullError(
                    f"{self._queued} tokens wait, {new} more would be over the {self.max_queued_tokens} of the queue"
                )
            self._queued += new
            self._letters += submitted
            self._changed.notify()

    def post(self, letter: Cancel | Drain) -> None:
        """Puts a letter in that always finds room."""
        with self._changed:
            self._letters.append(letter)
            self._changed.notify()

    def close(self) -> None:
        """Lets the engine's thread go; nothing more comes in."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def leave(self) -> list[EngineMessage]:
        """Closes it; what nobody has read."""
        with self._changed:
            self._closed = True
            left, self._letters = self._letters, []
            return left

    def take(self, *, wait: bool) -> list[EngineMessage] | None:
        """All letters; None when the inbox is closed.

        Args:
            wait: whether to sleep until there are some.
        """
        with self._changed:
            while wait and not self._letters and not self._closed:
                self._changed.wait()
            taken, self._letters = self._letters, []
            return None if self._closed else taken

    def report(self, waiting: int) -> None:
        """What waits at the engine, now that all that was taken is there."""
        with self._changed:
            self._queued = waiting + sum(each.tokens for each in self._letters if isinstance(each, Submission))


class Backlog:
    """Requests in their order, with what they take; each of them is found and counted without looking at the others.

    Args:
        context: positions of a row.
    """

    def __init__(self, context: int):
        self._context = context
        self._there: dict[str, Submission] = {}
        self.tokens = self.choices = self.new_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._there)

    def append(self, submitted: Submission) -> None:
        """Puts a request behind all others."""
        self._there[submitted.request.id] = submitted
        self._count(submitted, 1)

    def pop(self) -> Submission:
        """Takes the first one out."""
        return self._out(next(iter(self._there)))

    def discard(self, id: str) -> None:
        """Takes a request out, if it is there."""
        if id in self._there:
            self._out(id)

    def clear(self) -> list[Request]:
        """Takes all out."""
        return [self.pop().request for _ in range(len(self._there))]

    def _out(self, id: str) -> Submission:
        found = self._there.pop(id)
        self._count(found, -1)
        return found

    def _count(self, submitted: Submission, sign: int) -> None:
        """Adds to what all of them take: tokens of prompts, choices, and tokens that these may get."""
        request = submitted.request
        self.tokens += sign * submitted.tokens
        self.choices += sign * request.params.n
        self.new_tokens += sign * request.params.n * request.new_tokens(self._context)


SMOOTHING = 0.1
"""Of the last call in what a call takes of late."""


@dataclass(frozen=True, kw_only=True)
class ThroughputEstimate:
    """What calls take of late; 0 where there was none yet.

    Attributes:
        token_seconds: in which every row that runs gets its next tokens.
        prompt_seconds: in which one token of a prompt is computed.
    """

    token_seconds: float = 0.0
    prompt_seconds: float = 0.0

    def after(self, seconds: float, *, rows: int, prompt_tokens: int) -> "ThroughputEstimate":
        """The pace after another step.

        Args:
            seconds: that it took.
            rows: that got tokens.
            prompt_tokens: that were computed.
        """
        if rows and not prompt_tokens:
            return replace(self, token_seconds=_smooth(self.token_seconds, seconds))
        if prompt_tokens:
            # What decodes beside a prompt takes what it takes without.
            own = max(0.0, seconds - (self.token_seconds if rows else 0.0))
            return replace(self, prompt_seconds=_smooth(self.prompt_seconds, own / prompt_tokens))
        return self

    def drained_in(self, *, rows: int, left: int, prompt_tokens: int) -> float:
        """Seconds until all that is known is done, if every row runs all the time.

        Args:
            rows: that there are.
            left: tokens that running and waiting choices may still get.
            prompt_tokens: of the prompts that wait.
        """
        return left / rows * self.token_seconds + prompt_tokens * self.prompt_seconds


def _smooth(before: float, now: float) -> float:
    return now if not before else (1 - SMOOTHING) * before + SMOOTHING * now


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        engine: the engine; nobody else touches it while the thread runs.
        inbox: what it is asked.
        stream: makes text of the ids of one choice.
        score: scores prompts; None where nobody may ask for that.
        deliver: gets what comes of it, once a step, in the thread.
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
        """Of each request its choices that go on."""
        self._made: list[Delivery] = []
        self._pace = ThroughputEstimate()
        pages = schedule.pages * schedule.shards
        self.load = EngineLoad(rows=schedule.rows, pages=pages, pages_free=pages)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits until the thread has ended; the inbox has to be closed."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (letters := self._inbox.take(wait=self._idle)) is not None:
                for letter in letters:
                    self._take(letter)
                self._score_one()
                self._offer()
                self._step()
                self._report()
        except BaseException as error:  # noqa: BLE001 - whoever waits for this thread raises it
            self.error = error
        finally:
            self._abandon()

    @property
    def _idle(self) -> bool:
        return self._engine.idle and not (self._backlog or self._to_score)

    def _step(self) -> None:
        """Has the engine do its next calls, and hears what came of those before."""
        began, computed = time.monotonic(), self._engine.computed_tokens
        for event in self._engine.step():
            self._hear(event)
        rows = sum(row is not None and not row.prefilling for row in self._engine.standing.rows)
        new = self._engine.computed_tokens - computed
        self._pace = self._pace.after(time.monotonic() - began, rows=rows, prompt_tokens=new)

    def _take(self, letter: Submission | Cancel | Drain) -> None:
        if isinstance(letter, Submission):
            (self._to_score if letter.score else self._backlog).append(letter)
            request = letter.request
            if request.params.max_tokens != 0:
                self._texts[request.id] = {n: self._text(request) for n in range(request.params.n)}
        elif isinstance(letter, Cancel):
            if letter.choice is None:
                # A single choice is dropped when its request comes to the engine.
                self._backlog.discard(letter.request)
                self._to_score.discard(letter.request)
            for n, text in list(self._texts.get(letter.request, {}).items()):
                if letter.choice in (None, n):
                    of = ChoiceId(letter.request, n)
                    self._end(of, TokenDelta(of=of, reason=text.cancel().reason, at=time.monotonic()))
        else:
            for of, text in self._open():
                piece = text.cancel()
                self._end(of, TokenDelta(of=of, text=piece.text, reason="length", at=time.monotonic()))
            for request in self._to_score.clear():
                said = "the server ended before the prompt was scored"
                self._made.append(PromptScored(request=request.id, error=said, at=time.monotonic()))
            self._backlog.clear()

    def _open(self) -> list[tuple[ChoiceId, ChoiceText]]:
        """All choices that go on."""
        return [(ChoiceId(id, n), text) for id, texts in self._texts.items() for n, text in texts.items()]

    def _text(self, request: Request) -> ChoiceText:
        return ChoiceText.of(request, self._stream(), limit=request.new_tokens(self._engine.schedule.context))

    def _end(self, of: ChoiceId, piece: TokenDelta) -> None:
        self._engine.give_up(of)
        texts = self._texts.get(of.request, {})
        texts.pop(of.choice, None)
        if not texts:
            self._texts.pop(of.request, None)
        self._made.append(piece)

    def _score_one(self) -> None:
        """Scores one prompt: who is being answered waits no longer than for that."""
        if not self._to_score:
            return
        assert self._score is not None, "a prompt is to be scored, and the plan has no Program for that"
        asked = self._to_score.pop()
        request = asked.request
        scores = self._score(request.tokens, request.params.logprobs or 0)
        if not all(map(math.isfinite, scores.logprobs)):
            self._made.append(PromptScored(request=request.id, error=NOT_FINITE, at=time.monotonic()))
            self._texts.pop(request.id, None)
            return
        self._made.append(PromptScored(request=request.id, scores=scores, at=time.monotonic()))
        if request.params.max_tokens != 0:
            self._backlog.append(replace(asked, score=False))

    def _offer(self) -> None:
        """Gives the engine as many requests as it has rows to plan for."""
        engine = self._engine
        while self._backlog and len(engine.standing.queue) < engine.schedule.rows:
            request = self._backlog.pop().request
            engine.offer(request)
            for n in range(request.params.n):
                if n not in self._texts.get(request.id, {}):
                    engine.give_up(ChoiceId(request.id, n))

    def _hear(self, event: Event) -> None:
        text = self._texts.get(event.of.request, {}).get(event.of.choice)
        if text is None:
            return
        if isinstance(event, Failed):
            self._end(event.of, TokenDelta(of=event.of, error=event.error, at=time.monotonic()))
        elif isinstance(event, Token):
            piece = text.push(event.id)
            found = TokenDelta(
                of=event.of,
                text=piece.text,
                token=event,
                reason=piece.reason,
                matched=piece.matched,
                at=time.monotonic(),
            )
            if piece.reason is None:
                self._made.append(found)
            else:
                self._end(event.of, found)

    def _report(self) -> None:
        """Tells the inbox what waits, and hands over what was made."""
        standing, schedule = self._engine.standing, self._engine.schedule
        rows = [row for row in standing.rows if row is not None]
        free, running = sum(pool.available for pool in standing.pools), len(rows)
        unread = (self._backlog, self._to_score)
        waiting = sum(each.tokens for each in unread) + standing.queued_tokens
        self._inbox.report(waiting)
        self.load = replace(
            self.load,
            running=running,
            waiting=len(standing.queue) + sum(each.choices for each in unread),
            waiting_tokens=waiting,
            drain_seconds=self._pace.drained_in(
                rows=schedule.rows,
                left=sum(row.left for row in (*rows, *standing.queue)) + sum(each.new_tokens for each in unread),
                prompt_tokens=waiting,
            ),
            pages_free=free - running * (schedule.pages // schedule.places) if schedule.fixed else free,
            computed_tokens=self._engine.computed_tokens,
            shared_tokens=self._engine.shared_tokens,
        )
        if self._made:
            made, self._made = self._made, []
            self._deliver(made)

    def _abandon(self) -> None:
        """Tells all that are still waiting that nothing more comes."""
        said = "the server has ended" if self.error is None else f"the engine has stopped: {_first_line(self.error)}"
        now = time.monotonic()
        for letter in self._inbox.leave():
            if isinstance(letter, Submission):
                self._take(letter)
        self._made += [TokenDelta(of=of, error=said, at=now) for of, _ in self._open()]
        self._made += [PromptScored(request=request.id, error=said, at=now) for request in self._to_score.clear()]
        self._texts.clear()
        self._backlog.clear()
        self._deliver(self._made)
        self._ended()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
