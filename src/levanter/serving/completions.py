"""`/v1/completions`: texts that are gone on with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from levanter.base.bounded_json import Json
from levanter.inference.prompts import PromptRequest
from levanter.inference.requests import params_to_json
from levanter.serving.engine_thread import TokenDelta
from levanter.serving.errors import invalid_request
from levanter.serving.request_parsing import (
    check_model_name,
    decode_request,
    make_submission,
    parse_fields,
    random_id,
    request_seed,
    streams_usage,
)
from levanter.serving.request_schema import CompletionBody
from levanter.serving.responses import (
    ParsedCall,
    PartialChoice,
    ResponseBuilder,
    is_cheap_to_parse,
    is_visible,
    respond,
)
from levanter.serving.service import Service

PATH = "/v1/completions"
MAX_PROMPTS = 1024
"""Of one request."""


def parse_completion(raw: bytes, service: Service) -> ParsedCall:
    """What a body asks for.

    Raises:
        ApiError: it cannot be answered; lists what is wrong with it.
    """
    fields = parse_fields(raw)
    body, sampling = decode_request(CompletionBody, fields, defaults=params_to_json(service.reader.defaults))
    check_model_name(body.model, service.names)
    prompts = _list_prompts(body.prompt)
    id = random_id("cmpl")
    params = replace(sampling.params, seed=request_seed(sampling.params))
    found = []
    for n, prompt in enumerate(prompts):
        asked = PromptRequest(line=n + 1, id=f"{id}-{n}", prompt=prompt, params=params, constraint=sampling.constraint)
        where = f"prompt[{n}]: " if len(prompts) > 1 else ""
        found.append(make_submission(asked, service.reader, where=where))
    usage = streams_usage(body.stream_options, stream=body.stream)
    return ParsedCall(id=id, submitted=tuple(found), params=params, stream=body.stream, usage=usage)


def _list_prompts(
    given: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...],
) -> list[str | tuple[int, ...]]:
    """Each prompt of a body."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(one, int) for one in given):
        return [tuple(one for one in given if isinstance(one, int))]
    if len(given) > MAX_PROMPTS:
        raise invalid_request(f"prompt: at most {MAX_PROMPTS} prompts in a request, got {len(given)}")
    return [one for one in given if not isinstance(one, int)]


class CompletionBuilder(ResponseBuilder):
    """The answer to a call for completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, choice: PartialChoice) -> Iterator[Mapping[str, Json]]:
        """The prompt, where it is part of the answer."""
        if self.call.params.echo:
            yield self._choice(choice, (), begins=True)

    def delta(self, choice: PartialChoice, piece: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """What a piece adds to the text."""
        if piece.text or piece.last or self.call.params.logprobs is not None:
            yield self._choice(choice, (piece,), begins=False)

    def complete(self, choice: PartialChoice) -> Mapping[str, Json]:
        """The whole text."""
        return self._choice(choice, choice.pieces, begins=True)

    def _choice(self, choice: PartialChoice, pieces: Sequence[TokenDelta], *, begins: bool) -> Mapping[str, Json]:
        params, last = self.call.params, pieces[-1] if pieces else None
        begins = begins and params.echo
        prompt = self.service.reader.tokenizer.decode(choice.submitted.request.tokens) if begins else ""
        # A request for no tokens has only its prompt.
        reason = "length" if params.max_tokens == 0 else None if last is None else last.reason
        found: dict[str, Json] = {
            "index": choice.index,
            "text": prompt + "".join(piece.text for piece in pieces),
            "logprobs": None if params.logprobs is None else self._logprobs(choice, pieces, begins=begins),
            "finish_reason": reason,
        }
        if reason is not None:
            found["stop_reason"] = None if last is None else last.matched
        return found

    def _logprobs(self, choice: PartialChoice, pieces: Sequence[TokenDelta], *, begins: bool) -> Json:
        tokens: list[Json] = []
        logprobs: list[Json] = []
        top: list[Json] = []
        offsets: list[Json] = []

        def add(id: int, logprob: float | None, likeliest: Sequence[tuple[int, float]]) -> None:
            text = self.texts.text(id)
            tokens.append(text)
            logprobs.append(logprob)
            top.append(None if logprob is None else self._top(id, logprob, likeliest))
            offsets.append(choice.characters)
            choice.characters += 0 if text.startswith("bytes:") else len(text)

        if begins and choice.scores is not None:
            ids, scores = choice.submitted.request.tokens, choice.scores
            add(ids[0], None, ())
            for id, one, likeliest in zip(ids[1:], scores.logprobs, scores.top, strict=True):
                add(id, one, likeliest)
        for piece in pieces:
            if piece.token is not None and is_visible(piece):
                add(piece.token.id, piece.token.logprob, piece.token.top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _top(self, id: int, logprob: float, likeliest: Sequence[tuple[int, float]]) -> Json:
        """The likeliest tokens by their texts; the token itself is always one of them."""
        found: dict[str, Json] = {}
        for other, value in likeliest:
            found.setdefault(self.texts.text(other), value)
        found.setdefault(self.texts.text(id), logprob)
        return found


async def completions(request: Request) -> Response:
    """Answers `POST /v1/completions`."""
    return await respond(request, path=PATH, read=parse_completion, build=CompletionBuilder, at_once=is_cheap_to_parse)
