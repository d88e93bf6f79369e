"""The train step: one pure function, one Program.

A scan adds up the objective's sums and gradients of all microbatches in float32; then follow the gradient's norm, the
optimizer and the update. A step minimizes the mean over its global batch, whatever the number of microbatches: the
normalizer of the global batch is computed first, and each microbatch contributes its sums divided by it. Gradients have
the shards of their parameters.

Each microbatch takes every n-th row of the batch, so the rows of every microbatch are on the devices that hold them.
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
from levanter.trainer.objective import LOSS, AtStep, Objective
from levanter.trainer.state import StatePlan, at_output
from levanter.trainer.train_state import FROZEN, REFERENCE, TrainState
from levanter.trainer.trainable import bind
from levanter.trainer.update_rules import split_by_rules, updated_by_rules
from levanter.trainer.watch import Watch, Watched

B = TypeVar("B")

TINY = 1e-9
"""Lower limit of the normalizer, for batches in which nothing counts."""


class StepMetrics(eqx.Module):
    """The numbers that a step returns: float32 scalars, except `watched`.

    Attributes:
        loss: the objective's first term; nats per token for language modeling.
        weight: the objective's normalizer; the sum of the token weights for language modeling.
        grad_norm: global norm of the gradient, before clipping.
        update_norm: global norm of the update of the parameters.
        parameter_norm: global norm of the parameters before the step.
        learning_rate: of this step.
        terms: the objective's other terms, by name.
        skipped: 1 if the step left the state unchanged, else 0; None if the recipe never skips.
        watched: see `trainer.watch`; None for nothing.
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
    """The static parameters of a train step.

    Attributes:
        objective: the function that is minimized.
        bind: (trained, frozen) → the model of the objective; see `trainer.trainable`.
        optimizer: from gradients to updates; see `trainer.state.without_ruled` for objectives with rules.
        schedule: the learning rate, for the metrics.
        precision: the dtypes of computation.
        accumulation: microbatches per step.
        parameters: the placement of the trained parameters, by their paths; None applies no constraints.
        model: the placement of the bound model's parameters, by their paths in it; None for `parameters`.
        skip_nonfinite: whether a step with a non-finite loss or gradient leaves the state unchanged.
        averaging: the average of the parameters that the state carries; None for none.
        curvature: how often the optimizer gets an estimate of the Hessian's diagonal; None for never.
        outliers: when a step counts as an outlier among recent steps and leaves the state unchanged; None for never.
            The optimizer's state then ends with the statistics of these steps.
        watch: further numbers of the step; None for none.
        norms_first: whether the update of the parameters waits for the norms of the step. XLA for CPUs does not order a
            read of a donated array before its write unless one depends on the other: it copies every parameter.
        norms_fused: whether norms are computed in the form that XLA for TPUs computes while it writes the arrays: sums
            by layer, as `watch` has them, and the change of the parameters instead of an update that is written first.
        draws: whether binding uses random numbers, as the dropout of adapters does.
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
    norms_fused: bool = False
    draws: bool = False

    @property
    def skips(self) -> bool:
        """Whether a step may leave the state unchanged."""
        return self.skip_nonfinite or self.outliers is not None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The paths of all arrays in the metrics of a step."""
        # The fields without a default are in the metrics of every step.
        always = [metric.name for metric in fields(StepMetrics) if metric.default is metric.default_factory is MISSING]
        terms = (f"terms.{term.name}" for term in self.objective.terms if term.name != LOSS)
        watched = () if self.watch is None else self.watch.outputs()
        return (*always, *terms, *(("skipped",) if self.skips else ()), *(f"watched.{path}" for path in watched))


