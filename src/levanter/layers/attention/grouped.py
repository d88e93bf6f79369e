"""Grouped-query self-attention with rotary position embeddings (Ainslie et al., arXiv:2305.13245).

`AttentionSpec` holds what model families vary: biases, norms on queries and keys, the scale and the bound of the
scores, sinks, the window, the rotary table. All of it is static, so each kind of layer is compiled separately.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from haliax_ext.mapping import in_one_mapping, inside_attention, shard_attention
from levanter.layers.attention.backends import (
    BackendChoice,
    accepts_sharded_keys,
    attend,
    default_backend,
    has_checkpoint_name,
)
from levanter.layers.attention.kv_cache import NewPositions, attend_cached, kv_leaves
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.context import ForwardContext
from levanter.layers.decode_state import LayerState, Leaves
from levanter.layers.embedding import ValueEmbedding, ValueEmbeddingSpec
from levanter.layers.linear import Linear
from levanter.layers.norm import Norm, NormSpec
from levanter.layers.param_roles import role
from levanter.layers.protocols import Shapes
from levanter.layers.remat_names import saved
from levanter.layers.rotary import apply_rotary


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The configuration of a self-attention layer.

    Attributes:
        Embed: axis of the residual stream.
        KVHead: axis of key/value heads.
        QHeadsPerGroup: axis of the query heads that share a key/value head.
        HeadSize: axis of one head's features.
        qkv_bias: biases of queries, keys and values.
        out_bias: bias of the output projection.
        norm: the norms on queries and keys; None for none.
        normed: the axes of such a norm: each head separately, or all heads of a token together.
        norm_after_rotary: whether these norms come after the rotation (nanochat) or before it.
        softmax_scale: multiplies the scores; None for 1/√head_size.
        soft_cap: bound of the scores; None for none.
        sinks: whether each head has a sink: a learned score that takes part in the softmax and has no value.
        window: how many keys a query sees, itself included; None for all before it.
        rope: name of the rotary table that rotates queries and keys; None for no rotation (NoPE).
        value_embedding: rows of a table that are added to the values by token id; None for none.
        backend: the backend; None for `default_backend`.
        block_size: keys in a block of the default's blockwise backend.
        upcast: compute attention in float32.
        init_std: initial standard deviation of the weights.
    """

    Embed: Axis
    KVHead: Axis
    QHeadsPerGroup: Axis
    HeadSize: Axis
    qkv_bias: bool = False
    out_bias: bool = False
    norm: NormSpec | None = None
    normed: Literal["head", "all heads"] = "head"
    norm_after_rotary: bool = False
    softmax_scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    window: int | None = None
    rope: str | None = "rope"
    value_embedding: ValueEmbeddingSpec | None = None
    backend: BackendChoice | None = None
    block_size: int | None = None
    upcast: bool = False
    init_std: float = 0.02

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token."""
        kv = self.KVHead.size * self.HeadSize.size
        # Query and output projections have embed × heads weights, key and value projections embed × kv_heads each.
        gate = 0 if self.value_embedding is None else self.value_embedding.gate_channels * self.KVHead.size
        return 2 * self.Embed.size * kv * (self.QHeadsPerGroup.size + 1) + gate

    @property
    def query_features(self) -> int:
        """Features of all query heads."""
        return self.KVHead.size * self.QHeadsPerGroup.size * self.HeadSize.size

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:
        """FLOPs of the products of queries with keys and of weights with values."""
        # 2 FLOPs each for q · k and for weight · v, for each query feature and each visible key.
        return 4 * self.query_features * attended_pairs(length, window=self.window, attention=attention)

    @property
    def attribute(self) -> str:
        """See `Mixer`."""
        return "self_attn"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its weights."""
        values = self.value_embedding
        more = () if values is None else (values.Row, values.Channel)
        return (self.Embed, self.KVHead, self.QHeadsPerGroup, self.HeadSize, *more)

    @property
    def any_order(self) -> bool:
        """Whether positions may lie in any order: the mask and the rotary tables say where each is."""
        return True

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """Heads: those with keys and values of their own first, then the query heads that share one."""
        return ((self.KVHead.name, self.QHeadsPerGroup.name),)

    @property
    def activations(self) -> Shapes:
        """The activations it constrains: queries, and keys and values."""
        query, key = (self.KVHead, self.QHeadsPerGroup, self.HeadSize), (self.KVHead, self.HeadSize)
        return {"queries": query, "keys and values": key}

    @property
    def saved(self) -> Shapes:
        """The activations it names for gradient checkpointing; see `layers.remat_names`."""
        query, key = self.activations.values()
        return {"query": query, "key": key, "value": key, "attention": query, "attention_output": (self.Embed,)}

    def decode_state(self, dtype: DTypeLike) -> Leaves:
        """Keys and values of all positions so far."""
        return kv_leaves(dtype, KVHead=self.KVHead, HeadSize=self.HeadSize)

    def with_cache_indices(self, new: NewPositions, arrays: Mapping[str, NamedArray]) -> NewPositions:
        """The new positions with their places in the cache of its layers; see `IndexesPages`."""
        # Layers with equally many heads share the indices.
        known = new.known_indices(arrays["pages"])
        return new if known else new.with_cache_indices(arrays["pages"], arrays.get("scales"))

    def init(self, *, key: jax.Array) -> "GroupedQueryAttention":
        """Freshly initialized attention."""
        return GroupedQueryAttention.init(self, key=key)


