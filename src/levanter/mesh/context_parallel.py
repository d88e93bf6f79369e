"""Context parallelism: how positions that are sharded over devices attend to each other, and the choice of a method.

Where the compute mapping shards `position`, each device has a part of every sequence, and attention needs all of it.
One more mapping, `trainer.mesh.attention_mapping`, merged over the compute mapping inside of attention, decides what
devices exchange; on a mesh axis `context` that shards positions:

    gather          {}                                             every device has its queries and all keys and values
    heads           {position: null, kv_head: [model, context]}    every device has all positions of some heads
    ring            {key_position: context}                        keys and values travel from device to device
    ring × heads    {position: ring, key_position: ring, kv_head: [model, context]}, over position: [ring, context]

The words `gather` (all-gather of keys and values), `heads` (all-to-all of heads, as in Ulysses) and `ring` (ring
attention) stand for these mappings, and `auto` for the one that `choose` returns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from haliax_ext.divisibility import divisors
from haliax_ext.errors import IndivisibleError, ShardingError
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes
from levanter.mesh.config import MeshConfig, ModelAxes
from levanter.mesh.heads import KV_HEAD, MeshRules

Method = Literal["gather", "heads", "ring", "ring × heads"]
Order = Literal["natural", "zigzag"]

POSITION, KEY_POSITION = "position", "key_position"

GATHERED_SHARE = 0.05
"""The largest share of a device's memory that gathered keys and values of one sequence and layer may take in `auto`."""

ALIKE = 0.05
"""Methods whose waiting times differ by less than this share count as equal."""

_WHERE = "trainer.mesh: attention_mapping"


@dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """A method and the reason for it.

    Attributes:
        method: the method.
        reason: a clause that completes "`method`, because …".
    """

    method: Method
    reason: str

    def __str__(self) -> str:
        return f"{self.method}: {self.reason}"


class Prices(Protocol):
    """Seconds of communication of the methods on some devices."""

    def __call__(self, sizes: Mapping[str, int], mappings: Mappings, mesh: MeshSpec) -> float | None:
        """Seconds that one layer waits for communication for one sequence; None where it is impossible or not known.

        Args:
            sizes: of the model's axes.
            mappings: at least those of the computation and of the inside of attention.
            mesh: mesh axis sizes.
        """
        ...


