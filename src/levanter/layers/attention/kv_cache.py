"""Attention of new positions to all before them, whose keys and values a cache holds: what generating text needs.

A *row* is a sequence that grows. Its keys and values lie in *pages* of so many *slots*, a slot for each position, in an
array for a stack of layers: `[layers, page, kv_head, kv, slot, head_size]`, where `kv` is key, then value. Position `p`
of a row is slot `p mod slots` of the row's page number `p div slots`. Which pages those are, the rows' *tables* say; or
nothing does, and then row `r` has page `r` and no other, and reading it gathers nothing.

The stack of layers is one array that goes from layer to layer and is written in place, the new positions and nothing
else: as the scanned input and output of a loop over layers, or written back layer by layer, it would exist twice or be
moved whole in every step. The axes are in this order because a device then holds, for each of its heads, one stretch of
keys and one of values, each as a matrix product reads it; with `slot` further out a 16-bit cache is copied to be
written (both were read off what the TPU compiler makes of them).

Rows are sharded like the batch, and a row's pages lie with the row: every device writes and reads its own rows and
heads, and nothing is communicated. `jax.shard_map` says so.

A cache of 8-bit integers has a second array for a stack of layers, of the same axes but `head_size`: the scales
(`layers.attention.cache_int8`).
"""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.attention.cache_positions import NewPositions as NewPositions
from levanter.layers.attention.cache_positions import with_pages
from levanter.layers.attention.kv_cache_shard import HELD, PLACES, CachedAttention
from levanter.layers.attention.mask import AttentionMask

PAGE_AXES = ("layers", "page", "kv_head", "kv", "slot", "head_size")
"""The axes of the keys and values of a stack of layers, in order."""

SCALE_AXES = ("layers", "kv_head", "kv", "page", "slot")
"""The axes of the scales of integers, in order. With `kv` beside `slot` they would be laid out anew, and back, for each
call."""


class CachedLayers(eqx.Module):
    """What a stack of attention layers remembers: the state that its layers hand on.

    Attributes:
        pages: keys and values of all of them, over `PAGE_AXES`.
        layer: the index of the layer that comes next, int32.
        scales: of integers, over `SCALE_AXES`; None where keys and values are stored as they are.
    """

    pages: NamedArray
    layer: jax.Array
    scales: NamedArray | None = None

    @staticmethod
    def entering(pages: NamedArray, scales: NamedArray | None = None) -> "CachedLayers":
        """The state before the first layer."""
        assert tuple(axis.name for axis in pages.axes) == PAGE_AXES, pages.axes
        assert scales is None or tuple(axis.name for axis in scales.axes) == SCALE_AXES, scales.axes
        return CachedLayers(pages=pages, layer=jnp.int32(0), scales=scales)


def page_axes(*, layers: int, pages: int, slots: int, KVHead: Axis, HeadSize: Axis) -> tuple[Axis, ...]:
    """The axes of a stack's keys and values."""
    return (Axis("layers", layers), Axis("page", pages), KVHead, Axis("kv", 2), Axis("slot", slots), HeadSize)


def scale_axes(pages: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes of the scales of a stack's keys and values.

    Args:
        pages: those of the keys and values.
    """
    by_name = {axis.name: axis for axis in pages}
    return tuple(by_name[name] for name in SCALE_AXES)


def attend_cached(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    state: CachedLayers,
    new: NewPositions,
    *,
    mask: AttentionMask,
    softmax_scale: float,
    dtype: DTypeLike,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
) -> tuple[NamedArray, CachedLayers]:
    """Adds the keys and values of new positions to a layer's, and attends to them all.

    A new key or value that is not finite is stored as 0: its row is lost and is known to be by its activations, but a
    later row that gets its page would multiply what it does not see by 0, and 0 · NaN is NaN. What a cache of float16
    has no number for is taken for one that is not finite.

    Args:
        q: `[batch, position, kv_head, q_heads_per_group, head_size]`.
        k: `[batch, position, kv_head, head_size]`, of the same positions.
        v: as `k`.
        state: before this layer.
        new: where the positions belong.
        mask: which positions see which, by a rule about positions alone.
        softmax_scale: multiplies the scores.
        dtype: in which attention is computed.
        soft_cap: bound of the scores; None for none.
        sinks: `[kv_head, q_heads_per_group]`; see `reference_attention`.

    Returns:
        The axes of `q`, and the state behind this layer.
    """
    assert mask.explicit_mask is None and mask.query_segments is None and not mask.moves_queries, mask
    (Batch,) = (a for a in q.axes if a.name not in ("position", "kv_head", "q_heads_per_group", "head_size"))
    of_key = (Batch.name, "position", "kv_head", "head_size")
    of_query = (*of_key[:3], "q_heads_per_group", "head_size")
    at = (Batch.name, "position")
    new = new if new.places else new.placed(state.pages, state.scales)
    given = {
        "q": q.rearrange(of_query),
        "k": k.rearrange(of_key),
        "v": v.rearrange(of_key),
        "pages": state.pages,
        "scales": state.scales,
        "positions": new.positions.rearrange(at),
        "there": new.there.rearrange(at),
        "tables": new.tables,
        "sinks": sinks,
        **{PLACES[name]: x for name, x in new.places.items()},
    }
    there = {name: x for name, x in given.items() if x is not None}
    layer = CachedAttention(
        axes={name: tuple(axis.name for axis in x.axes) for name, x in there.items()},
        reach=new.reach,
        block=new.block,
        lone_queries=new.lone_queries,
        flat=new.flat,
        mask=mask,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        dtype=jnp.dtype(dtype),
    )
    arrays = {name: x.array for name, x in there.items()}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mixed, held = layer(state.layer, arrays)
    else:
        mapping = with_pages(Batch.name)
        specs = {name: mapping.spec(names) for name, names in layer.axes.items()}
        kept = {name: specs[name] for name in HELD if name in specs}
        # That what is computed alike on several devices is the same there, the checker does not see.
        run = jax.shard_map(layer, in_specs=(jax.P(), specs), out_specs=(specs["q"], kept), check_vma=False)
        mixed, held = run(state.layer, arrays)
    behind = {name: hax.named(x, there[name].axes) for name, x in held.items()}
    mixed = hax.named(mixed, there["q"].axes).rearrange(q.axes)
    return mixed, CachedLayers(**behind, layer=state.layer + 1)
