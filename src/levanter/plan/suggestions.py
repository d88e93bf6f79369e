"""Suggests layouts that may fit, those with the fewest changes of the config first, by arithmetic.

A *change* is one line of YAML that turns a layout into another one. The search tries single changes in this order, and
then further changes on top of the layouts that need least memory:

    parameters   shard an axis of a replicated array over mesh axes that do not shard it, those between slices last
    residual     shard the residual stream between blocks
    rows         fewer rows that a device takes at once: the most that fit
    blocks       recompute the blocks of a train step that saves activations of them, or send their inputs to the host
    mesh         move a factor from one mesh axis to another

The planner shards every array under each layout, so a run accepts each suggestion. The bytes that a layout needs are
estimated as its lower bound times a factor: that of the refused layout, where the compiler stated its bytes, else the
median of compiled steps (`COMPILED_OVER_BOUND`). A layout is suggested if the estimate leaves `HEADROOM` of a chip.
`levanter.plan.preflight.advice` compiles suggestions, and tries other recipes and pods.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from haliax_ext.divisibility import divisors
from haliax_ext.errors import gib
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import LeafPlan, show_axes
from levanter.mesh.heads import GROUP_AXIS, KV_HEAD, Q_PER_GROUP, declared_by_groups, distribute
from levanter.models.activations import RESIDUAL
from levanter.plan.hbm_lower_bound import HbmLowerBound, layout_lower_bound
from levanter.plan.layout_memory import (
    AXES,
    BLOCKS,
    OFFLOAD,
    ROWS,
    Layout,
    LayoutChange,
    LayoutMemory,
    LayoutSubject,
    changes_as_yaml,
    layout_activations,
    layout_memory,
    model_config,
    saves_by_name,
    saves_everything,
)
from levanter.runplan import Searchable

MOST_CHANGES = 3
HEADROOM = 0.02
"""The share of a chip that a suggestion leaves: compilers of other versions need up to that much more."""
BEAM = 4
"""Layouts to which further changes are applied."""
COMPILED_OVER_BOUND: tuple[float, float, float] = (1.0, 1.1, 1.5)
"""Bytes that compiled train steps needed, over their lower bound: least, median and most of the steps in
`tests/golden/step_memory.json`, which nobody tuned to."""
HEADS, VOCAB = "heads", "vocab"


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A layout that may fit.

    Attributes:
        changes: of the config.
        known: lower bound of the bytes on a chip.
        expected: an estimate of the bytes on a chip.
        unit: the word for a device.
        training: whether the Program is a train step, of which the range of compiled bytes is known.
    """

    changes: tuple[LayoutChange, ...]
    known: HbmLowerBound
    expected: int
    unit: str
    training: bool = True

    @property
    def yaml(self) -> str:
        """The changes, as one line."""
        return changes_as_yaml(self.changes)

    @property
    def words(self) -> tuple[str, ...]:
        """The changes, as words of a command line."""
        return tuple(f"--{change.section}.{key}={value}" for change in self.changes for key, value in change.entries)

    @property
    def offloads(self) -> bool:
        """Whether activations are sent to host memory; compilers take half an hour over such a step."""
        return any(("gradient_checkpointing", OFFLOAD) in change.entries for change in self.changes)

    def __str__(self) -> str:
        return f"may fit: {self.yaml}  # {self.reservation}"

    @property
    def reservation(self) -> str:
        """What is known of its bytes without a compiler."""
        known = f"at least {gib(self.known.total)} on a {self.unit}"
        if not self.known.recomputed:
            return f"{known}, not compiled: without {self.known.lacking}"
        if not self.training:
            return f"{known}, not compiled: without gathered weights, {self.known.lacking}"
        least, _, most = COMPILED_OVER_BOUND
        return f"{known}; train steps needed {least:.1f} to {most:.1f} × their bound when compiled"


def suggest_layouts(subject: LayoutSubject, *, factor: float | None = None) -> Iterator[Suggestion]:
    """The layouts that a run would accept and that probably fit, those with the fewest changes first.

    Among layouts with equally many changes, new rules are preferred to a smaller batch, that to recomputed blocks, and
    those to other mesh sizes.

    Args:
        subject: the Program.
        factor: bytes that the Program needs over their lower bound; by default `bound_factor`.
    """
    yield from _suggested(subject, factor)
    # What a run saves by name was chosen: that it is recomputed is suggested only where nothing else fits.
    if saves_by_name(subject):
        yield from _suggested(replace(subject, recompute_named=True), factor)