def choose(
    *,
    kv_heads: int,
    head_size: int,
    positions: int,
    heads_ways: int,
    position_ways: int,
    hbm_bytes: int | None,
    seconds: Mapping[Method, float] | None = None,
    between_slices: bool = False,
) -> MethodChoice:
    """The method that `auto` selects, by arithmetic only.

    Candidates are, in this order, `heads` if they divide, `gather` if gathered keys and values are a small share of a
    device's memory, and `ring`. The method with the least waiting time per layer is chosen; among those that differ by
    less than `ALIKE`, or whose seconds are not known, the first. (With `heads` the work of a causal mask is balanced
    without an order of positions, and a device has an n-th of the keys.)

    Args:
        kv_heads: number of K/V heads.
        head_size: features of one.
        positions: tokens in a sequence.
        heads_ways: shards of these heads in the compute mapping.
        position_ways: shards of positions.
        hbm_bytes: memory of a device; None where it is not known.
        seconds: that a layer waits for a sequence, by method; without those that are impossible or not known.
        between_slices: whether positions are sharded over DCN.

    >>> sizes = dict(head_size=128, positions=65536, heads_ways=1, position_ways=8, hbm_bytes=None)
    >>> choose(kv_heads=8, **sizes).method, choose(kv_heads=4, **sizes).method
    ('heads', 'gather')
    """
    if between_slices:
        return MethodChoice(method="ring", reason="positions are sharded across slices")
    # With `heads`, positions and K/V heads exchange roles: the heads are then sharded over both groups of mesh axes.
    ways = heads_ways * position_ways
    divides = kv_heads % ways == 0
    heads_clause = (
        f"{kv_heads} {KV_HEAD} divide by {ways}" if divides else f"{kv_heads} {KV_HEAD} do not divide by {ways}"
    )
    gathered = gathered_bytes(kv_heads=kv_heads, head_size=head_size, positions=positions, heads_ways=heads_ways)
    limit = None if hbm_bytes is None else GATHERED_SHARE * hbm_bytes
    # Where memory is not known, gathering is taken to fit.
    few = limit is None or gathered <= limit
    size = f"gathered keys and values of a sequence and layer are {gathered / 2**30:.3g} GiB"
    if hbm_bytes is not None:
        size += f", {'at most' if few else 'more than'} {GATHERED_SHARE:.0%} of {hbm_bytes / 2**30:.4g} GiB"
    candidates: tuple[tuple[Method, bool], ...] = (("heads", divides), ("gather", few), ("ring", True))
    legal: list[Method] = [method for method, is_legal in candidates if is_legal]
    known: list[Method] = [method for method in legal if seconds and method in seconds]
    # Without prices the first legal method is chosen, in the order of `candidates`.
    if not known or seconds is None:
        reason = f"{heads_clause}, so the work is balanced" if divides else f"{heads_clause}, and {size}"
        return MethodChoice(method=legal[0], reason=reason)
    least = min(seconds[method] for method in known)
    # Candidates are ordered by preference: the first within ALIKE of the fastest, not the fastest, so that small
    # changes of the prices do not change the method.
    best: Method = next(method for method in known if seconds[method] <= (1 + ALIKE) * least)
    others = [f"{1e3 * seconds[method]:.3g} ms for {method}" for method in known if method != best]
    waits = ", ".join((f"a layer waits {1e3 * seconds[best]:.3g} ms for a sequence by arithmetic", *others))
    why_not = [*([] if divides else [heads_clause]), *([] if few else [size])]
    return MethodChoice(method=best, reason="; ".join((waits, *why_not)))


