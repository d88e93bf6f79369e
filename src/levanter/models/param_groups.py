"""Sorts parameters into groups (embedding, attention, MLP, head, norm) by path and named axes.

The path decides if it has a telling name (`self_attn`, `mlp`, `lm_head`, `…norm`), since the author chose it; otherwise
the axes decide. A norm inside attention is a norm. A parameter that matches nothing is in `other weights`, so that no
bytes are missing from a sum.
"""

from collections.abc import Iterable, Iterator

from haliax_ext.abstract import Leaf
from haliax_ext.errors import nearest
from haliax_ext.mapping import path_matches
from levanter.layers.low_rank import RANK

EMBEDDING, ATTENTION, MLP, HEAD, NORM, OTHER = "embedding", "attention", "mlp", "head", "norm", "other weights"
PARAMETER_GROUPS = (EMBEDDING, ATTENTION, MLP, HEAD, NORM, OTHER)

ADAPTERS = "adapters"
"""Factors of adapters, whatever they are bound to."""

FROZEN_GROUPS = tuple(f"frozen {group}" for group in PARAMETER_GROUPS)
"""The same groups for frozen parameters, which have no gradients and no optimizer state."""

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
    # Before the path: the path of a bound factor contains the name of the projection that it adapts.
    if RANK in leaf.names:
        return ADAPTERS
    # The last part is the array's name, `weight` or `bias`.
    *modules, array = leaf.path.lower().split(".")
    # The innermost module decides: `self_attn.q_norm` is a norm, `experts.0.gate` belongs to the MLP.
    for part in reversed(modules or [array]):
        if part.endswith(("norm", "layernorm")) or part.startswith(("ln_", "norm")):
            return NORM
        if part in _HEADS:
            return HEAD
        for words, group in ((_EMBEDDINGS, EMBEDDING), (_ATTENTION, ATTENTION), (_MLP, MLP)):
            if any(word in part for word in words):
                return group
    # No telling module name (a third party's model): fall back to
    # the axes, `{position, embed}` being a table of positions.
    names = set(leaf.names)
    if "vocab" in names or {"position", "embed"} <= names:
        return EMBEDDING
    if names & {"kv_head", "heads", "head_size"}:
        return ATTENTION
    return MLP if names & {"mlp", "experts"} else OTHER


def selects(pattern: str, leaf: Leaf) -> bool:
    """Whether a pattern of a config selects a parameter.

    Args:
        pattern: one of `PARAMETER_GROUPS`, or a path pattern as in mappings (`**.self_attn`, `lm_head`).
        leaf: path and axes.
    """
    # Names of groups take precedence over paths: `norm` is the group, `**.norm` the modules of that name.
    return parameter_group(leaf) == pattern if pattern in PARAMETER_GROUPS else path_matches(pattern, leaf.path)


def hint(pattern: str, known: Iterable[Leaf], words: Iterable[str] = PARAMETER_GROUPS) -> str:
    """A clause that names what a pattern without matches may have meant.

    Args:
        pattern: selects none of `known`.
        known: the parameters.
        words: names that a pattern may be besides a path.
    """
    known = tuple(known)
    if pattern in PARAMETER_GROUPS:
        groups = sorted({parameter_group(leaf) for leaf in known})
        return f"the groups of this model are {', '.join(groups)}"
    names = list(dict.fromkeys([*words, *(name for leaf in known for name in _patterns(leaf))]))
    close = nearest(pattern, names)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"its paths are like {known[0].path}" if known else "there are no parameters"


def _patterns(leaf: Leaf) -> Iterator[str]:
    """Patterns that match a leaf: its path, and `**.name` for the modules on its path."""
    yield leaf.path
    for name in leaf.path.split(".")[:-1]:
        yield f"**.{name}"
