"""Grouped-query self-attention with rotary positions (Ainslie et al., arXiv:2305.13245)."""

import math
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.attention.backends import attend, choose_backend
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.linear import Linear
from levanter.layers.norm import RMSNorm
from levanter.layers.rotary import apply_rotary
from levanter.layers.saved import saved

KERNEL_PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}
"""A config that names a kernel was made for its platform (see `LmConfig.for_platform`)."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a self-attention layer is, as a value.

    Attributes:
        Embed: axis of the residual stream.
        KVHead: axis of heads with keys and values of their own.
        QHeadsPerGroup: axis of query heads sharing one of them.
        HeadSize: axis of one head's features.
        use_bias: biases in all four projections.
        norm_eps: epsilon of the norms on queries and keys; None for no such norms.
        norm_weight: whether those norms have weights.
        backend: requested backend; None chooses by length.
        block_size: keys in a block of the blockwise backend, positions in a block of splash.
        upcast: compute attention in float32.
        scale: initial standard deviation of the weights.
    """

    Embed: Axis
    KVHead: Axis
    QHeadsPerGroup: Axis
    HeadSize: Axis
    use_bias: bool = False
    norm_eps: float | None = None
    norm_weight: bool = True
    backend: str | None = None
    block_size: int | None = None
    upcast: bool = False
    scale: float = 0.02


class GroupedQueryAttention(eqx.Module):
    """Self-attention. Constraint points: queries, keys and values after their projections.

    Every projection keeps the head axes apart, the output projection included, so one mapping shards all four.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    spec: AttentionSpec = eqx.field(static=True)

    @staticmethod
    def init(spec: AttentionSpec, *, key: jax.Array) -> "GroupedQueryAttention":
        """Freshly initialized projections, and norms if the spec has them."""
        embed, kv = (spec.Embed,), (spec.KVHead, spec.HeadSize)
        heads = (spec.KVHead, spec.QHeadsPerGroup, spec.HeadSize)
        keys = jax.random.split(key, 4)

        def project(n: int, In: tuple[Axis, ...], Out: tuple[Axis, ...]) -> Linear:
            return Linear.init(In, Out, scale=spec.scale, use_bias=spec.use_bias, key=keys[n])

        def norm() -> RMSNorm | None:
            if spec.norm_eps is None:
                return None
            return RMSNorm.init(spec.HeadSize, eps=spec.norm_eps, use_weight=spec.norm_weight)

        return GroupedQueryAttention(
            q_proj=project(0, embed, heads),
            k_proj=project(1, embed, kv),
            v_proj=project(2, embed, kv),
            o_proj=project(3, heads, embed),
            q_norm=norm(),
            k_norm=norm(),
            spec=spec,
        )

    def __call__(self, x: NamedArray, mask: AttentionMask, cos: NamedArray, sin: NamedArray) -> NamedArray:
        """Attends within `x`.

        Args:
            x: `[…, position, embed]`.
            mask: which positions see which.
            cos: from `RotaryConfig.tables`.
            sin: from `RotaryConfig.tables`.
        """
        spec = self.spec

        def projected(name: str) -> NamedArray:
            with jax.named_scope(name):
                return hax.auto_sharded(getattr(self, name)(x))

        q, k, v = projected("q_proj"), projected("k_proj"), projected("v_proj")
        if self.q_norm is not None and self.k_norm is not None:
            with jax.named_scope("qk_norm"):
                q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            q, k = apply_rotary(q, cos, sin, spec.HeadSize), apply_rotary(k, cos, sin, spec.HeadSize)
        q, k, v = saved(q, "query"), saved(k, "key"), saved(v, "value")
        k, v = (hax.auto_sharded(y.rename({"position": "key_position"})) for y in (k, v))
        if spec.upcast:
            q, k, v = (y.astype(jnp.float32) for y in (q, k, v))
        choice = choose_backend(
            spec.backend,
            platform=KERNEL_PLATFORMS.get(spec.backend or ""),
            dtype=q.dtype,
            length=k.resolve_axis("key_position").size,
            block_size=spec.block_size,
        )
        with jax.named_scope("attention"):
            mixed = attend(q, k, v, mask, scale=1 / math.sqrt(spec.HeadSize.size), choice=choice)
            mixed = hax.auto_sharded(mixed.astype(x.dtype))
            # The kernel names its own output, together with what its backward pass needs beside it.
            mixed = mixed if choice.name == "splash" else saved(mixed, "attention")
        with jax.named_scope("o_proj"):
            return saved(self.o_proj(mixed), "attention_output")
