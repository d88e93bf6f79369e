"""Mixtral (`model_type: mixtral`) and Qwen3 with experts (`qwen3_moe`): config.json and weight rules.

Their checkpoints store the matrix of each expert as a tensor of its own.
"""

from typing import Any

from haliax import Axis

from haliax_ext.rules import WeightRules
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.config_json import MissingFieldDefaults, read_decoder
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.weights import (
    ATTENTION,
    EMBED,
    MLP,
    BlockTensor,
    attention_biases,
    decoder_rules,
    norms,
    projections,
    query_norms,
)
from levanter.models.family import Family
from levanter.models.llama.config_json import PLAIN, write_llama
from levanter.models.mixtral.config import MixtralConfig, Qwen3MoeConfig

_MIXTRAL, _QWEN = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
_JITTER = "noise on the router's input is ignored (it matters only in training)"


def _experts(fields: ConfigJsonReader, default: int) -> int:
    """The number of experts: `num_local_experts` in transformers 5, `num_experts` in Qwen's own files."""
    return fields.size("num_local_experts", fields.size("num_experts", default))


def _read_mixtral(fields: ConfigJsonReader) -> MixtralConfig | None:
    fields.note("router_jitter_noise", [0, 0.0], _JITTER)
    return read_decoder(
        fields,
        MixtralConfig,
        name="Mixtral",
        transformers_class=_MIXTRAL,
        absent=MissingFieldDefaults(kv_heads=8, context=131_072, epsilon=1e-5, theta=1e6),
        biases=(),
        sliding_window=fields.get("sliding_window", int),
        n_routed_experts=_experts(fields, 8),
        num_experts_per_tok=fields.size("num_experts_per_tok", 2),
        lbl_coef=fields.get("router_aux_loss_coef", float, 0.001),
        # config.json has no such field, and HF's Mixtral no such loss.
        rzl_coef=None,
    )


def _write_mixtral(config: MixtralConfig, spelling: Spelling) -> dict[str, Any]:
    return write_llama(config, spelling, name="Mixtral", biases=()) | {
        "sliding_window": config.sliding_window,
        "num_local_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        # config.json has no field for the router's z-loss, which matters in training only.
        "router_aux_loss_coef": config.lbl_coef or 0.0,
    }


def _read_qwen(fields: ConfigJsonReader) -> Qwen3MoeConfig | None:
    windowed = fields.get("use_sliding_window", bool, False)
    # transformers gives every layer of this family the window and ignores this field.
    fields.seen.add("max_window_layers")
    return read_decoder(
        fields,
        Qwen3MoeConfig,
        name="Qwen3 with experts",
        transformers_class=_QWEN,
        biases=("attention_bias",),
        absent=MissingFieldDefaults(kv_heads=4, context=32_768),
        moe_intermediate_dim=fields.size("moe_intermediate_size", 768),
        num_experts=_experts(fields, 128),
        num_experts_per_tok=fields.size("num_experts_per_tok", 8),
        norm_topk_prob=fields.get("norm_topk_prob", bool, False),
        router_aux_loss_coef=fields.get("router_aux_loss_coef", float, 0.001),
        decoder_sparse_step=fields.size("decoder_sparse_step", 1),
        mlp_only_layers=tuple(fields.get("mlp_only_layers", list, [])),
        use_sliding_window=windowed,
        sliding_window=fields.get("sliding_window", int) if windowed else None,
        # 0: with `use_sliding_window`, every layer has the window.
        max_window_layers=0,
    )


def _write_qwen(config: Qwen3MoeConfig, spelling: Spelling) -> dict[str, Any]:
    plain = {**PLAIN, "use_qk_norm": True}
    document = write_llama(config, spelling, name="Qwen3 with experts", plain=plain, biases=("attention_bias",))
    return document | {
        "moe_intermediate_size": config.moe_intermediate_dim,
        "num_experts": config.num_experts,
        # Both names: transformers 5 reads this one, older versions `num_experts`.
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": config.norm_topk_prob,
        "router_aux_loss_coef": config.router_aux_loss_coef or 0.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": config.use_sliding_window,
        "sliding_window": config.sliding_window,
    }


def mixtral_rules(config: MixtralConfig, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a Mixtral.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    # In Mixtral's tensors w1 is the gate, w2 the down and w3 the up projection.
    return _rules(config, Vocab, "block_sparse_moe", gate="w1", up="w3", down="w2")


def qwen3_moe_rules(config: Qwen3MoeConfig, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a Qwen3 with experts.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    return _rules(config, Vocab, "mlp", gate="gate_proj", up="up_proj", down="down_proj")


def _rules(config: DecoderConfig, Vocab: Axis | None, part: str, *, gate: str, up: str, down: str) -> WeightRules:
    def of_experts(target: str, name: str, *axes: tuple[str, ...]) -> BlockTensor:
        # `{expert}` is numbered like `{layers}`: each leaf is stacked over both, [layers, expert, out, in].
        return BlockTensor(target=f"mlp.{target}.weight", source=f"{part}.experts.{{expert}}.{name}.weight", axes=axes)

    block = [
        *projections(ATTENTION, biases=attention_biases(config)),
        # The router is one matrix [expert, embed], unlike the experts' own.
        BlockTensor(target="mlp.router.weight", source=f"{part}.gate.weight", axes=(("expert",), EMBED)),
        of_experts("gate_proj", gate, MLP, EMBED),
        of_experts("up_proj", up, MLP, EMBED),
        of_experts("down_proj", down, EMBED, MLP),
        *norms(config),
        *query_norms(config),
    ]
    return decoder_rules(config, Vocab, block)


MIXTRAL = Family(
    name="mixtral",
    config_class=MixtralConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=mixtral_rules,
    config_json=(
        ConfigJson(model_type="mixtral", transformers_class=_MIXTRAL, read=_read_mixtral, write=_write_mixtral),
    ),
)
QWEN_3_MOE = Family(
    name="qwen3_moe",
    config_class=Qwen3MoeConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=qwen3_moe_rules,
    config_json=(ConfigJson(model_type="qwen3_moe", transformers_class=_QWEN, read=_read_qwen, write=_write_qwen),),
)
