"""From what the user wrote to what is: `resolve(config, …)` gives the mesh sizes and the three mappings.

It needs the model's logical axes and their sizes (from the abstract model) and the glossary of known names; it needs no
device. Everything it decided that the user did not write is a note, printed before a run starts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from haliax_ext.errors import ShardingError, raise_all
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.mesh.config import DEFAULT_BATCH_AXES, DEFAULT_SHARED, MappingValue, MeshConfig
from levanter.mesh.heads import GROUP_AXIS, KV_HEAD, Q_PER_GROUP, expand_heads, split_axis, with_group
from levanter.mesh.sizes import resolve_sizes

HEADS = "heads"
Rules = dict[str, MappingValue]


@dataclass(frozen=True, kw_only=True)
class ResolvedMesh:
    """The mesh and mappings of a run, and every decision the user did not write."""

    spec: MeshSpec
    mappings: Mappings
    notes: tuple[str, ...]
    batch_axis: str

    @property
    def batch_ways(self) -> int:
        """Into how many pieces the batch is cut."""
        return self.spec.ways(self.mappings.compute.mesh_axes(self.batch_axis))


@dataclass(frozen=True, kw_only=True)
class ModelAxes:
    """What the mesh room needs to know of a model: its logical axes, and how names are spelled.

    Attributes:
        sizes: every logical axis of its parameters and activations → size.
        known: every axis name of the glossary.
        aliases: spellings users have → the glossary's name.
    """

    sizes: Mapping[str, int]
    known: Collection[str] = ()
    aliases: Mapping[str, str] = ()  # type: ignore[assignment]


def resolve(config: MeshConfig, model: ModelAxes, *, devices: int, granules: int = 1) -> ResolvedMesh:
    """Resolves sizes, defaults, `heads`, spellings and overrides.

    Raises:
        ShardingError: everything that is wrong with sizes and names, together.
    """
    spec = resolve_sizes(config, devices=devices, granules=granules)
    batch = config.batch_axis_name or "batch"
    notes: list[str] = []
    aliases = dict(model.aliases or {})
    shared = _spelled({**DEFAULT_SHARED, **config.shared_mapping}, aliases, notes, "shared_mapping")
    params = {**shared, **_spelled(config.param_mapping, aliases, notes, "param_mapping")}
    compute = {batch: [a for a in DEFAULT_BATCH_AXES if a in spec.names], **shared}
    compute.update(_spelled(config.compute_mapping, aliases, notes, "compute_mapping"))
    if config.batch_axis_name is None:
        compute.pop(batch, None)
    residual = _spelled(config.residual_mapping, aliases, notes, "residual_mapping")
    overrides = {
        pattern: _spelled(rules, aliases, notes, f"overrides[{pattern!r}]")
        for pattern, rules in config.overrides.items()
    }

    every = [params, compute, residual, *overrides.values()]
    if config.split_heads == "auto":
        spec, every = _split(model, spec, every, notes)
        params, compute, residual = every[:3]
        overrides = dict(zip(overrides, every[3:], strict=True))

    problems: list[ShardingError] = []
    declared: set[DeclaredReplication] = set()

    def finish(rules: Rules, where: str) -> AxisMapping:
        try:
            expanded, implied = _expanded(rules, model, spec, where)
            declared.update(implied)
            mapping = AxisMapping(expanded)
            used = {*model.sizes, batch}
            notes.extend(mapping.check(known=model.known, used=used, mesh=spec, where=where))
            return mapping
        except ShardingError as error:
            problems.append(error)
            return AxisMapping()

    mappings = Mappings(
        params=finish(params, "trainer.mesh: parameter mapping"),
        compute=finish(compute, "trainer.mesh: compute mapping"),
        residual=finish(residual, "trainer.mesh: residual_mapping"),
        overrides=tuple(
            (pattern, finish(rules, f"trainer.mesh: overrides[{pattern!r}]")) for pattern, rules in overrides.items()
        ),
        declared=tuple(sorted(declared, key=lambda d: d.mesh_axes)),
        allow_replicated=tuple(config.allow_replicated),
    )
    raise_all(_distinct(problems))
    return ResolvedMesh(spec=spec, mappings=mappings, notes=tuple(dict.fromkeys(notes)), batch_axis=batch)


def _spelled(rules: Mapping[str, MappingValue], aliases: Mapping[str, str], notes: list[str], where: str) -> Rules:
    out: Rules = {}
    for name, value in rules.items():
        target = aliases.get(name, name)
        if target != name:
            notes.append(f"{where}: {name!r} is the axis {target!r} here")
        out[target] = value
    return out


def _as_list(value: MappingValue) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _expanded(
    rules: Rules, model: ModelAxes, spec: MeshSpec, where: str
) -> tuple[Rules, tuple[DeclaredReplication, ...]]:
    """Replaces `heads` by rules for the model's own head axes; rules written for those axes win over it."""
    heads = [a for a in _as_list(rules.get(HEADS)) if a in spec.names]
    unknown = [a for a in _as_list(rules.get(HEADS)) if a not in spec.names]
    rest = {name: value for name, value in rules.items() if name != HEADS}
    if unknown:
        raise ShardingError(f"{where}: heads → {', '.join(unknown)}, but the mesh has only {list(spec.names)}")
    if HEADS in model.sizes:  # a model that has a plain `heads` axis (GPT-2)
        return rules, ()
    if not heads or KV_HEAD not in model.sizes:
        if HEADS in rules and rules[HEADS] is None:
            # `heads: null` un-maps both head axes where an outer mapping had expanded it.
            rest = {KV_HEAD: None, Q_PER_GROUP: None, **rest}
        return rest, ()
    done = expand_heads(heads, kv_heads=model.sizes[KV_HEAD], q_per_group=model.sizes.get(Q_PER_GROUP, 1), mesh=spec)
    expanded: Rules = {**done.rules, **rest}
    return expanded, done.declared if Q_PER_GROUP not in rest else ()


