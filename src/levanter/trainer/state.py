"""`TrainState`, which a training run carries from step to step, and the placement of its arrays.

Optimizer state consists of statistics of parameters, with the parameters' paths and axis names
(`optimizer.1.mu.transformer.norm.weight`). So the parameter mapping places all of them, including overrides by path:
`plan_state` plans the parameters, then each statistic by the parameter that it belongs to.

Frozen parameters (`trainer.trainable`) are not part of the state. They are planned with the parameters, under their
paths in the model, and initialized or loaded once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haliax_ext.abstract import Leaf, abstract, cast, leaves
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import Finding, LeafPlan
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree
from levanter.models.adapters.lora import Adapters, bound_plan
from levanter.models.base import LmHeadModel
from levanter.models.param_groups import ADAPTERS, FROZEN_GROUPS, PARAMETER_GROUPS, frozen_group, parameter_group
from levanter.models.precision import Precision
from levanter.trainer.averaging import begin
from levanter.trainer.config_blocks import ModelAveragingConfig
from levanter.trainer.reinit_rows import Renewal, unchanged
from levanter.trainer.train_state import AVERAGE, FROZEN, GRADIENT_BYTES, MODEL, OPTIMIZER, TrainState
from levanter.trainer.trainable import EVERYTHING, Partition, all_parameters, select
from levanter.trainer.update_rules import UpdateRule, split_by_rules

_KEY = jax.ShapeDtypeStruct((2,), np.dtype(np.uint32))


def without_ruled(optimizer: optax.GradientTransformation, rules: Sequence[UpdateRule]) -> optax.GradientTransformation:
    """The optimizer with statistics of those parameters only that gradients move."""
    if not rules:
        return optimizer
    # Only `init` sees the whole trained tree: the step passes trees without these parameters to `update`.
    return optimizer._replace(init=lambda params: optimizer.init(split_by_rules(rules, params)[0]))


def start(
    model: LmHeadModel,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    averaging: ModelAveragingConfig | None = None,
) -> TrainState:
    """The state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        optimizer=optimizer.init(model),  # pyright: ignore[reportArgumentType]
        key=key,
        average=begin(averaging, model),
    )


def abstract_state(
    build: Callable[[], LmHeadModel],
    optimizer: optax.GradientTransformation,
    precision: Precision,
    partition: Partition = EVERYTHING,
    averaging: ModelAveragingConfig | None = None,
) -> TrainState:
    """The state without memory, for the model that `build` returns."""
    # Cast before the split and the optimizer's init: statistics take their dtype from the parameters'.
    trained, _ = partition.split(cast(abstract(build), precision.params))
    return abstract(lambda m, k: start(m, optimizer, k, averaging), trained, _KEY)


