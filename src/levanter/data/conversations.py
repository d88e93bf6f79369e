"""Records of conversations → token ids and what counts of each (`format: {type: chat}`).

The template decides about every token, BOS and the ends of turns included; nothing is put around what it writes. What
would teach nothing, or the wrong thing, is refused: roles that nobody knows (a template skips them), contents that are
no text, two BOS at the beginning, answers without an end.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from levanter.config.errors import did_you_mean
from levanter.data.assistant_mask import ASSISTANT, Masked, MaskedTemplate
from levanter.data.chat import NO_TEXT, ChatTemplate
from levanter.data.errors import DataError, raise_problems
from levanter.data.formats import ChatLmDatasetFormat
from levanter.data.record_values import record_value
from levanter.data.store_write import Encoded
from levanter.data.tokenizer import TemplateTokenizer, Tokenizer

ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "environment")
"""The roles that templates know. Others are named in `format.roles`."""
_TOOLS = "tools"
_NOT_HERE = {
    "chat_template": "a template for one record is not read; give format.chat_template",
    "messages": "they are a key of the record",
    "tokenize": "it is ours to set",
    "return_dict": "it is ours to set",
    "return_assistant_tokens_mask": "it is ours to set",
}
_NOTHING = Encoded(np.zeros(0, np.int32), np.zeros(0, np.float32))


def chat_template(format: ChatLmDatasetFormat, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a set: its own, or else the tokenizer's.

    Raises:
        DataError: there is none.
    """
    text = format.chat_template
    where = "chat_template"
    if text is None:
        text = tokenizer.chat_template if isinstance(tokenizer, TemplateTokenizer) else None
        where = f"the chat template of {tokenizer.name}"
    if text is None:
        raise DataError(
            f"chat_template: is missing, and the tokenizer {tokenizer.name} has none; give one here or as "
            "data.chat_template: Jinja, or the path of a file with it"
        )
    bos, eos = ("" if i is None else tokenizer.decode([i]) for i in (tokenizer.bos_id, tokenizer.eos_id))
    template = ChatTemplate(text=text, bos_token=bos, eos_token=eos, where=where)
    template.check()
    return template


