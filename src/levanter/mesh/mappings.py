"""Last step of `resolve`: the mappings of a run as checked values, and everything that was decided on the way."""

from dataclasses import dataclass

from haliax_ext.errors import IndivisibleError, MeshError, ShardingError, UnknownAxisError, nearest, raise_all
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes
from levanter.mesh.config import MeshConfig, ModelAxes
from levanter.mesh.context_parallel import ContextParallel, Method
from levanter.mesh.heads import HEADS, KV_HEAD, ExpandedRules, MeshRules

ACTIVATION_AXES = frozenset({"position", "key_position", "page", "slot", "kv"})
"""Axes of activations and caches that a model does not list: a rule for one of them counts as sharding something."""


@dataclass(frozen=True, kw_only=True)
class ResolvedMesh:
    """The mesh and mappings of a run, and every decision the user did not write.

    Attributes:
        spec: mesh axis names and sizes.
        mappings: parameters, compute, residual, attention and overrides, `heads` expanded.
        notes: a line for each decision and for each rule without effect.
        batch_axis: logical name of the batch axis.
        method: how positions on several devices attend to each other; None where each device has whole sequences.
    """

    spec: MeshSpec
    mappings: Mappings
    notes: tuple[str, ...]
    batch_axis: str
    method: Method | None = None

    @property
    def batch_ways(self) -> int:
        """The number of shards of the batch."""
        return self.spec.ways(self.mappings.compute.mesh_axes(self.batch_axis))

    @property
    def position_ways(self) -> int:
        """The number of shards of a sequence's positions."""
        return self.spec.ways(self.mappings.compute.mesh_axes("position"))

    @property
    def query_ways(self) -> int:
        """The number of shards of a sequence's queries inside attention."""
        return self.spec.ways(self.mappings.inside_attention.mesh_axes("position"))


def resolved_mesh(
    config: MeshConfig, model: ModelAxes, rules: MeshRules, context_parallel: ContextParallel
) -> ResolvedMesh:
    """Checks every mapping against the names of the model and the mesh, and collects the notes.

    Args:
        config: what the user wrote.
        model: its axes.
        rules: of all mappings, expanded.
        context_parallel: the mapping inside of attention.

    Raises:
        ShardingError: everything that is wrong with names, together.
    """
    spec, used = rules.spec, {*model.sizes, rules.batch}
    notes, problems = [*rules.notes], [*rules.problems]
    declared: set[DeclaredReplication] = set()

    def checked(expanded: ExpandedRules, where: str, *extra_axes: str) -> AxisMapping:
        notes.extend(expanded.notes)
        declared.update(expanded.declared)
        if expanded.problem is not None:
            problems.append(expanded.problem)
        # Order is kept: under `on_conflict: first_wins` it decides.
        mapping = AxisMapping(expanded.rules)
        where = f"trainer.mesh: {where}"
        try:
            for note in mapping.check(known=model.known, used=used | {*extra_axes}, mesh=spec, where=where):
                # A shared rule is in both mappings; one note about it is enough.
                text = note.removeprefix(f"{where}: ")
                if not any(earlier.endswith(text) for earlier in notes):
                    notes.append(note)
        except ShardingError as error:
            problems.append(error)
        return mapping

    params, compute = checked(rules.params, "parameter mapping"), checked(rules.compute, "compute mapping")
    # Attention rules may name `key_position`, which is an axis of activations only inside of attention.
    checked(rules.attention, "attention_mapping", *(["key_position"] if "position" in model.sizes else []))
    notes += context_parallel.notes
    problems += context_parallel.problems
    # Exchanging heads gives each device whole sequences, which need no zigzag order.
    is_zigzag = context_parallel.order == "zigzag" and context_parallel.method not in (None, "heads")
    mappings = Mappings(
        # Parameters and activations are the outermost mappings: a removed default leaves nothing to remove there.
        params=AxisMapping(dict(params)),
        compute=AxisMapping(dict(compute)),
        residual=checked(rules.residual, "residual_mapping"),
        attention=context_parallel.attention,
        zigzag=("position",) if is_zigzag else (),
        # Overrides keep their unmapped names: they are merged over `params` leaf by leaf.
        overrides=tuple(
            (pattern, checked(expanded, f"overrides[{pattern!r}]")) for pattern, expanded in rules.overrides
        ),
        declared=tuple(sorted(declared, key=lambda replication: replication.mesh_axes)),
        allow_replicated=tuple(config.allow_replicated),
        on_conflict=config.on_conflict,
    )
    problems += _unknown_idle_axes(config, spec)
    # What follows assumes consistent mappings, so errors are raised first.
    raise_all(_distinct(problems))
    idle, idle_notes = _idle_axes(config, spec, mappings, model=model, batch=rules.batch)
    raise_all(idle)
    notes += [*_residual_notes(mappings, spec), *idle_notes]
    return ResolvedMesh(
        spec=spec,
        mappings=mappings,
        notes=tuple(dict.fromkeys(notes)),
        batch_axis=rules.batch,
        method=context_parallel.method,
    )


