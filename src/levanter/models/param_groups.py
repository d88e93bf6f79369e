"""What a parameter is for, told from its path and its named axes, for every model family alike.

The path decides where it speaks (`self_attn`, `mlp`, `lm_head`, `…norm`), for it is what the author wrote; the axes
decide where it does not. A normalization inside a block of attention is a norm. What nothing is known of is `other
weights`: bytes are never left out of a sum because their kind is not known.
"""

from haliax_ext.abstract import Leaf
from levanter.layers.low_rank import RANK

EMBEDDING, ATTENTION, MLP, HEAD, NORM, OTHER = "embedding", "attention", "mlp", "head", "norm", "other weights"
PARAMETER_GROUPS = (EMBEDDING, ATTENTION, MLP, HEAD, NORM, OTHER)

ADAPTERS = "adapters"
"""Factors of adapters, whatever they are bound to."""

FROZEN_GROUPS = tuple(f"frozen {group}" for group in PARAMETER_GROUPS)
"""The same kinds where they are frozen: they have no gradients and no optimizer state."""

_HEADS = ("lm_head", "head", "output_head", "score")
_EMBEDDINGS = ("embed", "wte", "wpe")
_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "feed_forward", "ffn", "moe", "experts", "router")


def frozen_group(leaf: Leaf) -> str:
    """The group of a parameter that is not trained: one of `FROZEN_GROUPS`."""
    return FROZEN_GROUPS[PARAMETER_GROUPS.index(parameter_group(leaf))]


def parameter_group(leaf: Leaf) -> str:
    """The group of a parameter: one of `PARAMETER_GROUPS`, or `ADAPTERS`.

    Args:
        leaf: path (of the module's attribute names) and axes. A path may begin with more than the module's own names.
    """
    if RANK in leaf.names:
        return ADAPTERS
    # The last part is the array's own name, `weight` or `bias`.
    *modules, array = leaf.path.lower().split(".")
    # From the inside out: `self_attn.q_norm` is a norm, `experts.0.gate` is of the MLP.
    for part in reversed(modules or [array]):
        if part.endswith(("norm", "layernorm")) or part.startswith(("ln_", "norm")):
            return NORM
        if part in _HEADS:
            return HEAD
        for words, group in ((_EMBEDDINGS, EMBEDDING), (_ATTENTION, ATTENTION), (_MLP, MLP)):
            if any(word in part for word in words):
                return group
    names = set(leaf.names)
    if "vocab" in names or {"position", "embed"} <= names:
        return EMBEDDING
    if names & {"kv_head", "heads", "head_size"}:
        return ATTENTION
    return MLP if names & {"mlp", "experts"} else OTHER