def abstract_frozen(build: Callable[[], LmHeadModel], precision: Precision, partition: Partition) -> LmHeadModel | None:
    """The frozen part of the model that `build` returns, without memory; None if everything is trained."""
    return partition.split(cast(abstract(build), precision.params))[1]


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """The placement of a `TrainState` and of the frozen parameters.

    Attributes:
        parameters: the parameters, trained and frozen, by their paths in the model; those of adapters by their own.
        whole: the `TrainState`, by paths in it; its findings are those of `parameters`.
        frozen: the paths in the model that are not trained.
        ruled: the paths in the model that rules update: without gradients.
        adapters: the trained adapters, abstract; None if parameters of the model are trained.
    """

    parameters: ShardingPlan
    whole: ShardingPlan
    frozen: frozenset[str] = frozenset()
    ruled: frozenset[str] = frozenset()
    adapters: Adapters | None = None

    @property
    def model(self) -> ShardingPlan:
        """The placement of the parameters of the model that computes, by their paths in it."""
        return self.parameters if self.adapters is None else bound_plan(self.adapters, self.parameters)

    def moved_by_gradients(self, trained: PyTree) -> PyTree:
        """The part of the trained tree that has gradients and statistics."""
        return select(trained, lambda leaf: leaf.path not in self.ruled) if self.ruled else trained

    @property
    def loaded(self) -> ShardingPlan:
        """The placement of the parameters that model checkpoints contain: all except those of adapters."""
        if self.adapters is None:
            return self.parameters
        kept = tuple(plan for plan in self.parameters.leaves if plan.leaf.path in self.frozen)
        return replace(self.parameters, leaves=kept, findings=())

    @property
    def resident(self) -> ShardingPlan:
        """All arrays that stay on the devices: the state, and the frozen parameters under `frozen.`."""
        kept = (plan for plan in self.parameters.leaves if plan.leaf.path in self.frozen)
        under = (replace(plan, leaf=replace(plan.leaf, path=_joined(FROZEN, plan.leaf.path))) for plan in kept)
        return replace(self.whole, leaves=(*self.whole.leaves, *under))

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Bytes per device of the arrays that exist throughout a step, by kind; gradients are float32."""
        names = (*PARAMETER_GROUPS, ADAPTERS, *FROZEN_GROUPS, "gradients", OPTIMIZER, AVERAGE)
        groups: dict[str, int] = dict.fromkeys(names, 0)
        for plan in self.parameters.leaves:
            if plan.leaf.path in self.frozen:
                # Frozen parameters have no gradient and no statistics.
                groups[frozen_group(plan.leaf)] += plan.bytes_per_device
                continue
            groups[parameter_group(plan.leaf)] += plan.bytes_per_device
            if plan.leaf.path not in self.ruled:
                groups["gradients"] += math.prod(plan.shard_shape) * GRADIENT_BYTES
        for plan in self.whole.leaves:
            for group in (OPTIMIZER, AVERAGE):
                if plan.leaf.path.startswith(f"{group}."):
                    groups[group] += plan.bytes_per_device
        return {name: size for name, size in groups.items() if size}


def plan_state(
    state: TrainState,
    mappings: Mappings,
    mesh: MeshSpec,
    *,
    frozen: LmHeadModel | None = None,
    hbm_bytes: int | None = None,
    rules: Sequence[UpdateRule] = (),
) -> StatePlan:
    """Plans parameters, including frozen ones, and optimizer state under the parameter mapping.

    A statistic violates a rule only if its parameter does, so the findings are those of the parameters. Exceptions are
    statistics that are larger than their parameter, whose own findings are added.
    """
    parameters = plan_sharding(all_parameters(state.model, frozen), mappings, mesh, hbm_bytes=hbm_bytes)
    parameter_paths = {plan.leaf.path for plan in parameters.leaves}
    # A slot is a tree of one statistic (`optimizer.1.mu`): its leaves are planned under the paths of their parameters,
    # so that overrides by path apply, and get their own paths back afterwards.
    slots: dict[str, list[Leaf]] = {}
    for leaf in leaves(state):
        prefix, path = _split(leaf.path, parameter_paths)
        slots.setdefault(prefix, []).append(replace(leaf, path=path))
    plans: dict[str, LeafPlan] = {}
    findings = list(parameters.findings)
    faulty = {f.path for f in parameters.findings if f.error is not None}
    for prefix, slot_leaves in slots.items():
        slot = plan_sharding(
            slot_leaves, replace(mappings, overrides=_relevant(mappings, slot_leaves)), mesh, hbm_bytes=hbm_bytes
        )
        for plan in slot.leaves:
            path = _joined(prefix, plan.leaf.path)
            plans[path] = replace(plan, leaf=replace(plan.leaf, path=path))
        if prefix != MODEL:
            # The parameters' own findings are in the list already; a statistic repeats those of its parameter.
            findings += [_of_slot(f, prefix) for f in slot.findings if f.error is not None and f.path not in faulty]
    return StatePlan(
        parameters=parameters,
        frozen=frozenset(leaf.path for leaf in leaves(frozen)),
        ruled=frozenset(leaf.path for leaf in leaves(split_by_rules(rules, state.model)[1])),
        adapters=state.model if isinstance(state.model, Adapters) else None,
        whole=ShardingPlan(
            mesh=mesh,
            mappings=mappings,
            # In the order of the state's leaves, which slots have lost.
            leaves=tuple(plans[leaf.path] for leaf in leaves(state)),
            findings=tuple(findings),
            hbm_bytes=hbm_bytes,
        ),
    )


def _split(path: str, parameters: set[str]) -> tuple[str, str]:
    """A path in the state as (prefix, path of a parameter); ("", path) if it ends in no parameter's path."""
    names = path.split(".")
    # The longest suffix first: a parameter's path may itself end in the path of another parameter.
    for n in range(len(names)):
        if (tail := ".".join(names[n:])) in parameters:
            return ".".join(names[:n]), tail
    return "", path


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix else path


