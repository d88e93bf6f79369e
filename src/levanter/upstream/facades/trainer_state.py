"""The state of a script's training with upstream's names, and the step that hooks see.

    state = TrainerState.init(optax.adam(1e-3), model, key=key, is_trainable=trained)
    state, updates = state.take_step(gradients)

`levanter.upstream.facades.training.Trainer` makes states itself; `levanter.trainer.train_state` is a run's.
"""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp

from haliax_ext.pytree import PyTree, is_named
from levanter.optim.transforms import updated
from levanter.trainer.averaging import ParameterAverage


def trained_part(model: PyTree, is_trainable: PyTree) -> PyTree:
    """The parameters that a filter selects: true, or a tree of booleans like the model or a prefix of it."""
    parameters = eqx.filter(model, eqx.is_inexact_array)
    return without_empty(parameters if is_trainable is True else eqx.filter(parameters, is_trainable))


def is_leaf(x: object) -> bool:
    """Whether a node is a leaf of a tree that is compared with its parts: None, or a named array."""
    return x is None or is_named(x)


def without_empty(tree: PyTree) -> PyTree:
    """A tree with None in place of named arrays without an array, which equinox leaves where it filters."""
    return jax.tree.map(lambda x: None if is_named(x) and x.array is None else x, tree, is_leaf=is_leaf)


class TrainerState(eqx.Module):
    """The state of a training run.

    Attributes:
        step: steps taken.
        model: the whole model, parameters included.
        optimizer: the optax transformation; None if its owner has it.
        opt_state: the optimizer state.
        training_key: the random key of later steps.
        is_trainable: which parameters are trained, see `trained_part`.
        mp: the precision policy.
        model_averaging: the average of the parameters (`trainer.model_averaging`); None for none.
    """

    step: PyTree = eqx.field(converter=lambda step: jnp.asarray(step, jnp.int32) if isinstance(step, int) else step)
    model: PyTree
    optimizer: PyTree = eqx.field(static=True)
    opt_state: PyTree
    training_key: PyTree
    is_trainable: PyTree = eqx.field(static=True, default=True)
    mp: PyTree = eqx.field(static=True, default=None)
    model_averaging: ParameterAverage | None = None

    @classmethod
    def init(
        cls,
        optimizer: PyTree,
        model: PyTree,
        *,
        key: PyTree,
        is_trainable: PyTree = True,
        mp: PyTree = None,
        model_averaging: PyTree = None,
    ) -> "TrainerState":
        """The state before the first step.

        Raises:
            ValueError: an average is requested, which `trainer.model_averaging` maintains.
        """
        if model_averaging is not None:
            raise ValueError("TrainerState.init: model_averaging belongs to the trainer: trainer.model_averaging")
        opt_state = optimizer.init(trained_part(model, is_trainable))
        return cls(0, model, optimizer, opt_state, key, is_trainable=is_trainable, mp=mp)

    @property
    def int_step(self) -> int:
        """The number of steps taken, as an int."""
        return int(self.step)

    @property
    def trainable_model(self) -> PyTree:
        """The trained parameters; None in place of everything else."""
        return trained_part(self.model, self.is_trainable)

    @property
    def eval_model(self) -> PyTree:
        """The model that is evaluated: the averaged parameters if there are any."""
        return self.model if self.model_averaging is None else eqx.combine(self.model_averaging.parameters, self.model)

    @property
    def saveable_state(self) -> "TrainerState":
        """The part of the state that a checkpoint holds."""
        return dataclasses.replace(self, model=self.trainable_model)

    def take_step(self, grads: PyTree, *, loss: PyTree = None, key: PyTree = None, **more: PyTree) -> PyTree:
        """The state after one update of the trained parameters, and the update.

        Args:
            grads: gradients of the trained parameters.
            loss: passed on to an optimizer that asks for it.
            key: the random key of later steps; None leaves it.
            more: passed on to the optimizer.
        """
        trained = self.trainable_model
        extra = more if loss is None else {"loss": loss, **more}
        updates, opt_state = updated(self.optimizer, grads, self.opt_state, trained, **extra)
        model = eqx.apply_updates(self.model, updates)
        training_key = self.training_key if key is None else key
        after = dataclasses.replace(
            self, step=self.step + 1, model=model, opt_state=opt_state, training_key=training_key
        )
        return after, updates


@dataclass(frozen=True)
class StepInfo:
    """The step that was just taken.

    Attributes:
        state: the state after it.
        loss: its loss.
        step_duration: seconds it took.
    """

    state: TrainerState
    loss: float
    step_duration: float

    @property
    def step(self) -> int:
        """The number of the step, from 0."""
        # The state counts steps taken; the first step has number 0.
        return int(self.state.step) - 1

    @property
    def next_step(self) -> int:
        """The number of the next step."""
        return int(self.state.step)

    @property
    def model(self) -> PyTree:
        """The model after it."""
        return self.state.model

    @property
    def opt_state(self) -> PyTree:
        """The optimizer state after it."""
        return self.state.opt_state

    @property
    def eval_model(self) -> PyTree:
        """The model to evaluate."""
        return self.state.eval_model
