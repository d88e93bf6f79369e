"""An average of the parameters over the steps, which is evaluated and exported instead of the parameters.

    trainer.model_averaging: {type: ema, beta: 0.999}

    ema              a ← beta · a + (1 − beta) · θ after each step, starting from the initial parameters
    ema_decay_sqrt   the mean of θ over all steps, each with a weight w(t) (t steps taken before it):
                     1 − beta before `switch_step`, then 1 − √x, where x is the fraction of `decay_steps` that has
                     passed, and 0 afterwards (Hägele et al., arXiv:2405.18392, whose learning rate decays like this)

Training does not depend on the average: losses with and without it are equal to the bit. It is part of the state, of
checkpoints (`average.…`) and of every plan. A skipped step leaves it unchanged.
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
"""Bytes per element of the average: in 16 bits, `1 − beta` of a difference is rounded away, and the average never
changes."""


class ParameterAverage(eqx.Module):
    """The average between two steps.

    Attributes:
        parameters: with the structure, shards and dtype of the model.
        weight: the sum of the weights so far, float32; None if the rule needs none.
    """

    parameters: PyTree
    weight: jax.Array | None


def check_averaging(rule: ModelAveragingConfig | None, precision: Precision) -> None:
    """Refuses an average whose updates would be rounded away.

    Raises:
        ValueError: the parameters are stored in 16 bits.
    """
    if rule is not None and jnp.dtype(precision.params).itemsize < LEAST_BYTES:
        raise ValueError(
            f"trainer.model_averaging: the average is kept in the parameters' dtype, and {precision.params} rounds its "
            "steps away; trainer.mp: p=f32,c=bfloat16 keeps parameters in float32"
        )


def begin(rule: ModelAveragingConfig | None, model: PyTree) -> ParameterAverage | None:
    """The average before the first step: the parameters themselves; None without a rule."""
    if rule is None:
        return None
    weight = jnp.zeros((), jnp.float32) if isinstance(rule, EmaDecaySqrtConfig) else None
    # A copy: the step donates parameters and average as separate buffers.
    return ParameterAverage(parameters=jax.tree.map(jnp.copy, model), weight=weight)


def averaged(rule: ModelAveragingConfig, before: ParameterAverage, model: PyTree, step: jax.Array) -> ParameterAverage:
    """The average after one more step.

    Args:
        rule: the kind of average.
        before: the average so far.
        model: the parameters after the step.
        step: steps taken before it, int32.
    """
    share, weight = _share(rule, before, step)

    def mixed(old: jax.Array, new: jax.Array) -> jax.Array:
        # As a correction of `old`: with share 0 the average is unchanged to the bit.
        return old + share.astype(old.dtype) * (new - old)

    return ParameterAverage(parameters=jax.tree.map(mixed, before.parameters, model), weight=weight)


def _share(rule: ModelAveragingConfig, before: ParameterAverage, step: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The newest parameters' share of the new average, and the new sum of weights."""
    if isinstance(rule, EmaModelAveragingConfig):
        return jnp.float32(1 - rule.beta), None
    assert isinstance(rule, EmaDecaySqrtConfig), type(rule)
    # The rule is static, and `begin` gave this rule a sum of weights.
    assert before.weight is not None, "an average of weights remembers their sum"
    passed = (step - rule.switch_step).astype(jnp.float32) / jnp.float32(rule.decay_steps)
    falling = 1 - jnp.sqrt(jnp.clip(passed, 0.0, 1.0))
    weight = jnp.where(step < rule.switch_step, jnp.float32(1 - rule.beta), falling)
    # A weighted mean as a running one: aₜ = aₜ₋₁ + wₜ / (w₁ + … + wₜ) · (θₜ − aₜ₋₁); with beta = 1 the sum may be 0.
    total = before.weight + weight
    return jnp.where(total > 0, weight / jnp.maximum(total, jnp.finfo(jnp.float32).tiny), 0.0), total
