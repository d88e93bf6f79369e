"""Chooses the attention backend, records the reason, and calls the backend.

Five backends compute the same function, which `reference` defines: the reference itself, `blockwise`, `splash` (JAX's
Pallas kernel for TPUs), and `jax_native` and `cudnn` (`jax.nn.dot_product_attention` with XLA's or cuDNN's kernel).
Upstream's names are accepted and mapped to these with a reason. The platform is an argument: this module never queries
devices.

`LmConfig.for_platform` chooses once, when platform and mesh are known; the plan prints the choice, and
`AttentionSpec.backend` passes it to `attend`. A model built without this step uses the backend that its config names,
else `default_backend` for the sequence length.
"""

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from haliax import NamedArray
from jax.typing import DTypeLike

from haliax_ext.errors import nearest
from haliax_ext.mapping import ways_in_scope
from levanter.layers.attention.blockwise import blockwise_attention
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import reference_attention
from levanter.layers.attention.splash_blocks import (
    LANES,
    SplashBlocks,
    splash_blocks,
    splash_mask_obstacle,
    splash_obstacle,
)

if TYPE_CHECKING:
    from levanter.layers.attention.ring import RingStep

logger = logging.getLogger(__name__)

BACKENDS = ("reference", "blockwise", "splash", "jax_native", "cudnn")
"""Names of this project."""

UPSTREAM_NAMES = ("default", "nvte", "jax_flash", "vanilla")
"""Names that upstream's configs use."""

MAX_MATERIALIZED_KEYS = 2048
"""Up to this many keys the default backend materializes the scores; beyond it, `blockwise` runs."""

MIN_KERNEL_KEYS = 256
"""Below this many keys the default is `reference`: on TPUs its scores cost less than the kernel's block visits."""

MAX_CUDNN_HEAD = 128
"""The most features of a head that cuDNN's kernel takes on every card that it runs on; on H100 and newer 256."""

