"""`TrainState`: the value that a training step takes and returns, and the names of its parts.

The plan of any run asks whether a Program trains. So this module imports nothing else of the trainer.
"""

from typing import TYPE_CHECKING

import equinox as eqx
import jax

from haliax_ext.pytree import PyTree

if TYPE_CHECKING:
    from levanter.models.base import LmHeadModel
    from levanter.trainer.averaging import ParameterAverage

MODEL, OPTIMIZER, FROZEN, AVERAGE = "model", "optimizer", "frozen", "average"
"""Names of a state's parts, and of what is frozen beside it, in paths of leaves."""

REFERENCE = "reference"
"""The input of a training Program that holds the model that preferences are compared with."""

GRADIENT_BYTES = 4
"""Gradients are float32."""


class TrainState(eqx.Module):
    """A training run between two steps.

    Attributes:
        step: steps taken, int32.
        model: the trained parameters, in their storage dtype; None in place of frozen ones.
        optimizer: the optimizer's statistics.
        key: the random key of the next steps, `uint32[2]`.
        average: an average of the parameters over the steps (`trainer.averaging`); None for none.
    """

    step: jax.Array
    model: "LmHeadModel"
    optimizer: PyTree
    key: jax.Array
    average: "ParameterAverage | None" = None

    @property
    def eval_params(self) -> "LmHeadModel":
        """The parameters that are evaluated and exported: the average if the state has one."""
        return self.model if self.average is None else self.average.parameters