def train_step(recipe: StepRecipe[B], state: TrainState, frozen: PyTree, batch: B) -> tuple[TrainState, StepMetrics]:
    """Takes one step.

    Args:
        recipe: static.
        state: consumed, since the Program donates it.
        frozen: the frozen part of the model; None for none.
        batch: of the objective.
    """
    # The normalizer is that of the global batch, known before the first microbatch: each microbatch's sums are divided
    # by it, so the gradients add up to the gradient of the mean over all tokens, not to a mean of means.
    # A skipped step also drops the curvature estimate, so `_kept` compares with the state before it.
    before = state
    moved, ruled = split_by_rules(recipe.objective.rules, state.model)
    if ruled is not None:
        # From here on the trained tree is what gradients move; the model still gets the other parameters.
        bound = recipe.bind
        recipe = replace(recipe, bind=lambda trained, *rest, **drawn: bound(bind(trained, ruled), *rest, **drawn))
        state = replace(state, model=moved)
    weight = recipe.objective.normalizer(batch)
    scale = 1 / jnp.maximum(weight, TINY)
    # `_updated` splits the same key and keeps the first half for the next step; the second half is this step's.
    key = jax.random.split(state.key)[1] if recipe.draws else None
    sums, grads = sums_and_gradients(recipe, state.model, frozen, batch, AtStep(step=state.step), scale, key)
    if recipe.curvature is not None:
        with jax.named_scope("curvature"):
            state = _with_curvature(recipe, recipe.curvature, state, frozen, batch, scale)
    with jax.named_scope("optimizer"):
        new, metrics = _updated(recipe, state, ruled, sums, grads, weight)
        return _kept(recipe, before, new, metrics) if recipe.skips else (new, metrics)


def _updated(
    recipe: StepRecipe[B], state: TrainState, ruled: PyTree, sums: Sums, grads: LmHeadModel, weight: jax.Array
) -> tuple[TrainState, StepMetrics]:
    updates, optimizer = recipe.optimizer.update(grads, state.optimizer, state.model)  # pyright: ignore
    # Gradients are float32, and optax promotes the statistics of narrower parameters to it: the state keeps the dtype
    # that it was planned in, or the next step would be another Program.
    optimizer = jax.tree.map(_cast_like, state.optimizer, optimizer)
    key, _ = jax.random.split(state.key)
    shown = recipe.objective.shown(sums, AtStep(step=state.step))
    # On CPUs sums by layer keep XLA from copying the parameters (`optim.transforms`). On TPUs the sum of a stack, those
    # of its layers (`watch`) and its cast to the compute dtype became one fusion with windows of 8 × 128 elements
    # (libtpu 0.0.50.1): 244 million cycles instead of 2.
    norm = global_norm_by_layer if recipe.norms_first or recipe.norms_fused else global_norm
    # Updates are float32; rounding them to the parameters' dtype keeps the donated buffers usable for the result.
    model = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.model, updates)
    metrics = StepMetrics(
        loss=shown[LOSS],
        weight=weight,
        grad_norm=norm(grads),
        update_norm=norm(_changes(state.model, model, updates) if recipe.norms_fused else updates),
        parameter_norm=norm(state.model),
        learning_rate=jnp.asarray(recipe.schedule(state.step), jnp.float32),
        terms=Sums({name: value for name, value in shown.items() if name != LOSS}),
        watched=_watched(recipe.watch, grads=grads, params=state.model, updates=updates, opt_state=state.optimizer),
    )
    if recipe.norms_first:
        updates = jax.tree.map(_after(metrics.parameter_norm, metrics.update_norm), updates)
        model = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.model, updates)
    if ruled is not None:
        with jax.named_scope("rules"):
            model = bind(model, updated_by_rules(recipe.objective.rules, ruled, sums))
    average = state.average
    if average is not None:
        assert recipe.averaging is not None, "the state carries an average that the recipe does not know"
        # The average includes the parameters after this step; `state.step` is the number of steps before it.
        with jax.named_scope("average"):
            average = averaged(recipe.averaging, average, model, state.step)
    return TrainState(step=state.step + 1, model=model, optimizer=optimizer, key=key, average=average), metrics