DEFAULT_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend and the reason why it was chosen.

    Attributes:
        name: one of `BACKENDS`.
        reason: a clause that completes "`name`, because …".
        block_size: keys per block of `blockwise`, positions per block of `splash`; None for the default of `attend`.
    """

    name: str
    reason: str
    block_size: int | None = None

    def __str__(self) -> str:
        block = f" (blocks of {self.block_size or DEFAULT_BLOCK})" if self.name == "blockwise" else ""
        return f"{self.name}{block}: {self.reason}"


def check_backend_name(requested: str | None) -> None:
    """Raises a `ValueError` unless `requested` is None or in `BACKENDS` or `UPSTREAM_NAMES`."""
    if requested is None or requested in BACKENDS or requested in UPSTREAM_NAMES:
        return
    close = nearest(requested, BACKENDS + UPSTREAM_NAMES)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise ValueError(
        f"model.attn_backend {requested!r} is neither one of this project's ({', '.join(BACKENDS)}) "
        f"nor one of upstream's ({', '.join(UPSTREAM_NAMES)}){hint}"
    )


def choose_backend(
    requested: str | None,
    *,
    platform: str | None,
    dtype: DTypeLike,
    length: int,
    sequence_shards: int = 1,
    head_size: int = LANES,
    block_size: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    capability: tuple[int, int] | None = None,
    packed: bool = True,
) -> BackendChoice:
    """Chooses a backend and states the reason.

    Args:
        requested: a name in `BACKENDS` or `UPSTREAM_NAMES`; None lets this function choose.
        platform: `cpu`, `gpu` or `tpu`; None if unknown, which excludes kernels.
        dtype: of queries, keys and values.
        length: keys per sequence.
        sequence_shards: number of devices that the queries of one sequence are sharded over.
        head_size: of one head.
        block_size: keys per block, for `blockwise` and `splash`; None chooses.
        soft_cap: bound of the scores; JAX's own function does not support one.
        sinks: whether heads have attention sinks; JAX's own function does not support these either.
        capability: compute capability of the GPU; None if unknown.
        packed: whether rows may hold several documents that do not see each other.

    Raises:
        ValueError: the name is unknown, or `cudnn` or `jax_native` is requested but cannot run.
    """
    check_backend_name(requested)
    make = functools.partial(BackendChoice, block_size=block_size)
    blockwise = functools.partial(BackendChoice, name="blockwise", block_size=block_size or DEFAULT_BLOCK)
    unsupported = _unsupported_by_jax(soft_cap, sinks)
    no_cudnn = unsupported or _cudnn_obstacle(platform, dtype, head_size)
    no_splash = splash_obstacle(platform, dtype)
    if requested == "cudnn" and no_cudnn:
        raise ValueError(f"model.attn_backend cudnn: {no_cudnn}; leave attn_backend out, or use reference or blockwise")
    if requested == "jax_native" and unsupported:
        raise ValueError(f"model.attn_backend jax_native: {unsupported}; leave attn_backend out, or use blockwise")
    # `splash` and `nvte` depend on platform and dtype and are decided further below.
    if requested == "blockwise":
        return blockwise(reason="as configured")
    if requested in BACKENDS and requested != "splash":
        return make(name=requested, reason="as configured")
    if requested == "vanilla":
        return make(name="reference", reason="upstream's vanilla is the plain formula")
    if requested == "jax_flash":
        return blockwise(reason="upstream's jax_flash is an online softmax over blocks of keys")
    if requested == "nvte" and not no_cudnn:
        return make(name="cudnn", reason="Transformer Engine is not a dependency; JAX calls the same cuDNN kernel")
    prefix = ""  # Why a kernel is not used; it precedes the reason of its replacement.
    if requested == "nvte":
        prefix = f"nvte means cuDNN's kernel, but {no_cudnn}; "
    elif requested == "splash" and no_splash:
        prefix = f"splash is a TPU kernel, but {no_splash}; "
    elif no_splash and platform == "tpu":
        prefix = f"{no_splash}; "
    shard_length = -(-length // sequence_shards)  # The kernel runs on each device with its shard of the queries.
    blocks = splash_blocks(shard_length, block_size, head_size=head_size, dtype=dtype)
    splash = functools.partial(BackendChoice, name="splash", block_size=blocks.block)
    if not no_splash and requested == "splash":
        return splash(reason=f"as configured; {_splash_reason(shard_length, blocks)}")
    # Without a request: the kernel where it runs, then the reference while its scores are small, then blockwise.
    if not no_splash and length >= MIN_KERNEL_KEYS:
        return splash(reason=f"{prefix}{_splash_reason(shard_length, blocks)}")
    # cuDNN's kernel only where it certainly runs: nobody has asked for it.
    obstacle = no_cudnn or _cudnn_default_obstacle(capability, head_size, sequence_shards, packed=packed)
    if obstacle is None and length >= MIN_KERNEL_KEYS:
        return make(name="cudnn", reason=f"{prefix}cuDNN's fused kernel; scores stay on the chip")
    prefix = prefix or (f"not cudnn: {obstacle}; " if platform == "gpu" and obstacle else "")
    if not no_splash or obstacle is None:
        few = f"{length} keys a sequence are fewer than {MIN_KERNEL_KEYS}, where the kernel starts to pay off"
        return make(name="reference", reason=prefix + few)
    materialized = f"{length} keys a sequence {{}} {MAX_MATERIALIZED_KEYS}, {{}} scores are materialized"
    if length > MAX_MATERIALIZED_KEYS:
        return blockwise(reason=prefix + materialized.format("exceed", "the longest whose"))
    return make(name="reference", reason=prefix + materialized.format("are at most", "so the"))


def named_backend(requested: str | None, *, block_size: int | None = None) -> BackendChoice | None:
    """The backend that a value of `attn_backend` names regardless of platform and length; None if these decide.

    Args:
        requested: a name in `BACKENDS` or `UPSTREAM_NAMES`, or None.
        block_size: see `BackendChoice`.
    """
    # `default` and `nvte` remain: they mean different backends on different platforms.
    name = {"vanilla": "reference", "jax_flash": "blockwise"}.get(requested or "", requested)
    if name not in BACKENDS:
        return None
    return BackendChoice(name=name, reason="named in the config", block_size=block_size)


def default_backend(length: int, *, block_size: int | None = None) -> BackendChoice:
    """The backend where none was chosen: `reference`, or `blockwise` for long sequences.

    Never a kernel, since the platform is unknown.

    Args:
        length: keys per sequence.
        block_size: keys per block.
    """
    return choose_backend(None, platform=None, dtype=jnp.float32, length=length, block_size=block_size)


def _splash_reason(length: int, blocks: SplashBlocks) -> str:
    padding = f", {length} positions padded to {blocks.padded}" if blocks.padded != length else ""
    return f"blocks of {blocks.block} × {blocks.block}{padding}; scores stay on the chip"


def _unsupported_by_jax(soft_cap: float | None, sinks: bool) -> str | None:
    """The feature of the model that `jax.nn.dot_product_attention` does not support, if any; with either kernel."""
    if soft_cap is not None:
        return "the model soft-caps its attention scores, which JAX's attention function cannot do"
    return "the model's heads have attention sinks, which JAX's attention function does not support" if sinks else None


def _cudnn_obstacle(platform: str | None, dtype: DTypeLike, head_size: int) -> str | None:
    if platform != "gpu":
        return f"the platform is {platform or 'not known'}, not gpu"
    if jnp.dtype(dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float16")):
        return f"cuDNN's kernel takes 16-bit floats, not {jnp.dtype(dtype).name}"
    if head_size % 8 or head_size > 2 * MAX_CUDNN_HEAD:
        return f"cuDNN's kernel takes heads of a multiple of 8 features, {2 * MAX_CUDNN_HEAD} at most, not {head_size}"
    return None


def _cudnn_default_obstacle(
    capability: tuple[int, int] | None, head_size: int, sequence_shards: int, *, packed: bool
) -> str | None:
    """Why cuDNN's kernel is not chosen although it could be requested."""
    if sequence_shards > 1:
        return "several devices share a sequence"
    if capability is not None and capability < (8, 0):
        return "the card is older than A100"
    # Of a card that is not known the newest is assumed; where it is older, `attend` runs blockwise and says so.
    newest = capability is None or capability >= (9, 0)
    if packed and not newest:
        return "rows of several documents need H100 or newer (data.block_cross_document_attention: false has others)"
    if head_size > MAX_CUDNN_HEAD and (capability is None or not newest):
        return f"heads of {head_size} features need H100 or newer"
    return None


