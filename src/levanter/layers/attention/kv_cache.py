"""Attention of new positions to a paged KV cache, for text generation.

A *row* is a sequence that grows. Its keys and values are stored in *pages* of a fixed number of *slots*, one slot per
position. One array holds a stack of layers: `[layers, page, kv_head, kv, slot, head_size]`, where index 0 of `kv` is
the key and 1 the value. Position `p` of a row is slot `p mod slots` of the row's page number `p div slots`. The *table*
of a row lists its pages; without tables, row `r` has exactly page `r`, and reading gathers nothing.

The array of the stack is carried from layer to layer and updated in place, at the new positions only. As scanned input
and output of a loop over layers, or written back layer by layer, it would exist twice or be copied in every step. The
axis order gives each device, per head, one contiguous run of keys and one of values, in the layout that a matrix
product reads; with `slot` further out a 16-bit cache is copied for each write (both verified in the output of the TPU
compiler).

Rows are sharded like the batch, and the pages of a row are on the devices of the row: each device writes and reads its
own rows and heads under `jax.shard_map`, without communication.

An int8 cache has a second array per stack, over the same axes without `head_size`: the scales
(`layers.attention.cache_int8`).
"""

from collections.abc import Mapping, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.attention.cache_int8 import SCALE_DTYPE
from levanter.layers.attention.cache_positions import NewPositions as NewPositions
from levanter.layers.attention.cache_positions import with_pages
from levanter.layers.attention.kv_cache_shard import CACHE_ARRAYS, CACHE_INDICES, CachedAttention
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.decode_state import LayerState, Leaves, StateLeaf

PAGE_AXES = ("layers", "page", "kv_head", "kv", "slot", "head_size")
"""The axes of the keys and values of a stack of layers, in order."""

SCALE_AXES = ("layers", "kv_head", "kv", "page", "slot")
"""The axes of the scales of an int8 cache, in order. With `kv` next to `slot` XLA converts the layout for each call."""


def kv_leaves(dtype: DTypeLike, *, KVHead: Axis, HeadSize: Axis) -> Leaves:
    """The decode state of a layer: `pages`, keys and values, and for int8 the `scales` of these vectors.

    Args:
        dtype: of keys and values.
        KVHead: axis of key and value heads.
        HeadSize: axis of the features of a head.
    """
    sizes: Mapping[str, Axis] = {"kv_head": KVHead, "kv": Axis("kv", 2), "head_size": HeadSize}

    def leaf(names: Sequence[str], dtype: DTypeLike) -> StateLeaf:
        # The sizes of `page` and `slot` are the run's.
        return StateLeaf(axes=tuple(sizes.get(name, name) for name in names[1:]), dtype=jnp.dtype(dtype))

    # Only int8 pages have scales; floating-point pages store the vectors themselves.
    scales = {"scales": leaf(SCALE_AXES, SCALE_DTYPE)} if jnp.dtype(dtype) == jnp.int8 else {}
    return {"pages": leaf(PAGE_AXES, dtype), **scales}


def attend_cached(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    state: LayerState,
    new: NewPositions,
    *,
    mask: AttentionMask,
    softmax_scale: float,
    dtype: DTypeLike,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
) -> tuple[NamedArray, LayerState]:
    """Appends the keys and values of new positions to a layer's cache, and attends to all positions.

    A key or value that is not finite is stored as 0. Its row is lost, which its activations show; but a later row that
    reuses the page multiplies masked entries by 0, and 0 · NaN is NaN. Values beyond the range of a float16 cache count
    as not finite.

    Args:
        q: `[batch, position, kv_head, q_heads_per_group, head_size]`.
        k: `[batch, position, kv_head, head_size]`, of the same positions.
        v: as `k`.
        state: `pages` over `PAGE_AXES`, and of an int8 cache `scales` over `SCALE_AXES`, before this layer.
        new: the new positions and their places in the cache.
        mask: a rule that compares positions only (causal, window).
        softmax_scale: multiplies the scores.
        dtype: dtype of the attention products.
        soft_cap: bound of the scores; None for none.
        sinks: `[kv_head, q_heads_per_group]`; see `reference_attention`.

    Returns:
        The attention output over the axes of `q`, and the state after this layer.
    """
    # A row is one sequence in order of position: segments and explicit masks have no meaning in a cache.
    assert mask.explicit_mask is None and mask.query_segments is None and not mask.moves_queries, mask
    (Batch,) = (a for a in q.axes if a.name not in ("position", "kv_head", "q_heads_per_group", "head_size"))
    of_key = (Batch.name, "position", "kv_head", "head_size")
    of_query = (*of_key[:3], "q_heads_per_group", "head_size")
    at = (Batch.name, "position")
    pages, scales = state.arrays["pages"], state.arrays.get("scales")
    assert tuple(axis.name for axis in pages.axes) == PAGE_AXES, pages.axes
    assert scales is None or tuple(axis.name for axis in scales.axes) == SCALE_AXES, scales.axes
    # The caller of several layers computes the indices once; a single layer computes its own.
    new = new if new.known_indices(pages) else new.with_cache_indices(pages, scales)
    optional_inputs = {
        "q": q.rearrange(of_query),
        "k": k.rearrange(of_key),
        "v": v.rearrange(of_key),
        "pages": pages,
        "scales": scales,
        "positions": new.positions.rearrange(at),
        "valid": new.valid.rearrange(at),
        "tables": new.tables,
        "sinks": sinks,
        **{CACHE_INDICES[name]: x for name, x in new.known_indices(pages).items()},
    }
    inputs = {name: x for name, x in optional_inputs.items() if x is not None}
    layer = CachedAttention(
        axes={name: tuple(axis.name for axis in x.axes) for name, x in inputs.items()},
        reach=new.reach,
        block=new.block,
        lone_queries=new.lone_queries,
        flat=new.flat,
        mask=mask,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        dtype=jnp.dtype(dtype),
    )
    arrays = {name: x.array for name, x in inputs.items()}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mixed, cache_arrays = layer(state.layer, arrays)
    else:
        mapping = with_pages(Batch.name)
        specs = {name: mapping.spec(names) for name, names in layer.axes.items()}
        cache_specs = {name: specs[name] for name in CACHE_ARRAYS if name in specs}
        # check_vma=False: the checker cannot prove that replicated computations agree between devices.
        run = jax.shard_map(layer, in_specs=(jax.P(), specs), out_specs=(specs["q"], cache_specs), check_vma=False)
        mixed, cache_arrays = run(state.layer, arrays)
    new_cache = {name: hax.named(x, inputs[name].axes) for name, x in cache_arrays.items()}
    mixed = hax.named(mixed, inputs["q"].axes).rearrange(q.axes)
    return mixed, state.after(new_cache)