def attended_pairs(length: int, *, window: int | None, attention: Literal["causal", "full"]) -> int:
    """The pairs of a query and a key that attention over one sequence counts.

    Args:
        length: tokens in the sequence.
        window: keys that a query sees at most, itself included; None for no bound.
        attention: `full` counts `length` keys a query (at most the window); `causal` those that the mask shows.
    """
    reach = length if window is None else min(window, length)
    if attention == "full":
        return length * reach
    # The first `reach` queries see 1, 2, …, reach keys, the other length − reach see `reach` each.
    return reach * (reach + 1) // 2 + (length - reach) * reach


class GroupedQueryAttention(eqx.Module):
    """Self-attention. Constraint points: queries, keys and values after their projections.

    Every projection keeps the head axes apart, the output projection included, so one mapping shards all four.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: NamedArray | None = eqx.field(metadata=role("sink"))
    value_embedding: ValueEmbedding | None
    spec: AttentionSpec = eqx.field(static=True)

    @staticmethod
    def init(spec: AttentionSpec, *, key: jax.Array) -> "GroupedQueryAttention":
        """Freshly initialized projections, and norms if the spec has them."""
        embed, kv = (spec.Embed,), (spec.KVHead, spec.HeadSize)
        heads = (spec.KVHead, spec.QHeadsPerGroup, spec.HeadSize)
        keys = jax.random.split(key, 4)

        def project(n: int, In: tuple[Axis, ...], Out: tuple[Axis, ...]) -> Linear:
            use_bias = spec.out_bias if Out == embed else spec.qkv_bias
            return Linear.init(In, Out, scale=spec.init_std, use_bias=use_bias, key=keys[n])

        def norm(together: tuple[Axis, ...]) -> Norm | None:
            if spec.norm is None:
                return None
            # A norm per head has weights over `head_size` alone; one over all heads of a token has weights over the
            # heads as well (Olmo 2).
            return spec.norm.init(spec.HeadSize if spec.normed == "head" else together)

        return GroupedQueryAttention(
            q_proj=project(0, embed, heads),
            k_proj=project(1, embed, kv),
            v_proj=project(2, embed, kv),
            o_proj=project(3, heads, embed),
            q_norm=norm(heads),
            k_norm=norm(kv),
            sinks=(
                hax.random.normal(jax.random.fold_in(key, 4), heads[:2], dtype=jnp.float32) * spec.init_std
                if spec.sinks
                else None
            ),
            value_embedding=(
                None if spec.value_embedding is None else spec.value_embedding.init(*kv, key=jax.random.fold_in(key, 5))
            ),
            spec=spec,
        )

    def __call__(
        self, x: NamedArray, context: ForwardContext, state: LayerState | None = None
    ) -> tuple[NamedArray, LayerState | None]:
        """Attends within `x`, or to the positions of a cache and to `x`.

        Args:
            x: `[…, position, embed]`.
            context: the mask, which the window of the spec narrows, and the rotary tables.
            state: keys and values of previous positions; None for attention within `x`.

        Returns:
            `[…, position, embed]`, and the new state.
        """
        spec, mask = self.spec, context.mask
        if spec.window is not None:
            # The caller's mask may have a window too; the conjunction keeps the narrower one.
            mask = mask & AttentionMask(sliding_window=spec.window)

        def projected(name: str) -> NamedArray:
            with jax.named_scope(name):
                return hax.auto_sharded(getattr(self, name)(x))

        q, k, v = projected("q_proj"), projected("k_proj"), projected("v_proj")
        if self.value_embedding is not None:
            v = self.value_embedding(v, x, context)
        if not spec.norm_after_rotary:
            q, k = self._normed(q, k)
        if spec.rope is not None:
            with jax.named_scope("rope"):
                q, k = (apply_rotary(y, *context.tables[spec.rope], spec.HeadSize) for y in (q, k))
                if not in_one_mapping():
                    # Constrain here: otherwise XLA reshards the input and both rotated halves instead of their sum.
                    q, k = hax.auto_sharded(q), hax.auto_sharded(k)
        if spec.norm_after_rotary:
            q, k = self._normed(q, k)
        q, k, v = saved(q, "query"), saved(k, "key"), saved(v, "value")
        # Families whose checkpoints need it (GPT-2 with `reorder_and_upcast_attn`) attend in float32 throughout.
        dtype = jnp.dtype(jnp.float32) if spec.upcast else q.dtype
        scale = 1 / math.sqrt(spec.HeadSize.size) if spec.softmax_scale is None else spec.softmax_scale
        options = {"softmax_scale": scale, "soft_cap": spec.soft_cap, "sinks": self.sinks}
        if state is not None:
            assert context.new is not None, "a cache without the positions of the new tokens"
            # New keys stay over `position`: they become keys of all positions once they are in the cache.
            with jax.named_scope("attention"):
                mixed, state = attend_cached(q, k, v, state, context.new, mask=mask, dtype=dtype, **options)
            with jax.named_scope("o_proj"):
                return self.o_proj(hax.auto_sharded(mixed)), state
        choice = spec.backend or default_backend(k.axis_size("position"), block_size=spec.block_size)
        attend_gathers_keys = accepts_sharded_keys(choice, mask, keys=k.axis_size("position"))

        # `key_position` has a mapping of its own. Where it is not sharded, the constraint after the renaming gathers
        # the keys.
        def as_keys(y: NamedArray) -> NamedArray:
            if attend_gathers_keys:  # Sharded like the queries; `attend` gathers.
                return shard_attention(y).rename({"position": "key_position"})
            return shard_attention(y.rename({"position": "key_position"}))

        k, v = as_keys(k), as_keys(v)
        # After that constraint: an upcast before it would double the bytes that it moves.
        q, k, v = (y.astype(dtype) for y in (q, k, v))
        with jax.named_scope("attention"):
            with inside_attention():
                q = q if in_one_mapping() else shard_attention(q)
                mixed, named = attend(q, k, v, mask, choice=choice, **options), has_checkpoint_name(choice)
                # The constraint holds for the gradient as well: it is resharded before the backward products.
                mixed = mixed if in_one_mapping() else shard_attention(mixed)
            mixed = hax.auto_sharded(mixed.astype(x.dtype))
            # Kernels and rings have named their output already, together with the log-sum-exp.
            mixed = mixed if named else saved(mixed, "attention")
        # The projection contracts the head axes; where these are sharded, the sum over devices happens here.
        with jax.named_scope("o_proj"):
            return saved(self.o_proj(mixed), "attention_output"), state

    def _normed(self, q: NamedArray, k: NamedArray) -> tuple[NamedArray, NamedArray]:
        """Queries and keys behind their norms, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        with jax.named_scope("qk_norm"):
            return self.q_norm(q), self.k_norm(k)
