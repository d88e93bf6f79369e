"""Suggests the layout that fits with the fewest changes of the config, by arithmetic.

A *change* is one line of YAML that turns a layout into another one. The search tries single changes in this order, and
then further changes on top of the layouts that need least memory:

    parameters   shard an axis of a replicated array over mesh axes that do not shard it
    residual     shard the residual stream between blocks
    rows         halve the rows that a device takes at once
    blocks       recompute the blocks of a train step that saves activations of them
    mesh         move a factor from one mesh axis to another

The planner shards every array under each layout, so a run accepts each suggestion. Bytes of inputs are exact.
Temporaries are scaled from the compiler's figure by the named activations and gradients: an estimate, never less than
the lower bound. Without a figure of the compiler, or where it is for a step without recomputation and the layout
recomputes, only the lower bound is known. Then a layout "would fit" if the lower bound, with all named activations of
one layer, takes at most `NAMED_SHARE` of a chip, and otherwise it "might fit". No suggestion is compiled before it is
printed; its line names what the sum leaves out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from haliax_ext.errors import gib
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import LeafPlan, show_axes
from levanter.mesh.heads import GROUP_AXIS, KV_HEAD, Q_PER_GROUP, declared_by_groups, distribute
from levanter.models.activations import RESIDUAL
from levanter.plan.hbm_lower_bound import HbmLowerBound, layout_lower_bound
from levanter.plan.layout_memory import (
    AXES,
    BLOCKS,
    ROWS,
    Layout,
    LayoutChange,
    LayoutMemory,
    LayoutSubject,
    layout_activations,
    layout_memory,
    saves_by_name,
    saves_everything,
)
from levanter.runplan import Searchable

MOST_CHANGES = 3
NAMED_SHARE = 0.8
"""The share of a chip that known bytes may take without a figure of the compiler: in the train steps that were
compiled, unnamed bytes took up to 16 % of a chip."""
BEAM = 4
"""Layouts to which further changes are applied."""
HEADS, VOCAB = "heads", "vocab"


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A layout that fits.

    Attributes:
        yaml: the changes, as one line.
        known: lower bound of the bytes on a chip.
        total: with temporaries, estimated; `None` where no figure of the compiler allows an estimate.
        roomy: whether the layout probably fits with the bytes that the lower bound leaves out.
    """

    yaml: str
    known: HbmLowerBound
    total: int | None
    roomy: bool

    def __str__(self) -> str:
        line = f"{'would' if self.roomy else 'might'} fit: {self.yaml}  # {gib(self.known.inputs)} of inputs on a chip"
        if self.total is not None:
            return f"{line}, about {gib(self.total)} in all (estimated, not compiled)"
        return f"{line}, at least {gib(self.known.total)} in all (not compiled: without {self.known.lacking})"


def suggest_layout(subject: LayoutSubject) -> Suggestion | None:
    """The layout that a run would accept and that fits, by the fewest changes; None where none is known.

    What a run saves by name was chosen: that it is recomputed is suggested only where nothing else fits, and that
    parameters are sharded between slices only where that does not help either.
    """
    tries = [subject]
    if saves_by_name(subject):
        tries.append(replace(subject, recompute_named=True))
    if any(subject.plan.mesh.shape[axis] > 1 for axis in subject.plan.mesh.dcn):
        tries.append(replace(tries[-1], over_dcn=True))
    return next(filter(None, map(_suggested, tries)), None)


