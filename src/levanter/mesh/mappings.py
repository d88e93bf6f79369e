"""Last step of `resolve`: the mappings of a run as checked values, and everything that was decided on the way."""

from dataclasses import dataclass

from haliax_ext.errors import IndivisibleError, ShardingError, raise_all
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes
from levanter.mesh.config import MeshConfig, ModelAxes
from levanter.mesh.context_parallel import ContextParallel, Method
from levanter.mesh.heads import ExpandedRules, MeshRules


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
    # Notes below assume consistent mappings, so errors are raised first.
    raise_all(_distinct(problems))
    notes += [*_residual_notes(mappings, spec), *_idle_mesh_axes(spec, mappings, rules.batch)]
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


def _idle_mesh_axes(spec: MeshSpec, mappings: Mappings, batch: str) -> list[str]:
    """A note for each mesh axis along which every device computes the same."""
    busy = mappings.compute.used_mesh_axes | mappings.residual.used_mesh_axes | mappings.attention.used_mesh_axes
    batch_axes = mappings.compute.mesh_axes(batch)
    return [
        f"mesh axis {name} {size} shards no activation: the devices along it duplicate each other's work; to "
        f"shard the batch over it: compute_mapping: {{{batch}: [{', '.join((*batch_axes, name))}]}}"
        for name, size in spec.axes
        if size > 1 and name not in busy
    ]


def _distinct(problems: list[ShardingError]) -> list[ShardingError]:
    # `heads` is in parameter and compute mapping alike: the same problem once is enough.
    seen: dict[str, ShardingError] = {}
    for error in problems:
        key = str(error).replace("compute mapping", "").replace("parameter mapping", "")
        if isinstance(error, IndivisibleError):
            key = error.problem
        seen.setdefault(key, error)
    return list(seen.values())
