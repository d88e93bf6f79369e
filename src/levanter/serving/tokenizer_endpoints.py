"""`/tokenize`, `/detokenize`, `/tokenizer_info` and upstream's `/v1/tokens`: the tokenizer of the served model."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from levanter.base.bounded_json import Json
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.inference.prompts import MIN_TEXT_BYTES
from levanter.serving.chat import template_messages, template_variables
from levanter.serving.errors import JsonResponse, invalid_request
from levanter.serving.request_parsing import (
    MAX_PROMPTS,
    ProtocolError,
    check_model_name,
    decode,
    parse_fields,
    read_body,
)
from levanter.serving.request_schema import DetokenizeBody, TokenizeBody, TokensBody
from levanter.serving.responses import TokenStrings, parse_off_loop
from levanter.serving.service import Service


def tokenize_body(raw: bytes, service: Service, texts: TokenStrings) -> Mapping[str, Json]:
    """The tokens of a text or of a conversation.

    Raises:
        ApiError: the body has neither, or is invalid.
    """
    reader = service.reader
    try:
        body = decode(TokenizeBody, fields := parse_fields(raw, reader))
        check_model_name(body.model, service.names)
        if (body.prompt is None) == (body.messages is None):
            raise ProtocolError(["prompt: expected one of `prompt` and `messages`"])
        if body.prompt is not None:
            if len(body.prompt) > reader.max_text_bytes:
                raise ProtocolError([f"prompt: at most {reader.max_text_bytes:,} characters, got {len(body.prompt):,}"])
            # The special tokens of a completion's prompt, so that its length is the one that is counted here.
            ids = (reader.encode_with_special_tokens if body.add_special_tokens else reader.encode)(body.prompt)
        else:
            more = dict(template_variables(body.chat_template_kwargs, fields.get("tools")))
            # A reserved variable, set here from the field of this route.
            more["add_generation_prompt"] = body.add_generation_prompt
            ids = reader.conversation(template_messages(fields.get("messages")), more)
    # `ProtocolError` and the errors of the tokenizer and the template are all of this type.
    except ValueError as error:
        raise invalid_request(str(error)) from None
    tokens: list[Json] = list(ids)
    answer: dict[str, Json] = {"count": len(ids), "max_model_len": service.context, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [texts.text(id) for id in ids]
    return answer


def detokenize_body(raw: bytes, service: Service) -> Mapping[str, Json]:
    """The text of tokens.

    Raises:
        ApiError: the body is invalid, or has an id that the model does not have.
    """
    try:
        body = decode(DetokenizeBody, parse_fields(raw, service.reader))
        check_model_name(body.model, service.names)
        # The tokenizer may raise for other ids, or return any text.
        size, most = service.reader.rules.vocab_size, max(MIN_TEXT_BYTES, service.context)
        if len(body.tokens) > most:
            raise ProtocolError([f"tokens: at most {most:,}, got {len(body.tokens):,}"])
        wrong = next((n for n, id in enumerate(body.tokens) if not 0 <= id < size), None)
        if wrong is not None:
            raise ProtocolError(
                [f"tokens[{wrong}]: id {body.tokens[wrong]} is not one of the model's {size} ids (0 to {size - 1})"]
            )
    except ValueError as error:
        raise invalid_request(str(error)) from None
    return {"prompt": service.reader.tokenizer.decode(body.tokens)}


def tokenize_conversations(raw: bytes, service: Service) -> Mapping[str, Json]:
    """The tokens of conversations.

    Raises:
        ApiError: the body is invalid, or the chat template rejects a conversation.
    """
    try:
        body = decode(TokensBody, fields := parse_fields(raw, service.reader))
        check_model_name(body.model, service.names)
        if len(body.message_list) > MAX_PROMPTS:
            raise ProtocolError([f"message_list: at most {MAX_PROMPTS} conversations, got {len(body.message_list)}"])
        results: list[Json] = []
        conversations = fields["message_list"]
        assert isinstance(conversations, list), "decoded as a list"
        for messages in conversations:
            ids: list[Json] = list(service.reader.conversation(template_messages(messages)))
            results.append({"tokens": ids})
    except ValueError as error:
        raise invalid_request(str(error)) from None
    return {"results": results}


async def tokenize(request: Request) -> Response:
    """Answers `POST /tokenize`."""
    service: Service = request.app.state.service
    raw, texts = await read_body(request), request.app.state.texts
    # A long text takes seconds to tokenize, which all streams would wait for.
    return JsonResponse(await parse_off_loop(request, raw, lambda: tokenize_body(raw, service, texts)))


async def detokenize(request: Request) -> Response:
    """Answers `POST /detokenize`."""
    service: Service = request.app.state.service
    raw = await read_body(request)
    return JsonResponse(await parse_off_loop(request, raw, lambda: detokenize_body(raw, service)))


async def tokens(request: Request) -> Response:
    """Answers `POST /v1/tokens`."""
    service: Service = request.app.state.service
    raw = await read_body(request)
    return JsonResponse(await parse_off_loop(request, raw, lambda: tokenize_conversations(raw, service)))


async def tokenizer_info(request: Request) -> Response:
    """Answers `GET /tokenizer_info`: properties of the tokenizer, for clients that tokenize themselves."""
    service: Service = request.app.state.service
    reader = service.reader
    files = reader.tokenizer if isinstance(reader.tokenizer, FastTokenizer) else None

    def text(id: int | None) -> str | None:
        return None if id is None or files is None else files.token(id)

    return JsonResponse(
        {
            "tokenizer_class": type(reader.tokenizer).__name__,
            "vocab_size": reader.tokenizer.vocab_size,
            "model_max_length": service.context,
            "add_bos_token": reader.tokenizer.bos_id is not None and reader.tokenizer.bos_id in reader.frame.prefix[:1],
            "bos_token": text(reader.tokenizer.bos_id),
            "eos_token": text(reader.tokenizer.eos_id),
            "pad_token": text(reader.tokenizer.pad_id),
            "chat_template": None if reader.template is None else reader.template.text,
        }
    )
