"""`LlamaConfig`: the Llama family's architecture as a value (Llama 1 to 3.2, SmolLM2 and relatives).

Field names are upstream's, so YAML written for it keeps working; what they mean is in the attribute list.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
from haliax import Axis
from jax.typing import DTypeLike

from haliax_ext.errors import nearest
from levanter.layers.activation import ACTIVATIONS
from levanter.layers.attention.backends import check_backend_name, choose_backend
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.registry import LmConfig
from levanter.models.stack import checkpoint_policy

if TYPE_CHECKING:
    from haliax_ext.rules import WeightRules
    from levanter.models.llama.model import LlamaLMHeadModel


@LmConfig.register_subclass("llama")
@dataclass(frozen=True, kw_only=True)
class LlamaConfig(LmConfig):
    """A Llama.

    Attributes:
        hidden_dim: size of `embed`.
        intermediate_dim: size of `mlp`.
        num_layers: size of `layers`.
        num_heads: query heads, `kv_head × q_heads_per_group`.
        num_kv_heads: size of `kv_head`.
        head_dim: size of `head_size`; None is `hidden_dim / num_heads`.
        activation_function: of the gate.
        initializer_range: standard deviation of the initial weights.
        layer_norm_epsilon: added to the mean square in every RMSNorm.
        tie_word_embeddings: the output head is the embedding table.
        use_bias: biases in all projections.
        attention_bias: biases in q, k, v and o.
        mlp_bias: biases in gate, up and down.
        use_qk_norm: RMSNorm on each head's queries and keys, before the rotation.
        hybrid_norm: RMSNorm also on the outputs of attention and MLP, before they join the residual stream.
        input_embedding_norm: RMSNorm on the embedded tokens.
        use_layer_norm_weight: RMSNorms have weights.
        rope: rotary embeddings, by `type:`.
        attn_backend: see `layers.attention.backends`; None chooses.
        use_flash_attention: false asks for the reference implementation; otherwise no constraint.
        flash_attention_block_size: keys in a block of the blockwise backend.
        upcast_attn: attention in float32 whatever the compute dtype.
        scan_layers: one compiled block, scanned over stacked weights; false unrolls (and names weights by layer).
        gradient_checkpointing: true, false, "offload", "recompute", "full", "save_all", "nested", or a mapping of
            Haliax's `ScanCheckpointPolicy` fields.
    """

    hidden_dim: int = 4096
    intermediate_dim: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int | None = None
    activation_function: str = "silu"
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    use_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    hybrid_norm: bool = False
    input_embedding_norm: bool = False
    use_layer_norm_weight: bool = True
    rope: RotaryConfig = field(default_factory=DefaultRotaryConfig)
    attn_backend: str | None = None
    use_flash_attention: bool | None = True
    flash_attention_block_size: int | None = None
    upcast_attn: bool = False
    scan_layers: bool = True
    gradient_checkpointing: bool | str | dict[str, Any] = field(default=True, hash=False)
    reference_checkpoint: str | None = "NousResearch/Llama-2-7b-hf"

    def __post_init__(self):
        problems = [
            f"model.{name} must be positive, got {value}"
            for name in ("max_seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")
            if (value := getattr(self, name)) < 1
        ]
        problems += [
            f"model.{name} must be positive or null, got {value}"
            for name in ("head_dim", "vocab_size", "flash_attention_block_size", "cross_entropy_block_size")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not problems:
            problems += self._relations()
        if self.activation_function not in ACTIVATIONS:
            close = nearest(self.activation_function, ACTIVATIONS)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            problems.append(
                f"model.activation_function {self.activation_function!r} is not one of {sorted(ACTIVATIONS)}{hint}"
            )
        for check in (
            lambda: checkpoint_policy(self.gradient_checkpointing),
            lambda: check_backend_name(self.attn_backend),
        ):
            try:
                check()
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))

    def _relations(self) -> list[str]:
        problems = []
        if self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            problems.append(
                f"model.num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}; legal: {legal}"
            )
        if self.head_dim is None and self.hidden_dim % self.num_heads:
            problems.append(
                f"model.hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}; "
                "set model.head_dim to the features of one head"
            )
        if not problems:
            try:
                self.rope.rotated_size(self.HeadSize.size)
            except ValueError as error:
                problems.append(str(error))
        return problems

    @property
    def Embed(self) -> Axis:
        return Axis("embed", self.hidden_dim)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.intermediate_dim)

    @property
    def Layers(self) -> Axis:
        return Axis("layers", self.num_layers)

    @property
    def KVHead(self) -> Axis:
        return Axis("kv_head", self.num_kv_heads)

    @property
    def QHeadsPerGroup(self) -> Axis:
        return Axis("q_heads_per_group", self.num_heads // self.num_kv_heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis("head_size", self.head_dim or self.hidden_dim // self.num_heads)

    @property
    def axes(self) -> Mapping[str, Axis]:
        all_axes = (self.Layers, self.Embed, self.Mlp, self.KVHead, self.QHeadsPerGroup, self.HeadSize)
        return {axis.name: axis for axis in all_axes}

    @property
    def has_attention_bias(self) -> bool:
        return self.use_bias or self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.use_bias or self.mlp_bias

    def build(self, Vocab: Axis, *, key: jax.Array) -> "LlamaLMHeadModel":
        from levanter.models.llama.model import LlamaLMHeadModel

        return LlamaLMHeadModel.init(Vocab, self, key=key)

    def weight_rules(self, Vocab: Axis | None = None) -> "WeightRules":
        from levanter.models.llama.weights import rules

        return rules(self, Vocab)

    def matmul_parameters(self, vocab_size: int) -> int:
        kv, group, head = self.KVHead.size, self.QHeadsPerGroup.size, self.HeadSize.size
        attention = self.hidden_dim * head * (2 * kv * group + 2 * kv)
        return (
            self.num_layers * (attention + 3 * self.hidden_dim * self.intermediate_dim) + vocab_size * self.hidden_dim
        )

    @property
    def requested_backend(self) -> str | None:
        """The attention backend asked for by either of the two keys."""
        if self.attn_backend is None and self.use_flash_attention is False:
            return "reference"
        return self.attn_backend

    @property
    def attention_features(self) -> int:
        return self.num_layers * self.num_heads * self.HeadSize.size

    def for_platform(
        self, platform: str, *, compute_dtype: DTypeLike, length: int | None = None
    ) -> "tuple[LlamaConfig, tuple[str, ...]]":
        dtype = "float32" if self.upcast_attn else compute_dtype
        choice = choose_backend(
            self.requested_backend,
            platform=platform,
            dtype=dtype,
            length=length or self.max_seq_len,
            block_size=self.flash_attention_block_size,
        )
        return dataclasses.replace(self, attn_backend=choice.name), (f"attention: {choice}",)
