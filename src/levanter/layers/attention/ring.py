"""Ring attention: keys and values travel from device to device, and no device ever has all of them.

Each of n devices has a part of the positions (Liu et al., arXiv:2310.01889). In n *hops* every part of the keys passes
every device, which attends to it with a *pass* and merges what it finds in float32. The backward pass goes around once
more with the global log-sum-exp: either keys and values travel again, and their gradients with them, or queries and
the gradients of the result do, and the gradients of the queries with them, whichever are fewer bytes. What travels
gathers its gradient in float32, and arrives home with it.

The hops are a loop, not unrolled: a compiler would start all permutations before the first product, and the keys would
be whole again. All of a hop's permutations are under way while its products are computed. Keys and values are arrays of
their own: joined they would have to be parted again, and their gradients joined, at every hop. Segments travel with the
keys. What a query sees is decided by positions, which
follow from the rank of a device and the number of hops that the keys have made; so any window, and either order of
positions (`order`), needs no case of its own here.
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

from haliax_ext.errors import ShardingError
from levanter.layers.attention import lse_merge
from levanter.layers.attention.kernel_specs import AxisShards
from levanter.layers.attention.mask import AttentionMask

Arrays = tuple[jax.Array, ...]
Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class VisibleKeys:
    """What of the arriving keys the own queries see, as far as it is known on every device alike.

    Attributes:
        runs: how many runs of consecutive positions a device has.
        is_causal: see `AttentionMask`.
        window: its `sliding_window`.
    """

    runs: int
    is_causal: bool
    window: int | None


class RingStep(Protocol):
    """Attention of a device's queries to the keys that are there now.

    Arrays: `q [rows, kv_head, group, position, head_size]`, `k` and `v [rows, kv_head, key_position, head_size]`.
    `begins`: the first positions of each run of the queries, and of the keys. `segments`: those of both, `[rows, …]`,
    or None. The scale is the caller's: `q` has it.
    """

    def forward(
        self, sight: VisibleKeys, q: jax.Array, k: jax.Array, v: jax.Array, begins: Arrays, segments: Arrays | None
    ) -> lse_merge.Seen:
        """What the queries make of these keys."""
        ...

    def backward(
        self,
        sight: VisibleKeys,
        given: tuple[jax.Array, jax.Array, jax.Array],
        found: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of `given` (q, k, v), float32.

        Args:
            sight, begins, segments: as of `forward`.
            given: queries, these keys, their values.
            found: of attention to all keys: the sum over features of the result times its gradient, float32; the
                log-sum-exp; the gradient of the result.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceRing:
    """A ring of devices.

    Attributes:
        axes: the mesh axes that it goes along.
        size: how many devices.
        sight: what is seen.
        passes: what attends.
    """

    axes: tuple[str, ...]
    size: int
    sight: VisibleKeys
    passes: RingStep

    def next(self, x: T) -> T:
        """A tree of arrays to the next device, from the one before."""
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return jax.lax.ppermute(x, axes, [(i, (i + 1) % self.size) for i in range(self.size)])

    def begins(self, rank: jax.Array, length: int) -> jax.Array:
        """The first positions of the runs that a rank has, `[runs]`."""
        run = length // self.sight.runs
        firsts = [rank * run] if self.sight.runs == 1 else [rank * run, (2 * self.size - 1 - rank) * run]
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
    passes: RingStep,
    sinks: NamedArray | None = None,
) -> NamedArray:
    """As `reference_attention`, where the mapping in scope cuts `position` and `key_position` over the same mesh axes.

    Args:
        q: see `reference_attention`.
        k: see `reference_attention`.
        v: see `reference_attention`.
        mask: a rule by index: causal or not, a window, segments; in its own order or in zigzag order over this ring.
        softmax_scale: multiplies the scores.
        passes: what attends on a device; it knows of a bound of the scores.
        sinks: see `reference_attention`.

    Raises:
        ShardingError: the mask is not such a rule, or the mapping no ring.
    """
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    cut = AxisShards.in_scope()
    ring = _ring(mask, Pos, KeyPos, cut, passes)
    KVHead, Group, Size = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "head_size"))
    leading = tuple(a for a in q.axes if a not in (Pos, KVHead, Group, Size))
    scaled = (q.astype(jnp.float32) * softmax_scale).astype(q.dtype)
    named = {
        "q": scaled.rearrange((*leading, KVHead, Group, Pos, Size)),
        "k": k.rearrange((*leading, KVHead, KeyPos, Size)),
        "v": v.rearrange((*leading, KVHead, KeyPos, Size)),
    }
    if mask.query_segments is not None:
        ids = mask.query_segments.astype(jnp.int32)
        named["segments"] = ids.broadcast_to((*leading, Pos)).rearrange((*leading, Pos))
    if sinks is not None:
        named["sinks"] = sinks.astype(jnp.float32).rearrange((KVHead, Group))
    specs = tuple(cut.spec(x.axes) for x in named.values())

    def local(*given: jax.Array) -> jax.Array:
        arrays = dict(zip(named, given, strict=True))
        rows = math.prod(arrays["q"].shape[: len(leading)])
        flat = {name: x if name == "sinks" else x.reshape(rows, *x.shape[len(leading) :]) for name, x in arrays.items()}
        out: jax.Array = _attend(ring, flat["q"], flat["k"], flat["v"], flat.get("segments"), flat.get("sinks"))
        return out.reshape(arrays["q"].shape)

    mesh = jax.sharding.get_abstract_mesh()
    out = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(
        *(x.array for x in named.values())
    )
    return hax.named(out, named["q"].axes).rearrange(q.axes)


def _ring(mask: AttentionMask, Pos: Axis, KeyPos: Axis, cut: AxisShards, passes: RingStep) -> DeviceRing:
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
    sight = VisibleKeys(runs=2 if mask.zigzag > 1 else 1, is_causal=mask.is_causal, window=mask.sliding_window)
    return DeviceRing(axes=axes, size=size, sight=sight, passes=passes)


def ring_obstacle(mask: AttentionMask, size: int) -> str | None:
    """Why a ring of so many devices cannot have a mask, if it cannot."""
    if mask.explicit_mask is not None:
        return "it takes masks that are given by rules (causal, window, segments), not by arrays"
    if mask.query_trunks is not None:
        return "a query sees one segment there, not that of a trunk as well"
    if mask.moves_queries or mask.key_positions is not None or mask.key_segments is not None:
        return "its queries and keys are the same tokens; positions or segments of their own are for gathered keys"
    if mask.zigzag not in (1, size):
        return f"positions lie in zigzag order over {mask.zigzag} parts, and the ring has {size} devices"
    if mask.sliding_window is not None and not mask.is_causal:
        return "a window without causality sees keys that are behind, and is not built"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: DeviceRing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
) -> jax.Array:
    """What `ring_attention` is on one device."""
    return _around(ring, q, k, v, segments, sinks)[0]


def _around(
    ring: DeviceRing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Attention and its log-sum-exp."""
    rank, length = ring.here(), q.shape[-2]
    own = ring.begins(rank, length)

    def hop(n: jax.Array, carry: tuple[Pair, jax.Array | None, lse_merge.Seen]) -> tuple[Pair, object, lse_merge.Seen]:
        both, theirs, seen = carry
        behind, behind_ids = ring.next((both, theirs))
        begins = ring.begins((rank - n) % ring.size, length)
        ids = None if segments is None or theirs is None else (segments, theirs)
        found = ring.passes.forward(ring.sight, q, *both, (own, begins), ids)
        return behind, behind_ids, lse_merge.merged(seen, found)

    start = ((k, v), segments, lse_merge.nothing(q.shape))
    _, _, seen = jax.lax.fori_loop(0, ring.size, hop, start)
    if sinks is not None:
        seen = lse_merge.with_sinks(seen, sinks[None, :, :, None])
    return seen[0].astype(v.dtype), seen[1]


