"""Old keys of `model:`, among them the length of an evaluation's rows, which used to be the model's."""

from collections.abc import Collection
from dataclasses import replace

from levanter.config.upstream.changes import Change, Draft, Keys, OldKey, inline
from levanter.config.yaml_nodes import to_plain

MODEL: Keys = ("model",)
ROW_LENGTH = "max_eval_length"
ROW_LENGTH_WHY = "evaluations of that generation used rows of the model's length"
MODEL_KEYS = (
    OldKey(
        block="model",
        name="seq_len",
        new="max_seq_len",
        why="it is the longest sequence that the model accepts; each run chooses its own length",
    ),
)
INNER = ("model_a", "model_b", "model")
"""Blocks that have a `model:` of their own: the models of `perplexity_gap`."""
INNER_MODEL_KEYS = tuple(replace(row, block="*.model") for row in MODEL_KEYS)


def translate_model(draft: Draft) -> None:
    """Translates every old key of `model:`, wherever one stands; they are renamed, nothing more."""
    blocks = [(MODEL, MODEL_KEYS), *(((name, *MODEL), INNER_MODEL_KEYS) for name in INNER)]
    for path, rows in blocks:
        block = draft.block(path)
        for row in rows:
            entry = block.entry(row.name) if block is not None else None
            if entry is not None:
                draft.move(row, entry, path, [((*path, row.new), entry.node)])


def translate_row_length(draft: Draft, takes: Collection[str]) -> None:
    """Copies `model.seq_len` to the row length of entry points that have one, which it used to set."""
    # Only for entry points with rows of their own, and not over a length that the user wrote.
    old = draft.entry((*MODEL, "seq_len"))
    if old is None or ROW_LENGTH not in takes or draft.entry((ROW_LENGTH,)) is not None:
        return
    if not isinstance(to_plain(old.node), int):
        return  # the decoder reports the wrong type
    draft.set((ROW_LENGTH,), old.node, old="model.seq_len", mark=old.mark)
    text = inline(old.node)
    change = Change(key="model.seq_len", was=text, now=f"{ROW_LENGTH}: {text}", why=ROW_LENGTH_WHY, mark=old.mark)
    draft.changes.append(change)