def _suggested(subject: LayoutSubject, factor: float | None) -> Iterator[Suggestion]:
    base = layout_memory(subject, subject.now)
    now = layout_lower_bound(subject, subject.now, base)
    factor = bound_factor(subject) if factor is None else factor
    # Breadth first: every layout with n changes is judged before one with n + 1.
    beam = [(subject.now, base, now.total)]
    seen: set[frozenset[LayoutChange]] = set()
    for _ in range(MOST_CHANGES):
        candidates: list[tuple[Layout, LayoutMemory, int]] = []
        fitting: list[tuple[Layout, Suggestion]] = []
        for layout, figures, before in beam:
            for candidate in neighbour_layouts(subject, layout, figures):
                # The same changes in another order are the same layout.
                if frozenset(candidate.changes) in seen:
                    continue
                seen.add(frozenset(candidate.changes))
                memory = layout_memory(subject, candidate)
                if memory.hopeless:
                    continue
                known = layout_lower_bound(subject, candidate, memory)
                candidates.append((candidate, memory, known.total))
                # A change that saves nothing is no part of a suggestion.
                if memory.errors or known.total >= before:
                    continue
                expected = _expected(known, factor, now)
                if expected is not None and expected <= (1 - HEADROOM) * subject.hbm_bytes:
                    suggestion = Suggestion(
                        changes=candidate.changes,
                        known=known,
                        expected=expected,
                        unit=subject.plan.target.unit,
                        training=subject.training,
                    )
                    fitting.append((candidate, suggestion))
        # A generator: callers stop at the first suggestion that the compiler accepts, before deeper levels are planned.
        yield from (suggestion for _, suggestion in sorted(fitting, key=lambda pair: pair[0].distance))
        # Layouts with errors that more sharding can repair stay in the beam: a
        # first change may need a second one.
        beam = sorted(candidates, key=lambda entry: entry[2])[:BEAM]


def _expected(known: HbmLowerBound, factor: float, now: HbmLowerBound) -> int | None:
    """An estimate of a layout's bytes.

    None where the bound says too little: most of what is saved without recomputation has no name.
    """
    # The factor belongs to steps of one kind; the other kind gets the median of compiled steps.
    if known.recomputed == now.recomputed:
        return round(known.total * factor) if known.recomputed or factor > 1 else None
    return round(known.total * COMPILED_OVER_BOUND[1])


def bound_factor(subject: LayoutSubject) -> float:
    """Bytes that a Program needs over their lower bound, from the compiler's figure where there is one.

    1 where nothing is known: without a figure, of Programs that do not train and of steps that recompute nothing.
    """
    known = layout_lower_bound(subject, subject.now, layout_memory(subject, subject.now))
    if subject.compiled_bytes is not None:
        return max(1.0, subject.compiled_bytes / max(known.total, 1))
    return COMPILED_OVER_BOUND[1] if subject.training and known.recomputed else 1.0


def nearest_suggestion(subject: LayoutSubject) -> Suggestion | None:
    """The first suggestion; one that sends activations to the host only where there is no other."""
    offloading: Suggestion | None = None
    for suggestion in suggest_layouts(subject):
        if not suggestion.offloads:
            return suggestion
        offloading = offloading or suggestion
    return offloading


def neighbour_layouts(subject: LayoutSubject, layout: Layout, figures: LayoutMemory) -> Iterator[Layout]:
    """Layouts one change away, in the order of preference."""
    yield from _cut_parameters(subject, layout, figures)
    # Without temporaries (a Program whose inputs are too large) fewer rows or a
    # sharded residual stream save nothing.
    if subject.compiled_bytes is not None or subject.training:
        yield from _cut_residual(subject, layout)
        yield from _fewer_rows(subject, layout)
        yield from _recomputed(subject, layout)
    for sizes in _other_sizes(layout):
        yield _with_rows(subject, layout, sizes) if subject.training else sizes