def _residual_notes(mappings: Mappings, mesh: MeshSpec) -> list[str]:
    """A note where a mesh axis shards positions in the compute mapping but not in the residual stream."""
    inside, between = mappings.compute.mesh_axes("position"), mappings.residual.mesh_axes("position")
    left_out = [axis for axis in inside if axis not in between and mesh.shape[axis] > 1]
    if not between or not left_out:
        return []
    return [
        f"residual_mapping: position → {show_axes(between)} omits {', '.join(left_out)}, which shards it in the "
        f"compute mapping: every block gathers over it; {show_axes((*inside, *between))} does not"
    ]


def _unknown_idle_axes(config: MeshConfig, spec: MeshSpec) -> list[ShardingError]:
    """Entries of `allow_idle_axes` that are no mesh axes."""
    return [
        UnknownAxisError(
            f"trainer.mesh.allow_idle_axes: {name!r} is not a mesh axis of {spec}",
            suggestion=f"did you mean {' or '.join(close)}?" if (close := nearest(name, spec.names)) else None,
        )
        for name in config.allow_idle_axes
        if name not in spec.names
    ]


def _idle_axes(
    config: MeshConfig, spec: MeshSpec, mappings: Mappings, *, model: ModelAxes, batch: str
) -> tuple[list[ShardingError], list[str]]:
    """Mesh axes along which every device computes the same: errors where they shard nothing at all, and notes.

    A mesh axis that shards parameters only saves memory, so it is a note; so is one that `allow_idle_axes` names.
    """
    sharded = {*model.sizes, *ACTIVATION_AXES, batch} | ({"token"} if "expert" in model.sizes else set())

    def busy(*kinds: AxisMapping) -> set[str]:
        # A rule for an axis that the model does not have shards nothing.
        return {axis for mapping in kinds for name in mapping if name in sharded for axis in mapping.mesh_axes(name)}

    with_activations = busy(mappings.compute, mappings.residual, mappings.attention)
    with_parameters = busy(mappings.params, *(mapping for _, mapping in mappings.overrides))
    errors: list[ShardingError] = []
    notes: list[str] = []
    for name, size in spec.axes:
        if size == 1 or name in with_activations:
            continue
        rules = _rules_for(name, spec, mappings, model, batch)
        if name in with_parameters:
            notes.append(
                f"mesh axis {name} {size} shards parameters, but no activation: the {size} devices along it compute "
                f"the same; to shard activations: {rules}"
            )
        elif name in config.allow_idle_axes:
            notes.append(f"mesh axis {name} {size} shards nothing, as allow_idle_axes allows; to use it: {rules}")
        else:
            errors.append(
                MeshError(
                    f"trainer.mesh: mesh axis {name} {size} shards nothing: the {size} devices along it would do the "
                    "same work",
                    suggestion=f"shard over it with {rules}, or allow it: allow_idle_axes: [{name}]",
                )
            )
    return errors, notes


def _rules_for(name: str, spec: MeshSpec, mappings: Mappings, model: ModelAxes, batch: str) -> str:
    """Keys of `trainer.mesh` that shard over a mesh axis, by what its name says that it is for; else the batch."""
    embed = show_axes((*(axis for axis in mappings.params.mesh_axes("embed") if axis != name), name))
    if name in ("context", "sequence", "seq", "position", "cp", "sp", "ring"):
        # The mappings of config/mesh/context.yaml.
        return (
            f"compute_mapping: {{position: {name}}}, param_mapping: {{embed: {embed}}}, attention_mapping: auto "
            "(config/mesh/context.yaml)"
        )
    if name in ("expert", "experts", "ep") and "expert" in model.sizes:
        return f"shared_mapping: {{expert: {name}}}"
    if name in ("model", "tensor", "tp"):
        heads = f", {HEADS}: {name}" if HEADS in model.sizes or KV_HEAD in model.sizes else ""
        return f"shared_mapping: {{mlp: {name}{heads}, vocab: {name}}}"
    rows = mappings.compute.mesh_axes(batch)
    if name in spec.dcn:
        # Axes across slices come first, and parameters are not gathered over DCN by default.
        return f"compute_mapping: {{{batch}: {show_axes((name, *rows))}}}"
    return f"compute_mapping: {{{batch}: {show_axes((*rows, name))}}}, param_mapping: {{embed: {embed}}}"


def _distinct(problems: list[ShardingError]) -> list[ShardingError]:
    # `heads` is in parameter and compute mapping alike: the same problem once is enough.
    seen: dict[str, ShardingError] = {}
    for error in problems:
        key = str(error).replace("compute mapping", "").replace("parameter mapping", "")
        if isinstance(error, IndivisibleError):
            key = error.problem
        seen.setdefault(key, error)
    return list(seen.values())
