"""The train step: one pure function, one Program.

The objective's sums and their gradient of each microbatch, added up in float32 by a scan; the gradient's norm; the
optimizer; the update. What a step minimizes is the mean over its global batch, whatever the number of microbatches: the
normalizer comes first, and each microbatch contributes its sums over it. Gradients lie where their parameters lie.

Microbatches take every n-th row of the batch, so each device finds its rows of every microbatch in its own memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Generic, TypeVar

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
from haliax_ext.pytree import PyTree
from levanter.layers.outputs import Sums
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.optim.hessian import Hutchinson, direction, product
from levanter.optim.hessian import remembered as remembered_curvature
from levanter.optim.schedules import Schedule
from levanter.optim.skip_steps import SkipStepConfig, is_outlier, recent_statistics, remembered, with_recent
from levanter.optim.transforms import global_norm, global_norm_by_layer
from levanter.trainer.averaging import averaged
from levanter.trainer.config_blocks import ModelAveragingConfig
from levanter.trainer.loss import in_compute_dtype
from levanter.trainer.objective import LOSS, Objective
from levanter.trainer.state import StatePlan, at_output
from levanter.trainer.train_state import FROZEN, REFERENCE, TrainState
from levanter.trainer.trainable import bind
from levanter.trainer.watch import Watch, Watched

B = TypeVar("B")

TINY = 1e-9
"""The name of the input that is a second model."""


class StepMetrics(eqx.Module):
    """What a step reports; float32 scalars, but for what is watched.

    Attributes:
        loss: the objective's first term: nats per token, where language is modeled.
        weight: the objective's normalizer: the sum of the weights of tokens, where language is modeled.
        grad_norm: global norm of the gradient, before it is clipped.
        update_norm: global norm of what was added to the parameters.
        parameter_norm: global norm of the parameters before the step.
        learning_rate: of this step.
        terms: the objective's other terms, by name.
        skipped: 1 where the state stayed as it was, else 0; None where no step is ever left out.
        watched: see `trainer.watch`; None where nothing is.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    update_norm: jax.Array
    parameter_norm: jax.Array
    learning_rate: jax.Array
    terms: Sums = eqx.field(default_factory=Sums)
    skipped: jax.Array | None = None
    watched: Watched | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecipe(Generic[B]):
    """What a train step is made of.

    Attributes:
        objective: what is minimized.
        bind: what is trained and what is frozen → the model that the objective is of; see `trainer.trainable`.
        optimizer: from gradients to updates.
        schedule: the learning rate, to report it.
        precision: in which dtype one computes.
        accumulation: microbatches of a step.
        parameters: where what is trained lies, by its paths; None pins nothing.
        model: where the parameters of the bound model lie, by their paths in it; None for `parameters`.
        skip_nonfinite: whether a step whose loss or gradient is not finite leaves the state as it was.
        averaging: which average of the parameters the state carries; None for none.
        curvature: how often the optimizer is given an estimate of the Hessian's diagonal; None for never.
        outliers: likewise for a step far from those before; the optimizer's state then ends with their numbers.
        watch: what else is seen of the step; None for nothing.
        norms_first: whether parameters change after the norms of the step are known. XLA for CPUs does not order a
            reading of a donated array before its writing unless one needs the other: it copies every parameter.
        draws: whether what is trained is bound with random numbers, as dropout of adapters is.
    """

    objective: Objective[Any, B]
    optimizer: optax.GradientTransformation
    schedule: Schedule
    precision: Precision
    accumulation: int = 1
    bind: Callable[..., PyTree] = bind
    parameters: ShardingPlan | None = None
    model: ShardingPlan | None = None
    skip_nonfinite: bool = False
    averaging: ModelAveragingConfig | None = None
    curvature: Hutchinson | None = None
    outliers: SkipStepConfig | None = None
    watch: Watch | None = None
    norms_first: bool = False
    draws: bool = False

    @property
    def skips(self) -> bool:
        """Whether a step may leave the state as it was."""
        return self.skip_nonfinite or self.outliers is not None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The paths of everything in the metrics of a step."""
        always = [metric.name for metric in fields(StepMetrics) if metric.default is metric.default_factory is MISSING]
        terms = (f"terms.{term.name}" for term in self.objective.terms if term.name != LOSS)
        watched = () if self.watch is None else self.watch.outputs()
        return (*always, *terms, *(("skipped",) if self.skips else ()), *(f"watched.{path}" for path in watched))


def train_step(recipe: StepRecipe[B], state: TrainState, frozen: PyTree, batch: B) -> tuple[TrainState, StepMetrics]:
    """Takes one step.

    Args:
        recipe: static.
        state: is consumed where the Program donates it.
        frozen: what the model is made of beside the state's; None for nothing.
        batch: of the objective.
    """
    weight = recipe.objective.normalizer(batch)
    scale = 1 / jnp.maximum(weight, TINY)
    key = jax.random.split(state.key)[1] if recipe.draws else None
    sums, grads = sums_and_gradients(recipe, state.model, frozen, batch, scale, key)
    before = state
    if recipe.curvature is not None:
        with jax.named_scope("curvature"):
            state = _with_curvature(recipe, recipe.curvature, state, frozen, batch, scale)
    with jax.named_scope("optimizer"):
        new, metrics = _updated(recipe, state, sums, grads, weight)
        return _kept(recipe, before, new, metrics) if recipe.skips else (new, metrics)


def _updated(
    recipe: StepRecipe[B], state: TrainState, sums: Sums, grads: LmHeadModel, weight: jax.Array
) -> tuple[TrainState, StepMetrics]:
    updates, optimizer = recipe.optimizer.update(grads, state.optimizer, state.model)  # pyright: ignore
    key, _ = jax.random.split(state.key)
    shown = recipe.objective.shown(sums)
    norm = global_norm_by_layer if recipe.norms_first else global_norm
    metrics = StepMetrics(
        loss=shown[LOSS],
        weight=weight,
        grad_norm=norm(grads),
        update_norm=norm(updates),
        parameter_norm=norm(state.model),
        learning_rate=jnp.asarray(recipe.schedule(state.step), jnp.float32),
        terms=Sums({name: value for name, value in shown.items() if name != LOSS}),
        watched=_watched(recipe.watch, grads=grads, params=state.model, updates=updates, opt_state=state.optimizer),
    )
    if recipe.norms_first:
        updates = jax.tree.map(_after(metrics.parameter_norm, metrics.update_norm), updates)
    model = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.model, updates)
    average = state.average
    if average is not None:
        assert recipe.averaging is not None, "the state carries an average that the recipe does not know"
        with jax.named_scope("average"):
            average = averaged(recipe.averaging, average, model, state.step)
    return TrainState(step=state.step + 1, model=model, optimizer=optimizer, key=key, average=average), metrics


def _after(*norms: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The identity, of which the compiler cannot know that it needs no norms: none of them is negative."""
    one = jnp.where(sum(norms) == -1.0, 0.0, 1.0)
    return lambda x: x * one.astype(x.dtype)


