"""Computes which tokens of a conversation the assistant wrote; only these count in the loss.

A template that marks them (`{% generation %}`) defines them itself. Most stock templates do not; then they are
*derived*. Turn i of the assistant begins after the rendering of all earlier messages with the generation prompt, which
must be a prefix of the whole text, and ends where the rendering up to and with turn i stops agreeing with it, as token
ids: characters agree for too long (`<|end` and `<|user` begin alike). Where that end is not after the turn's content,
the template renders earlier turns differently from the last one (for instance, it drops reasoning): the text that
inference would show the model is then not a prefix of this one, and the conversation is refused with advice. This is
checked for every conversation, because it depends on the content.

The tokens of a span are those that overlap it, as in transformers since 5.24: the first may begin before it, and of a
character of several tokens all count. (Earlier versions left a span's last character with its first token.)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from levanter.data.chat import ChatTemplate
from levanter.data.errors import DataError
from levanter.data.tokenizer import Tokenizer

Turns = Literal["all", "last", "split"]

ASSISTANT = "assistant"
MARK_HINT = "set a chat_template that marks the tokens that count with {% generation %} … {% endgeneration %}"
OPTIONS_HINT = (
    f"{MARK_HINT}, or set turns: last (only the last answer counts) or turns: split (each answer is a conversation of "
    "its own, rendered as inference would)"
)
"""Advice for a template that renders an answer differently once more messages follow."""
# Put behind a message's content to find where a template writes its end: a noncharacter, which no text has.
_CONTENT_END = "\ufdd2"
_SHOWN = 60


@dataclass(frozen=True)
class Span:
    """Tokens `first` to `stop` of a conversation, which the assistant wrote."""

    first: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Masked:
    """A conversation as ids, and which of them count in the loss.

    Attributes:
        ids: int32 `[tokens]`.
        spans: the spans that count, in order.
    """

    ids: np.ndarray
    spans: tuple[Span, ...]

    @property
    def counted(self) -> np.ndarray:
        """Whether each token counts: bool `[tokens]`."""
        mask = np.zeros(len(self.ids), bool)
        for span in self.spans:
            mask[span.first : span.stop] = True
        return mask


@dataclass(frozen=True, kw_only=True)
class MaskedTemplate:
    """A template and a tokenizer, which together determine the tokens that count.

    Attributes:
        template: messages to text.
        tokenizer: text to ids.
    """

    template: ChatTemplate
    tokenizer: Tokenizer

    def everything(self, messages: Sequence[Any], variables: Mapping[str, Any], origin: str) -> Masked:
        """Encodes a conversation of which every token counts.

        Raises:
            DataError: the template refuses it.
        """
        text, _ = self.template.render(messages, variables, origin)
        ids, _ = self.tokenizer.encode_with_offsets(text)
        return Masked(ids=ids, spans=(Span(0, len(ids)),))

    def assistant(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        origin: str,
        *,
        since: int = 0,
        context: Collection[int] = (),
    ) -> Masked:
        """Encodes a conversation of which only the assistant's tokens count.

        Args:
            messages: the conversation, each message with its role.
            variables: further variables of the template.
            origin: the file and position of the record, for messages.
            since: the first message that may count.
            context: the numbers of the assistant's messages that do not count.

        Raises:
            DataError: the template refuses it, or the template neither marks the assistant's tokens nor lets them be
                derived.
        """
        turns = [number for number, message in enumerate(messages) if message.get("role") == ASSISTANT]
        turns = [number for number in turns if number >= since]
        excluded, turns = [turn for turn in turns if turn in context], [turn for turn in turns if turn not in context]
        text, marked = self.template.render(messages, variables, origin)
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        if self.template.selected(variables).marks_generation:
            # Turns that do not count may have marked spans too.
            dropped: set[int] = set()
            for turn in excluded:
                dropped.update(self._spans_of_turn(text, marked, messages, turn, variables, origin))
            # The rendering up to the first counted turn contains exactly the spans before it, so these are dropped by
            # their number.
            if since:
                _, before = self.template.render(messages[: turns[0]], variables, origin) if turns else ("", marked)
                dropped.update(range(len(before)))
            counted = [span for number, span in enumerate(marked) if number not in dropped]
            spans = (_tokens(offsets, start, stop) for start, stop in counted)
            return Masked(ids=ids, spans=tuple(span for span in spans if span is not None))
        whole = _Rendered(text, ids, offsets)
        return Masked(ids=ids, spans=tuple(self._derived(whole, messages, turn, variables, origin) for turn in turns))

    def _spans_of_turn(
        self,
        text: str,
        marked: Sequence[tuple[int, int]],
        messages: Sequence[Any],
        turn: int,
        variables: Mapping[str, Any],
        origin: str,
    ) -> range:
        """Which of the spans that a template marks belong to a turn: those that the rendering up to it adds."""
        counts = []
        for stop in (turn, turn + 1):
            # There is nothing to render before the first message, and the whole text is known.
            rendered, spans = ("", []) if stop == 0 else self.template.render(messages[:stop], variables, origin)
            counts.append(len(spans))
            if [rendered[a:b] for a, b in spans] != [text[a:b] for a, b in marked[: len(spans)]]:
                raise DataError(
                    f"{origin}: message {turn + 1} is not to count in the loss (weight: 0), but which of the "
                    "template's {% generation %} spans it has is unclear: the template writes earlier turns otherwise "
                    "once more messages follow; set turns: split (each answer is a conversation of its own)"
                )
        return range(*counts)

    def _derived(
        self, conversation: "_Rendered", messages: Sequence[Any], turn: int, variables: Mapping[str, Any], origin: str
    ) -> Span:
        """One of the assistant's turns in the rendering of all messages."""
        where = f"{origin}: message {turn + 1} of {len(messages)} (assistant)"
        # The rendering with the generation prompt is what a model would be given to write this turn.
        prompt, _ = self.template.render(messages[:turn], {**variables, "add_generation_prompt": True}, where)
        if not conversation.text.startswith(prompt):
            ways = OPTIONS_HINT if turn < len(messages) - 1 else MARK_HINT
            raise DataError(
                f"{where}: the tokens that count cannot be derived: the text of the messages before it, with the "
                "generation prompt, is not a prefix of the conversation's text; "
                f"{_describe_difference(prompt, conversation.text)}; {ways}"
            )
        if turn == len(messages) - 1:
            # The last turn reaches to the end of the text: nothing follows that could rewrite it.
            span = _tokens(conversation.offsets, len(prompt), len(conversation.text))
            # A template that writes nothing for this turn gives an empty span at the end, in which nothing counts.
            return Span(len(conversation.ids), len(conversation.ids)) if span is None else span
        prefix, _ = self.template.render(messages[: turn + 1], variables, where)
        ids, _ = self.tokenizer.encode_with_offsets(prefix)
        # Ids, not characters: the texts may agree longer than the tokens do.
        stop = _common_prefix(ids, conversation.ids)
        # The common prefix must reach the end of the content. Without content (tool calls) only tokens without text may
        # differ.
        content_end = self._content_end(messages, turn, variables, prefix, where)
        ended = (
            self._only_ends(ids[stop:]) if content_end is None else _reach(conversation.offsets, stop) >= content_end
        )
        span = _tokens(conversation.offsets[:stop], len(prompt), _reach(conversation.offsets, stop))
        if span is None or not ended:
            # Where the two renderings part before the content ends, the template has rewritten the turn, and no prefix
            # exists.
            raise DataError(
                f"{where}: the tokens that count cannot be derived: the template writes this turn differently once "
                f"more messages follow; {_describe_difference(prefix, conversation.text)}; {OPTIONS_HINT}"
            )
        return span

    def _content_end(
        self, messages: Sequence[Any], turn: int, variables: Mapping[str, Any], rendered: str, where: str
    ) -> int | None:
        """The character at which the content of a turn ends, in the rendering up to this turn; None if unknown."""
        content = messages[turn].get("content")
        if not isinstance(content, str) or not content.strip():
            return None
        # The content's own trailing blanks are removed, because templates often strip them; the mark then follows the
        # last visible character.
        marked = {**messages[turn], "content": content.rstrip() + _CONTENT_END}
        text, _ = self.template.render([*messages[:turn], marked], variables, where)
        end = text.find(_CONTENT_END)
        # The mark may itself change the rendering (a template may measure or split the content): then the position
        # means nothing.
        return end if end >= 0 and text[:end] == rendered[:end] else None

    def _only_ends(self, ids: np.ndarray) -> bool:
        """Whether all of these ids are blanks or tokens without text."""
        lengths = self.tokenizer.byte_lengths()
        return all(lengths[i] == 0 or not self.tokenizer.decode([i]).strip() for i in ids.tolist())


