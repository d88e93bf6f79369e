"""Old shapes of memorization documents: a `base_eval:` with everything but the books, and switches without effect.

In the old generation a document with several books had a complete single-book document in it, `base_eval:`; its keys
are top-level keys now. The switches chose between ways of loading and storing of which this project has one.
"""

from levanter.config.upstream.changes import Change, Draft, OldKey, inline

BASE = "base_eval"
_BOOK_KEYS = ("txt_path", "books", BASE)
_BATCHES = "windows are slices of one token matrix, and batches need no loader"
_COMPILER = "the compiler is given the shapes as they are; the kernel is chosen by `model.attn_backend`"
_FILES = "results are written under output_base_path, which may be a bucket; trackers receive the numbers"
_HISTOGRAM = (
    "the histogram shows every window on logarithmic axes; `coverage_threshold` decides what counts as reproduced"
)

MEMORIZATION_KEYS = (
    OldKey(block="", name=BASE, new="its keys, beside `books`", why="settings shared by all books are top-level keys"),
    OldKey(block="", name="use_dataloader", new="", why=_BATCHES),
    OldKey(block="", name="gcp_log", new="", why=_FILES),
    OldKey(block="", name="histogram_linear", new="", why=_HISTOGRAM),
    OldKey(block="", name="pz_threshold", new="", why=_HISTOGRAM),
    OldKey(block="", name="opt_align_seq_len_128", new="", why=_COMPILER),
    OldKey(block="", name="opt_force_flash_block_128", new="", why=_COMPILER),
    OldKey(
        block="",
        name="opt_disable_checkpointing",
        new="",
        why="scoring computes no gradients, so nothing is rematerialized",
    ),
    OldKey(block="", name="opt_warmup_compile", new="", why="the first batch compiles, and the progress line shows it"),
)


def translate_memorization(draft: Draft) -> None:
    """Lifts `base_eval:` and drops old switches, in a document that names books."""
    if not any(draft.entry((key,)) is not None for key in _BOOK_KEYS):
        return
    _lift_base(draft)
    for row in MEMORIZATION_KEYS:
        entry = draft.entry((row.name,))
        if entry is not None and not row.new:
            draft.ignore(row, entry, ())


def _lift_base(draft: Draft) -> None:
    base, block = draft.entry((BASE,)), draft.block((BASE,))
    if base is None or block is None:
        return  # the decoder reports a value that is no mapping
    draft.remove((BASE,))
    for entry in block:
        # Each key is set separately, so that a key that is in both places with another value is reported.
        draft.set((entry.key,), entry.node, old=f"{BASE}.{entry.key}", mark=entry.mark)
    keys = ", ".join(entry.key for entry in block)
    draft.changes.append(
        Change(key=BASE, was=f"{{{keys}}}", now=inline(keys), why=MEMORIZATION_KEYS[0].why, mark=base.mark)
    )
