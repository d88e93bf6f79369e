"""`supervised_data:` beside `data:`: sets of inputs and targets that a training run evaluates, and does not train on.

One generation of `train_lm` had it: the split `validation` of one source, or of several by name. They become components
of `data:` whose source has that split alone. Entry points that take the key themselves keep it.
"""

from collections.abc import Collection

from levanter.config.upstream.changes import Draft, Keys, OldKey, inline
from levanter.config.yaml_nodes import Entry, MapNode, Node, from_plain

SUPERVISED = OldKey(
    block="",
    name="supervised_data",
    new="data.components.<name>, with validation data alone",
    why="evaluated data sets are components; these were never trained on",
)
SINGLE = "supervised"
"""The name of the component that a single source becomes."""
_FORMAT = {"input_field": ("input_key", "prompt"), "output_field": ("target_key", "response")}
_OF_A_SOURCE = ("train_urls", "validation_urls", "id", "input_field", "output_field")
_KNOWN = (*_OF_A_SOURCE, "name", "splits", "streaming", "stream", "cache_dir", "tags")


def translate_supervised(draft: Draft, takes: Collection[str]) -> None:
    """Moves the sets under `data.components`, where the entry point has no such key of its own."""
    entry = draft.entry((SUPERVISED.name,))
    if entry is None or SUPERVISED.name in takes or not ("data" in takes or "data" in draft.document):
        return
    if not isinstance(entry.node, MapNode):
        if inline(entry.node) == "null":
            draft.ignore(SUPERVISED, entry, ())
        else:
            draft.wrong(entry, SUPERVISED.name, f"expected a source, or sources by name, got {inline(entry.node)}")
            draft.remove((SUPERVISED.name,))
        return
    # A single source has the keys of a source; several are a mapping of names.
    single = any(key in entry.node for key in _OF_A_SOURCE)
    sources = [Entry(key=SINGLE, node=entry.node, mark=entry.mark)] if single else list(entry.node)
    edits: list[tuple[Keys, Node]] = []
    for source in sources:
        where = SUPERVISED.name if single else f"{SUPERVISED.name}.{source.key}"
        if not isinstance(source.node, MapNode):
            draft.wrong(source, where, f"expected a source, got {inline(source.node)}")
            continue
        for key in source.node:
            if key.key not in _KNOWN:
                draft.wrong(key, f"{where}.{key.key}", f"unknown key; the keys here are {', '.join(_KNOWN)}")
        edits.append((("data", "components", source.key), _component(source.node)))
    draft.move(SUPERVISED, entry, (), edits)


def _component(source: MapNode) -> MapNode:
    """A source as a component that has validation data and no other."""
    is_hub = "id" in source
    source_node = from_plain({"type": "hf", "splits": ["validation"]} if is_hub else {}, source.mark)
    format_node = from_plain({"type": "supervised"}, source.mark)
    assert isinstance(format_node, MapNode) and isinstance(source_node, MapNode)
    for old, (new, default) in _FORMAT.items():
        entry = source.entry(old)
        node = from_plain(default, source.mark) if entry is None else entry.node
        format_node = format_node.with_entry(
            Entry(key=new, node=node, mark=source.mark if entry is None else entry.mark)
        )
    for key in ("id", "name") if is_hub else ("validation_urls",):
        if (entry := source.entry(key)) is not None:
            source_node = source_node.with_entry(entry)
    component = MapNode(
        entries=(
            Entry(key="source", node=source_node, mark=source.mark),
            Entry(key="format", node=format_node, mark=source.mark),
        ),
        mark=source.mark,
    )
    return component if (tags := source.entry("tags")) is None else component.with_entry(tags)
