"""Encodes conversations as ids with loss weights; checks that every counted answer ends with a stop token."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from levanter.data.assistant_mask import ASSISTANT, OPTIONS_HINT, Masked, MaskedTemplate
from levanter.data.chat import ChatTemplate
from levanter.data.errors import DataError
from levanter.data.messages import Conversation
from levanter.data.store_write import Encoded
from levanter.data.tokenizer import TemplateTokenizer, Tokenizer

NOTHING = Encoded(np.zeros(0, np.int32), np.zeros(0, np.float32))
"""A conversation in which nothing can count, because the assistant says nothing."""
ENCLOSE_HINT = "enclose the end of the turn in {% generation %} too"
REWRITTEN_TURN = "the template ends this turn differently once more messages follow"


@dataclass(frozen=True, kw_only=True)
class AnswerEncoder:
    """Encodes conversations as ids with loss weights.

    Attributes:
        template: messages to text.
        tokenizer: text to ids, special tokens in the text included.
        allow_unstopped: whether the counted part of an answer may end without a stop token.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    allow_unstopped: bool = False

    def everything(self, conversation: Conversation, variables: Mapping[str, Any], origin: str) -> Encoded:
        """Encodes a conversation of which every token counts.

        Raises:
            DataError: the template refuses it, or a message is not to count.
        """
        if conversation.context:
            raise DataError(
                f"{origin}: message {min(conversation.context) + 1} is not to count in the loss (weight: 0), but "
                "mask_user_turns: false counts every token: set it to true, or remove the weights"
            )
        return self._weighted(self._masked.everything(conversation.messages, variables, origin), origin)

    def counted(
        self, conversation: Conversation, variables: Mapping[str, Any], origin: str, *, since: int = 0
    ) -> Encoded:
        """Encodes a conversation of which the assistant's tokens count; `NOTHING` if the assistant says nothing.

        Args:
            conversation: the messages; those of its context do not count.
            variables: further variables of the template.
            origin: the file and position of the record, for messages.
            since: the first message of which something may count.

        Raises:
            DataError: the template refuses it; what counts cannot be derived; nothing counts; or an answer has no end.
        """
        messages, context = conversation.messages, conversation.context
        masked = self._masked.assistant(messages, variables, origin, since=since, context=context)
        # The first token counts for nothing: no position precedes it, from which it could be predicted.
        if not masked.counted[1:].any():
            answers = [
                number
                for number, m in enumerate(messages)
                if m["role"] == ASSISTANT and (m.get("content") or m.get("tool_calls")) and number not in context
                if number >= since
            ]
            if not answers:
                return NOTHING
            raise DataError(
                f"{origin}: nothing counts in the loss: the assistant has {len(answers)} messages, none of them within "
                "the template's {% generation %}"
            )
        marks = self.template.selected(variables).marks_generation
        if not self.allow_unstopped:
            # A template's own spans may be parts of one answer (a thought, then the text), so only the last must end
            # it. Derived spans are whole turns, each of which must.
            spans = masked.spans[-1:] if marks else masked.spans
            for number, span in enumerate(spans, start=1):
                ways = ENCLOSE_HINT if marks or number == len(spans) else f"{REWRITTEN_TURN}; {OPTIONS_HINT}"
                self._check_end(masked, span.first, span.stop, origin, ways)
        return self._weighted(masked, origin)

    def _weighted(self, masked: Masked, origin: str) -> Encoded:
        ids, bos = masked.ids, self.tokenizer.bos_id
        # Encoding adds no special tokens, so both were in the text: the template wrote one twice, or a record's content
        # has one.
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            raise DataError(
                f"{origin}: begins with {self.tokenizer.decode([bos])} (id {bos}) twice. Encoding adds none, so the "
                "template or a message contains the second one; remove it"
            )
        weights = np.zeros(len(ids), np.float32)
        # A weight belongs to the position that predicts: position t predicts token t + 1.
        weights[:-1] = masked.counted[1:]
        return Encoded(ids, weights)

    def _check_end(self, masked: Masked, first: int, stop: int, origin: str, ways: str) -> None:
        """Refuses an answer that does not end in a stop token: the model would not learn to stop."""
        for i in masked.ids[first:stop][::-1].tolist():
            if i in self._ends:
                return
            # Blanks behind the end token are usual (`<|im_end|>` and a line break); any other text means that the turn
            # goes on.
            if self.tokenizer.decode([i]).strip():
                break
        tail = self.tokenizer.decode(masked.ids[max(first, stop - 8) : stop])
        raise DataError(
            f"{origin}: the counted part of an answer ends in {tail!r}, not in a special token: the model would not "
            f"learn to stop there; {ways}, or set allow_unstopped: true"
        )

    @cached_property
    def _masked(self) -> MaskedTemplate:
        return MaskedTemplate(template=self.template, tokenizer=self.tokenizer)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The ids that may end an answer: tokens that were added to the vocabulary, and EOS."""
        added = self.tokenizer.added_ids if isinstance(self.tokenizer, TemplateTokenizer) else frozenset()
        # Special tokens stand for no bytes.
        silent = np.flatnonzero(self.tokenizer.byte_lengths() == 0).tolist()
        eos = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return frozenset((*added, *silent, *eos))
