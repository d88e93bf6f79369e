"""From what the user wrote to what is: `resolve(config, …)` gives the mesh sizes and the mappings.

It needs the model's logical axes and their sizes (from the abstract model) and the glossary of known names; it needs no
device. Everything it decided that the user did not write is a note, printed before a run starts.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from haliax_ext.abstract import Leaf
from haliax_ext.errors import IndivisibleError, ShardingError, UnknownAxisError, raise_all
from haliax_ext.mapping import AxisMapping, DeclaredReplication, Mappings, unknown_mesh_axes
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes
from levanter.mesh import context_parallel as exchanges
from levanter.mesh.config import DEFAULT_BATCH_AXES, DEFAULT_SHARED, MappingValue, MeshConfig, Word
from levanter.mesh.heads import (
    GROUP_AXIS,
    KV_HEAD,
    Q_PER_GROUP,
    declared_by_groups,
    expand_heads,
    factor,
    split_axis,
    with_group,
)
from levanter.mesh.sizes import resolve_sizes

HEADS = "heads"
Rules = dict[str, MappingValue]


@dataclass(frozen=True, kw_only=True)
class ResolvedMesh:
    """The mesh and mappings of a run, and every decision the user did not write.

    Attributes:
        spec: mesh axis names and sizes.
        mappings: parameters, compute, residual, attention and overrides, `heads` expanded.
        notes: a line for each decision and for each rule without effect.
        batch_axis: logical name of the batch axis.
        exchange: how positions on several devices look at each other; None where they lie on one.
    """

    spec: MeshSpec
    mappings: Mappings
    notes: tuple[str, ...]
    batch_axis: str
    exchange: exchanges.Exchange | None = None

    @property
    def batch_ways(self) -> int:
        """How many shards the batch has."""
        return self.spec.ways(self.mappings.compute.mesh_axes(self.batch_axis))

    @property
    def position_ways(self) -> int:
        """How many shards the positions of a sequence have."""
        return self.spec.ways(self.mappings.compute.mesh_axes("position"))

    @property
    def query_ways(self) -> int:
        """How many shards the queries of a sequence have while they look at keys."""
        return self.spec.ways(self.mappings.inside_attention.mesh_axes("position"))


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
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        leaves: Iterable[Leaf],
        *,
        known: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
        **activations: int,
    ) -> "ModelAxes":
        """The axes of a model's leaves and of its activations: `ModelAxes.of(leaves(model), position=2048)`."""
        sizes = {name: size for leaf in leaves for name, size in leaf.axes if not name.startswith("_")}
        return cls(sizes={**sizes, **activations}, known=known, aliases=aliases or {})