def format_identity(format: ChatLmDatasetFormat, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides a set's ids and weights, for the manifest of its token store.

    Raises:
        DataError: there is no template.
    """
    template = chat_template(format, tokenizer)
    return {
        "messages_field": format.messages_field,
        "system_prompt": format.system_prompt,
        "chat_template_kwargs": format.chat_template_kwargs,
        "roles": dict(format.roles or {}),
        "chat_template": f"sha256 {hashlib.sha256(template.text.encode()).hexdigest()}",
        "counted": _rule(format, template),
        "allow_unstopped": format.allow_unstopped,
    }


def _rule(format: ChatLmDatasetFormat, template: ChatTemplate) -> str:
    """What counts of a conversation, in words."""
    if not format.mask_user_turns:
        return "every token"
    how = "tokens of the template's generation spans" if template.marks_generation else "derived: agreement of ids"
    return how if format.turns == "all" else f"{how}, turns {format.turns}"


def described(format: ChatLmDatasetFormat, tokenizer: Tokenizer) -> str:
    """Which template a set has, and how what counts is found, in a line.

    Raises:
        DataError: there is no template.
    """
    template = chat_template(format, tokenizer)
    whose = "its own chat template" if format.chat_template is not None else "the tokenizer's chat template"
    digest = hashlib.sha256(template.text.encode()).hexdigest()
    if not format.mask_user_turns:
        how = "every token counts"
    elif template.marks_generation:
        how = "the assistant's tokens count, which the template marks"
    else:
        how = "the assistant's tokens count, derived (the template does not mark them)"
    which = {"all": "", "last": "; of the last turn only", "split": "; each answer a conversation of its own"}
    dated = "; it may write the date of the day on which it is rendered" if "strftime_now" in template.text else ""
    return f"{whose} (sha256 {digest[:12]}…{dated}); {how}{which[format.turns]}"


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """Conversations.

    Attributes:
        format: their keys.
        template: messages to text.
        tokenizer: text to ids, special tokens in the text included.
    """

    format: ChatLmDatasetFormat
    template: ChatTemplate
    tokenizer: Tokenizer

    def chars(self, record: tuple[Any, str]) -> int:
        """The characters of all messages' contents; at least 1, so that an empty conversation is looked at."""
        value, origin = record
        messages = record_value(value, self.format.messages_field, list, origin)
        return 1 + sum(len(str(message.get("content"))) for message in messages if isinstance(message, dict))

    def encode(self, records: Sequence[tuple[Any, str]]) -> list[Encoded]:
        """The ids and weights of each conversation, or of each part of it with `turns: split`.

        One in which nothing can count, since the assistant says nothing, has no ids.

        Raises:
            DataError: messages that are none, that the template refuses, or of which it cannot be told what counts.
        """
        return [encoded for value, origin in records for encoded in self._encoded(value, origin)]

    def _encoded(self, value: Mapping[str, Any], origin: str) -> Iterator[Encoded]:
        messages, more = self._messages(value, origin), self._more(value, origin)
        if not self.format.mask_user_turns:
            yield self._weighted(self._masked.everything(messages, more, origin), origin)
            return
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            yield _NOTHING
        elif self.format.turns == "split":
            for turn in turns:
                part = f"{origin}, up to message {turn + 1}"
                yield self._counted(messages[: turn + 1], more, part, last=True)
        else:
            yield self._counted(messages, more, origin, last=self.format.turns == "last")

    def _counted(self, messages: list[dict[str, Any]], more: Mapping[str, Any], origin: str, *, last: bool) -> Encoded:
        masked = self._masked.assistant(messages, more, origin, last=last)
        if not masked.counted[1:].any():
            said = [m for m in messages if m["role"] == ASSISTANT and (m.get("content") or m.get("tool_calls"))]
            if not said:
                return _NOTHING
            raise DataError(
                f"{origin}: nothing counts in the loss: the assistant has {len(said)} messages, and nothing of them is "
                "within the template's {% generation %}"
            )
        if not self.format.allow_unstopped:
            spans = masked.spans[-1:] if self.template.marks_generation else masked.spans
            for span in spans:
                self._check_end(masked, span.first, span.stop, origin)
        return self._weighted(masked, origin)

    def _weighted(self, masked: Masked, origin: str) -> Encoded:
        ids, bos = masked.ids, self.tokenizer.bos_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise DataError(
                f"{origin}: begins with {self.tokenizer.decode([bos])} (id {bos}) twice: nothing but the template and "
                "what it is given writes one; take one of them out"
            )
        weights = np.zeros(len(ids), np.float32)
        weights[:-1] = masked.counted[1:]
        return Encoded(ids, weights)

    def _check_end(self, masked: Masked, first: int, stop: int, origin: str) -> None:
        """Refuses an answer that does not end in a token by which a model stops: it would learn to go on and on."""
        for i in masked.ids[first:stop][::-1].tolist():
            if i in self._ends:
                return
            if self.tokenizer.decode([i]).strip():
                break
        tail = self.tokenizer.decode(masked.ids[max(first, stop - 8) : stop])
        raise DataError(
            f"{origin}: what counts of an answer ends in {tail!r}, not in a special token: the model would not learn "
            "to stop there; enclose the end of the turn in {% generation %} too, or set allow_unstopped: true"
        )

    @cached_property
    def _masked(self) -> MaskedTemplate:
        return MaskedTemplate(template=self.template, tokenizer=self.tokenizer)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The ids that may end an answer: tokens that were added to the vocabulary, and EOS."""
        added = self.tokenizer.added_ids if isinstance(self.tokenizer, TemplateTokenizer) else frozenset()
        silent = np.flatnonzero(self.tokenizer.byte_lengths() == 0).tolist()
        own = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return frozenset((*added, *silent, *own))

    def _messages(self, value: Mapping[str, Any], origin: str) -> list[dict[str, Any]]:
        """The messages of a record, with the system's own key in front and roles as templates call them."""
        given = record_value(value, self.format.messages_field, list, origin)
        system = self.format.system_prompt
        if system is not None and value.get(system):
            prompt = value[system]
            given = [{**(prompt if isinstance(prompt, Mapping) else {"content": prompt}), "role": "system"}, *given]
        if not given:
            raise DataError(f"{origin}: the conversation is empty ({self.format.messages_field!r} has no message)")
        raise_problems([f"{origin}: {problem}" for problem in self._problems(given)])
        named = self.format.roles or {}
        # Parquet fills in what some messages have and others do not.
        return [
            {key: each for key, each in message.items() if each is not None or key == "content"}
            | {"role": named.get(message["role"], message["role"])}
            for message in given
        ]

    def _problems(self, messages: Sequence[Any]) -> Iterator[str]:
        named = self.format.roles or {}
        known = (*named, *named.values(), *(role for role in ROLES if role not in named))
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping):
                yield f"message {number}: expected an object with role and content, found {type(message).__name__}"
                continue
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str):
                yield f"message {number}: has no role (its keys are {', '.join(map(repr, message)) or 'none'})"
            elif role not in known:
                yield (
                    f"message {number}: unknown role {role!r}{did_you_mean(role, known)}; known are "
                    f"{', '.join(dict.fromkeys(known))}; format.roles says what others are (roles: {{{role}: …}})"
                )
            if isinstance(content, str) and (found := NO_TEXT.search(content)) is not None:
                at = found.start()
                yield f"message {number}: its content has U+{ord(found.group()):04X} at {at}: no text has that"
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                found = "missing" if content is None else f"{type(content).__name__}, and only text is read"
                yield f"message {number}: its content is {found}"

    def _more(self, value: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """What the template may know of a record besides its messages."""
        key = self.format.chat_template_kwargs
        more = (value.get(key) if key is not None else None) or {}
        if not isinstance(more, Mapping):
            raise DataError(f"{origin}: {key!r} is {type(more).__name__}, expected an object")
        raise_problems([f"{origin}: {key}.{name}: {why}" for name, why in _NOT_HERE.items() if name in more])
        tools = {_TOOLS: value[_TOOLS]} if value.get(_TOOLS) else {}
        # Whether an answer is to follow is not the record's to say; upstream leaves it out, too.
        return {**tools, **{name: each for name, each in more.items() if name != "add_generation_prompt"}}
