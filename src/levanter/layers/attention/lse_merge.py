"""Merges attention over two sets of keys into attention over their union, by log-sum-exp.

Attention over a set of keys is a weighted mean of their values and the log-sum-exp of the scores. Two such results are
merged by weighting the means with the exponentiated log-sum-exps (Milakov and Gimelshein, arXiv:1805.02867), in float32
regardless of the dtype of the products.
"""

import jax
import jax.numpy as jnp

from levanter.layers.attention.reference import HIDDEN

PartialAttention = tuple[jax.Array, jax.Array]
"""The mean, float32 `[…, position, head_size]`, and the log-sum-exp of the scores, float32 `[…, position]`."""


def no_keys(shape: tuple[int, ...]) -> PartialAttention:
    """Attention over the empty set of keys.

    Args:
        shape: of the mean, `[…, position, head_size]`.
    """
    return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], HIDDEN, jnp.float32)


def merged(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Attention over the union of two disjoint sets of keys.

    The two weights add up to one, so only one of them is broadcast over `head_size`: on a TPU the broadcast takes
    longer than the products.
    """
    (a, of_a), (b, of_b) = one, other
    # share = exp(of_b) / (exp(of_a) + exp(of_b)), the weight of b, as a sigmoid, which cannot overflow. Of two empty
    # sets the means are zero, so the share does not matter; HIDDEN + log 2 rounds to HIDDEN.
    share = jax.nn.sigmoid(of_b - of_a)[..., None]
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # logaddexp without its case for infinities: both are finite, since a query without keys has `HIDDEN`.
    return a + (b - a) * share, jnp.maximum(of_a, of_b) + jnp.log1p(jnp.exp(-jnp.abs(of_a - of_b)))


def with_sinks(seen: PartialAttention, sinks: jax.Array) -> PartialAttention:
    """Adds one more key, with value zero, whose score is the sink (broadcast over the log-sum-exp)."""
    mean, total = seen
    # The values of the sink are zero, so the mean shrinks by the share of the other keys, exp(total − both).
    both = jnp.logaddexp(total, jnp.broadcast_to(sinks.astype(jnp.float32), total.shape))
    return mean * jnp.exp(total - both)[..., None], both