def _suggested(subject: LayoutSubject) -> Suggestion | None:
    """The layout that a run would accept and that fits, by the fewest changes.

    Among layouts with equally many changes, new rules are preferred to a smaller batch, that to recomputed blocks, and
    those to other mesh sizes.
    """
    base = layout_memory(subject, subject.now)
    beam = [(subject.now, base)]
    tight: Suggestion | None = None
    seen: set[frozenset[LayoutChange]] = set()
    for _ in range(MOST_CHANGES):
        candidates: list[tuple[Layout, LayoutMemory]] = []
        fitting: list[tuple[Layout, Suggestion]] = []
        for layout, figures in beam:
            for candidate in neighbour_layouts(subject, layout, figures):
                # The same changes in another order are the same layout.
                if frozenset(candidate.changes) in seen:
                    continue
                seen.add(frozenset(candidate.changes))
                memory = layout_memory(subject, candidate)
                if not memory.hopeless:
                    candidates.append((candidate, memory))
                    suggestion = _judged(subject, candidate, memory, base)
                    if suggestion is not None:
                        fitting.append((candidate, suggestion))
        # A layout that probably fits ends the search at this number of changes;
        # one that only might fit does not.
        roomy = [pair for pair in fitting if pair[1].roomy]
        if roomy:
            return min(roomy, key=lambda pair: pair[0].distance)[1]
        if tight is None and fitting:
            tight = min(fitting, key=lambda pair: pair[1].known.total)[1]
        # Layouts with errors that more sharding can repair stay in the beam: a
        # first change may need a second one.
        beam = sorted(candidates, key=lambda pair: pair[1].arguments + pair[1].temporaries)[:BEAM]
    return tight


def _judged(subject: LayoutSubject, layout: Layout, figures: LayoutMemory, base: LayoutMemory) -> Suggestion | None:
    """The suggestion of a layout; None where a run would refuse it or it needs more than a chip has."""
    if figures.errors:
        return None
    known = layout_lower_bound(subject, layout, figures)
    # The compiled figure is for saved activations; it does not scale to blocks that are recomputed.
    total = None if layout.recompute else subject.total(figures, base)
    if total is not None:
        # The estimate scales a compiled figure and may come out below what is certain.
        total = max(total, known.total)
    if (known.total if total is None else total) > subject.hbm_bytes:
        return None
    roomy = total is not None or (known.recomputed and known.likely <= NAMED_SHARE * subject.hbm_bytes)
    return Suggestion(yaml=layout.yaml, known=known, total=total, roomy=roomy)


def neighbour_layouts(subject: LayoutSubject, layout: Layout, figures: LayoutMemory) -> Iterator[Layout]:
    """Layouts one change away, in the order of preference."""
    yield from _cut_parameters(subject, layout, figures)
    # Without temporaries (a Program whose inputs are too large) fewer rows or a
    # sharded residual stream save nothing.
    if subject.compiled_temporaries is not None or subject.training:
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
        # Sharding a parameter over DCN gathers it over the slowest network in every step: only if nothing else fits.
        free = tuple(axis for axis in plan.replicated_over if subject.over_dcn or axis not in mesh.dcn)
        # All free mesh axes at once, then single ones: sizes may divide by one and not by the product.
        subsets = [free, *((axis,) for axis in free)] if len(free) > 1 else [free] if free else []
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
        axes = (*(a for a in cuts[name] if mesh.shape[a] > 1), *over)
        # Slices first: then each holds a range of what is sharded.
        axes = tuple(sorted(axes, key=lambda axis: axis not in mesh.dcn))
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
    per_device = subject.rows * layout.rows / subject.ways(subject.now)
    key = "per_device_parallelism" if subject.training else "per_device_eval_parallelism"
    if per_device == int(per_device) and per_device % 2 == 0:
        change = LayoutChange(section=ROWS, entries=((key, str(int(per_device) // 2)),))
        yield replace(layout, rows=layout.rows / 2, changes=(*layout.changes, change))


def _recomputed(subject: LayoutSubject, layout: Layout) -> Iterator[Layout]:
    """Recomputes the blocks of a train step that saves all or some of their activations."""
    named = subject.recompute_named and not layout.recompute and saves_by_name(subject)
    if named or saves_everything(subject, layout):
        change = LayoutChange(section=BLOCKS, entries=(("gradient_checkpointing", "true"),))
        yield replace(layout, recompute=True, changes=(*layout.changes, change))


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
