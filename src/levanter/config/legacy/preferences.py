"""Earlier keys of `train_dpo`: a reference that was two keys, and a checkpoint of which only parameters were taken."""

from levanter.config.legacy.changes import Draft, OldKey
from levanter.config.nodes import to_plain

TRAIN_DPO = "train_dpo"
"""Whose keys a class may have besides (`EARLIER`)."""

PATH = OldKey(
    block="",
    name="reference_model_path",
    new="reference: {type: separate, model_path}",
    why="what answers are compared with is a choice of its own",
)
IS_HF = OldKey(block="", name="reference_is_hf", new="reference.is_hf", why=PATH.why, default="true")
BEGINS = OldKey(
    block="",
    name="initialize_from_checkpoint_path",
    new="initialize_model_from_checkpoint_path",
    why="train_dpo takes the parameters of a checkpoint, not its optimizer state",
)
PREFERENCE_KEYS = (PATH, IS_HF, BEGINS)
"""Keys that only `train_dpo` had, or meant something else there."""


def translate_preferences(draft: Draft, earlier: str) -> None:
    """Translates such a document, for an entry point that was `train_dpo`.

    Args:
        draft: the document.
        earlier: the class's `EARLIER`; "" for none.
    """
    if earlier != TRAIN_DPO:
        return
    path, is_hf, begins = (draft.entry((row.name,)) for row in PREFERENCE_KEYS)
    if path is not None:
        draft.move(PATH, path, (), [(("reference", "type"), "separate"), (("reference", "model_path"), path.node)])
    if is_hf is not None:
        draft.move(IS_HF, is_hf, (), [(("reference", "type"), "separate"), (("reference", "is_hf"), is_hf.node)])
    if begins is not None and to_plain(begins.node) is None:
        draft.ignore(BEGINS, begins, ())
    elif begins is not None:
        draft.move(BEGINS, begins, (), [((BEGINS.new,), begins.node)])
