"""`Builder`: an answer, as one object or as a stream of chunks, of what comes of a ticket.

Completions and conversations differ in what a choice looks like; what there is of it, when, and how many tokens it took
is the same for both.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from levanter.base.json_types import Json
from levanter.inference.params import SamplingParams
from levanter.inference.prompt_logprobs import PromptScores
from levanter.inference.requests import ChoiceId
from levanter.serving.engine_messages import PromptScored, TokenDelta
from levanter.serving.errors import failed, json_bytes
from levanter.serving.inbox import Submitted
from levanter.serving.service import PendingRequest, Service
from levanter.serving.sse import DONE, event
from levanter.serving.token_strings import TokenTexts


@dataclass(frozen=True, kw_only=True)
class AskedCall:
    """A body that was read.

    Attributes:
        id: of the answer.
        submitted: a request to the engine for each prompt.
        params: how all of them are sampled.
        stream: whether the answer is streamed.
        usage: whether a stream says how many tokens there were.
    """

    id: str
    submitted: tuple[Submitted, ...]
    params: SamplingParams
    stream: bool
    usage: bool


@dataclass(kw_only=True, eq=False)
class ChoiceSoFar:
    """A choice as it grows.

    Attributes:
        submitted: what was asked.
        index: in the answer.
        scores: of its prompt, where they are asked for.
        pieces: what came of it.
        characters: of its tokens that were shown in log-probabilities.
        held: pieces that cannot be shown yet.
    """

    submitted: Submitted
    index: int
    scores: PromptScores | None = None
    pieces: list[TokenDelta] = field(default_factory=list)
    characters: int = 0
    held: list[TokenDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(piece.text for piece in self.pieces)


class Builder(ABC):
    """The answer to a call, as it comes.

    Args:
        call: what was asked.
        ticket: what comes of it.
        service: of whom.
        texts: of tokens.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: AskedCall, ticket: PendingRequest, service: Service, texts: TokenTexts):
        self.call, self.ticket, self.service, self.texts = call, ticket, service, texts
        self._created, self._tokens = int(time.time()), 0
        self.choices: dict[ChoiceId, ChoiceSoFar] = {}
        for each in call.submitted:
            for n in range(call.params.n):
                self.choices[ChoiceId(each.request.id, n)] = ChoiceSoFar(submitted=each, index=len(self.choices))

    @abstractmethod
    def opening(self, choice: ChoiceSoFar) -> Iterator[Mapping[str, Json]]:
        """What a stream says of a choice before its first token, when its prompt was scored."""

    @abstractmethod
    def delta(self, choice: ChoiceSoFar, piece: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """What a stream says of a piece."""

    @abstractmethod
    def complete(self, choice: ChoiceSoFar) -> Mapping[str, Json]:
        """A choice in an answer that is one object."""

    async def whole(self) -> Mapping[str, Json]:
        """All of it as one object.

        Raises:
            ApiError: a choice could not be finished.
        """
        async for deliveries in self.ticket.deliveries():
            for each in deliveries:
                self._take(each)
        choices: list[Json] = [dict(self.complete(choice)) for choice in self.choices.values()]
        return {**self._head(self.whole_object), "choices": choices, "usage": self._usage}

    async def events(self) -> AsyncIterator[bytes]:
        """All of it as events, the one that ends a stream included; what comes together is one write to a client.

        Raises:
            ApiError: a choice could not be finished.
        """
        closed = False
        for choice in self.choices.values():
            if not choice.submitted.score:
                for said in self.opening(choice):
                    yield self._chunk(said)
        async for deliveries in self.ticket.deliveries():
            # What came together goes out together.
            chunks: list[bytes] = []
            for each in deliveries:
                if each.error is not None and chunks:
                    yield b"".join(chunks)
                for choice in self._take(each):
                    for said in self.opening(choice) if isinstance(each, PromptScored) else self.delta(choice, each):
                        chunks.append(self._chunk(said))
            if closed := self.ticket.over:
                chunks.append(self._closing)
            if chunks:
                yield b"".join(chunks)
        if not closed:
            yield self._closing

    @property
    def _closing(self) -> bytes:
        """What comes behind all choices."""
        usage = {**self._head(self.chunk_object), "choices": [], "usage": self._usage}
        return (event(usage) if self.call.usage else b"") + DONE

    def _take(self, delivery: TokenDelta | PromptScored) -> Sequence[ChoiceSoFar]:
        """Notes what came, and says which choices it is about."""
        if delivery.error is not None:
            raise failed(delivery.error)
        if isinstance(delivery, TokenDelta):
            choice = self.choices[delivery.of]
            choice.pieces.append(delivery)
            self._tokens += delivery.token is not None
            return [choice]
        scored = [each for each in self.choices.values() if each.submitted.request.id == delivery.request]
        for each in scored:
            each.scores = delivery.scores
        return scored

    def _head(self, kind: str) -> dict[str, Json]:
        return {
            "id": self.call.id,
            "object": kind,
            "created": self._created,
            "model": self.service.names[0],
            "seed": self.call.submitted[0].request.seed,
        }

    @property
    def _usage(self) -> Json:
        prompt = sum(len(each.request.tokens) for each in self.call.submitted)
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}

    def _chunk(self, choice: Mapping[str, Json]) -> bytes:
        before, after = self._around
        return before + json_bytes(choice) + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        """What stands before and behind the one choice of a chunk: the same in all of them."""
        usage = {"usage": None} if self.call.usage else {}
        before, mark, after = event({**self._head(self.chunk_object), "choices": [0], **usage}).rpartition(b"[0]")
        assert mark, "a chunk has choices"
        return before + b"[", b"]" + after


def is_shown(piece: TokenDelta) -> bool:
    """Whether a piece has a token that is part of the answer: an id that ends it is not."""
    return piece.token is not None and not (isinstance(piece.matched, int) and piece.matched == piece.token.id)
