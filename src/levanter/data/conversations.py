"""Records of conversations → token ids with loss weights (`format: {type: chat}`).

The template decides about every token, BOS and the ends of turns included; nothing is added to what it renders. Records
that would teach nothing, or something wrong, are refused: unknown roles (a template skips them), contents that are no
text, two BOS at the beginning, answers without an end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from levanter.data.assistant_mask import ASSISTANT
from levanter.data.chat import ChatTemplate, select_template
from levanter.data.chat_targets import NOTHING, AnswerEncoder
from levanter.data.errors import DataError
from levanter.data.formats import ChatLmDatasetFormat, PreferenceChatLmDatasetFormat
from levanter.data.messages import Conversation, checked_messages, template_arguments
from levanter.data.record_values import record_value
from levanter.data.store_write import Encoded
from levanter.data.tokenizer import Tokenizer

_SHAREGPT_FIELD = "conversations"
"""The key of the messages in records of ShareGPT."""


def chat_template(format: ChatLmDatasetFormat | PreferenceChatLmDatasetFormat, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a set: its own, else the tokenizer's.

    Raises:
        DataError: there is none.
    """
    template = select_template(tokenizer, format.chat_template)
    if template is None:
        raise DataError(
            f"chat_template: is missing, and the tokenizer {tokenizer.name} has none; give one here or as "
            "data.chat_template: Jinja, or the path of a file with it"
        )
    template.check()
    return template


def format_identity(format: ChatLmDatasetFormat, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that a set's ids and weights depend on, for the manifest of its token store.

    Raises:
        DataError: there is no template.
    """
    template = chat_template(format, tokenizer)
    return {
        "messages_field": format.messages_field,
        "system_prompt": format.system_prompt,
        "chat_template_kwargs": format.chat_template_kwargs,
        "roles": dict(format.roles or {}),
        # The template's hash instead of its text: a store of another template has other ids.
        "chat_template": f"sha256 {template.digest}",
        "counted": _rule(format, template),
        "allow_unstopped": format.allow_unstopped,
    }


# The texts below are recorded in manifests and compared; rewording one would refuse every existing store.
def _rule(format: ChatLmDatasetFormat, template: ChatTemplate) -> str:
    """The rule that decides which tokens of a conversation count, in words."""
    if not format.mask_user_turns:
        return "every token"
    rule = "tokens of the template's generation spans" if template.marks_generation else "derived: agreement of ids"
    return rule if format.turns == "all" else f"{rule}, turns {format.turns}"


def describe_chat(format: ChatLmDatasetFormat, tokenizer: Tokenizer) -> str:
    """Describes in a line a set's template and the rule for the tokens that count.

    Raises:
        DataError: there is no template.
    """
    template = chat_template(format, tokenizer)
    source = "its own chat template" if format.chat_template is not None else "the tokenizer's chat template"
    digest = template.digest
    if not format.mask_user_turns:
        rule = "every token counts"
    elif template.marks_generation:
        rule = "the assistant's tokens count, which the template marks"
    else:
        rule = "the assistant's tokens count, derived (the template does not mark them)"
    which = {"all": "", "last": "; of the last turn only", "split": "; each answer a conversation of its own"}
    # A template with the current date gives other ids tomorrow, which the user should know before a store is built.
    dated = (
        "; it may write the date of the day on which it is rendered"
        if "strftime_now" in f"{template.text}{template.tools_text}"
        else ""
    )
    return f"{source} (sha256 {digest[:12]}…{dated}); {rule}{which[format.turns]}"


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """Encodes records of conversations.

    Attributes:
        format: the keys of a record.
        template: messages to text.
        tokenizer: text to ids, special tokens in the text included.
    """

    format: ChatLmDatasetFormat
    template: ChatTemplate
    tokenizer: Tokenizer

    def chars(self, record: tuple[Any, str]) -> int:
        """The characters of all messages' contents; at least 1, because records with 0 are skipped unchecked."""
        value, origin = record
        messages = self._raw(value, origin)
        texts = (message.get("content") or message.get("value") for message in messages if isinstance(message, dict))
        return 1 + sum(len(str(text)) for text in texts)

    def encode(self, records: Sequence[tuple[Any, str]]) -> list[Encoded]:
        """The ids and weights of each conversation, or of each part of it with `turns: split`.

        A conversation in which the assistant says nothing has no ids, because nothing in it could count.

        Raises:
            DataError: invalid messages; the template refuses them; or what counts cannot be derived.
        """
        return [encoded for value, origin in records for encoded in self._encoded(value, origin)]

    def _encoded(self, value: Mapping[str, Any], origin: str) -> Iterator[Encoded]:
        conversation = self._conversation(value, origin)
        variables = template_arguments(value, self.format.chat_template_kwargs, origin)
        if not self.format.mask_user_turns:
            yield self._answers.everything(conversation, variables, origin)
            return
        turns = [number for number, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        counted = [turn for turn in turns if turn not in conversation.context]
        if not counted:
            # An empty document is left out of the store and counted as skipped.
            yield NOTHING
        elif self.format.turns == "split":
            # Each answer with only the messages before it: templates may render an earlier turn otherwise than the last
            # one.
            for turn in counted:
                part = f"{origin}, up to message {turn + 1}"
                first = replace(conversation, messages=conversation.messages[: turn + 1])
                yield self._answers.counted(first, variables, part, since=turn)
        else:
            # The whole conversation once; with `turns: last` earlier answers are context without weight.
            since = turns[-1] if self.format.turns == "last" else 0
            yield self._answers.counted(conversation, variables, origin, since=since)

    @cached_property
    def _answers(self) -> AnswerEncoder:
        return AnswerEncoder(
            template=self.template, tokenizer=self.tokenizer, allow_unstopped=self.format.allow_unstopped
        )

    def _conversation(self, value: Mapping[str, Any], origin: str) -> Conversation:
        key = self.format.messages_field
        system, roles = self.format.system_prompt, self.format.roles or {}
        conversation = checked_messages(self._raw(value, origin), value, origin, system=system, roles=roles)
        if not conversation.messages:
            raise DataError(f"{origin}: the conversation is empty ({key!r} has no message)")
        return conversation

    def _raw(self, value: object, origin: str) -> list[Any]:
        key = self.format.messages_field
        if isinstance(value, dict) and key not in value and isinstance(value.get(_SHAREGPT_FIELD), list):
            raise DataError(f"{origin}: no key {key!r}, but {_SHAREGPT_FIELD!r}: set messages_field: {_SHAREGPT_FIELD}")
        return record_value(value, key, list, origin)
