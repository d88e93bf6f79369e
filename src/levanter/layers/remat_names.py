"""Names of the activations inside a block that gradient checkpointing may keep.

A policy (`model.gradient_checkpointing`) that recomputes a block in the backward pass may keep the activations named
here, or offload them to host memory: `{save_block_internals: [query, key, value]}`, `{offload_block_internals: [...]}`.

    query, key, value    after the rotary embedding, as attention reads them
    attention            the weighted values, before the output projection
    attention_output     after the output projection
    gate, up             the two products of a gated MLP; a plain one has `up` only

These are the names of attention and of MLPs. `Part.saved` of a model's layers lists those that it has; another mixer
may have other names.
"""

from typing import TypeVar

import haliax as hax

T = TypeVar("T")


def saved(x: T, name: str) -> T:
    """Gives `x` a name for gradient checkpointing; without a policy that uses the name this is the identity.

    Args:
        x: an array, or a tree of them.
        name: a key of `Part.saved` of the module's spec.
    """
    return hax.tree_checkpoint_name(x, name)
