"""`StepReport`: what is known of a step once its numbers are on the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from levanter.trainer.watch import Watched


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What is known of a step once its numbers are fetched.

    Attributes:
        step: its number, from 0.
        loss: the objective's first term; nats per token, where language is modeled.
        weight: the objective's normalizer; the sum of the loss weights, where language is modeled.
        grad_norm: of the full gradient, before clipping.
        update_norm: of what was added to the parameters.
        parameter_norm: before the step.
        learning_rate: of the step.
        seconds: since the numbers of the step before, pauses left out; of the first, compilation included.
        waited: seconds of them that the loop waited for its batch.
        terms: the objective's other terms, by name.
        skipped: whether the step was left out: the state behind it is the one before it.
        watched: arrays on the host, where the step was watched.
        paused: seconds of pauses between the step before and this one.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    update_norm: float
    parameter_norm: float
    learning_rate: float
    seconds: float
    waited: float
    terms: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    watched: Watched | None = None
    paused: float = 0.0

    @property
    def taken(self) -> int:
        """Steps taken when this one was done."""
        return self.step + 1
