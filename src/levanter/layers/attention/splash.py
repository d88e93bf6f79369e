"""JAX's Pallas kernel for attention on TPUs ("splash"), behind named axes and on any mesh.

The kernel holds a block of scores at a time on the chip, and visits only the blocks of queries × keys that the mask
shows some of. The compiler cannot cut it, so every device is handed its own heads and rows by `jax.shard_map`: the
mapping in scope says which mesh axes cut the batch, `kv_head` and `q_heads_per_group`, and `position`, which cuts the
queries only (keys and values are whole there). What the kernel asks for is arranged here: sequences of whole blocks
(padded, the padding hidden), the scale on the queries, and masks as rules.

Words. *block*: queries × keys that are computed in one visit. *part*: the queries of a sequence that one device has.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as pallas_info
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import Mask, MultiHeadMask
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from haliax_ext.errors import IndivisibleError, named_shape
from haliax_ext.mapping import compute_mapping_in_scope
from levanter.layers.attention.mask import AttentionMask

LANES = 128
"""What a TPU's vector registers are wide: every block is a multiple of it."""

BLOCKS = (128, 256, 384, 512, 768, 1024)
"""Legal blocks; with larger ones the backward pass does not fit in the 16 MiB of VMEM that a kernel may have."""

VISIT = 300**2
"""What a visit costs beyond its arithmetic, in pairs (head size 128): 0.35 µs at half of v4's peak."""

PADDING_SEGMENT = np.iinfo(np.int32).min


@dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """How a sequence is cut for the kernel.

    Attributes:
        block: queries, and keys, in a block.
        compute: keys of it whose scores exist at a time.
        dq: queries, and keys, in a block of the kernel for the queries' gradient, which takes all its keys at once.
        padded: positions of a part, in whole blocks.
    """

    block: int
    compute: int
    dq: int
    padded: int


