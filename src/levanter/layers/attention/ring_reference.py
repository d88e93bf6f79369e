"""A ring's passes by the formula, a block of keys at a time; for every platform (`ring.Pass`)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from levanter.layers.attention import lse_merge
from levanter.layers.attention.reference import HIDDEN
from levanter.layers.attention.ring import Arrays, VisibleKeys


@dataclass(frozen=True, kw_only=True)
class PlainPasses:
    """The formula and its gradient.

    Attributes:
        soft_cap: bound of the scores; None for none.
        block: keys whose scores exist at a time; None for all that are there. Where it does not divide them, the
            largest that does.
    """

    soft_cap: float | None = None
    block: int | None = None

    def forward(
        self, sight: VisibleKeys, q: jax.Array, k: jax.Array, v: jax.Array, begins: Arrays, segments: Arrays | None
    ) -> lse_merge.Seen:
        """See `Pass`."""

        def further(seen: lse_merge.Seen, of_block: tuple[Arrays, jax.Array]) -> tuple[lse_merge.Seen, None]:
            (k, v), visible = of_block
            return lse_merge.merged(seen, self._forward(q, k, v, visible)), None

        keys, visible = self._blocks((k, v), _visible(sight, q, k, begins, segments))
        seen, _ = jax.lax.scan(further, lse_merge.nothing(q.shape), (keys, visible))
        return seen

    def backward(
        self,
        sight: VisibleKeys,
        given: tuple[jax.Array, jax.Array, jax.Array],
        found: tuple[jax.Array, jax.Array, jax.Array],
        begins: Arrays,
        segments: Arrays | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Pass`."""
        q, k, v = given

        def further(of_q: jax.Array, of_block: tuple[Arrays, jax.Array]) -> tuple[jax.Array, Arrays]:
            (k, v), visible = of_block
            dq, dk, dv = self._backward((q, k, v), found, visible)
            return of_q + dq, (dk, dv)

        keys, visible = self._blocks((k, v), _visible(sight, q, k, begins, segments))
        of_q, of_keys = jax.lax.scan(further, jnp.zeros(q.shape, jnp.float32), (keys, visible))
        of_k, of_v = (jnp.moveaxis(x, 0, 2).reshape(k.shape) for x in of_keys)
        return of_q, of_k, of_v

    def _forward(self, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> lse_merge.Seen:
        scores = jnp.where(visible, self._scores(q, k), HIDDEN)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        tiny = float(jnp.finfo(jnp.float32).tiny)
        mixed = jnp.einsum("bhgqk,bhkd->bhgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        seen = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, tiny)), HIDDEN)
        return mixed / jnp.maximum(total, tiny), seen[..., 0]

    def _backward(
        self,
        given: tuple[jax.Array, jax.Array, jax.Array],
        found: tuple[jax.Array, jax.Array, jax.Array],
        visible: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = given
        delta, total, of_out = found
        scores = self._scores(q, k)
        weights = jnp.where(visible, jnp.exp(scores - total[..., None]), 0.0)
        of_weights = jnp.einsum("bhgqd,bhkd->bhgqk", of_out, v, preferred_element_type=jnp.float32)
        of_scores = weights * (of_weights - delta[..., None])
        if self.soft_cap is not None:
            of_scores = of_scores * (1 - jnp.square(scores / self.soft_cap))
        narrow, weights = of_scores.astype(q.dtype), weights.astype(of_out.dtype)
        of_q = jnp.einsum("bhgqk,bhkd->bhgqd", narrow, k, preferred_element_type=jnp.float32)
        of_k = jnp.einsum("bhgqk,bhgqd->bhkd", narrow, q, preferred_element_type=jnp.float32)
        of_v = jnp.einsum("bhgqk,bhgqd->bhkd", weights, of_out, preferred_element_type=jnp.float32)
        return of_q, of_k, of_v

    def _scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=jnp.float32)
        return scores if self.soft_cap is None else jnp.tanh(scores / self.soft_cap) * self.soft_cap

    def _blocks(self, keys: tuple[jax.Array, jax.Array], visible: jax.Array) -> tuple[Arrays, jax.Array]:
        """Keys and what is visible of them, blocks first."""
        length = keys[0].shape[2]
        wanted = min(self.block or length, length)
        block = next(size for size in range(wanted, 0, -1) if length % size == 0)

        def cut(x: jax.Array, axis: int) -> jax.Array:
            shape = (*x.shape[:axis], length // block, block, *x.shape[axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), axis, 0)

        return tuple(cut(x, 2) for x in keys), cut(visible, visible.ndim - 1)


def _visible(sight: VisibleKeys, q: jax.Array, k: jax.Array, begins: Arrays, segments: Arrays | None) -> jax.Array:
    """Which keys each query sees, `[rows or 1, 1, 1, position, key_position]`."""
    queries, keys = (_positions(first, x.shape[-2]) for first, x in zip(begins, (q, k), strict=True))
    distance = queries[:, None] - keys[None, :]
    visible = jnp.ones(distance.shape, bool)
    if sight.is_causal:
        visible &= distance >= 0
    if sight.window is not None:
        visible &= distance < sight.window
    visible = visible[None, None, None]
    if segments is None:
        return visible
    own, theirs = segments
    same = own[:, :, None] == theirs[:, None, :]
    return jnp.broadcast_to(visible, (own.shape[0], *visible.shape[1:])) & same[:, None, None]


def _positions(begins: jax.Array, length: int) -> jax.Array:
    run = length // begins.shape[0]
    return (begins[:, None] + jnp.arange(run, dtype=jnp.int32)[None]).reshape(length)
