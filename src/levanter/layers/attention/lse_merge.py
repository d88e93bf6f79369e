"""Attention to some keys and attention to others, merged into attention to all of them.

What a query makes of some keys is a weighted mean of their values and the logarithm of the sum of the weights. Two such
are merged by weighing the means with these sums (Milakov and Gimelshein, arXiv:1805.02867); in float32, whatever the
products were in.
"""

import jax
import jax.numpy as jnp

from levanter.layers.attention.reference import HIDDEN

Seen = tuple[jax.Array, jax.Array]
"""The mean, float32 `[…, position, head_size]`, and the log-sum-exp of the scores, float32 `[…, position]`."""


def nothing(shape: tuple[int, ...]) -> Seen:
    """Of a query that has seen no key.

    Args:
        shape: of the mean.
    """
    return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], HIDDEN, jnp.float32)


def merged(one: Seen, other: Seen) -> Seen:
    """Of a query that has seen the keys of both.

    The weights add up to one, so that one of them is laid over the features, and not two: on a TPU that takes longer
    than the products do.
    """
    (a, of_a), (b, of_b) = one, other
    share = jax.nn.sigmoid(of_b - of_a)[..., None]
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # Finite everywhere (a query without keys has `HIDDEN`), so there is no need of logaddexp's case for infinities.
    return a + (b - a) * share, jnp.maximum(of_a, of_b) + jnp.log1p(jnp.exp(-jnp.abs(of_a - of_b)))


def with_sinks(seen: Seen, sinks: jax.Array) -> Seen:
    """With one more key, of value zero, whose score is the sink (float32, broadcast over the log-sum-exp)."""
    mean, total = seen
    both = jnp.logaddexp(total, jnp.broadcast_to(sinks.astype(jnp.float32), total.shape))
    return mean * jnp.exp(total - both)[..., None], both