def _split(model: ModelAxes, spec: MeshSpec, every: list[Rules], notes: list[str]) -> tuple[MeshSpec, list[Rules]]:
    kv_heads, q_per_group = model.sizes.get(KV_HEAD), model.sizes.get(Q_PER_GROUP, 1)
    heads = _as_list(every[0].get(HEADS))
    if kv_heads is None or len(heads) != 1 or heads[0] not in spec.names:
        return spec, every
    axis = heads[0]
    if spec.shape[axis] > 1:
        # A translated old document cannot have mapped `vocab`; whole embeddings would be refused by the plan.
        vocab, at = model.sizes.get("vocab"), spec.shape[axis]
        if vocab is not None and "vocab" not in every[0] and vocab % at == 0:
            every = [{**every[0], "vocab": axis}, {**every[1], "vocab": axis}, *every[2:]]
            notes.append(f"vocab → {axis} was added (split_heads: auto): else embedding and head stay whole over it")
    if kv_heads % spec.shape[axis] == 0:
        return spec, every
    done = split_axis(spec, axis, kv_heads=kv_heads, q_per_group=q_per_group)
    if done is None:
        return spec, every
    new, (a, b) = done
    notes.append(
        f"mesh axis {axis} {spec.shape[axis]} was factored into {axis} {a} × {GROUP_AXIS} {b} (split_heads: auto): "
        f"this model has {kv_heads} kv_head × {q_per_group} q_heads_per_group; K and V stay whole over {GROUP_AXIS}"
    )
    return new, [with_group(rules, axis) for rules in every]


def _distinct(problems: list[ShardingError]) -> list[ShardingError]:
    # `heads` is in parameter and compute mapping alike: the same problem once is enough.
    seen: dict[str, ShardingError] = {}
    for error in problems:
        seen.setdefault(str(error).replace("compute mapping", "").replace("parameter mapping", ""), error)
    return list(seen.values())
