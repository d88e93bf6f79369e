"""HBM of a Program under a layout, by arithmetic.

A *layout* decides the bytes on a chip: mesh sizes, mappings, rows of a batch. `layout_memory` plans the sharding of all
inputs and named activations of a Program under a layout. A layout that differs from the run's by *changes* prints
itself as the YAML of these changes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from haliax_ext.abstract import Leaf, leaves
from haliax_ext.activations import Activation, plan_activations
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import LeafPlan, place
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.program import Input, Program
from levanter.models.activations import RESIDUAL, constrained_by, kept_by_name
from levanter.models.registry import LmConfig
from levanter.models.stack import checkpoint_policy
from levanter.runplan import RunPlan
from levanter.trainer.state import plan_state
from levanter.trainer.train_state import FROZEN, GRADIENT_BYTES, MODEL, TrainState

AXES, ROWS, BLOCKS = "trainer.mesh.axes", "trainer", "model"
"""Sections of the YAML: mesh sizes, the batch, and the checkpointing of blocks."""
OFFLOAD = "offload"
"""The value of `gradient_checkpointing` that sends the inputs of blocks to host memory."""


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """One line of YAML: `section` (keys joined by dots) and its entries."""

    section: str
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, mappings and rows of a batch, and how they differ from the run's.

    Attributes:
        mesh: mesh axis names and sizes.
        mappings: of parameters and activations.
        rows: rows that a device takes at once, as a multiple of the run's.
        recompute: `gradient_checkpointing` of the layout; False for that of the run.
        between: whether parameters are sharded over mesh axes between slices that did not shard them.
        changes: the differences from the run's layout.
    """

    mesh: MeshSpec
    mappings: Mappings
    rows: float = 1.0
    recompute: bool | str = False
    between: bool = False
    changes: tuple[LayoutChange, ...] = ()

    @property
    def distance(self) -> tuple[int, bool, bool, bool, int, float]:
        """Changed mesh sizes, whether blocks are recomputed, parameters sharded between slices or activations sent to
        the host, changed batches, and fewer rows: a smaller tuple is a nearer layout."""
        sections = [change.section for change in self.changes]
        offloads = self.recompute == OFFLOAD
        return sections.count(AXES), bool(self.recompute), self.between, offloads, sections.count(ROWS), -self.rows

    @property
    def yaml(self) -> str:
        """The changes as one line of YAML."""
        return changes_as_yaml(self.changes)


def changes_as_yaml(changes: tuple[LayoutChange, ...]) -> str:
    """Changes of a config as one line of YAML."""
    tree: dict[str, Any] = {}
    for change in changes:
        node = tree
        for key in change.section.split("."):
            # Several changes of one section share its nested mapping.
            node = node.setdefault(key, {})
        node.update(change.entries)
    return _flow(tree)[1:-1]


