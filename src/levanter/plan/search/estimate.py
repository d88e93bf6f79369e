"""Cost of a candidate by arithmetic: bytes on a chip, seconds of its matrix units and of its links.

It ranks candidates and explains why a neighbour lost; reported times come from the compiler. It counts

    gathers     parameters sharded over a mesh axis that does not shard the computation, once a pass over the layers,
                frozen ones too
    memory      weights read once a pass, parameters and statistics once a step, and the activations of each layer,
                written and read once a pass
    tensor      the sums of tensor parallelism in every part of a layer: for attention and `mlp` two all-reduces of the
                residual stream a layer and pass
    gradients   of trained parameters, reduced over the mesh axes that shard the batch and positions
    context     communication of attention to positions on other chips (`context_parallel_cost`)
    compute     the model's FLOPs at `MATMUL_EFFICIENCY` of peak, with one more forward pass for rematerialization

Of compute, HBM and links (gathers, gradients, context) the largest counts in full, and the others mostly overlap with
it (`HIDDEN`); the sums of tensor parallelism do not overlap.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from haliax_ext.abstract import Leaf
from haliax_ext.errors import ShardingError, gib
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import place
from haliax_ext.planner import ShardingPlan, plan_sharding
from levanter.hardware import Accelerator
from levanter.mesh import MeshConfig, ModelAxes, resolve
from levanter.models.activations import EMBEDDED, RESIDUAL, constrained_by
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.plan.comms import Network, axis_spans
from levanter.plan.context_parallel_cost import ContextParallelCost, causal_share, context_parallel_seconds
from levanter.plan.search.candidates import Candidate, Overrides
from levanter.runplan import RunPlan

MATMUL_EFFICIENCY = 0.65
"""The share of peak that matrix multiplications of a transformer reach on a TPU; it changes the order of two candidates
only if one of them is bound by its links."""
# The share of the shorter terms that overlaps with the longest. From compiled schedules: a layer that gathers its
# parameters for as long as it computes takes clearly longer than either.
HIDDEN = 0.7
# The least share of the activations not saved for the backward pass that is alive at one time in compiled programs.
ALIVE_AT_ONCE = 0.5
GRADIENT_BYTES = 4
# Norms' inputs and outputs, rotated queries and keys, gate, up and their product, some of them in float32: compiled
# steps of a Llama of 1.2 B parameters kept 7 times the named ones, those of one of 0.78 B 6 times.
KEPT_WITHOUT_REMAT = 6
_LOGITS = "logits"


class NothingToSearch(ValueError):
    """The run has no part whose layout can be searched."""


@dataclass(frozen=True, kw_only=True)
class SearchSubject:
    """The facts of a run that its layouts are costed by.

    Attributes:
        training: whether there is a backward pass.
        parameters: the model's leaves, in their storage dtype.
        statistics: other leaves that stay on the chips (optimizer state).
        frozen: the paths of parameters that are not trained: they have no gradients.
        activations: the named activations of a forward pass, with a batch of 1.
        batch_axis: the logical name of the batch axis.
        axes: the model's axes, and the names that mappings may use.
        tensor_axes: the axes of the layers that tensor parallelism shards.
        layers: their number.
        summed: the number of parts of all layers whose results are summed over tensor parallelism.
        positions: tokens in a row.
        global_batch: rows of a training step; None for scoring.
        flops_per_token: model FLOPs, attention over the causal half.
        compute_bytes: bytes of an element in the compute dtype.
        overrides: the run's rules for some parameters.
        attended: the share of all pairs of positions that the masks of attention leave visible.
    """

    training: bool
    parameters: tuple[Leaf, ...]
    statistics: tuple[Leaf, ...]
    frozen: frozenset[str]
    activations: tuple[Leaf, ...]
    batch_axis: str
    axes: ModelAxes
    tensor_axes: tuple[tuple[str, ...], ...]
    layers: int
    summed: int
    positions: int
    global_batch: int | None
    flops_per_token: float
    compute_bytes: int
    overrides: Overrides = field(default_factory=dict)
    attended: float = 0.5

    @property
    def trained(self) -> tuple[Leaf, ...]:
        """The parameters that have gradients."""
        return tuple(leaf for leaf in self.parameters if leaf.path not in self.frozen)

    @property
    def frozen_share(self) -> float:
        """The share of the parameters that is not trained, by elements."""
        whole = sum(math.prod(leaf.shape) for leaf in self.parameters)
        return 1 - sum(math.prod(leaf.shape) for leaf in self.trained) / max(whole, 1)


def search_subject(plan: RunPlan) -> SearchSubject:
    """The search subject of a plan.

    Raises:
        NothingToSearch: the plan has no searchable layout; the message has its reason.
    """
    searchable = plan.searchable
    if isinstance(searchable, str):
        raise NothingToSearch(f"{plan.entry_point}: {searchable}")
    load = plan.workloads[0]
    return SearchSubject(
        training=searchable.training,
        parameters=searchable.parameters,
        statistics=searchable.statistics,
        frozen=searchable.frozen,
        activations=tuple(
            # A batch of 1, to be scaled by the rows of each candidate.
            replace(p.leaf, axes=tuple((n, 1 if n == searchable.batch_axis else s) for n, s in p.leaf.axes))
            for p in plan.activations.leaves
        ),
        batch_axis=searchable.batch_axis,
        axes=ModelAxes(sizes=searchable.sizes, known=KNOWN_AXES, aliases=ALIASES),
        tensor_axes=searchable.tensor_axes,
        layers=searchable.layers,
        summed=searchable.summed,
        positions=searchable.sizes["position"],
        global_batch=searchable.global_batch,
        flops_per_token=load.flops_causal / load.tokens,
        compute_bytes=searchable.compute_bytes,
        overrides=searchable.overrides,
        attended=causal_share(searchable.windows, searchable.sizes["position"]),
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a candidate; bytes on a device, seconds of one pass over a batch (all microbatches of a step).

    Attributes:
        argument_bytes: parameters and optimizer state, exact.
        activation_bytes: activations and gradients, roughly.
        kept_bytes: the part of those that is alive at one time: gradients, and activations saved for the backward pass.
        tokens: of the batch.
        compute: matrix units.
        memory: HBM traffic.
        gathers: parameters over links.
        tensor: sums of tensor parallelism.
        gradients: over links.
        context_parallel: of keys and values, or heads, over links.
        problem: why it cannot run at all, in axis names; "" if it can.
    """

    argument_bytes: int = 0
    activation_bytes: int = 0
    kept_bytes: int = 0
    tokens: int = 0
    compute: float = 0.0
    memory: float = 0.0
    gathers: float = 0.0
    tensor: float = 0.0
    gradients: float = 0.0
    context_parallel: float = 0.0
    problem: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes on a device: parameters, state, activations and gradients."""
        return self.argument_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        """Seconds of one pass, with the shorter terms mostly hidden behind the longest."""
        overlapped = (self.compute, self.memory, self.gathers + self.gradients + self.context_parallel)
        return max(overlapped) + (1 - HIDDEN) * (sum(overlapped) - max(overlapped)) + self.tensor

    @property
    def seconds_per_token(self) -> float:
        """Seconds of one pass for each token of the batch."""
        return self.seconds / max(self.tokens, 1)

    def fits(self, hbm_bytes: int) -> bool:
        """Whether the candidate is worth compiling; lenient, since compilers need less than the full sum."""
        rest = ALIVE_AT_ONCE * (self.activation_bytes - self.kept_bytes)
        return not self.problem and self.argument_bytes + self.kept_bytes + rest <= hbm_bytes

    @property
    def waits_for(self) -> str:
        """The largest term of the time, in axis names."""
        seconds = {
            "matrix multiplications": self.compute,
            "HBM traffic": self.memory,
            "all-gathers of parameters (embed → data)": self.gathers,
            "sums over the axes that tensor parallelism shards (→ model)": self.tensor,
            "gradients over data": self.gradients,
            "keys and values over context": self.context_parallel,
        }
        return max(seconds, key=lambda name: seconds[name])


def estimate(candidate: Candidate, subject: SearchSubject, pod: Accelerator) -> Estimate:
    """Costs a candidate on a pod; one that cannot run has a `problem`."""
    try:
        resolved = resolve(
            MeshConfig(batch_axis_name=subject.batch_axis, **candidate.mesh_options(subject.overrides)),
            subject.axes,
            devices=pod.devices,
            granules=pod.slices,
            hbm_bytes=pod.hbm_bytes,
            prices=_context_parallel_cost(subject, pod),
        )
    except ShardingError as error:
        return Estimate(problem=_first_line(error))
    return estimate_layout(
        subject,
        pod,
        mesh=resolved.spec,
        mappings=resolved.mappings,
        rows=candidate.rows,
        remat=candidate.remat is not False,
    )


def estimate_layout(
    subject: SearchSubject, pod: Accelerator, *, mesh: MeshSpec, mappings: Mappings, rows: int, remat: bool
) -> Estimate:
    """Costs a layout on a pod; one that cannot run has a `problem`.

    Args:
        subject: the run.
        pod: the target.
        mesh: the layout's mesh axes.
        mappings: its mappings.
        rows: of each shard of the batch that are processed at a time.
        remat: whether the backward pass recomputes the layers.
    """
    plan = plan_sharding((*subject.parameters, *subject.statistics), mappings, mesh, hbm_bytes=pod.hbm_bytes)
    if plan.errors:
        problem = f"{gib(plan.bytes_per_device)} of {gib(pod.hbm_bytes)}: " if _replicated(plan) else ""
        return Estimate(argument_bytes=plan.bytes_per_device, problem=problem + _first_line(plan.errors[0]))
    whole_rows = rows * mesh.ways(mappings.compute.mesh_axes(subject.batch_axis))
    steps = 1 if subject.global_batch is None else max(1, subject.global_batch // whole_rows)
    tokens = whole_rows * steps * subject.positions
    network = Network.of(mesh, pod)
    passes = _passes(subject, remat=remat)
    gathered = _gathered(subject, mappings, mesh)
    # The array that tensor parallelism sums: the residual stream of a device's rows and positions.
    residual = rows * subject.positions * subject.axes.sizes["embed"] * subject.compute_bytes
    residual //= mesh.ways(mappings.compute.mesh_axes("position"))
    cuts = {axis for axes in subject.tensor_axes for name in axes for axis in mappings.compute.mesh_axes(name)}
    tensor_axes = [axis for axis in mesh.names if axis in cuts and mesh.shape[axis] > 1]
    # The head sums its result too.
    sums = subject.summed + 1
    flops = subject.flops_per_token * tokens * (passes.compute if subject.training else 1.0)
    on_device = _activation_bytes(subject.activations, subject, mappings, mesh, whole_rows)
    saved_bytes = _kept(subject, mappings, mesh, on_device, remat=remat) if subject.training else 0
    frozen_bytes = sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.leaf.path in subject.frozen)
    # The optimizer reads and writes all that is trained once a step; every
    # microbatch reads weights and activations.
    moved = (plan.bytes_per_device - frozen_bytes) * (2 if subject.training else 0)
    moved += steps * passes.traffic * (_weights_read(subject, mappings, mesh) + _activations_moved(subject, on_device))
    return Estimate(
        argument_bytes=plan.bytes_per_device,
        activation_bytes=saved_bytes + _at_work(subject, mappings, mesh, on_device),
        kept_bytes=saved_bytes,
        tokens=tokens,
        compute=flops / (pod.devices * pod.peak_flops() * MATMUL_EFFICIENCY),
        memory=moved / pod.hbm_bandwidth,
        gathers=steps * passes.forward * _seconds(network, "all-gather", gathered, subject.compute_bytes),
        tensor=steps
        * passes.tensor
        * sums
        * ((network.seconds("all-reduce", residual, axis_spans(mesh, *tensor_axes)) or 0.0) if tensor_axes else 0.0),
        gradients=steps * _gradient_seconds(subject, mappings, mesh, network) if subject.training else 0.0,
        context_parallel=steps
        * subject.layers
        * context_parallel_seconds(
            subject.axes.sizes,
            mappings,
            network,
            rows=rows,
            # As many as the passes with sums of tensor parallelism, without the backward pass.
            forward=max(1, passes.tensor - 1),
            backward=subject.training,
            itemsize=subject.compute_bytes,
            attended=subject.attended,
        ),
    )


def _context_parallel_cost(subject: SearchSubject, pod: Accelerator) -> ContextParallelCost | None:
    """The cost function by which `attention_mapping: auto` chooses on a pod, the same as in a run."""
    if pod.generation.platform != "tpu":
        return None
    return ContextParallelCost(
        accelerator=pod, backward=subject.training, itemsize=subject.compute_bytes, attended=subject.attended
    )


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Numbers of passes over the layers: `forward` gathers parameters, `tensor` has the sums of tensor parallelism,
    `traffic` moves bytes of HBM. Rematerialization multiplies the model's FLOPs by `compute`."""

    forward: int
    tensor: int
    traffic: int
    compute: float


