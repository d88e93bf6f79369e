"""Where the splash kernel for TPUs runs, and with which blocks.

Nothing here imports the kernel (`splash`), so that runs without TPUs choose their backend without it.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from levanter.layers.attention.mask import AttentionMask

LANES = 128
"""Lanes of a TPU vector register: every block size is a multiple."""

BLOCKS = (128, 256, 384, 512, 768, 1024)
"""Legal block sizes; with larger ones the backward kernels exceed the 16 MiB of VMEM that a kernel may use."""

VISIT = 300**2
"""Overhead of a block visit, in query-key pairs of head size 128: 0.35 µs at half of v4's peak."""

MAX_MARKED_KEYS = (1 << 16) - 1
"""The largest key index that two limits in one 32-bit mark can represent; see `splash_tables.LimitRule`."""


@dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """Block sizes of the kernel for one sequence length.

    Attributes:
        block: queries per block, and keys per block.
        compute: keys of a block whose scores are computed at a time.
        dq: queries and keys per block of the dq kernel, which computes all keys of a block at once.
        padded: positions of a shard, padded to whole blocks.
    """

    block: int
    compute: int
    dq: int
    padded: int


def splash_blocks(
    length: int, requested: int | None = None, *, head_size: int = LANES, dtype: DTypeLike = jnp.bfloat16
) -> SplashBlocks:
    """The cheapest legal blocks for `length` positions under a causal mask.

    A sequence padded to n blocks visits n·(n+1)/2 of them; those on the diagonal are computed fully although half is
    masked. Small blocks cost many visits, large ones padding and masked entries of the diagonal.

    Args:
        length: positions on one device.
        requested: a block size; rounded up to a legal one.
        head_size: of one head. Heads of 256 in float32 need 22.6 MiB of VMEM with blocks of 1,024.
        dtype: of queries, keys and values. In float32, heads of 128 fit with 1,024, except for dq on v5e.
    """
    is_wide = jnp.dtype(dtype).itemsize > 2
    legal = tuple(block for block in BLOCKS if block <= 512 or not is_wide or head_size <= 128)

    def at_least(size: int) -> int:
        # The kernel needs whole blocks: a request is rounded up, but not beyond what the sequence fills.
        return next((block for block in legal if block >= size), legal[-1])

    def cost(block: int) -> float:
        count = -(-length // block)
        return count * (count + 1) / 2 * (block**2 + VISIT)

    # A requested block larger than the sequence would only add padding.
    block = min(at_least(requested), at_least(length)) if requested else min(legal, key=cost)
    half = block // 2 if block > 512 else block
    return SplashBlocks(block=block, compute=half, dq=half if is_wide else block, padded=-(-length // block) * block)


def splash_obstacle(platform: str | None, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run on a platform; None if it can."""
    if platform != "tpu":
        return f"the platform is {platform or 'not known'}, not tpu"
    if jnp.dtype(dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float32")):
        return f"the kernel takes bfloat16 and float32, not {jnp.dtype(dtype).name}"
    return None


def splash_mask_obstacle(mask: AttentionMask, *, keys: int) -> str | None:
    """Why the kernel does not support a mask; None if it does.

    Args:
        mask: the mask.
        keys: keys per sequence.
    """
    if mask.explicit_mask is not None:
        return "the kernel takes masks by rule (causal, window, segments), not explicit arrays"
    if mask.query_trunks is not None:
        return "in the kernel a query sees its own segment only, not that of a trunk as well"
    # A mark is 32 bits wide; causality with a window needs two limits of 16 bits each. Where only the first key's
    # position is given, it is subtracted from the queries instead (`_padded_positions`), which needs no limits.
    has_key_positions = mask.key_positions is not None and "key_position" in [
        axis.name for axis in mask.key_positions.axes
    ]
    if has_key_positions and mask.is_causal and mask.sliding_window is not None and keys > MAX_MARKED_KEYS:
        return f"with a window and an array of positions the kernel takes at most {MAX_MARKED_KEYS} keys, not {keys}"
    return None
