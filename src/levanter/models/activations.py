"""The named activations of a decoder-only transformer, as shapes: what the compute mapping is checked against."""

import numpy as np

from haliax_ext.activations import Activation
from levanter.models.head_scores import chunking
from levanter.models.registry import LmConfig

RESIDUAL = "residual stream"
"""What the stream between blocks is called among the activations."""


def transformer_activations(
    config: LmConfig, *, batch: tuple[str, int], positions: int, vocab: int, chunk: int, dtype: np.dtype
) -> tuple[Activation, ...]:
    """What a forward pass with chunked scoring constrains.

    Args:
        config: the model; its axes `embed`, `mlp`, `kv_head`, `q_heads_per_group`, `head_size` are used as it has them.
        batch: the batch axis, name and size.
        positions: tokens in a sequence.
        vocab: entries of the output head.
        chunk: positions whose logits exist at a time.
        dtype: the compute dtype; logits are float32.
    """
    sizes = {axis.name: axis.size for axis in config.axes.values()}
    leading = (batch, ("position", positions))
    _, in_chunk = chunking(positions, chunk)

    def named(name: str, *axes: str) -> Activation:
        inner = tuple((axis, sizes[axis]) for axis in axes if axis in sizes)
        return Activation(name=name, axes=(*leading, *inner), dtype=dtype)

    residual = Activation(name=RESIDUAL, axes=(*leading, ("embed", sizes["embed"])), mapping="residual", dtype=dtype)
    logits = Activation(
        name="logits of a chunk", axes=(batch, ("position", in_chunk), ("vocab", vocab)), dtype=np.dtype(np.float32)
    )
    return (
        residual,
        named("embedded tokens", "embed"),
        named("queries", "kv_head", "q_heads_per_group", "head_size"),
        named("keys and values", "kv_head", "head_size"),
        named("mlp hidden", "mlp"),
        logits,
    )
