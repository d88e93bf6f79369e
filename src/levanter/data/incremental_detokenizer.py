"""`WindowStream`: text from ids that come one at a time, by decoding a short window of them repeatedly.

Single tokens cannot be decoded on their own: a character may be cut into several tokens, and the first token of a text
may lose a space that it has elsewhere. So the window begins with ids that were given before, and the new text is what
the text of the window has in addition. A text that continues a prompt has the prompt's last ids as such context.

Text is given only when no later id can change it. The replacement character at the end of a text may be the first bytes
of a character. Where a vocabulary has tokens for single bytes, a run of them is text as a whole or not at all (that is
how `tokenizers` decodes: one wrong byte makes all of the run replacement characters), so a run is given at its end.
`tokenizers.DecodeStream` gives such a run character by character, and fails when a later byte takes it back.
"""

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not (yet) a character."""


_CONTEXT_IDS = 32
"""Ids of a prompt that are decoded with a text: more than any character or rule of a decoder spans."""


class WindowStream:
    """Implements `TextStream` over a function that decodes several ids together.

    Args:
        decode: from ids to their text.
        skipped: ids that have no text.
        byte_ids: ids of single bytes, which are text only together with those around them.
        context: ids before the text, which it continues; empty where the text begins.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        skipped: Collection[int] = (),
        byte_ids: Collection[int] = (),
        context: Sequence[int] = (),
    ):
        self._decode = decode
        self._skipped, self._byte_ids = skipped, byte_ids
        self._window = self._last_ids(context)
        self._context = len(self._window)
        """The number of ids at the beginning of the window whose text was given before: they only give context."""
        # A character that the context begins belongs to the text, which completes it.
        self._emitted = decode(self._window).rstrip(REPLACEMENT) if self._window else ""
        """The part of the window's text that has been given."""

    def _last_ids(self, context: Sequence[int]) -> list[int]:
        """The last ids of the context, which does not begin within a run of bytes."""
        ids = [i for i in context if i not in self._skipped]
        first = max(0, len(ids) - _CONTEXT_IDS)
        while first > 0 and ids[first] in self._byte_ids:
            first -= 1
        return ids[first:]

    def push(self, id: int) -> str:
        """The text that one more id completes; nothing where a later one may still change it."""
        # Special tokens have no text, and within a window they would change how their neighbours are decoded.
        if id in self._skipped:
            return ""
        self._window.append(id)
        # A byte is kept until an id that is no byte follows: only then is the run's text final.
        if id in self._byte_ids:
            return ""
        text = self._decode(self._window)
        # A replacement character at the end may still become a character when the next bytes come.
        settled = text.removesuffix(REPLACEMENT)
        # No new text, or the decoder has rewritten text that was given (which cannot be taken back): wait for more ids.
        if len(settled) <= len(self._emitted) or not settled.startswith(self._emitted):
            return ""
        new = settled[len(self._emitted) :]
        self._emitted = settled
        if settled == text:
            # A clean end: the next window begins with what has just been given.
            # The window stays short: it holds the ids of this step and those of the step before, however long the text
            # is.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = self._decode(self._window)
        return new

    def finish(self) -> str:
        """The rest of the text: call it after the last id."""
        text = self._decode(self._window)
        # At the end of the text an incomplete character stays a replacement character, as when all ids are decoded
        # together.
        rest = text[len(self._emitted) :] if text.startswith(self._emitted) else ""
        self._window, self._context, self._emitted = [], 0, ""
        return rest
