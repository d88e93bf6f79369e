"""Records of prompts that a model answers and is rewarded for (`format: {type: prompts}`).

A prompt is a conversation, which the chat template turns into text with its generation prompt at the end, or a text.
The template is applied here, once, and the ids are what the engine and the trainer get: no text is tokenized again.
Beside its ids a prompt has a row: the columns that rewards read.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from levanter.data.assistant_mask import ASSISTANT
from levanter.data.chat import ChatTemplate, select_template
from levanter.data.errors import DataError, raise_problems
from levanter.data.formats import PromptsLmDatasetFormat
from levanter.data.messages import checked_messages, template_arguments
from levanter.data.record_values import record_value
from levanter.data.tokenizer import Tokenizer, empty_text_ids

ANSWER = "answer"
"""The column in which rewards look for the right answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedPrompt:
    """A prompt, ready to be answered.

    Attributes:
        id: unique in its set; with the run's seed it decides the noise of its answers.
        text: what was tokenized, without the special tokens around a plain text.
        ids: int32, at least one.
        row: the columns that rewards read; `answer` is the right answer, whatever its column is called.
    """

    id: str
    text: str
    ids: np.ndarray
    row: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Encodes records of prompts.

    Attributes:
        format: the keys of a record.
        tokenizer: text to ids.
        template: messages to text; None if the prompts are plain texts.
        most: the largest number of tokens of a prompt.
    """

    format: PromptsLmDatasetFormat
    tokenizer: Tokenizer
    template: ChatTemplate | None
    most: int

    @staticmethod
    def for_set(format: PromptsLmDatasetFormat, tokenizer: Tokenizer, *, most: int) -> "PromptEncoder":
        """The encoder of a set, with the set's template, else the tokenizer's.

        Raises:
            DataError: messages need a template, and there is none, or it has no generation prompt.
        """
        template = select_template(tokenizer, format.chat_template)
        # Without a template nothing is missing: base models are trained on plain texts.
        if format.plain:
            return PromptEncoder(format=format, tokenizer=tokenizer, template=None, most=most)
        if template is None:
            plain = "" if format.messages else "; prompt_role: null leaves a prompt as it is"
            raise DataError(f"chat_template: missing, and the tokenizer {tokenizer.name} has none{plain}")
        template.check()
        _require_generation_prompt(template)
        return PromptEncoder(format=format, tokenizer=tokenizer, template=template, most=most)

    def encode(self, records: Iterable[tuple[Any, str]]) -> list[EncodedPrompt]:
        """The prompts of records (each with its file and position), in their order.

        Raises:
            DataError: a record without a key, messages that the template refuses, a prompt that is too long with
                `overlength: raise`, or two prompts of one id.
        """
        prompts = [prompt for value, origin in records if (prompt := self._encoded(value, origin)) is not None]
        return _with_ids(prompts, explicit=self.format.id is not None)

    def _encoded(self, value: Mapping[str, Any], origin: str) -> EncodedPrompt | None:
        text = self._text(value, origin)
        ids = self.tokenizer.encode_batch([text])[0]
        if self.template is None:
            # A template writes its special tokens itself; a plain text gets those of the tokenizer's files.
            ids = self.tokenizer.frame.around(ids.tolist()) or empty_text_ids(self.tokenizer, self.tokenizer.frame)
        ids = np.asarray(ids, np.int32)
        if not len(ids):
            raise DataError(f"{origin}: a prompt without tokens; there is nothing to answer")
        # Never shortened: a prompt without its beginning or its end asks another question.
        if len(ids) > self.most:
            if self.format.overlength == "drop":
                return None
            raise DataError(
                f"{origin}: {len(ids):,} tokens, and a prompt may have {self.most:,}; overlength: drop leaves it out"
            )
        return EncodedPrompt(id=self._id(value, ids, origin), text=text, ids=ids, row=self._row(value, origin))

    def _text(self, value: Mapping[str, Any], origin: str) -> str:
        format = self.format
        if format.messages is None:
            assert format.prompt is not None
            messages: list[Any] = [{"role": "user", "content": record_value(value, format.prompt, str, origin)}]
            if self.template is None:
                return messages[0]["content"]
        else:
            messages = record_value(value, format.messages, list, origin)
        assert self.template is not None
        conversation = checked_messages(messages, value, origin, system=format.system_prompt, roles=None)
        if not conversation.messages:
            raise DataError(f"{origin}: {format.messages!r} has no message; there is nothing to answer")
        # A model would continue the answer that is there, and the rewards would be those of the data set.
        if conversation.messages[-1]["role"] == ASSISTANT:
            raise DataError(f"{origin}: the last message is the assistant's; a prompt ends before the answer")
        # The record's own variables: tools, and switches such as `enable_thinking`.
        variables = template_arguments(value, format.chat_template_kwargs, origin)
        return self.template.render(conversation.messages, {**variables, "add_generation_prompt": True}, origin)[0]

    def _row(self, value: Mapping[str, Any], origin: str) -> dict[str, Any]:
        # Only what rewards read: a row travels to their processes with every answer.
        names = {name: name for name in self.format.columns}
        if self.format.answer is not None:
            names[ANSWER] = self.format.answer
        missing = [key for key in names.values() if key not in value]
        if missing:
            listed = ", ".join(map(repr, value)) or "none"
            raise DataError(f"{origin}: no key {', '.join(map(repr, missing))}; it has {listed}")
        return {name: value[key] for name, key in names.items()}

    def _id(self, value: Mapping[str, Any], ids: np.ndarray, origin: str) -> str:
        if self.format.id is None:
            # Of the ids, not of the position: prompts keep their noise when others are added or dropped.
            return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()[:16]
        # Text of both kinds: 7 and "7" are one id, and would be one row of noise.
        id = value.get(self.format.id)
        if not isinstance(id, str | int) or isinstance(id, bool):
            raise DataError(f"{origin}: {self.format.id!r} is {type(id).__name__}, expected text or a whole number")
        return str(id)


def _with_ids(prompts: Sequence[EncodedPrompt], *, explicit: bool) -> list[EncodedPrompt]:
    # Over the whole set, so that an id does not depend on which prompts share a step.
    counts = Counter(prompt.id for prompt in prompts)
    twice = [id for id, count in counts.items() if count > 1]
    if not twice:
        return list(prompts)
    if explicit:
        more = f" (and {len(twice) - 3} more)" if len(twice) > 3 else ""
        shown = ", ".join(f"{id!r} {counts[id]} times" for id in twice[:3])
        raise DataError(f"ids of prompts must differ: {shown}{more}; their answers would have the same noise")
    # The same prompt several times is allowed: the copies are numbered, so that their answers differ.
    seen: Counter[str] = Counter()
    numbered = []
    for prompt in prompts:
        seen[prompt.id] += 1
        id = prompt.id if seen[prompt.id] == 1 else f"{prompt.id}-{seen[prompt.id]}"
        numbered.append(EncodedPrompt(id=id, text=prompt.text, ids=prompt.ids, row=prompt.row))
    return numbered


def _require_generation_prompt(template: ChatTemplate) -> None:
    """Refuses a template that ignores `add_generation_prompt`: the model would have to write the assistant's header."""
    # Rendered instead of searched for in the template's text, which may name the variable and not use it.
    messages = [{"role": "user", "content": "?"}]
    with_it, without = (
        template.render(messages, {"add_generation_prompt": value}, "a question")[0] for value in (True, False)
    )
    problem = "chat_template: has no generation prompt: its text is the same with add_generation_prompt as without"
    raise_problems([problem] if with_it == without else [])
