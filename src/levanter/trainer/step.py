"""The train step: one pure function, one Program.

Loss and gradients of each microbatch, added up in float32 by a scan; the gradient's norm; the optimizer; the update.
The loss of a step is the weighted mean over its whole batch, whatever the number of microbatches: the weights are
added up first, and each microbatch contributes its sum over that total. Gradients lie where their parameters lie.

Microbatches take every n-th row of the batch, so each device finds its rows of every microbatch in its own memory.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
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
from levanter.layers.outputs import Sums
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.optim.outliers import SkipStepConfig, is_outlier, recent_of, remembered, with_recent
from levanter.optim.schedules import Schedule
from levanter.trainer.loss import LmBatch, LossSums, in_compute_dtype, loss_sums
from levanter.trainer.state import StatePlan, TrainState, at_output
from levanter.trainer.watch import Watch, Watched

TINY = 1e-9


class StepMetrics(eqx.Module):
    """What a step reports; float32 scalars, but for what is watched.

    Attributes:
        loss: nats a token, the weighted mean over the batch.
        weight: sum of the weights.
        grad_norm: global norm of the gradient, before it is clipped.
        update_norm: global norm of what was added to the parameters.
        parameter_norm: global norm of the parameters before the step.
        learning_rate: of this step.
        z_loss: what z-loss adds to `loss`; None where there is none.
        auxiliary: what the model's auxiliary sums add, by name.
        skipped: 1 where the state stayed as it was, else 0; None where no step is ever left out.
        watched: see `trainer.watch`; None where nothing is.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    update_norm: jax.Array
    parameter_norm: jax.Array
    learning_rate: jax.Array
    z_loss: jax.Array | None = None
    auxiliary: Sums = eqx.field(default_factory=Sums)
    skipped: jax.Array | None = None
    watched: Watched | None = None


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
        z_loss_weight: of the squared log-normalizer, which is added to the loss; 0 for none.
        auxiliary_weights: of the model's auxiliary sums, by name, in the loss.
        skip_nonfinite: whether a step whose loss or gradient is not finite leaves the state as it was.
        outliers: likewise for a step far from those before; the optimizer's state then ends with their numbers.
        watch: what else is seen of the step; None for nothing.
    """

    optimizer: optax.GradientTransformation
    schedule: Schedule
    precision: Precision
    accumulation: int = 1
    parameters: ShardingPlan | None = None
    chunk: int | None = None
    z_loss_weight: float = 0.0
    auxiliary_weights: Mapping[str, float] = field(default_factory=dict)
    skip_nonfinite: bool = False
    outliers: SkipStepConfig | None = None
    watch: Watch | None = None

    @property
    def skips(self) -> bool:
        """Whether a step may leave the state as it was."""
        return self.skip_nonfinite or self.outliers is not None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The paths of everything in the metrics of a step."""
        always = [each.name for each in fields(StepMetrics) if each.default is each.default_factory is MISSING]
        sometimes = {
            "z_loss": self.z_loss_weight != 0,
            **{f"auxiliary.{name}": True for name in self.auxiliary_weights},
            "skipped": self.skips,
        }
        watched = () if self.watch is None else self.watch.outputs()
        return (*always, *(name for name, on in sometimes.items() if on), *(f"watched.{path}" for path in watched))


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
        new, metrics = _updated(recipe, state, loss, grads, weight)
        return _kept(recipe, state, new, metrics) if recipe.skips else (new, metrics)


def _updated(
    recipe: StepRecipe, state: TrainState, loss: LossSums, grads: LmHeadModel, weight: jax.Array
) -> tuple[TrainState, StepMetrics]:
    updates, optimizer = recipe.optimizer.update(grads, state.optimizer, state.model)  # pyright: ignore
    key, _ = jax.random.split(state.key)
    metrics = StepMetrics(
        loss=loss.loss,
        weight=weight,
        grad_norm=global_norm(grads),
        update_norm=global_norm(updates),
        parameter_norm=global_norm(state.model),
        learning_rate=jnp.asarray(recipe.schedule(state.step), jnp.float32),
        z_loss=None if loss.z is None else recipe.z_loss_weight * loss.z,
        auxiliary=Sums({name: recipe.auxiliary_weights[name] * value for name, value in loss.auxiliary.items()}),
        watched=_watched(recipe.watch, grads=grads, params=state.model, updates=updates, opt_state=state.optimizer),
    )
    model = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.model, updates)
    return TrainState(step=state.step + 1, model=model, optimizer=optimizer, key=key), metrics


