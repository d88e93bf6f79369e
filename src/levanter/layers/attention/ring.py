"""Ring attention: keys and values rotate around a ring of devices; no device ever holds all of them.

Each of n devices holds a shard of the positions (Liu et al., arXiv:2310.01889). In n *hops* every shard of the keys
visits every device, which attends to it with a `RingStep` and merges the results in float32. The backward pass rotates
once more with the global log-sum-exp: either keys, values and their gradients rotate, or queries, output gradients and
query gradients do, whichever are fewer bytes. A rotating tensor accumulates its gradient in float32 and arrives back at
its device with it.

The hops are a loop, not unrolled: otherwise a compiler starts all permutations before the first product, and each
device holds all keys again. The permutations of a hop overlap with its products. Keys and values are separate arrays:
stacked, they would be split, and their gradients joined, in every hop. Segments rotate with the keys. Visibility
follows from positions, which are a function of the rank and the number of hops, so windows and zigzag order need no
special case.
"""

import functools
import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.ad_checkpoint import checkpoint_name

import levanter.layers.attention.lse_merge as lse_merge
from haliax_ext.errors import ShardingError
from levanter.layers.attention.kernel_specs import AxisShards
from levanter.layers.attention.mask import AttentionMask

Arrays = tuple[jax.Array, ...]
Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class VisibleKeys:
    """The static part of the mask, the same on every device.

    Attributes:
        runs: runs of consecutive positions per device: 1 in natural order, 2 in zigzag order.
        is_causal: see `AttentionMask`.
        window: its `sliding_window`.
    """

    runs: int
    is_causal: bool
    window: int | None


