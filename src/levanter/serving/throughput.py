"""How fast an engine is, and how long what waits will take: what `Retry-After` is made of."""

from dataclasses import dataclass, replace

WEIGHT = 0.1
"""Of the last call in what a call takes of late."""


@dataclass(frozen=True, kw_only=True)
class EnginePace:
    """What calls take of late; 0 where there was none yet.

    Attributes:
        token_seconds: in which every row that runs gets its next tokens.
        prompt_seconds: in which one token of a prompt is computed.
    """

    token_seconds: float = 0.0
    prompt_seconds: float = 0.0

    def after(self, seconds: float, *, rows: int, prompt_tokens: int) -> "EnginePace":
        """The pace after another step.

        Args:
            seconds: that it took.
            rows: that got tokens.
            prompt_tokens: that were computed.
        """
        if rows and not prompt_tokens:
            return replace(self, token_seconds=_mixed(self.token_seconds, seconds))
        if prompt_tokens:
            # What decodes beside a prompt takes what it takes without.
            own = max(0.0, seconds - (self.token_seconds if rows else 0.0))
            return replace(self, prompt_seconds=_mixed(self.prompt_seconds, own / prompt_tokens))
        return self

    def drained_in(self, *, rows: int, left: int, prompt_tokens: int) -> float:
        """Seconds until all that is known is done, if every row runs all the time.

        Args:
            rows: that there are.
            left: tokens that running and waiting choices may still get.
            prompt_tokens: of the prompts that wait.
        """
        return left / rows * self.token_seconds + prompt_tokens * self.prompt_seconds


def _mixed(before: float, now: float) -> float:
    return now if not before else (1 - WEIGHT) * before + WEIGHT * now
