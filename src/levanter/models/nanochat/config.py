"""`NanochatConfig`: the models of karpathy/nanochat (commit 92d63d4, July 2026), and its earlier forms as field values.

Differences from Llama: norms without weights, a norm on the embedded tokens, an MLP with squared ReLU and without a
gate, norms on queries and keys behind the rotation, which turns the other way, and a bound of the logits. Each layer
begins with `r·x + s·x0`, where x0 is what the first layer reads. Every second layer, the last one included, adds a row
of a table of its own to the values of each token. Below the first layer a part of the previous token's embedding is
added to each token (*smear*); before the final norm a part of the middle layer's output is subtracted (*backout*).

`NanochatConfig.for_depth(24)` is the model with 24 layers. `VARIANTS` has the fields of earlier forms:

    NanochatConfig.for_depth(24, **VARIANTS["october_2025"])
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from levanter.config.validators import FiniteFloat, PositiveFloat, PositiveInt
from levanter.layers.attention.grouped import AttentionSpec, attended_pairs
from levanter.layers.embedding import ValueEmbeddingSpec
from levanter.layers.embedding_residual import MIDDLE, X0, EmbeddingResidual
from levanter.layers.mlp import MlpSpec
from levanter.layers.norm import NormSpec
from levanter.layers.rotary import ClockwiseRotary, DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.pattern import FULL, SLIDING, PatternedConfig
from levanter.models.registry import LmConfig

HEAD_SIZE = 128
WIDTH_PER_LAYER = 64
"""`hidden_dim` of the miniseries, per layer, before it is rounded up to a multiple of the head size."""
TILE = 128
"""Short windows are rounded up to a multiple of this."""

PLAIN: Mapping[str, Any] = MappingProxyType(
    {
        "residual_scalars": False,
        "value_embeddings": False,
        "smear": False,
        "backout": None,
        "pattern": "L",
        "query_key_gain": 1.0,
    }
)
"""The fields of a model with plain residuals, full attention and no further tables: transformers' `NanoChat`."""

VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "today": MappingProxyType({}),
        "october_2025": MappingProxyType({**PLAIN, "rope": DefaultRotaryConfig(), "layer_norm_epsilon": 1e-6}),
        # apstenku123/nanochat: scalars that start as plain residuals, and windows of half of the sequence.
        "tpu_fork": MappingProxyType(
            {
                **PLAIN,
                "pattern": None,
                "window_divisor": 2,
                "residual_scalars": True,
                "initial_stream_scales": (1.0, 1.0),
                "initial_x0_scales": (0.0, 0.0),
                "rope": DefaultRotaryConfig(),
                "initializer_range": 1.0,
            }
        ),
    }
)
"""Name of a form of nanochat → the fields in which it differs from today's."""


@dataclass(frozen=True, kw_only=True)
class NanochatAttentionSpec(AttentionSpec):
    """Attention whose operations are counted as nanochat does: a window of W earlier keys counts W."""

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:
        # `causal` counts the pairs that the mask shows; only the convention of MFU is nanochat's.
        if attention == "causal" or self.window is None:
            return super().sequence_flops(length, attention=attention)
        return 4 * self.query_features * attended_pairs(length, window=self.window - 1, attention=attention)


