"""The form of responses, from which `/openapi.json` is generated.

The docstrings are its descriptions of the fields. Responses are not constructed from these classes; a test compares
real responses with them.
"""

from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

from levanter.serving.metrics import EngineLoad
from levanter.serving.request_schema import CalledFunction


class ErrorDetail(TypedDict):
    """The details of an error.

    Attributes:
        message: every problem of the request, a line each.
        type: `invalid_request_error`, `rate_limit_error` or `server_error`.
        param: the field that is wrong.
        code: a code for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """An error response.

    Attributes:
        error: the details.
    """

    error: ErrorDetail


class Usage(TypedDict):
    """Numbers of tokens.

    Attributes:
        prompt_tokens: tokens of the prompts.
        completion_tokens: tokens of all choices.
        total_tokens: the sum.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a choice's tokens, as lists of equal length.

    Attributes:
        tokens: the tokens' texts; `bytes:…` if a token is part of a character.
        token_logprobs: their log-probabilities; null for the first token of a prompt, which nothing predicts.
        top_logprobs: log-probabilities of the most likely tokens, by their texts.
        text_offset: offset of each token in the text.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[Mapping[str, float] | None, ...]
    text_offset: tuple[int, ...]


class CompletionChoice(TypedDict):
    """A completion of a prompt.

    Attributes:
        index: index among the choices.
        text: the completion, after the prompt with `echo`.
        logprobs: log-probabilities, if requested.
        finish_reason: why it ended.
        stop_reason: the stop string, or the id, that ended it.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class CompletionResponse(TypedDict):
    """Completions of one or several prompts.

    Attributes:
        id: id of the response, also in the header `x-request-id`.
        object: `text_completion`.
        created: time of creation in seconds of Unix time.
        model: the name of the model.
        seed: the seed with which the same request gives the same response.
        choices: the choices, prompt by prompt.
        usage: numbers of tokens.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    seed: int
    choices: tuple[CompletionChoice, ...]
    usage: Usage


class TopToken(TypedDict):
    """A token and its log-probability.

    Attributes:
        token: its text; `bytes:…` if it is part of a character.
        logprob: its log-probability.
        bytes: its bytes.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]


class SampledToken(TopToken):
    """A token of a response.

    Attributes:
        token: its text; `bytes:…` if it is part of a character.
        logprob: its log-probability.
        bytes: its bytes.
        top_logprobs: the most likely tokens at its position.
    """

    top_logprobs: tuple[TopToken, ...]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a message's tokens.

    Attributes:
        content: an entry for each token.
        refusal: always null.
    """

    content: tuple[SampledToken, ...]
    refusal: None


class ResponseToolCall(TypedDict):
    """A tool call.

    Attributes:
        id: an id that the message with the tool's result refers to.
        type: `function`.
        function: the called function and its arguments.
    """

    id: str
    type: Literal["function"]
    function: CalledFunction


class ResponseMessage(TypedDict):
    """The next message of a conversation.

    Attributes:
        role: `assistant`.
        content: the text; null if the message consists of tool calls.
        refusal: always null.
        tool_calls: the tool calls, if any.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[tuple[ResponseToolCall, ...]]


class ChatChoice(TypedDict):
    """A continuation of a conversation.

    Attributes:
        index: index among the choices.
        message: the next message.
        logprobs: log-probabilities, if requested.
        finish_reason: why it ended.
        stop_reason: the stop string, or the id, that ended it.
    """

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatResponse(TypedDict):
    """The next message of a conversation.

    Attributes:
        id: id of the response, also in the header `x-request-id`.
        object: `chat.completion`.
        created: time of creation in seconds of Unix time.
        model: the name of the model.
        seed: the seed with which the same request gives the same response.
        choices: the choices.
        usage: numbers of tokens.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    seed: int
    choices: tuple[ChatChoice, ...]
    usage: Usage


class ModelCard(TypedDict):
    """A name of the served model.

    Attributes:
        id: the name.
        object: `model`.
        created: start time of the server in seconds of Unix time.
        owned_by: `levanter`.
        root: the name that responses contain.
        max_model_len: maximum tokens of a prompt and its completion.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelCards(TypedDict):
    """All names of the served model.

    Attributes:
        object: `list`.
        data: an entry for each name.
    """

    object: Literal["list"]
    data: tuple[ModelCard, ...]


class Tokenized(TypedDict):
    """The tokens of a text or of a conversation.

    Attributes:
        count: number of tokens.
        max_model_len: maximum tokens of a prompt and its completion.
        tokens: their ids.
        token_strs: their texts, if requested.
    """

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: NotRequired[tuple[str, ...]]


class Detokenized(TypedDict):
    """The text of tokens.

    Attributes:
        prompt: the text.
    """

    prompt: str


class ConversationTokens(TypedDict):
    """The tokens of one conversation.

    Attributes:
        tokens: their ids.
    """

    tokens: tuple[int, ...]


class Conversations(TypedDict):
    """The tokens of conversations.

    Attributes:
        results: an entry for each conversation.
    """

    results: tuple[ConversationTokens, ...]


class TokenizerInfo(TypedDict):
    """Properties of the tokenizer, for clients that tokenize themselves.

    Attributes:
        tokenizer_class: the server's tokenizer class.
        vocab_size: number of ids of the tokenizer.
        model_max_length: maximum tokens of a prompt and its completion.
        add_bos_token: whether a prompt that is a text begins with BOS.
        bos_token, eos_token, pad_token: the texts of these tokens, if they exist.
        chat_template: the chat template in Jinja, if there is one.
    """

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Health(TypedDict):
    """Whether the engine runs.

    Attributes:
        status: `ok` if it does.
    """

    status: Literal["ok", "failed"]


class Readiness(TypedDict):
    """Whether the server admits requests.

    Attributes:
        status: `ready` if it does.
    """

    status: Literal["starting", "ready", "draining", "ended", "failed"]


class ServerStatus(TypedDict):
    """The state and the load of the server.

    Attributes:
        model: the name of the model.
        version: version of the program.
        devices: number of devices.
        state: `ready` if requests are admitted.
        context: maximum tokens of a prompt and its completion.
        tokens: number of tokens that were sampled so far.
        load: the load of the engine.
    """

    model: str
    version: str
    devices: int
    state: Literal["starting", "ready", "draining", "ended", "failed"]
    context: int
    tokens: int
    load: EngineLoad


class PlanReport(TypedDict):
    """The plan of the run.

    Attributes:
        report: the report as `levanter.main.plan` prints it.
    """

    report: str
