"""`Draft`: a document during translation, with its changes and its contradictions.

A *change* is one old key with its translation and the reason; every change is printed once. A *draft* is the document
while it is translated. An old key never overwrites what the user wrote in the new spelling: if both have the same
value, the old one is removed; if they differ, the document is refused with an error that names both.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from levanter.config.errors import Mark, Problem
from levanter.config.yaml_nodes import Entry, MapNode, Node, Scalar, from_plain, to_plain

Keys = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One old key and its translation.

    Attributes:
        key: the old key, dotted.
        was: its value.
        now: the new keys that replace it, as `key: value` text ("" for none).
        why: one sentence.
        mark: the position of the old key; None for a default that was not written.
        kind: whether the key was translated, or has no effect here.
    """

    key: str
    was: str
    now: str
    why: str
    mark: Mark | None = None
    kind: Literal["translated", "ignored"] = "translated"

    @property
    def line(self) -> int | None:
        """The line of the old key."""
        return self.mark.line if self.mark else None

    def __str__(self) -> str:
        where = f"{self.mark}: " if self.mark else ""
        if self.kind == "ignored":
            return f"{where}{self.key} is ignored: {self.why}"
        return f"{where}{self.key}: {self.was} → {self.now} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class OldKey:
    """A row of the table of old keys, which the documentation is made from.

    Attributes:
        block: the mapping it stands in, dotted (`*` for any one key); "" for the document.
        name: the old key.
        new: its new spelling, in words.
        why: why it changed, or how its meaning is kept.
        default: what the old generation took where the key was absent ("" where that does not matter).
    """

    block: str
    name: str
    new: str
    why: str
    default: str = ""

    @property
    def path(self) -> str:
        """The old key with the block it stands in, dotted."""
        return f"{self.block}.{self.name}".lstrip(".")


class PlainDumper(yaml.SafeDumper):
    """Writes a value that stands at two places twice, not as an anchor and an alias."""

    def ignore_aliases(self, data: object) -> bool:
        """True: a value that occurs twice is written twice, and no anchor refers to it."""
        del data
        return True


def inline(value: object) -> str:
    """A value (or node) as one line of YAML."""
    plain = to_plain(value) if isinstance(value, Node) else value
    text = yaml.dump(
        plain, Dumper=PlainDumper, default_flow_style=True, sort_keys=False, width=100_000, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()


class Draft:
    """A document under translation."""

    def __init__(self, document: MapNode):
        self.document = document
        self.changes: list[Change] = []
        self.problems: list[Problem] = []
        # Which old key wrote a path, so that two old keys that contradict each other are both named.
        self._written_by: dict[Keys, str] = {}

    def entry(self, path: Keys) -> Entry | None:
        """The entry at a path of the document as it is now."""
        return self.document.at(path)

    def block(self, path: Keys) -> MapNode | None:
        """The mapping at a path, or None."""
        entry = self.entry(path)
        return entry.node if entry is not None and isinstance(entry.node, MapNode) else None

    def remove(self, path: Keys) -> None:
        """Takes the entry at a path out."""
        self.document = removed(self.document, path)

    def set(self, path: Keys, value: object, *, old: str, mark: Mark) -> None:
        """Writes `value` (plain or a node) at a path, for the old key `old` that stands at `mark`."""
        node = value if isinstance(value, Node) else from_plain(value, mark)
        # Merge a mapping key by key, so that only keys in both documents can contradict.
        if isinstance(node, MapNode) and node.entries and self.block(path) is not None:
            for entry in node:
                self.set((*path, entry.key), entry.node, old=old, mark=mark)
            return
        existing = self.entry(path)
        # An empty block (`mesh: {}`) sets nothing, so it contradicts nothing.
        empty = isinstance(existing and existing.node, MapNode) and not existing.node.entries  # type: ignore[union-attr]
        if existing is None or empty:
            self.document = _with(self.document, path, node, mark)
            self._written_by[path] = old
        elif to_plain(existing.node) != to_plain(node):
            key = ".".join(path)
            by = self._written_by.get(path)
            self.problems.append(
                Problem(
                    message=(
                        f"contradicts `{by or key}`{f' ({existing.mark})' if existing.mark else ''}: the old key means "
                        f"{key}: {inline(node)}, the document also has {inline(existing.node)}; keep one of them"
                    ),
                    mark=mark,
                    key=old,
                )
            )

    def replace(self, path: Keys, node: Node) -> None:
        """Puts another node in the place of the one at a path."""
        entry = self.entry(path)
        assert entry is not None, f"there is no {'.'.join(path)}"
        self.document = _with(self.document, path, node, entry.mark)

    def note(self, row: OldKey, entry: Entry, key: str, now: str) -> None:
        """Records the change of an old key whose entry was replaced by other means."""
        self.changes.append(Change(key=key, was=inline(entry.node), now=now, why=row.why, mark=entry.mark))

    def wrong(self, entry: Entry, key: str, message: str) -> None:
        """Records that the value of an old key is not valid."""
        self.problems.append(Problem(message=message, mark=entry.mark, key=key))

    def move(self, row: OldKey, entry: Entry, block: Keys, edits: Iterable[tuple[Keys, Any]], why: str = "") -> None:
        """Replaces the old key `block.row.name` by edits, and records the change."""
        # Removed before the edits are written: the new key may be the old one with another value.
        self.remove((*block, row.name))
        # Read twice below, and a generator could be read only once.
        edits = tuple(edits)
        key = ".".join((*block, row.name))
        for path, value in edits:
            self.set(path, value, old=key, mark=entry.mark)
        now = ", ".join(f"{'.'.join(path)}: {inline(value)}" for path, value in edits)
        change = Change(
            key=key, was=inline(entry.node), now=now or "(the default)", why=why or row.why, mark=entry.mark
        )
        self.changes.append(change)

    def ignore(self, row: OldKey, entry: Entry, block: Keys) -> None:
        """Removes an old key that has no effect here, and records that."""
        self.remove((*block, row.name))
        key = ".".join((*block, row.name))
        change = Change(key=key, was=inline(entry.node), now="", why=row.why, mark=entry.mark, kind="ignored")
        self.changes.append(change)


def removed(node: MapNode, path: Keys) -> MapNode:
    """A document without the entry at a path."""
    if len(path) == 1:
        return node.without(path[0])
    entry = node.entry(path[0])
    if entry is None or not isinstance(entry.node, MapNode):
        return node
    # Nodes are immutable, so every mapping on the path is built anew.
    return node.with_entry(replace(entry, node=removed(entry.node, path[1:])))


def _with(node: MapNode, path: Keys, value: Node, mark: Mark) -> MapNode:
    entry = node.entry(path[0])
    if len(path) == 1:
        return node.with_entry(Entry(key=path[0], node=value, mark=mark if entry is None else entry.mark))
    inner = entry.node if entry is not None else None
    # `trainer:` without a value is null in YAML; it counts as an empty block.
    if inner is None or (isinstance(inner, Scalar) and inner.value is None):
        inner = MapNode(entries=(), mark=mark)
    if not isinstance(inner, MapNode):
        return node  # the decoder reports the wrong type
    new = Entry(key=path[0], node=_with(inner, path[1:], value, mark), mark=mark if entry is None else entry.mark)
    return node.with_entry(new)
