"""Rotary position embeddings (RoPE): positions as rotations of feature pairs, and scalings for longer contexts.

A head's features form pairs `(i, i + size/2)`; pair `i` at position `p` is rotated by `p · frequency[i]` (Su et al.,
RoFormer, arXiv:2104.09864, in the half-split layout of Hugging Face checkpoints). A *scaling* changes the frequencies,
and YaRN also the length of the rotated vectors, so that a model works beyond its training context. There is one config
class per scaling, chosen by `type:` in YAML.

The frequencies are a few float32 numbers that depend on the config only. They are computed on the host with NumPy, so
they are the same on every platform and no array exists outside `jit`. The tables of cosines and sines over positions
are computed inside `jit`.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import draccus
import numpy as np

from levanter.config.validators import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Ranged,
    RotaryBase,
    Scale,
    Stretch,
)

if TYPE_CHECKING:
    from haliax import Axis, NamedArray


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(Ranged, draccus.ChoiceRegistry):
    """The fields that all rotary embeddings have.

    Attributes:
        theta: base of the geometric series of wavelengths.
        partial_rotary_factor: fraction of a head's features that is rotated; the others are unchanged.
    """

    range_prefix: ClassVar[str] = "rope."

    theta: RotaryBase = 10000.0
    partial_rotary_factor: PositiveFraction = 1.0

    @classmethod
    def default_choice_name(cls) -> str:
        """The choice if the configuration has no `type`: no scaling."""
        return "default"

    def rotated_size(self, head_size: int) -> int:
        """The number of leading features of a head that are rotated."""
        size = int(head_size * self.partial_rotary_factor)
        if size % 2 or size < 2:
            raise ValueError(f"rotary embeddings rotate features in pairs, but {size} of {head_size} would be rotated")
        return size

    @abstractmethod
    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        """Radians per position of each feature pair, float32 `[rotated_size / 2]`.

        Args:
            head_size: features of one head.
            length: positions in the sequence; `dynamic` and `longrope` depend on it.
        """

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def tables(self, HeadSize: "Axis", positions: "NamedArray", *, length: int) -> "tuple[NamedArray, NamedArray]":
        """Cosines and sines, float32 `[*positions.axes, head_size (the rotated part)]`.

        Args:
            HeadSize: the axis of a head's features.
            positions: integer positions, any axes.
            length: positions in the sequence (the largest position + 1 where positions start at 0).
        """
        # Imported here: configs are read in processes that never import JAX.
        import haliax as hax
        import jax.numpy as jnp

        frequency = self.frequencies(HeadSize.size, length)
        Rotated = HeadSize.resize(self.rotated_size(HeadSize.size))
        # Features i and i + size/2 are one pair and turn by the same angle. Angles are float32: in bfloat16, positions
        # above 256 would be rounded.
        both_halves = hax.named(jnp.asarray(np.concatenate([frequency, frequency])), Rotated)
        angles = positions.astype(jnp.float32).broadcast_axis(Rotated).rearrange((..., Rotated)) * both_halves
        amplitude = np.float32(self.amplitude)
        # The amplitude scales queries and keys, hence the scores by its square.
        return hax.cos(angles) * amplitude, hax.sin(angles) * amplitude


def apply_rotary(x: "NamedArray", cos: "NamedArray", sin: "NamedArray", HeadSize: "Axis") -> "NamedArray":
    """Rotates the leading features of `x` along `HeadSize`.

    The arithmetic is in the dtype of `x`, to which the tables are rounded, as in Hugging Face's implementation.

    Args:
        x: queries or keys, `[…, head_size]`.
        cos: cosines from `RotaryConfig.tables`; its axes are a subset of those of `x`, except for the rotated size.
        sin: the sines, over the same axes.
        HeadSize: the axis of a head's features.
    """
    import haliax as hax

    Rotated = cos.resolve_axis(HeadSize.name)
    assert cos.axes == sin.axes and Rotated.size <= HeadSize.size
    rotated, rest = x, None
    if Rotated.size < HeadSize.size:
        rotated = x[HeadSize, 0 : Rotated.size]
        rest = x[HeadSize, Rotated.size : HeadSize.size]
    half = Rotated.size // 2
    # (a, b) rotated by 90° is (−b, a), so x·cos + quarter_turn·sin is the rotation by the angle.
    quarter_turn = hax.concatenate(Rotated, [-rotated[Rotated, half : Rotated.size], rotated[Rotated, 0:half]])
    out = (rotated * cos.astype(x.dtype) + quarter_turn * sin.astype(x.dtype)).rearrange(rotated.axes)
    return out if rest is None else hax.concatenate(HeadSize, [out, rest])


def _geometric(theta: float, size: int) -> np.ndarray:
    """The unscaled frequencies θ^(−2i/size), float32, in the order of operations of the reference implementation."""
    # 1 / θ^x instead of θ^(−x): the two differ in the last bit, which positions in the thousands multiply.
    exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.float32(1.0) / np.power(np.float32(theta), exponent)


@RotaryConfig.register_subclass("default")
@dataclass(frozen=True, kw_only=True)
class DefaultRotaryConfig(RotaryConfig):
    """RoPE as published (arXiv:2104.09864).

    Attributes:
        factor: divisor of the positions; 1 leaves them unchanged (the key exists for upstream's configs).
    """

    factor: Stretch = 1.0

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        del length
        return _geometric(self.theta, self.rotated_size(head_size)) / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class ClockwiseRotary(RotaryConfig):
    """Other rotary embeddings that turn the other way, by −θ, as in nanochat.

    Both directions are equally good; a checkpoint works with one of them. It is no choice in YAML, since the family
    decides.

    Attributes:
        inner: the embeddings that turn by θ.
    """

    inner: RotaryConfig

    @property
    def amplitude(self) -> float:
        return self.inner.amplitude

    def rotated_size(self, head_size: int) -> int:
        return self.inner.rotated_size(head_size)

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        # cos(−θ) = cos θ and sin(−θ) = −sin θ: the same kernels turn the other way.
        return -self.inner.frequencies(head_size, length)


@RotaryConfig.register_subclass("linear")
@dataclass(frozen=True, kw_only=True)
class LinearRotaryConfig(RotaryConfig):
    """Position interpolation: all positions divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: Stretch = 1.0

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        del length
        return _geometric(self.theta, self.rotated_size(head_size)) / np.float32(self.factor)


@RotaryConfig.register_subclass("dynamic")
@dataclass(frozen=True, kw_only=True)
class DynamicRotaryConfig(RotaryConfig):
    """NTK-aware scaling that grows with the sequence (described in arXiv:2309.00071, section 3.3).

    Up to the original context nothing changes. A longer sequence of `n` positions raises the base to
    `θ · (factor · n / original − (factor − 1)) ^ (size / (size − 2))`. `n` is the number of positions of the whole
    (padded) sequence, as in Hugging Face; unlike there, no state is kept from one batch to the next.

    Attributes:
        factor: how fast the base grows.
        original_max_position_embeddings: the context the model was trained on (`max_position_embeddings` of a Hugging
            Face config).
    """

    factor: Stretch = 1.0
    original_max_position_embeddings: PositiveInt

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        size = self.rotated_size(head_size)
        if size <= 2:
            raise ValueError(f"dynamic RoPE needs more than 2 rotated features in a head, got {size}")
        original = self.original_max_position_embeddings
        # Up to the original context the growth is factor − (factor − 1) = 1.
        growth = self.factor * max(length, original) / original - (self.factor - 1)
        return _geometric(self.theta * growth ** (size / (size - 2)), size)


@RotaryConfig.register_subclass("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3RotaryConfig(RotaryConfig):
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, intermediate ones blended.

    Source: `apply_scaling` in Meta's llama-models; Llama 3, arXiv:2407.21783, section 3.4.

    Attributes:
        factor: stretch of the long wavelengths.
        low_freq_factor: wavelengths above `original / low_freq_factor` are stretched.
        high_freq_factor: wavelengths below `original / high_freq_factor` are kept.
        original_max_position_embeddings: the context length before the scaling.
    """

    theta: float = 500000.0
    factor: Stretch = 8.0
    low_freq_factor: Scale = 1.0
    high_freq_factor: Scale = 4.0
    original_max_position_embeddings: PositiveInt = 8192

    def __post_init__(self):
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope.low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        del length
        kept = _geometric(self.theta, self.rotated_size(head_size))
        stretched = kept / np.float32(self.factor)
        wavelength = np.float32(2 * math.pi) / kept
        original = self.original_max_position_embeddings
        low, high = self.low_freq_factor, self.high_freq_factor
        # The share of the kept frequency: 0 at the wavelength original / low, 1 at original / high, linear in between.
        keep = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
        blended = (1 - keep) * stretched + keep * kept
        between = np.where(wavelength > np.float32(original / low), stretched, blended)
        return np.where(wavelength < np.float32(original / high), kept, between).astype(np.float32)


@RotaryConfig.register_subclass("yarn")
@dataclass(frozen=True, kw_only=True)
class YarnRotaryConfig(RotaryConfig):
    """YaRN: interpolation by parts, and attention sharpened by longer rotated vectors (Peng et al., arXiv:2309.00071).

    Attributes:
        factor: ratio of the new context length to the original one.
        original_max_position_embeddings: the context length before the scaling.
        beta_fast: pairs that turn more often than this over the original context are kept.
        beta_slow: pairs that turn less often than this are interpolated; pairs in between are blended.
        attention_factor: amplitude of the tables; None for the paper's `0.1 · ln(factor) + 1`, or with both
            `mscale`s the ratio of `0.1 · mscale · ln(factor) + 1` and the same with `mscale_all_dim` (DeepSeek).
        mscale: see `attention_factor`; alone it may only be 1.
        mscale_all_dim: see `attention_factor`.
        truncate: round the limits of the blend outwards to whole feature pairs.
    """

    factor: Stretch = 1.0
    original_max_position_embeddings: PositiveInt = 2048
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: Scale | None = None
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    truncate: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.attention_factor is None and (self.mscale or 1.0) != 1.0 and not self.mscale_all_dim:
            raise ValueError(
                f"rope.mscale {self.mscale} without mscale_all_dim: Hugging Face ignores it and other implementations "
                "do not; give both, or set attention_factor"
            )

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def sharpening(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            # DeepSeek sharpens all dimensions in its softmax scale; the tables get the ratio.
            return sharpening(self.mscale) / sharpening(self.mscale_all_dim)
        return sharpening(1.0)

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        del length
        size = self.rotated_size(head_size)
        kept = _geometric(self.theta, size)
        interpolated = kept / np.float32(self.factor)
        # Frequencies fall with the index of the pair: below `low` pairs are kept, above `high` interpolated.
        low, high = self._pair_turning(self.beta_fast, size), self._pair_turning(self.beta_slow, size)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # `size − 1`, not `size / 2 − 1`: the reference implementation's limit, which pairs never reach.
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            # As in the reference implementation, to avoid a division by zero.
            high += 0.001
        pair = np.arange(size // 2, dtype=np.float32)
        interpolate = np.clip((pair - np.float32(low)) / np.float32(high - low), 0, 1)
        return (interpolated * interpolate + kept * (1 - interpolate)).astype(np.float32)

    def _pair_turning(self, turns: float, size: int) -> float:
        """The (fractional) index of the pair that makes `turns` rotations over the original context."""
        # Solves original · θ^(−2i/size) = 2π · turns for i.
        original = self.original_max_position_embeddings
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@RotaryConfig.register_subclass("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRotaryConfig(RotaryConfig):
    """LongRoPE: a divisor per pair, one set for short and one for long sequences (arXiv:2402.13753).

    A sequence with more positions than the original context uses the long set for all positions. As in Hugging Face,
    the number of positions is that of the whole (padded) sequence.

    Attributes:
        short_factor: divisor of each pair's frequency for sequences within the original context.
        long_factor: the same for longer sequences.
        original_max_position_embeddings: the context length before the scaling.
        factor: ratio of the new context length to the original one; it determines the amplitude of the tables.
        attention_factor: amplitude of the tables; None is `√(1 + ln(factor) / ln(original context))`.
    """

    short_factor: tuple[Scale, ...]
    long_factor: tuple[Scale, ...]
    original_max_position_embeddings: PositiveInt
    factor: Stretch = 1.0
    attention_factor: Scale | None = None

    def rotated_size(self, head_size: int) -> int:
        size = super().rotated_size(head_size)
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(self, name))) != size // 2:
                raise ValueError(
                    f"rope.{name} has {count} numbers, but the {size} rotated features form {size // 2} pairs"
                )
        return size

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def frequencies(self, head_size: int, length: int) -> np.ndarray:
        size = self.rotated_size(head_size)
        # Static: the length is that of the compiled program, so no table is chosen on the device.
        long = length > self.original_max_position_embeddings
        stretch = np.asarray(self.long_factor if long else self.short_factor, np.float32)
        exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        # In this order, as in Hugging Face: dividing `_geometric` by the stretch would round twice.
        return np.float32(1.0) / (stretch * np.power(np.float32(self.theta), exponent))
