"""Configs of decoders whose MLPs are mixtures of experts.

`MixtralConfig` (arXiv:2401.04088) is Mistral with experts, `Qwen3MoeConfig` (arXiv:2505.09388) is Qwen3 with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from haliax import Axis

from levanter.config.validators import Count, NonNegativeFloat, PositiveInt
from levanter.layers.experts import LOAD_BALANCING_LOSS, ROUTER_Z_LOSS, ExpertsSpec, Routing
from levanter.layers.rotary import DefaultRotaryConfig, RotaryConfig
from levanter.models.decoder.config import DecoderConfig
from levanter.models.mistral.config import MistralConfig
from levanter.models.qwen.config import Qwen3Config
from levanter.models.registry import LmConfig


@dataclass(frozen=True, kw_only=True)
class RoutedConfig(DecoderConfig):
    """A decoder whose feed-forward parts are mixtures of experts.

    Attributes:
        num_experts_per_tok: experts that process a token.
        expert_dispatch: `grouped`, or `dense`, where every expert processes every token; see `layers.experts`.
    """

    num_experts_per_tok: PositiveInt = 2
    expert_dispatch: Literal["grouped", "dense"] = "grouped"

    @property
    def experts(self) -> int:
        """How many experts a layer has."""
        raise NotImplementedError

    @property
    def normalized_routing(self) -> bool:
        """Whether the weights of a token's experts add up to 1."""
        return True

    @property
    def Expert(self) -> Axis:
        """The axis of experts."""
        return Axis("expert", self.experts)

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {**super().axes, "expert": self.Expert}

    @property
    def mlp(self) -> ExpertsSpec:
        return ExpertsSpec(
            Embed=self.Embed,
            Mlp=self.Mlp,
            Expert=self.Expert,
            # With `normalized`, the weights of a token's experts are divided by their sum.
            routing=Routing(chosen=self.num_experts_per_tok, normalized=self.normalized_routing),
            activation=self.activation_function,
            dispatch=self.expert_dispatch,
            scale=self.initializer_range,
        )

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if not 1 <= self.num_experts_per_tok <= self.experts:
            value = f"model.num_experts_per_tok is {self.num_experts_per_tok}"
            problems.append(f"{value}; a token can go to 1 to {self.experts} experts")
        for biased in ("use_bias", "mlp_bias"):
            if getattr(self, biased, False):
                problems.append(f"model.{biased}: experts have no biases here")
        return problems


@LmConfig.register_subclass("mixtral")
@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RoutedConfig, MistralConfig):
    """A Mixtral.

    Attributes:
        n_routed_experts: experts a layer.
        n_shared_experts: experts that process every token; only 0.
        lbl_coef: weight of the load-balancing loss in training; None for none.
        rzl_coef: weight of the router's z-loss in training; None for none.
    """

    # Mistral's defaults; by the order of base classes, those that `RoutedConfig` inherits would win.
    max_seq_len: int = 8192
    intermediate_dim: int = 14336
    num_kv_heads: int = 8
    n_routed_experts: PositiveInt = 8
    n_shared_experts: Count = 0
    lbl_coef: NonNegativeFloat | None = 0.01
    rzl_coef: NonNegativeFloat | None = 0.001
    layer_norm_epsilon: float = 1e-6
    reference_checkpoint: str | None = "mistralai/Mixtral-8x7B-v0.1"

    @property
    def experts(self) -> int:
        return self.n_routed_experts

    @property
    def auxiliary_weights(self) -> Mapping[str, float]:
        weights = {LOAD_BALANCING_LOSS: self.lbl_coef or 0.0, ROUTER_Z_LOSS: self.rzl_coef or 0.0}
        # With both weights 0 no sums are requested, so that layers do not compute them.
        return weights if any(weights.values()) else {}

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.n_shared_experts:
            problems.append(
                f"model.n_shared_experts is {self.n_shared_experts}; no Mixtral has any, and 0 is supported"
            )
        return problems


@LmConfig.register_subclass("qwen3_moe")
@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(RoutedConfig, Qwen3Config):
    """A Qwen3 with experts.

    Attributes:
        intermediate_dim: size of `mlp` in layers without experts; unused, since there are none.
        moe_intermediate_dim: size of `mlp` in an expert.
        num_experts: experts a layer.
        norm_topk_prob: whether the weights of a token's experts add up to 1.
        router_aux_loss_coef: weight of the load-balancing loss in training; None for none.
        decoder_sparse_step: n: every n-th layer has experts; only 1 is supported.
        mlp_only_layers: layers without experts; only none.
    """

    max_seq_len: int = 40960
    hidden_dim: int = 2048
    intermediate_dim: int = 6144
    moe_intermediate_dim: PositiveInt = 768
    num_layers: int = 48
    num_heads: int = 32
    head_dim: int | None = 128
    num_kv_heads: int = 4
    layer_norm_epsilon: float = 1e-6
    use_qk_norm: bool = True
    num_experts: PositiveInt = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    router_aux_loss_coef: NonNegativeFloat | None = 0.001
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[Count, ...] = ()
    sliding_window: PositiveInt | None = None
    max_window_layers: Count = 48
    rope: RotaryConfig = field(default_factory=lambda: DefaultRotaryConfig(theta=1_000_000.0))
    reference_checkpoint: str | None = "Qwen/Qwen3-30B-A3B"

    @property
    def experts(self) -> int:
        return self.num_experts

    @property
    def auxiliary_weights(self) -> Mapping[str, float]:
        # Weight 0: the router's z-loss is reported, but not added to the loss.
        return {LOAD_BALANCING_LOSS: self.router_aux_loss_coef, ROUTER_Z_LOSS: 0.0} if self.router_aux_loss_coef else {}

    @property
    def normalized_routing(self) -> bool:
        return self.norm_topk_prob

    @property
    def Mlp(self) -> Axis:
        """The axis inside an expert."""
        # Not `intermediate_dim`, which is the size of dense layers in this family.
        return Axis("mlp", self.moe_intermediate_dim)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.decoder_sparse_step != 1 or self.mlp_only_layers:
            problems.append(
                f"model.decoder_sparse_step is {self.decoder_sparse_step} and model.mlp_only_layers "
                f"{list(self.mlp_only_layers)}: layers without experts are not supported beside layers with them"
            )
        return problems
