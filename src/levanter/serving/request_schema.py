"""Request bodies as dataclasses, which `request_parsing.decode` reads.

The fields of `SamplingParams` are accepted next to those of `CompletionBody` and `ChatBody`. `/openapi.json` takes its
descriptions of the fields from the docstrings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from levanter.inference.prompts import CONSTRAINT_FIELDS

CONSTRAINT_NAMES = frozenset(CONSTRAINT_FIELDS)
"""Fields that constrain the text; `inference.prompts.parse_constraint` reads them."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of a streamed response.

    Attributes:
        include_usage: whether a last chunk without choices reports the number of tokens.
    """

    include_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class CompletionBody:
    """A request for completions of one or several prompts.

    Attributes:
        prompt: a text, its token ids, or a list of either.
        model: the name of the served model.
        stream: whether the response is a stream of server-sent events.
        stream_options: options of the stream.
        user: an identifier of the end user; it has no effect.
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
"""OpenAI's fields that this server does not implement, each with the values that clients send as a default."""


@dataclass(frozen=True, kw_only=True)
class ContentPart:
    """A part of a message's content.

    Attributes:
        type: `text`, the only supported type.
        text: the text.
    """

    type: Literal["text"]
    text: str


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """The function of a tool call.

    Attributes:
        name: name of the tool.
        arguments: its arguments as JSON text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class AssistantToolCall:
    """A tool call in a message of the assistant.

    Attributes:
        function: the called function and its arguments.
        id: an id that the tool's message refers to.
        type: `function`.
        index: its index among the calls of the message.
    """

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant`, `tool`, or another role that the chat template knows.
        content: a text, or a list of text parts.
        name: name of the author.
        tool_calls: tool calls that the message makes.
        tool_call_id: the tool call that the message answers.
        reasoning_content: reasoning before the content, for templates that use it.
        refusal: accepted because responses contain it; it has no effect.
        annotations: accepted because responses contain them; they have no effect.
    """

    role: str
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[AssistantToolCall, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: tuple[object, ...] | None = None

    replaced: ClassVar[Mapping[str, str]] = {
        "function_call": "write the call as `tool_calls`",
        "audio": "only text is read; send its transcript as `content`",
    }


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: its name.
        description: what it does.
        parameters: a JSON schema of its arguments.
        strict: accepted; it has no effect, because a required call always conforms to the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the model may call.

    Attributes:
        type: `function`.
        function: the function.
    """

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, kw_only=True)
class FunctionName:
    """The name of a function.

    Attributes:
        name: the name.
    """

    name: str


@dataclass(frozen=True, kw_only=True)
class NamedTool:
    """The tool that the model must call.

    Attributes:
        type: `function`.
        function: its name.
    """

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True, kw_only=True)
class ChatBody:
    """A request for the next message of a conversation.

    Attributes:
        messages: the conversation from its beginning.
        model: the name of the served model.
        stream: whether the response is a stream of server-sent events.
        stream_options: options of the stream.
        user: an identifier of the end user; it has no effect.
        tools: tools that the model may call.
        tool_choice: `none`, `auto`, `required`, or the tool that it must call.
        parallel_tool_calls: whether it may make several calls.
        logprobs: whether the response has log-probabilities of its tokens.
        top_logprobs: how many of the most likely tokens are returned for each token.
        max_completion_tokens: OpenAI's newer name for `max_tokens`.
        chat_template_kwargs: further variables of the chat template.
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
    """A text or a conversation to tokenize.

    Attributes:
        prompt: a text.
        messages: a conversation, rendered by the chat template.
        model: the name of the served model.
        add_special_tokens: whether a text begins with BOS, if the model's texts do.
        add_generation_prompt: whether a conversation ends with the beginning of the assistant's message.
        tools: tools that the model may call.
        chat_template_kwargs: further variables of the chat template.
        return_token_strs: whether the text of each token is returned.
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
    """Tokens to decode.

    Attributes:
        tokens: their ids.
        model: the name of the served model.
    """

    tokens: tuple[int, ...]
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokensBody:
    """Conversations to tokenize, in upstream's form.

    Attributes:
        message_list: the conversations.
        model: the name of the served model.
    """

    message_list: tuple[tuple[Message, ...], ...]
    model: str | None = None
