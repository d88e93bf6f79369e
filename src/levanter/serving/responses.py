"""How tokens are shown in log-probabilities: by their text where they are text, else by their bytes.

Server-sent events: a stream of JSON objects that ends with `[DONE]`.

`ResponseBuilder`: an answer, as one object or as a stream of chunks, of what comes of a ticket.

Completions and conversations differ in what a choice looks like; what there is of it, when, and how many tokens it took
is the same for both.

`Reply`: an answer that is still being made, and that nobody makes any more when its client has left.

What a client has not read after a while, or what has piled up for it, ends its answer too: nobody waits for it.

From a request to its answer: the way that completions and conversations have in common.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from levanter.base.bounded_json import Json
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import Tokenizer
from levanter.inference.programs import PromptScores
from levanter.inference.requests import ChoiceId, SamplingParams
from levanter.serving.engine_thread import PromptScored, Submission, TokenDelta
from levanter.serving.errors import JSON_ENCODER, ApiError, JsonResponse, failed_request
from levanter.serving.request_parsing import read_body
from levanter.serving.request_schema import CONSTRAINT_NAMES
from levanter.serving.service import PendingRequest, Service


class TokenStrings:
    """The tokens of one vocabulary.

    Args:
        tokenizer: has it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._files = tokenizer if isinstance(tokenizer, FastTokenizer) else None
        self.bytes = lru_cache(maxsize=65_536)(self._bytes)

    def _bytes(self, id: int) -> bytes:
        if self._files is None:
            return self._tokenizer.decode([id]).encode()
        return self._files.token_bytes(id)

    def text(self, id: int) -> str:
        """A token in a list of tokens: its text, or `bytes:\\\\xf0\\\\x9f` where it is a part of a character."""
        raw = self.bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def of_prompt(self, ids: Sequence[int]) -> list[str]:
        """The tokens of a prompt."""
        return [self.text(id) for id in ids]


