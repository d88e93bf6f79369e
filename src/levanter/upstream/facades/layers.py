"""Layers, attention and activations with the names and calls of earlier generations, on top of ours.

    out = dot_product_attention("position", "key_position", "head_size", q, k, v, mask)
    norm = LlamaRMSNorm.init(Embed, eps=1e-5)
    attention = LlamaAttention.init(config, key=key); y = attention(x, mask)

Models here are one decoder built from specs; the classes below wrap parts of a decoder with upstream's calls. Dropout,
attention biases and paged caches are not implemented, and refused if requested.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from haliax_ext.pytree import PyTree
from levanter.layers.activation import ACTIVATIONS
from levanter.layers.attention import AttentionMask, GroupedQueryAttention
from levanter.layers.attention.backends import BackendChoice, attend, choose_backend, default_backend
from levanter.layers.context import ForwardContext
from levanter.layers.norm import RMSNorm
from levanter.layers.outputs import Outputs
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig, apply_rotary
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.model import DecoderBlock

BLOCK_SIZE = 128
"""The default block size of `flash_attention` in early 2024."""


class AttentionBackend(StrEnum):
    """Upstream's names of `attn_backend`; `levanter.layers.attention` maps each to a backend."""

    DEFAULT = "default"
    NVTE = "nvte"
    SPLASH = "splash"
    JAX_FLASH = "jax_flash"
    VANILLA = "vanilla"


class ActivationFunctionEnum(StrEnum):
    """Upstream's names of activations."""

    relu = "relu"
    silu = "silu"
    swish = "swish"
    gelu = "gelu"
    gelu_new = "gelu_new"
    quick_gelu = "quick_gelu"
    tanh = "tanh"

    def to_fn(self) -> Callable[[NamedArray], NamedArray]:
        """The function of named arrays."""
        return ACTIVATIONS[self.value]

    def to_jax_fn(self) -> Callable[[jax.Array], jax.Array]:
        """The function of plain arrays."""

        def of_array(x: jax.Array) -> jax.Array:
            # Activations work elementwise, so invented axis names make a NamedArray of any shape.
            axes = tuple(Axis(f"axis_{n}", size) for n, size in enumerate(x.shape))
            return ACTIVATIONS[self.value](NamedArray(x, axes)).array

        return of_array


