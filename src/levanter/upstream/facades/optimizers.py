"""Upstream's transformations around an optimizer: skipped steps and averages of the parameters.

    optimizer = SkipStepConfig().wrap(optax.adam(1e-3))
    updates, state = optimizer.update(gradients, state, parameters, loss=loss)

A run of `train_lm` does both in its step: `optimizer.skip_bad_steps`, `trainer.model_averaging`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from haliax_ext.pytree import PyTree
from levanter.optim.skip_steps import SkipStepConfig, skip_outliers
from levanter.optim.skip_steps import SkipStepState as SkipStepState
from levanter.trainer.averaging import ParameterAverage, averaged
from levanter.trainer.config_blocks import EmaDecaySqrtConfig, EmaModelAveragingConfig


def wrap(config: SkipStepConfig) -> Callable[[Any], Any]:
    """`config.wrap(optimizer)`: an optimizer that leaves outliers out; its `update` needs `loss=`."""
    return lambda optimizer: skip_outliers(config, optimizer)


class EmaModelAveraging(eqx.Module):
    """An exponential average of parameters: `average.update(model, step)`."""

    model: PyTree
    beta: float = eqx.field(static=True)

    @property
    def model_params(self) -> PyTree:
        """The averaged parameters."""
        return self.model

    def update(self, new_model: PyTree, step: PyTree) -> "EmaModelAveraging":
        """The average with one more step's parameters."""
        before = ParameterAverage(parameters=self.model, weight=None)
        after = averaged(EmaModelAveragingConfig(beta=self.beta), before, new_model, jnp.asarray(step))
        return EmaModelAveraging(after.parameters, self.beta)


class EmaDecaySqrtModelAveraging(eqx.Module):
    """The average of `trainer.model_averaging: {type: ema_decay_sqrt}`, by hand: `average.update(model, step)`.

    Attributes:
        model: the averaged parameters.
        beta, switch_step, decay_steps: see `levanter.trainer.averaging`.
        tot_weight: the sum of the weights so far.
    """

    model: PyTree
    beta: float = eqx.field(static=True)
    switch_step: int = eqx.field(static=True)
    decay_steps: int | None = eqx.field(static=True, default=None)
    tot_weight: PyTree = 0.0

    @property
    def model_params(self) -> PyTree:
        """The averaged parameters."""
        return self.model

    def update(self, new_model: PyTree, step: PyTree) -> "EmaDecaySqrtModelAveraging":
        """The average with one more step's parameters."""
        # Without a number of steps, the rule's default.
        steps = {} if self.decay_steps is None else {"decay_steps": self.decay_steps}
        rule = EmaDecaySqrtConfig(beta=self.beta, switch_step=self.switch_step, **steps)
        before = ParameterAverage(parameters=self.model, weight=jnp.asarray(self.tot_weight, jnp.float32))
        after = averaged(rule, before, new_model, jnp.asarray(step))
        return EmaDecaySqrtModelAveraging(after.parameters, self.beta, self.switch_step, self.decay_steps, after.weight)