@dataclass(frozen=True, kw_only=True)
class LayoutMemory:
    """Bytes on a chip under a layout.

    Attributes:
        arguments: bytes of the Program's inputs.
        gradients: bytes of the gradients that it computes.
        errors: why a run would refuse the layout.
        residents: the sharding of parameters and optimizer state.
        trained: the sharding of the parameters that a train step updates.
        frozen: the sharding of the other parameters that it takes.
        hopeless: whether it is wrong in a way that further sharding cannot fix (collisions, sizes that do not divide).
    """

    arguments: int
    gradients: int
    errors: tuple[str, ...]
    residents: tuple[LeafPlan, ...]
    hopeless: bool
    trained: tuple[LeafPlan, ...] = ()
    frozen: tuple[LeafPlan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayoutSubject:
    """One Program of a plan, and the memory of a chip.

    Attributes:
        plan: of the run.
        program: the Program.
        hbm_bytes: memory of a chip.
        compiled_bytes: bytes that the compiler needs on a chip; None if not compiled.
        recompute_named: whether a change may recompute blocks of which the run saves activations by name.
    """

    plan: RunPlan
    program: Program
    hbm_bytes: int
    compiled_bytes: int | None = None
    recompute_named: bool = False

    @property
    def now(self) -> Layout:
        """The layout that the plan has."""
        return Layout(mesh=self.plan.mesh, mappings=self.plan.sharding.mappings)

    @property
    def training(self) -> bool:
        """Whether the Program trains: a train state is among its inputs."""
        return any(isinstance(argument.value, TrainState) for argument in self.program.inputs)

    @property
    def batch_axis(self) -> str | None:
        """The logical name of the batch axis: the outermost one of activations."""
        return next((plan.leaf.axes[0][0] for plan in self.plan.activations.leaves), None)

    def ways(self, layout: Layout) -> int:
        """The number of shards of a batch."""
        return 1 if self.batch_axis is None else layout.mesh.ways(layout.mappings.compute.mesh_axes(self.batch_axis))

    @property
    def rows(self) -> int:
        """Rows of a microbatch of the run, over all devices."""
        return next((plan.leaf.axes[0][1] for plan in self.plan.activations.leaves), 1)

    @property
    def positions(self) -> int:
        """Positions of a row; 1 where activations have none."""
        return max((dict(plan.leaf.axes).get("position", 1) for plan in self.plan.activations.leaves), default=1)


def least_input_bytes(subject: LayoutSubject) -> int:
    """Bytes of the Program's inputs on a chip if each is sharded evenly over all chips: no layout needs less."""
    total = sum(leaf.nbytes for argument in subject.program.inputs for leaf in leaves(argument.value))
    return -(-total // subject.plan.mesh.size)


def layout_memory(subject: LayoutSubject, layout: Layout) -> LayoutMemory:
    """Plans the sharding of a Program's inputs and named activations under a layout, and sums the bytes."""
    scale = layout.rows * subject.ways(layout) / subject.ways(subject.now)
    placed: list[LeafPlan] = []
    errors: list[str] = []
    hopeless = False
    trained: list[LeafPlan] = []
    frozen: list[LeafPlan] = []
    for argument in subject.program.inputs:
        # A train step takes the global batch whatever a microbatch has; other
        # Programs take the rows that they compute.
        plan = _placed(subject, argument, layout, 1.0 if subject.training else scale)
        placed += plan.leaves
        errors += [str(error) for error in plan.errors]
        # More sharding ends replication; it does not end a collision or an indivisible size.
        hopeless |= any(f.error is not None and f.kind != "replicated" for f in plan.findings)
        if isinstance(argument.value, TrainState):
            trained += [p for p in plan.leaves if p.leaf.path.startswith(f"{MODEL}.")]
        elif argument.name == FROZEN:
            frozen += plan.leaves
    gradients = sum(math.prod(p.shard_shape) for p in trained) * GRADIENT_BYTES
    activations = layout_activations(subject, layout, scale)
    errors += [str(error) for error in activations.errors]
    return LayoutMemory(
        arguments=sum(plan.bytes_per_device for plan in placed),
        gradients=gradients,
        errors=tuple(errors),
        residents=tuple(placed),
        trained=tuple(trained),
        frozen=tuple(frozen),
        hopeless=hopeless or bool(activations.errors) or not _whole_rows(subject, scale),
    )


def saves_everything(subject: LayoutSubject, layout: Layout) -> bool:
    """Whether all activations of the blocks are saved for the backward pass, so that none is recomputed."""
    if not subject.training or layout.recompute:
        return False
    policy = checkpoint_policy(getattr(model_config(subject), "gradient_checkpointing", True))
    return policy.disable or policy.save_block_internals is True


def saved_copies(subject: LayoutSubject, activation: LeafPlan, layout: Layout) -> int:
    """The number of copies of an activation that are alive at a time.

    For a backward pass each layer saves the residual stream and what the model's gradient checkpointing saves by name;
    where it saves everything, all named activations.
    """
    if not subject.training:
        return 1
    if activation.leaf.path != RESIDUAL:
        if (model := model_config(subject)) is not None and saves_everything(subject, layout):
            return max(1, sum(activation.leaf.path in layer.activations for layer in model.layers))
        return max(1, sum(saved_names(subject, activation, layout).values()))
    if (model := model_config(subject)) is not None:
        return len(model.layers)
    # Without a model (a plan of parameters alone) the stacked axis of the weights has the number of layers.
    stacks = (dict(plan.leaf.axes).get("layers", 1) for plan in subject.plan.sharding.leaves)
    return max(1, max(stacks, default=1))


def saves_by_name(subject: LayoutSubject) -> bool:
    """Whether a train step saves some activations of its blocks by name, and recomputes the others."""
    if not subject.training or (model := model_config(subject)) is None:
        return False
    names = checkpoint_policy(getattr(model, "gradient_checkpointing", True)).save_block_internals
    return isinstance(names, list | tuple) and bool(names)


def saved_names(subject: LayoutSubject, activation: LeafPlan, layout: Layout) -> Mapping[str, int]:
    """The names by which gradient checkpointing saves arrays with the axes of `activation` on the device, and the
    number of layers of each."""
    model = model_config(subject)
    if model is None or layout.recompute or activation.leaf.path == RESIDUAL:
        return {}
    policy_names = checkpoint_policy(getattr(model, "gradient_checkpointing", True)).save_block_internals
    # Checkpointing names arrays inside a block; they are matched with planned
    # activations by their feature axes.
    inner = {name: size for name, size in activation.leaf.axes if name not in (subject.batch_axis, "position")}
    return kept_by_name(model, inner, policy_names if isinstance(policy_names, list | tuple) else ())


def model_config(subject: LayoutSubject) -> LmConfig | None:
    """The configuration of the model, where the run has one."""
    return getattr(subject.plan.work, "model", None)


def microbatches(subject: LayoutSubject, scale: float = 1.0) -> int:
    """The number of microbatches of a train step, with `scale` times the run's rows in each."""
    # Activations of a plan are those of one microbatch, inputs those of the whole batch.
    batch = max(_batch_sizes(subject), default=1)
    return max(1, round(batch / (subject.rows * scale)))


def _batch_sizes(subject: LayoutSubject) -> list[int]:
    """The sizes of the batch axis in the inputs that are not a state."""
    return [
        size
        for argument in subject.program.inputs
        if not isinstance(argument.value, TrainState)
        for leaf in leaves(argument.value)
        for name, size in leaf.axes
        if name == subject.batch_axis
    ]


def _whole_rows(subject: LayoutSubject, scale: float) -> bool:
    """Whether the scaled batch has a whole number of rows, and divides the global batch in training."""
    rows = subject.rows * scale
    if rows != int(rows) or rows < 1:
        return False
    return not subject.training or all(size % rows == 0 for size in _batch_sizes(subject))


def _placed(subject: LayoutSubject, argument: Input, layout: Layout, scale: float) -> ShardingPlan:
    """The sharding of an input of the Program under a layout."""
    mappings, mesh, hbm = layout.mappings, layout.mesh, subject.hbm_bytes
    if isinstance(argument.value, TrainState):
        return plan_state(argument.value, mappings, mesh, hbm_bytes=hbm).whole
    if isinstance(argument.placement, ShardingPlan):
        # Arrays passed as a dictionary by path (those to be saved) have no named axes; their sharding plan has.
        named = argument.placement.by_path
        leaves_ = [replace(leaf, axes=named[leaf.path].leaf.axes) for leaf in leaves(argument.value)]
        return plan_sharding(leaves_, mappings, mesh, hbm_bytes=hbm)
    placement = argument.placement
    # An input that the compute mapping places follows the layout's; a fixed placement stays.
    if placement == subject.program.mappings.compute:
        placement = mappings.compute
    leaves_, findings = [], []
    for leaf in leaves(argument.value):
        mapping = placement.params_at(leaf.path) if isinstance(placement, Mappings) else AxisMapping(placement)
        plan, leaf_findings = place(_scaled(leaf, subject.batch_axis, scale), mapping, mesh)
        leaves_.append(plan)
        findings += leaf_findings
    return ShardingPlan(mesh=mesh, mappings=mappings, leaves=tuple(leaves_), findings=tuple(findings))


def layout_activations(subject: LayoutSubject, layout: Layout, scale: float = 1.0) -> ShardingPlan:
    """The named activations under a layout, of `scale` times as many rows."""
    scaled = [_scaled(plan.leaf, subject.batch_axis, scale) for plan in subject.plan.activations.leaves]
    return plan_activations(
        [
            Activation(
                name=leaf.path,
                axes=leaf.axes,
                mapping=constrained_by(leaf.path),
                dtype=leaf.dtype,
            )
            for leaf in scaled
        ],
        layout.mappings,
        layout.mesh,
    )


def _scaled(leaf: Leaf, batch_axis: str | None, scale: float) -> Leaf:
    axes = tuple((name, max(int(size * scale), 1) if name == batch_axis else size) for name, size in leaf.axes)
    return replace(leaf, axes=axes)


def _flow(tree: Mapping) -> str:
    inner = ", ".join(f"{key}: {_flow(value) if isinstance(value, Mapping) else value}" for key, value in tree.items())
    return "{" + inner + "}"