@dataclass(frozen=True)
class OldAttentionConfig:
    """The configuration of an attention layer, in upstream's keys.

    Attributes:
        Embed: the axis of the residual stream.
        num_heads, num_kv_heads: heads of queries, and of keys and values.
        head_dim: features of a head; None divides those of `Embed` among the heads.
        use_bias, use_output_bias: whether projections have biases; None for the output means as for the others.
        upcast_attn: accepted for compatibility; scores are always float32.
        attn_backend, flash_attention_block_size: the backend and its block size.
        rope: the rotary embedding; None for none.
        sliding_window: how many keys a query sees; None for all.
        scaling_factor: factor of the scores; None for 1/√(features of a head).
        logits_soft_cap: bound of the scores.
        decoder: the configuration that `config.attention_config()` is of; what `Attention.init` builds from.
    """

    Embed: Axis
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    use_bias: bool = False
    use_output_bias: bool | None = None
    upcast_attn: bool = False
    attn_backend: AttentionBackend | None = None
    flash_attention_block_size: int | None = None
    rope: RotaryConfig | None = None
    sliding_window: int | None = None
    scaling_factor: float | None = None
    logits_soft_cap: float | None = None
    decoder: DecoderConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.Embed.size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def q_heads_per_group(self) -> int:
        """Query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def KVHeads(self) -> Axis:
        """The axis of key/value heads."""
        return Axis("kv_head", self.num_kv_heads)

    @property
    def Heads(self) -> Axis:
        """The axis of query heads."""
        return Axis("heads", self.num_heads)

    @property
    def HeadSize(self) -> Axis:
        """The axis of the features of a head."""
        return Axis("head_size", self.head_size)

    @property
    def QHeadsPerGroup(self) -> Axis:
        """The axis of query heads in a group."""
        return Axis("q_heads_per_group", self.q_heads_per_group)


def attention_config(config: DecoderConfig) -> Callable[[], OldAttentionConfig]:
    """`config.attention_config()`: that of a model's first layer, in upstream's keys."""

    def of_model() -> OldAttentionConfig:
        spec = config.layer_attention(0)
        return OldAttentionConfig(
            Embed=config.Embed,
            num_heads=spec.KVHead.size * spec.QHeadsPerGroup.size,
            num_kv_heads=spec.KVHead.size,
            head_dim=spec.HeadSize.size,
            use_bias=spec.qkv_bias,
            use_output_bias=spec.out_bias,
            upcast_attn=spec.upcast,
            attn_backend=getattr(config, "attn_backend", None),
            flash_attention_block_size=spec.block_size,
            rope=None if spec.rope is None else config.ropes[spec.rope],
            sliding_window=spec.window,
            scaling_factor=spec.softmax_scale,
            logits_soft_cap=spec.soft_cap,
            decoder=config,
        )

    return of_model


class RotaryEmbeddings:
    """`rope.build(HeadSize)`: rotates queries or keys at positions.

    Attributes:
        config: the rotary embedding.
        HeadSize: the features of a head.
    """

    def __init__(self, config: RotaryConfig, HeadSize: Axis):
        self.config, self.HeadSize = config, HeadSize

    def __call__(self, x: NamedArray, position_ids: NamedArray) -> NamedArray:
        """Rotates `[…, position, head_size]`; the dynamic kinds take the number of positions as the length."""
        length = max((axis.size for axis in position_ids.axes), default=1)
        cos, sin = self.config.tables(self.HeadSize, position_ids, length=length)
        return apply_rotary(x, cos, sin, self.HeadSize)


def build_rotary(config: RotaryConfig) -> Callable[[Axis], RotaryEmbeddings]:
    """`rope.build(HeadSize)`."""
    return lambda HeadSize: RotaryEmbeddings(config, HeadSize)


def default_attention_type() -> AttentionBackend:
    """The meaning of `attn_backend: null`: a choice by platform and length."""
    return AttentionBackend.DEFAULT


def dot_product_attention(
    QPos: Axis | str,
    KPos: Axis | str,
    Key: Axis | str,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: AttentionMask | NamedArray | None = None,
    bias: NamedArray | None = None,
    attention_dtype: DTypeLike | None = None,
    precision: PyTree = None,
    use_flash: bool | None = None,
    attn_backend: str | None = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: jax.Array | None = None,
    attn_sink: NamedArray | None = None,
) -> NamedArray:
    """Attention over axes of any names.

    Args:
        QPos, KPos, Key: the axes of queries, keys and features.
        query, key, value: `[…, QPos, Key]`, `[…, KPos, Key]` twice. Axes that only queries have are query heads that
            share keys and values.
        mask: the visible keys: a rule, or an array over `QPos` and `KPos`; None for all.
        bias, precision: refused.
        attention_dtype: dtype of queries and keys in the computation.
        use_flash: true computes block by block, false materializes all scores; None chooses by length.
        attn_backend, flash_block_size: the backend, by either project's name, and its block size.
        dropout: refused while training.
        logits_soft_cap: bound of the scores.
        scaling_factor: multiplies the scores; 1/√features by default.
        inference, prng: accepted for compatibility; nothing is random.
        attn_sink: for each head, a score that every query attends to and whose value is zero.

    Returns:
        The attended values, over the axes of `query`.

    Raises:
        ValueError: an option that is not implemented is set.
    """
    del prng
    refused = {"bias": bias, "precision": precision, "dropout": dropout if not inference else None}
    # Falsy settings (None, 0.0, an absent bias) request nothing.
    if unsupported := [name for name, setting in refused.items() if setting]:
        raise ValueError(
            f"{', '.join(unsupported)}: not supported by attention here; levanter.layers.attention lists what is"
        )
    # Axes may be given by name only; their sizes are taken from the arrays.
    QPos, KPos, Key = query.resolve_axis(_name(QPos)), key.resolve_axis(_name(KPos)), query.resolve_axis(_name(Key))
    # Our attention has fixed axis names; the result is renamed back below.
    for_queries: dict[Axis | str, Axis | str] = {QPos.name: "position", Key.name: "head_size"}
    for_keys: dict[Axis | str, Axis | str] = {KPos.name: "key_position", Key.name: "head_size"}
    q = query.rename(for_queries)
    if attention_dtype is not None:
        q, key = q.astype(attention_dtype), key.astype(attention_dtype)
    k, v = key.rename(for_keys), value.rename(for_keys)
    if isinstance(mask, NamedArray):
        mask = AttentionMask.of_array(mask.rename({QPos.name: "position", KPos.name: "key_position"}))
    scale = 1 / math.sqrt(Key.size) if scaling_factor is None else scaling_factor
    choice = _choice(use_flash, attn_backend, flash_block_size, query=q, length=KPos.size)
    # No mask at all, unlike the causal default of our models.
    rule = AttentionMask() if mask is None else mask
    attended = attend(q, k, v, rule, softmax_scale=scale, choice=choice, soft_cap=logits_soft_cap, sinks=attn_sink)
    return attended.rename({"position": QPos, "head_size": Key}).rearrange(query.axes)


def _choice(
    use_flash: bool | None,
    backend: str | None,
    block: int | None,
    *,
    query: NamedArray,
    length: int,
) -> BackendChoice:
    # An explicit backend wins over `use_flash`, as upstream.
    if backend is not None and backend != AttentionBackend.DEFAULT:
        return choose_backend(str(backend), platform=None, dtype=query.dtype, length=length, block_size=block)
    if use_flash is None:
        return default_backend(length, block_size=block)
    return BackendChoice(name="blockwise" if use_flash else "reference", reason="as asked for", block_size=block)


def flash_attention(
    QPos: Axis | str,
    KPos: Axis | str,
    Key: Axis | str,
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask | NamedArray | None = None,
    bias: NamedArray | None = None,
    *,
    dropout: float = 0.0,
    inference: bool,
    key: jax.Array | None = None,
    block_size: int = BLOCK_SIZE,
    dtype: DTypeLike | None = None,
    precision: PyTree = None,
) -> NamedArray:
    """Attention in blocks of keys; see `dot_product_attention`."""
    return dot_product_attention(
        QPos,
        KPos,
        Key,
        q,
        k,
        v,
        mask,
        bias,
        dtype,
        precision,
        True,
        flash_block_size=block_size,
        dropout=dropout,
        inference=inference,
        prng=key,
    )


def materialize_mask(
    mask: PyTree, QPos: Axis, KPos: Axis, q_slice: PyTree = None, k_slice: PyTree = None
) -> NamedArray | None:
    """A mask as an array, from a rule or an array; with slices, only that part."""
    if mask is None:
        return None
    if isinstance(mask, AttentionMask):
        return mask.materialize(QPos, KPos, q_slice=q_slice, k_slice=k_slice)  # pyright: ignore[reportCallIssue]
    # The slices are Haliax `dslice`s, with `start` and `size`.
    for axis, part in ((QPos, q_slice), (KPos, k_slice)):
        if part is not None:
            mask = hax.slice(mask, axis.name, start=part.start, length=part.size)
    return mask


# --- Llama's parts ---


class LlamaRMSNorm:
    """`LlamaRMSNorm.init(axis, eps)`: creates a Llama's norm."""

    @staticmethod
    def init(axis: Axis, eps: float = 1e-6, use_weight: bool = True, use_bias: bool = False) -> RMSNorm:
        """A norm with unit weights and no bias."""
        if use_bias:
            raise ValueError("use_bias: RMSNorm has no bias here")
        return RMSNorm.init(axis, eps=eps, use_weight=use_weight)


