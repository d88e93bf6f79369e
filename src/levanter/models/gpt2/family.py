"""GPT-2 (`model_type: gpt2`): config.json with its own field names, and weight rules.

Its checkpoints store matrices as `[in, out]`, with q, k and v fused into one tensor.
"""

from typing import Any

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRule, WeightRules
from levanter.config.validators import Epsilon, NonNegativeFloat
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import DIFFERENT_LAYERS, forbid_foreign
from levanter.models.decoder.model import DecoderLmHeadModel
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
from levanter.models.gpt2.config import Gpt2Config

_CLASS = "GPT2LMHeadModel"
_DROPOUT = "dropout is ignored (it matters only in training)"
_OF_OTHER_HEADS = (
    *("summary_activation", "summary_first_dropout", "summary_last_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj"),
)


def _size(fields: ConfigJsonReader, name: str, others: str, default: int) -> int:
    """A size under GPT-2's name, or under the usual name, which transformers accepts as an alias."""
    value = fields.size(name, fields.size(others, default))
    if fields.document.get(others) not in (None, value):
        fields.problems.append(f"{name} is {value} but {others} is {fields.document[others]}; they are the same field")
    return value


def _read(fields: ConfigJsonReader) -> Gpt2Config | None:
    sizes = {
        # `n_ctx` is the field of OpenAI's own files, before n_positions.
        "max_seq_len": _size(fields, "n_positions", "max_position_embeddings", fields.size("n_ctx", 1024)),
        "hidden_dim": _size(fields, "n_embd", "hidden_size", 768),
        "num_layers": _size(fields, "n_layer", "num_hidden_layers", 12),
        "num_heads": _size(fields, "n_head", "num_attention_heads", 12),
        "vocab_size": fields.size("vocab_size", 50_257),
        "intermediate_dim": fields.get("n_inner", int, 0),
    }
    activation = fields.get("activation_function", str, "gelu_new")
    epsilon = fields.get("layer_norm_epsilon", Epsilon, 1e-5)
    tied = fields.get("tie_word_embeddings", bool, True)
    initializer_range = fields.get("initializer_range", NonNegativeFloat, 0.02)
    # Without it HF does not divide scores by √head_size.
    fields.forbid("scale_attn_weights", [True], "scores that are not divided by the square root of the head size")
    by_layer = fields.get("scale_attn_by_inverse_layer_idx", bool, False)
    fields.forbid("add_cross_attention", [False], "a decoder-only model is expected")
    fields.forbid("is_encoder_decoder", [False], "a decoder-only model is expected")
    fields.forbid("quantization_config", [], "quantized weights are not read; dequantize the checkpoint first")
    fields.forbid("per_layer_config", [{}], DIFFERENT_LAYERS)
    # HF's reorder_and_upcast_attn computes scores in float32, which is `upcast_attn` here.
    upcast = fields.get("reorder_and_upcast_attn", bool, False)
    for unread in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        # 0.1 is the published value of all three, which a base model's file keeps: no finding for it.
        fields.note(unread, [0, 0.0, 0.1], _DROPOUT)
    fields.note("architectures", [None, [_CLASS]], f"read as {_CLASS}")
    # Settings of classification heads, which a language model does not have.
    fields.seen.update((*_OF_OTHER_HEADS, "n_ctx"))
    forbid_foreign(fields, name="GPT-2", layers=sizes["num_layers"])
    if fields.problems:
        return None
    try:
        return Gpt2Config(
            **sizes,
            activation_function=activation,
            layer_norm_epsilon=epsilon,
            tie_word_embeddings=tied,
            initializer_range=initializer_range,
            upcast_attn=upcast,
            scale_attn_by_inverse_layer_idx=by_layer,
            reference_checkpoint=None,
        )
    except ValueError as error:
        fields.problems += str(error).split("\n")
        return None


def _write(config: Gpt2Config, spelling: Spelling) -> dict[str, Any]:
    del spelling
    if not config.use_bias:
        raise ValueError("model.use_bias false has no place in a Hugging Face GPT-2")
    return {
        "n_positions": config.max_seq_len,
        "n_embd": config.hidden_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        # Null is HF's spelling of 4 × n_embd, as in published files.
        "n_inner": None if config.Mlp.size == 4 * config.hidden_dim else config.Mlp.size,
        "vocab_size": config.vocab_size,
        "activation_function": config.activation_function,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "reorder_and_upcast_attn": config.upcast_attn,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "use_cache": True,
    }


NAMES = CheckpointNames(embedding="transformer.wte", layers="transformer.h", norm="transformer.ln_f")


def rules(config: Gpt2Config, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a GPT-2.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """
    # q, k and v have equal widths: GPT-2 has no grouped queries.
    width = config.num_heads * config.HeadSize.size
    block = []

    def projection(
        target: str, source: str, In: tuple[str, ...], Out: tuple[str, ...], third: int | None = None
    ) -> None:
        def part(axis: int) -> FusedPart | None:
            # c_attn is [embed, q | k | v]: the parts are runs of
            # columns (axis 1) of the weight, and of the bias (axis 0).
            return None if third is None else FusedPart(axis=axis, start=third * width, size=width, of=3 * width)

        # HF's Conv1D stores [in, out], the transpose of torch.nn.Linear: so axes are (In, Out) here.
        tensor = BlockTensor(target=f"{target}.weight", source=f"{source}.weight", axes=(In, Out), part=part(1))
        block.append(tensor)
        if config.use_bias:
            block.append(BlockTensor(target=f"{target}.bias", source=f"{source}.bias", axes=(Out,), part=part(0)))

    projection("self_attn.q_proj", "attn.c_attn", EMBED, Q_HEADS, 0)
    projection("self_attn.k_proj", "attn.c_attn", EMBED, KV_HEADS, 1)
    projection("self_attn.v_proj", "attn.c_attn", EMBED, KV_HEADS, 2)
    projection("self_attn.o_proj", "attn.c_proj", Q_HEADS, EMBED)
    projection("mlp.up_proj", "mlp.c_fc", EMBED, MLP)
    projection("mlp.down_proj", "mlp.c_proj", MLP, EMBED)
    block += norms(config, {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"})
    # The table of learned positions, [position, embed].
    positions = WeightRule(
        target="embeddings.position_embeddings.weight", source="transformer.wpe.weight", axes=(("position",), EMBED)
    )
    return decoder_rules(
        config,
        Vocab,
        block,
        names=NAMES,
        more=[positions],
        # Buffers of old files, not weights: the causal mask and the score of masked keys.
        ignored=("*.attn.bias", "*.attn.masked_bias"),
    )


GPT2 = Family(
    name="gpt2",
    config_class=Gpt2Config,
    build=DecoderLmHeadModel.init,
    weight_rules=rules,
    config_json=(ConfigJson(model_type="gpt2", transformers_class=_CLASS, read=_read, write=_write),),
)
