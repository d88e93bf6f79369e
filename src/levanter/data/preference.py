"""Records of preferences → pairs of texts, one of them preferred (`format: {type: preference_chat}`).

Four shapes are read, recognized by their keys and values, as `maybe_extract_prompt` of trl does:

- whole conversations (`chosen`, `rejected`), which begin alike: what they have in common is the prompt (a `prompt`
  beside them that is text repeats a part of it, and is not read);
- a prompt and two completions (`prompt`, `chosen`, `rejected`), each a list of messages;
- the same two as plain texts, without roles. No template is used then; a text ends with EOS, and begins with BOS if the
  tokenizer has one.

The assistant's tokens after the prompt count, its end of turn included (`count: all`: in every turn). The prompt of
whole conversations ends with a message: if two answers begin with the same words, these count in both, and cancel in
the difference of the log-probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from levanter.data.assistant_mask import ASSISTANT
from levanter.data.chat import ChatTemplate, invalid_character, select_template
from levanter.data.chat_targets import AnswerEncoder
from levanter.data.conversations import chat_template
from levanter.data.errors import DataError
from levanter.data.formats import PreferenceChatLmDatasetFormat
from levanter.data.messages import Conversation, checked_messages, template_arguments
from levanter.data.record_values import record_value
from levanter.data.store_write import Encoded
from levanter.data.tokenizer import Tokenizer

Shape = Literal["conversations", "prompt and messages", "prompt and texts", "texts"]
PROMPT = "prompt"


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferencePair:
    """Two texts with the same beginning.

    Attributes:
        chosen, rejected: ids and loss weights, as of conversations.
    """

    chosen: Encoded
    rejected: Encoded

    @property
    def same(self) -> bool:
        """Whether both texts are equal; such a pair teaches nothing."""
        return np.array_equal(self.chosen.ids, self.rejected.ids)


@dataclass(frozen=True, kw_only=True)
class PairEncoder:
    """Encodes records of preferences.

    Attributes:
        format: the keys of a record.
        template: messages to text; None if there is none, which suffices for plain texts.
        tokenizer: text to ids.
        bos, eos: the ids added before and after plain texts; None for none.
    """

    format: PreferenceChatLmDatasetFormat
    template: ChatTemplate | None
    tokenizer: Tokenizer
    bos: int | None = None
    eos: int | None = None

    def chars(self, record: tuple[Any, str]) -> int:
        """The characters of both texts, roughly; at least 1."""
        value, origin = record
        return 1 + sum(_characters(self._read_text(value, key, origin)) for key in self._keys)

    def shape(self, record: tuple[Any, str]) -> Shape:
        """The shape of a record.

        Raises:
            DataError: it has none of the shapes.
        """
        value, origin = record
        chosen, rejected = (self._read_text(value, key, origin) for key in self._keys)
        if type(chosen) is not type(rejected):
            keys = ", ".join(self._keys)
            raise DataError(f"{origin}: {keys}: expected both of them as lists of messages, or both as text")
        prompt = self._read_text(value, PROMPT, origin) if value.get(PROMPT) is not None else None
        if isinstance(chosen, list):
            # A prompt that is text, or a list without messages, is a column beside whole conversations.
            return "prompt and messages" if isinstance(prompt, list) and prompt else "conversations"
        if isinstance(prompt, list):
            raise DataError(
                f"{origin}: {PROMPT} is a list of messages, and {', '.join(self._keys)} are text; write these as lists "
                "too: [{role: assistant, content: …}]"
            )
        return "texts" if prompt is None else "prompt and texts"

    def encode(self, records: Sequence[tuple[Any, str]]) -> list[PreferencePair]:
        """The pair of each record.

        Raises:
            DataError: a record of none of the shapes; two texts without a common prompt; an empty completion; and the
                problems of conversations.
        """
        return [self._pair(record) for record in records]

    def _pair(self, record: tuple[Any, str]) -> PreferencePair:
        value, origin = record
        shape = self.shape(record)
        values = [value[key] for key in self._keys]
        if shape in ("prompt and texts", "texts"):
            # Without a `prompt` key, the common beginning of the two texts is the prompt, and only the rest differs.
            prompt = value[PROMPT] if shape == "prompt and texts" else _common_text(*values, origin=origin)
            answers = values if shape == "prompt and texts" else [text[len(prompt) :] for text in values]
            return PreferencePair(
                **dict(zip(("chosen", "rejected"), self._texts(prompt, answers, origin), strict=True))
            )
        if self.template is None:
            raise DataError(f"{origin}: messages need a chat template; the tokenizer {self.tokenizer.name} has none")
        variables = template_arguments(value, self.format.chat_template_kwargs, origin)
        before = value[PROMPT] if shape == "prompt and messages" else []
        if before and all(answer[: len(before)] == before for answer in values):
            keys = ", ".join(self._keys)
            raise DataError(f"{origin}: {keys} begin with the messages of {PROMPT}: remove {PROMPT}, or these messages")
        pair = [
            self._conversation([*before, *answer], value, f"{origin}, {key}")
            for answer, key in zip(values, self._keys, strict=True)
        ]
        # A record may add a system message, so the prompt may have more messages than the record lists.
        since = self._prompt_messages(pair, len(pair[0].messages) - len(values[0]) if before else None, record)
        encoded = []
        for conversation, key in zip(pair, self._keys, strict=True):
            where, messages = f"{origin}, {key}", conversation.messages
            if not any(_says(message) for message in messages[since:]):
                raise DataError(f"{where}: empty completion: the assistant says nothing after the prompt")
            if not self.format.mask_user_turns:
                encoded.append(self._answers.everything(conversation, variables, where))
            else:
                counted = 0 if self.format.count == "all" else since
                encoded.append(self._answers.counted(conversation, variables, where, since=counted))
            # The weight of the last position does not count: nothing follows it.
            if not (encoded[-1].weights is not None and encoded[-1].weights[:-1].any()):
                raise DataError(f"{where}: empty completion: nothing that the assistant says counts")
        return PreferencePair(chosen=encoded[0], rejected=encoded[1])

    def _prompt_messages(self, pair: Sequence[Conversation], prompt_length: int | None, record: tuple[Any, str]) -> int:
        """The number of messages of the prompt: the record's prompt, or what both conversations have in common."""
        chosen, rejected = (conversation.messages for conversation in pair)
        if prompt_length is None:
            # The first message of both is a prompt even where one of them has no other: it lacks an answer.
            prompt_length = _common_length(chosen, rejected) or int(chosen[0] == rejected[0])
        if prompt_length < 1:
            value, origin = record
            first = [f"{message['role']}: {str(message.get('content'))[:40]!r}" for message in (chosen[0], rejected[0])]
            # A prompt that is text is read only beside whole conversations.
            way = "" if value.get(PROMPT) is None else f"; write {PROMPT} as a list of messages"
            raise DataError(f"{origin}: no common prompt: one begins with {first[0]}, the other with {first[1]}{way}")
        return prompt_length

    def _texts(self, prompt: str, answers: Sequence[str], origin: str) -> list[Encoded]:
        """Plain texts: BOS, prompt, answer, EOS; prompt and answer are tokenized separately."""
        before = [] if self.bos is None else [self.bos]
        after = [] if self.eos is None else [self.eos]
        encoded = []
        for answer, key in zip(answers, self._keys, strict=True):
            if not answer:
                raise DataError(f"{origin}, {key}: empty completion: nothing follows the prompt")
            # Tokenized separately, so that the prompt has the same ids in both texts, whatever the answer begins with.
            prompt_ids, answer_ids = self.tokenizer.encode_batch([prompt, answer])
            ids = np.concatenate([before, prompt_ids, answer_ids, after]).astype(np.int32)
            weights = np.ones(len(ids), np.float32)
            # The last token of BOS and prompt predicts the first one of the answer, so its weight stays 1.
            weights[: max(len(before) + len(prompt_ids) - 1, 0)] = 0.0
            # Nothing follows the last token.
            weights[-1] = 0.0
            encoded.append(Encoded(ids, weights))
        return encoded

    def _read_text(self, value: object, key: str, origin: str) -> str | list[Any]:
        text = record_value(value, key, object, origin)
        if not isinstance(text, str | list):
            raise DataError(f"{origin}: {key!r} is {type(text).__name__}, expected a list of messages, or text")
        # Texts may have no prompt, which is an empty one.
        if not text and key != PROMPT:
            raise DataError(f"{origin}: {key!r} is empty")
        if isinstance(text, str) and (problem := invalid_character(text, repr(key))) is not None:
            raise DataError(f"{origin}: {problem}")
        return text

    def _conversation(self, messages: Sequence[Any], value: Mapping[str, Any], origin: str) -> Conversation:
        return checked_messages(messages, value, origin, system=self.format.system_prompt, roles=None)

    @property
    def _keys(self) -> tuple[str, str]:
        return self.format.chosen_field, self.format.rejected_field

    @cached_property
    def _answers(self) -> AnswerEncoder:
        assert self.template is not None
        return AnswerEncoder(template=self.template, tokenizer=self.tokenizer)


