"""`Dialogue`: one request at a time. Its text is streamed and can be stopped; the next request starts at once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import Engine
from levanter.inference.prompts import PromptReader, PromptRequest
from levanter.inference.requests import ChoiceId, Failed, Request, SamplingParams, Token


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """The result of one request.

    Attributes:
        text: of its choice.
        prompt_tokens: tokens of the prompt.
        tokens: of the text, one that ended it included.
        reason: `stop`, `length`, `cancelled`, or `failed`.
        error: the reason if it failed.
        first: seconds until the first token; None if there was none.
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
        """Tokens per second after the first one; None for fewer than two tokens."""
        return (
            # The first token is excluded: it takes the prefill, and perhaps compilation.
            None if self.first is None or self.tokens < 2 else (self.tokens - 1) / max(self.seconds - self.first, 1e-9)
        )


class Dialogue:
    """Sends requests to an engine one after another; an engine has one dialogue.

    Args:
        engine: the engine that generates.
        reader: converts prompts to requests.
        params: how texts are sampled.
    """

    def __init__(self, engine: Engine, reader: PromptReader, params: SamplingParams):
        self._engine, self.reader = engine, reader
        # One visible text for each turn: no parallel choices, no probabilities, no repeated prompt.
        self.params = replace(params, n=1, logprobs=None, echo=False)
        self._count = 0

    def complete(self, text: str, params: SamplingParams | None = None) -> PromptRequest:
        """A request for the continuation of a text, with the dialogue's sampling parameters unless others are given."""
        return self._request(params, prompt=text)

    def chat(self, messages: Sequence[Mapping[str, object]], params: SamplingParams | None = None) -> PromptRequest:
        """A request for the next answer of a conversation; sampling parameters as in `complete`."""
        return self._request(params, messages=tuple(messages))

    def _request(
        self,
        params: SamplingParams | None,
        *,
        prompt: str | None = None,
        messages: tuple[Mapping[str, object], ...] = (),
    ) -> PromptRequest:
        # Ids are never reused: device calls for a request that was stopped may still be in flight.
        self._count += 1
        return PromptRequest(
            line=self._count, id=f"turn {self._count}", prompt=prompt, messages=messages, params=params or self.params
        )

    def say(
        self, prompt: PromptRequest, show: Callable[[str], object], stopped: Callable[[], bool] = lambda: False
    ) -> ChatTurn:
        """Generates the answer to a request, as long as the context has room for.

        Args:
            prompt: the request.
            show: receives each piece of text as it is generated.
            stopped: whether to end the answer now; called after each token.

        Raises:
            ValueError: the request is invalid for this model.
        """
        # `max_tokens` is shortened to what the context has left instead of refusing the request.
        request = self.reader.request(prompt, shorten=True)
        limit = request.new_tokens(self._engine.schedule.context)
        text = ChoiceText.for_request(request, self.reader.tokenizer.stream, limit=limit)
        of, pieces = ChoiceId(request.id, 0), list[str]()
        began = time.perf_counter()
        first, error, reason = None, None, None

        # The detokenizer holds back bytes of incomplete characters, so a piece may be empty.
        def emit(piece: str) -> None:
            if piece:
                pieces.append(piece)
                show(piece)

        for event in self._events(request, of):
            if isinstance(event, Failed):
                error, reason = event.error, "failed"
            elif isinstance(event, Token):
                first = time.perf_counter() - began if first is None else first
                piece = text.push(event.id)
                emit(piece.text)
                reason = piece.reason
            # Checked after the token was shown, so that a stop never loses text that was generated.
            if reason is None and stopped():
                piece = text.cancel()
                emit(piece.text)
                reason = piece.reason
            if reason is not None:
                break
        # The engine would otherwise continue the slot up to its limit; a finished choice is ignored.
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
        """The events of a request that concern its text: tokens and failures."""
        for event in self._engine.run([request]):
            # The engine may still deliver tokens of a cancelled earlier turn.
            if event.of == of and isinstance(event, Token | Failed):
                yield event
