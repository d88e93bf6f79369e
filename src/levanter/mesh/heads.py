"""Second step of `resolve`: the rules of every mapping in the model's own axes, with `heads` expanded.

`heads` in a mapping means all attention heads, of q, k, v and o alike. A model has `kv_head` groups of
`q_heads_per_group` query heads. For `heads: [A, B, …]`, `kv_head` takes the leading mesh axes while they divide it and
`q_heads_per_group` takes the rest; K and V are then replicated over that rest, which is declared. A single mesh axis
larger than `kv_head` can be *factored* into two (`split_heads: auto`): itself, for `kv_head`, and `group`, for
`q_heads_per_group`. Other projects duplicate K/V heads so that tensor parallelism can exceed their number; this does
the same without copying a weight.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from haliax_ext.divisibility import SizeVerdict, divisors, legal_sizes
from haliax_ext.errors import IndivisibleError, ShardingError, UnknownAxisError
from haliax_ext.mapping import DeclaredReplication, unknown_mesh_axes
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes
from levanter.mesh.config import DEFAULT_BATCH_AXES, DEFAULT_SHARED, TABLE_ROW, MappingValue, MeshConfig, ModelAxes

HEADS = "heads"
GROUP_AXIS = "group"
KV_HEAD, Q_PER_GROUP = "kv_head", "q_heads_per_group"

Rules = dict[str, MappingValue]
"""Logical axis → mesh axes, as written; the order decides under `on_conflict: first_wins`."""


@dataclass(frozen=True, kw_only=True)
class ExpandedRules:
    """The rules of one mapping in the model's own axes.

    Attributes:
        rules: the rules, with `heads` expanded.
        declared: replication of K and V that they imply.
        notes: a line for each decision the user did not write.
        problem: why `heads` cannot be expanded; the rules are then without it.
    """

    rules: Rules
    declared: tuple[DeclaredReplication, ...] = ()
    notes: tuple[str, ...] = ()
    problem: ShardingError | None = None


@dataclass(frozen=True, kw_only=True)
class MeshRules:
    """The rules of all mappings of a run, and the mesh they are for.

    Attributes:
        spec: mesh axis sizes, after `split_heads`.
        batch: logical name of the batch axis.
        params, compute, residual, attention: rules by mapping, with defaults and the shared mapping merged.
        overrides: pairs (path pattern, rules).
        notes: about spellings and `split_heads`.
        problems: contradictory spellings.
    """

    spec: MeshSpec
    batch: str
    params: ExpandedRules
    compute: ExpandedRules
    residual: ExpandedRules
    attention: ExpandedRules
    overrides: tuple[tuple[str, ExpandedRules], ...]
    notes: tuple[str, ...]
    problems: tuple[ShardingError, ...]


def mesh_rules(config: MeshConfig, model: ModelAxes, spec: MeshSpec) -> MeshRules:
    """Merges defaults, replaces aliases, splits a mesh axis for the heads where configured, and expands `heads`.

    Args:
        config: what the user wrote.
        model: its axes.
        spec: mesh axis sizes.
    """
    batch = config.batch_axis_name or "batch"
    notes: list[str] = []
    problems: list[ShardingError] = []

    def named(rules: Mapping[str, MappingValue], key: str) -> Rules:
        return _in_glossary_names(rules, model.aliases, notes, problems, f"trainer.mesh.{key}")

    # Later entries win and new ones come last: the order of rules decides under `on_conflict: first_wins`.
    shared = {**DEFAULT_SHARED, **named(config.shared_mapping, "shared_mapping")}
    params = {**shared, **named(config.param_mapping, "param_mapping")}
    params |= _table_rows(model, spec, params, notes)
    default_batch = {batch: list(DEFAULT_BATCH_AXES)} if config.batch_axis_name is not None else {}
    compute = {**default_batch, **shared, **named(config.compute_mapping, "compute_mapping")}
    residual = named(config.residual_mapping, "residual_mapping")
    attention = named(
        {} if isinstance(config.attention_mapping, str) else config.attention_mapping, "attention_mapping"
    )
    overrides = {pattern: named(rules, f"overrides[{pattern!r}]") for pattern, rules in config.overrides.items()}
    # The first four positions are read back below, after `split_heads` may have changed every mapping alike.
    all_rules = [params, compute, residual, attention, *overrides.values()]
    # Before the expansion, which needs the sizes of the mesh axes that it distributes.
    if config.split_heads == "auto":
        spec, all_rules = _split_heads(model, spec, all_rules, notes)

    def expanded(rules: Rules, where: str) -> ExpandedRules:
        heads_notes: list[str] = []
        try:
            rules_by_axis, declared = _expanded(rules, model, spec, heads_notes, f"trainer.mesh: {where}")
        except ShardingError as error:
            # The other rules are still checked, so that one run reports all problems.
            return ExpandedRules(rules={name: value for name, value in rules.items() if name != HEADS}, problem=error)
        return ExpandedRules(rules=rules_by_axis, declared=declared, notes=tuple(heads_notes))

    return MeshRules(
        spec=spec,
        batch=batch,
        params=expanded(all_rules[0], "parameter mapping"),
        compute=expanded(all_rules[1], "compute mapping"),
        residual=expanded(all_rules[2], "residual_mapping"),
        attention=expanded(all_rules[3], "attention_mapping"),
        overrides=tuple(
            (pattern, expanded(rules, f"overrides[{pattern!r}]"))
            for pattern, rules in zip(overrides, all_rules[4:], strict=True)
        ),
        notes=tuple(notes),
        problems=tuple(problems),
    )


@dataclass(frozen=True, kw_only=True)
class HeadsMapping:
    """The expansion of `heads`: rules for `kv_head` and `q_heads_per_group`, and the replication they imply."""

    kv_head: tuple[str, ...]
    q_heads_per_group: tuple[str, ...]

    @property
    def rules(self) -> dict[str, list[str]]:
        """The rules as entries of a mapping: logical axis → mesh axes."""
        return {KV_HEAD: list(self.kv_head), Q_PER_GROUP: list(self.q_heads_per_group)}

    @property
    def declared(self) -> tuple[DeclaredReplication, ...]:
        """The replication of K and V that the rules imply."""
        return declared_by_groups(self.q_heads_per_group)


def declared_by_groups(mesh_axes: Sequence[str]) -> tuple[DeclaredReplication, ...]:
    """The replication of K and V over mesh axes that shard query heads only: K and V have no such axis."""
    if not mesh_axes:
        return ()
    reason = "it shards query heads further than K/V heads can be sharded"
    return (DeclaredReplication(has=KV_HEAD, lacks=Q_PER_GROUP, mesh_axes=tuple(mesh_axes), reason=reason),)


def distribute(mesh_axes: Sequence[str], *, kv_heads: int, q_per_group: int, mesh: MeshSpec) -> HeadsMapping | None:
    """`kv_head` takes the leading mesh axes while they divide it, `q_heads_per_group` the rest; None if it cannot.

    >>> mesh = MeshSpec.of(model=8, group=4)
    >>> distribute(["model", "group"], kv_heads=8, q_per_group=16, mesh=mesh).rules
    {'kv_head': ['model'], 'q_heads_per_group': ['group']}
    """
    num_leading = 0
    # The product of the leading mesh axes must divide; a later mesh axis is never taken before one that does not
    # divide.
    while num_leading < len(mesh_axes) and kv_heads % mesh.ways(tuple(mesh_axes[: num_leading + 1])) == 0:
        num_leading += 1
    kv_axes, group_axes = tuple(mesh_axes[:num_leading]), tuple(mesh_axes[num_leading:])
    if q_per_group % mesh.ways(group_axes):
        return None
    return HeadsMapping(kv_head=kv_axes, q_heads_per_group=group_axes)


def expand_heads(
    mesh_axes: Sequence[str],
    *,
    kv_heads: int,
    q_per_group: int,
    mesh: MeshSpec,
    sizes: Mapping[str, int] | None = None,
) -> HeadsMapping:
    """Distributes `heads: mesh_axes` over the two head axes of a model.

    Args:
        mesh_axes: what `heads` is mapped to.
        kv_heads: size of `kv_head`.
        q_per_group: size of `q_heads_per_group`.
        mesh: mesh axis sizes.
        sizes: the model's other axis sizes; the suggestion then names only axes that divide.

    Raises:
        IndivisibleError: nothing divides; the message has the nearest factoring and a YAML fragment.
    """
    split = distribute(mesh_axes, kv_heads=kv_heads, q_per_group=q_per_group, mesh=mesh)
    if split is None:
        raise _indivisible_heads(mesh_axes, kv_heads, q_per_group, mesh, sizes or {})
    return split


def factor(ways: int, *, kv_heads: int, q_per_group: int) -> tuple[int, int] | None:
    """The factoring `ways = a × b` with `a` dividing the KV heads, as large as possible, and `b` the query groups.

    >>> factor(128, kv_heads=8, q_per_group=16)
    (8, 16)
    """
    # Only common divisors can shard the K/V heads; the largest leaves the least replication of K and V.
    for a in reversed(divisors(math.gcd(ways, kv_heads))):
        if q_per_group % (ways // a) == 0:
            return a, ways // a
    return None


def legal_ways(kv_heads: int, q_per_group: int) -> tuple[int, ...]:
    """Every number of shards that the attention heads can have.

    >>> legal_ways(8, 3)
    (1, 2, 3, 4, 6, 8, 12, 24)
    """
    return tuple(sorted({a * b for a in divisors(kv_heads) for b in divisors(q_per_group)}))


def _indivisible_heads(
    mesh_axes: Sequence[str], kv_heads: int, q_per_group: int, mesh: MeshSpec, sizes: Mapping[str, int]
) -> IndivisibleError:
    ways = mesh.ways(tuple(mesh_axes))
    product = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in mesh_axes)
    problem = (
        f"heads → {show_axes(mesh_axes)}: {kv_heads * q_per_group} attention heads = {kv_heads} {KV_HEAD} × "
        f"{q_per_group} {Q_PER_GROUP} cannot be sharded over {product}" + (f" = {ways}" if len(mesh_axes) > 1 else "")
    )
    # A mesh has few axes, so trying every order is cheap.
    reordered = next(
        (
            order
            for order in itertools.permutations(mesh_axes)
            if distribute(order, kv_heads=kv_heads, q_per_group=q_per_group, mesh=mesh) is not None
        ),
        None,
    )
    factors = factor(ways, kv_heads=kv_heads, q_per_group=q_per_group)
    if reordered is not None:
        suggestion = f"{KV_HEAD} takes the leading mesh axes; they divide in this order: heads: {show_axes(reordered)}"
    elif factors is not None and len(mesh_axes) == 1 and GROUP_AXIS not in mesh.shape:
        name = mesh_axes[0]
        pair = f"[{name}, {GROUP_AXIS}]"
        suggestion = (
            f"factor the mesh axis, {factors[0]} for {KV_HEAD} and {factors[1]} for {Q_PER_GROUP}:\n"
            f"      mesh:\n"
            f"        axes: {{{name}: {factors[0]}, {GROUP_AXIS}: {factors[1]}}}\n"
            f"        shared_mapping: {{heads: {pair}, {_other_rules(mesh_axes, pair, mesh, sizes)}}}"
        )
    else:
        legal = ", ".join(map(str, legal_ways(kv_heads, q_per_group)))
        others = _other_rules(mesh_axes, show_axes(mesh_axes), mesh, sizes)
        suggestion = (
            f"the heads of this model can be sharded {legal} ways; choose such a size, "
            f"or leave the heads unsharded and shard the rest:\n"
            f"      mesh:\n"
            f"        shared_mapping: {{{others}, heads: null}}"
        )
    return IndivisibleError(problem, suggestion=suggestion)


def _other_rules(mesh_axes: Sequence[str], shown: str, mesh: MeshSpec, sizes: Mapping[str, int]) -> str:
    """`mlp` and `vocab` mapped like the heads if they divide, else unsharded."""
    # An axis whose size is not known counts as divisible; the plan checks it later.
    ways = mesh.ways(tuple(mesh_axes))
    return ", ".join(f"{name}: {shown if sizes.get(name, ways) % ways == 0 else 'null'}" for name in ("mlp", "vocab"))


def split_axis(
    mesh: MeshSpec, axis: str, *, kv_heads: int, q_per_group: int
) -> tuple[MeshSpec, tuple[int, int]] | None:
    """`mesh` with `axis` factored into `axis` × `group`, or None where it divides already or cannot be factored.

    >>> mesh, factors = split_axis(MeshSpec.of(data=2, model=16), "model", kv_heads=8, q_per_group=4)
    >>> print(mesh, factors)
    data 2 × model 8 × group 2 (8, 2)
    """
    ways = mesh.shape[axis]
    factors = factor(ways, kv_heads=kv_heads, q_per_group=q_per_group)
    # A factor of 1 would change nothing, and `group` may exist only once.
    if factors is None or 1 in factors or GROUP_AXIS in mesh.shape:
        return None
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        # `group` is next to the axis it came from, inside of it: neighbouring devices share K and V heads.
        axes += [(name, factors[0]), (GROUP_AXIS, factors[1])] if name == axis else [(name, size)]
    # Both factors of an axis across slices cross slices.
    dcn = (*mesh.dcn, GROUP_AXIS) if axis in mesh.dcn else mesh.dcn
    return MeshSpec(axes=tuple(axes), dcn=dcn, granule=mesh.granule), factors


def with_group(rules: Mapping[str, str | Sequence[str] | None], axis: str) -> dict[str, str | list[str] | None]:
    """The rules after `axis` was factored: whatever was mapped to it is mapped to it and `group`.

    >>> with_group({"mlp": "model", "kv_head": "model", "q_heads_per_group": "model"}, "model")
    {'mlp': ['model', 'group'], 'kv_head': 'model', 'q_heads_per_group': ['group']}
    """
    new: dict[str, str | list[str] | None] = {}
    for name, value in rules.items():
        axes = [value] if isinstance(value, str) else list(value or [])
        # K/V heads stay on the axis itself: it was factored so that this divides.
        if name == KV_HEAD or axis not in axes:
            new[name] = value if value is None or isinstance(value, str) else list(value)
        elif name == Q_PER_GROUP:
            new[name] = [GROUP_AXIS if a == axis else a for a in axes]
        else:
            # Everything else is sharded over both factors, as it was over their product.
            at = axes.index(axis)
            new[name] = [*axes[: at + 1], GROUP_AXIS, *axes[at + 1 :]]
    return new


def model_sizes(
    sizes: Mapping[str, int],
    candidates: Iterable[int],
    *,
    mapped: Iterable[str] = ("heads", "mlp", "vocab"),
    mesh_axis: str = "model",
) -> tuple[SizeVerdict, ...]:
    """Which candidate sizes of a mesh axis divide the axes of a model that it would shard.

    Most axes need plain division. `heads` does not: a mesh axis of 16 divides 128 heads, but not 8 `kv_head`, and not 4
    `q_heads_per_group`. So a size is legal for heads if `expand_heads` takes it; where it does not, the remark names
    the factoring that it would take.

    Args:
        sizes: the model's axes.
        candidates: sizes of the mesh axis.
        mapped: the logical axes that go to it; `heads` stands for `kv_head` and `q_heads_per_group`.
        mesh_axis: its name, for the remarks.

    Examples:
        >>> [verdict.ok for verdict in model_sizes({"kv_head": 8, "q_heads_per_group": 16, "mlp": 64}, [8, 12, 16])]
        [True, False, True]
    """
    mapped = tuple(mapped)
    plain = [(name, sizes[name]) for name in mapped if name in sizes]
    if "heads" not in mapped or KV_HEAD not in sizes:
        return legal_sizes(plain, candidates)
    kv, groups = sizes[KV_HEAD], sizes.get(Q_PER_GROUP, 1)
    return tuple(_heads_verdict(verdict, kv, groups, mesh_axis) for verdict in legal_sizes(plain, candidates))


def _heads_verdict(verdict: SizeVerdict, kv: int, groups: int, mesh_axis: str) -> SizeVerdict:
    size = verdict.size
    split = distribute([mesh_axis], kv_heads=kv, q_per_group=groups, mesh=MeshSpec.of(**{mesh_axis: size}))
    factors = factor(size, kv_heads=kv, q_per_group=groups)
    # One mesh axis divides by itself; it then needs no factoring, even where it goes to the query groups alone.
    if split is not None:
        is_replicated = size > 1 and not split.kv_head
        return SizeVerdict(
            size=size, blockers=verdict.blockers, remark="K and V are replicated over it" if is_replicated else ""
        )
    if factors is not None:
        remark = f"heads divide as {mesh_axis} {factors[0]} × {GROUP_AXIS} {factors[1]}"
        blockers = ((KV_HEAD, kv, kv % size), (Q_PER_GROUP, groups, groups % size))
    else:
        remark = ""
        blockers = (("heads", kv * groups, kv * groups % size),)
        # All heads together divide although neither axis does: the blockers are the two axes, not their product.
        if not blockers[0][2]:
            blockers = ((KV_HEAD, kv, kv % size), (Q_PER_GROUP, groups, groups % size))
    return SizeVerdict(size=size, blockers=(*blockers, *verdict.blockers), remark=remark)


def _table_rows(model: ModelAxes, spec: MeshSpec, params: Rules, notes: list[str]) -> Rules:
    """The default rule for the rows of tables without `embed`: that of `embed`, if the number of rows divides."""
    rows, rule = model.sizes.get(TABLE_ROW), params.get("embed")
    if rows is None or rule is None or TABLE_ROW in params:
        return {}
    # A mesh axis that does not exist is reported with the rule for `embed` itself.
    ways = spec.ways(tuple(axis for axis in _as_list(rule) if axis in spec.names))
    if rows % ways:
        notes.append(f"{TABLE_ROW} {rows} is not sharded like embed: {rows} % {ways} = {rows % ways}")
        return {}
    return {TABLE_ROW: rule}


def _in_glossary_names(
    rules: Mapping[str, MappingValue],
    aliases: Mapping[str, str],
    notes: list[str],
    problems: list[ShardingError],
    where: str,
) -> Rules:
    """The rules with every alias replaced by the name in the glossary."""
    out: Rules = {}
    written: dict[str, str] = {}
    for name, value in rules.items():
        target = aliases.get(name, name)
        if target != name:
            notes.append(f"{where}: {name!r} is the axis {target!r} here")
        # Two spellings of one axis are accepted if their rules agree.
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
        rest = _replace_heads(rules, {KV_HEAD: None, Q_PER_GROUP: None})
    # Where both head axes have rules of their own, `heads` adds nothing.
    elif heads and not {KV_HEAD, Q_PER_GROUP} <= rest.keys():
        kv_heads, q_per_group = model.sizes[KV_HEAD], model.sizes.get(Q_PER_GROUP, 1)
        expansion = expand_heads(heads, kv_heads=kv_heads, q_per_group=q_per_group, mesh=spec, sizes=model.sizes)
        rest = _replace_heads(rules, expansion.rules)
        notes += _better_factoring(heads, spec, kv_heads=kv_heads, q_per_group=q_per_group, mapped=rest)
    # K and V have no axis of query heads: over mesh axes that shard only these, they are replicated.
    kv_axes = _as_list(rest.get(KV_HEAD))
    return rest, declared_by_groups([axis for axis in _as_list(rest.get(Q_PER_GROUP)) if axis not in kv_axes])


def _replace_heads(rules: Rules, expansion: Mapping[str, MappingValue]) -> Rules:
    """The rules with `heads` replaced at its position; rules written for `kv_head` or `q_heads_per_group` win."""
    out: Rules = {}
    for name, value in rules.items():
        if name == HEADS:
            # The rules take the position of `heads`, because the order decides under `on_conflict: first_wins`.
            out |= {axis: rules.get(axis, value) for axis, value in expansion.items()}
        elif name not in out:
            out[name] = value
    return out


def _better_factoring(heads: list[str], spec: MeshSpec, *, kv_heads: int, q_per_group: int, mapped: Rules) -> list[str]:
    """A note where one mesh axis went to the query groups alone although a part of it could shard K and V too."""
    if len(heads) != 1 or _as_list(mapped.get(KV_HEAD)) or _as_list(mapped.get(Q_PER_GROUP)) != heads:
        return []
    axis = heads[0]
    factors = factor(spec.shape[axis], kv_heads=kv_heads, q_per_group=q_per_group)
    if factors is None or 1 in factors or GROUP_AXIS in spec.shape:
        return []
    return [
        f"heads → {axis}: K and V are replicated over {axis} {spec.shape[axis]}, which does not divide {kv_heads} "
        f"{KV_HEAD}; axes {{{axis}: {factors[0]}, {GROUP_AXIS}: {factors[1]}}} with heads: [{axis}, {GROUP_AXIS}] "
        f"would shard them {factors[0]} ways"
    ]


def _split_heads(
    model: ModelAxes, spec: MeshSpec, all_rules: list[Rules], notes: list[str]
) -> tuple[MeshSpec, list[Rules]]:
    """Factors the mesh axis that `heads` is mapped to where it exceeds the KV heads, and adds `vocab` to it."""
    params, compute = all_rules[:2]
    kv_heads, q_per_group = model.sizes.get(KV_HEAD), model.sizes.get(Q_PER_GROUP, 1)
    # The parameter mapping decides; a mapping of `heads` for activations alone counts only without it.
    heads = _as_list(params.get(HEADS)) or _as_list(compute.get(HEADS))
    if kv_heads is None or len(heads) != 1 or heads[0] not in spec.names:
        return spec, all_rules
    axis = heads[0]
    ways = spec.shape[axis]
    vocab = model.sizes.get("vocab")
    if ways > 1 and vocab is not None and "vocab" not in params and axis not in _as_list(params.get("embed")):
        # Upstream's keys cannot map `vocab`; the plan would refuse replicated embeddings.
        if vocab % ways == 0:
            added = compute if "vocab" in compute else {**compute, "vocab": axis}
            all_rules = [{**params, "vocab": axis}, added, *all_rules[2:]]
            notes.append(
                f"vocab → {axis} was added (split_heads: auto): otherwise embedding and head are replicated over it"
            )
        else:
            notes.append(f"vocab {vocab} is replicated over {axis}: {vocab} % {ways} = {vocab % ways}")
    # The K/V heads divide as they are: factoring would only replicate them.
    if kv_heads % ways == 0:
        return spec, all_rules
    split = split_axis(spec, axis, kv_heads=kv_heads, q_per_group=q_per_group)
    if split is None:
        return spec, all_rules
    new, (a, b) = split
    notes.append(
        f"mesh axis {axis} {ways} was factored into {axis} {a} × {GROUP_AXIS} {b} (split_heads: auto): "
        f"this model has {kv_heads} {KV_HEAD} × {q_per_group} {Q_PER_GROUP}; K and V are replicated over {GROUP_AXIS}"
    )
    # Every mapping is rewritten, or one of them would name a mesh axis with the wrong size.
    return new, [with_group(rules, axis) for rules in all_rules]
