"""The nanochat family: config.json, weight rules and initial weights.

transformers' `NanoChat` is the form of October 2025. A model of that form is exported as one. Others are exported with
`model_type: levanter_nanochat`, a document of our own that transformers refuses: it would leave out the tables, scalars
and windows.

Initially, matrices that read the stream are uniform with the standard deviation 1/√hidden_dim (0.4 of that in the MLP),
and those that write to it are zero, so that each layer only passes the stream on. The head is almost zero: the first
loss is the logarithm of the vocabulary's size.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from haliax_ext.pytree import KeyPath, is_named, path_string
from haliax_ext.rules import WeightRule, WeightRules
from levanter.config.validators import FiniteFloat, PositiveFloat
from levanter.layers.layer import LayerSpec
from levanter.models.config_json import ConfigJson, ConfigJsonReader, Spelling
from levanter.models.decoder.config_json import EPSILON, NO_TOKENS, MissingFieldDefaults, read_decoder, write_sizes
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.decoder.rope_json import write_rope
from levanter.models.decoder.weights import ATTENTION, EMBED, MLP, BlockTensor, decoder_rules, projections
from levanter.models.family import Family
from levanter.models.nanochat.config import PLAIN, NanochatConfig

_CLASS = "NanoChatForCausalLM"
_TYPE, _EXTENDED = "nanochat", "levanter_nanochat"
_DEFAULTS = MissingFieldDefaults(
    sizes={
        "vocab_size": 50_304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
    },
    activation="relu2",
)


def _read(fields: ConfigJsonReader) -> NanochatConfig | None:
    return _decoder(fields, _CLASS, dict(PLAIN))


def _decoder(fields: ConfigJsonReader, transformers_class: str, more: dict[str, Any]) -> NanochatConfig | None:
    cap = fields.unless_null("final_logit_softcapping", PositiveFloat, 15.0)  # pyright: ignore[reportArgumentType]
    return read_decoder(
        fields,
        NanochatConfig,
        name="nanochat",
        transformers_class=transformers_class,
        absent=_DEFAULTS,
        biases=(),
        final_logit_softcapping=cap,
        **more,
    )


def _read_extended(fields: ConfigJsonReader) -> NanochatConfig | None:
    plain = NanochatConfig()
    # A missing field has today's value; null is a value (`backout: null` is no backout).
    more: dict[str, Any] = {}
    for name, kind in _EXTENDED_FIELDS.items():
        more[name] = fields.unless_null(name, kind, getattr(plain, name))
    for name in ("initial_stream_scales", "initial_x0_scales"):
        more[name] = tuple(fields.get(name, list, list(getattr(plain, name))))
    # Read as ours: a window that is null follows from the length of sequences.
    types = fields.get("layer_types", list)
    more["layer_types"] = None if types is None else tuple(types)
    return _decoder(fields, _EXTENDED, more)


_EXTENDED_FIELDS: dict[str, Any] = {
    "pattern": str,
    "sliding_window": int,
    "window_divisor": int,
    "query_key_gain": PositiveFloat,
    "residual_scalars": bool,
    "value_embeddings": bool,
    "smear": bool,
    "backout": FiniteFloat,
}
"""Fields of our config that transformers' class does not have."""