def _watched(watch: Watch | None, **trees: PyTree) -> Watched | None:
    return None if watch is None else watch.see(**trees)


def _kept(
    recipe: StepRecipe[B], state: TrainState, new: TrainState, metrics: StepMetrics
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
        left_out |= is_outlier(recipe.outliers, recent_statistics(state.optimizer), loss, norm)
    kept = jax.tree.map(lambda before, after: jnp.where(left_out, before, after), state, new)
    if recipe.outliers is not None:
        recent = remembered(recent_statistics(state.optimizer), loss, norm)
        kept = replace(kept, optimizer=with_recent(kept.optimizer, recent))
    return kept, replace(
        metrics,
        skipped=left_out.astype(jnp.float32),
        update_norm=jnp.where(left_out, 0.0, metrics.update_norm),
    )


def sums_and_gradients(
    recipe: StepRecipe[B],
    trained: LmHeadModel,
    frozen: PyTree,
    batch: B,
    scale: jax.Array,
    key: jax.Array | None = None,
) -> tuple[Sums, LmHeadModel]:
    """`scale` × the sums of the batch, and the gradient of what is minimized in float32, in the parameters' shards.

    There is a gradient of what is trained, and of nothing else. Each microbatch draws from a key of its own.
    """
    objective = recipe.objective

    def of_part(part: B, number: jax.Array | int = 0) -> tuple[Sums, LmHeadModel]:
        drawn = {} if key is None else {"key": jax.random.fold_in(key, number)}

        def minimized(parameters: LmHeadModel) -> tuple[jax.Array, Sums]:
            model = recipe.bind(parameters, frozen, **drawn)
            usable = in_compute_dtype(model, recipe.precision.compute, recipe.model or recipe.parameters)
            return objective.total(usable, part, scale)

        (_, sums), grads = jax.value_and_grad(minimized, has_aux=True)(trained)
        return sums, _pinned(_wide(grads), recipe.parameters)

    if recipe.accumulation == 1:
        return of_part(batch)
    Micro, microbatches = _split_microbatches(recipe, batch)

    def add(carry: tuple[Sums, Any], part: B, number: hax.NamedArray | None = None) -> tuple[Sums, Any]:
        drawn = () if number is None else (number.scalar(),)
        sums, grads = of_part(jax.tree.map(_sharded, part, is_leaf=_is_named), *drawn)
        total = jax.tree.map(jnp.add, carry[1], grads)
        return carry[0] + sums, _pinned(total, recipe.parameters)

    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    start = (Sums.zeros(term.name for term in objective.terms), _pinned(nothing, recipe.parameters))
    return hax.fold(add, Micro)(start, microbatches, *(() if key is None else (hax.arange(Micro),)))


def _with_curvature(
    recipe: StepRecipe[B], rule: Hutchinson, state: TrainState, frozen: PyTree, batch: B, scale: jax.Array
) -> TrainState:
    """The state whose optimizer knows one more estimate of the Hessian's diagonal, where it is time for one."""

    def estimated(optimizer: PyTree) -> PyTree:
        along = _pinned(direction(rule, state.model, state.step), recipe.parameters)
        turned = _products(recipe, state.model, frozen, batch, scale, along)
        return remembered_curvature(rule, optimizer, jax.tree.map(jnp.multiply, along, turned))

    due = state.step % rule.interval == 0
    return replace(state, optimizer=jax.lax.cond(due, estimated, lambda optimizer: optimizer, state.optimizer))


def _products(
    recipe: StepRecipe[B], trained: LmHeadModel, frozen: PyTree, batch: B, scale: jax.Array, along: PyTree
) -> PyTree:
    """The Hessian of what is minimized times a direction, float32, in the parameters' shards."""
    objective = recipe.objective

    def of_part(part: B) -> PyTree:
        def minimized(parameters: LmHeadModel) -> jax.Array:
            model = recipe.bind(parameters, frozen)
            usable = in_compute_dtype(model, recipe.precision.compute, recipe.model or recipe.parameters)
            return objective.total(usable, part, scale)[0]

        return _pinned(_wide(product(jax.grad(minimized), trained, along)), recipe.parameters)

    if recipe.accumulation == 1:
        return of_part(batch)
    Micro, microbatches = _split_microbatches(recipe, batch)

    def add(total: PyTree, part: B) -> PyTree:
        product = of_part(jax.tree.map(_sharded, part, is_leaf=_is_named))
        return _pinned(jax.tree.map(jnp.add, total, product), recipe.parameters)

    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    return hax.fold(add, Micro)(_pinned(nothing, recipe.parameters), microbatches)


def _split_microbatches(recipe: StepRecipe[B], batch: B) -> tuple[hax.Axis, B]:
    """The microbatches: their axis, and the batch with that axis; each takes every n-th row."""
    Batch = recipe.objective.rows(batch)
    Micro = hax.Axis("microbatch", recipe.accumulation)
    Rows = Batch.resize(Batch.size // recipe.accumulation)
    return Micro, jax.tree.map(lambda x: x.unflatten_axis(Batch, (Rows, Micro)), batch, is_leaf=_is_named)


def _is_named(x: object) -> bool:
    return isinstance(x, hax.NamedArray)


def _sharded(x: hax.NamedArray) -> hax.NamedArray:
    return hax.auto_sharded(x)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _pinned(tree: PyTree, plan: ShardingPlan | None) -> PyTree:
    """A tree of the parameters' structure, in their shards."""
    if plan is None:
        return tree
    return map_arrays(lambda leaf, x: jax.lax.with_sharding_constraint(x, plan.spec(leaf.path)), tree)


def step_program(
    recipe: StepRecipe[B],
    *,
    state: TrainState,
    frozen: PyTree = None,
    reference: PyTree = None,
    reference_plan: ShardingPlan | None = None,
    plan: StatePlan,
    batch: B,
    mappings: Mappings,
    name: str = "train_step",
    compiler_options: Mapping[str, str] | None = None,
) -> Program:
    """The Program of a train step: (state, frozen, batch) → (state, metrics), or (state, frozen, reference, batch).

    Args:
        recipe: what the step is made of.
        state: abstract.
        frozen: abstract; None where everything is trained.
        reference: a second model, abstract, which `recipe.bind` then gets with the frozen part; None for none.
        reference_plan: where it lies.
        plan: where the state lies, before and after, and what is frozen.
        batch: abstract.
        mappings: in scope while tracing.
        name: how listings call it.
        compiler_options: see `Program`.
    """

    others = () if reference is None else (Input(name=REFERENCE, value=reference, placement=reference_plan),)

    def step(state: TrainState, frozen: PyTree, *rest: PyTree) -> tuple[TrainState, StepMetrics]:
        *other, batch = rest
        return train_step(recipe, state, (frozen, *other) if other else frozen, batch)

    metrics = {name: np.dtype(np.float32) for name in recipe.outputs}
    return Program(
        name=name,
        function=step,
        inputs=(
            Input(name="state", value=state, placement=plan.whole),
            Input(name=FROZEN, value=frozen, placement=plan.parameters),
            *others,
            Input(name="batch", value=batch, placement=mappings.compute),
        ),
        mappings=mappings,
        out_placement=at_output(plan.whole, 0, **metrics),
        donate=("state",),
        matmul_precision=recipe.precision.matmul,
        compiler_options=compiler_options or {},
    )
