"""`Delivery`: what the engine's thread has for who asked."""

from dataclasses import dataclass
from typing import TypeAlias

from levanter.inference.prompt_logprobs import PromptScores
from levanter.inference.requests import ChoiceId, FinishReason, Token


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """A choice has one more token, or has ended.

    Attributes:
        of: the choice.
        text: what may be shown now; nothing where the text may still change.
        token: the token; None where the choice ended without one.
        reason: why it has ended; None while it goes on.
        matched: the stop string or the id that ended it.
        error: why it cannot go on; None where it can.
        at: when, by `time.monotonic`.
    """

    of: ChoiceId
    text: str = ""
    token: Token | None = None
    reason: FinishReason | None = None
    matched: str | int | None = None
    error: str | None = None
    at: float

    @property
    def last(self) -> bool:
        """Whether no more comes of its choice."""
        return self.reason is not None or self.error is not None

    @property
    def size(self) -> int:
        """About how many bytes it takes while it waits for its client."""
        likeliest = 0 if self.token is None else len(self.token.top)
        return 200 + len(self.text) * 4 + 60 * likeliest


@dataclass(frozen=True, kw_only=True)
class PromptScored:
    """A prompt was scored.

    Attributes:
        request: whose it is.
        scores: how likely its tokens were.
        error: why that is not known.
        at: when.
    """

    request: str
    scores: PromptScores | None = None
    error: str | None = None
    at: float

    @property
    def size(self) -> int:
        """About how many bytes it takes while it waits for its client."""
        return 0


Delivery: TypeAlias = TokenDelta | PromptScored
