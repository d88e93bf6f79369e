"""The Llama transformer on named axes (Touvron et al., arXiv:2302.13971; Llama 3, arXiv:2407.21783).

Pre-norm blocks of grouped-query attention and a gated MLP around a residual stream. Constraint points, where an
activation is pinned to the mesh by its names: the embedded tokens; queries, keys and values; gate and up; attention's
output before its projection; the final activations (all by the compute mapping); and the residual stream at every block
boundary (by the residual mapping).

Each part runs in a `jax.named_scope` of its attribute's name, so that compilers and profilers, and the figures of a
compiled Program, speak of `layers.self_attn.q_proj` and `lm_head`.
"""

import contextlib

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, Stacked

from haliax_ext.mapping import shard_residual
from levanter.layers.attention import AttentionMask, GroupedQueryAttention
from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.mlp import GatedMlp
from levanter.layers.norm import RMSNorm
from levanter.models.base import LmHeadModel
from levanter.models.llama.config import LlamaConfig
from levanter.models.stack import stack_of


def attention_spec(config: LlamaConfig) -> AttentionSpec:
    """The attention layer that a config describes."""
    return AttentionSpec(
        Embed=config.Embed,
        KVHead=config.KVHead,
        QHeadsPerGroup=config.QHeadsPerGroup,
        HeadSize=config.HeadSize,
        use_bias=config.has_attention_bias,
        norm_eps=config.layer_norm_epsilon if config.use_qk_norm else None,
        norm_weight=config.use_layer_norm_weight,
        backend=config.requested_backend,
        block_size=config.flash_attention_block_size,
        upcast=config.upcast_attn,
        scale=config.initializer_range,
    )


def _norm(config: LlamaConfig) -> RMSNorm:
    return RMSNorm.init(config.Embed, eps=config.layer_norm_epsilon, use_weight=config.use_layer_norm_weight)


class LlamaBlock(eqx.Module):
    """One layer. The two outer norms exist with `hybrid_norm` only."""

    self_attn: GroupedQueryAttention
    mlp: GatedMlp
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    post_attn_layernorm: RMSNorm | None
    post_mlp_layernorm: RMSNorm | None

    @staticmethod
    def init(config: LlamaConfig, *, key: jax.Array) -> "LlamaBlock":
        """A freshly initialized layer."""
        attention_key, mlp_key = jax.random.split(key)
        return LlamaBlock(
            self_attn=GroupedQueryAttention.init(attention_spec(config), key=attention_key),
            mlp=GatedMlp.init(
                config.Embed,
                config.Mlp,
                activation=config.activation_function,
                scale=config.initializer_range,
                use_bias=config.has_mlp_bias,
                key=mlp_key,
            ),
            input_layernorm=_norm(config),
            post_attention_layernorm=_norm(config),
            post_attn_layernorm=_norm(config) if config.hybrid_norm else None,
            post_mlp_layernorm=_norm(config) if config.hybrid_norm else None,
        )

    def __call__(self, x: NamedArray, mask: AttentionMask, cos: NamedArray, sin: NamedArray) -> NamedArray:
        """Maps the residual stream `[…, position, embed]` to itself."""

        def norm(name: str, y: NamedArray) -> NamedArray:
            module = getattr(self, name)
            with jax.named_scope(name):
                return y if module is None else module(y)

        normed = norm("input_layernorm", x)
        with jax.named_scope("self_attn"):
            attended = self.self_attn(normed, mask, cos, sin)
        attended = norm("post_attn_layernorm", attended)
        x = shard_residual(x + attended.rearrange(x.axes))
        normed = norm("post_attention_layernorm", x)
        with jax.named_scope("mlp"):
            fed = self.mlp(normed)
        fed = norm("post_mlp_layernorm", fed)
        return shard_residual(x + fed.rearrange(x.axes))