def _passes(subject: SearchSubject, *, remat: bool) -> _Passes:
    if not subject.training:
        return _Passes(forward=1, tensor=1, traffic=1, compute=1.0)
    if not remat:
        # The backward pass has two products (of inputs and of weights) for each one of the forward pass.
        return _Passes(forward=2, tensor=2, traffic=3, compute=1.0)
    # Recomputation is one more forward pass: a third of forward and backward together (1 + 2 products), or half where
    # weights are frozen, which need no gradient of weights (1 + 1).
    return _Passes(forward=2, tensor=3, traffic=4, compute=1 + 1 / (3 - subject.frozen_share))


def _weights_read(subject: SearchSubject, mappings: Mappings, mesh: MeshSpec) -> int:
    """Bytes of all weights as a device reads them: gathered, in the compute dtype."""
    total = 0
    for leaf in subject.parameters:
        compute_axes = {axis for name in leaf.names for axis in mappings.compute.mesh_axes(name)}
        stored = {axis for name in leaf.names for axis in mappings.params_at(leaf.path).mesh_axes(name)}
        # Mesh axes that shard both storage and computation stay; the others have been gathered.
        total += _as_computed(leaf, subject) // mesh.ways(tuple(stored & compute_axes))
    return total * subject.compute_bytes


def _activations_moved(subject: SearchSubject, on_device: Mapping[str, int]) -> int:
    """Bytes of the activations of the layers and the head, each written once and read once."""
    layer_bytes = sum(size for name, size in on_device.items() if name != EMBEDDED and not name.startswith(_LOGITS))
    # Logits are planned for one chunk of positions of the head; over a row all its chunks move.
    chunks = sum(
        size * subject.positions // max(dict(leaf.axes).get("position", 1), 1)
        for leaf in subject.activations
        if leaf.path.startswith(_LOGITS)
        for size in (on_device[leaf.path],)
    )
    return 2 * (subject.layers * layer_bytes + chunks)


