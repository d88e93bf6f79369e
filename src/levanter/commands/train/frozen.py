"""What a training run freezes: how its plan says it, and how its checkpoints name it."""

import math

from levanter.run import Check
from levanter.trainer.config import TrainerConfig
from levanter.trainer.frozen import FrozenPart
from levanter.trainer.state import StatePlan


def frozen_part(trainer: TrainerConfig, plan: StatePlan, *, begun_from: str | None) -> FrozenPart | None:
    """How checkpoints of a run name what it does not train, digests apart; None where it trains everything.

    Args:
        trainer: of the run.
        plan: where its parameters lie.
        begun_from: the weights that the run begins with; None where they are made.
    """
    if not plan.frozen:
        return None
    assert trainer.trainable is not None
    return FrozenPart(
        patterns=trainer.trainable,
        origin=f"trainer.seed {trainer.seed}" if begun_from is None else begun_from,
        digests=dict.fromkeys(sorted(plan.frozen), ""),
    )


def partition_notes(plan: StatePlan) -> list[Check]:
    """How much of the model is trained, where it is not all of it."""
    if not plan.frozen:
        return []
    sizes = {each.leaf.path: math.prod(each.leaf.shape) for each in plan.parameters.leaves}
    trained = {path: size for path, size in sizes.items() if path not in plan.frozen}
    share = sum(trained.values()) / sum(sizes.values())
    message = (
        f"{len(trained)} of {len(sizes)} arrays are trained, {sum(trained.values()):,} of {sum(sizes.values()):,} "
        f"numbers ({share:.2%}); the others have no gradient and no statistics, and are in no checkpoint"
    )
    return [Check(name="trainable", status="ok", message=message)]