def resolve(
    config: MeshConfig,
    model: ModelAxes,
    *,
    devices: int,
    granules: int = 1,
    hbm_bytes: int | None = None,
    prices: exchanges.Prices | None = None,
) -> ResolvedMesh:
    """Resolves sizes, defaults, `heads`, spellings, overrides, and how positions look at each other.

    Args:
        config: what the user wrote.
        model: its axes.
        devices: how many there are.
        granules: what DCN axes count.
        hbm_bytes: memory of a device, by which `attention_mapping: auto` chooses; None where it is not known.
        prices: of exchanges on these devices, by which it chooses, too.

    Raises:
        ShardingError: everything that is wrong with sizes and names, together.
    """
    spec = resolve_sizes(config, devices=devices, granules=granules)
    batch = config.batch_axis_name or "batch"
    notes: list[str] = []
    problems: list[ShardingError] = []

    def spelled(rules: Mapping[str, MappingValue], where: str) -> Rules:
        return _spelled(rules, model.aliases, notes, problems, f"trainer.mesh.{where}")

    shared = {**DEFAULT_SHARED, **spelled(config.shared_mapping, "shared_mapping")}
    params = {**shared, **spelled(config.param_mapping, "param_mapping")}
    default_batch = {batch: list(DEFAULT_BATCH_AXES)} if config.batch_axis_name is not None else {}
    compute = {**default_batch, **shared, **spelled(config.compute_mapping, "compute_mapping")}
    residual = spelled(config.residual_mapping, "residual_mapping")
    word = config.attention_mapping if isinstance(config.attention_mapping, str) else None
    attention = {} if isinstance(config.attention_mapping, str) else config.attention_mapping
    attention = spelled(attention, "attention_mapping")
    overrides = {pattern: spelled(rules, f"overrides[{pattern!r}]") for pattern, rules in config.overrides.items()}

    every = [params, compute, residual, attention, *overrides.values()]
    if config.split_heads == "auto":
        spec, every = _split(model, spec, every, notes)
        params, compute, residual, attention = every[:4]
        overrides = dict(zip(overrides, every[4:], strict=True))

    declared: set[DeclaredReplication] = set()
    used = {*model.sizes, batch}

    def finish(rules: Rules, where: str, *more: str) -> AxisMapping:
        expanded = rules
        try:
            expanded, implied = _expanded(rules, model, spec, notes, f"trainer.mesh: {where}")
            declared.update(implied)
        except ShardingError as error:
            problems.append(error)
            expanded = {name: value for name, value in rules.items() if name != HEADS}
        mapping = AxisMapping(expanded)
        try:
            for note in mapping.check(
                known=model.known, used=used | {*more}, mesh=spec, where=f"trainer.mesh: {where}"
            ):
                # A shared rule is in both mappings; that it has no effect is said once.
                text = note.removeprefix(f"trainer.mesh: {where}: ")
                if not any(said.endswith(text) for said in notes):
                    notes.append(note)
        except ShardingError as error:
            problems.append(error)
        return mapping

    of_params, of_compute = finish(params, "parameter mapping"), finish(compute, "compute mapping")
    of_compute = AxisMapping(dict(of_compute))
    inside = finish(attention, "attention_mapping", *(["key_position"] if "position" in model.sizes else []))
    said = word is not None or bool(config.attention_mapping)
    if word is not None and spec.ways(of_compute.mesh_axes("position")) > 1:
        inside = _in_a_word(word, of_compute, spec, model, notes, config.hbm_bytes(hbm_bytes), prices)
    exchange, order = _exchanged(config, inside, of_compute, spec, model, notes, problems, said=said)
    mappings = Mappings(
        params=AxisMapping(dict(of_params)),
        compute=of_compute,
        residual=finish(residual, "residual_mapping"),
        attention=inside,
        zigzag=("position",) if order == "zigzag" and exchange not in (None, "heads") else (),
        overrides=tuple((pattern, finish(rules, f"overrides[{pattern!r}]")) for pattern, rules in overrides.items()),
        declared=tuple(sorted(declared, key=lambda d: d.mesh_axes)),
        allow_replicated=tuple(config.allow_replicated),
        on_conflict=config.on_conflict,
    )
    raise_all(_distinct(problems))
    notes += [*exchanges.uncut_between_blocks(mappings, spec), *_idle_mesh_axes(spec, mappings, batch)]
    return ResolvedMesh(
        spec=spec, mappings=mappings, notes=tuple(dict.fromkeys(notes)), batch_axis=batch, exchange=exchange
    )


def _in_a_word(
    word: Word,
    compute: AxisMapping,
    spec: MeshSpec,
    model: ModelAxes,
    notes: list[str],
    hbm_bytes: int | None,
    prices: exchanges.Prices | None,
) -> AxisMapping:
    """The attention mapping that a word stands for; `auto` says why."""
    if word != "auto":
        return exchanges.spelled(word, compute)
    kv_heads, position = model.sizes.get(KV_HEAD, 1), compute.mesh_axes("position")
    heads_ways, position_ways = spec.ways(compute.mesh_axes(KV_HEAD)), spec.ways(position)
    seconds: dict[exchanges.Exchange, float] = {}
    for each in ("gather", "heads", "ring"):
        if prices is None or (each == "heads" and kv_heads % (heads_ways * position_ways)):
            continue
        mappings = Mappings(compute=compute, attention=exchanges.spelled(each, compute))
        if (found := prices(model.sizes, mappings, spec)) is not None:
            seconds[each] = found
    choice = exchanges.choose(
        kv_heads=kv_heads,
        head_size=model.sizes.get("head_size", 1),
        positions=model.sizes.get("position", 1),
        heads_ways=heads_ways,
        position_ways=position_ways,
        hbm_bytes=hbm_bytes,
        seconds=seconds,
        between_slices=any(axis in spec.dcn and spec.shape[axis] > 1 for axis in position),
    )
    notes.append(f"attention_mapping auto is {choice}")
    return exchanges.spelled(choice.exchange, compute)


