"""The text of a choice as it grows, and where it ends: stop ids, stop strings, `max_tokens`.

Stop strings are found in text, wherever tokens cut it. Text that may be the beginning of a stop string is held back
until it is one or is not, so nothing that has been given is ever taken back. Of several stop strings the one that is
complete first counts, and of those that end together the longest: what is found does not depend on how the text comes
in pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from levanter.data.tokenizer import TextStream
from levanter.inference.requests import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """What one token does to the text.

    Attributes:
        text: what may be given now.
        reason: why the text has ended; None while it goes on.
        matched: the stop string or the id that ended it.
    """

    text: str
    reason: FinishReason | None = None
    matched: str | int | None = None


class StopStrings:
    """Finds the first of several strings in text that comes in pieces.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be given of the text so far, and the stop string that has been found; nothing comes after one."""
        self._held += text
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None
        )
        if found is not None:
            _, at, stop = found
            given, self._held = self._held[:at], ""
            return given, stop
        keep = self._beginning()
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given, None

    def finish(self) -> str:
        """What was held back: no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        best = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), best, -1):
                if self._held.endswith(stop[:length]):
                    best = length
                    break
        return best


class ChoiceText:
    """The text of one choice.

    Args:
        stream: makes text of its ids.
        stops: stop strings.
        stop_ids: ids that end it; their text is no part of it.
        limit: tokens that it may have.
        min_tokens: tokens before which neither ends it; stop strings are looked for behind their text.
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
    def of(request: Request, stream: TextStream, *, limit: int) -> "ChoiceText":
        """The text of a request's choice, which may have `limit` tokens."""
        return ChoiceText(
            stream,
            stops=request.params.stop,
            stop_ids=request.stop_ids,
            limit=limit,
            min_tokens=request.params.min_tokens,
        )

    @property
    def tokens(self) -> int:
        """How many tokens have come, one that ended the text included."""
        return self._count

    @property
    def reason(self) -> FinishReason | None:
        """Why the text has ended; None while it goes on."""
        return self._reason

    def push(self, id: int) -> TextPiece:
        """What one more token does. Tokens behind the end do nothing: a device that runs ahead may have made some."""
        if self._reason is not None:
            return TextPiece(text="", reason=self._reason)
        self._count += 1
        if self._count > self._min_tokens and id in self._stop_ids:
            return self._end("stop", id)
        text = self._stream.push(id)
        if self._count <= self._min_tokens:
            given, stop = text, None
        else:
            given, stop = self._stops.push(text)
        if stop is not None:
            self._reason = "stop"
            return TextPiece(text=given, reason="stop", matched=stop)
        if self._count >= self._limit:
            last = self._end("length", None)
            return TextPiece(text=given + last.text, reason=last.reason, matched=last.matched)
        return TextPiece(text=given)

    def cancel(self) -> TextPiece:
        """Ends the text where it is; what was held back is given."""
        return TextPiece(text="", reason=self._reason) if self._reason is not None else self._end("cancelled", None)

    def _end(self, reason: FinishReason, matched: int | None) -> TextPiece:
        """The end, with what was held back: of a cut character, and of what might have been a stop string."""
        given, stop = self._stops.push(self._stream.finish())
        if stop is not None:
            self._reason = "stop"
            return TextPiece(text=given, reason="stop", matched=stop)
        self._reason = reason
        return TextPiece(text=given + self._stops.finish(), reason=reason, matched=matched)
