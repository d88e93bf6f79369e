"""Names of the activations inside a block that gradient checkpointing may keep.

A policy (`model.gradient_checkpointing`) that recomputes a block in the backward pass may still keep, or send to host
memory, what is named here: `{save_block_internals: [query, key, value]}`, `{offload_block_internals: [...]}`.

    query, key, value    after the rotary embedding, as attention reads them
    attention            the weighted values, before the output projection
    attention_output     after the output projection
    gate, up             the two products of a gated MLP; a plain one has `up` only

These are those of attention and of MLPs. Which ones a model has, its layers say (`Part.saved`): another mixer may have
names of its own.
"""

from typing import TypeVar

import haliax as hax

T = TypeVar("T")


def saved(x: T, name: str) -> T:
    """Gives `x` a name for gradient checkpointing; without a policy that mentions it nothing changes.

    Args:
        x: an array, or a tree of them.
        name: among `Part.saved` of the spec that made the module.
    """
    return hax.tree_checkpoint_name(x, name)