def _write(config: NanochatConfig, spelling: Spelling) -> dict[str, Any]:
    document = write_sizes(config) | {
        "num_key_value_heads": config.num_kv_heads,
        EPSILON: config.layer_norm_epsilon,
        "attention_bias": False,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    # Without the field, heads divide the stream.
    if config.head_dim is not None:
        document["head_dim"] = config.head_dim
    document |= write_rope(config.rope, max_position_embeddings=config.max_seq_len, spelling=spelling) | NO_TOKENS
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if all(values[name] == value for name, value in PLAIN.items()) and config.layer_types is None:
        return document
    more = {name: values[name] for name in _EXTENDED_FIELDS}
    more |= {name: list(values[name]) for name in ("initial_stream_scales", "initial_x0_scales")}
    types = None if config.layer_types is None else list(config.layer_types)
    # Not a model_type of transformers: its class would load the matrices and leave out everything else.
    return document | more | {"model_type": _EXTENDED, "architectures": [_EXTENDED], "layer_types": types}


def rules(config: NanochatConfig, Vocab: Axis | None = None) -> WeightRules:
    """The weight rules of a nanochat: transformers' names, and names of ours for what its class does not have.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; see `decoder_rules`.
    """

    # transformers' names of the MLP are those of CLIP; what its class lacks has names below the layer or the model.
    def block(spec: LayerSpec) -> list[BlockTensor]:
        tensors = [
            *projections(ATTENTION),
            BlockTensor(target="mlp.up_proj.weight", source="mlp.fc1.weight", axes=(MLP, EMBED)),
            BlockTensor(target="mlp.down_proj.weight", source="mlp.fc2.weight", axes=(EMBED, MLP)),
        ]
        if config.residual_scalars:
            tensors += [
                BlockTensor(target="residual.0.stream_scale", source="stream_scale", axes=()),
                BlockTensor(target="residual.0.x0_scale", source="x0_scale", axes=()),
            ]
        if getattr(spec.mixer, "value_embedding", None) is not None:
            tensors += [
                BlockTensor(
                    target="self_attn.value_embedding.table",
                    source="self_attn.value_embedding.table",
                    axes=(("table_row",), ("kv_head", "head_size")),
                ),
                BlockTensor(target="self_attn.value_embedding.gate.weight", axes=(("kv_head",), ("gate_channel",))),
            ]
        return tensors

    # Scalars are tensors of no axis.
    more = []
    if config.smear:
        more += [
            WeightRule(target="transformer.ends.smear.scale", source="model.smear.scale", axes=()),
            WeightRule(
                target="transformer.ends.smear.gate.weight", source="model.smear.gate.weight", axes=(("gate_channel",),)
            ),
        ]
    if config.backout is not None:
        more.append(WeightRule(target="transformer.ends.backout_scale", source="model.backout_scale", axes=()))
    return decoder_rules(config, Vocab, block, more=more)


HEAD_SCALE = 0.001
MLP_SCALE = 0.4
GATE_BOUND = 0.02

Draw = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def initial_model(Vocab: Axis, config: NanochatConfig, *, key: jax.Array) -> DecoderLmHeadModel:
    """A freshly initialized model; call it inside `jit` or `eval_shape`.

    Args:
        Vocab: the axis `vocab`.
        config: the architecture.
        key: of the random weights. A layer's weights do not depend on how layers are scanned.
    """
    # The token table keeps its normal rows of `initializer_range`.
    model = DecoderLmHeadModel.init(Vocab, config, key=key)
    draws = _draws(config)

    # What the specs of layers draw is replaced leaf by leaf; under `jit` the unused values are not computed.
    def initialized(keys: KeyPath, leaf: object) -> object:
        path = path_string(keys)
        number = next((n for n, (suffix, _) in enumerate(draws) if path.endswith(suffix)), None)
        if number is None or not is_named(leaf):
            return leaf
        _, draw = draws[number]
        layers = _layer_numbers(path, config)
        if layers is None:
            return hax.named(draw(jax.random.fold_in(key, number), leaf.array.shape), leaf.axes)
        # One key a layer and kind of weight: the weights do not depend on how layers are scanned.
        layer_keys = [jax.random.fold_in(jax.random.fold_in(key, number), layer) for layer in layers]
        if path.startswith("transformer.layers.blocks."):
            return hax.named(draw(layer_keys[0], leaf.array.shape), leaf.axes)
        drawn = jax.vmap(lambda k: draw(k, leaf.array.shape[1:]))(jnp.stack(layer_keys))
        return hax.named(drawn, leaf.axes)

    model = jax.tree_util.tree_map_with_path(initialized, model, is_leaf=is_named)
    return _with_scalars(model, config) if config.residual_scalars else model


def _draws(config: NanochatConfig) -> Sequence[tuple[str, Draw]]:
    """The end of a leaf's path → how the leaf is drawn."""
    bound = math.sqrt(3 / config.hidden_dim)

    def uniform(low: float, high: float) -> Draw:
        return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, low, high)

    def normal(scale: float) -> Draw:
        return lambda key, shape: jax.random.normal(key, shape, jnp.float32) * scale

    def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    # The scales of smear, backout and norms keep the values that their modules give them.
    return (
        ("self_attn.q_proj.weight", uniform(-bound, bound)),
        ("self_attn.k_proj.weight", uniform(-bound, bound)),
        ("self_attn.v_proj.weight", uniform(-bound, bound)),
        ("self_attn.o_proj.weight", zeros),
        ("mlp.up_proj.weight", uniform(-MLP_SCALE * bound, MLP_SCALE * bound)),
        ("mlp.down_proj.weight", zeros),
        ("value_embedding.table", uniform(-bound, bound)),
        ("value_embedding.gate.weight", uniform(0.0, GATE_BOUND)),
        ("smear.gate.weight", uniform(0.0, GATE_BOUND)),
        ("lm_head.weight", normal(HEAD_SCALE)),
    )


def _layer_numbers(path: str, config: NanochatConfig) -> Sequence[int] | None:
    """The layers whose weights a leaf holds, in its order; None if it belongs to no layer."""
    names = path.split(".")
    if names[:3] == ["transformer", "layers", "blocks"]:
        return [int(names[3])]
    if "stacked" not in names:
        return None
    # `transformer.layers.stacked` is the first run, `transformer.later.<n>.stacked` run n + 1; a period of several
    # layers has their places below it.
    number = 0 if names[1] == "layers" else int(names[2]) + 1
    run = config.runs[number]
    place = int(names[names.index("places") + 1]) if "places" in names else 0
    return range(run.start + place, run.start + run.layers, len(run.places))


def _with_scalars(model: DecoderLmHeadModel, config: NanochatConfig) -> DecoderLmHeadModel:
    """The model with the initial scalars of its layers."""
    scalars = {
        name: np.linspace(*scales, config.num_layers, dtype=np.float64).astype(np.float32)
        for name, scales in (("stream_scale", config.initial_stream_scales), ("x0_scale", config.initial_x0_scales))
    }

    # In a rule of a scanned run the scalars of its layers are one array over `layers`.
    def visit(keys: KeyPath, leaf: object) -> object:
        path = path_string(keys)
        layers = _layer_numbers(path, config)
        values = scalars.get(path.rpartition(".")[2])
        if values is None or layers is None or not is_named(leaf):
            return leaf
        return hax.named(jnp.asarray(values[np.asarray(layers)]).reshape(leaf.array.shape), leaf.axes)

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)


NANOCHAT = Family(
    name="nanochat",
    config_class=NanochatConfig,
    build=initial_model,
    weight_rules=rules,
    config_json=(
        ConfigJson(model_type=_TYPE, transformers_class=_CLASS, read=_read, write=_write),
        ConfigJson(model_type=_EXTENDED, transformers_class=_EXTENDED, read=_read_extended, write=_write),
    ),
)
