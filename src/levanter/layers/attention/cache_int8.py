"""Int8 keys and values with one scale per position and head, for a KV cache of half the bytes.

Symmetric quantization per vector along `head_size`: `scale = max |x| / 127`, rounded to bfloat16, and
`q = round(x / scale)` in [−127, 127], so an element is off by at most half a scale. Attention multiplies the integers
and applies the scales outside: `q · k` times the scale of the key, and each softmax weight times the scale of its value
before the product with the integer values. The cache is never dequantized.
"""

import jax
import jax.numpy as jnp

from levanter.layers.quantized import LARGEST, SMALLEST_SCALE, STEP

SCALE_DTYPE = jnp.dtype(jnp.bfloat16)
"""Dtype of the scales: 2 bytes per `head_size` integers."""


def int8_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes vectors along the last axis to int8, one scale per vector.

    Args:
        x: finite.

    Returns:
        int8 of the shape of `x`, and `SCALE_DTYPE` of its shape without the last axis. A vector of zeros, or whose
        scale would be subnormal, has scale 0.
    """
    exact = x.astype(jnp.float32)
    scale = (jnp.max(jnp.abs(exact), axis=-1) * STEP).astype(SCALE_DTYPE)
    # Divide by the rounded scale, because attention multiplies by the rounded scale.
    rounded = scale.astype(jnp.float32)
    # The reciprocal of a subnormal scale may overflow to infinity, and TPUs flush subnormals to zero.
    rounded = jnp.where(rounded < SMALLEST_SCALE, 0.0, rounded)
    # Multiply by the reciprocal explicitly: compilers rewrite some divisions that way, so results would differ.
    inverse = jnp.where(rounded > 0, 1 / jnp.where(rounded > 0, rounded, 1.0), 0.0)
    # A guard: with a bfloat16 scale the largest element is at most 127.25 steps, which rounds to 127.
    q = jnp.clip(jnp.round(exact * inverse[..., None]), -LARGEST, LARGEST)
    return q.astype(jnp.int8), rounded.astype(SCALE_DTYPE)
