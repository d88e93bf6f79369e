"""How positions that lie on several devices look at each other: the exchanges, and the choice between them.

Where the compute mapping cuts `position`, each device has a part of every sequence, and attention needs all of it. What
devices exchange for that is said by one more mapping, `trainer.mesh.attention_mapping`, laid over the compute mapping
while positions look at each other; on an axis `context` that cuts positions:

    gather          {}                                             every device has its queries and all keys and values
    heads           {position: null, kv_head: [model, context]}    every device has all positions of some heads
    ring            {key_position: context}                        keys and values travel from device to device
    ring × heads    {position: ring, key_position: ring, kv_head: [model, context]}, over position: [ring, context]

The words `gather`, `heads` and `ring` stand for these spellings, and `auto` for the one that `choose` chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from haliax_ext.divisibility import divisors
from haliax_ext.errors import IndivisibleError, ShardingError
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.placement import show_axes

Exchange = Literal["gather", "heads", "ring", "ring × heads"]
Order = Literal["natural", "zigzag"]

POSITION, KEY_POSITION, KV_HEAD = "position", "key_position", "kv_head"

GATHERED_SHARE = 0.05
"""The share of a device's memory that keys and values of one sequence and layer may take before they travel."""

ALIKE = 0.05
"""By how much less a layer must wait for one exchange than for another to be told from it by arithmetic."""

_WHERE = "trainer.mesh: attention_mapping"


@dataclass(frozen=True, kw_only=True)
class ExchangeChoice:
    """An exchange and the reason for it.

    Attributes:
        exchange: which.
        reason: a clause that completes "`exchange`, because …".
    """

    exchange: Exchange
    reason: str

    def __str__(self) -> str:
        return f"{self.exchange}: {self.reason}"


