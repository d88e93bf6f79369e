"""The named activations of a language model, as shapes, which mappings are checked against.

The specs of layers list those inside the layers (`Part.activations`); the rest is the same in every model.
"""

from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np
from haliax import Axis

from haliax_ext.activations import Activation
from levanter.models.lm_head.chunks import chunking
from levanter.models.registry import LmConfig

RESIDUAL = "residual stream"
"""The name of the stream between blocks among the activations."""

EMBEDDED = "embedded tokens"
"""The name of the layers' input among the activations."""

INSIDE = " inside attention"
"""The suffix of the names of activations inside the attention kernel, where `attention_mapping` applies."""

ATTENDED = {"queries": "position", "keys and values": "key_position"}
"""The activations of a layer that occur inside attention, and the name of their position axis there."""


def constrained_by(name: str) -> Literal["compute", "residual", "attention"]:
    """Which mapping an activation is constrained by.

    Args:
        name: among those of `transformer_activations`.
    """
    if name == RESIDUAL:
        return "residual"
    return "attention" if name.endswith(INSIDE) else "compute"


def layer_activations(config: LmConfig) -> Mapping[str, tuple[Axis, ...]]:
    """The activations that the layers constrain: name → axes other than batch and position.

    If kinds of layers have an activation in several shapes, each further shape is an entry of its own, whose name ends
    with its axes.
    """
    activations: dict[str, tuple[Axis, ...]] = {}
    for layer in dict.fromkeys(config.layers):
        for name, axes in layer.activations.items():
            if activations.setdefault(name, axes) != axes:
                # A further shape under the same name gets its axes appended, so that every shape is checked.
                activations[f"{name} [{', '.join(f'{axis.name} {axis.size}' for axis in axes)}]"] = axes
    return activations


def kept_by_name(config: LmConfig, inner: Mapping[str, int], names: Collection[str]) -> Mapping[str, int]:
    """The activations of a given shape that gradient checkpointing keeps: name → number of layers.

    Args:
        config: the model.
        inner: axes and sizes of the shape, without batch and position.
        names: the names that the checkpoint policy keeps.
    """
    counts: dict[str, int] = {}
    for layer in config.layers:
        for name, axes in layer.saved.items():
            if name in names and {axis.name: axis.size for axis in axes} == inner:
                counts[name] = counts.get(name, 0) + 1
    return counts


def transformer_activations(
    config: LmConfig, *, batch: tuple[str, int], positions: int, vocab: int, chunk: int, dtype: np.dtype
) -> tuple[Activation, ...]:
    """The activations that a forward pass with chunked scoring constrains.

    Args:
        config: the model.
        batch: the batch axis, name and size.
        positions: tokens in a sequence.
        vocab: entries of the output head.
        chunk: positions whose logits exist at a time.
        dtype: the compute dtype; logits are float32.
    """
    leading = (batch, ("position", positions))
    # The chunk that the head uses may be smaller than `chunk`, so that all are equal; see `chunking`.
    _, in_chunk = chunking(positions, chunk)

    def named(name: str, *axes: Axis) -> Activation:
        inner = tuple((axis.name, axis.size) for axis in axes)
        return Activation(name=name, axes=(*leading, *inner), mapping=constrained_by(name), dtype=dtype)

    def inside(name: str, along: str, *axes: Axis) -> Activation:
        inner = tuple((axis.name, axis.size) for axis in axes)
        return Activation(
            name=name + INSIDE, axes=(batch, (along, positions), *inner), mapping="attention", dtype=dtype
        )

    logits = Activation(
        name="logits of a chunk", axes=(batch, ("position", in_chunk), ("vocab", vocab)), dtype=np.dtype(np.float32)
    )
    of_layers = layer_activations(config)
    return (
        # Layers of one model may differ, but all read and write the same stream.
        named(RESIDUAL, *config.layers[0].stream_axes),
        named(EMBEDDED, config.Embed),
        *(named(name, *axes) for name, axes in of_layers.items()),
        *(
            # Inside attention keys have an axis of their own,
            # `key_position`, which context parallelism maps differently.
            inside(name, along, *axes)
            for name, axes in of_layers.items()
            for what, along in ATTENDED.items()
            if name == what or name.startswith(what + " [")
        ),
        logits,
    )
