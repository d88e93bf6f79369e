"""Old keys of single entry points: adapters, the evaluation harness, the sampling engine.

They are at the top of a document, or in a block that only one entry point has, so the keys themselves identify the
entry point.
"""

from dataclasses import replace

from levanter.config.upstream.changes import Draft, Keys, OldKey, inline
from levanter.config.yaml_nodes import Entry, ListNode, MapNode, Node, to_plain

HARNESS: Keys = ("eval_harness",)
ENGINE: Keys = ("engine",)
SERVICE: Keys = ("server", "service")
"""The engine's block where it is part of a server's."""
PAGE_TOKENS = 128
"""The size of a page where a document does not say."""

TRAIN_LENGTH = OldKey(
    block="", name="max_train_length", new="train_seq_len", why="it sets the length of the training rows"
)
HARNESS_LENGTH = OldKey(
    block="eval_harness",
    name="max_eval_length",
    new="max_length",
    why="it sets the length of the longest text that is scored",
)
TASK_TARGET = OldKey(
    block="eval_harness.task_spec.*", name="doct_to_target", new="doc_to_target", why="the key was misspelt upstream"
)
PAGES = OldKey(
    block="engine",
    name="max_pages_per_seq",
    new="max_seq_len, that many pages of page_size tokens",
    why="sequence lengths are given in tokens",
    default="64",
)
LOGPROBS = OldKey(block="engine", name="enable_logprobs", new="", why="log-probabilities are requested per request")
SERVICE_PAGES = replace(PAGES, block="server.service")
SERVICE_LOGPROBS = replace(LOGPROBS, block="server.service")
EXPORT_DTYPE = OldKey(block="", name="export_dtype", new="dtype", why="it sets the dtype of the exported weights")
SHARD_SIZE = OldKey(block="", name="max_shard_size", new="max_shard_bytes", why="the size of a weights file in bytes")
_RENAMED = (EXPORT_DTYPE, SHARD_SIZE, TRAIN_LENGTH)
ENTRY_POINT_KEYS = (*_RENAMED, HARNESS_LENGTH, TASK_TARGET, PAGES, LOGPROBS, SERVICE_PAGES, SERVICE_LOGPROBS)


def translate_entry_points(draft: Draft) -> None:
    """Translates the old keys that only one entry point has."""
    for row in _RENAMED:
        _rename(draft, row, ())
    _rename(draft, HARNESS_LENGTH, HARNESS)
    _tasks(draft)
    _engine(draft, ENGINE, PAGES, LOGPROBS)
    _engine(draft, SERVICE, SERVICE_PAGES, SERVICE_LOGPROBS)


def _rename(draft: Draft, row: OldKey, block: Keys) -> None:
    entry = draft.entry((*block, row.name))
    if entry is not None:
        draft.move(row, entry, block, [((*block, row.new), entry.node)])


def _tasks(draft: Draft) -> None:
    """Renames a key inside the mappings of a list."""
    listed = draft.entry((*HARNESS, "task_spec"))
    if listed is None or not isinstance(listed.node, ListNode):
        return
    items = tuple(_task(draft, number, item) for number, item in enumerate(listed.node.items))
    # A list has no path of keys, so its items are rewritten in place instead of moved.
    if items != listed.node.items:
        draft.replace((*HARNESS, "task_spec"), replace(listed.node, items=items, text=None))


def _task(draft: Draft, number: int, item: Node) -> Node:
    entry = item.entry(TASK_TARGET.name) if isinstance(item, MapNode) else None
    if entry is None or not isinstance(item, MapNode):
        return item
    key = f"eval_harness.task_spec[{number}].{TASK_TARGET.name}"
    existing = item.entry(TASK_TARGET.new)
    if existing is not None and to_plain(existing.node) != to_plain(entry.node):
        draft.wrong(
            entry, key, f"contradicts `{TASK_TARGET.new}` ({existing.mark}): they are one key, renamed; keep one"
        )
        return item.without(TASK_TARGET.name)
    draft.note(TASK_TARGET, entry, key, f"{TASK_TARGET.new}: {inline(entry.node)}")
    renamed = Entry(key=TASK_TARGET.new, node=entry.node, mark=entry.mark)
    return item.without(TASK_TARGET.name).with_entry(renamed)


def _engine(draft: Draft, block: Keys, counted: OldKey, requested: OldKey) -> None:
    pages = draft.entry((*block, counted.name))
    if pages is not None:
        count = to_plain(pages.node)
        size = draft.entry((*block, "page_size"))
        tokens = PAGE_TOKENS if size is None else to_plain(size.node)
        if isinstance(count, int) and isinstance(tokens, int) and not isinstance(count, bool):
            # Old documents count pages; the length in tokens depends on the page size of the same block.
            draft.move(counted, pages, block, [((*block, "max_seq_len"), count * tokens)])
        else:
            draft.wrong(pages, f"{counted.block}.{counted.name}", f"expected an integer, got {inline(pages.node)}")
            draft.remove((*block, counted.name))
    logprobs = draft.entry((*block, requested.name))
    if logprobs is not None:
        draft.ignore(requested, logprobs, block)