class LlamaRotaryEmbedding(eqx.Module):
    """Cosine and sine tables of the default rotary embedding.

    Attributes:
        HeadSize: the features of a head.
        Pos: the positions.
        base: base of the geometric series of wavelengths.
    """

    HeadSize: Axis = eqx.field(static=True)
    Pos: Axis = eqx.field(static=True)
    base: float = eqx.field(static=True, default=10000.0)

    def __call__(self, seq_len: int) -> tuple[NamedArray, NamedArray]:
        """Cosines and sines of the first positions, `[position, head_size]`."""
        positions = hax.arange(self.Pos.resize(seq_len))
        return DefaultRotaryConfig(theta=self.base).tables(self.HeadSize, positions, length=seq_len)


def rotate_half(x: NamedArray, HeadSize: Axis | None = None) -> NamedArray:
    """Swaps the halves of the features and negates the new first one."""
    HeadSize = x.resolve_axis("head_size" if HeadSize is None else HeadSize.name)
    half = HeadSize.size // 2
    # [x1, x2] → [−x2, x1]: with x · cos + rotate_half(x) · sin, pairs (i, i + size/2) are rotated.
    return hax.concatenate(HeadSize, [-x[HeadSize, half : HeadSize.size], x[HeadSize, 0:half]])


def apply_rotary_pos_emb(
    q: NamedArray, k: NamedArray, cos: NamedArray, sin: NamedArray
) -> tuple[NamedArray, NamedArray]:
    """Rotates queries and keys by cosine and sine tables."""
    HeadSize = q.resolve_axis("head_size")
    return apply_rotary(q, cos, sin, HeadSize), apply_rotary(k, cos, sin, HeadSize)


