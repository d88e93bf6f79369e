"""Names of the activations inside a block that gradient checkpointing may keep.

A policy (`model.gradient_checkpointing`) that recomputes a block in the backward pass may still keep, or send to host
memory, what is named here: `{save_block_internals: [query, key, value]}`, `{offload_block_internals: [...]}`.

    query, key, value    after the rotary embedding, as attention reads them
    attention            the weighted values, before the output projection
    attention_output     after the output projection
    gate, up             the two products of a gated MLP
"""

from typing import Literal, TypeVar, get_args

import haliax as hax

T = TypeVar("T")
SavedName = Literal["query", "key", "value", "attention", "attention_output", "gate", "up"]
SAVED_NAMES: tuple[str, ...] = get_args(SavedName)


def saved(x: T, name: SavedName) -> T:
    """Gives `x` a name for gradient checkpointing; without a policy that mentions it nothing changes."""
    return hax.tree_checkpoint_name(x, name)