def _forward(
    ring: DeviceRing, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
):
    out, total = _around(ring, q, k, v, segments, sinks)
    # What gradient checkpointing keeps by the name `attention`: with it nothing of this is computed again.
    out, total = checkpoint_name(out, "attention"), checkpoint_name(total, "attention")
    return out, (q, k, v, segments, sinks, out, total)


def _backward(ring: DeviceRing, kept: tuple, of_out: jax.Array):
    q, k, v, segments, sinks, out, total = kept
    delta = jnp.sum(out.astype(jnp.float32) * of_out.astype(jnp.float32), axis=-1)
    around = _queries_around if queries_are_fewer(q, k) else _keys_around
    of_q, of_k, of_v = around(ring, (q, k, v), (delta, total, of_out), segments)
    of_sinks = None
    if sinks is not None:
        of_sinks = -jnp.sum(jnp.exp(sinks[None, :, :, None] - total) * delta, axis=(0, 3))
    of_ids = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
    return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype), of_ids, of_sinks


def queries_are_fewer(q: jax.Array, k: jax.Array) -> bool:
    """Whether queries, gradients of the result and theirs are fewer bytes than keys, values and their gradients."""
    return q.size * (2 * q.dtype.itemsize + 4) < 2 * k.size * (k.dtype.itemsize + 4)


