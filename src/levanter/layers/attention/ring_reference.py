"""`RingStep` by the attention formula, a block of keys at a time; for every platform."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import levanter.layers.attention.lse_merge as lse_merge
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.ring import Arrays, VisibleKeys


@dataclass(frozen=True, kw_only=True)
class ReferenceRingStep:
    """The formula and its gradient.

    Attributes:
        soft_cap: bound of the scores; None for none.
        block: keys whose scores are materialized at a time; None for all of a hop. Reduced to the next divisor of the
            number of keys.
    """

    soft_cap: float | None = None
    block: int | None = None

    def forward(
        self,
        visible_keys: VisibleKeys,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        begins: Arrays,
        segments: Arrays | None,
    ) -> lse_merge.PartialAttention:
        """See `RingStep`."""

        def step(
            seen: lse_merge.PartialAttention, of_block: tuple[Arrays, jax.Array]
        ) -> tuple[lse_merge.PartialAttention, None]:
            (k, v), visible = of_block
            return lse_merge.merged(seen, self._forward(q, k, v, visible)), None

        # Each block contributes a partial attention; the state of the scan is their merge so far.
        keys, visible = self._blocks((k, v), _visible(visible_keys, q, k, begins, segments))
        seen, _ = jax.lax.scan(step, lse_merge.no_keys(q.shape), (keys, visible))
        return seen

    def backward(
        self,
        visible_keys: VisibleKeys,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        residuals: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `RingStep`."""
        q, k, v = inputs

        def step(of_q: jax.Array, of_block: tuple[Arrays, jax.Array]) -> tuple[jax.Array, Arrays]:
            (k, v), visible = of_block
            dq, dk, dv = self._backward((q, k, v), residuals, visible)
            return of_q + dq, (dk, dv)

        keys, visible = self._blocks((k, v), _visible(visible_keys, q, k, begins, segments))
        # The scan sums the query gradients over the blocks and stacks the key and value gradients of each.
        of_q, of_keys = jax.lax.scan(step, jnp.zeros(q.shape, jnp.float32), (keys, visible))
        # `[blocks, rows, kv_head, block, head_size]`: move the blocks next to the positions of a block and join them.
        of_k, of_v = (jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in of_keys)
        return of_q, of_k, of_v

    def _forward(self, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> lse_merge.PartialAttention:
        scores = jnp.where(visible, self._scores(q, k), HIDDEN)
        top = jnp.max(scores, axis=-1, keepdims=True)
        # Without a visible key top is HIDDEN and exp is 1, hence the mask; the result is then 0 with lse HIDDEN.
        weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # The smallest normal number keeps the division and the logarithm finite in rows where `total` is 0.
        tiny = float(jnp.finfo(jnp.float32).tiny)
        mixed = jnp.einsum("bhgqk,bhkd->bhgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        seen = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, tiny)), HIDDEN)
        return mixed / jnp.maximum(total, tiny), seen[..., 0]

    def _backward(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array],
        residuals: tuple[jax.Array, jax.Array, jax.Array],
        visible: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = inputs
        delta, total, of_out = residuals
        scores = self._scores(q, k)
        # Weights by the global log-sum-exp `total`, so each block's gradient is that of the whole softmax.
        weights = jnp.where(visible, jnp.exp(scores - total[..., None]), 0.0)
        of_weights = jnp.einsum("bhgqd,bhkd->bhgqk", of_out, v, preferred_element_type=jnp.float32)
        # Softmax: ∂scores = p · (∂p − Σ_k p ∂p), and delta is that sum.
        of_scores = weights * (of_weights - delta[..., None])
        if self.soft_cap is not None:
            # d/dx [c · tanh(x / c)] = 1 − tanh²(x / c), and `scores` are already capped.
            of_scores = of_scores * (1 - jnp.square(scores / self.soft_cap))
        # Rounded to the inputs' dtype as operands of the products, which accumulate in float32.
        narrow, weights = of_scores.astype(q.dtype), weights.astype(of_out.dtype)
        of_q = jnp.einsum("bhgqk,bhkd->bhgqd", narrow, k, preferred_element_type=jnp.float32)
        of_k = jnp.einsum("bhgqk,bhgqd->bhkd", narrow, q, preferred_element_type=jnp.float32)
        of_v = jnp.einsum("bhgqk,bhgqd->bhkd", weights, of_out, preferred_element_type=jnp.float32)
        return of_q, of_k, of_v

    def _scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=jnp.float32)
        return scores if self.soft_cap is None else jnp.tanh(scores / self.soft_cap) * self.soft_cap

    def _blocks(self, keys: tuple[jax.Array, jax.Array], visible: jax.Array) -> tuple[Arrays, jax.Array]:
        """Keys and their visibility, split into blocks along a new first axis."""
        length = keys[0].shape[2]
        block_limit = min(self.block or length, length)
        # The largest divisor of the number of keys within the limit: a scan needs blocks of equal length.
        block = next(size for size in range(block_limit, 0, -1) if length % size == 0)

        def cut(x: jax.Array, axis: int) -> jax.Array:
            shape = (*x.shape[:axis], length // block, block, *x.shape[axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), axis, 0)

        return tuple(cut(x, 2) for x in keys), cut(visible, visible.ndim - 1)


def _visible(
    visible_keys: VisibleKeys, q: jax.Array, k: jax.Array, begins: Arrays, segments: Arrays | None
) -> jax.Array:
    """The mask of queries and keys, `[rows or 1, 1, 1, position, key_position]`."""
    queries, keys = (_positions(first, x.shape[-2]) for first, x in zip(begins, (q, k), strict=True))
    distance = queries[:, None] - keys[None, :]
    visible = jnp.ones(distance.shape, bool)
    if visible_keys.is_causal:
        visible &= distance >= 0
    if visible_keys.window is not None:
        visible &= distance < visible_keys.window
    # `[rows, kv_head, group, position, key_position]` with one entry on the first three axes; segments differ by row.
    visible = visible[None, None, None]
    if segments is None:
        return visible
    query_segments, key_segments = segments
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return jnp.broadcast_to(visible, (query_segments.shape[0], *visible.shape[1:])) & same[:, None, None]


def _positions(begins: jax.Array, length: int) -> jax.Array:
    # The runs of a device are adjacent in its shard: position of run r, entry i is `begins[r] + i`.
    run = length // begins.shape[0]
    return (begins[:, None] + jnp.arange(run, dtype=jnp.int32)[None]).reshape(length)
