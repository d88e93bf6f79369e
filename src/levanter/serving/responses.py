"""Responses to completion and chat requests: from a parsed request to JSON or server-sent events.

`respond` handles a request: it parses the body, submits it to the `Service`, and answers with a `Reply`. A
`ResponseBuilder` turns the results into one object (`JsonReply`) or into a stream of chunks (`SseReply`). A reply ends,
and its request is cancelled, if the client disconnects, reads nothing for a while, or lets too much pile up.
"""

import asyncio
import contextlib
import ctypes
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
from levanter.data.tokenizer import TextStream
from levanter.inference.programs import PromptScores
from levanter.inference.requests import ChoiceId, SamplingParams
from levanter.serving.engine_thread import Delivery, PromptScored, Submission, TokenDelta
from levanter.serving.errors import JSON_ENCODER, ApiError, JsonResponse, failed_request, invalid_request
from levanter.serving.limits import RELEASE_BODY
from levanter.serving.request_parsing import read_body
from levanter.serving.request_schema import CONSTRAINT_NAMES
from levanter.serving.service import ClientWork, PendingRequest, Service


class TokenStrings:
    """The tokens of a vocabulary as strings, for log-probabilities: as text, or as bytes where they are no text.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._files = tokenizer if isinstance(tokenizer, FastTokenizer) else None
        # Log-probabilities name up to 20 tokens at each position: looking up a string must not cost a call of the
        # tokenizer.
        self.bytes = lru_cache(maxsize=65_536)(self._bytes)

    def _bytes(self, id: int) -> bytes:
        if self._files is None:
            return self._tokenizer.decode([id]).encode()
        return self._files.token_bytes(id)

    def text(self, id: int) -> str:
        """The text of a token, or `bytes:\\\\xf0\\\\x9f` if it is a part of a character."""
        raw = self.bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


SSE_DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers that keep proxies from buffering a stream."""
SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"


def sse_event(value: Mapping[str, Json]) -> bytes:
    """An object as a server-sent event."""
    return b"data: " + JSON_ENCODER.encode(value).encode() + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    """A parsed request body.

    Attributes:
        id: id of the response.
        submitted: an engine request for each prompt.
        params: sampling parameters of all of them.
        stream: whether the response is streamed.
        usage: whether a stream reports the number of tokens.
    """

    id: str
    submitted: tuple[Submission, ...]
    params: SamplingParams
    stream: bool
    usage: bool


