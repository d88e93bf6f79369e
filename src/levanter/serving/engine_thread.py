"""`EngineWorker`: the thread that runs the engine; it makes text of tokens, too, and stops a row where its text ends.

Between two steps it reads the inbox, so who is given up has no row from the next step on. While nothing is asked it
sleeps there.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from levanter.data.tokenizer import TextStream
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import NOT_FINITE, Engine
from levanter.inference.prompt_logprobs import ScoresPrompts
from levanter.inference.requests import ChoiceId, Event, Failed, Request, Token
from levanter.serving.backlog import Backlog
from levanter.serving.engine_messages import Delivery, PromptScored, TokenDelta
from levanter.serving.events import EngineLoad
from levanter.serving.inbox import Cancel, Drain, Inbox, Submitted
from levanter.serving.throughput import EnginePace


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
        schedule = engine.schedule
        self._backlog, self._to_score = Backlog(schedule.context), Backlog(schedule.context)
        self._texts: dict[str, dict[int, ChoiceText]] = {}
        """Of each request its choices that go on."""
        self._made: list[Delivery] = []
        self._pace = EnginePace()
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

    def _take(self, letter: Submitted | Cancel | Drain) -> None:
        if isinstance(letter, Submitted):
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
        said = "the server has ended" if self.error is None else f"the engine has stopped: {_line(self.error)}"
        now = time.monotonic()
        for letter in self._inbox.leave():
            if isinstance(letter, Submitted):
                self._take(letter)
        self._made += [TokenDelta(of=of, error=said, at=now) for of, _ in self._open()]
        self._made += [PromptScored(request=request.id, error=said, at=now) for request in self._to_score.clear()]
        self._texts.clear()
        self._backlog.clear()
        self._deliver(self._made)
        self._ended()


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