def _cut_parameters(subject: LayoutSubject, layout: Layout, figures: LayoutMemory) -> Iterator[Layout]:
    """Shards the most replicated arrays over mesh axes that do not shard them yet."""
    mesh, mappings = layout.mesh, layout.mappings
    batch = mappings.compute.mesh_axes(subject.batch_axis) if subject.batch_axis else ()

    def repeated(plan: LeafPlan) -> int:
        # Bytes that a device would save if the mesh axes over which the array is replicated sharded it.
        return plan.bytes_per_device - plan.bytes_per_device // mesh.ways(plan.replicated_over)

    tensor = tensor_axes(subject)
    worst = sorted((p for p in figures.residents if p.replicated_over), key=repeated, reverse=True)
    for plan in worst[:BEAM]:
        free = tuple(axis for axis in plan.replicated_over if axis not in mesh.dcn)
        # All free mesh axes at once, then single ones: sizes may divide by one and not by the product.
        subsets = [free, *((axis,) for axis in free)] if len(free) > 1 else [free] if free else []
        # A parameter that is sharded over DCN is gathered over the slowest network in every step: the last way.
        between = tuple(axis for axis in plan.replicated_over if axis in mesh.dcn)
        subsets += [between, (*between, *free)] if between and free else [between] if between else []
        for over in subsets:
            # Mesh axes that shard the batch can shard parameters, but no other axis of activations.
            shared = not set(over) & set(batch)
            for name in _axes_to_cut(plan, tensor, shared=shared):
                rules = _rules(plan, name, over, mesh)
                if rules is not None:
                    yield _with_rules(layout, name, over, rules, shared=shared and name in tensor)


def tensor_axes(subject: LayoutSubject) -> tuple[str, ...]:
    """Axes that are sharded for parameters and activations alike: those that the model's layers name, and `vocab`."""
    searchable = subject.plan.searchable
    model = searchable if isinstance(searchable, Searchable) else getattr(subject.plan.work, "model", None)
    cuts: tuple[tuple[str, ...], ...] = getattr(model, "tensor_axes", ())
    # Heads come first, then `vocab`: the order in which `_axes_to_cut` prefers axes for tensor parallelism.
    names = [HEADS if KV_HEAD in axes else axes[0] for axes in cuts]
    return tuple(dict.fromkeys((*(name for name in names if name == HEADS), VOCAB, *names)))


def _axes_to_cut(plan: LeafPlan, tensor: tuple[str, ...], *, shared: bool) -> list[str]:
    """The axes of a leaf worth sharding, the usual ones first; `heads` stands for both of its axes."""
    # A scan slices the stacked axis of layers, so sharding it would gather a
    # layer from one device in every step.
    names = [name for name in plan.leaf.names if name != "layers" and not name.startswith("_")]
    if Q_PER_GROUP in names or KV_HEAD in names:
        names = [HEADS, *(name for name in names if name not in (KV_HEAD, Q_PER_GROUP))]
    # Mesh axes without the batch: tensor parallelism first. Mesh axes of the batch: FSDP, along `embed`.
    order = (*tensor, "embed") if shared else ("embed", *tensor)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _rules(
    plan: LeafPlan, name: str, over: tuple[str, ...], mesh: MeshSpec
) -> Mapping[str, tuple[str, ...] | None] | None:
    """Rules that shard axis `name` of a leaf over more mesh axes; `None` where sizes do not divide."""
    cuts = dict(zip(plan.leaf.names, plan.mesh_axes, strict=True))
    sizes = dict(plan.leaf.axes)
    if name != HEADS:
        # Mesh axes between slices come first, so that the devices of a slice hold neighbouring parts.
        between = tuple(a for a in over if a in mesh.dcn)
        axes = (*between, *(a for a in cuts[name] if mesh.shape[a] > 1), *(a for a in over if a not in mesh.dcn))
        return {name: axes} if sizes[name] % mesh.ways(axes) == 0 else None
    # Heads that are sharded already would need a redistribution of both axes; such layouts are not tried.
    if any(cuts.get(axis) for axis in (KV_HEAD, Q_PER_GROUP)) or KV_HEAD not in sizes:
        return None
    distribution = distribute(over, kv_heads=sizes[KV_HEAD], q_per_group=sizes.get(Q_PER_GROUP, 1), mesh=mesh)
    return (
        None
        if distribution is None
        else {KV_HEAD: distribution.kv_head or None, Q_PER_GROUP: distribution.q_heads_per_group or None}
    )


def _with_rules(
    layout: Layout,
    name: str,
    over: tuple[str, ...],
    rules: Mapping[str, tuple[str, ...] | None],
    *,
    shared: bool,
) -> Layout:
    mappings = layout.mappings
    groups = rules.get(Q_PER_GROUP) if name == HEADS else None
    declared = declared_by_groups(groups or ())
    # In YAML `heads` takes the mesh axes; the run distributes them over kv heads and groups as `_rules` does.
    written = over if name == HEADS else rules[name]
    section = "trainer.mesh.shared_mapping" if shared else "trainer.mesh.param_mapping"
    return replace(
        layout,
        mappings=replace(
            mappings,
            params=mappings.params.merged(rules),
            compute=mappings.compute.merged(rules) if shared else mappings.compute,
            declared=(*mappings.declared, *(d for d in declared if d not in mappings.declared)),
        ),
        between=layout.between or any(axis in layout.mesh.dcn for axis in over),
        changes=(*layout.changes, LayoutChange(section=section, entries=((name, show_axes(written or ())),))),
    )


