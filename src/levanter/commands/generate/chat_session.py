"""`Dialogue`: one request at a time, its text given as it comes; it can be stopped, and the next one begins at once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import Engine
from levanter.inference.prompts import PromptReader, PromptRequest
from levanter.inference.requests import ChoiceId, Failed, Request, SamplingParams, Token


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """What came of a request.

    Attributes:
        text: of its choice.
        prompt_tokens: tokens of the prompt.
        tokens: of the text, one that ended it included.
        reason: `stop`, `length`, `cancelled`, or `failed`.
        error: what happened where it failed.
        first: seconds until the first token; None where none came.
        seconds: until the last one.
    """

    text: str
    prompt_tokens: int
    tokens: int
    reason: str
    error: str | None = None
    first: float | None
    seconds: float

    @property
    def rate(self) -> float | None:
        """Tokens a second behind the first one; None where there are none."""
        return (
            None if self.first is None or self.tokens < 2 else (self.tokens - 1) / max(self.seconds - self.first, 1e-9)
        )


class Dialogue:
    """A model that is asked one thing after another; an engine has one.

    Args:
        engine: its rows.
        reader: makes requests of what is asked.
        params: how texts are sampled.
    """

    def __init__(self, engine: Engine, reader: PromptReader, params: SamplingParams):
        self._engine, self.reader = engine, reader
        self.params = replace(params, n=1, logprobs=None, echo=False)
        self._count = 0

    def complete(self, text: str, params: SamplingParams | None = None) -> PromptRequest:
        """A request to go on with a text, sampled as all are or otherwise."""
        return self._asked(params, prompt=text)

    def chat(self, messages: Sequence[Mapping[str, object]], params: SamplingParams | None = None) -> PromptRequest:
        """A request for the answer in a conversation, sampled as all are or otherwise."""
        return self._asked(params, messages=tuple(messages))

    def _asked(
        self,
        params: SamplingParams | None,
        *,
        prompt: str | None = None,
        messages: tuple[Mapping[str, object], ...] = (),
    ) -> PromptRequest:
        # Calls for a request that was stopped may still be in flight: no other may have its id.
        self._count += 1
        return PromptRequest(
            line=self._count, id=f"turn {self._count}", prompt=prompt, messages=messages, params=params or self.params
        )

    def say(
        self, asked: PromptRequest, show: Callable[[str], object], stopped: Callable[[], bool] = lambda: False
    ) -> ChatTurn:
        """Answers a request; as much as there is room for in the context.

        Args:
            asked: what is asked.
            show: gets each piece of text as it comes.
            stopped: whether the answer is to end where it is, asked after each token.

        Raises:
            ValueError: it is no request for this model.
        """
        request = self.reader.request(asked, shorten=True)
        limit = request.new_tokens(self._engine.schedule.context)
        text = ChoiceText.for_request(request, self.reader.tokenizer.stream(), limit=limit)
        of, pieces = ChoiceId(request.id, 0), list[str]()
        began = time.perf_counter()
        first, error, reason = None, None, None

        def give(piece: str) -> None:
            if piece:
                pieces.append(piece)
                show(piece)

        for event in self._events(request, of):
            if isinstance(event, Failed):
                error, reason = event.error, "failed"
            elif isinstance(event, Token):
                first = time.perf_counter() - began if first is None else first
                piece = text.push(event.id)
                give(piece.text)
                reason = piece.reason
            if reason is None and stopped():
                piece = text.cancel()
                give(piece.text)
                reason = piece.reason
            if reason is not None:
                break
        self._engine.cancel(of)
        assert reason is not None, f"{of} ended without a reason"
        return ChatTurn(
            text="".join(pieces),
            prompt_tokens=len(request.tokens),
            tokens=text.tokens,
            reason=reason,
            error=error,
            first=first,
            seconds=time.perf_counter() - began,
        )

    def _events(self, request: Request, of: ChoiceId) -> Iterator[Token | Failed]:
        """The events of a request that say something of its text."""
        for event in self._engine.run([request]):
            if event.of == of and isinstance(event, Token | Failed):
                yield event