def _gathered(subject: SearchSubject, mappings: Mappings, mesh: MeshSpec) -> dict[tuple[str, ...], int]:
    """Elements of all parameters on a device after gathering, by the mesh axes that they are gathered over."""
    by_axes: dict[tuple[str, ...], int] = {}
    for leaf in subject.parameters:
        compute_axes = {axis for name in leaf.names for axis in mappings.compute.mesh_axes(name)}
        stored = {axis for name in leaf.names for axis in mappings.params_at(leaf.path).mesh_axes(name)}
        over = tuple(a for a in mesh.names if a in stored - compute_axes and mesh.shape[a] > 1)
        if over:
            elements = _as_computed(leaf, subject) // mesh.ways(tuple(stored & compute_axes))
            by_axes[over] = by_axes.get(over, 0) + elements
    return by_axes


def _as_computed(leaf: Leaf, subject: SearchSubject) -> int:
    """Elements of a parameter in units of the compute dtype: one stored in fewer bytes counts proportionally less."""
    return math.prod(leaf.shape) * min(leaf.dtype.itemsize, subject.compute_bytes) // subject.compute_bytes


def _seconds(network: Network, kind: str, elements: Mapping[tuple[str, ...], int], itemsize: int) -> float:
    times = [network.seconds(kind, n * itemsize, axis_spans(network.mesh, *over)) for over, n in elements.items()]
    return sum(t or 0.0 for t in times)


