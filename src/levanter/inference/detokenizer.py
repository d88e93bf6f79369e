"""The text of a choice while its tokens arrive, and its end: stop ids, stop strings, `max_tokens`.

Stop strings are searched in the text, independent of token boundaries. Text that may be the beginning of a stop string
is kept back until that is known, so that sent text is never retracted. Of several stop strings the one that is complete
first counts, and of those that end together the longest: the result does not depend on how the text is cut into pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from levanter.data.tokenizer import TextStream
from levanter.inference.requests import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """The text that one token adds.

    Attributes:
        text: text that can be sent now.
        reason: why the text has ended; None while it goes on.
        matched: the stop string or the id that ended it.
    """

    text: str
    reason: FinishReason | None = None
    matched: str | int | None = None


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._pending = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be sent, and the stop string that was found, if any; nothing follows it."""
        self._pending += text
        # The smallest end wins, and of equal ends the earliest start, which is the longest stop string.
        match = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=None
        )
        # Text after the stop string is dropped: it was sampled before the end was known.
        if match is not None:
            _, at, stop = match
            ready, self._pending = self._pending[:at], ""
            return ready, stop
        # The kept-back suffix is shorter than the longest stop string.
        keep = self._beginning()
        ready, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return ready, None

    def finish(self) -> str:
        """The text that was kept back, at the end of the text."""
        rest, self._pending = self._pending, ""
        return rest

    def _beginning(self) -> int:
        """The length of the longest suffix of the text that is a prefix of a stop string."""
        best = 0
        for stop in self._stops:
            # From the longest possible suffix down to one longer than the best so far.
            for length in range(min(len(stop) - 1, len(self._pending)), best, -1):
                if self._pending.endswith(stop[:length]):
                    best = length
                    break
        return best


class ChoiceText:
    """The text of one choice.

    Args:
        stream: detokenizes its ids.
        stops: stop strings.
        stop_ids: ids that end it; their text is not part of it.
        limit: maximum number of tokens.
        min_tokens: number of tokens before which neither ends it; stop strings are searched after their text.
    """

    def __init__(
        self, stream: TextStream, *, stops: Sequence[str], stop_ids: Sequence[int], limit: int, min_tokens: int = 0
    ):
        self._stream = stream
        self._stops = StopStrings(stops)
        self._stop_ids = frozenset(stop_ids)
        self._limit, self._min_tokens = limit, min_tokens
        self._count = 0
        self._reason: FinishReason | None = None

    @staticmethod
    def for_request(request: Request, stream: Callable[[Sequence[int]], TextStream], *, limit: int) -> "ChoiceText":
        """The text of a request's choice, which may have `limit` tokens; `stream` makes a stream after some ids."""
        return ChoiceText(
            stream(request.continued),
            stops=request.params.stop,
            stop_ids=request.stop_ids,
            limit=limit,
            min_tokens=request.params.min_tokens,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens so far, including one that ended the text."""
        return self._count

    @property
    def reason(self) -> FinishReason | None:
        """Why the text has ended; None while it goes on."""
        return self._reason

    def push(self, id: int) -> TextPiece:
        """Adds a token. Tokens after the end are ignored: the device runs ahead and may have sampled some."""
        if self._reason is not None:
            return TextPiece(text="", reason=self._reason)
        self._count += 1
        # A stop id has no text, or text that is not part of the response.
        if self._count > self._min_tokens and id in self._stop_ids:
            return self._end("stop", id)
        text = self._stream.push(id)
        if self._count <= self._min_tokens:
            # `min_tokens` is not reached: the text goes out at once, and a later stop string cannot begin in it.
            ready, stop = text, None
        else:
            ready, stop = self._stops.push(text)
        if stop is not None:
            self._reason = "stop"
            return TextPiece(text=ready, reason="stop", matched=stop)
        if self._count >= self._limit:
            # The text ends here, so an incomplete character or a possible stop string is not kept back any longer.
            last = self._end("length", None)
            return TextPiece(text=ready + last.text, reason=last.reason, matched=last.matched)
        return TextPiece(text=ready)

    def cancel(self) -> TextPiece:
        """Ends the text here, with the text that was kept back."""
        return TextPiece(text="", reason=self._reason) if self._reason is not None else self._end("cancelled", None)

    def _end(self, reason: FinishReason, matched: int | None) -> TextPiece:
        """The end of the text, with what was kept back: an incomplete character, or a possible stop string."""
        # The rest of an incomplete character may still complete a stop string.
        ready, stop = self._stops.push(self._stream.finish())
        if stop is not None:
            self._reason = "stop"
            return TextPiece(text=ready, reason="stop", matched=stop)
        self._reason = reason
        return TextPiece(text=ready + self._stops.finish(), reason=reason, matched=matched)
