"""Old keys of `model:`."""

from levanter.config.legacy.changes import Draft, Keys, OldKey

MODEL: Keys = ("model",)
MODEL_KEYS = (
    OldKey(
        block="model",
        name="seq_len",
        new="max_seq_len",
        why="it is the longest sequence the model takes; each run chooses its own length",
    ),
)


def translate_model(draft: Draft) -> None:
    """Translates every old key of `model:`; they are renamed, nothing more."""
    block = draft.block(MODEL)
    for row in MODEL_KEYS:
        entry = block.entry(row.name) if block is not None else None
        if entry is not None:
            draft.move(row, entry, MODEL, [((*MODEL, row.new), entry.node)])
