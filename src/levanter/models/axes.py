"""The glossary of logical axis names: every name a mapping may use, defined once.

`AXES.md` beside this file is rendered from here (a test keeps them equal). A model uses some of these names; a mapping
that names one the model does not have is noted, one that names anything else is refused.
"""

from collections.abc import Mapping

from haliax import Axis

from levanter.mesh import ModelAxes

KNOWN_AXES: dict[str, str] = {
    "batch": "sequences of a batch",
    "position": "positions in a sequence: those of queries and of the residual stream",
    "key_position": "positions in a sequence: those of keys and values; only `attention_mapping` maps them",
    "vocab": "entries of the vocabulary: rows of the embedding table and of the output head, and logits",
    "embed": "features of the residual stream",
    "mlp": "features inside the feed-forward part of a block",
    "kv_head": "attention heads that have their own keys and values",
    "q_heads_per_group": "query heads that share one key/value head",
    "head_size": "features of one attention head",
    "layers": "blocks of the model, stacked",
    "expert": "experts of a mixture-of-experts block",
    "top_experts": "experts chosen for a token, best first",
    "low_rank": "the rank of an adapter: features between its two factors",
    "token": "sequences and positions flattened together, as experts see them",
    "microbatch": "parts of a batch whose gradients are accumulated one after another",
    "page": "pages of a key/value cache",
    "kv": "the two of a key/value cache: key, then value",
    "slot": "positions inside a page of a key/value cache",
}
"""Axis name → what it counts."""

ALIASES: dict[str, str] = {
    "kv_heads": "kv_head",
    "layer": "layers",
    "experts": "expert",
    "LORA_R": "low_rank",
}
"""Spellings that users have in their YAML → our name."""

COMPOSITES: dict[str, tuple[str, ...]] = {"heads": ("kv_head", "q_heads_per_group")}
"""Names in mappings that stand for several axes at once, major first."""


def model_axes(axes: Mapping[str, Axis], *, vocab: int, positions: int | None = None) -> ModelAxes:
    """What a mesh is resolved for: a model's axes with its vocabulary and the length of its sequences.

    Args:
        axes: the model's, by name.
        vocab: ids that the model tells apart.
        positions: tokens in a sequence; None where there are none, as for weights alone.
    """
    more = {"vocab": vocab} if positions is None else {"vocab": vocab, "position": positions}
    sizes = {axis.name: axis.size for axis in axes.values()} | more
    return ModelAxes(sizes=sizes, known=KNOWN_AXES, aliases=ALIASES)


def glossary() -> str:
    """The text of `AXES.md`."""
    lines = [
        "# Axis names",
        "",
        "Every logical axis has one name, used by every model. Mappings (`trainer.mesh.*_mapping`) send these names to",
        "mesh axes. Rendered from `axes.py`.",
        "",
        "| name | counts |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in KNOWN_AXES.items()),
        "",
        "## Names that stand for several axes",
        "",
        *(
            f"- `{name}`: all attention heads, {' × '.join(f'`{part}`' for part in parts)}. `{name}: [A, B]` gives the "
            f"leading mesh axes to `{parts[0]}` while they divide it and the rest to `{parts[1]}`; keys and values "
            "are replicated over that rest."
            for name, parts in COMPOSITES.items()
        ),
        "",
        "## Other spellings that mappings accept",
        "",
        *(f"- `{alias}` is `{name}`" for alias, name in ALIASES.items()),
        "",
    ]
    return "\n".join(lines)