def _says(message: Mapping[str, Any]) -> bool:
    return message["role"] == ASSISTANT and bool(message.get("content") or message.get("tool_calls"))


def _characters(text: str | list[Any]) -> int:
    if isinstance(text, str):
        return len(text)
    return sum(len(str(message.get("content"))) for message in text if isinstance(message, dict))


@dataclass(frozen=True, kw_only=True)
class PairDocuments:
    """Preferences as documents of a token store: of each pair the chosen text, then the rejected one.

    Attributes:
        pairs: encodes the records.
    """

    pairs: PairEncoder

    def chars(self, record: tuple[Any, str]) -> int:
        """See `PairEncoder.chars`."""
        return self.pairs.chars(record)

    def encode(self, records: Sequence[tuple[Any, str]]) -> list[Encoded]:
        """Two documents for each record; see `PairEncoder.encode`."""
        return [text for pair in self.pairs.encode(records) for text in (pair.chosen, pair.rejected)]


def pair_template(format: PreferenceChatLmDatasetFormat, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a set; None if neither the set nor the tokenizer has one, which suffices for plain texts."""
    return None if select_template(tokenizer, format.chat_template) is None else chat_template(format, tokenizer)


def pair_identity(format: PreferenceChatLmDatasetFormat, tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that a set's ids and weights depend on, for the manifest of its token store."""
    template = pair_template(format, tokenizer)
    return {
        "chosen_field": format.chosen_field,
        "rejected_field": format.rejected_field,
        "system_prompt": format.system_prompt,
        "chat_template_kwargs": format.chat_template_kwargs,
        "chat_template": template and f"sha256 {template.digest}",
        "counted": _rule(format, template),
    }


# The texts below are recorded in manifests and compared; rewording one would refuse every existing store.
def _rule(format: PreferenceChatLmDatasetFormat, template: ChatTemplate | None) -> str:
    if not format.mask_user_turns:
        return "every token"
    marked = template is not None and template.marks_generation
    rule = "tokens of the template's generation spans" if marked else "derived: agreement of ids"
    return f"{rule}, {'of all turns' if format.count == 'all' else 'behind the prompt'}"


def describe_pairs(format: PreferenceChatLmDatasetFormat, tokenizer: Tokenizer) -> str:
    """Describes in a line a set's template and the rule for the tokens that count."""
    template = pair_template(format, tokenizer)
    counts = _rule(format, template)
    if template is None:
        return f"the tokenizer has no chat template, so records are plain texts; counted: {counts}"
    source = "its own chat template" if format.chat_template is not None else "the tokenizer's chat template"
    digest = template.digest
    return f"{source} (sha256 {digest[:12]}…); counted: {counts}"


def _common_length(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """The length of the prompt of two texts or conversations: what they have in common.

    Of the shorter one the last item is never of the prompt, as in trl: it would have no answer. If both are equal, it
    is what would have been preferred.
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)) - 1)


def _common_text(chosen: str, rejected: str, *, origin: str) -> str:
    """The words that two texts begin with in common; without the blank before the first differing word."""
    position = _common_length(chosen, rejected)
    # Tokenizers join a blank with the word behind it, so the blank belongs to the answers.
    if position and chosen[position] != rejected[position] and chosen[position - 1] == " ":
        position -= 1
    if not position:
        raise DataError(
            f"{origin}: no common prompt: one begins with {chosen[:40]!r}, the other with {rejected[:40]!r}; give "
            f'"{PROMPT}": "" for texts without one'
        )
    return chosen[:position]
