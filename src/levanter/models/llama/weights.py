"""Llama's weights in Hugging Face checkpoints: one table, used to load and to export.

Hugging Face stores a projection as a matrix `[out, in]` with heads flattened into one of its axes, query heads ordered
by key/value head first; a layer is one tensor each. Here the axes keep their names and layers are stacked.
"""

from haliax import Axis

from haliax_ext.rules import WeightRule, WeightRules
from levanter.models.llama.config import LlamaConfig

_Q_HEADS = ("kv_head", "q_heads_per_group", "head_size")
_KV_HEADS = ("kv_head", "head_size")
_EMBED = ("embed",)
_MLP = ("mlp",)

PROJECTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "self_attn.q_proj": (_Q_HEADS, _EMBED),
    "self_attn.k_proj": (_KV_HEADS, _EMBED),
    "self_attn.v_proj": (_KV_HEADS, _EMBED),
    "self_attn.o_proj": (_EMBED, _Q_HEADS),
    "mlp.gate_proj": (_MLP, _EMBED),
    "mlp.up_proj": (_MLP, _EMBED),
    "mlp.down_proj": (_EMBED, _MLP),
}
"""For each projection, the axes flattened into the source's output and input axis."""


def rules(config: LlamaConfig, Vocab: Axis | None = None) -> WeightRules:
    """Where each leaf of a `LlamaLMHeadModel` with this config comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; if it is longer than `config.vocab_size`, checkpoints may lack the rows
            that were added (scoring leaves those out).
    """
    longer = Vocab is not None and config.vocab_size is not None and Vocab.size > config.vocab_size
    padded = ("vocab",) if longer else ()

    def by_token(target: str, source: str) -> WeightRule:
        return WeightRule(target=target, source=source, axes=(("vocab",), _EMBED), padded=padded)

    table = [by_token("embeddings.token_embeddings.weight", "model.embed_tokens.weight")]
    if config.input_embedding_norm and config.use_layer_norm_weight:
        table.append(_rule("embeddings.norm.weight", "model.embed_norm.weight", _EMBED))
    if config.scan_layers:
        table += _block(config, "transformer.layers.stacked", "model.layers.{layers}")
    else:
        for n in range(config.num_layers):
            table += _block(config, f"transformer.layers.blocks.{n}", f"model.layers.{n}")
    if config.use_layer_norm_weight:
        table.append(_rule("transformer.norm.weight", "model.norm.weight", _EMBED))
    ignored = ["*.rotary_emb.inv_freq"]
    if config.tie_word_embeddings:
        ignored.append("lm_head.weight")
    else:
        table.append(by_token("lm_head.weight", "lm_head.weight"))
    return WeightRules(rules=tuple(table), ignored=tuple(ignored))


def _block(config: LlamaConfig, target: str, source: str) -> list[WeightRule]:
    table = []
    for name, (out, in_) in PROJECTIONS.items():
        table.append(_rule(f"{target}.{name}.weight", f"{source}.{name}.weight", out, in_))
        has_bias = config.has_mlp_bias if name.startswith("mlp.") else config.has_attention_bias
        if has_bias:
            table.append(_rule(f"{target}.{name}.bias", f"{source}.{name}.bias", out))
    if config.use_layer_norm_weight:
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["post_attn_layernorm", "post_mlp_layernorm"] if config.hybrid_norm else []
        table += [_rule(f"{target}.{norm}.weight", f"{source}.{norm}.weight", _EMBED) for norm in norms]
        if config.use_qk_norm:
            for norm in ("self_attn.q_norm", "self_attn.k_norm"):
                table.append(_rule(f"{target}.{norm}.weight", f"{source}.{norm}.weight", ("head_size",)))
    return table


def _rule(target: str, source: str, *axes: tuple[str, ...]) -> WeightRule:
    return WeightRule(target=target, source=source, axes=axes)