def _watched(watch: Watch | None, **trees: Any) -> Watched | None:
    return None if watch is None else watch.see(**trees)


def _kept(
    recipe: StepRecipe, state: TrainState, new: TrainState, metrics: StepMetrics
) -> tuple[TrainState, StepMetrics]:
    """The state after a step: as it was, where the step is one to leave out.

    A choice and not a branch: each piece of the state is written once, in place, and which of two values it is costs
    nothing. What is left as it was includes the counters of the optimizer and of the schedule, and the random key.
    """
    loss, norm = metrics.loss, metrics.grad_norm
    left_out = jnp.bool_(False)
    if recipe.skip_nonfinite:
        left_out |= ~(jnp.isfinite(loss) & jnp.isfinite(norm))
    if recipe.outliers is not None:
        left_out |= is_outlier(recipe.outliers, recent_of(state.optimizer), loss, norm)
    kept = jax.tree.map(lambda before, after: jnp.where(left_out, before, after), state, new)
    if recipe.outliers is not None:
        recent = remembered(recent_of(state.optimizer), loss, norm)
        kept = replace(kept, optimizer=with_recent(kept.optimizer, recent))
    return kept, replace(
        metrics,
        skipped=left_out.astype(jnp.float32),
        update_norm=jnp.where(left_out, 0.0, metrics.update_norm),
    )


def loss_and_gradients(
    recipe: StepRecipe, model: LmHeadModel, batch: LmBatch, scale: jax.Array
) -> tuple[LossSums, LmHeadModel]:
    """`scale` × the sums of the batch, and the gradient of the loss in float32, in the parameters' shards.

    What is added to the loss (z-loss, the routers') is in the gradient with its weight.
    """
    weight, auxiliary = recipe.z_loss_weight, tuple(recipe.auxiliary_weights)

    def of_part(part: LmBatch) -> tuple[LossSums, LmHeadModel]:
        def objective(parameters: LmHeadModel) -> tuple[jax.Array, LossSums]:
            usable = in_compute_dtype(parameters, recipe.precision.compute, recipe.parameters)
            sums = loss_sums(usable, part, chunk=recipe.chunk, z=weight != 0, auxiliary=auxiliary)
            sums = jax.tree.map(lambda x: x * scale, sums)
            total = sums.loss if sums.z is None else sums.loss + weight * sums.z
            for name, value in sums.auxiliary.items():
                total = total + recipe.auxiliary_weights[name] * value
            return total, sums

        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(model)
        return sums, _pinned(_wide(grads), recipe.parameters)

    if recipe.accumulation == 1:
        return of_part(batch)
    (Batch,) = [axis for axis in batch.tokens.axes if axis.name != "position"]
    Micro = hax.Axis("microbatch", recipe.accumulation)
    Rows = Batch.resize(Batch.size // recipe.accumulation)

    def add(carry: tuple[LossSums, Any], part: LmBatch) -> tuple[LossSums, Any]:
        sums, grads = of_part(jax.tree.map(_sharded, part, is_leaf=_is_named))
        total = jax.tree.map(jnp.add, carry[1], grads)
        return jax.tree.map(jnp.add, carry[0], sums), _pinned(total, recipe.parameters)

    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), model)
    parts = jax.tree.map(lambda x: x.unflatten_axis(Batch, (Rows, Micro)), batch, is_leaf=_is_named)
    zero = jnp.float32(0)
    sums = LossSums(loss=zero, z=zero if weight else None, auxiliary=Sums.zeros(auxiliary))
    start = (sums, _pinned(nothing, recipe.parameters))
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

    metrics = {name: np.dtype(np.float32) for name in recipe.outputs}
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