class Prices(Protocol):
    """What exchanges take on some devices."""

    def __call__(self, sizes: Mapping[str, int], mappings: Mappings, mesh: MeshSpec) -> float | None:
        """Seconds that one layer waits for what is exchanged for one sequence; None where it cannot be or is not known.

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
    seconds: Mapping[Exchange, float] | None = None,
    between_slices: bool = False,
) -> ExchangeChoice:
    """Which exchange `auto` means. Arithmetic only.

    Of heads, if they divide, gathered keys, while they are a small share of a device's memory, and a ring, what a layer
    waits for least; of what is alike (`ALIKE`), or not known, the first of these. Heads are balanced without an order,
    and a device has an n-th of the keys.

    Args:
        kv_heads: heads with keys and values of their own.
        head_size: features of one.
        positions: tokens in a sequence.
        heads_ways: pieces that these heads are cut in already.
        position_ways: pieces that positions are cut in.
        hbm_bytes: memory of a device; None where it is not known.
        seconds: that a layer waits for a sequence; without those that cannot be or are not known.
        between_slices: whether positions are cut between slices.
    """
    if between_slices:
        return ExchangeChoice(exchange="ring", reason="positions are cut between slices")
    ways = heads_ways * position_ways
    divides = kv_heads % ways == 0
    of_heads = f"{kv_heads} {KV_HEAD} divide by {ways}" if divides else f"{kv_heads} {KV_HEAD} do not divide by {ways}"
    gathered = gathered_bytes(kv_heads=kv_heads, head_size=head_size, positions=positions, heads_ways=heads_ways)
    limit = None if hbm_bytes is None else GATHERED_SHARE * hbm_bytes
    few = limit is None or gathered <= limit
    size = f"gathered keys and values of a sequence and layer are {gathered / 2**30:.3g} GiB"
    if hbm_bytes is not None:
        size += f", {'at most' if few else 'more than'} {GATHERED_SHARE:.0%} of {hbm_bytes / 2**30:.4g} GiB"
    can_be: tuple[tuple[Exchange, bool], ...] = (("heads", divides), ("gather", few), ("ring", True))
    legal: list[Exchange] = [each for each, can in can_be if can]
    known: list[Exchange] = [each for each in legal if seconds and each in seconds]
    if not known or seconds is None:
        reason = f"{of_heads}, so the work is balanced" if divides else f"{of_heads}, and {size}"
        return ExchangeChoice(exchange=legal[0], reason=reason)
    least = min(seconds[each] for each in known)
    best: Exchange = next(each for each in known if seconds[each] <= (1 + ALIKE) * least)
    beside = [f"{1e3 * seconds[each]:.3g} ms for {each}" for each in known if each != best]
    waits = ", ".join((f"a layer waits {1e3 * seconds[best]:.3g} ms for a sequence by arithmetic", *beside))
    why_not = [*([] if divides else [of_heads]), *([] if few else [size])]
    return ExchangeChoice(exchange=best, reason="; ".join((waits, *why_not)))


def gathered_bytes(*, kv_heads: int, head_size: int, positions: int, heads_ways: int) -> int:
    """Bytes of all keys and values of one sequence in one layer on a device, in 16 bits."""
    return 2 * 2 * positions * max(kv_heads // heads_ways, 1) * head_size


def spelled(word: Exchange, compute: AxisMapping) -> AxisMapping:
    """The mapping that an exchange is, under a compute mapping that cuts positions."""
    position = compute.mesh_axes(POSITION)
    if word == "heads":
        return AxisMapping({POSITION: None, KV_HEAD: (*compute.mesh_axes(KV_HEAD), *position)})
    return AxisMapping({KEY_POSITION: position}) if word == "ring" else AxisMapping()


def exchange_of(attention: AxisMapping, compute: AxisMapping, mesh: MeshSpec) -> Exchange | None:
    """What a mapping spells; None where positions are on one device anyway.

    Args:
        attention: over the compute mapping.
        compute: the compute mapping.
        mesh: mesh axis sizes.
    """
    inside = compute.merged(attention)
    before, now = (mesh.ways(each.mesh_axes(POSITION)) for each in (compute, inside))
    if before == 1:
        return None
    if mesh.ways(inside.mesh_axes(KEY_POSITION)) > 1:
        return "ring" if now == before else "ring × heads"
    return "gather" if now == before else "heads"


def problems_of(
    attention: AxisMapping, compute: AxisMapping, mesh: MeshSpec, *, sizes: Mapping[str, int], order: Order
) -> list[ShardingError]:
    """What is wrong with a mapping for the inside of attention, with the nearest thing that would be right.

    Args:
        attention: over the compute mapping.
        compute: the compute mapping.
        mesh: mesh axis sizes.
        sizes: of the model's axes.
        order: of the positions.
    """
    inside = compute.merged(attention)
    keys, queries = inside.mesh_axes(KEY_POSITION), inside.mesh_axes(POSITION)
    found: list[ShardingError] = []
    if compute.mesh_axes(KEY_POSITION):
        found.append(
            ShardingError(
                f"trainer.mesh: compute mapping: {KEY_POSITION} → {show_axes(compute.mesh_axes(KEY_POSITION))}: "
                "keys are cut inside of attention only",
                suggestion=f"attention_mapping: {{{KEY_POSITION}: {show_axes(compute.mesh_axes(KEY_POSITION))}}}",
            )
        )
    elif keys and keys != queries:
        has = f"{POSITION} → {show_axes(queries)}" if queries else f"{POSITION} is not mapped"
        found.append(
            ShardingError(
                f"{_WHERE}: {KEY_POSITION} → {show_axes(keys)}, but {has}: in a ring both are cut alike",
                suggestion=f"compute_mapping: {{{POSITION}: {show_axes(keys)}}}",
            )
        )
    found += _heads_problems(inside, mesh, sizes)
    found += _order_problems(mesh.ways(queries), sizes.get(POSITION), order)
    return found


def across_slices(
    attention: AxisMapping, compute: AxisMapping, mesh: MeshSpec, *, allowed: bool
) -> list[ShardingError]:
    """What is wrong with positions that are cut between slices: a ring alone may be, where it is allowed.

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
                suggestion=f"cut positions inside a slice, {inside}, or say trainer.mesh.allow_dcn: true, with "
                "attention_mapping: ring",
            )
        ]
    if exchange_of(attention, compute, mesh) in ("gather", "heads"):
        return [
            ShardingError(
                f"{_WHERE}: {crosses}, and between slices only a ring exchanges with its neighbour alone",
                suggestion=f"attention_mapping: ring, or cut positions inside a slice, {inside}",
            )
        ]
    return []


