"""A YAML document as a tree of nodes that know their line.

There are three kinds: `Scalar`, `ListNode` and `MapNode`. They are immutable values, so documents can be merged and
translated like any data while every error can still name the file and line of a key.

A scalar keeps its source text; the type of the field decides what it means (`decode.py`). Where a field accepts any
type, the core schema of YAML 1.2 decides: `1e-3` is a number and `on` is a word (PyYAML alone follows YAML 1.1, where
it is the other way round).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from yaml.composer import ComposerError

from levanter.base.input_limits import DOCUMENT_DEPTH, DOCUMENT_NODES
from levanter.config.errors import Mark, Problem

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+|0o[0-7_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
LONGEST_NUMBER = 1000
"""Characters of a scalar above which it is text, whatever it looks like: no number here needs more."""
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL", "None"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf", ".Inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN"), float("nan")),
}


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A scalar. `plain` is false for a quoted one, which is always text.

    >>> mark = Mark(source="train.yaml", line=1)
    >>> Scalar(text="1e-3", mark=mark).value, Scalar(text="1e-3", mark=mark, plain=False).value
    (0.001, '1e-3')
    """

    text: str
    mark: Mark
    plain: bool = True

    @property
    def value(self) -> bool | int | float | str | None:
        """The value by the core schema of YAML 1.2, for fields of any type."""
        return scalar_value(self.text) if self.plain else self.text


@dataclass(frozen=True, kw_only=True)
class ListNode:
    """A sequence. `text` is the text as given, for a value of the command line."""

    items: tuple["Node", ...]
    mark: Mark
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key of a mapping, its value, and the mark of the key."""

    key: str
    node: "Node"
    mark: Mark


@dataclass(frozen=True, kw_only=True)
class MapNode:
    """A mapping, in the order it was written. Keys are text."""

    entries: tuple[Entry, ...]
    mark: Mark
    text: str | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __contains__(self, key: str) -> bool:
        return self.entry(key) is not None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, in the order of the document."""
        return tuple(entry.key for entry in self.entries)

    def entry(self, key: str) -> Entry | None:
        """The entry with this key, or None."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def get(self, key: str) -> "Node | None":
        """The value of this key, or None."""
        entry = self.entry(key)
        return entry and entry.node

    def at(self, path: Iterable[str]) -> Entry | None:
        """The entry at a path of keys, or None where there is none."""
        node: Node | None = self
        entry = None
        for key in path:
            entry = node.entry(key) if isinstance(node, MapNode) else None
            if entry is None:
                return None
            node = entry.node
        return entry

    def without(self, *keys: str) -> "MapNode":
        """This mapping without these keys."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.key not in keys))

    def with_entry(self, new: Entry) -> "MapNode":
        """This mapping with `new` in the place of the entry of its key, or at the end."""
        if new.key in self:
            return replace(self, entries=tuple(new if e.key == new.key else e for e in self.entries))
        return replace(self, entries=(*self.entries, new))


Node = Scalar | ListNode | MapNode