def _relevant(mappings: Mappings, slot_leaves: list[Leaf]) -> tuple[Any, ...]:
    """The overrides that apply to some leaf, so that `plan_sharding` does not report the others as unused again."""
    return tuple(o for o in mappings.overrides if any(o in mappings.overrides_at(leaf.path) for leaf in slot_leaves))


def _of_slot(finding: Finding, prefix: str) -> Finding:
    return replace(finding, path=_joined(prefix, finding.path), message=f"{prefix} of {finding.message}")


def at_output(plan: ShardingPlan, position: int, **scalars: np.dtype) -> ShardingPlan:
    """The plan of a Program's output tuple: the planned value at `position`, followed by scalars by path."""
    moved = [replace(p, leaf=replace(p.leaf, path=f"{position}.{p.leaf.path}")) for p in plan.leaves]
    return replace(plan, leaves=(*moved, *_scalars(plan, position + 1, scalars)), findings=())


def _scalars(plan: ShardingPlan, position: int, scalars: dict[str, np.dtype]) -> Iterator[LeafPlan]:
    for name, dtype in scalars.items():
        leaf = Leaf(f"{position}.{name}", (), np.dtype(dtype))
        (only,) = plan_sharding([leaf], Mappings(), plan.mesh).leaves
        yield only


def init_program(
    plan: StatePlan,
    build: Callable[[jax.Array], LmHeadModel],
    optimizer: optax.GradientTransformation,
    precision: Precision,
    partition: Partition = EVERYTHING,
    averaging: ModelAveragingConfig | None = None,
) -> Program:
    """The Program that initializes the first state from a key, every array in its final shards."""

    def initialize(key: jax.Array) -> TrainState:
        # The same split as in `init_frozen_program`: the two Programs initialize halves of one model.
        for_model, for_steps = jax.random.split(key)
        trained, _ = partition.split(precision.cast_to_param(build(for_model)))
        return start(trained, optimizer, for_steps, averaging)

    return Program(
        name="init_state",
        function=initialize,
        inputs=(Input(name="key", value=_KEY, placement=Mappings()),),
        # Initializers constrain by the mapping in scope; parameters are to be sharded by their own.
        mappings=Mappings(compute=plan.parameters.mappings.params),
        out_placement=plan.whole,
    )


def init_frozen_program(
    plan: StatePlan, build: Callable[[jax.Array], LmHeadModel], precision: Precision, partition: Partition
) -> Program:
    """The Program that initializes the frozen part from the same key as `init_state`: both are parts of one model."""

    def initialize(key: jax.Array) -> LmHeadModel | None:
        for_model, _ = jax.random.split(key)
        return partition.split(precision.cast_to_param(build(for_model)))[1]

    return Program(
        name="init_frozen",
        function=initialize,
        inputs=(Input(name="key", value=_KEY, placement=Mappings()),),
        mappings=Mappings(compute=plan.parameters.mappings.params),
        out_placement=plan.parameters,
    )


def init_optimizer_program(
    state: TrainState,
    plan: StatePlan,
    optimizer: optax.GradientTransformation,
    averaging: ModelAveragingConfig | None = None,
    renewed: Renewal[LmHeadModel] = unchanged,
) -> Program:
    """The Program that adds optimizer state to the trained part of a loaded model."""

    def initialize(model: LmHeadModel, key: jax.Array) -> TrainState:
        return start(renewed(model, jax.random.fold_in(key, 1)), optimizer, key, averaging)

    return Program(
        name="init_optimizer",
        function=initialize,
        inputs=(
            Input(name="model", value=state.model, placement=plan.parameters),
            Input(name="key", value=state.key, placement=Mappings()),
        ),
        mappings=Mappings(compute=plan.parameters.mappings.params),
        out_placement=plan.whole,
        # The loaded parameters become those of the state without a copy.
        donate=("model",),
    )