def _gradient_seconds(subject: SearchSubject, mappings: Mappings, mesh: MeshSpec, network: Network) -> float:
    """Seconds of summing gradients over the mesh axes of batch and positions, into the shards of the parameters."""
    compute = mappings.compute
    tokens = (*compute.mesh_axes(subject.batch_axis), *compute.mesh_axes("position"))
    batch = [axis for axis in tokens if mesh.shape.get(axis, 1) > 1]
    total = 0.0
    for leaf in subject.trained:
        stored = {axis for name in leaf.names for axis in mappings.params_at(leaf.path).mesh_axes(name)}
        elements = math.prod(size for _, size in leaf.axes) // mesh.ways(tuple(stored - set(batch)))
        scattered = tuple(a for a in batch if a in stored)
        rest = tuple(a for a in batch if a not in stored)
        if scattered:
            total += network.seconds("reduce-scatter", elements * GRADIENT_BYTES, axis_spans(mesh, *scattered)) or 0.0
            # After the reduce-scatter each device has its shard only, and the
            # all-reduce moves no more than that.
            elements //= mesh.ways(scattered)
        if rest:
            total += network.seconds("all-reduce", elements * GRADIENT_BYTES, axis_spans(mesh, *rest)) or 0.0
    return total


def _kept(
    subject: SearchSubject, mappings: Mappings, mesh: MeshSpec, on_device: Mapping[str, int], *, remat: bool
) -> int:
    """Bytes of the activations that all layers save for the backward pass, and of the gradients."""
    plan = plan_sharding(subject.trained, mappings, mesh)
    gradients = sum(math.prod(p.shard_shape) for p in plan.leaves) * GRADIENT_BYTES
    layer_bytes = on_device[RESIDUAL] if remat else KEPT_WITHOUT_REMAT * _of_layer(on_device)
    return gradients + math.ceil(subject.layers * layer_bytes)


