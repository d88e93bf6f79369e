"""The initial weights of a nanochat, all in one place.

Matrices that read the stream are uniform with the standard deviation 1/√hidden_dim (0.4 of that in the MLP), and those
that write to it are zero, so that at first each layer only passes the stream on. The head is almost zero: the first
loss is the logarithm of the vocabulary's size.
"""

import math
from collections.abc import Callable, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from haliax_ext.pytree import KeyPath, is_named, path_string
from levanter.models.decoder.model import DecoderLmHeadModel
from levanter.models.nanochat.config import NanochatConfig

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
    model = DecoderLmHeadModel.init(Vocab, config, key=key)
    draws = _draws(config)

    def initialized(keys: KeyPath, leaf: object) -> object:
        path = path_string(keys)
        number = next((n for n, (suffix, _) in enumerate(draws) if path.endswith(suffix)), None)
        if number is None or not is_named(leaf):
            return leaf
        _, draw = draws[number]
        layers = _layers_of(path, config)
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


def _layers_of(path: str, config: NanochatConfig) -> Sequence[int] | None:
    """The layers whose weights a leaf holds, in its order; None if it belongs to no layer."""
    parts = path.split(".")
    if parts[:3] == ["transformer", "layers", "blocks"]:
        return [int(parts[3])]
    if "stacked" not in parts:
        return None
    number = 0 if parts[1] == "layers" else int(parts[2]) + 1
    run = config.runs[number]
    place = int(parts[parts.index("places") + 1]) if "places" in parts else 0
    return range(run.start + place, run.start + run.layers, len(run.places))


def _with_scalars(model: DecoderLmHeadModel, config: NanochatConfig) -> DecoderLmHeadModel:
    """The model with the initial scalars of its layers."""
    of_layers = {
        name: np.linspace(*scales, config.num_layers, dtype=np.float64).astype(np.float32)
        for name, scales in (("stream_scale", config.initial_stream_scales), ("x0_scale", config.initial_x0_scales))
    }

    def visit(keys: KeyPath, leaf: object) -> object:
        path = path_string(keys)
        layers = _layers_of(path, config)
        values = of_layers.get(path.rpartition(".")[2])
        if values is None or layers is None or not is_named(leaf):
            return leaf
        return hax.named(jnp.asarray(values[np.asarray(layers)]).reshape(leaf.array.shape), leaf.axes)

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)