SSE_DONE = b"data: [DONE]\n\n"
"""What ends a stream."""
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Of a stream: nobody on the way keeps it back."""
SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"


def sse_event(value: Mapping[str, Json]) -> bytes:
    """An object as an event."""
    return b"data: " + JSON_ENCODER.encode(value).encode() + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    """A body that was read.

    Attributes:
        id: of the answer.
        submitted: a request to the engine for each prompt.
        params: how all of them are sampled.
        stream: whether the answer is streamed.
        usage: whether a stream says how many tokens there were.
    """

    id: str
    submitted: tuple[Submission, ...]
    params: SamplingParams
    stream: bool
    usage: bool


@dataclass(kw_only=True, eq=False)
class PartialChoice:
    """A choice as it grows.

    Attributes:
        submitted: what was asked.
        index: in the answer.
        scores: of its prompt, where they are asked for.
        pieces: what came of it.
        characters: of its tokens that were shown in log-probabilities.
        held: pieces that cannot be shown yet.
    """

    submitted: Submission
    index: int
    scores: PromptScores | None = None
    pieces: list[TokenDelta] = field(default_factory=list)
    characters: int = 0
    held: list[TokenDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(piece.text for piece in self.pieces)


class ResponseBuilder(ABC):
    """The answer to a call, as it comes.

    Args:
        call: what was asked.
        ticket: what comes of it.
        service: of whom.
        texts: of tokens.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: ParsedCall, ticket: PendingRequest, service: Service, texts: TokenStrings):
        self.call, self.ticket, self.service, self.texts = call, ticket, service, texts
        self._created, self._tokens = int(time.time()), 0
        self.choices: dict[ChoiceId, PartialChoice] = {}
        for each in call.submitted:
            for n in range(call.params.n):
                self.choices[ChoiceId(each.request.id, n)] = PartialChoice(submitted=each, index=len(self.choices))

    @abstractmethod
    def opening(self, choice: PartialChoice) -> Iterator[Mapping[str, Json]]:
        """What a stream says of a choice before its first token, when its prompt was scored."""

    @abstractmethod
    def delta(self, choice: PartialChoice, piece: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """What a stream says of a piece."""

    @abstractmethod
    def complete(self, choice: PartialChoice) -> Mapping[str, Json]:
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
        return (sse_event(usage) if self.call.usage else b"") + SSE_DONE

    def _take(self, delivery: TokenDelta | PromptScored) -> Sequence[PartialChoice]:
        """Notes what came, and says which choices it is about."""
        if delivery.error is not None:
            raise failed_request(delivery.error)
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
        return before + JSON_ENCODER.encode(choice).encode() + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        """What stands before and behind the one choice of a chunk: the same in all of them."""
        usage = {"usage": None} if self.call.usage else {}
        before, mark, after = sse_event({**self._head(self.chunk_object), "choices": [0], **usage}).rpartition(b"[0]")
        assert mark, "a chunk has choices"
        return before + b"[", b"]" + after


def is_visible(piece: TokenDelta) -> bool:
    """Whether a piece has a token that is part of the answer: an id that ends it is not."""
    return piece.token is not None and not (isinstance(piece.matched, int) and piece.matched == piece.token.id)


READ_SECONDS = 30.0
"""How long a client may take to read what it was sent."""


class Reply(Response):
    """An answer that comes of a ticket.

    Args:
        ticket: what it waits for.
        id: of the answer, which is in its head too.
    """

    def __init__(self, ticket: PendingRequest, *, id: str):
        super().__init__()
        self._ticket, self._named = ticket, {"x-request-id": id}

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer, until it is sent, its client leaves, or it reads too slowly."""
        work = asyncio.ensure_future(self._send(scope, receive, send))
        left = asyncio.ensure_future(_wait_for_disconnect(receive))
        cut = asyncio.ensure_future(self._ticket.cut.wait())
        try:
            await asyncio.wait((work, left, cut), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._ticket.close()
            for task in (work, left, cut):
                task.cancel()
            await asyncio.gather(work, left, cut, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonReply(Reply):
    """An answer that is sent when all of it is there.

    Args:
        ticket: what it waits for.
        made: makes it.
        id: of it.
    """

    def __init__(self, ticket: PendingRequest, made: Callable[[], Awaitable[Mapping[str, Json]]], *, id: str):
        super().__init__(ticket, id=id)
        self._made = made

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = JsonResponse(await self._made(), headers=self._named)
        except ApiError as error:
            answer = JsonResponse(error.body, status=error.status, headers={**error.headers, **self._named})
        await answer(scope, receive, send)


class SseReply(Reply):
    """An answer as server-sent events, each as soon as it is there.

    Args:
        ticket: what it waits for.
        events: they, the one that ends a stream included; what goes wrong on the way is an event as well.
        id: of it.
    """

    def __init__(self, ticket: PendingRequest, events: AsyncIterator[bytes], *, id: str):
        super().__init__(ticket, id=id)
        self._events = events

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = {"content-type": SSE_MEDIA_TYPE, **SSE_HEADERS, **self._named}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        write = _TimedSend(send, late=self._ticket.cut.set)
        try:
            await write({"type": "http.response.start", "status": 200, "headers": raw})
            try:
                async for item in self._events:
                    await write(_body_chunk(item))
            except ApiError as error:
                await write(_body_chunk(sse_event(error.body) + SSE_DONE))
            await write({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            write.end()


class _TimedSend:
    """Sends messages, and says when one has not been taken for `READ_SECONDS`.

    One timer looks after all of them: to set one for each message took as long as to send it.

    Args:
        send: ASGI's.
        late: is called when a message is late.
    """

    def __init__(self, send: Send, *, late: Callable[[], None]):
        self._send, self._late = send, late
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(READ_SECONDS, self._look)

    async def __call__(self, message: Message) -> None:
        """Sends a message."""
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def end(self) -> None:
        """Looks no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since >= READ_SECONDS:
            self._late()
        else:
            self._timer = self._loop.call_at(since + READ_SECONDS, self._look)


def _body_chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


C = TypeVar("C", bound=ParsedCall)
SHORT_BODY = 2048
"""Bytes of a body that is read in less time than it takes to hand it to another thread, and to take turns with that at
the interpreter: in these turns every stream waits."""


def is_cheap_to_parse(raw: bytes) -> bool:
    """Whether a body is short, and asks for nothing that takes long to understand whatever its length: a schema, an
    expression, a grammar. A name may be written by its characters' codes, so nothing that has codes is quick."""
    return len(raw) <= SHORT_BODY and b"\\u" not in raw and not any(name in raw for name in _EXPENSIVE_FIELDS)


_EXPENSIVE_FIELDS = tuple(name.encode() for name in CONSTRAINT_NAMES)


async def respond(
    request: Request,
    *,
    path: str,
    read: Callable[[bytes, Service], C],
    build: Callable[[C, PendingRequest, Service, TokenStrings], ResponseBuilder],
    at_once: Callable[[bytes], bool] | None = None,
) -> Response:
    """Reads a request, asks the engine, and answers with what comes of it.

    Args:
        request: the request.
        path: that it came by.
        read: makes a call of its body.
        build: makes the answer to the call.
        at_once: whether a body is read on the event loop, and not beside it; None for none.

    Raises:
        ApiError: it cannot be answered.
    """
    service: Service = request.app.state.service
    raw = await read_body(request)
    if at_once is not None and at_once(raw):
        call = read(raw, service)
    else:
        call = await service.off_loop(lambda: read(raw, service))
    ticket = service.ask(call.submitted, route=path, streamed=call.stream)
    answer = build(call, ticket, service, request.app.state.texts)
    if call.stream:
        return SseReply(ticket, answer.events(), id=call.id)
    return JsonReply(ticket, answer.whole, id=call.id)