def _cut_residual(subject: LayoutSubject, layout: Layout) -> Iterator[Layout]:
    """Shards the residual stream between blocks over a mesh axis that does not shard the batch."""
    residual = next((p for p in layout_activations(subject, layout).leaves if p.leaf.path == RESIDUAL), None)
    batch = layout.mappings.compute.mesh_axes(subject.batch_axis) if subject.batch_axis else ()
    if residual is None:
        return
    for over in residual.replicated_over:
        for name in ("embed", "position"):
            if over in batch or name not in residual.leaf.names or layout.mappings.residual_stream.mesh_axes(name):
                continue
            yield replace(
                layout,
                mappings=replace(layout.mappings, residual=layout.mappings.residual.merged({name: over})),
                changes=(
                    *layout.changes,
                    LayoutChange(section="trainer.mesh.residual_mapping", entries=((name, over),)),
                ),
            )


def _fewer_rows(subject: LayoutSubject, layout: Layout) -> Iterator[Layout]:
    """The divisors of a device's rows, the largest first."""
    per_device = subject.rows * layout.rows / subject.ways(subject.now)
    key = "per_device_parallelism" if subject.training else "per_device_eval_parallelism"
    if per_device != int(per_device):
        return
    # A mesh change may have set the rows already; the key can be written once.
    others = tuple(change for change in layout.changes if change.section != ROWS)
    for rows in reversed(divisors(int(per_device))[:-1]):
        change = LayoutChange(section=ROWS, entries=((key, str(rows)),))
        yield replace(layout, rows=layout.rows * rows / per_device, changes=(*others, change))


def _recomputed(subject: LayoutSubject, layout: Layout) -> Iterator[Layout]:
    """Recomputes the blocks of a train step that saves all or some of their activations, or sends their inputs to the
    host."""
    named = subject.recompute_named and not layout.recompute and saves_by_name(subject)
    if named or saves_everything(subject, layout):
        change = LayoutChange(section=BLOCKS, entries=(("gradient_checkpointing", "true"),))
        yield replace(layout, recompute=True, changes=(*layout.changes, change))
    elif subject.training and layout.recompute != OFFLOAD and model_config(subject) is not None:
        others = tuple(change for change in layout.changes if change.section != BLOCKS)
        change = LayoutChange(section=BLOCKS, entries=(("gradient_checkpointing", OFFLOAD),))
        yield replace(layout, recompute=OFFLOAD, changes=(*others, change))


def _with_rows(subject: LayoutSubject, before: Layout, layout: Layout) -> Layout:
    """Adds the rows that a device takes at once as a change, where the batch has another number of shards.

    Without the key a run takes all rows of a device at once: with fewer shards of the batch more than were counted
    here.
    """
    per_device, ways = subject.rows * before.rows / subject.ways(subject.now), subject.ways(layout)
    # The global batch stays: with more shards of it a device has proportionally
    # fewer rows, and never more than before.
    fewer = min(per_device, per_device * subject.ways(before) / ways)
    if ways == subject.ways(before) or per_device != int(per_device):
        return layout
    if fewer != int(fewer):
        return layout
    change = LayoutChange(section=ROWS, entries=(("per_device_parallelism", str(int(fewer))),))
    return replace(layout, rows=layout.rows * fewer / per_device, changes=(*layout.changes, change))


def _other_sizes(layout: Layout) -> Iterator[Layout]:
    """Moves a factor of one mesh axis to another one that parameter rules use, small factors first."""
    mesh = layout.mesh
    used_axes = layout.mappings.params.used_mesh_axes
    # DCN axes are fixed by the number of slices, and `group` follows from the heads of the model.
    for to in (axis for axis in mesh.names if axis in used_axes and axis not in mesh.dcn and axis != GROUP_AXIS):
        for giver, size in mesh.axes:
            if giver == to or giver in mesh.dcn or size == 1:
                continue
            for factor in (n for n in range(2, size + 1) if size % n == 0):
                sizes = {**mesh.shape, to: mesh.shape[to] * factor, giver: size // factor}
                entries = tuple((axis, str(sizes[axis])) for axis in (to, giver))
                yield replace(
                    layout,
                    mesh=replace(mesh, axes=tuple((axis, sizes[axis]) for axis in mesh.names)),
                    changes=(*layout.changes, LayoutChange(section=AXES, entries=entries)),
                )
