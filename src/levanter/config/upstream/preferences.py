"""Earlier keys of `train_dpo`: a reference that was two keys, and a checkpoint of which only parameters were taken."""

from levanter.config.upstream.changes import Change, Draft, OldKey
from levanter.config.yaml_nodes import to_plain

TRAIN_DPO, LORA_DPO = "train_dpo", "lora_dpo"
"""The upstream commands whose keys a class may accept besides its own (`EARLIER`)."""

PATH = OldKey(
    block="",
    name="reference_model_path",
    new="reference: {type: separate, model_path}",
    why="the reference model has a block of its own",
)
IS_HF = OldKey(block="", name="reference_is_hf", new="reference.is_hf", why=PATH.why, default="true")
BEGINS = OldKey(
    block="",
    name="initialize_from_checkpoint_path",
    new="initialize_model_from_checkpoint_path",
    why="train_dpo takes the parameters of a checkpoint, not its optimizer state",
)
ORDER = OldKey(block="data.components.*", name="shuffle", new="", why="the order of all sets is that of data.shuffle")
PREFERENCE_KEYS = (PATH, IS_HF, BEGINS)
"""Keys that only `train_dpo` had, or meant something else there."""


def translate_preferences(draft: Draft, earlier: str) -> None:
    """Translates such a document, for an entry point that was one of the two.

    Args:
        draft: the document.
        earlier: the class's `EARLIER`; "" for none.
    """
    if earlier in (TRAIN_DPO, LORA_DPO):
        _random_a(draft, "adapter" if earlier == TRAIN_DPO else "lora")
        _orders(draft)
    if earlier != TRAIN_DPO:
        return
    path, is_hf, begins = (draft.entry((row.name,)) for row in PREFERENCE_KEYS)
    if path is not None:
        draft.move(PATH, path, (), [(("reference", "type"), "separate"), (("reference", "model_path"), path.node)])
    if is_hf is not None:
        # Either of the two old keys means a separate reference model.
        draft.move(IS_HF, is_hf, (), [(("reference", "type"), "separate"), (("reference", "is_hf"), is_hf.node)])
    if begins is not None and to_plain(begins.node) is None:
        draft.ignore(BEGINS, begins, ())
    elif begins is not None:
        draft.move(BEGINS, begins, (), [((BEGINS.new,), begins.node)])


def _random_a(draft: Draft, block: str) -> None:
    """Sets `a_init_mode: random` where only `zero_init_b` is given: that was its meaning before the key existed."""
    zero = draft.entry((block, "zero_init_b"))
    # The contradiction arises only where B is zero by request and A's mode is not stated.
    if zero is None or to_plain(zero.node) is not True or draft.entry((block, "a_init_mode")) is not None:
        return
    key = f"{block}.a_init_mode"
    draft.set((block, "a_init_mode"), "random", old=f"{block}.zero_init_b", mark=zero.mark)
    why = "with zero_init_b: true A was random; its default of today would make both factors 0"
    draft.changes.append(Change(key=key, was="(absent)", now=f"{key}: random", why=why, mark=zero.mark))


def _orders(draft: Draft) -> None:
    """Takes `shuffle` out of components, where published documents have it and nothing ever read it."""
    for component in draft.block(("data", "components")) or ():
        path = ("data", "components", component.key)
        entry = draft.entry((*path, ORDER.name))
        if entry is not None:
            draft.ignore(ORDER, entry, path)