def gathered_bytes(*, kv_heads: int, head_size: int, positions: int, heads_ways: int) -> int:
    """Bytes of all keys and values of one sequence in one layer on a device, in 16 bits.

    >>> gathered_bytes(kv_heads=8, head_size=128, positions=131072, heads_ways=1) / 2**30
    0.5
    """
    # Keys and values, two bytes each.
    return 2 * 2 * positions * max(kv_heads // heads_ways, 1) * head_size


def method_mapping(word: Method, compute: AxisMapping) -> AxisMapping:
    """The attention mapping of a method, under a compute mapping that shards positions.

    >>> compute = AxisMapping({"position": "context", "kv_head": "model"})
    >>> print(method_mapping("ring", compute), method_mapping("heads", compute))
    {key_position: context} {kv_head: [model, context], position: null}
    """
    position = compute.mesh_axes(POSITION)
    if word == "heads":
        # Positions' mesh axes go inside those that shard K/V heads already, so each device keeps a part of its own
        # heads.
        return AxisMapping({POSITION: None, KV_HEAD: (*compute.mesh_axes(KV_HEAD), *position)})
    return AxisMapping({KEY_POSITION: position}) if word == "ring" else AxisMapping()


def method_from_mapping(attention: AxisMapping, compute: AxisMapping, mesh: MeshSpec) -> Method | None:
    """The method that an attention mapping means; None where positions are not sharded.

    Args:
        attention: over the compute mapping.
        compute: the compute mapping.
        mesh: mesh axis sizes.

    >>> compute, mesh = AxisMapping({"position": "context"}), MeshSpec.of(context=4)
    >>> method_from_mapping(AxisMapping({"key_position": "context"}), compute, mesh)
    'ring'
    """
    inside = compute.merged(attention)
    compute_ways = mesh.ways(compute.mesh_axes(POSITION))
    # Queries sharded as in the compute mapping stay where they are; fewer ways mean that heads were exchanged for them.
    query_ways = mesh.ways(inside.mesh_axes(POSITION))
    if compute_ways == 1:
        return None
    if mesh.ways(inside.mesh_axes(KEY_POSITION)) > 1:
        return "ring" if query_ways == compute_ways else "ring × heads"
    return "gather" if query_ways == compute_ways else "heads"


def check_attention_mapping(
    attention: AxisMapping, compute: AxisMapping, mesh: MeshSpec, *, sizes: Mapping[str, int], order: Order
) -> list[ShardingError]:
    """The problems of an attention mapping, each with a suggestion.

    Args:
        attention: over the compute mapping.
        compute: the compute mapping.
        mesh: mesh axis sizes.
        sizes: of the model's axes.
        order: of the positions.
    """
    inside = compute.merged(attention)
    keys, queries = inside.mesh_axes(KEY_POSITION), inside.mesh_axes(POSITION)
    problems: list[ShardingError] = []
    # Outside of attention there are no separate key positions to shard.
    if compute.mesh_axes(KEY_POSITION):
        problems.append(
            ShardingError(
                f"trainer.mesh: compute mapping: {KEY_POSITION} → {show_axes(compute.mesh_axes(KEY_POSITION))}: "
                "key positions can be sharded inside attention only",
                suggestion=f"attention_mapping: {{{KEY_POSITION}: {show_axes(compute.mesh_axes(KEY_POSITION))}}}",
            )
        )
    # A ring passes each device's keys to the next one, so every device must have keys for exactly its query positions.
    elif keys and keys != queries:
        has = f"{POSITION} → {show_axes(queries)}" if queries else f"{POSITION} is not mapped"
        problems.append(
            ShardingError(
                f"{_WHERE}: {KEY_POSITION} → {show_axes(keys)}, but {has}: a ring shards both alike",
                suggestion=f"compute_mapping: {{{POSITION}: {show_axes(keys)}}}",
            )
        )
    problems += _heads_problems(inside, mesh, sizes)
    problems += _order_problems(mesh.ways(queries), sizes.get(POSITION), order)
    return problems


def check_dcn(attention: AxisMapping, compute: AxisMapping, mesh: MeshSpec, *, allowed: bool) -> list[ShardingError]:
    """The problems of positions that are sharded over DCN: only a ring may cross it, where that is allowed.

    Args:
        attention: over the compute mapping.
        compute: the compute mapping.
        mesh: mesh axis sizes, and which of them cross slices.
        allowed: `trainer.mesh.allow_dcn`.
    """
    axes = compute.mesh_axes(POSITION)
    across = [axis for axis in axes if axis in mesh.dcn and mesh.shape[axis] > 1]
    if not across:
        return []
    crosses = f"{POSITION} → {show_axes(axes)} crosses slices ({', '.join(across)})"
    within = [axis for axis in axes if axis not in across and mesh.shape[axis] > 1]
    ways = ", ".join(f"{axis}: {mesh.shape[axis]}" for axis in across)
    inside = (
        f"compute_mapping: {{{POSITION}: {show_axes(within)}}}"
        if within
        else f"axes: {{{ways}}} in place of dcn_axes: {{{ways}}}"
    )
    if not allowed:
        return [
            ShardingError(
                f"trainer.mesh: compute mapping: {crosses}: every layer would exchange keys and values over DCN",
                suggestion=f"shard positions inside a slice, {inside}, or set trainer.mesh.allow_dcn: true, with "
                "attention_mapping: ring",
            )
        ]
    # `gather` and `heads` are collectives over all devices of the axis; over DCN each would wait for the slowest link.
    if method_from_mapping(attention, compute, mesh) in ("gather", "heads"):
        return [
            ShardingError(
                f"{_WHERE}: {crosses}, and across slices only a ring exchanges with its neighbour alone",
                suggestion=f"attention_mapping: ring, or shard positions inside a slice, {inside}",
            )
        ]
    return []


def _heads_problems(inside: AxisMapping, mesh: MeshSpec, sizes: Mapping[str, int]) -> list[ShardingError]:
    kv_heads, axes = sizes.get(KV_HEAD), inside.mesh_axes(KV_HEAD)
    if shared := [axis for axis in axes if axis in inside.mesh_axes(POSITION)]:
        return [
            ShardingError(
                f"{_WHERE}: {KV_HEAD} and {POSITION} are both mapped to mesh axis {', '.join(shared)}",
                suggestion=f"unmap one of them: {{{POSITION}: null}} exchanges heads",
            )
        ]
    ways = mesh.ways(axes)
    if kv_heads is None or kv_heads % ways == 0:
        return []
    legal = ", ".join(str(n) for n in divisors(kv_heads))
    group = sizes.get("q_heads_per_group", 1)
    repeat = (
        f"or shard the {group} query heads of a group instead, {{{POSITION}: null, q_heads_per_group: …}}, with keys "
        "and values on all devices, "
        if group > 1
        else ""
    )
    return [
        IndivisibleError(
            f"{_WHERE}: {KV_HEAD} → {show_axes(axes)}: {kv_heads} {KV_HEAD} cannot be sharded {ways} ways",
            suggestion=f"numbers of shards that divide them: {legal}; {repeat}or use gather or ring",
        )
    ]


def _order_problems(shards: int, positions: int | None, order: Order) -> list[ShardingError]:
    if positions is None or shards == 1:
        return []
    # A zigzag shard holds two runs, so positions must divide into twice as many parts.
    unit = num_runs(shards, order)
    if positions % unit == 0:
        return []
    near = [n for n in (positions // unit * unit, -(-positions // unit) * unit) if n]
    layout = f"{shards} parts" + (f" of two runs each (position_order: {order})" if order == "zigzag" else "")
    return [
        IndivisibleError(
            f"trainer.mesh: {POSITION} is sharded into {layout}, and {positions} positions % {unit} = "
            f"{positions % unit}",
            suggestion=f"make it {' or '.join(map(str, near))} positions",
        )
    ]


def num_runs(shards: int, order: Order) -> int:
    """The number of runs of consecutive positions that a sequence is divided into.

    >>> num_runs(4, "natural"), num_runs(4, "zigzag")
    (4, 8)
    """
    return 2 * shards if order == "zigzag" and shards > 1 else shards


def busiest_share(shards: int, order: Order) -> float:
    """The pairs of a causal mask on the busiest device, over the mean of all: (2n − 1)/n in natural order.

    >>> busiest_share(8, "natural"), busiest_share(8, "zigzag")
    (1.875, 1.0)
    """
    # Shard i of n sees a number of pairs proportional to 2i + 1, n on average; the last one has 2n − 1. In zigzag order
    # an early and a late run add up to the mean on every device.
    return 1.0 if order == "zigzag" or shards == 1 else (2 * shards - 1) / shards


def default_order(method: Method | None, *, configured: Order | None, has_mapping: bool) -> Order:
    """The order of positions: as configured; else zigzag where there is an attention mapping.

    Args:
        method: what devices exchange.
        configured: `trainer.mesh.position_order`.
        has_mapping: whether there is an attention mapping.
    """
    if configured is not None:
        return configured
    # Devices that exchange heads have whole sequences inside of attention: no order balances them better.
    return "zigzag" if has_mapping and method not in (None, "heads") else "natural"


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How positions that are sharded over devices attend to each other.

    Attributes:
        method: what devices exchange; None where each holds whole sequences.
        order: how positions are laid out on the devices.
        attention: the mapping inside of attention, over the compute mapping.
        notes: a line for each decision the user did not write, and for what is slow.
        problems: what is wrong with it.
    """

    method: Method | None
    order: Order
    attention: AxisMapping
    notes: tuple[str, ...] = ()
    problems: tuple[ShardingError, ...] = ()


def plan_context_parallel(
    config: MeshConfig,
    model: ModelAxes,
    rules: MeshRules,
    *,
    hbm_bytes: int | None = None,
    prices: Prices | None = None,
) -> ContextParallel:
    """Third step of `resolve`: the mapping inside of attention, with `auto` decided, and the order of positions.

    Args:
        config: what the user wrote.
        model: its axes.
        rules: of all mappings, expanded.
        hbm_bytes: memory of a device; None where it is not known.
        prices: seconds of each method on these devices.
    """
    # Through `dict`, which drops unmapped names: the compute mapping is the outermost, so they unmap nothing.
    spec, compute = rules.spec, AxisMapping(dict(AxisMapping(rules.compute.rules)))
    attention = AxisMapping(rules.attention.rules)
    word = config.attention_mapping if isinstance(config.attention_mapping, str) else None
    configured = word is not None or bool(config.attention_mapping)
    notes: list[str] = []
    # A method by name means something only where positions are sharded.
    if word is not None and spec.ways(compute.mesh_axes(POSITION)) > 1:
        if word == "auto":
            choice = _auto(compute, spec, model, hbm_bytes, prices)
            notes.append(f"attention_mapping auto is {choice}")
            word = choice.method
        attention = method_mapping(word, compute)
    method = method_from_mapping(attention, compute, spec)
    order = default_order(method, configured=config.position_order, has_mapping=configured)
    problems = check_dcn(attention, compute, spec, allowed=config.allow_dcn)
    if configured or config.position_order is not None:
        problems += check_attention_mapping(attention, compute, spec, sizes=model.sizes, order=order)
        notes += _method_notes(method, order, attention, compute, spec)
    return ContextParallel(
        method=method, order=order, attention=attention, notes=tuple(notes), problems=tuple(problems)
    )


def _auto(
    compute: AxisMapping, spec: MeshSpec, model: ModelAxes, hbm_bytes: int | None, prices: Prices | None
) -> MethodChoice:
    """The method that `auto` selects for a model on a mesh."""
    kv_heads, position = model.sizes.get(KV_HEAD, 1), compute.mesh_axes(POSITION)
    heads_ways, position_ways = spec.ways(compute.mesh_axes(KV_HEAD)), spec.ways(position)
    seconds: dict[Method, float] = {}
    for method in ("gather", "heads", "ring"):
        # A method that does not divide has no price and is no candidate.
        if prices is None or (method == "heads" and kv_heads % (heads_ways * position_ways)):
            continue
        mappings = Mappings(compute=compute, attention=method_mapping(method, compute))
        if (price := prices(model.sizes, mappings, spec)) is not None:
            seconds[method] = price
    return choose(
        kv_heads=kv_heads,
        head_size=model.sizes.get("head_size", 1),
        positions=model.sizes.get(POSITION, 1),
        heads_ways=heads_ways,
        position_ways=position_ways,
        hbm_bytes=hbm_bytes,
        seconds=seconds,
        between_slices=any(axis in spec.dcn and spec.shape[axis] > 1 for axis in position),
    )


def _method_notes(
    method: Method | None,
    order: Order,
    attention: AxisMapping,
    compute: AxisMapping,
    spec: MeshSpec,
) -> list[str]:
    """The method and the order of positions, and a warning where positions are sharded over DCN."""
    if method is None:
        return [
            "attention_mapping and position_order have no effect: positions are not sharded (compute_mapping: position)"
        ]
    ways = spec.ways(compute.merged(attention).mesh_axes(POSITION))
    order_clause = "" if method == "heads" else f", positions in {order} order"
    share = busiest_share(ways, order)
    notes = [
        f"attention exchanges by {method}{order_clause}: the busiest device has {share:.4g} × the mean of a causal mask"
    ]
    if across := [axis for axis in compute.mesh_axes(POSITION) if axis in spec.dcn and spec.shape[axis] > 1]:
        notes.append(
            f"positions are sharded over {', '.join(across)}, across slices: every layer exchanges over DCN, at least "
            "an order of magnitude slower than ICI (trainer.mesh.allow_dcn)"
        )
    return notes
