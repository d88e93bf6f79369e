"""Keys and values as 8-bit integers, with a scale for each position and head: what a cache of half the bytes holds.

Symmetric, by vector along `head_size`: `scale = max |x| / 127`, rounded to bfloat16, and `q = round(x / scale)` in
[−127, 127], so that an element is off by half a scale at most. What reads them multiplies integers and brings the scale
in behind: `q · k` times the scale of its key, and each weight of the softmax times the scale of its value before it
multiplies integers. So nothing that is read is as wide as what was written.
"""

import jax
import jax.numpy as jnp

from levanter.layers.quantized import LARGEST, SMALLEST_SCALE, STEP

SCALE_DTYPE = jnp.dtype(jnp.bfloat16)
"""Of the scales: 2 bytes for each `head_size` integers."""


def int8_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Vectors along the last axis as integers, and the scale of each.

    Args:
        x: finite.

    Returns:
        int8, the shape of `x`; and `SCALE_DTYPE`, its shape but for the last axis. A vector of zeros, or of numbers too
        small for a scale that is a normal number, has the scale 0.
    """
    exact = x.astype(jnp.float32)
    scale = (jnp.max(jnp.abs(exact), axis=-1) * STEP).astype(SCALE_DTYPE)
    # What is divided by is what will be multiplied by: the rounded scale.
    by = scale.astype(jnp.float32)
    by = jnp.where(by < SMALLEST_SCALE, 0.0, by)
    # A product with the reciprocal, because compilers make one of a quotient, and not always.
    inverse = jnp.where(by > 0, 1 / jnp.where(by > 0, by, 1.0), 0.0)
    q = jnp.clip(jnp.round(exact * inverse[..., None]), -LARGEST, LARGEST)
    return q.astype(jnp.int8), by.astype(SCALE_DTYPE)
