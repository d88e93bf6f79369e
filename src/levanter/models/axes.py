"""The glossary of logical axis names: every name that a mapping may use, with its meaning.

`glossary()` renders `AXES.md` in this folder, and a test compares the two. A model uses some of these names. If a
mapping has a name of the glossary that the model does not use, the plan has a note; any other name is an error.
"""

from collections.abc import Mapping

from haliax import Axis

from levanter.mesh import ModelAxes

KNOWN_AXES: dict[str, str] = {
    # The order is that of the page AXES.md, which is generated from this table.
    "batch": "sequences of a batch",
    "position": "positions in a sequence, of queries and of the residual stream",
    "key_position": "positions in a sequence, of keys and values; only `attention_mapping` maps them",
    "vocab": "entries of the vocabulary: rows of the embedding table and of the output head; logits",
    "embed": "features of the residual stream",
    "mlp": "features inside the feed-forward part of a block",
    "kv_head": "attention heads that have their own keys and values",
    "q_heads_per_group": "query heads that share one key/value head",
    "head_size": "features of one attention head",
    "layers": "stacked blocks of the model",
    "table_row": "rows of the table of a layer's value embedding, one for each token id",
    "gate_channel": "leading features of the residual stream that a gate reads",
    "expert": "experts of a mixture-of-experts block",
    "top_experts": "experts selected for a token, best first",
    "low_rank": "features between the two factors of an adapter (its rank)",
    "token": "tokens: sequences and positions flattened together, for experts",
    "microbatch": "microbatches of a batch, for gradient accumulation",
    "page": "pages of a key/value cache",
    "kv": "two entries of a key/value cache: key, value",
    "slot": "positions inside a page of a key/value cache",
}
"""Axis name → what it counts."""

ALIASES: dict[str, str] = {
    "kv_heads": "kv_head",
    "layer": "layers",
    "experts": "expert",
    # Upstream's name of the rank axis.
    "LORA_R": "low_rank",
}
"""Spellings that users have in their YAML → our name."""

COMPOSITES: dict[str, tuple[str, ...]] = {"heads": ("kv_head", "q_heads_per_group")}
"""Names in mappings that stand for several axes at once, major first."""


def model_axes(axes: Mapping[str, Axis], *, vocab: int, positions: int | None = None) -> ModelAxes:
    """The axes that a mesh is resolved for: a model's, its vocabulary and the length of its sequences.

    Args:
        axes: the model's, by name.
        vocab: size of the vocabulary.
        positions: tokens in a sequence; None if only weights are planned.
    """
    more = {"vocab": vocab} if positions is None else {"vocab": vocab, "position": positions}
    sizes = {axis.name: axis.size for axis in axes.values()} | more
    return ModelAxes(sizes=sizes, known=KNOWN_AXES, aliases=ALIASES)


def glossary() -> str:
    """The text of `AXES.md`."""
    lines = [
        "# Axis names",
        "",
        "These are the names that you can use in a mapping (`trainer.mesh.*_mapping`), which sends logical",
        "axes to mesh axes ([sharding](../../../docs/sharding.md)). All models use the same names. A plan shows the",
        "mappings and the axes of the largest arrays:",
        "",
        "```",
        "python -m levanter.main.plan eval_lm --config_path config/eval/demo.yaml --target v4-16 --no_compile",
        "```",
        "",
        "`levanter.models.axes.glossary()` renders this page.",
        "",
        "| name | elements of the axis |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in KNOWN_AXES.items()),
        "",
        "## Names for several axes",
        "",
        *(
            f"- `{name}`: all attention heads, {' × '.join(f'`{part}`' for part in axes)}. `{name}: [A, B]` gives the "
            f"leading mesh axes to `{axes[0]}` while they divide it and the rest to `{axes[1]}`; keys and values "
            "are replicated over that rest."
            for name, axes in COMPOSITES.items()
        ),
        "",
        "## Aliases",
        "",
        *(f"- `{alias}` means `{name}`" for alias, name in ALIASES.items()),
        "",
    ]
    return "\n".join(lines)