class LlamaTransformer(eqx.Module):
    """The stack of blocks and the final norm."""

    layers: Stacked[LlamaBlock] | BlockSeq[LlamaBlock]
    norm: RMSNorm
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, *, key: jax.Array) -> "LlamaTransformer":
        """A freshly initialized stack."""
        build = stack_of(
            config.Layers,
            LlamaBlock,
            scan=config.scan_layers,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        layers = build(config, key=jax.random.split(key, config.num_layers))
        return LlamaTransformer(layers=layers, norm=_norm(config), config=config)

    def __call__(self, x: NamedArray, mask: AttentionMask, positions: NamedArray | None) -> NamedArray:
        """Maps embedded tokens to the activations that the head reads.

        Args:
            x: `[…, position, embed]`.
            mask: which positions see which.
            positions: the position of each token, where it is not its index.
        """
        Pos = x.resolve_axis("position")
        index = hax.arange(Pos) if positions is None else positions
        with jax.named_scope("rope"):
            cos, sin = self.config.rope.tables(self.config.HeadSize, index, length=Pos.size)
        # A scan is named after its axis; unrolled blocks are given the same name.
        unrolled = isinstance(self.layers, BlockSeq)
        with jax.named_scope("layers") if unrolled else contextlib.nullcontext():
            x = self.layers.fold(shard_residual(x), mask, cos, sin)
        with jax.named_scope("norm"):
            return hax.auto_sharded(self.norm(x))


class LlamaEmbedding(eqx.Module):
    """The token table, and its norm with `input_embedding_norm`."""

    token_embeddings: Embedding
    norm: RMSNorm | None

    @staticmethod
    def init(Vocab: Axis, config: LlamaConfig, *, key: jax.Array) -> "LlamaEmbedding":
        """A freshly initialized table."""
        return LlamaEmbedding(
            token_embeddings=Embedding.init(Vocab, config.Embed, scale=config.initializer_range, key=key),
            norm=_norm(config) if config.input_embedding_norm else None,
        )

    def __call__(self, ids: NamedArray) -> NamedArray:
        """Embeds token ids."""
        with jax.named_scope("embeddings"):
            x = self.token_embeddings(ids)
            return x if self.norm is None else self.norm(x)


class LlamaLMHeadModel(LmHeadModel):
    """Llama with its output head: of its own, or the embedding table's when tied."""

    embeddings: LlamaEmbedding
    transformer: LlamaTransformer
    lm_head: Linear | None
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(Vocab: Axis, config: LlamaConfig, *, key: jax.Array) -> "LlamaLMHeadModel":
        """A freshly initialized model; call it inside `jit` or `eval_shape`.

        Args:
            Vocab: the axis `vocab`.
            config: the architecture.
            key: of the random weights.
        """
        assert Vocab.name == "vocab", f"the vocabulary's axis is called vocab, not {Vocab.name}"
        table, body, head = jax.random.split(key, 3)
        lm_head = None
        if not config.tie_word_embeddings:
            scale = config.initializer_range
            lm_head = Linear.init((config.Embed,), (Vocab,), scale=scale, use_bias=False, key=head)
        return LlamaLMHeadModel(
            embeddings=LlamaEmbedding.init(Vocab, config, key=table),
            transformer=LlamaTransformer.init(config, key=body),
            lm_head=lm_head,
            config=config,
        )

    def __call__(
        self,
        input_ids: NamedArray,
        *,
        segment_ids: NamedArray | None = None,
        attn_mask: AttentionMask | None = None,
        positions: NamedArray | None = None,
    ) -> NamedArray:
        mask = AttentionMask.causal() if attn_mask is None else attn_mask
        if segment_ids is not None:
            mask = mask.with_segment_ids(segment_ids)
        return self.transformer(self.embeddings(input_ids), mask, positions)

    def head_weight(self) -> NamedArray:
        return self.embeddings.token_embeddings.weight if self.lm_head is None else self.lm_head.weight
