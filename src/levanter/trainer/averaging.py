"""An average of the parameters over the steps, kept beside them: what is evaluated and exported in their place.

    trainer.model_averaging: {type: ema, beta: 0.999}

    ema              a ← beta · a + (1 − beta) · θ after each step, beginning with the first parameters
    ema_decay_sqrt   the mean of θ over all steps, each with a weight w(t) (t steps taken before it):
                     1 − beta up to `switch_step`, then 1 − √x where x is the part of `decay_steps` that has passed,
                     and 0 behind it: Hägele et al., arXiv:2405.18392, whose learning rate falls like this

Training itself does not look at it: with and without it, losses are the same to the bit. It is part of the state, in
checkpoints (`average.…`) and in every plan; a step that is left out leaves it as it was.
"""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from haliax_ext.pytree import PyTree
from levanter.models.precision import Precision
from levanter.trainer.config_blocks import EmaDecaySqrtConfig, EmaModelAveragingConfig, ModelAveragingConfig

M = TypeVar("M")

LEAST_BYTES = 4
"""Of a number of the average: in 16 bits `1 − beta` of a difference is lost to rounding, and it would never move."""


class ParameterAverage(eqx.Module):
    """The average between two steps.

    Attributes:
        parameters: of the model's structure, shards and dtype.
        weight: the sum of the weights so far, float32; None where there is none to remember.
    """

    parameters: PyTree
    weight: jax.Array | None


def check_averaging(rule: ModelAveragingConfig | None, precision: Precision) -> None:
    """Refuses an average whose steps would be lost to rounding.

    Raises:
        ValueError: the parameters are kept in 16 bits.
    """
    if rule is not None and jnp.dtype(precision.params).itemsize < LEAST_BYTES:
        raise ValueError(
            f"trainer.model_averaging: the average is kept in the parameters' dtype, and {precision.params} rounds its "
            "steps away; trainer.mp: p=f32,c=bfloat16 keeps parameters in float32"
        )


def begin(rule: ModelAveragingConfig | None, model: PyTree) -> ParameterAverage | None:
    """The average before the first step: the parameters themselves; None where there is none."""
    if rule is None:
        return None
    weight = jnp.zeros((), jnp.float32) if isinstance(rule, EmaDecaySqrtConfig) else None
    return ParameterAverage(parameters=jax.tree.map(jnp.copy, model), weight=weight)


def averaged(rule: ModelAveragingConfig, before: ParameterAverage, model: PyTree, step: jax.Array) -> ParameterAverage:
    """The average with the parameters behind one more step.

    Args:
        rule: which average.
        before: the average so far.
        model: the parameters behind the step.
        step: steps taken before it, int32.
    """
    share, weight = _share(rule, before, step)

    def mixed(old: jax.Array, new: jax.Array) -> jax.Array:
        return old + share.astype(old.dtype) * (new - old)

    return ParameterAverage(parameters=jax.tree.map(mixed, before.parameters, model), weight=weight)


def _share(rule: ModelAveragingConfig, before: ParameterAverage, step: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """What part of the new average the newest parameters are, and the sum of weights then."""
    if isinstance(rule, EmaModelAveragingConfig):
        return jnp.float32(1 - rule.beta), None
    assert isinstance(rule, EmaDecaySqrtConfig), type(rule)
    assert before.weight is not None, "an average of weights remembers their sum"
    passed = (step - rule.switch_step).astype(jnp.float32) / jnp.float32(rule.decay_steps)
    falling = 1 - jnp.sqrt(jnp.clip(passed, 0.0, 1.0))
    weight = jnp.where(step < rule.switch_step, jnp.float32(1 - rule.beta), falling)
    total = before.weight + weight
    return jnp.where(total > 0, weight / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), 0.0), total