def scalar_value(text: str) -> bool | int | float | str | None:
    """Reads a plain scalar by the core schema of YAML 1.2 (and Python's `None`).

    >>> [scalar_value(text) for text in ("32", "1e-3", "0x10", "on", "null")]
    [32, 0.001, 16, 'on', None]
    """
    if text in _WORDS:
        return _WORDS[text]
    # int() takes quadratic time on long texts.
    if len(text) > LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        # Base 0 reads the prefixes 0x and 0o. A leading zero is excluded by the pattern: 010 is text.
        return int(text.replace("_", ""), 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def to_plain(node: Node) -> Any:
    """The node as dicts, lists and Python scalars.

    >>> to_plain(from_plain({"axes": {"model": 2}, "names": ["a", None]}, Mark(source="train.yaml")))
    {'axes': {'model': 2}, 'names': ['a', None]}
    """
    if isinstance(node, Scalar):
        # A quoted scalar is text, whatever it looks like.
        return node.value
    if isinstance(node, ListNode):
        return [to_plain(item) for item in node.items]
    return {entry.key: to_plain(entry.node) for entry in node}


def from_plain(value: object, mark: Mark) -> Node:
    """Dicts, lists and Python scalars as nodes that all carry one mark."""
    if isinstance(value, Mapping):
        entries = (Entry(key=str(k), node=from_plain(v, mark), mark=mark) for k, v in value.items())
        return MapNode(entries=tuple(entries), mark=mark)
    if isinstance(value, (list, tuple)):
        return ListNode(items=tuple(from_plain(item, mark) for item in value), mark=mark)
    if value is None:
        return Scalar(text="null", mark=mark)
    # Not plain: text such as "on" or "1" must not be read as another type.
    if isinstance(value, str):
        return Scalar(text=value, mark=mark, plain=False)
    text = repr(value)
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        text = {"True": "true", "False": "false", "inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[text]
    return Scalar(text=text, mark=mark)


def merged(base: Node, over: Node) -> Node:
    """Merges `over` into `base`: mappings key by key, anything else replaces.

    Two mappings whose `type:` differ describe different things: the later one replaces the earlier.

    >>> mark = Mark(source="train.yaml")
    >>> base, over = from_plain({"seed": 0, "mesh": {"a": 1}}, mark), from_plain({"mesh": {"b": 2}}, mark)
    >>> to_plain(merged(base, over))
    {'seed': 0, 'mesh': {'a': 1, 'b': 2}}
    """
    # A scalar or a list is replaced as a whole: merging lists element by element would have no clear meaning.
    if not (isinstance(base, MapNode) and isinstance(over, MapNode)):
        return over
    types = base.get("type"), over.get("type")
    if all(isinstance(t, Scalar) for t in types) and types[0].text != types[1].text:  # type: ignore[union-attr]
        return over
    result = {entry.key: entry for entry in base}
    for entry in over:
        base_entry = result.get(entry.key)
        result[entry.key] = entry if base_entry is None else replace(entry, node=merged(base_entry.node, entry.node))
    # An empty base is usually an empty file; the mark of the overriding document is more useful in messages.
    mark = over.mark if not base.entries else base.mark
    return MapNode(entries=tuple(result.values()), mark=mark)


class _Composer(yaml.BaseLoader):
    # A tag of our own tells a scalar without a tag from one that was tagged `!!str`.
    DEFAULT_SCALAR_TAG = "untagged"
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # PyYAML recurses for each level, so the limit must hold before its own recursion overflows the stack.
        if self.depth > DOCUMENT_DEPTH:
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, _TOO_DEEP, mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


_TOO_DEEP = f"lists and mappings are nested more than {DOCUMENT_DEPTH} deep, the limit for a configuration"


class _TooMuch(Exception):
    """A document has more values, or is deeper, than a configuration may be."""


def compose(
    text: str, source: str, problems: list[Problem], include: Callable[[str, Mark], Node | None]
) -> Node | None:
    """Reads one YAML document into nodes; what is wrong goes to `problems`.

    Args:
        text: the document.
        source: its name in marks.
        problems: receives duplicate keys, unknown tags, syntax errors.
        include: reads the document an `!include` names (None where it could not).

    Returns:
        the document, or None where there is none (empty, or not YAML at all).
    """
    try:
        # Only composed, not constructed: PyYAML would convert scalars by YAML 1.1 and lose the lines.
        root = yaml.compose(text, Loader=_Composer)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        mark = Mark(source=source, line=at.line + 1 if at else None)
        problems.append(Problem(message=f"not valid YAML: {message}", mark=mark))
        return None
    except yaml.YAMLError as error:
        problems.append(Problem(message=f"not valid YAML: {error}", mark=Mark(source=source)))
        return None
    try:
        return None if root is None else _Conversion(source, problems, include).node(root)
    except _TooMuch as much:
        problems.append(Problem(message=str(much), mark=Mark(source=source)))
        return None


class _Conversion:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, source: str, problems: list[Problem], include: Callable[[str, Mark], Node | None]):
        self.source, self.problems, self.include = source, problems, include
        self.open: set[int] = set()
        self.values = 0

    def node(self, raw: yaml.Node) -> Node:
        mark = self.mark(raw)
        self.values += 1
        # Every expansion of an alias counts, which stops documents whose aliases grow exponentially.
        if self.values > DOCUMENT_NODES:
            message = f"more than {DOCUMENT_NODES:,} values, the limit for a configuration (aliases count wherever"
            raise _TooMuch(f"{message} they stand)")
        if len(self.open) > DOCUMENT_DEPTH:
            raise _TooMuch(_TOO_DEEP)
        # PyYAML represents an alias by the same node object, so a cycle is a node inside of itself.
        if id(raw) in self.open:
            return self.wrong(mark, "an alias contains itself")
        if raw.tag == "!include":
            return self.included(raw, mark)
        if not raw.tag.startswith("tag:yaml.org,2002:") and raw.tag != "untagged":
            return self.wrong(mark, f"unknown tag {raw.tag} (the only custom tag is !include)")
        if isinstance(raw, yaml.ScalarNode):
            plain = raw.style is None and raw.tag != "tag:yaml.org,2002:str"
            return Scalar(text=raw.value, mark=mark, plain=plain)
        self.open.add(id(raw))
        try:
            if isinstance(raw, yaml.SequenceNode):
                return ListNode(items=tuple(self.node(item) for item in raw.value), mark=mark)
            assert isinstance(raw, yaml.MappingNode)
            return self.mapping(raw, mark)
        finally:
            self.open.discard(id(raw))

    def mapping(self, raw: yaml.MappingNode, mark: Mark) -> MapNode:
        entries: dict[str, Entry] = {}
        # Keys inherited by `<<` are collected apart, since a key of the mapping itself may still follow.
        inherited: dict[str, Entry] = {}
        for key, value in raw.value:
            where = self.mark(key)
            if not isinstance(key, yaml.ScalarNode):
                self.wrong(where, "a key must be a scalar, not a list or a mapping")
            # The merge key of YAML 1.1: explicit keys win over inherited ones, wherever they are in the mapping.
            elif key.value == "<<" and key.style is None:
                for entry in self.inherited(self.node(value)):
                    # Of several inherited mappings the first one wins.
                    inherited.setdefault(entry.key, entry)
            elif key.value in entries:
                message = f"key `{key.value}` occurs twice, first at line {entries[key.value].mark.line}"
                self.wrong(where, message)
            else:
                entries[key.value] = Entry(key=key.value, node=self.node(value), mark=where)
        return MapNode(entries=tuple({**inherited, **entries}.values()), mark=mark)

    def inherited(self, node: Node) -> Iterator[Entry]:
        for mapping in node.items if isinstance(node, ListNode) else (node,):
            if isinstance(mapping, MapNode):
                yield from mapping
            else:
                self.wrong(mapping.mark, "`<<` takes a mapping or a list of mappings")

    def included(self, raw: yaml.Node, mark: Mark) -> Node:
        if not isinstance(raw, yaml.ScalarNode) or not raw.value:
            return self.wrong(mark, "!include takes a file name")
        node = self.include(raw.value, mark)
        return MapNode(entries=(), mark=mark) if node is None else node

    def mark(self, raw: yaml.Node) -> Mark:
        return Mark(source=self.source, line=raw.start_mark.line + 1 if raw.start_mark else None)

    def wrong(self, mark: Mark, message: str) -> Scalar:
        self.problems.append(Problem(message=message, mark=mark))
        return Scalar(text="null", mark=mark)