@dataclass(frozen=True, eq=False)
class _Rendered:
    text: str
    ids: np.ndarray
    offsets: np.ndarray


def _tokens(offsets: np.ndarray, start: int, stop: int) -> Span | None:
    """The tokens that overlap a span of characters; None where it has none."""
    if start >= stop:
        return None
    # Offsets ascend. The first token that ends behind `start`, and the first that begins at or behind `stop`.
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    end = int(np.searchsorted(offsets[:, 0], stop, side="left"))
    return Span(first, end) if first < end else None


def _common_prefix(ids: np.ndarray, others: np.ndarray) -> int:
    """The length of the common prefix of two sequences of ids."""
    count = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:count] != others[:count])
    return int(differ[0]) if len(differ) else count


def _reach(offsets: np.ndarray, tokens: int) -> int:
    """The number of characters that the first `tokens` tokens cover."""
    return int(offsets[tokens - 1, 1]) if tokens else 0


def _describe_difference(first: str, second: str) -> str:
    """Describes where two texts first differ, with an excerpt of each."""
    start = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    before = first[max(0, start - _SHOWN) : start]
    return (
        f"after {before!r} it continues with {first[start : start + _SHOWN]!r}, the whole conversation with "
        f"{second[start : start + _SHOWN]!r}"
    )