class LlamaAttention(eqx.Module):
    """A decoder's attention, called with a stream and a mask.

    Attributes:
        inner: the attention.
        config: the decoder's.
    """

    inner: GroupedQueryAttention
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig | OldAttentionConfig, *, key: jax.Array) -> "LlamaAttention":
        """Freshly initialized projections.

        Raises:
            ValueError: the configuration is of no model.
        """
        if isinstance(config, OldAttentionConfig):
            if config.decoder is None:
                raise ValueError(
                    "Attention.init: pass a model's configuration, or its attention_config(); a layer by itself is "
                    "built from an AttentionSpec: levanter.layers.attention"
                )
            config = config.decoder
        # Layer 0's spec: upstream's Llama layers are all alike.
        return LlamaAttention(inner=GroupedQueryAttention.init(config.layer_attention(0), key=key), config=config)

    def __call__(
        self, x: NamedArray, mask: AttentionMask | NamedArray | None = None, *, key: object = None
    ) -> NamedArray:
        """Attends within `x`, `[…, position, embed]`."""
        del key
        # The second result is the cache state, None here.
        return self.inner(x, _context(self.config, x, mask))[0]


class LlamaDecoderLayer(eqx.Module):
    """A decoder's layer, called with a stream and a mask.

    Attributes:
        inner: the layer.
        config: the decoder's.
    """

    inner: DecoderBlock
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, *, key: jax.Array) -> "LlamaDecoderLayer":
        """A freshly initialized layer."""
        return LlamaDecoderLayer(inner=DecoderBlock.init(config.layers[0], key=key), config=config)

    def __call__(
        self, x: NamedArray, mask: AttentionMask | NamedArray | None = None, *, key: object = None
    ) -> NamedArray:
        """Maps the residual stream `[…, position, embed]` to itself."""
        del key
        return self.inner((Outputs(activations=x), None), _context(self.config, x, mask))[0].activations


def _context(config: DecoderConfig, x: NamedArray, mask: AttentionMask | NamedArray | None) -> ForwardContext:
    """The context of a forward pass: mask and rotary tables."""
    Pos = x.resolve_axis("position")
    index = hax.arange(Pos)
    tables = {name: rope.tables(config.HeadSize, index, length=Pos.size) for name, rope in config.ropes.items()}
    # An array is the complete rule; nothing is causal unless it says so.
    rule = AttentionMask.of_array(mask.astype(bool)) if isinstance(mask, NamedArray) else mask
    return ForwardContext(mask=AttentionMask() if rule is None else rule, tables=tables)


def _name(axis: Axis | str) -> str:
    return axis if isinstance(axis, str) else axis.name
