"""The bodies of requests, as `protocol.decode` reads them; the fields of `SamplingParams` stand beside theirs.

Docstrings are what `/openapi.json` says of the fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from levanter.inference.prompts import CONSTRAINT_FIELDS

CONSTRAINT_NAMES = frozenset(CONSTRAINT_FIELDS)
"""Fields that say what a text conforms to; `inference.formats` reads them."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How an answer is streamed.

    Attributes:
        include_usage: whether a last chunk without choices says how many tokens there were.
    """

    include_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class CompletionBody:
    """A text, or several, to go on with.

    Attributes:
        prompt: a text, the ids of one, or a list of either.
        model: the name of the model that is served.
        stream: whether the answer comes as server-sent events.
        stream_options: how.
        user: whom the client asks for; nothing depends on it.
    """

    prompt: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None


NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}
"""Fields of OpenAI's that mean nothing here, with the values that clients send without asking for anything."""


@dataclass(frozen=True, kw_only=True)
class ContentPart:
    """A part of what a message says.

    Attributes:
        type: `text`: nothing else is understood.
        text: the text.
    """

    type: Literal["text"]
    text: str


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """A call that an answer made.

    Attributes:
        name: of the tool.
        arguments: a JSON text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class AssistantToolCall:
    """A call in a message of the assistant.

    Attributes:
        function: what was called.
        id: which a message of the tool refers to.
        type: `function`.
        index: its place among others.
    """

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: who says it: `system`, `user`, `assistant`, `tool`, or what else the template knows.
        content: what: a text, or parts that are texts.
        name: of who says it.
        tool_calls: that it makes.
        tool_call_id: which call it answers.
        reasoning_content: what came before it, for templates that want it.
        refusal: as an answer has it; nothing depends on it.
        annotations: as an answer has them; nothing depends on them.
    """

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[AssistantToolCall, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: tuple[object, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Function:
    """What can be called.

    Attributes:
        name: of it.
        description: what it does.
        parameters: a JSON schema of its arguments.
        strict: every schema is followed to the letter where a call is required, so this says nothing new.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Something that an answer may call.

    Attributes:
        type: `function`.
        function: what is called.
    """

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, kw_only=True)
class FunctionName:
    """The name of a function.

    Attributes:
        name: of it.
    """

    name: str


@dataclass(frozen=True, kw_only=True)
class NamedTool:
    """The tool that has to be called.

    Attributes:
        type: `function`.
        function: which.
    """

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True, kw_only=True)
class ChatBody:
    """A conversation, whose next message is asked for.

    Attributes:
        messages: it, from its beginning.
        model: the name of the model that is served.
        stream: whether the answer comes as server-sent events.
        stream_options: how.
        user: whom the client asks for; nothing depends on it.
        tools: what the answer may call.
        tool_choice: `none`, `auto`, `required`, or the one that it has to call.
        parallel_tool_calls: whether it may make several calls.
        logprobs: whether tokens come with their log-probabilities.
        top_logprobs: how many of the likeliest tokens come with each.
        max_completion_tokens: tokens of the answer: `max_tokens` by its newer name.
        chat_template_kwargs: what the template may know besides.
    """

    messages: tuple[Message, ...]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: Mapping[str, object] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizeBody:
    """A text or a conversation whose tokens are asked for.

    Attributes:
        prompt: a text.
        messages: a conversation, as the chat template writes it.
        model: the name of the model that is served.
        add_special_tokens: whether a text begins with BOS, where the model's texts do.
        add_generation_prompt: whether a conversation goes on to where the answer begins.
        tools: what the answer may call.
        chat_template_kwargs: what the template may know besides.
        return_token_strs: whether each token's text is given as well.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: tuple[Tool, ...] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    return_token_strs: bool = False


@dataclass(frozen=True, kw_only=True)
class DetokenizeBody:
    """Tokens whose text is asked for.

    Attributes:
        tokens: their ids.
        model: the name of the model that is served.
    """

    tokens: tuple[int, ...]
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokensBody:
    """Conversations whose tokens are asked for; upstream's way to ask.

    Attributes:
        message_list: each of them.
        model: the name of the model that is served.
    """

    message_list: tuple[tuple[Message, ...], ...]
    model: str | None = None
