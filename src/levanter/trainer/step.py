"""The train step: one pure function, one Program.

Loss and gradients of each microbatch, added up in float32 by a scan; the gradient's norm; the optimizer; the update.
The loss of a step is the weighted mean over its whole batch, whatever the number of microbatches: the weights are
added up first, and each microbatch contributes its sum over that total. Gradients lie where their parameters lie.

Microbatches take every n-th row of the batch, so each device finds its rows of every microbatch in its own memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haliax_ext.abstract import map_arrays
from haliax_ext.mapping import Mappings
from haliax_ext.planner import ShardingPlan
from haliax_ext.program import Input, Program
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.optim.schedules import Schedule
from levanter.trainer.loss import LmBatch, in_compute_dtype, loss_sum
from levanter.trainer.state import StatePlan, TrainState, at_output

TINY = 1e-9


class StepMetrics(eqx.Module):
    """What a step reports; float32 scalars.

    Attributes:
        loss: nats a token, the weighted mean over the batch.
        weight: sum of the weights.
        grad_norm: global norm of the gradient, before it is clipped.
        update_norm: global norm of what was added to the parameters.
        parameter_norm: global norm of the parameters before the step.
        learning_rate: of this step.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    update_norm: jax.Array
    parameter_norm: jax.Array
    learning_rate: jax.Array


@dataclass(frozen=True, kw_only=True)
class StepRecipe:
    """What a train step is made of.

    Attributes:
        optimizer: from gradients to updates.
        schedule: the learning rate, to report it.
        precision: in which dtype one computes.
        accumulation: microbatches of a step.
        parameters: where the parameters lie, by their paths in the model; None pins nothing.
        chunk: positions scored at a time; None for the model's own.
    """

    optimizer: optax.GradientTransformation
    schedule: Schedule
    precision: Precision
    accumulation: int = 1
    parameters: ShardingPlan | None = None
    chunk: int | None = None


def train_step(recipe: StepRecipe, state: TrainState, batch: LmBatch) -> tuple[TrainState, StepMetrics]:
    """Takes one step.

    Args:
        recipe: static.
        state: is consumed where the Program donates it.
        batch: `[batch, position]`.
    """
    weight = hax.sum(batch.counts()).scalar()
    loss, grads = loss_and_gradients(recipe, state.model, batch, 1 / jnp.maximum(weight, TINY))
    with jax.named_scope("optimizer"):
        return _updated(recipe, state, loss, grads, weight)


def _updated(
    recipe: StepRecipe, state: TrainState, loss: jax.Array, grads: LmHeadModel, weight: jax.Array
) -> tuple[TrainState, StepMetrics]:
    updates, optimizer = recipe.optimizer.update(grads, state.optimizer, state.model)  # pyright: ignore
    key, _ = jax.random.split(state.key)
    metrics = StepMetrics(
        loss=loss,
        weight=weight,
        grad_norm=global_norm(grads),
        update_norm=global_norm(updates),
        parameter_norm=global_norm(state.model),
        learning_rate=jnp.asarray(recipe.schedule(state.step), jnp.float32),
    )
    model = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.model, updates)
    return TrainState(step=state.step + 1, model=model, optimizer=optimizer, key=key), metrics


def loss_and_gradients(
    recipe: StepRecipe, model: LmHeadModel, batch: LmBatch, scale: jax.Array
) -> tuple[jax.Array, LmHeadModel]:
    """`scale` × the sum of −log p over the batch, and its gradient in float32, in the parameters' shards."""

    def of_part(part: LmBatch) -> tuple[jax.Array, LmHeadModel]:
        def objective(parameters: LmHeadModel) -> jax.Array:
            usable = in_compute_dtype(parameters, recipe.precision.compute, recipe.parameters)
            return loss_sum(usable, part, chunk=recipe.chunk) * scale

        loss, grads = jax.value_and_grad(objective)(model)
        return loss, _pinned(_wide(grads), recipe.parameters)

    if recipe.accumulation == 1:
        return of_part(batch)
    (Batch,) = [axis for axis in batch.tokens.axes if axis.name != "position"]
    Micro = hax.Axis("microbatch", recipe.accumulation)
    Rows = Batch.resize(Batch.size // recipe.accumulation)

    def add(carry: tuple[jax.Array, Any], part: LmBatch) -> tuple[jax.Array, Any]:
        loss, grads = of_part(jax.tree.map(_sharded, part, is_leaf=_is_named))
        total = jax.tree.map(jnp.add, carry[1], grads)
        return carry[0] + loss, _pinned(total, recipe.parameters)

    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), model)
    parts = jax.tree.map(lambda x: x.unflatten_axis(Batch, (Rows, Micro)), batch, is_leaf=_is_named)
    start = (jnp.float32(0), _pinned(nothing, recipe.parameters))
    return hax.fold(add, Micro)(start, parts)


def _is_named(x: Any) -> bool:
    return isinstance(x, hax.NamedArray)


def _sharded(x: hax.NamedArray) -> hax.NamedArray:
    return hax.auto_sharded(x)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _pinned(tree: Any, plan: ShardingPlan | None) -> Any:
    """A tree of the parameters' structure, in their shards."""
    if plan is None:
        return tree
    return map_arrays(lambda leaf, x: jax.lax.with_sharding_constraint(x, plan.spec(leaf.path)), tree)


def global_norm(tree: Any) -> jax.Array:
    """The root of the sum of squares of everything in `tree`, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def step_program(
    recipe: StepRecipe,
    *,
    state: TrainState,
    plan: StatePlan,
    batch: LmBatch,
    mappings: Mappings,
    name: str = "train_step",
    compiler_options: Mapping[str, str] | None = None,
) -> Program:
    """The Program of a train step: (state, batch) → (state, metrics).

    Args:
        recipe: what the step is made of.
        state: abstract.
        plan: where the state lies, before and after.
        batch: abstract.
        mappings: in scope while tracing.
        name: how listings call it.
        compiler_options: see `Program`.
    """

    def step(state: TrainState, batch: LmBatch) -> tuple[TrainState, StepMetrics]:
        return train_step(recipe, state, batch)

    metrics = {name: np.dtype(np.float32) for name in StepMetrics.__dataclass_fields__}
    return Program(
        name=name,
        function=step,
        inputs=(
            Input(name="state", value=state, placement=plan.whole),
            Input(name="batch", value=batch, placement=mappings.compute),
        ),
        mappings=mappings,
        out_placement=at_output(plan.whole, 0, **metrics),
        donate=("state",),
        matmul_precision=recipe.precision.matmul,
        compiler_options=compiler_options or {},
    )