def has_checkpoint_name(choice: BackendChoice) -> bool:
    """Whether `attend` names its result `attention` for gradient checkpointing.

    Kernels and rings do, together with the log-sum-exp that their backward pass needs."""
    return choice.name == "splash" or ways_in_scope("key_position") > 1


def accepts_sharded_keys(choice: BackendChoice, mask: AttentionMask, *, keys: int) -> bool:
    """Whether `attend` takes keys and values sharded like the queries and gathers them itself."""
    return choice.name == "splash" and splash_mask_obstacle(mask, keys=keys) is None


def attend(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    *,
    softmax_scale: float,
    choice: BackendChoice,
    soft_cap: float | None = None,
    sinks: NamedArray | None = None,
) -> NamedArray:
    """Runs the chosen backend; see `reference_attention` for axes and meaning.

    If the mapping in scope shards the keys as well, ring attention runs.
    """
    # A ring takes precedence over the backend's own path: no device has all keys.
    name = choice.name
    if ways_in_scope("key_position") > 1:
        # The ring and Pallas's kernel for TPUs are imported by the runs that use them.
        from levanter.layers.attention.ring import ring_attention

        ring_step = _ring_step(choice, soft_cap)
        return ring_attention(q, k, v, mask, softmax_scale=softmax_scale, ring_step=ring_step, sinks=sinks)
    # The choice was made from the config, before the mask was known; a mask that the kernel cannot apply is met here.
    if name == "splash" and (obstacle := splash_mask_obstacle(mask, keys=k.axis_size("key_position"))):
        name = "blockwise"
        logger.warning("attention: blockwise instead of splash: %s", obstacle)
    run = None
    if name == "reference":
        run = reference_attention
    elif name == "splash":
        from levanter.layers.attention.splash import splash_attention

        run = functools.partial(splash_attention, block_size=choice.block_size)
    elif name == "blockwise":
        run = functools.partial(blockwise_attention, block_size=choice.block_size or DEFAULT_BLOCK)
    if run is not None:
        return run(q, k, v, mask, softmax_scale=softmax_scale, soft_cap=soft_cap, sinks=sinks)
    # `choose_backend` refuses this too, but a backend may also be set directly on a layer's spec.
    if lacking := _unsupported_by_jax(soft_cap, sinks is not None):
        raise ValueError(f"attention by {name}: {lacking}")
    # Imported here: no other backend needs cuDNN's bindings.
    from levanter.layers.attention.dot_product import cudnn_attention, jax_native_attention

    if name == "cudnn":
        streamed = functools.partial(blockwise_attention, softmax_scale=softmax_scale, block_size=DEFAULT_BLOCK)
        return cudnn_attention(q, k, v, mask, softmax_scale=softmax_scale, streamed=streamed)
    return jax_native_attention(q, k, v, mask, softmax_scale=softmax_scale, implementation="xla")


def _ring_step(choice: BackendChoice, soft_cap: float | None) -> "RingStep":
    """The attention step that each device of a ring runs per hop.

    Raises:
        ValueError: the backend cannot run in a ring.
    """
    if choice.name in ("reference", "blockwise"):
        from levanter.layers.attention.ring_reference import ReferenceRingStep

        block = None if choice.name == "reference" else choice.block_size or DEFAULT_BLOCK
        return ReferenceRingStep(soft_cap=soft_cap, block=block)
    if choice.name == "splash":
        from levanter.layers.attention.ring_splash import splash_ring_step

        return splash_ring_step(soft_cap=soft_cap, block_size=choice.block_size)
    raise ValueError(
        f"attention by {choice.name} in a ring: JAX's function does not return the log-sum-exp that merges partial "
        "results; leave model.attn_backend out, or use attention_mapping: gather"
    )