def _exchanged(
    config: MeshConfig,
    inside: AxisMapping,
    compute: AxisMapping,
    spec: MeshSpec,
    model: ModelAxes,
    notes: list[str],
    problems: list[ShardingError],
    *,
    said: bool,
) -> tuple[exchanges.Exchange | None, exchanges.Order]:
    """What positions exchange and in which order they lie; with what is wrong with it, if either was said."""
    exchange = exchanges.exchange_of(inside, compute, spec)
    order = exchanges.default_order(exchange, asked=config.position_order, said=said)
    problems += exchanges.across_slices(inside, compute, spec, allowed=config.allow_dcn)
    if said or config.position_order is not None:
        problems += exchanges.problems_of(inside, compute, spec, sizes=model.sizes, order=order)
        notes += _exchange_notes(exchange, order, inside, compute, spec)
    return exchange, order


def _exchange_notes(
    exchange: exchanges.Exchange | None,
    order: exchanges.Order,
    inside: AxisMapping,
    compute: AxisMapping,
    spec: MeshSpec,
) -> list[str]:
    """What positions exchange and how they lie; and what is slow about it."""
    if exchange is None:
        return [
            "attention_mapping and position_order have no effect: positions are not cut (compute_mapping: position)"
        ]
    ways = spec.ways(compute.merged(inside).mesh_axes("position"))
    lies = "" if exchange == "heads" else f", positions in {order} order"
    share = exchanges.busiest_share(ways, order)
    notes = [f"attention exchanges by {exchange}{lies}: the busiest device has {share:.4g} × the mean of a causal mask"]
    if across := [axis for axis in compute.mesh_axes("position") if axis in spec.dcn and spec.shape[axis] > 1]:
        notes.append(
            f"positions are cut over {', '.join(across)}, between slices: every layer exchanges over DCN, at least an "
            "order of magnitude slower than ICI (trainer.mesh.allow_dcn)"
        )
    return notes


def _spelled(
    rules: Mapping[str, MappingValue],
    aliases: Mapping[str, str],
    notes: list[str],
    problems: list[ShardingError],
    where: str,
) -> Rules:
    """The rules under the glossary's names."""
    out: Rules = {}
    written: dict[str, str] = {}
    for name, value in rules.items():
        target = aliases.get(name, name)
        if target != name:
            notes.append(f"{where}: {name!r} is the axis {target!r} here")
        if target in out and _as_list(out[target]) != _as_list(value):
            problems.append(
                ShardingError(
                    f"{where}: {written[target]!r} and {name!r} are the same axis but are mapped differently "
                    f"({_shown(out[target])} and {_shown(value)})",
                    suggestion=f"keep one of them, spelled {target!r}",
                )
            )
        out[target] = value
        written[target] = name
    return out


def _as_list(value: MappingValue) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _shown(value: MappingValue) -> str:
    return show_axes(_as_list(value)) if value else "null"


def _expanded(
    rules: Rules, model: ModelAxes, spec: MeshSpec, notes: list[str], where: str
) -> tuple[Rules, tuple[DeclaredReplication, ...]]:
    """Replaces `heads` by rules for the model's own head axes; rules written for those axes win over it."""
    if HEADS in model.sizes:  # a model that has a plain `heads` axis (GPT-2)
        return rules, ()
    rest = {name: value for name, value in rules.items() if name != HEADS}
    heads = _as_list(rules.get(HEADS))
    if unknown := unknown_mesh_axes(where, HEADS, heads, spec):
        raise UnknownAxisError("\n".join(unknown))
    if KV_HEAD not in model.sizes:
        return rest, ()
    if HEADS in rules and not heads:
        # `heads: null` un-maps both head axes where an outer mapping has expanded it.
        rest = _in_place_of_heads(rules, {KV_HEAD: None, Q_PER_GROUP: None})
    elif heads and not {KV_HEAD, Q_PER_GROUP} <= rest.keys():
        kv_heads, q_per_group = model.sizes[KV_HEAD], model.sizes.get(Q_PER_GROUP, 1)
        done = expand_heads(heads, kv_heads=kv_heads, q_per_group=q_per_group, mesh=spec, sizes=model.sizes)
        rest = _in_place_of_heads(rules, done.rules)
        notes += _better_factoring(heads, spec, kv_heads=kv_heads, q_per_group=q_per_group, mapped=rest)
    whole = set(_as_list(rest.get(Q_PER_GROUP))) - set(_as_list(rest.get(KV_HEAD)))
    return rest, declared_by_groups([axis for axis in _as_list(rest.get(Q_PER_GROUP)) if axis in whole])