def _changes(old: PyTree, new: PyTree, updates: PyTree) -> PyTree:
    """What a step adds to the parameters; of narrow parameters the update, before it is rounded to their dtype."""
    # A norm of the update makes the compiler write the update (a third of the cycles of Adam); this is computed with
    # the new parameters.
    return jax.tree.map(lambda p, q, u: q - p if p.dtype == jnp.float32 else u, old, new, updates)


def _cast_like(old: jax.Array, new: jax.Array) -> jax.Array:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _after(*norms: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The identity, with a dependence on norms that the compiler cannot remove."""
    # Norms are not negative, so their sum is never −1 and the factor is always 1; the compiler does not know that.
    one = jnp.where(sum(norms) == -1.0, 0.0, 1.0)
    return lambda x: x * one.astype(x.dtype)


def _watched(watch: Watch | None, **trees: PyTree) -> Watched | None:
    return None if watch is None else watch.see(**trees)


def _kept(
    recipe: StepRecipe[B], state: TrainState, new: TrainState, metrics: StepMetrics
) -> tuple[TrainState, StepMetrics]:
    """The state after a step; unchanged if the step is skipped.

    An elementwise select instead of a branch: every array of the state is written once, in place. A skipped step also
    leaves the counters of the optimizer and of the schedule and the random key unchanged.
    """
    # The gradient's norm is not finite if any element of the gradient is not, so the elements need no second pass.
    loss, norm = metrics.loss, metrics.grad_norm
    left_out = jnp.bool_(False)
    if recipe.skip_nonfinite:
        left_out |= ~(jnp.isfinite(loss) & jnp.isfinite(norm))
    if recipe.outliers is not None:
        left_out |= is_outlier(recipe.outliers, recent_statistics(state.optimizer), loss, norm)
    kept = jax.tree.map(lambda before, after: jnp.where(left_out, before, after), state, new)
    if recipe.outliers is not None:
        # Also of skipped steps: the window of recent steps must move on, or a lasting change would be skipped for ever.
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
    at: AtStep,
    scale: jax.Array,
    key: jax.Array | None = None,
) -> tuple[Sums, LmHeadModel]:
    """`scale` × the sums of the batch, and the float32 gradient of the minimized function, in the parameters' shards.

    Only the trained tree has a gradient. Each microbatch has its own random key.
    """
    objective = recipe.objective

    def of_part(part: B, number: jax.Array | int = 0) -> tuple[Sums, LmHeadModel]:
        drawn = {} if key is None else {"key": jax.random.fold_in(key, number)}

        def minimized(parameters: LmHeadModel) -> tuple[jax.Array, Sums]:
            model = recipe.bind(parameters, frozen, **drawn)
            # The cast is part of the differentiated function: gradients arrive in the dtype of the parameters.
            usable = in_compute_dtype(model, recipe.precision.compute, recipe.model or recipe.parameters)
            return objective.total(usable, part, at, scale)

        (_, sums), grads = jax.value_and_grad(minimized, has_aux=True)(trained)
        # Constrained to the parameters' shards, the sum over data shards is a reduce-scatter, not an all-reduce.
        return sums, _pinned(_wide(grads), recipe.parameters)

    # Without accumulation there is no loop and no zero-initialized buffer of gradients.
    if recipe.accumulation == 1:
        return of_part(batch)
    Micro, microbatches = _split_microbatches(recipe, batch)

    def add(carry: tuple[Sums, Any], part: B, number: hax.NamedArray | None = None) -> tuple[Sums, Any]:
        drawn = () if number is None else (number.scalar(),)
        # A microbatch has lost the sharding of the batch by the slice: constrain its rows before the forward pass.
        sums, grads = of_part(jax.tree.map(_sharded, part, is_leaf=_is_named), *drawn)
        # The carry stays sharded like the parameters, so a device accumulates its own shard of the gradients only.
        total = jax.tree.map(jnp.add, carry[1], grads)
        return carry[0] + sums, _pinned(total, recipe.parameters)

    nothing = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    start = (objective.zeros(), _pinned(nothing, recipe.parameters))
    return hax.fold(add, Micro)(start, microbatches, *(() if key is None else (hax.arange(Micro),)))


def _with_curvature(
    recipe: StepRecipe[B], rule: Hutchinson, state: TrainState, frozen: PyTree, batch: B, scale: jax.Array
) -> TrainState:
    """The state with a new estimate of the Hessian's diagonal in its optimizer, if one is due at this step."""

    def estimated(optimizer: PyTree) -> PyTree:
        # Hutchinson: for random u with E[u uᵀ] = I, the expectation of u · (H u) is the diagonal of H.
        along = _pinned(direction(rule, state.model, state.step), recipe.parameters)
        at = AtStep(step=state.step)
        turned = _products(recipe, state.model, frozen, batch, at, scale, along)
        return remembered_curvature(rule, optimizer, jax.tree.map(jnp.multiply, along, turned))

    # A branch, not a select: a product with the Hessian costs more than a gradient, and most steps need none.
    due = state.step % rule.interval == 0
    return replace(state, optimizer=jax.lax.cond(due, estimated, lambda optimizer: optimizer, state.optimizer))


def _products(
    recipe: StepRecipe[B],
    trained: LmHeadModel,
    frozen: PyTree,
    batch: B,
    at: AtStep,
    scale: jax.Array,
    along: PyTree,
) -> PyTree:
    """The product of the minimized function's Hessian with a direction, float32, in the parameters' shards."""
    objective = recipe.objective

    def of_part(part: B) -> PyTree:
        def minimized(parameters: LmHeadModel) -> jax.Array:
            # Without a key: the curvature is that of the model without dropout.
            model = recipe.bind(parameters, frozen)
            usable = in_compute_dtype(model, recipe.precision.compute, recipe.model or recipe.parameters)
            return objective.total(usable, part, at, scale)[0]

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
    """The axis of the microbatches, and the batch with that axis; each microbatch takes every n-th row.

    Arrays without the axis of rows stay as they are, so the scan gives them to every microbatch.
    """
    # `microbatch` is the minor of the two axes: row r is in microbatch r mod n. A device holds consecutive rows, so it
    # has rows of every microbatch; with the axes the other way round, microbatches would move rows between devices.
    Batch = recipe.objective.rows(batch)
    Micro = hax.Axis("microbatch", recipe.accumulation)
    Rows = Batch.resize(Batch.size // recipe.accumulation)

    def split(x: hax.NamedArray) -> hax.NamedArray:
        return x.unflatten_axis(Batch, (Rows, Micro)) if Batch in x.axes else x

    return Micro, jax.tree.map(split, batch, is_leaf=_is_named)


def _is_named(x: object) -> bool:
    return isinstance(x, hax.NamedArray)


def _sharded(x: hax.NamedArray) -> hax.NamedArray:
    return hax.auto_sharded(x)


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _pinned(tree: PyTree, plan: ShardingPlan | None) -> PyTree:
    """Constrains a tree with the structure of the parameters to their shards."""
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
        recipe: the static parameters of the step.
        state: abstract.
        frozen: abstract; None if everything is trained.
        reference: a second model, abstract, which `recipe.bind` gets together with the frozen part; None for none.
        reference_plan: its placement.
        plan: the placement of the state, before and after the step, and of the frozen part.
        batch: abstract.
        mappings: in scope while tracing.
        name: the Program's name in listings.
        compiler_options: see `Program`.
    """

    # Inputs without arrays (`frozen` None) have no leaves, so one signature serves all cases.
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
        # Only the state: frozen parameters and the reference are inputs of every step, and stay.
        donate=("state",),
        matmul_precision=recipe.precision.matmul,
        compiler_options=compiler_options or {},
    )
