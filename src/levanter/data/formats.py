"""Formats: what a record of a source contains, and under which keys.

A *source* locates the records, a *format* describes one record. `TextLmDatasetFormat` is the one for plain text; an
entry point that does not read a format refuses it by name.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import draccus

from levanter.config.validators import Count, PositiveInt, Ranged


@dataclass(frozen=True, kw_only=True)
class LmDatasetFormatBase(Ranged, draccus.ChoiceRegistry):
    """The base of all formats (`format: {type: …}`; `text` where no type is given)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The type of a format without `type`: text."""
        return "text"


@LmDatasetFormatBase.register_subclass("text")
@dataclass(frozen=True, kw_only=True)
class TextLmDatasetFormat(LmDatasetFormatBase):
    """Plain documents.

    Attributes:
        text_key: the key (JSON) or column (Parquet) that holds a document's text.
        txt_documents: the unit that is one document in a `.txt` file: the whole `file`, or each `line` that is not
            blank.
    """

    text_key: str = "text"
    txt_documents: Literal["file", "line"] = "file"


@LmDatasetFormatBase.register_subclass("chat")
@dataclass(frozen=True, kw_only=True)
class ChatLmDatasetFormat(LmDatasetFormatBase):
    """Conversations, turned into text by a chat template.

    Attributes:
        messages_field: the key of a record that holds its messages.
        single_turn: only for prepared prompts (`eval_sliding_lm`).
        chat_template: Jinja, or the path of a file with it; if absent, `data.chat_template`, else the tokenizer's
            template.
        system_prompt: the key of a record that holds a system message.
        chat_template_kwargs: the key of a record that holds further variables of the template.
        pack: how conversations are packed into rows; several to a row by default.
        mask_user_turns: whether only the assistant's tokens count.
        turns: which of the assistant's turns count: `all`, the `last`, or, with `split`, each in a conversation of its
            own that ends with it.
        roles: the template's names of roles that it does not know (`{gpt: assistant}`).
        overlength: what to do with a conversation longer than a row: keep its beginning (`left`) or its end (`right`),
            leave it out (`drop`), or refuse it (`raise`).
        allow_unstopped: whether the counted part of an answer may end without a stop token.
    """

    messages_field: str = "messages"
    single_turn: bool = False
    chat_template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: str | None = "chat_template_kwargs"
    pack: bool | PositiveInt | Literal["pad"] | None = None
    mask_user_turns: bool = True
    turns: Literal["all", "last", "split"] = "all"
    roles: dict[str, str] | None = None
    # The default keeps the beginning: the end of a conversation means little without its first messages.
    overlength: Literal["left", "right", "drop", "raise"] = "left"
    allow_unstopped: bool = False


@LmDatasetFormatBase.register_subclass("supervised")
@dataclass(frozen=True, kw_only=True)
class SupervisedLmDatasetFormat(LmDatasetFormatBase):
    """A prompt and its completion; only the completion is scored."""

    input_key: str = "input"
    target_key: str = "target"
    separate_with: str | Count | None = None
    pack: bool = True
    mask_inputs: bool = True


@LmDatasetFormatBase.register_subclass("prebuilt")
@dataclass(frozen=True, kw_only=True)
class PrebuiltLmDatasetFormat(LmDatasetFormatBase):
    """Records that already hold token ids."""

    input_ids_key: str = "input_ids"
    loss_weights_key: str | None = None
    loss_weight_transform: Any = None


@LmDatasetFormatBase.register_subclass("preference_chat")
@dataclass(frozen=True, kw_only=True)
class PreferenceChatLmDatasetFormat(LmDatasetFormatBase):
    """Pairs of conversations, one chosen and one rejected.

    Attributes:
        chosen_field, rejected_field: the keys of a record that hold them.
        chat_template, system_prompt, chat_template_kwargs: as of `chat`.
        pack: whether several pairs share a row; not implemented.
        mask_user_turns: whether only the assistant's tokens count.
        count: the assistant's turns whose tokens count: those behind the common prompt of both (`completion`), or
            `all`.
        slice_strategy: what to do with a pair that has a text longer than a row: keep the beginning of both (`left`) or
            the end (`right`), leave it out (`drop`), or refuse it (`raise`).
    """

    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    chat_template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: str | None = "chat_template_kwargs"
    pack: bool = False
    mask_user_turns: bool = True
    count: Literal["completion", "all"] = "completion"
    # The default refuses: a truncated text changes what the two probabilities say about each other.
    slice_strategy: Literal["left", "right", "raise", "drop"] = "raise"


@LmDatasetFormatBase.register_subclass("prompts")
@dataclass(frozen=True, kw_only=True)
class PromptsLmDatasetFormat(LmDatasetFormatBase):
    """Prompts that a model answers, with what its answers are judged by.

    Attributes:
        messages: the key of a record that holds the conversation up to the answer.
        prompt: the key of a record that holds the prompt as text; one of both is needed.
        prompt_role: `user`: a text is the message of a user, written by the chat template; null: it stays as it is.
        answer: the key of the right answer; null if rewards need none.
        columns: further keys that rewards read.
        id: the key of an id that differs for each prompt; null for a digest of the prompt.
        chat_template, system_prompt, chat_template_kwargs: as of `chat`.
        overlength: what to do with a prompt that leaves no room for an answer: leave it out (`drop`), or refuse it.
    """

    messages: str | None = None
    prompt: str | None = None
    prompt_role: Literal["user"] | None = "user"
    answer: str | None = None
    columns: list[str] = field(default_factory=list)
    id: str | None = None
    chat_template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: str | None = "chat_template_kwargs"
    overlength: Literal["drop", "raise"] = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        # No default key: a set with both columns would be read in the way that was not meant.
        if (self.messages is None) == (self.prompt is None):
            both = "both are set" if self.prompt is not None else "neither is set"
            problems.append(f"prompt, messages: {both}; expected one key of a record")
        if self.plain and self.chat_template is not None:
            problems.append("chat_template: has no effect with prompt_role: null; leave one of them out")
        if self.answer is not None and "answer" in self.columns and self.answer != "answer":
            problems.append(f"columns: answer: rewards read the key {self.answer!r} under this name")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def plain(self) -> bool:
        """Whether a prompt is text without a template."""
        return self.messages is None and self.prompt_role is None


def format_name(format: LmDatasetFormatBase) -> str:
    """The name a format has in a configuration."""
    return LmDatasetFormatBase.get_choice_name(type(format))