@LmConfig.register_subclass("nanochat")
@dataclass(frozen=True, kw_only=True)
class NanochatConfig(PatternedConfig):
    """A nanochat.

    Attributes:
        pattern: S for layers with a short window and L for layers that see all earlier tokens, repeated; None is SSSL.
            The last layer always sees all.
        sliding_window: how many keys a query of an S layer sees, itself included; None for
            `⌈max_seq_len / window_divisor / 128⌉ · 128` earlier ones and itself.
        window_divisor: see `sliding_window`.
        rope: rotary embeddings; they turn by −θ.
        query_key_gain: factor of the normalized queries, and of the keys.
        residual_scalars: whether each layer begins with `r·x + s·x0`.
        initial_stream_scales: r of the first and of the last layer; linear in between.
        initial_x0_scales: s of the first and of the last layer.
        value_embeddings: whether every second layer, the last one included, has a value embedding.
        smear: whether a part of the previous token's embedding is added to each token.
        backout: the initial factor of the middle layer's output, which is subtracted at the end; None for no backout.
        final_logit_softcapping: bound of the logits; None for none.
        initializer_range: standard deviation of the token table; other weights have nanochat's own.
    """

    vocab_size: int | None = 32_768
    hidden_dim: int = 768
    intermediate_dim: int = 3072
    num_layers: int = 12
    num_heads: int = 6
    num_kv_heads: int = 6
    activation_function: str = "relu2"
    initializer_range: float = 0.8
    # torch's `rms_norm` adds the epsilon of float32.
    layer_norm_epsilon: float = 2.0**-23
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotaryConfig(theta=100_000.0))
    sliding_window: PositiveInt | None = None
    window_divisor: PositiveInt = 4
    query_key_gain: PositiveFloat = 1.2
    residual_scalars: bool = True
    initial_stream_scales: tuple[FiniteFloat, FiniteFloat] = (1.15, 1.05)
    initial_x0_scales: tuple[FiniteFloat, FiniteFloat] = (0.20, 0.05)
    value_embeddings: bool = True
    smear: bool = True
    backout: FiniteFloat | None = 0.2
    final_logit_softcapping: PositiveFloat | None = 15.0

    @classmethod
    def for_depth(cls, depth: int, **changes: object) -> "NanochatConfig":
        """The model of the miniseries with so many layers.

        Args:
            depth: number of layers.
            changes: other fields.

        >>> config = NanochatConfig.for_depth(26)
        >>> config.hidden_dim, config.num_heads
        (1664, 13)
        """
        width, heads = width_of_depth(depth)
        sizes = {"hidden_dim": width, "intermediate_dim": 4 * width, "num_heads": heads, "num_kv_heads": heads}
        fields: dict[str, Any] = {"num_layers": depth, **sizes, **changes}
        return cls(**fields)

    @property
    def kinds(self) -> Mapping[str, str]:
        return {"L": FULL, "S": SLIDING}

    def default_layer_type(self, layer: int) -> str:
        return FULL if layer % 4 == 3 else SLIDING

    def layer_type(self, layer: int) -> str:
        # The last layer sees all tokens whatever the pattern, but a list of types says what each layer is.
        # With windows in all layers, the output could not depend on the first tokens of a long text.
        is_last = layer == self.num_layers - 1 and self.layer_types is None
        return FULL if is_last else super().layer_type(layer)

    @property
    def short_window(self) -> int:
        """How many keys a query of an S layer sees, itself included."""
        if self.sliding_window is not None:
            return self.sliding_window
        # nanochat's kernel sees W tokens to the left and the token itself, so W = 512 is 513 keys; its own comment
        # about 2,048 tokens says 768, which its code does not compute.
        quarter = -(-self.max_seq_len // self.window_divisor)
        return -(-quarter // TILE) * TILE + 1

    def window(self, layer: int) -> int | None:
        return self.short_window if self.layer_type(layer) == SLIDING else None

    def has_value_embedding(self, layer: int) -> bool:
        """Whether a layer adds rows of a table to its values."""
        # Counted from the last layer, so that it always has a table.
        return self.value_embeddings and layer % 2 == (self.num_layers - 1) % 2

    @property
    def norm(self) -> NormSpec:
        return NormSpec(eps=self.layer_norm_epsilon, use_weight=False)

    @property
    def residual(self) -> EmbeddingResidual:
        return EmbeddingResidual(
            norm=self.norm, norms=self.norms, scalars=self.residual_scalars, smear=self.smear, backout=self.backout
        )

    @property
    def captures(self) -> Mapping[str, int]:
        # The stream before the first layer: a constant of all layers, outside of the scan's carry, which is saved once
        # for the backward pass.
        x0 = {X0: 0} if self.residual_scalars else {}
        # Behind the layer with the number ⌊n/2⌋, counted from 0; a model of one layer has no other.
        middle = {MIDDLE: min(self.num_layers // 2 + 1, self.num_layers)} if self.backout is not None else {}
        return {**x0, **middle}

    @property
    def reads_token_ids(self) -> bool:
        return self.value_embeddings

    @property
    def earlier_token_ids(self) -> int:
        # Smear reads the previous token's embedding, which its id determines.
        return max(super().earlier_token_ids, int(self.smear))

    @property
    def reads_earlier_embedding(self) -> bool:
        return self.smear

    @property
    def normed_embedding(self) -> bool:
        return True

    @property
    def logit_soft_cap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def rope_clockwise(self) -> RotaryConfig:
        """The rotary embeddings of all layers: `rope`, turning by −θ."""
        # A property, since YAML has no key for the direction: `rope:` configures everything else.
        return ClockwiseRotary(inner=self.rope)

    def rotary(self, layer: int) -> str | None:
        del layer
        return "rope_clockwise"

    @property
    def attention(self) -> AttentionSpec:
        # The gain multiplies queries and keys, so the scores by its square: the scale of the scores does the same.
        scale = self.query_key_gain**2 / self.HeadSize.size**0.5
        shared = dataclasses.replace(super().attention, norm=self.norm, norm_after_rotary=True, softmax_scale=scale)
        return NanochatAttentionSpec(**vars(shared))

    def layer_attention(self, layer: int) -> AttentionSpec:
        # Ids are below `vocab_size`: a table needs no rows that are added so that a mesh divides the vocabulary.
        # Without `vocab_size` the config is refused below; the sizes of its specs do not matter.
        table = ValueEmbeddingSpec(rows=self.vocab_size or 1) if self.has_value_embedding(layer) else None
        return dataclasses.replace(super().layer_attention(layer), value_embedding=table)

    @property
    def mlp(self) -> MlpSpec:
        return MlpSpec(Embed=self.Embed, Mlp=self.Mlp, activation=self.activation_function, gated=False)

    def _relations(self) -> list[str]:
        problems = super()._relations()
        if self.value_embeddings and self.vocab_size is None:
            problems.append("model.vocab_size is null; the tables of value embeddings have as many rows: set it")
        if SLIDING in self.types and self.short_window > self.max_seq_len:
            reason = (
                f"model.max_seq_len {self.max_seq_len}: its short window, 1/{self.window_divisor} in tiles of {TILE}"
                if self.sliding_window is None
                else f"model.sliding_window {self.sliding_window} for max_seq_len {self.max_seq_len}"
            )
            problems.append(f"{reason}, is not shorter than all tokens; set model.sliding_window, or pattern: L")
        if self.smear and self.hidden_dim < 24:
            problems.append(f"model.hidden_dim {self.hidden_dim}: smear's gate reads 24 features; set smear: false")
        return problems


def width_of_depth(depth: int) -> tuple[int, int]:
    """`hidden_dim` and the number of heads of a depth: 64 features a layer, rounded up to whole heads of 128.

    >>> width_of_depth(12), width_of_depth(13)
    ((768, 6), (896, 7))
    """
    # Heads are 128 wide, so an odd depth is rounded up to the width of the next even one.
    heads = -(-depth * WIDTH_PER_LAYER // HEAD_SIZE)
    return heads * HEAD_SIZE, heads


def parameter_counts(config: NanochatConfig, vocab: int | None = None) -> dict[str, int]:
    """The numbers of parameters of each kind, by nanochat's names for them, and their sum `total`.

    Args:
        config: the architecture.
        vocab: rows of the token table and of the head, if there are more than `config.vocab_size`.

    >>> parameter_counts(NanochatConfig.for_depth(12))["total"]
    286261730
    """
    ids = config.vocab_size
    assert ids is not None
    rows, layers = ids if vocab is None else vocab, range(config.num_layers)
    tables = sum(config.has_value_embedding(layer) for layer in layers)
    scalars = 2 * config.num_layers * config.residual_scalars
    counts = {
        "wte": rows * config.hidden_dim,
        # A table has no rows for ids that only pad the vocabulary.
        "value_embeds": tables * ids * config.KVHead.size * config.HeadSize.size,
        "lm_head": rows * config.hidden_dim,
        "transformer_matrices": sum(layer.matmul_parameters for layer in config.layers),
        "scalars": scalars + (24 + 1) * config.smear + (config.backout is not None),
    }
    return counts | {"total": sum(counts.values())}
