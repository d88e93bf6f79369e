"""`/v1/completions`: text that continues one or several prompts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from levanter.base.bounded_json import Json
from levanter.data.incremental_detokenizer import REPLACEMENT
from levanter.inference.prompts import PromptRequest
from levanter.inference.requests import params_to_json
from levanter.serving.engine_thread import TokenDelta
from levanter.serving.errors import invalid_request
from levanter.serving.request_parsing import (
    MAX_CHOICES,
    MAX_PROMPTS,
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


def parse_completion(raw: bytes, service: Service) -> ParsedCall:
    """Parses the body of a request.

    Raises:
        ApiError: lists its problems.
    """
    fields = parse_fields(raw, service.reader)
    body, sampling = decode_request(CompletionBody, fields, defaults=params_to_json(service.reader.defaults))
    check_model_name(body.model, service.names)
    prompts = _list_prompts(body.prompt)
    # Everything below, and the engine's work, grows with the choices.
    if (choices := len(prompts) * sampling.params.n) > MAX_CHOICES:
        raise invalid_request(
            f"n: {len(prompts)} prompts with {sampling.params.n} choices each are {choices:,} choices; a request may "
            f"have {MAX_CHOICES:,}"
        )
    # Engine requests have ids of their own, the response's with a number: one HTTP request may have many prompts.
    id = random_id("cmpl")
    # All prompts share one seed, which the response returns: the same request with it gives the same texts.
    params = replace(sampling.params, seed=request_seed(sampling.params))
    submissions = []
    for n, text in enumerate(prompts):
        prompt = PromptRequest(line=n + 1, id=f"{id}-{n}", prompt=text, params=params, constraint=sampling.constraint)
        where = f"prompt[{n}]: " if len(prompts) > 1 else ""
        submissions.append(make_submission(prompt, service.reader, where=where))
    usage = streams_usage(body.stream_options, stream=body.stream)
    return ParsedCall(id=id, submitted=tuple(submissions), params=params, stream=body.stream, usage=usage)


def _list_prompts(
    prompt: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...],
) -> list[str | tuple[int, ...]]:
    """The prompts of a body, which may be one text, one list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    # An empty list is also a prompt of no tokens, which is refused later as such.
    if all(isinstance(item, int) for item in prompt):
        return [tuple(item for item in prompt if isinstance(item, int))]
    if len(prompt) > MAX_PROMPTS:
        raise invalid_request(f"prompt: at most {MAX_PROMPTS} prompts in a request, got {len(prompt)}")
    return [item for item in prompt if not isinstance(item, int)]


class CompletionBuilder(ResponseBuilder):
    """The response to a completion request."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, choice: PartialChoice) -> Iterator[Mapping[str, Json]]:
        """The prompt, with `echo`."""
        if self.call.params.echo:
            # Before the first token, so that a client sees the prompt while the engine computes it.
            yield self._choice(choice, (), begins=True)

    def delta(self, choice: PartialChoice, delta: TokenDelta) -> Iterator[Mapping[str, Json]]:
        """The text of one more token."""
        # A token may add no text yet (part of a character, a possible stop string): such a chunk is only sent for its
        # log-probability.
        if delta.text or delta.last or self.call.params.logprobs is not None:
            yield self._choice(choice, (delta,), begins=False)

    def complete(self, choice: PartialChoice) -> Mapping[str, Json]:
        """The whole text."""
        return self._choice(choice, choice.deltas, begins=True)

    def _choice(self, choice: PartialChoice, deltas: Sequence[TokenDelta], *, begins: bool) -> Mapping[str, Json]:
        params, last = self.call.params, deltas[-1] if deltas else None
        begins = begins and params.echo
        prompt = self._prompt_text(choice) if begins else ""
        # A request for no tokens has no deltas, and only its prompt.
        reason = "length" if params.max_tokens == 0 else None if last is None else last.reason
        body: dict[str, Json] = {
            "index": choice.index,
            "text": prompt + "".join(delta.text for delta in deltas),
            "logprobs": None if params.logprobs is None else self._logprobs(choice, deltas, begins=begins),
            "finish_reason": reason,
        }
        if reason is not None:
            body["stop_reason"] = None if last is None else last.matched
        return body

    def _prompt_text(self, choice: PartialChoice) -> str:
        """The text of the prompt, without a character that it only begins if the choice completes it."""
        text = self.service.reader.tokenizer.decode(choice.submitted.request.tokens)
        return text if self.call.params.max_tokens == 0 else text.rstrip(REPLACEMENT)

    def _logprobs(self, choice: PartialChoice, deltas: Sequence[TokenDelta], *, begins: bool) -> Json:
        tokens: list[Json] = []
        logprobs: list[Json] = []
        top: list[Json] = []
        offsets: list[Json] = []

        tokenizer, request = self.service.reader.tokenizer, choice.submitted.request
        if choice.stream is None:
            # Special tokens are part of the prompt's text, and not of the choice's.
            first = begins and choice.scores is not None
            choice.stream = tokenizer.stream(special=True) if first else tokenizer.stream(request.continued)

        def add(id: int, logprob: float | None, likeliest: Sequence[tuple[int, float]]) -> None:
            text = self.texts.text(id)
            tokens.append(text)
            logprobs.append(logprob)
            top.append(None if logprob is None else self._top(id, logprob, likeliest))
            assert choice.stream is not None
            piece, length = choice.stream.push(id), 0 if text.startswith("bytes:") else len(text)
            # Offsets of a stream continue over its chunks, so the counts are kept in the choice. All tokens of one
            # character begin where it does; the last of them completes it.
            start = choice.characters + choice.withheld
            choice.characters += len(piece)
            # A run of byte tokens is text at its end: it comes with the text of the token behind it.
            offsets.append(max(start, choice.characters - length) if piece and length else start)
            choice.withheld = 0 if piece else choice.withheld + length

        if begins and choice.scores is not None:
            ids, scores = request.tokens, choice.scores
            # Nothing predicts the first token of a prompt.
            add(ids[0], None, ())
            for id, logprob, likeliest in zip(ids[1:], scores.logprobs, scores.top, strict=True):
                add(id, logprob, likeliest)
            choice.stream, choice.withheld = tokenizer.stream(request.continued), 0
            choice.characters = len(self._prompt_text(choice))
        for delta in deltas:
            # The texts of tokens that end the choice are not part of the response, and neither are their
            # log-probabilities.
            if delta.token is not None and is_visible(delta):
                add(delta.token.id, delta.token.logprob, delta.token.top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _top(self, id: int, logprob: float, likeliest: Sequence[tuple[int, float]]) -> Json:
        """The most likely tokens by their texts; the token itself is always among them."""
        values: dict[str, Json] = {}
        for other, value in likeliest:
            # Different tokens may have the same text; the likelier one comes first and stays.
            values.setdefault(self.texts.text(other), value)
        values.setdefault(self.texts.text(id), logprob)
        return values


async def completions(request: Request) -> Response:
    """Answers `POST /v1/completions`."""
    return await respond(request, path=PATH, parse=parse_completion, build=CompletionBuilder, on_loop=is_cheap_to_parse)