def _in_place_of_heads(rules: Rules, expansion: Mapping[str, MappingValue]) -> Rules:
    """The rules with `heads` replaced, its place in their order kept; what was written for the parts wins."""
    out: Rules = {}
    for name, value in rules.items():
        if name == HEADS:
            out |= {part: rules.get(part, given) for part, given in expansion.items()}
        elif name not in out:
            out[name] = value
    return out


def _better_factoring(heads: list[str], spec: MeshSpec, *, kv_heads: int, q_per_group: int, mapped: Rules) -> list[str]:
    """A note where one mesh axis went to the query groups alone although a part of it could shard K and V too."""
    if len(heads) != 1 or _as_list(mapped.get(KV_HEAD)) or _as_list(mapped.get(Q_PER_GROUP)) != heads:
        return []
    axis = heads[0]
    both = factor(spec.shape[axis], kv_heads=kv_heads, q_per_group=q_per_group)
    if both is None or 1 in both or GROUP_AXIS in spec.shape:
        return []
    return [
        f"heads → {axis}: K and V are replicated over {axis} {spec.shape[axis]}, which does not divide {kv_heads} "
        f"{KV_HEAD}; axes {{{axis}: {both[0]}, {GROUP_AXIS}: {both[1]}}} with heads: [{axis}, {GROUP_AXIS}] "
        f"would shard them {both[0]} ways"
    ]


def _split(model: ModelAxes, spec: MeshSpec, every: list[Rules], notes: list[str]) -> tuple[MeshSpec, list[Rules]]:
    """Factors the mesh axis that `heads` is mapped to where it exceeds the KV heads, and adds `vocab` to it."""
    params, compute = every[:2]
    kv_heads, q_per_group = model.sizes.get(KV_HEAD), model.sizes.get(Q_PER_GROUP, 1)
    heads = _as_list(params.get(HEADS)) or _as_list(compute.get(HEADS))
    if kv_heads is None or len(heads) != 1 or heads[0] not in spec.names:
        return spec, every
    axis = heads[0]
    ways = spec.shape[axis]
    vocab = model.sizes.get("vocab")
    if ways > 1 and vocab is not None and "vocab" not in params and axis not in _as_list(params.get("embed")):
        # A translated old document cannot have mapped `vocab`; replicated embeddings would be refused by the plan.
        if vocab % ways == 0:
            added = compute if "vocab" in compute else {**compute, "vocab": axis}
            every = [{**params, "vocab": axis}, added, *every[2:]]
            notes.append(
                f"vocab → {axis} was added (split_heads: auto): otherwise embedding and head are replicated over it"
            )
        else:
            notes.append(f"vocab {vocab} is replicated over {axis}: {vocab} % {ways} = {vocab % ways}")
    if kv_heads % ways == 0:
        return spec, every
    done = split_axis(spec, axis, kv_heads=kv_heads, q_per_group=q_per_group)
    if done is None:
        return spec, every
    new, (a, b) = done
    notes.append(
        f"mesh axis {axis} {ways} was factored into {axis} {a} × {GROUP_AXIS} {b} (split_heads: auto): "
        f"this model has {kv_heads} {KV_HEAD} × {q_per_group} {Q_PER_GROUP}; K and V are replicated over {GROUP_AXIS}"
    )
    return new, [with_group(rules, axis) for rules in every]


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
