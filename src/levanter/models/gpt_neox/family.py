"""GPT-NeoX and Pythia (`model_type: gpt_neox`): config.json and weight rules.

Its checkpoints fuse q, k and v into one tensor, interleaved head by head.
"""

from types import MappingProxyType
from typing import Any

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRules
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import MissingFieldDefaults, read_decoder, write_sizes
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.rope_json import DEFAULT_THETA, read_rope, write_rope
from levanter.models.decoder.weights import (
    EMBED,
    KV_HEADS,
    MLP,
    Q_HEADS,
    BlockTensor,
    CheckpointNames,
    decoder_rules,
    norms,
)
from levanter.models.family import Family
from levanter.models.gpt_neox.config import GptNeoxConfig

_CLASS = "GPTNeoXForCausalLM"
_CONTEXT, _SHARE = 2048, 0.25
_EPSILON = "layer_norm_eps"
_FLAT = MappingProxyType({"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
_DROPOUT = ("hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
_SIZES = MappingProxyType(
    {
        "vocab_size": 50_432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24_576,
    }
)


def _read(fields: ConfigJsonReader) -> GptNeoxConfig | None:
    context = fields.size("max_position_embeddings", _CONTEXT)
    for unread in _DROPOUT:
        fields.note(unread, [0, 0.0], "dropout is ignored (it matters only in training)")
    fields.seen.add("classifier_dropout")
    # `mlp_bias` false would leave stored biases unread; null and absence are fine.
    fields.forbid("mlp_bias", [True], "a GPT-NeoX has biases in its MLPs")
    for name, default in (("rope_theta", DEFAULT_THETA), ("partial_rotary_factor", _SHARE)):
        # transformers 4 writes both names of each, but its model reads only the family's own.
        value = fields.get(_FLAT[name], float, default)
        fields.forbid(name, [value], f"transformers reads {_FLAT[name]}, which is {value}, and not this")
    return read_decoder(
        fields,
        GptNeoxConfig,
        name="GPT-NeoX",
        transformers_class=_CLASS,
        absent=MissingFieldDefaults(sizes=_SIZES, context=_CONTEXT, epsilon=1e-5, activation="gelu"),
        epsilon_field=_EPSILON,
        rope=read_rope(fields, max_position_embeddings=context, partial=True, share=_SHARE, flat=_FLAT),
        reads_rope=True,
        biases=(),
        attention_bias=fields.get("attention_bias", bool, True),
        use_parallel_residual=fields.get("use_parallel_residual", bool, True),
    )


def _write(config: GptNeoxConfig, spelling: Spelling) -> dict[str, Any]:
    if config.head_dim not in (None, config.hidden_dim // config.num_heads):
        raise ValueError(f"model.head_dim {config.head_dim} has no place in a Hugging Face GPT-NeoX")
    rope = write_rope(config.rope, max_position_embeddings=config.max_seq_len, spelling=spelling, partial=True)
    # Written even if it is 1: without it, transformers rotates a quarter of each head.
    rope_fields = rope["rope_parameters"] if spelling == "transformers5" else rope
    rope_fields["partial_rotary_factor"] = config.rope.partial_rotary_factor
    return write_sizes(config) | {
        _EPSILON: config.layer_norm_epsilon,
        "attention_bias": config.attention_bias,
        "use_parallel_residual": config.use_parallel_residual,
        "hidden_dropout": 0.0,
        **{_FLAT.get(name, name): value for name, value in rope.items()},
    }


NAMES = CheckpointNames(
    embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm", head="embed_out"
)


def rules(config: GptNeoxConfig, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a GPT-NeoX.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    head = config.HeadSize.size
    block = []

    def linear(
        target: str,
        source: str,
        Out: tuple[str, ...],
        In: tuple[str, ...],
        *,
        bias: bool,
        part: FusedPart | None = None,
    ) -> None:
        block.append(BlockTensor(target=f"{target}.weight", source=f"{source}.weight", axes=(Out, In), part=part))
        if bias:
            block.append(BlockTensor(target=f"{target}.bias", source=f"{source}.bias", axes=(Out,), part=part))

    for third, (name, axes) in enumerate({"q_proj": Q_HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}.items()):
        # query_key_value is [kv_head, 3, head_size] flattened: for each head its q, k and v. So a projection is every
        # third block of head_size rows, repeated over the heads.
        part = FusedPart(axis=0, start=third * head, size=head, of=3 * head, repeats_over=axes[:-1])
        linear(f"self_attn.{name}", "attention.query_key_value", axes, EMBED, bias=config.attention_bias, part=part)
    linear("self_attn.o_proj", "attention.dense", EMBED, Q_HEADS, bias=config.attention_bias)
    linear("mlp.up_proj", "mlp.dense_h_to_4h", MLP, EMBED, bias=True)
    linear("mlp.down_proj", "mlp.dense_4h_to_h", EMBED, MLP, bias=True)
    tied = config.tie_word_embeddings
    return decoder_rules(
        config,
        Vocab,
        [*block, *norms(config)],
        names=NAMES,
        # transformers 5 names the head lm_head, as in other families.
        aliases=(("embed_out.weight", "lm_head.weight"),),
        # The causal mask and the score of masked keys are buffers
        # of old files. A tied model's copy of the head is not read.
        ignored=("*.attention.bias", "*.attention.masked_bias", *(("lm_head.weight",) if tied else ())),
    )


GPT_NEOX = Family(
    name="gpt_neox",
    config_class=GptNeoxConfig,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="gpt_neox", transformers_class=_CLASS, read=_read, write=_write),),
)
