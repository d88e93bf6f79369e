"""Which implementation of attention runs, and why.

Five implement one meaning (`reference`): the reference itself, `blockwise`, `splash` (JAX's kernel for TPUs), and
`jax_native` and `cudnn`, which are JAX's own function with XLA's or cuDNN's kernel. Upstream's names are accepted and
mapped onto these with a reason. The platform is an argument: nothing here looks for devices.

The choice is made once, when platform and mesh are known (`LmConfig.for_platform`): it is what a plan prints and what
`AttentionSpec.backend` hands to `attend`. A model that was built without it has what its config names, and where that
names nothing, `default_backend` by the length of what is there.
"""

import functools
import logging
from dataclasses import dataclass

import jax.numpy as jnp
from haliax import NamedArray
from jax.typing import DTypeLike

from haliax_ext.errors import nearest
from haliax_ext.mapping import ways_in_scope
from levanter.layers.attention.blockwise import blockwise_attention
from levanter.layers.attention.jax_native import jax_native_attention
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import reference_attention
from levanter.layers.attention.ring import RingStep, ring_attention
from levanter.layers.attention.ring_reference import PlainPasses
from levanter.layers.attention.ring_splash import splash_passes
from levanter.layers.attention.splash import (
    LANES,
    SplashBlocks,
    splash_attention,
    splash_blocks,
    splash_mask_obstacle,
    splash_obstacle,
)

logger = logging.getLogger(__name__)

BACKENDS = ("reference", "blockwise", "splash", "jax_native", "cudnn")
"""Our own names."""

UPSTREAM_NAMES = ("default", "nvte", "jax_flash", "vanilla")
"""Names that upstream's configs use."""

LONGEST_WHOLE = 2048
"""Up to this length the default materializes the scores; beyond it, it works block by block."""

SHORTEST_SPLASH = 256
"""Below this length the default on TPUs is the plain formula: its scores cost less than the kernel's block visits."""

