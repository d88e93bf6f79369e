"""Old shapes of `data:`: one source at the top, or `configs:`; both become `components:`.

The old generation had three shapes: files (`train_urls`, `validation_urls`), one data set of the Hub (`id`), and a
mixture (`configs:` with weights). The new one has components, each with a source and a format. Old shapes did not
shuffle by default; the new one does, so `shuffle: false` is written explicitly.
"""

from collections.abc import Mapping

from levanter.config.errors import COMMAND_LINE, did_you_mean, same_key
from levanter.config.upstream.changes import Change, Draft, Keys, OldKey, inline
from levanter.config.yaml_nodes import Entry, MapNode, Node, Scalar, from_plain, to_plain

DATA: Keys = ("data",)
SINGLE = "train"
"""The name of the component that a single source becomes."""

_URL_KEYS = ("train_urls", "validation_urls")
_HF_KEYS = ("id", "name", "stream", "splits")
_COMPONENT_KEYS = ("tags", "format")
_SIBLING_KEYS = ("pack", "split", "flat_cache", "type")
"""Keys of today's components, which an old source may have as well."""
_FLAT = (*_URL_KEYS, *_HF_KEYS, *_COMPONENT_KEYS, "configs", "tokenizer", "vocab_size", "cache_dir", "cache_options")
_FLAT += ("enforce_eos", "chat_template", "ignore_token_id", "shuffle", "permutation_type")
_FLAT += ("train_weights", "stop_strategy", "mixture_block_size", "max_train_batches", "num_validation_sequences")
_FLAT += ("target_budget", "experiment_budget")
_ONE_SOURCE = "a single source is one component"


def _row(name: str, new: str, why: str, default: str = "") -> OldKey:
    return OldKey(block="data", name=name, new=new, why=why, default=default)


DATA_KEYS = (
    *(_row(name, f"components.{SINGLE}.source.{name}", _ONE_SOURCE) for name in (*_URL_KEYS, *_HF_KEYS)),
    *(_row(name, f"components.{SINGLE}.{name}", _ONE_SOURCE) for name in _COMPONENT_KEYS),
    _row("configs", "components, each with a source", "data sets are components, each with a source and a format"),
    _row("shuffle", "shuffle: false where absent", "the old layouts did not shuffle by default", "false"),
)
FORMAT_KEYS = (
    OldKey(
        block="data.components.*.format",
        name="input_field",
        new="input_key",
        why="the keys of supervised records were renamed",
        default="prompt",
    ),
    OldKey(
        block="data.components.*.format",
        name="output_field",
        new="target_key",
        why="the keys of supervised records were renamed",
        default="response",
    ),
)
CHAT_SLICE = OldKey(
    block="data.components.*.format",
    name="slice_strategy",
    new="overlength (of a chat format)",
    why="it decides what happens to conversations longer than a row",
)


FLAT_KEY = OldKey(
    block="",
    name="train_urls",
    new="data.train_urls (and likewise every key of a data set)",
    why="cache_dataset used to take the keys of a data set at the top level",
)
FLAT_TRACKER = OldKey(
    block="", name="tracker", new="trainer.tracker", why="cache_dataset used to take its tracker at the top level"
)
_NO_RAY = "jobs do not run on Ray; the process you start builds the token store"
FLAT_RAY = tuple(
    OldKey(block="", name=name, new="", why=_NO_RAY)
    for name in ("ray", "address", "start_workers", "auto_start_cluster")
)
FLAT_KEYS = (FLAT_KEY, FLAT_TRACKER, *FLAT_RAY)


def _flat(draft: Draft) -> None:
    """Moves a document that is a data set under `data:`, and its other keys to their present places."""
    document = draft.document
    # `id` alone does not show that the document is a data set of the Hub.
    hub = "id" in document and ("tokenizer" in document or "cache_dir" in document)
    if "data" in document or not (hub or any(key in document for key in (*_URL_KEYS, "configs"))):
        return
    for row in FLAT_RAY:
        if (entry := document.entry(row.name)) is not None:
            draft.ignore(row, entry, ())
    tracker = document.entry(FLAT_TRACKER.name)
    if tracker is not None:
        draft.move(FLAT_TRACKER, tracker, (), [(("trainer", "tracker"), tracker.node)])
    # Only keys of a data set move; everything else at the top belongs to the command.
    for key in [key for key in _FLAT if key in document]:
        entry = document.entry(key)
        assert entry is not None
        draft.remove((key,))
        draft.set((*DATA, key), entry.node, old=key, mark=entry.mark)
        text = inline(entry.node)
        change = Change(key=key, was=text, now=f"data.{key}: {text}", why=FLAT_KEY.why, mark=entry.mark)
        draft.changes.append(change)


_SOURCES: Mapping[str, Keys] = {
    "files": _URL_KEYS,
    "hub": _HF_KEYS,
    "configs": ("configs",),
    "components": ("components",),
}
"""The ways to name sources in `data:`, and their keys."""
_BY_NAME = ("train_weights", "max_train_batches", "num_validation_sequences")
"""Keys whose values name the sets of a mixture."""


