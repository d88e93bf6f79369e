"""What answers look like: the other half of the interface that `/openapi.json` describes.

Docstrings are what it says of the fields. Nothing is made by these classes; a test holds real answers against them.
"""

from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

from levanter.serving.metrics import EngineLoad
from levanter.serving.request_schema import CalledFunction


class ErrorDetail(TypedDict):
    """What is wrong.

    Attributes:
        message: all of it, a line each.
        type: `invalid_request_error`, `rate_limit_error` or `server_error`.
        param: the field that is wrong.
        code: a word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Why there is no answer.

    Attributes:
        error: what is wrong.
    """

    error: ErrorDetail


class Usage(TypedDict):
    """How many tokens there were.

    Attributes:
        prompt_tokens: of the prompts.
        completion_tokens: of all choices.
        total_tokens: of both.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a choice's tokens; a list each, as long as the others.

    Attributes:
        tokens: their texts; `bytes:…` where a token is a part of a character.
        token_logprobs: null for a prompt's first token, which nothing predicts.
        top_logprobs: of the likeliest tokens, by their texts.
        text_offset: where each begins in the text.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[Mapping[str, float] | None, ...]
    text_offset: tuple[int, ...]


class CompletionChoice(TypedDict):
    """How a text goes on.

    Attributes:
        index: among the choices.
        text: what comes next, behind the prompt where that is part of the answer.
        logprobs: where they were asked for.
        finish_reason: why it ended.
        stop_reason: the stop string, or the id, that ended it.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class CompletionResponse(TypedDict):
    """Texts that were gone on with.

    Attributes:
        id: of the answer; the header `x-request-id` has it too.
        object: `text_completion`.
        created: when, in seconds of Unix time.
        model: the name of the model.
        seed: with which the same request gives the same answer.
        choices: all of them, prompt by prompt.
        usage: how many tokens there were.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    seed: int
    choices: tuple[CompletionChoice, ...]
    usage: Usage


class TopToken(TypedDict):
    """A token and how likely it is.

    Attributes:
        token: its text; `bytes:…` where it is a part of a character.
        logprob: the logarithm of its probability.
        bytes: of which it consists.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...]


class SampledToken(TopToken):
    """A token of an answer.

    Attributes:
        token: its text; `bytes:…` where it is a part of a character.
        logprob: the logarithm of its probability.
        bytes: of which it consists.
        top_logprobs: the likeliest tokens in its place.
    """

    top_logprobs: tuple[TopToken, ...]


class ChatLogprobs(TypedDict):
    """Log-probabilities of an answer's tokens.

    Attributes:
        content: a token each.
        refusal: nothing.
    """

    content: tuple[SampledToken, ...]
    refusal: None


class ResponseToolCall(TypedDict):
    """A call of a tool.

    Attributes:
        id: which a message with the tool's answer refers to.
        type: `function`.
        function: what is called.
    """

    id: str
    type: Literal["function"]
    function: CalledFunction


class ResponseMessage(TypedDict):
    """The next message of a conversation.

    Attributes:
        role: `assistant`.
        content: the text; null where it is calls of tools.
        refusal: nothing.
        tool_calls: the calls, where there are any.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[tuple[ResponseToolCall, ...]]


class ChatChoice(TypedDict):
    """One way in which a conversation goes on.

    Attributes:
        index: among the choices.
        message: the next message.
        logprobs: where they were asked for.
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
        id: of the answer; the header `x-request-id` has it too.
        object: `chat.completion`.
        created: when, in seconds of Unix time.
        model: the name of the model.
        seed: with which the same request gives the same answer.
        choices: all of them.
        usage: how many tokens there were.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    seed: int
    choices: tuple[ChatChoice, ...]
    usage: Usage


class ModelCard(TypedDict):
    """A model that is served.

    Attributes:
        id: its name.
        object: `model`.
        created: when the server began, in seconds of Unix time.
        owned_by: `levanter`.
        root: the name that answers give it.
        max_model_len: tokens of a prompt and its answer together.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelCards(TypedDict):
    """All names of the model that is served.

    Attributes:
        object: `list`.
        data: a name each.
    """

    object: Literal["list"]
    data: tuple[ModelCard, ...]


class Tokenized(TypedDict):
    """The tokens of a text or of a conversation.

    Attributes:
        count: how many.
        max_model_len: tokens of a prompt and its answer together.
        tokens: their ids.
        token_strs: their texts, where they were asked for.
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
        results: a conversation each.
    """

    results: tuple[ConversationTokens, ...]


class TokenizerInfo(TypedDict):
    """What clients that make tokens themselves want to know.

    Attributes:
        tokenizer_class: of ours.
        vocab_size: ids that the tokenizer has.
        model_max_length: tokens of a prompt and its answer together.
        add_bos_token: whether a prompt that is a text begins with BOS.
        bos_token, eos_token, pad_token: as they are written, where there are any.
        chat_template: in Jinja, where there is one.
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
    """Whether requests are taken.

    Attributes:
        status: `ready` if they are.
    """

    status: Literal["starting", "ready", "draining", "ended", "failed"]


class ServerStatus(TypedDict):
    """What the server is doing.

    Attributes:
        model: the name of the model.
        version: of the program.
        devices: how many there are.
        state: `ready` where requests are taken.
        context: tokens of a prompt and its answer together.
        tokens: that were sampled so far.
        load: what the engine is doing.
    """

    model: str
    version: str
    devices: int
    state: Literal["starting", "ready", "draining", "ended", "failed"]
    context: int
    tokens: int
    load: EngineLoad


class PlanReport(TypedDict):
    """The plan that the server follows.

    Attributes:
        report: as `levanter.main.plan` prints it.
    """

    report: str