def _at_work(subject: SearchSubject, mappings: Mappings, mesh: MeshSpec, on_device: Mapping[str, int]) -> int:
    """Bytes of the working set of a layer and the head: activations, and two gathered layers."""
    layer_bytes = _of_layer(on_device)
    logits = sum(on_device.values()) - layer_bytes
    gathered = sum(_gathered(subject, mappings, mesh).values()) * subject.compute_bytes
    # A backward pass has a layer's activations and their gradients.
    passes = 2 if subject.training else 1
    # Two gathered layers: the next one is prefetched while one computes.
    return passes * layer_bytes + logits + 2 * gathered // max(subject.layers, 1)


def _of_layer(on_device: Mapping[str, int]) -> int:
    return sum(size for name, size in on_device.items() if not name.startswith(_LOGITS))


def _activation_bytes(
    activations: Iterable[Leaf], subject: SearchSubject, mappings: Mappings, mesh: MeshSpec, rows: int
) -> dict[str, int]:
    by_path = {}
    for leaf in activations:
        axes = tuple((name, rows if name == subject.batch_axis else size) for name, size in leaf.axes)
        which = constrained_by(leaf.path)
        # Without a mapping of its own, attention leaves its arrays as `compute`
        # has them, which the other names cover.
        if which == "attention" and not mappings.attention:
            continue
        by_role = {"residual": mappings.residual_stream, "attention": mappings.inside_attention}
        mapping = by_role.get(which, mappings.compute)
        plan, _ = place(replace(leaf, axes=axes), mapping, mesh, role="activation")
        by_path[leaf.path] = plan.bytes_per_device
    return by_path


def _replicated(plan: ShardingPlan) -> bool:
    return any(f.kind == "replicated" and f.error is not None for f in plan.findings)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
