"""Which formula is minimized of a pair; what they say is in `trainer.preference`."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from levanter.config.validators import NonNegativeFloat, Range, Ranged

Smoothing: TypeAlias = Annotated[float, Range(0, 0.5, below=True)]
Kind = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo"]
SMOOTHED = ("sigmoid", "robust")
REFERENCE_FREE = ("simpo", "orpo")
PER_TOKEN = ("ipo", "simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig(Ranged):
    """What is minimized of a pair (`train_dpo.loss`).

    Attributes:
        type: the formula; see `levanter.trainer.dpo`.
        label_smoothing: the fraction ε of pairs that are assumed to be mislabelled; for `sigmoid` and `robust`.
        gamma: the margin of `simpo`; null for 0.5.
        length_normalized: whether log-probabilities are means over the counted tokens instead of sums; null for the
            type's own convention: means for `ipo`, `simpo` and `orpo`, sums for the others.
    """

    type: Kind = "sigmoid"
    label_smoothing: Smoothing = 0.0
    gamma: NonNegativeFloat | None = None
    length_normalized: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.label_smoothing and self.type not in SMOOTHED:
            problems.append(
                f"label_smoothing: {self.label_smoothing:g}, but {self.type} has none; {' and '.join(SMOOTHED)} have"
            )
        if self.gamma is not None and self.type != "simpo":
            problems.append(f"gamma: {self.gamma:g}, but {self.type} has no margin; simpo has")
        if self.type in REFERENCE_FREE and self.length_normalized is False:
            problems.append(f"length_normalized: false, but {self.type} is made of means over tokens; leave it out")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is part of it."""
        return self.type not in REFERENCE_FREE

    @property
    def per_token(self) -> bool:
        """Whether log-probabilities are means over tokens."""
        return self.type in PER_TOKEN if self.length_normalized is None else self.length_normalized

    def at_start(self, beta: float) -> float | None:
        """Its value where policy and reference are one model; None where that does not follow."""
        return {"sigmoid": math.log(2), "robust": math.log(2), "ipo": 1 / (4 * beta**2), "hinge": 1.0}.get(self.type)
