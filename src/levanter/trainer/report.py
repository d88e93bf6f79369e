"""`StepReport`: the numbers of a step on the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from levanter.trainer.watch import Watched


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The numbers of a step on the host.

    Attributes:
        step: its number, from 0.
        loss: the objective's first term; nats per token for language modeling.
        weight: the objective's normalizer; the sum of the loss weights for language modeling.
        grad_norm: of the full gradient, before clipping.
        update_norm: of the update of the parameters.
        parameter_norm: before the step.
        learning_rate: of the step.
        seconds: since the numbers of the previous step, without pauses; for the first step, with compilation.
        waited: the part of `seconds` in which the loop waited for its batch.
        terms: the objective's other terms, by name.
        skipped: whether the step left the state unchanged.
        watched: watched arrays on the host; None if the step was not watched.
        paused: seconds of pauses between the previous step and this one.
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
        """The number of steps taken after this one."""
        return self.step + 1