def splash_blocks(
    length: int, requested: int | None = None, *, head_size: int = LANES, dtype: DTypeLike = jnp.bfloat16
) -> SplashBlocks:
    """The cheapest legal blocks for `length` positions under a causal mask.

    A sequence padded to n blocks has n·(n+1)/2 to visit, those on the diagonal computed whole although half of each is
    hidden; small blocks pay for many visits, large ones for padding and the diagonal.

    Args:
        length: positions on one device.
        requested: the block asked for; rounded up to a legal one.
        head_size: of one head. Heads of 256 in float32 need 22.6 MiB of vector memory with blocks of 1,024.
        dtype: of queries, keys and values. In float32 heads of 128 fit with 1,024, but for dq on v5e.
    """
    is_wide = jnp.dtype(dtype).itemsize > 2
    legal = tuple(block for block in BLOCKS if block <= 512 or not is_wide or head_size <= 128)

    def at_least(size: int) -> int:
        return next((block for block in legal if block >= size), legal[-1])

    def cost(block: int) -> float:
        count = -(-length // block)
        return count * (count + 1) / 2 * (block**2 + VISIT)

    block = min(at_least(requested), at_least(length)) if requested else min(legal, key=cost)
    half = block // 2 if block > 512 else block
    return SplashBlocks(block=block, compute=half, dq=half if is_wide else block, padded=-(-length // block) * block)


def splash_obstacle(platform: str | None, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run, if it cannot."""
    if platform != "tpu":
        return f"the platform is {platform or 'not known'}, not tpu"
    if jnp.dtype(dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        return f"the kernel takes bfloat16 and float32, not {jnp.dtype(dtype).name}"
    return None


def splash_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    block_size: int | None = None,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
    interpret: bool = False,
) -> NamedArray:
    """As `reference_attention`, by the kernel; scores and softmax are float32.

    Queries are scaled before they meet the keys, which rounds 16-bit ones once more than the reference does.

    Args:
        q: see `reference_attention`.
        k: see `reference_attention`; as many keys as queries.
        v: see `reference_attention`.
        mask: a rule; not an explicit array.
        softmax_scale: multiplies the scores.
        block_size: positions in a block, if not by length.
        soft_cap: see `reference_attention`.
        sinks: see `reference_attention`.
        interpret: emulate the kernel, for machines without a TPU.

    Raises:
        ValueError: the mask is an array.
        IndivisibleError: an axis does not divide into what it is mapped to.
    """
    if mask.explicit is not None:
        raise ValueError(
            "splash attention takes masks that are rules (causal, window, segments), not arrays; "
            "set model.attn_backend: blockwise"
        )
    Pos, KeyPos = q.resolve_axis("position"), k.resolve_axis("key_position")
    KVHead, Group, Size = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "head_size"))
    assert Pos.size == KeyPos.size, f"{Pos.size} queries, {KeyPos.size} keys: splash is for self-attention"
    leading = tuple(a for a in q.axes if a not in (Pos, KVHead, Group, Size))
    mesh = jax.sharding.get_abstract_mesh()
    cut = _Cut(compute_mapping_in_scope(), {} if mesh.empty else dict(mesh.shape))
    parts = cut.ways(Pos)
    blocks = splash_blocks(-(-Pos.size // parts), block_size, head_size=Size.size, dtype=q.dtype)
    Padded, PaddedKeys = Pos.resize(blocks.padded * parts), KeyPos.resize(blocks.padded * parts)
    if Padded.size > Pos.size and not mask.is_causal and mask.segment_ids is None:
        # Nothing else hides the padding from the queries before it.
        mask = mask.with_segment_ids(hax.zeros(Pos, dtype=jnp.int32))

    def padded(x: NamedArray, Short: Axis, Long: Axis, value: int = 0) -> NamedArray:
        return x if Short == Long else hax.pad(x, {Short: (0, Long.size - Short.size)}, constant_values=value)

    scaled = (q.astype(jnp.float32) * softmax_scale).astype(q.dtype)
    named = [
        padded(scaled, Pos, Padded).rearrange((*leading, KVHead, Group, Padded, Size)),
        padded(k, KeyPos, PaddedKeys).rearrange((*leading, KVHead, PaddedKeys, Size)),
        padded(v, KeyPos, PaddedKeys).rearrange((*leading, KVHead, PaddedKeys, Size)),
    ]
    if mask.segment_ids is not None:
        own = mask.segment_ids.astype(jnp.int32).broadcast_to((*leading, Pos)).rearrange((*leading, Pos))
        named.append(padded(own, Pos, Padded, PADDING_SEGMENT))
        named.append(named[-1].rename({Pos.name: KeyPos.name}))
    kernel = _kernel(_Rule(mask.is_causal, mask.sliding_window), Padded.size, parts, blocks, interpret, soft_cap)
    heads = () if sinks is None else (sinks.rearrange((KVHead, Group)),)
    attend: Callable[..., jax.Array] = functools.partial(_attend_row, with_sinks=bool(heads))
    for _ in leading:
        attend = jax.vmap(attend, in_axes=(None, *[None] * len(heads), *[0] * len(named)))
    if not mesh.empty:
        queries = cut.spec((Padded,))
        # Each part of the queries has its own share of the kernel's table of blocks.
        of_kernel = kernel.manual_sharding_spec(jax.NamedSharding(mesh, PartitionSpec(None, *queries)))
        specs = [cut.spec(x.axes) for x in (*heads, *named)]
        of_queries = specs[len(heads)]
        attend = jax.shard_map(attend, in_specs=(of_kernel, *specs), out_specs=of_queries, check_vma=False)
    out = hax.named(attend(kernel, *(x.array for x in (*heads, *named))), named[0].axes)
    return (out if Padded == Pos else out[Pos.name, 0 : Pos.size]).rearrange(q.axes)


def _attend_row(kernel: pallas.SplashAttentionKernel, *arrays: jax.Array, with_sinks: bool) -> jax.Array:
    """One sequence: `q [kv_head, q_heads_per_group, position, head_size]`, `k` and `v [kv_head, position, head_size]`.

    Before them come the sinks, if there are any, and behind them segments. The kernel has one axis of query heads and
    finds the key/value head of each by division, as they are flattened here.
    """
    sinks = arrays[0].reshape(-1) if with_sinks else None
    q, k, v, *segments = arrays[1:] if with_sinks else arrays
    flat = q.reshape(-1, *q.shape[2:])
    out = kernel(flat, k, v, segment_ids=pallas.SegmentIds(*segments) if segments else None, sinks=sinks)
    return cast(jax.Array, out).reshape(q.shape)


@dataclass(frozen=True)
class _Cut:
    """Which mesh axes cut an axis: the mapping in scope on the mesh in scope."""

    mapping: Mapping[str, Any]
    mesh: Mapping[str, int]

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        found = self.mapping.get(axis.name, ())
        return tuple(a for a in ((found,) if isinstance(found, str) else found) if a in self.mesh)

    def ways(self, axis: Axis) -> int:
        return math.prod(self.mesh[a] for a in self.mesh_axes(axis))

    def spec(self, axes: tuple[Axis, ...]) -> PartitionSpec:
        for axis in axes:
            if axis.size % self.ways(axis):
                shape = named_shape((a.name, a.size) for a in axes)
                rule = f"{axis.name} → {', '.join(self.mesh_axes(axis))}"
                raise IndivisibleError(
                    f"attention {shape}: the compute mapping has {rule} ({self.ways(axis)} ways), "
                    f"and {axis.name} {axis.size} is no multiple of it",
                    suggestion="change the mapping, or set model.attn_backend: blockwise",
                )
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in axes))


Numbers = np.ndarray | jax.Array


@dataclass(frozen=True)
class _Rule:
    """A mask by the distance from a key to the query that looks at it, on arrays of any kind."""

    is_causal: bool
    window: int | None

    def __call__(self, queries: Numbers, keys: Numbers | int) -> Numbers:
        distance = queries - keys
        if self.window is None:
            return distance >= 0 if self.is_causal else distance == distance
        near = distance < self.window
        return near & (distance >= 0) if self.is_causal else near


class _RuleMask(Mask):
    """A rule as the kernel's mask: asked for a block, it gives one entry for each distance in it.

    The kernel's own masks give every entry, of which only whether any and whether all are set is of interest; for 64k
    positions that takes ten seconds.
    """

    def __init__(self, rule: _Rule, length: int):
        self.rule = rule
        self.length = length
        if rule != _Rule(is_causal=False, window=None):
            # Their presence is what tells the kernel to compute the mask and not to read it.
            self.q_sequence = np.arange(length, dtype=np.int32)
            self.mask_function = rule

    @property
    def shape(self) -> tuple[int, int]:
        return (self.length, self.length)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = block
        smallest, largest = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        return np.asarray(self.rule(np.arange(smallest, largest + 1), 0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RuleMask) and (self.rule, self.length) == (other.rule, other.length)

    def __hash__(self) -> int:
        return hash((self.rule, self.length))


@functools.lru_cache(maxsize=64)
def _kernel(
    rule: _Rule,
    length: int,
    parts: int,
    blocks: SplashBlocks,
    interpret: bool,
    soft_cap: float | None = None,
) -> pallas.SplashAttentionKernel:
    """The kernel with its table of blocks, as NumPy arrays: made once, and outside of any trace.

    One head's mask serves all heads.
    """
    mask = MultiHeadMask([_RuleMask(rule, length)])
    shape = (blocks.block, blocks.block)
    by_queries, function = pallas_info.process_mask(mask, shape, q_seq_shards=parts)
    by_queries_dq, _ = pallas_info.process_mask(mask, (blocks.dq, blocks.dq), q_seq_shards=parts)
    by_keys, _ = pallas_info.process_mask_dkv(mask, shape, q_seq_shards=parts)
    sizes = pallas.BlockSizes(
        block_q=blocks.block,
        block_kv=blocks.block,
        block_kv_compute=blocks.compute,
        block_q_dkv=blocks.block,
        block_kv_dkv=blocks.block,
        block_kv_dkv_compute=blocks.compute,
        block_q_dq=blocks.dq,
        block_kv_dq=blocks.dq,
    )
    return pallas.SplashAttentionKernel(
        by_queries,
        by_queries_dq,
        by_keys,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=pallas.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name="attention",  # in `AttentionSpec.saved`: its output, and its log-sum-exp
        mask_function=function,
        interpret=interpret,
    )