class RingStep(Protocol):
    """Attention of a device's queries to the shard of keys that is present in one hop.

    Arrays: `q [rows, kv_head, group, position, head_size]`, `k` and `v [rows, kv_head, key_position, head_size]`.
    `begins`: the first position of each run of the queries, and of the keys. `segments`: those of queries and keys,
    `[rows, …]`, or None. `q` is scaled by the caller.
    """

    def forward(
        self,
        visible_keys: VisibleKeys,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        begins: Arrays,
        segments: Arrays | None,
    ) -> lse_merge.PartialAttention:
        """Attention of the queries to these keys, with its log-sum-exp."""
        ...

    def backward(
        self,
        visible_keys: VisibleKeys,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        residuals: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of `inputs` (q, k, v), float32.

        Args:
            visible_keys, begins, segments: as of `forward`.
            inputs: queries, these keys, their values.
            residuals: of attention to all keys: the sum over features of the result times its gradient, float32; the
                log-sum-exp; the gradient of the result.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceRing:
    """A ring of devices.

    Attributes:
        axes: the mesh axes of the ring.
        size: the number of devices.
        visible_keys: the static part of the mask.
        ring_step: the attention of one hop.
    """

    axes: tuple[str, ...]
    size: int
    visible_keys: VisibleKeys
    ring_step: RingStep

    def next(self, x: T) -> T:
        """Sends a tree of arrays to the next device and receives that of the previous one."""
        # Over several mesh axes, ranks count in row-major order of `axes`, as shards of a PartitionSpec do.
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return jax.lax.ppermute(x, axes, [(i, (i + 1) % self.size) for i in range(self.size)])

    def begins(self, rank: jax.Array, length: int) -> jax.Array:
        """The first positions of the runs of a rank, `[runs]`."""
        # Zigzag: rank i holds runs i and 2n − 1 − i of the 2n runs.
        run = length // self.visible_keys.runs
        firsts = [rank * run] if self.visible_keys.runs == 1 else [rank * run, (2 * self.size - 1 - rank) * run]
        return jnp.stack(firsts).astype(jnp.int32)

    def here(self) -> jax.Array:
        """The rank of this device."""
        return jax.lax.axis_index(self.axes[0] if len(self.axes) == 1 else self.axes)


def ring_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    ring_step: RingStep,
    sinks: NamedArray | None = None,
) -> NamedArray:
    """`reference_attention` where the mapping in scope shards `position` and `key_position` over the same mesh axes.

    Args:
        q: see `reference_attention`.
        k: see `reference_attention`.
        v: see `reference_attention`.
        mask: a rule by index: causal or not, a window, segments; in natural order or in zigzag order over this ring.
        softmax_scale: multiplies the scores.
        ring_step: the attention of one hop; it applies the bound of the scores.
        sinks: see `reference_attention`.

    Raises:
        ShardingError: the mask is not such a rule, or the mapping does not form a ring.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    cut = AxisShards.in_scope()
    ring = _ring(mask, Pos, KeyPos, cut, ring_step)
    KVHead, Group, Size = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "head_size"))
    leading = tuple(a for a in q.axes if a not in (Pos, KVHead, Group, Size))
    # Scaled here once, in float32; a ring_step multiplies no scores. As with the splash kernel, 16-bit queries are
    # rounded once more.
    scaled = (q.astype(jnp.float32) * softmax_scale).astype(q.dtype)
    named = {
        "q": scaled.rearrange((*leading, KVHead, Group, Pos, Size)),
        "k": k.rearrange((*leading, KVHead, KeyPos, Size)),
        "v": v.rearrange((*leading, KVHead, KeyPos, Size)),
    }
    if mask.query_segments is not None:
        ids = mask.query_segments.astype(jnp.int32)
        # One row of ids for each row of queries, so that both are sharded and flattened alike.
        named["segments"] = ids.broadcast_to((*leading, Pos)).rearrange((*leading, Pos))
    if sinks is not None:
        named["sinks"] = sinks.astype(jnp.float32).rearrange((KVHead, Group))
    specs = tuple(cut.spec(x.axes) for x in named.values())

    def local(*shards: jax.Array) -> jax.Array:
        arrays = dict(zip(named, shards, strict=True))
        rows = math.prod(arrays["q"].shape[: len(leading)])
        # Everything but the sinks has the row axes in front, which become one: a ring_step takes `[rows, …]`.
        flat = {name: x if name == "sinks" else x.reshape(rows, *x.shape[len(leading) :]) for name, x in arrays.items()}
        out: jax.Array = _attend(ring, flat["q"], flat["k"], flat["v"], flat.get("segments"), flat.get("sinks"))
        return out.reshape(arrays["q"].shape)

    mesh = jax.sharding.get_abstract_mesh()
    out = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(
        *(x.array for x in named.values())
    )
    return hax.named(out, named["q"].axes).rearrange(q.axes)


def _ring(mask: AttentionMask, Pos: Axis, KeyPos: Axis, cut: AxisShards, ring_step: RingStep) -> DeviceRing:
    # A mesh axis of one device has no neighbour to send to.
    axes = tuple(axis for axis in cut.mesh_axes(KeyPos) if cut.mesh[axis] > 1)
    if axes != tuple(axis for axis in cut.mesh_axes(Pos) if cut.mesh[axis] > 1):
        raise ShardingError(
            f"ring attention: key_position → {', '.join(axes)}, but "
            f"position → {', '.join(cut.mesh_axes(Pos)) or 'none'}",
            suggestion="map both to the same mesh axes, or take key_position out of attention_mapping",
        )
    size = math.prod(cut.mesh[axis] for axis in axes)
    if obstacle := ring_obstacle(mask, size):
        raise ShardingError(f"ring attention: {obstacle}", suggestion="attention_mapping: gather has any mask")
    cut.spec((KeyPos,))  # Raises where it does not divide.
    visible_keys = VisibleKeys(runs=2 if mask.zigzag > 1 else 1, is_causal=mask.is_causal, window=mask.sliding_window)
    return DeviceRing(axes=axes, size=size, visible_keys=visible_keys, ring_step=ring_step)


def ring_obstacle(mask: AttentionMask, size: int) -> str | None:
    """Why a ring of `size` devices cannot apply a mask; None if it can."""
    if mask.explicit_mask is not None:
        return "it takes masks by rule (causal, window, segments), not explicit arrays"
    if mask.query_trunks is not None:
        return "a query sees its own segment only, not that of a trunk as well"
    if mask.moves_queries or mask.key_positions is not None or mask.key_segments is not None:
        return "its queries and keys are the same tokens; explicit positions or key segments need gathered keys"
    if mask.zigzag not in (1, size):
        return f"positions lie in zigzag order over {mask.zigzag} shards, and the ring has {size} devices"
    if mask.sliding_window is not None and not mask.is_causal:
        return "a window without causality is not supported"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: DeviceRing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
) -> jax.Array:
    """`ring_attention` on one device."""
    return _rotate_forward(ring, q, k, v, segments, sinks)[0]


def _rotate_forward(
    ring: DeviceRing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The output and its log-sum-exp."""
    rank, length = ring.here(), q.shape[-2]
    query_begins = ring.begins(rank, length)

    def hop(
        n: jax.Array, carry: tuple[Pair, jax.Array | None, lse_merge.PartialAttention]
    ) -> tuple[Pair, object, lse_merge.PartialAttention]:
        keys, key_segments, seen = carry
        # Start the permutation of the next hop before this hop's products, so that they overlap.
        next_keys, next_segments = ring.next((keys, key_segments))
        # After n hops this device holds the keys of rank − n.
        begins = ring.begins((rank - n) % ring.size, length)
        ids = None if segments is None or key_segments is None else (segments, key_segments)
        hop_state = ring.ring_step.forward(ring.visible_keys, q, *keys, (query_begins, begins), ids)
        return next_keys, next_segments, lse_merge.merged(seen, hop_state)

    start = ((k, v), segments, lse_merge.no_keys(q.shape))
    # The permutation of the last hop returns the keys to their device; its result is not used.
    _, _, seen = jax.lax.fori_loop(0, ring.size, hop, start)
    if sinks is not None:
        # A sink counts once per query, not once per hop, so it is added to the merged result.
        seen = lse_merge.with_sinks(seen, sinks[None, :, :, None])
    return seen[0].astype(v.dtype), seen[1]