@dataclass(kw_only=True, eq=False)
class PartialChoice:
    """A choice while its tokens arrive.

    Attributes:
        submitted: its engine request.
        index: its index in the response.
        scores: log-probabilities of its prompt, if requested.
        deltas: its tokens so far.
        characters: length of the text of the tokens whose log-probabilities were returned.
        stream: decodes these tokens; None before the first one.
        withheld: length of those of them whose text the stream has not given yet.
        pending: deltas that cannot be sent yet.
    """

    submitted: Submission
    index: int
    scores: PromptScores | None = None
    deltas: list[TokenDelta] = field(default_factory=list)
    characters: int = 0
    stream: TextStream | None = None
    withheld: int = 0
    pending: list[TokenDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(delta.text for delta in self.deltas)


OPENINGS = 32
"""Choices whose first chunks are one write."""
SHORT_RESPONSE = 256
"""Tokens of a response, or of a prompt with log-probabilities, that are written on the event loop."""
LONG_CHOICE = 4096
"""Tokens of a choice whose log-probabilities take more than a few milliseconds to encode."""


class ResponseBuilder(ABC):
    """Builds the response to a call from its results.

    Completions and chat completions differ in the form of a choice, which subclasses define; ids, order, usage and the
    end of a stream are the same.

    Args:
        call: the parsed request.
        request: the results of it.
        service: the service.
        texts: tokens as strings.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: ParsedCall, request: PendingRequest, service: Service, texts: TokenStrings):
        self.call, self.request, self.service, self.texts = call, request, service, texts
        self._created, self._tokens = int(time.time()), 0
        self.choices: dict[ChoiceId, PartialChoice] = {}
        for submission in call.submitted:
            for n in range(call.params.n):
                # OpenAI's order: all choices of the first prompt, then those of the second.
                choice = PartialChoice(submitted=submission, index=len(self.choices))
                self.choices[ChoiceId(submission.request.id, n)] = choice

    @abstractmethod
    def opening(self, choice: PartialChoice) -> Iterator[Mapping[str, Json]]:
        """Chunks of a choice before its first token, after its prompt was scored."""

    @abstractmethod
    def delta(self, choice: PartialChoice, delta: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """Chunks of a choice for one more token."""

    @abstractmethod
    def complete(self, choice: PartialChoice) -> Mapping[str, Json]:
        """A finished choice of a response that is one object."""

    async def whole(self) -> bytes:
        """The response as one object, encoded.

        Raises:
            ApiError: a choice failed.
        """
        # `_add` raises at the first error: a response that is one object has no place for a partial result.
        async for deliveries in self.request.deliveries():
            for delivery in deliveries:
                self._add(delivery)
        # Prompts too, whose log-probabilities may be part of each choice.
        values = self._tokens + sum(len(one.submitted.request.tokens) for one in self.choices.values())
        if values <= SHORT_RESPONSE:
            return self._encoded()
        return await self.service.off_loop(ClientWork(call=self._encoded, client=self.request.client))

    def _encoded(self) -> bytes:
        """The response as one object; a choice at a time, because the encoder lets no other thread run meanwhile."""
        head, tail = self._head(self.whole_object), {"usage": self._usage}
        choices = ",".join(_encode(self.complete(choice), choice) for choice in self.choices.values())
        return f'{JSON_ENCODER.encode(head)[:-1]},"choices":[{choices}],{JSON_ENCODER.encode(tail)[1:]}'.encode()

    async def events(self) -> AsyncIterator[bytes]:
        """The response as events, `[DONE]` included; those of deliveries that arrive together are one write.

        Raises:
            ApiError: a choice failed.
        """
        closed = False
        # A choice whose prompt is scored is opened when the scores arrive, because its opening contains them.
        opened = [choice for choice in self.choices.values() if not choice.submitted.score]
        for start in range(0, len(opened), OPENINGS):
            some = opened[start : start + OPENINGS]
            if chunks := [self._chunk(body) for choice in some for body in self.opening(choice)]:
                yield b"".join(chunks)
            # Others have their turn.
            await asyncio.sleep(0)
        async for deliveries in self.request.deliveries():
            chunks: list[bytes] = []
            for delivery in deliveries:
                if delivery.error is not None and chunks:
                    # `_add` raises: what precedes the error is sent before.
                    yield b"".join(chunks)
                for choice in self._add(delivery):
                    if isinstance(delivery, PromptScored):
                        chunks += await self._scored_opening(choice)
                    else:
                        chunks += [self._chunk(body) for body in self.delta(choice, delivery)]
            # The end goes out with the last tokens, in one write.
            if closed := self.request.over:
                chunks.append(self._closing)
            if chunks:
                yield b"".join(chunks)
        # A request for no tokens has no deliveries at all.
        if not closed:
            yield self._closing

    async def _scored_opening(self, choice: PartialChoice) -> list[bytes]:
        """The chunks of a choice before its first token, with the log-probabilities of its prompt."""

        def chunks() -> list[bytes]:
            before, after = self._around
            return [before + _encode(body, choice).encode() + after for body in self.opening(choice)]

        if len(choice.submitted.request.tokens) <= SHORT_RESPONSE:
            return chunks()
        return await self.service.off_loop(ClientWork(call=chunks, client=self.request.client))

    @property
    def _closing(self) -> bytes:
        """The events after all choices."""
        usage = {**self._head(self.chunk_object), "choices": [], "usage": self._usage}
        return (sse_event(usage) if self.call.usage else b"") + SSE_DONE

    def _add(self, delivery: Delivery) -> Sequence[PartialChoice]:
        """Adds a result to its choices, and returns these."""
        if delivery.error is not None:
            # An event in a stream, as its status is sent.
            if isinstance(delivery, TokenDelta) and delivery.is_invalid:
                raise invalid_request(delivery.error, code="constraint_failed", reason=None)
            raise failed_request(delivery.error)
        if isinstance(delivery, TokenDelta):
            choice = self.choices[delivery.of]
            choice.deltas.append(delivery)
            # A choice may end without a token: cancelled, or by an error.
            self._tokens += delivery.token is not None
            return [choice]
        # All choices of a prompt share its scores.
        scored = [choice for choice in self.choices.values() if choice.submitted.request.id == delivery.request]
        for choice in scored:
            choice.scores = delivery.scores
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
        prompt = sum(len(submission.request.tokens) for submission in self.call.submitted)
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}

    def _chunk(self, choice: Mapping[str, Json]) -> bytes:
        before, after = self._around
        return before + JSON_ENCODER.encode(choice).encode() + after

    @cached_property
    def _around(self) -> tuple[bytes, bytes]:
        """The bytes of a chunk before and after its one choice, which are the same in all chunks.

        They come from encoding a chunk whose only choice is 0, so that a chunk encodes no more than its choice.
        """
        # OpenAI's chunks have a null `usage` if the last one reports it.
        usage = {"usage": None} if self.call.usage else {}
        # From the right, because a model's name, which is in the head, may contain the same characters.
        before, mark, after = sse_event({**self._head(self.chunk_object), "choices": [0], **usage}).rpartition(b"[0]")
        assert mark, "a chunk has choices"
        return before + b"[", b"]" + after


def _encode(value: Mapping[str, Json], choice: PartialChoice) -> str:
    """A choice as JSON."""
    if len(choice.deltas) + len(choice.submitted.request.tokens) <= LONG_CHOICE:
        return JSON_ENCODER.encode(value)
    # In Python, ten times as slow: a thread that encodes in C does not let others run before it is done.
    return "".join(JSON_ENCODER.iterencode(value))


def is_visible(delta: TokenDelta) -> bool:
    """Whether a delta has a token that is part of the response: an id that ends the text is not."""
    return delta.token is not None and not (isinstance(delta.matched, int) and delta.matched == delta.token.id)


READ_SECONDS = 30.0
"""Seconds that a client may take to read a message."""


class Reply(Response):
    """A response that is computed while it is sent.

    Args:
        pending: the request.
        id: id of the response, also in the header `x-request-id`.
    """

    def __init__(self, pending: PendingRequest, *, id: str):
        super().__init__()
        self._pending, self._id_header = pending, {"x-request-id": id}

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, until it is complete, its client disconnects, or it is cut off."""
        # Three tasks race: the response, the client's leaving, and the limit on what waits for a slow client.
        work = asyncio.ensure_future(self._send(scope, receive, send))
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        cut = asyncio.ensure_future(self._pending.cut.wait())
        try:
            # The first to finish decides; the others are cancelled below.
            await asyncio.wait((work, disconnected, cut), return_when=asyncio.FIRST_COMPLETED)
            # Raises what the work raised.
            if work.done():
                work.result()
        finally:
            # Cancels the choices that still run; after a complete response there are none.
            self._pending.close()
            for task in (work, disconnected, cut):
                task.cancel()
            # Waits until they have ended: a task that still writes would write into the next response of the
            # connection.
            await asyncio.gather(work, disconnected, cut, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonReply(Reply):
    """A response that is sent when it is complete.

    Args:
        pending: the request.
        body: computes the body.
        id: id of the response.
    """

    def __init__(self, pending: PendingRequest, body: Callable[[], Awaitable[bytes]], *, id: str):
        super().__init__(pending, id=id)
        self._body = body

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = Response(await self._body(), headers=self._id_header, media_type=JsonResponse.media_type)
        except ApiError as error:
            # The error of an admitted request has the id too, as its response would.
            answer = JsonResponse(error.body, status=error.status, headers={**error.headers, **self._id_header})
        await answer(scope, receive, send)


class SseReply(Reply):
    """A stream of server-sent events.

    Args:
        pending: the request.
        events: the events, `[DONE]` included; an `ApiError` becomes an event as well.
        id: id of the response.
    """

    def __init__(self, pending: PendingRequest, events: AsyncIterator[bytes], *, id: str):
        super().__init__(pending, id=id)
        self._events = events

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        # A stream begins with status 200, so later errors are events.
        headers = {"content-type": SSE_MEDIA_TYPE, **SSE_HEADERS, **self._id_header}
        # ASGI headers are bytes.
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        write = _TimedSend(send, late=self._pending.cut.set)
        try:
            await write({"type": "http.response.start", "status": 200, "headers": raw})
            try:
                async for event in self._events:
                    await write(_body_chunk(event))
            except ApiError as error:
                # `[DONE]` after an error as well: some clients wait for it.
                await write(_body_chunk(sse_event(error.body) + SSE_DONE))
            await write({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            write.end()


class _TimedSend:
    """An ASGI `send` that calls `late` if a message is not sent within `READ_SECONDS`.

    One timer watches all messages: a timer for each message took as long as sending it.

    Args:
        send: ASGI's.
        late: is called when a message is late.
    """

    def __init__(self, send: Send, *, late: Callable[[], None]):
        self._send, self._late = send, late
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        """When the message that is being sent was begun; None between two messages."""
        self._timer = self._loop.call_later(READ_SECONDS, self._check)

    async def __call__(self, message: Message) -> None:
        """Sends a message."""
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def end(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        # Between two messages nothing can be late, and the timer starts over.
        since = now if self._since is None else self._since
        if now - since >= READ_SECONDS:
            self._late()
        else:
            # The earliest time at which the present message can be late.
            self._timer = self._loop.call_at(since + READ_SECONDS, self._check)


def _body_chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


C = TypeVar("C", bound=ParsedCall)
R = TypeVar("R")
SHORT_BODY = 2048
"""Size of a body that is parsed on the event loop: passing it to another thread would take longer, because that thread
competes for the interpreter, and all streams wait meanwhile."""


def is_cheap_to_parse(raw: bytes) -> bool:
    """Whether a body is short and has no field that may be expensive to parse: a schema, an expression, a grammar.

    A field name may be written with escapes, so a body with escapes is not cheap.
    """
    # A search in bytes, which may find a name in a prompt: then the body is parsed in a thread, which is only slower.
    # Lists of prompts are short, and each prompt is a request of its own.
    is_small = len(raw) <= SHORT_BODY and raw.count(b"[") <= CHEAP_LISTS
    return is_small and b"\\u" not in raw and not any(name in raw for name in _EXPENSIVE_FIELDS)


CHEAP_LISTS = 16
"""Lists in a body that is parsed on the event loop."""


_EXPENSIVE_FIELDS = (*(name.encode() for name in CONSTRAINT_NAMES), b"tool_choice")


SHORT_WORK_BYTES = 1 << 16
"""Size of a body that is read in some ten milliseconds, if it has no constraint."""


def client_address(request: Request) -> str:
    """The address that a request is from; "" if it has none, as on a Unix socket."""
    return request.client.host if request.client else ""


async def parse_off_loop(request: Request, raw: bytes, parse: Callable[[], R]) -> R:
    """The result of parsing a body in a thread; the body is dropped if its client leaves before its turn.

    Raises:
        ApiError: of `parse`; or the client has left.
    """
    service: Service = request.app.state.service
    is_large = len(raw) > LARGE_BYTES
    is_short = len(raw) <= SHORT_WORK_BYTES and not any(name in raw for name in _EXPENSIVE_FIELDS)
    # The port tells connections of one address apart, each of which sends one request at a time.
    client = (client_address(request), str(request.client.port if request.client else ""))
    task = (lambda: _then_trim(parse)) if is_large else parse
    work = asyncio.ensure_future(service.off_loop(ClientWork(call=task, client=client, is_short=is_short)))
    gone = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise invalid_request("the client disconnected before its request was read")
        return work.result()
    finally:
        # After this the bytes of the body do not count against the limit on all bodies.
        request.scope.get(RELEASE_BODY, lambda: None)()
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


LARGE_BYTES = 1 << 20
"""Size of a body after which memory is returned to the system."""


def _then_trim(parse: Callable[[], R]) -> R:
    """Calls a function, and gives the memory that is free afterwards back to the system.

    The C library keeps what was freed in the middle of its heap: a server grew by a fifth with a few large bodies.
    """
    try:
        return parse()
    finally:
        # glibc's; other libraries do not have it, or return memory by themselves.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


async def respond(
    request: Request,
    *,
    path: str,
    parse: Callable[[bytes, Service], C],
    build: Callable[[C, PendingRequest, Service, TokenStrings], ResponseBuilder],
    on_loop: Callable[[bytes], bool] | None = None,
) -> Response:
    """Parses a request, submits it to the engine, and answers with the results.

    Args:
        request: the request.
        path: the path of its route.
        parse: makes a call of its body.
        build: makes the builder of the response to the call.
        on_loop: whether a body is parsed on the event loop; None for none.

    Raises:
        ApiError: the request cannot be answered.
    """
    service: Service = request.app.state.service
    raw = await read_body(request)
    if on_loop is not None and on_loop(raw):
        call = parse(raw, service)
    else:
        call = await parse_off_loop(request, raw, lambda: parse(raw, service))
    # Nothing is awaited between this call and the reply, so a client that disconnects cannot leave a request running.
    client = (client_address(request), call.id)
    pending = service.submit(call.submitted, route=path, streamed=call.stream, client=client)
    # From here on the `Reply` owns the pending request and closes it.
    answer = build(call, pending, service, request.app.state.texts)
    if call.stream:
        return SseReply(pending, answer.events(), id=call.id)
    return JsonReply(pending, answer.whole, id=call.id)
