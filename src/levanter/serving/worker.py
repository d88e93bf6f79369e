"""`EngineWorker`: the thread that runs the engine; it makes text of tokens, too, and stops a row where its text ends.

Between two steps it reads the inbox, so who is given up has no row from the next step on. While nothing is asked it
sleeps there.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from levanter.data.tokenizer import TextStream
from levanter.inference.engine import NOT_FINITE, Engine
from levanter.inference.prompt_scores import ScoresPrompts
from levanter.inference.requests import ChoiceId, Event, Failed, Request, Token
from levanter.inference.text import ChoiceText
from levanter.serving.deliveries import Delivery, Piece, Scored
from levanter.serving.events import EngineLoad
from levanter.serving.inbox import EndAll, GivenUp, Inbox, Submitted


@dataclass(kw_only=True, eq=False)
class _Waiting:
    """What has not come to the engine yet."""

    backlog: "deque[Submitted]" = field(default_factory=deque)
    to_score: "deque[Submitted]" = field(default_factory=deque)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in (*self.backlog, *self.to_score))

    @property
    def choices(self) -> int:
        return sum(each.request.params.n for each in (*self.backlog, *self.to_score))

    def without(self, given_up: GivenUp) -> None:
        """Drops a request of which nobody wants anything; a single choice is dropped when it comes to the engine."""
        if given_up.choice is None:
            for queue in (self.backlog, self.to_score):
                kept = [each for each in queue if each.request.id != given_up.request]
                queue.clear()
                queue.extend(kept)


class EngineWorker:
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
        score: ScoresPrompts | None,
        deliver: Callable[[Sequence[Delivery]], None],
        ended: Callable[[], None] = lambda: None,
    ):
        self._engine, self._inbox, self._score = engine, inbox, score
        self._stream, self._deliver, self._ended = stream, deliver, ended
        self._waiting = _Waiting()
        self._texts: dict[ChoiceId, ChoiceText] = {}
        self._made: list[Delivery] = []
        schedule = engine.schedule
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
                for event in self._engine.step():
                    self._hear(event)
                self._report()
        except BaseException as error:  # noqa: BLE001 - whoever waits for this thread raises it
            self.error = error
        finally:
            self._abandon()

    @property
    def _idle(self) -> bool:
        return self._engine.idle and not (self._waiting.backlog or self._waiting.to_score)

    def _take(self, letter: Submitted | GivenUp | EndAll) -> None:
        if isinstance(letter, Submitted):
            (self._waiting.to_score if letter.score else self._waiting.backlog).append(letter)
            for n in range(letter.request.params.n if letter.request.params.max_tokens != 0 else 0):
                self._texts[ChoiceId(letter.request.id, n)] = self._text(letter.request)
        elif isinstance(letter, GivenUp):
            self._waiting.without(letter)
            for of in [of for of in self._texts if letter.concerns(of)]:
                self._end(of, Piece(of=of, reason=self._texts[of].cancel().reason, at=time.monotonic()))
        else:
            for of in list(self._texts):
                piece = self._texts[of].cancel()
                self._end(of, Piece(of=of, text=piece.text, reason="length", at=time.monotonic()))
            for each in self._waiting.to_score:
                said = "the server ended before the prompt was scored"
                self._made.append(Scored(request=each.request.id, error=said, at=time.monotonic()))
            self._waiting = _Waiting()

    def _text(self, request: Request) -> ChoiceText:
        return ChoiceText.of(request, self._stream(), limit=request.new_tokens(self._engine.schedule.context))

    def _end(self, of: ChoiceId, piece: Piece) -> None:
        self._engine.give_up(of)
        self._texts.pop(of, None)
        self._made.append(piece)

    def _score_one(self) -> None:
        """Scores one prompt: who is being answered waits no longer than for that."""
        if not self._waiting.to_score:
            return
        assert self._score is not None, "a prompt is to be scored, and the plan has no Program for that"
        asked = self._waiting.to_score.popleft()
        request = asked.request
        scores = self._score(request.tokens, request.params.logprobs or 0)
        if not all(map(math.isfinite, scores.logprobs)):
            self._made.append(Scored(request=request.id, error=NOT_FINITE, at=time.monotonic()))
            for n in range(request.params.n):
                self._texts.pop(ChoiceId(request.id, n), None)
            return
        self._made.append(Scored(request=request.id, scores=scores, at=time.monotonic()))
        if request.params.max_tokens != 0:
            self._waiting.backlog.append(replace(asked, score=False))

    def _offer(self) -> None:
        """Gives the engine as many requests as it has rows to plan for."""
        waiting, engine = self._waiting.backlog, self._engine
        while waiting and len(engine.standing.queue) < engine.schedule.rows:
            asked = waiting.popleft()
            engine.offer(asked.request)
            for n in range(asked.request.params.n):
                if (of := ChoiceId(asked.request.id, n)) not in self._texts:
                    engine.give_up(of)

    def _hear(self, event: Event) -> None:
        text = self._texts.get(event.of)
        if text is None:
            return
        if isinstance(event, Failed):
            self._end(event.of, Piece(of=event.of, error=event.error, at=time.monotonic()))
        elif isinstance(event, Token):
            piece = text.push(event.id)
            found = Piece(
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
        running = sum(row is not None for row in standing.rows)
        free = sum(pool.available for pool in standing.pools)
        waiting = self._waiting.tokens + standing.queued_tokens
        self._inbox.report(waiting)
        self.load = replace(
            self.load,
            running=running,
            waiting=len(standing.queue) + self._waiting.choices,
            waiting_tokens=waiting,
            pages_free=free - running * (schedule.pages // schedule.places) if schedule.fixed else free,
            computed_tokens=self._engine.computed_tokens,
            shared_tokens=self._engine.shared_tokens,
        )
        if self._made:
            made, self._made = self._made, []
            self._deliver(made)

    def _abandon(self) -> None:
        """Tells all that are still waiting that nothing more comes."""
        said = "the server has ended" if self.error is None else f"the engine has stopped: {_line(self.error)}"
        now = time.monotonic()
        for letter in self._inbox.leave():
            if isinstance(letter, Submitted):
                self._take(letter)
        self._made += [Piece(of=of, error=said, at=now) for of in self._texts]
        self._made += [Scored(request=each.request.id, error=said, at=now) for each in self._waiting.to_score]
        self._texts.clear()
        self._waiting = _Waiting()
        self._deliver(self._made)
        self._ended()


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