DEFAULT_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend and the reason for it.

    Attributes:
        name: one of `BACKENDS`.
        reason: a clause that completes "`name`, because …".
        block_size: keys in a block of the blockwise backend, positions in a block of splash; None for `attend`'s own.
    """

    name: str
    reason: str
    block_size: int | None = None

    def __str__(self) -> str:
        block = f" (blocks of {self.block_size or DEFAULT_BLOCK})" if self.name == "blockwise" else ""
        return f"{self.name}{block}: {self.reason}"


def check_backend_name(requested: str | None) -> None:
    """Raises a `ValueError` unless `requested` is None, one of ours, or one of upstream's names."""
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
    parts: int = 1,
    head_size: int = LANES,
    block_size: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> BackendChoice:
    """Chooses an implementation.

    Args:
        requested: a name of ours or upstream's; None chooses.
        platform: `cpu`, `gpu` or `tpu`; None where it is not known, which rules kernels out.
        dtype: of queries, keys and values.
        length: keys in a sequence.
        parts: shards of the queries of a sequence, each on its own device.
        head_size: of one head.
        block_size: keys in a block, for `blockwise` and `splash`; None chooses.
        soft_cap: bound of the scores, which JAX's own function does not have.
        sinks: whether heads have sinks, which it does not have either.

    Raises:
        ValueError: an unknown name, or `cudnn` or `jax_native` where they cannot run.
    """
    check_backend_name(requested)
    make = functools.partial(BackendChoice, block_size=block_size)
    blockwise = functools.partial(BackendChoice, name="blockwise", block_size=block_size or DEFAULT_BLOCK)
    lacking = _lacking(soft_cap, sinks)
    no_cudnn, no_splash = lacking or _cudnn_obstacle(platform, dtype), splash_obstacle(platform, dtype)
    if requested == "cudnn" and no_cudnn:
        raise ValueError(f"model.attn_backend cudnn: {no_cudnn}; leave attn_backend out, or use reference or blockwise")
    if requested == "jax_native" and lacking:
        raise ValueError(f"model.attn_backend jax_native: {lacking}; leave attn_backend out, or use blockwise")
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
    prefix = ""
    if requested == "nvte":
        prefix = f"nvte means cuDNN's kernel, but {no_cudnn}; "
    elif requested == "splash" and no_splash:
        prefix = f"splash is a TPU kernel, but {no_splash}; "
    elif no_splash and platform == "tpu":
        prefix = f"{no_splash}; "
    part = -(-length // parts)
    blocks = splash_blocks(part, block_size, head_size=head_size, dtype=dtype)
    splash = functools.partial(BackendChoice, name="splash", block_size=blocks.block)
    if not no_splash and requested == "splash":
        return splash(reason=f"as configured; {_splash_reason(part, blocks)}")
    if not no_splash and length >= SHORTEST_SPLASH:
        return splash(reason=f"{prefix}{_splash_reason(part, blocks)}")
    if length > LONGEST_WHOLE:
        reason = f"{prefix}{length} keys a sequence exceed {LONGEST_WHOLE}, the longest whose scores are materialized"
        return blockwise(reason=reason)
    if not no_splash:
        reason = (
            f"{prefix}{length} keys a sequence are fewer than {SHORTEST_SPLASH}, where the kernel starts to pay off"
        )
        return make(name="reference", reason=reason)
    reason = f"{prefix}{length} keys a sequence are at most {LONGEST_WHOLE}, so the scores are materialized"
    return make(name="reference", reason=reason)


def named_backend(requested: str | None, *, block_size: int | None = None) -> BackendChoice | None:
    """The backend that a name of `attn_backend` stands for by itself; None where platform or length decide.

    Args:
        requested: a name of ours or upstream's, or None.
        block_size: see `BackendChoice`.
    """
    name = {"vanilla": "reference", "jax_flash": "blockwise"}.get(requested or "", requested)
    if name not in BACKENDS:
        return None
    return BackendChoice(name=name, reason="named in the config", block_size=block_size)


def default_backend(length: int, *, block_size: int | None = None) -> BackendChoice:
    """What attends where nobody chose: the formula, or blocks of keys where they are many. No kernel: nothing says for
    which platform.

    Args:
        length: keys in a sequence.
        block_size: keys in a block.
    """
    return choose_backend(None, platform=None, dtype=jnp.float32, length=length, block_size=block_size)


def _splash_reason(length: int, blocks: SplashBlocks) -> str:
    padding = f", {length} positions padded to {blocks.padded}" if blocks.padded != length else ""
    return f"blocks of {blocks.block} × {blocks.block}{padding}; scores stay on the chip"


def _lacking(soft_cap: float | None, sinks: bool) -> str | None:
    """What a model needs and JAX's own attention function cannot, whichever kernel it calls."""
    if soft_cap is not None:
        return "the model soft-caps its attention scores, which JAX's attention function cannot do"
    return "the model's heads have attention sinks, which JAX's attention function does not support" if sinks else None


def _cudnn_obstacle(platform: str | None, dtype: DTypeLike) -> str | None:
    if platform != "gpu":
        return f"the platform is {platform or 'not known'}, not gpu"
    if jnp.dtype(dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float16")):
        return f"cuDNN's kernel takes 16-bit floats, not {jnp.dtype(dtype).name}"
    return None


def names_its_output(choice: BackendChoice) -> bool:
    """Whether `attend` gives its result the name `attention` by itself: kernels and rings, with what their backward
    pass needs beside it."""
    return choice.name == "splash" or ways_in_scope("key_position") > 1


def takes_cut_keys(choice: BackendChoice, mask: AttentionMask, *, keys: int) -> bool:
    """Whether `attend` takes keys and values as they are cut with the queries, and gathers them by itself."""
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

    Where the mapping in scope cuts the keys too, it runs in a ring of devices.
    """
    name = choice.name
    if ways_in_scope("key_position") > 1:
        passes = _passes(choice, soft_cap)
        return ring_attention(q, k, v, mask, softmax_scale=softmax_scale, passes=passes, sinks=sinks)
    if name == "splash" and (obstacle := splash_mask_obstacle(mask, keys=k.axis_size("key_position"))):
        name = "blockwise"
        logger.warning("attention: blockwise instead of splash: %s", obstacle)
    run = None
    if name == "reference":
        run = reference_attention
    elif name == "splash":
        run = functools.partial(splash_attention, block_size=choice.block_size)
    elif name == "blockwise":
        run = functools.partial(blockwise_attention, block_size=choice.block_size or DEFAULT_BLOCK)
    if run is not None:
        return run(q, k, v, mask, softmax_scale=softmax_scale, soft_cap=soft_cap, sinks=sinks)
    if lacking := _lacking(soft_cap, sinks is not None):
        raise ValueError(f"attention by {name}: {lacking}")
    implementation = "cudnn" if name == "cudnn" else "xla"
    return jax_native_attention(q, k, v, mask, softmax_scale=softmax_scale, implementation=implementation)


def _passes(choice: BackendChoice, soft_cap: float | None) -> RingStep:
    """What attends on each device of a ring.

    Raises:
        ValueError: the backend has no such form.
    """
    if choice.name in ("reference", "blockwise"):
        block = None if choice.name == "reference" else choice.block_size or DEFAULT_BLOCK
        return PlainPasses(soft_cap=soft_cap, block=block)
    if choice.name == "splash":
        return splash_passes(soft_cap=soft_cap, block_size=choice.block_size)
    raise ValueError(
        f"attention by {choice.name} in a ring: JAX's function does not give the log-sum-exp that parts are merged by; "
        "leave model.attn_backend out, or use attention_mapping: gather"
    )
