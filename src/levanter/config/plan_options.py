"""The block `plan:`, which every command's configuration has."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a config tells planning that a run would find out by itself: the block `plan:`.

    Attributes:
        assume_tokens: tokens to score where the text is not at hand.
    """

    assume_tokens: int | None = None

    def __post_init__(self):
        if self.assume_tokens is not None and self.assume_tokens < 1:
            raise ValueError(f"plan.assume_tokens must be positive, got {self.assume_tokens}")
