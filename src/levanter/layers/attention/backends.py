"""Which implementation of attention runs, and why.

Four implement one meaning (`reference`): the reference itself, `blockwise`, and `jax_native` and `cudnn`, which are
JAX's own function with XLA's or cuDNN's kernel. Upstream's names are accepted and mapped onto these with a reason.
The platform is an argument: nothing here looks for devices.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from haliax import NamedArray
from jax.typing import DTypeLike

from haliax_ext.errors import nearest
from levanter.layers.attention.blockwise import blockwise_attention
from levanter.layers.attention.jax_native import jax_native_attention
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.reference import reference_attention

BACKENDS = ("reference", "blockwise", "jax_native", "cudnn")
"""Our own names."""

UPSTREAM_NAMES = ("default", "nvte", "splash", "jax_flash", "vanilla")
"""Names that upstream's configs use."""

LONGEST_WHOLE = 2048
"""Up to this length the default materializes the scores; beyond it goes block by block."""

DEFAULT_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend and the reason for it.

    Attributes:
        name: one of `BACKENDS`.
        reason: a clause that completes "`name`, because …".
        block_size: keys in a block of the blockwise backend.
    """

    name: str
    reason: str
    block_size: int = DEFAULT_BLOCK

    def __str__(self) -> str:
        block = f" (blocks of {self.block_size})" if self.name == "blockwise" else ""
        return f"{self.name}{block}: {self.reason}"


def check_backend_name(requested: str | None) -> None:
    """Raises a `ValueError` unless `requested` is None, one of ours, or one of upstream's names."""
    if requested is None or requested in BACKENDS or requested in UPSTREAM_NAMES:
        return
    close = nearest(requested, BACKENDS + UPSTREAM_NAMES)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise ValueError(
        f"model.attn_backend {requested!r} is neither one of ours ({', '.join(BACKENDS)}) "
        f"nor one of upstream's ({', '.join(UPSTREAM_NAMES)}){hint}"
    )


def choose_backend(
    requested: str | None, *, platform: str | None, dtype: DTypeLike, length: int, block_size: int | None = None
) -> BackendChoice:
    """Chooses an implementation.

    Args:
        requested: a name of ours or upstream's; None chooses.
        platform: `cpu`, `gpu` or `tpu`; None where it is not known, which rules cuDNN out.
        dtype: of queries, keys and values.
        length: keys in a sequence.
        block_size: keys in a block, for `blockwise`.

    Raises:
        ValueError: an unknown name, or `cudnn` where it cannot run.
    """
    check_backend_name(requested)
    block = block_size or DEFAULT_BLOCK
    obstacle = _cudnn_obstacle(platform, dtype)
    if requested == "cudnn" and obstacle:
        raise ValueError(f"model.attn_backend cudnn: {obstacle}; leave attn_backend out, or use reference or blockwise")
    if requested in BACKENDS:
        return BackendChoice(name=requested, reason="as asked for", block_size=block)
    if requested == "vanilla":
        return BackendChoice(name="reference", reason="upstream's vanilla is the plain formula", block_size=block)
    if requested == "jax_flash":
        reason = "upstream's jax_flash is an online softmax over blocks of keys"
        return BackendChoice(name="blockwise", reason=reason, block_size=block)
    if requested == "nvte" and not obstacle:
        reason = "Transformer Engine is not a dependency; JAX calls the same cuDNN kernel"
        return BackendChoice(name="cudnn", reason=reason, block_size=block)
    prefix = ""
    if requested == "nvte":
        prefix = f"nvte asks for cuDNN's kernel, but {obstacle}; "
    elif requested == "splash":
        prefix = "the splash kernel is not built in yet; "
    if length > LONGEST_WHOLE:
        reason = f"{prefix}{length} keys a sequence are more than the {LONGEST_WHOLE} whose scores are held whole"
        return BackendChoice(name="blockwise", reason=reason, block_size=block)
    reason = f"{prefix}{length} keys a sequence are at most {LONGEST_WHOLE}, whose scores are held whole"
    return BackendChoice(name="reference", reason=reason, block_size=block)


def _cudnn_obstacle(platform: str | None, dtype: DTypeLike) -> str | None:
    if platform != "gpu":
        return f"the platform is {platform or 'not known'}, not gpu"
    if jnp.dtype(dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float16")):
        return f"cuDNN's kernel takes 16-bit floats, not {jnp.dtype(dtype).name}"
    return None


def attend(
    q: NamedArray, k: NamedArray, v: NamedArray, mask: AttentionMask, *, scale: float, choice: BackendChoice
) -> NamedArray:
    """Runs the chosen backend; see `reference_attention` for axes and meaning."""
    if choice.name == "reference":
        return reference_attention(q, k, v, mask, scale=scale)
    if choice.name == "blockwise":
        return blockwise_attention(q, k, v, mask, scale=scale, block_size=choice.block_size)
    implementation = "cudnn" if choice.name == "cudnn" else "xla"
    return jax_native_attention(q, k, v, mask, scale=scale, implementation=implementation)