def uncut_between_blocks(mappings: Mappings, mesh: MeshSpec) -> list[str]:
    """A note where the residual stream has positions whole over a mesh axis that cuts them in the computation."""
    inside, between = mappings.compute.mesh_axes(POSITION), mappings.residual.mesh_axes(POSITION)
    left_out = [axis for axis in inside if axis not in between and mesh.shape[axis] > 1]
    if not between or not left_out:
        return []
    return [
        f"residual_mapping: {POSITION} → {show_axes(between)} leaves out {', '.join(left_out)}, which cuts it in the "
        f"compute mapping: every block gathers over it; {show_axes((*inside, *between))} does not"
    ]


def _heads_problems(inside: AxisMapping, mesh: MeshSpec, sizes: Mapping[str, int]) -> list[ShardingError]:
    kv_heads, axes = sizes.get(KV_HEAD), inside.mesh_axes(KV_HEAD)
    if both := [axis for axis in axes if axis in inside.mesh_axes(POSITION)]:
        return [
            ShardingError(
                f"{_WHERE}: {KV_HEAD} and {POSITION} are both mapped to mesh axis {', '.join(both)}",
                suggestion=f"take it from one of them: {{{POSITION}: null}} exchanges heads",
            )
        ]
    ways = mesh.ways(axes)
    if kv_heads is None or kv_heads % ways == 0:
        return []
    legal = ", ".join(str(n) for n in divisors(kv_heads))
    group = sizes.get("q_heads_per_group", 1)
    repeat = (
        f"or cut the {group} query heads of a group instead, {{{POSITION}: null, q_heads_per_group: …}}, with keys and "
        "values on all devices, "
        if group > 1
        else ""
    )
    return [
        IndivisibleError(
            f"{_WHERE}: {KV_HEAD} → {show_axes(axes)}: {kv_heads} {KV_HEAD} do not divide into {ways} pieces",
            suggestion=f"pieces that divide them: {legal}; {repeat}or use gather or ring",
        )
    ]


def _order_problems(parts: int, positions: int | None, order: Order) -> list[ShardingError]:
    if positions is None or parts == 1:
        return []
    unit = runs_of(parts, order)
    if positions % unit == 0:
        return []
    near = [n for n in (positions // unit * unit, -(-positions // unit) * unit) if n]
    how = f"{parts} parts" + (f" of two runs each (position_order: {order})" if order == "zigzag" else "")
    return [
        IndivisibleError(
            f"trainer.mesh: {POSITION} is cut into {how}, and {positions} positions % {unit} = {positions % unit}",
            suggestion=f"make it {' or '.join(map(str, near))} positions",
        )
    ]


def runs_of(parts: int, order: Order) -> int:
    """In how many runs of consecutive positions a sequence lies on its devices."""
    return 2 * parts if order == "zigzag" and parts > 1 else parts


def busiest_share(parts: int, order: Order) -> float:
    """What the busiest device has of a causal mask's pairs, over the mean: (2n − 1)/n in natural order."""
    return 1.0 if order == "zigzag" or parts == 1 else (2 * parts - 1) / parts


def default_order(exchange: Exchange | None, *, asked: Order | None, said: bool) -> Order:
    """The order of positions: as asked; else zigzag where somebody said how they look at each other.

    Args:
        exchange: what devices exchange.
        asked: `trainer.mesh.position_order`.
        said: whether there is an attention mapping.
    """
    if asked is not None:
        return asked
    return "zigzag" if said and exchange not in (None, "heads") else "natural"
