"""`jax.nn.dot_product_attention` behind named axes: XLA's formulation, or cuDNN's fused kernel on NVIDIA GPUs."""

from typing import Literal

import haliax as hax
import jax
from haliax import NamedArray

from levanter.layers.attention.mask import AttentionMask


def jax_native_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    implementation: Literal["xla", "cudnn"],
) -> NamedArray:
    """As `reference_attention`, through JAX's own function.

    JAX has one axis for query heads; `kv_head` and `q_heads_per_group` are flattened into it, key/value head first.
    A mapping that shards `q_heads_per_group` but not `kv_head` cannot be kept through that and is gathered.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    KVHead, Group = q.resolve_axis("kv_head"), q.resolve_axis("q_heads_per_group")
    HeadSize = q.resolve_axis("head_size")
    leading = tuple(a for a in q.axes if a not in (Pos, KVHead, Group, HeadSize))

    def plain(x: NamedArray, *axes: hax.Axis) -> jax.Array:
        """The array `[leading (flattened), *axes]`."""
        array = x.rearrange((*leading, *axes)).array
        return array.reshape(-1, *array.shape[len(leading) :])

    queries = plain(q, Pos, KVHead, Group, HeadSize)
    queries = queries.reshape(*queries.shape[:2], KVHead.size * Group.size, HeadSize.size)
    by_index = mask.is_by_index(Pos, KeyPos) and mask.query_segments is None and mask.explicit_mask is None
    simple = by_index and (mask.is_causal or mask.sliding_window is None)
    visible = None if simple else mask.materialize(Pos, KeyPos)
    if visible is not None:
        visible = visible.broadcast_to((*leading, Pos, KeyPos)).rearrange((*leading, Pos, KeyPos))
    # JAX's function asks which dtype 16-bit floats and float32 promote to, which strict promotion refuses to say.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            queries,
            plain(k, KeyPos, KVHead, HeadSize),
            plain(v, KeyPos, KVHead, HeadSize),
            mask=None if visible is None else plain(visible, Pos, KeyPos)[:, None],
            scale=softmax_scale,
            is_causal=simple and mask.is_causal,
            # As many keys before the query, and none after it.
            local_window_size=(mask.sliding_window - 1, 0) if simple and mask.sliding_window is not None else None,
            implementation=implementation,
        )
    axes = (*leading, Pos, KVHead, Group, HeadSize)
    result = hax.named(out.reshape([a.size for a in axes]), axes)
    if visible is not None:
        result = hax.where(hax.any(visible, KeyPos), result, 0.0)
    return result.rearrange(q.axes)