def _forward(
    ring: DeviceRing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
):
    out, total = _rotate_forward(ring, q, k, v, segments, sinks)
    # Gradient checkpointing that saves `attention` keeps both, so the backward pass repeats no hop of the forward pass.
    out, total = checkpoint_name(out, "attention"), checkpoint_name(total, "attention")
    return out, (q, k, v, segments, sinks, out, total)


def _backward(ring: DeviceRing, residuals: tuple, of_out: jax.Array):
    q, k, v, segments, sinks, out, total = residuals
    # delta = Σ_d out · ∂out: the term of the softmax's gradient that is common to all keys of a query.
    delta = jnp.sum(out.astype(jnp.float32) * of_out.astype(jnp.float32), axis=-1)
    rotate = _rotate_queries_backward if queries_are_fewer(q, k) else _rotate_keys_backward
    of_q, of_k, of_v = rotate(ring, (q, k, v), (delta, total, of_out), segments)
    of_sinks = None
    if sinks is not None:
        # The weight of a sink is exp(sink − lse), and its value is zero: ∂sink = −weight · delta, added up over rows
        # and positions.
        of_sinks = -jnp.sum(jnp.exp(sinks[None, :, :, None] - total) * delta, axis=(0, 3))
    # JAX represents the gradient of integers by an array of dtype float0.
    of_ids = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
    return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype), of_ids, of_sinks


def queries_are_fewer(q: jax.Array, k: jax.Array) -> bool:
    """Whether queries, output gradients and query gradients are fewer bytes than keys, values and their gradients."""
    # Two 16-bit arrays and a float32 gradient per query element, against a pair of each for keys and values; the
    # log-sum-exp and delta are smaller by the factor `head_size`.
    return q.size * (2 * q.dtype.itemsize + 4) < 2 * k.size * (k.dtype.itemsize + 4)


def _zero_gradients(*like: jax.Array) -> Arrays:
    """Initial gradients of a rotating tensor.

    Behind a barrier: if the compiler knows that a carry starts as zeros, it replaces the initial value by a select over
    the carry in every hop.
    """
    return jax.lax.optimization_barrier(tuple(jnp.zeros(x.shape, jnp.float32) for x in like))


def _rotate_keys_backward(ring: DeviceRing, inputs: Triple, residuals: Triple, segments: jax.Array | None) -> Arrays:
    """The gradients of queries, keys and values; keys, values and their gradients rotate."""
    q, k, v = inputs
    rank, length = ring.here(), q.shape[-2]
    query_begins = ring.begins(rank, length)

    def hop(n: jax.Array, carry: tuple) -> tuple:
        keys, key_segments, key_gradients, of_q = carry
        # The permutation takes the gradients as they are, without waiting for this hop's products; what arrives belongs
        # to the present keys and receives their part of the gradient below.
        next_keys, next_segments, (of_k, of_v) = ring.next((keys, key_segments, key_gradients))
        begins = ring.begins((rank - n) % ring.size, length)
        ids = None if segments is None or key_segments is None else (segments, key_segments)
        dq, dk, dv = ring.ring_step.backward(ring.visible_keys, (q, *keys), residuals, (query_begins, begins), ids)
        return next_keys, next_segments, (of_k + dk, of_v + dv), of_q + dq

    start = ((k, v), segments, _zero_gradients(k, v), jnp.zeros(q.shape, jnp.float32))
    _, _, key_gradients, of_q = jax.lax.fori_loop(0, ring.size, hop, start)
    # The gradients lag one hop behind their keys, so one more permutation brings them to their device.
    return of_q, *ring.next(key_gradients)


def _rotate_queries_backward(ring: DeviceRing, inputs: Triple, residuals: Triple, segments: jax.Array | None) -> Arrays:
    """The same; queries, their residuals and their gradients rotate."""
    q, k, v = inputs
    rank, length = ring.here(), q.shape[-2]
    key_begins = ring.begins(rank, length)

    def hop(n: jax.Array, carry: tuple) -> tuple:
        queries, query_segments, of_q, of_k, of_v = carry
        next_queries, next_segments, (next_query_gradient,) = ring.next((queries, query_segments, of_q))
        # After n hops this device holds the queries of rank − n; its keys stay.
        begins = ring.begins((rank - n) % ring.size, length)
        ids = None if segments is None or query_segments is None else (query_segments, segments)
        dq, dk, dv = ring.ring_step.backward(
            ring.visible_keys, (queries[0], k, v), queries[1:], (begins, key_begins), ids
        )
        return next_queries, next_segments, (next_query_gradient + dq,), of_k + dk, of_v + dv

    start = (
        (q, *residuals),
        segments,
        _zero_gradients(q),
        jnp.zeros(k.shape, jnp.float32),
        jnp.zeros(v.shape, jnp.float32),
    )
    _, _, (of_q,), of_k, of_v = jax.lax.fori_loop(0, ring.size, hop, start)
    # As above, the query gradients lag one hop behind.
    return ring.next(of_q), of_k, of_v


_attend.defvjp(_forward, _backward)