def _zeros(*like: jax.Array) -> Arrays:
    """Gradients to begin with; where a compiler sees that what travels begins as zeros, it writes them in the first hop
    by a pass over what travels in every hop."""
    return jax.lax.optimization_barrier(tuple(jnp.zeros(x.shape, jnp.float32) for x in like))


def _keys_around(ring: DeviceRing, given: Triple, found: Triple, segments: jax.Array | None) -> Arrays:
    """The gradients of queries, keys and values, where keys and values travel."""
    q, k, v = given
    rank, length = ring.here(), q.shape[-2]
    own = ring.begins(rank, length)

    def hop(n: jax.Array, carry: tuple) -> tuple:
        both, theirs, of_both, of_q = carry
        behind, behind_ids, (of_k, of_v) = ring.next((both, theirs, of_both))
        begins = ring.begins((rank - n) % ring.size, length)
        ids = None if segments is None or theirs is None else (segments, theirs)
        dq, dk, dv = ring.passes.backward(ring.sight, (q, *both), found, (own, begins), ids)
        return behind, behind_ids, (of_k + dk, of_v + dv), of_q + dq

    start = ((k, v), segments, _zeros(k, v), jnp.zeros(q.shape, jnp.float32))
    _, _, of_both, of_q = jax.lax.fori_loop(0, ring.size, hop, start)
    return of_q, *ring.next(of_both)


def _queries_around(ring: DeviceRing, given: Triple, found: Triple, segments: jax.Array | None) -> Arrays:
    """The same where queries travel, with what was found for them."""
    q, k, v = given
    rank, length = ring.here(), q.shape[-2]
    own = ring.begins(rank, length)

    def hop(n: jax.Array, carry: tuple) -> tuple:
        queries, theirs, of_q, of_k, of_v = carry
        behind, behind_ids, (of_theirs,) = ring.next((queries, theirs, of_q))
        begins = ring.begins((rank - n) % ring.size, length)
        ids = None if segments is None or theirs is None else (theirs, segments)
        dq, dk, dv = ring.passes.backward(ring.sight, (queries[0], k, v), queries[1:], (begins, own), ids)
        return behind, behind_ids, (of_theirs + dq,), of_k + dk, of_v + dv

    start = ((q, *found), segments, _zeros(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    _, _, (of_q,), of_k, of_v = jax.lax.fori_loop(0, ring.size, hop, start)
    return ring.next(of_q), of_k, of_v


_attend.defvjp(_forward, _backward)