def _prefer_command_line(draft: Draft) -> None:
    """Removes the sources of files where the command line names a source in another way."""
    _prefer(draft, DATA, _SOURCES)
    components = draft.block((*DATA, "components"))
    for name in components.keys if components is not None else ():
        path = (*DATA, "components", name, "source")
        # The type of a source follows from its keys, so that of the file goes with them.
        by = _prefer(draft, path, {"files": _URL_KEYS, "hub": (*_HF_KEYS, "revision", "type")})
        if by is not None and by.key in _HF_KEYS and draft.entry((*path, "type")) is None:
            draft.set((*path, "type"), "hf", old=by.key, mark=by.mark)


def _prefer(draft: Draft, path: Keys, kinds: Mapping[str, Keys]) -> Entry | None:
    """Removes the sources of files below a path; the entry of the command line that names another one."""
    block = draft.block(path)
    if block is None:
        return None
    chosen = {key: kind for kind, keys in kinds.items() for key in keys if _is_typed(block.entry(key))}
    # Without a source on the command line, or with two, the document is judged as it is.
    if len(set(chosen.values())) != 1:
        return None
    kind, by = next(iter(chosen.values())), ".".join((*path, next(iter(chosen))))
    rest = [key for other, keys in kinds.items() if other != kind for key in keys if key in block]
    if kind in ("files", "hub") and {"configs", "components"} & set(rest):
        # One source has no sets that weights could name.
        rest += [key for key in _BY_NAME if key in block and not _is_typed(block.entry(key))]
    for key in rest:
        entry = block.entry(key)
        assert entry is not None
        draft.remove((*path, key))
        why = f"the command line names another source, {by}"
        change = Change(
            key=".".join((*path, key)), was=inline(entry.node), now="", why=why, mark=entry.mark, kind="ignored"
        )
        draft.changes.append(change)
    return block.entry(next(iter(chosen)))


def _is_typed(entry: Entry | None) -> bool:
    """Whether some of an entry is from the command line."""
    if entry is None:
        return False
    if entry.mark.source == COMMAND_LINE:
        return True
    return isinstance(entry.node, MapNode) and any(_is_typed(inner) for inner in entry.node)


def translate_data(draft: Draft) -> None:
    """Translates the shape of `data:`, whichever of the three old ones it has."""
    _flat(draft)
    _prefer_command_line(draft)
    block = draft.block(DATA)
    if block is None:
        return
    single = [key for key in (*_URL_KEYS, "id") if key in block]
    old = block.entry("configs")
    if "components" in block:
        # Components are today's shape: an old shape beside them would be a second answer to the same question.
        for key in [*single, *(["configs"] if old else [])]:
            entry, new = block.entry(key), block.entry("components")
            assert entry is not None and new is not None
            message = (
                f"contradicts `data.components` ({new.mark}): a document may have only one of them; keep "
                "data.components"
            )
            draft.wrong(entry, f"data.{key}", message)
            draft.remove((*DATA, key))
        _renamed_formats(draft)
        return
    if old is not None and single:
        entry = block.entry(single[0])
        assert entry is not None
        message = f"contradicts `data.configs` ({old.mark}): the sources of a mixture belong under `configs` only"
        draft.wrong(entry, f"data.{single[0]}", message)
        draft.remove((*DATA, single[0]))
    elif old is not None:
        _mixture(draft, old)
    elif single:
        _single(draft, block)
    else:
        return
    # With problems the document is refused anyway; a note about the default would only distract.
    if not draft.problems and "shuffle" not in block:
        _set_shuffle(draft, block)


def _single(draft: Draft, block: MapNode) -> None:
    is_hf = "id" in block
    keys = [key for key in (*_URL_KEYS, *_HF_KEYS, *_COMPONENT_KEYS) if key in block]
    moved = MapNode(entries=tuple(entry for entry in block if entry.key in keys), mark=block.mark)
    cache = block.entry("cache_dir")
    if cache is not None:
        moved = moved.with_entry(cache)
    rows = {row.name: row for row in DATA_KEYS}
    component = _component(draft, moved, (*DATA, "components", SINGLE))
    for key in keys:
        entry = block.entry(key)
        assert entry is not None
        # A Hub data set has no lists of files.
        if is_hf and key in _URL_KEYS:
            draft.wrong(entry, f"data.{key}", "contradicts `data.id`: a source is either files or a Hub data set")
        home = ".".join((*DATA, "components", SINGLE, *(() if key in _COMPONENT_KEYS else ("source",)), key))
        draft.remove((*DATA, key))
        text = inline(entry.node)
        change = Change(key=f"data.{key}", was=text, now=f"{home}: {text}", why=rows[key].why, mark=entry.mark)
        draft.changes.append(change)
    draft.set((*DATA, "components", SINGLE), component, old=f"data.{keys[0]}", mark=moved.entries[0].mark)


def _mixture(draft: Draft, old: Entry) -> None:
    if not isinstance(old.node, MapNode):
        draft.wrong(old, "data.configs", f"expected a mapping of named sources, got {inline(old.node)}")
        return
    components = []
    for entry in old.node:
        path = (*DATA, "components", entry.key)
        if isinstance(entry.node, MapNode):
            node = _known(draft, entry.node, f"data.configs.{entry.key}")
            components.append(Entry(key=entry.key, node=_component(draft, node, path), mark=entry.mark))
        else:
            draft.wrong(entry, f"data.configs.{entry.key}", f"expected a mapping, got {inline(entry.node)}")
    draft.remove((*DATA, "configs"))
    new = MapNode(entries=tuple(components), mark=old.mark)
    draft.set((*DATA, "components"), new, old="data.configs", mark=old.mark)
    names = ", ".join(entry.key for entry in components)
    row = next(row for row in DATA_KEYS if row.name == "configs")
    change = Change(
        key="data.configs", was=f"{{{names}}}", now=f"data.components: {{{names}}}", why=row.why, mark=old.mark
    )
    draft.changes.append(change)


def _known(draft: Draft, source: MapNode, where: str) -> MapNode:
    """An old source without the keys that sources did not have; each of them is a problem."""
    keys = (*_URL_KEYS, *_HF_KEYS, *_COMPONENT_KEYS, "cache_dir")
    for entry in source:
        if entry.key not in (*keys, *_SIBLING_KEYS):
            hint = same_key(entry.key, keys) or did_you_mean(entry.key, keys)
            hint = hint or f"; valid keys here are {', '.join(keys)}"
            draft.wrong(entry, f"{where}.{entry.key}", f"unknown key{hint}")
            source = source.without(entry.key)
    return source


def _component(draft: Draft, source: MapNode, path: Keys) -> MapNode:
    """An old source as a component: its own keys under `source`, the rest beside it."""
    inner = [entry for entry in source if entry.key in (*_URL_KEYS, *_HF_KEYS)]
    # A source with an `id` is one of the Hub; the others are files, which is the default type.
    if "id" in source:
        kind = Entry(key="type", node=from_plain("hf", source.mark), mark=source.mark)
        inner = [kind, *inner]
    siblings = [entry for entry in source if entry not in inner]
    siblings = [_format(draft, entry, path) if entry.key == "format" else entry for entry in siblings]
    if not inner:
        return MapNode(entries=tuple(siblings), mark=source.mark)  # what was tokenized before, and nothing else
    node = MapNode(entries=tuple(inner), mark=source.mark)
    return MapNode(entries=(Entry(key="source", node=node, mark=source.mark), *siblings), mark=source.mark)


def _format(draft: Draft, entry: Entry, path: Keys) -> Entry:
    """The format of an old source; a supervised one had other key names and other defaults."""
    node = entry.node
    if not isinstance(node, MapNode):
        return entry
    kind = node.get("type")
    if not isinstance(kind, Scalar) or kind.text != "supervised":
        return entry
    for row in FORMAT_KEYS:
        written = node.entry(row.name)
        if row.new in node:
            if written is not None:
                message = f"contradicts `{row.new}` beside it: they are one key, renamed"
                draft.wrong(written, ".".join((*path, "format", row.name)), message)
            # The key has its new name already.
            continue
        # Where the key is absent its old default is written, because today's default is another one.
        value: Node = from_plain(row.default, entry.mark) if written is None else written.node
        mark = entry.mark if written is None else written.mark
        node = node.without(row.name).with_entry(Entry(key=row.new, node=value, mark=mark))
        key = ".".join((*path, "format", row.name))
        was = f"(absent, {row.default})" if written is None else inline(value)
        change = Change(key=key, was=was, now=f"{row.new}: {inline(value)}", why=row.why, mark=written and written.mark)
        draft.changes.append(change)
    return Entry(key=entry.key, node=node, mark=entry.mark)


def _renamed_formats(draft: Draft) -> None:
    """Renames the keys of supervised formats in components that were written as components."""
    components = draft.block((*DATA, "components"))
    for name in components.keys if components is not None else ():
        block: Keys = (*DATA, "components", name, "format")
        for row in FORMAT_KEYS:
            entry = draft.entry((*block, row.name))
            if entry is not None:
                draft.move(row, entry, block, [((*block, row.new), entry.node)])
        kind, entry = draft.entry((*block, "type")), draft.entry((*block, CHAT_SLICE.name))
        # Formats of preferences have this key today, with the same values; only in chat formats it has another name.
        if entry is not None and kind is not None and to_plain(kind.node) == "chat":
            draft.move(CHAT_SLICE, entry, block, [((*block, "overlength"), entry.node)])


def _set_shuffle(draft: Draft, block: MapNode) -> None:
    row = next(row for row in DATA_KEYS if row.name == "shuffle")
    # The old shapes did not shuffle; today's default does.
    draft.set((*DATA, "shuffle"), False, old="data.shuffle", mark=block.mark)
    change = Change(key="data.shuffle", was="(absent, false)", now="data.shuffle: false", why=row.why)
    draft.changes.append(change)
