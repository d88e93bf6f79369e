"""Decodes YAML nodes into frozen dataclasses by the types of the fields, and collects every problem with its line.

`Decoder.decode` returns the value, or `INVALID` after it has recorded at least one problem. It continues after a
problem, so one pass finds all of them: unknown keys, missing keys, wrong types, and what the classes themselves refuse
(`ValueError` in `__post_init__`). A dataclass is only built when all its fields are valid.
"""

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import draccus

from levanter.base.input_limits import HINTS
from levanter.config.durations import parse_duration
from levanter.config.errors import COMMAND_LINE, Mark, Problem, did_you_mean, nearest, same_key
from levanter.config.schema import (
    TYPE_KEY,
    Annotation,
    annotated_members,
    choice_names,
    config_fields,
    describe,
    is_choice,
    is_mapping,
    is_text_value,
    key_paths,
    list_origin,
    offered_names,
    registered_name,
    strip,
)
from levanter.config.validators import declared_range, out_of_range
from levanter.config.yaml_nodes import Entry, ListNode, MapNode, Node, Scalar, compose, scalar_value, to_plain

Keys = tuple[str, ...]


class _Invalid:
    def __repr__(self) -> str:
        return "INVALID"


FILE_FLAGS = ("config_path", "config", "configs")
"""The words of a command line that name files, and no keys."""
LONGEST_TEXT = 200
"""Characters of a value that are shown."""
INVALID: Final = _Invalid()
"""The result of decoding a node whose problem has been recorded."""

# YAML 1.1 has more words for true and false; they are booleans only in a field whose type is bool.
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Decoder:
    """Decodes one document into a configuration class.

    Args:
        root: the class of the whole document, for hints about misplaced keys.
        old_keys: the old spellings that are accepted in the mapping at a path, for hints about misspelt ones.

    Attributes:
        problems: the mistakes, in the order of the document.
        out_of_range: whether a number has the right type and is outside of its range.
        unknown: the number of unknown keys so far; only the first `HINTS` get a hint, which takes time to compute.
        written: dotted paths of the keys of dataclasses that the document contains.
    """

    def __init__(self, root: type, old_keys: Callable[[Keys], Iterable[str]]):
        self.root, self.old_keys = root, old_keys
        self.problems: list[Problem] = []
        self.written: set[str] = set()
        self.out_of_range = False
        self.unknown = 0

    def decode(self, node: Node, annotation: Annotation, path: Keys = ()) -> object:
        """The value of `node` in the annotated type, or `INVALID`."""
        value = self._value(node, strip(annotation), path)
        problem = None if value is INVALID else out_of_range(value, annotation)
        if problem is None:
            return value
        self.out_of_range = True
        limits = None if (declared := declared_range(annotation)) is None else str(declared)
        return self.wrong(problem, node.mark, path, value=shown(node), expected=limits)

    def _value(self, node: Node, annotation: Annotation, path: Keys) -> object:
        members = annotated_members(annotation)
        if len(members) > 1:
            return self._union(node, annotation, members, path)
        if annotation is Any or annotation is object:
            return to_plain(node)
        # The order matters: a choice is a dataclass too, and a text value may be one.
        if is_choice(annotation):
            return self._choice(node, annotation, path)
        if is_text_value(annotation) and isinstance(node, Scalar):
            return self._text_value(node, annotation, path)
        if is_dataclass(annotation):
            return self._dataclass(node, annotation, path)  # type: ignore[arg-type]
        if list_origin(annotation) is not None:
            return self._list(node, annotation, path)
        if is_mapping(annotation):
            return self._mapping(node, annotation, path)
        return self._scalar(node, annotation, path)

    def wrong(
        self,
        message: str,
        mark: Mark | None,
        path: Keys,
        *,
        value: str | None = None,
        expected: str | None = None,
        nearest: Iterable[str] = (),
    ) -> _Invalid:
        """Records a problem at the key `path` and returns `INVALID`, for the caller to return."""
        problem = Problem(
            message=message, mark=mark, key=".".join(path), value=value, expected=expected, nearest=tuple(nearest)
        )
        self.problems.append(problem)
        return INVALID

    def expected(
        self, annotation: Annotation, node: Node, path: Keys, hint: str = "", *, names: Iterable[str] = ()
    ) -> _Invalid:
        """Records that `node` is not of the annotated type, with a hint or the nearest names; gives `INVALID`."""
        # A key that a user misspells is a word; a list or a mapping has no nearest name.
        word, names = (node.text, list(names)) if isinstance(node, Scalar) else ("", [])
        expected, value = describe(annotation), shown(node)
        message = f"expected {expected}, got {value}{hint or did_you_mean(word, names)}"
        return self.wrong(message, node.mark, path, value=value, expected=expected, nearest=nearest(word, names))

    # --- mappings -----------------------------------------------------------------------------------------------

    def _dataclass(
        self, node: Node, cls: type, path: Keys, skip: Keys = (), choices: Mapping[str, type] | None = None
    ) -> object:
        node = _unfolded(node)
        if not isinstance(node, MapNode):
            hint = "; write {} for the defaults" if isinstance(node, Scalar) and node.value is None else ""
            return self.expected(cls, node, path, hint or self._block_hint(node, path))
        known = config_fields(cls)
        # A block of a single registered class may repeat its `type:`, as a canonical dump writes it.
        if TYPE_KEY in node and TYPE_KEY not in known and not skip and (type_name := registered_name(cls)) is not None:
            skip = (TYPE_KEY,)
            self._literal_type(node, type_name, path)
        before = len(self.problems)
        arguments: dict[str, object] = {}
        for entry in node:
            if entry.key in known:
                arguments[entry.key] = self.decode(entry.node, known[entry.key].type, (*path, entry.key))
            elif entry.key not in skip:
                self._unknown_key(entry, tuple(known), path, choices or {})
        for name, config_field in known.items():
            if config_field.required and name not in arguments:
                expected = describe(config_field.type)
                self.wrong(f"required key is missing ({expected})", node.mark, (*path, name), expected=expected)
        # Building the class from a part of its fields would report follow-up problems of the missing ones.
        if len(self.problems) > before:
            return INVALID
        try:
            instance = cls(**arguments)
        except ValueError as error:
            return self._refused(str(error), node, path, set(known))
        # Only after the class accepted its values: a refused block is no explicit key of anything.
        self.written |= {".".join((*path, name)) for name in arguments}
        return instance

    def _block_hint(self, node: Node, path: Keys) -> str:
        """What to write for a checkpoint or a text file that was given as the block `model` or `data`, or ""."""
        if not isinstance(node, Scalar) or not node.text:
            return ""
        outermost = config_fields(self.root) if is_dataclass(self.root) else {}
        checkpoint = next((key for key in ("hf_checkpoint", "initialize_from_hf") if key in outermost), None)
        # A word without a slash is rather the name of an architecture than a checkpoint.
        if path == ("model",) and checkpoint is not None and ("/" in node.text or node.text.endswith(".gguf")):
            return f"; `model` is the architecture, and a checkpoint is {checkpoint}: {node.text}"
        if path == ("data",):
            urls = "train_urls" if "optimizer" in outermost else "validation_urls"
            return f"; name the text: data.components.NAME.source.{urls}: [{node.text}]"
        return ""

    def _refused(self, message: str, node: MapNode, path: Keys, known: set[str]) -> _Invalid:
        """Records the problems in the `ValueError` of a configuration class, each at the mark of its block.

        A class reports one problem a line and does not know in which file its values were written. A line that names a
        key of the command line gets the command line as its mark.

        Args:
            message: the text of the error.
            node: the block that the class was built from.
            path: the block's path.
            known: the keys of the class.
        """
        marks = {entry.key: entry.mark for entry in _entries(node) if entry.mark.source == COMMAND_LINE}
        by_mark: dict[Mark, list[str]] = {}
        mark = node.mark
        for n, line in enumerate(message.splitlines()):
            words = set(re.findall(r"\w+", line))
            # A line that names none of the keys continues the previous line.
            if n == 0 or (line[:1].isalnum() and words & known):
                mark = next((mark for key, mark in marks.items() if key in words), node.mark)
            by_mark.setdefault(mark, []).append(line)
        for mark, lines in by_mark.items():
            self.wrong("\n".join(lines), mark, path)
        return INVALID

    def _unknown_key(self, entry: Entry, known: Keys, path: Keys, choices: Mapping[str, type]) -> None:
        self.unknown += 1
        if self.unknown > HINTS:
            # A document of another program has hundreds of unknown keys; comparing each with all names takes seconds.
            self.wrong("unknown key", entry.mark, (*path, entry.key))
            return
        others = [name for name, cls in choices.items() if entry.key in config_fields(cls)]
        vocabulary = {*known, *self.old_keys(path)} - {entry.key}
        if not path and entry.mark.source == COMMAND_LINE:
            vocabulary.update(FILE_FLAGS)
        # A known name of the same thing says more than a key of another type or block, or a similar word.
        hint = same_key(entry.key, known)
        hint = hint or (f"; it is a key of {TYPE_KEY}: {' or '.join(others[:3])}" if others else "")
        # A key of another block is misplaced: similar names in this block would be a misleading hint.
        other_paths = [p for p in key_paths(self.root).get(entry.key, ()) if p != ".".join((*path, entry.key))]
        if not hint and other_paths:
            hint = f"; it belongs at {' or '.join(f'`{p}`' for p in other_paths[:3])}"
        similar = () if hint else nearest(entry.key, vocabulary)
        hint = hint or did_you_mean(entry.key, vocabulary)
        if not hint:
            hint = f"; valid keys here are {', '.join(known)}" if known else "; no keys are accepted here"
        self.wrong(
            f"unknown key{hint}",
            entry.mark,
            (*path, entry.key),
            value=entry.key,
            expected=", ".join(known),
            nearest=similar,
        )

    def _choice(self, node: Node, base: Annotation, path: Keys) -> object:
        node = _unfolded(node)
        choices = choice_names(base)
        names = ", ".join(offered_names(base))
        if not isinstance(node, MapNode):
            known = isinstance(node, Scalar) and node.text in choices
            hint = f"; write {{{TYPE_KEY}: {node.text}}}" if known else f" ({TYPE_KEY}: {names})"  # type: ignore[union-attr]
            return self.expected(base, node, path, self._block_hint(node, path) or hint)
        type_entry = node.entry(TYPE_KEY)
        if type_entry is None:
            name = base.default_choice_name()
            if name is None:
                # Without `type:` and without a default, no class is chosen, so no other key of the block is checked.
                message = f"needs `{TYPE_KEY}:` with one of {names}"
                if node.entries and all(entry.mark.source == COMMAND_LINE for entry in node):
                    message += f"; add --{'.'.join(path)}.{TYPE_KEY}"
                return self.wrong(message, node.mark, path, expected=names)
        elif not isinstance(type_entry.node, Scalar) or type_entry.node.value is None:
            value = shown(type_entry.node)
            message = f"expected one of {names}, got {value}"
            return self.wrong(message, type_entry.mark, (*path, TYPE_KEY), value=value, expected=names)
        else:
            name = type_entry.node.text
        if name not in choices:
            assert type_entry is not None, f"{base.__name__} names a default choice {name!r} that is not registered"
            message = f"unknown {TYPE_KEY} `{name}`{did_you_mean(name, choices)} (known: {names})"
            return self.wrong(
                message,
                type_entry.node.mark,
                (*path, TYPE_KEY),
                value=name,
                expected=names,
                nearest=nearest(name, choices),
            )
        try:
            # A plug-in registry imports the chosen package here.
            chosen = base.get_choice_class(name)
        except ValueError as error:  # a package that cannot be imported
            assert type_entry is not None
            return self.wrong(str(error), type_entry.node.mark, (*path, TYPE_KEY))
        return self._dataclass(node, chosen, path, skip=(TYPE_KEY,), choices=base.get_known_choices())

    def _literal_type(self, node: MapNode, type_name: str, path: Keys) -> None:
        written_type = node.get(TYPE_KEY)
        if not isinstance(written_type, Scalar) or written_type.text != type_name:
            assert written_type is not None
            value = shown(written_type)
            message = f"expected `{type_name}` here, got {value}"
            self.wrong(message, written_type.mark, (*path, TYPE_KEY), value=value, expected=type_name)

    def _mapping(self, node: Node, annotation: Annotation, path: Keys) -> object:
        node = _unfolded(node)
        if not isinstance(node, MapNode):
            return self.expected(annotation, node, path)
        key_type, value_type = get_args(annotation) or (Any, Any)
        before = len(self.problems)
        result = {}
        for entry in node:
            at = (*path, entry.key)
            word = Scalar(text=entry.key, mark=entry.mark)
            key = entry.key if key_type in (str, Any) else self.decode(word, key_type, at)
            value = self.decode(entry.node, value_type, at)
            if key is not INVALID:
                result[key] = value
        return INVALID if len(self.problems) > before else result

    # --- lists --------------------------------------------------------------------------------------------------

    def _list(self, node: Node, annotation: Annotation, path: Keys) -> object:
        node = _unfolded(node)
        if not isinstance(node, ListNode):
            return self.expected(annotation, node, path)
        make = list_origin(annotation)
        assert make is not None
        args = get_args(annotation)
        # `tuple[int, str]` has a type for each position; `tuple[int, ...]` and lists have one type for all.
        if make is tuple and args and Ellipsis not in args and get_origin(annotation) is tuple:
            types: tuple[Any, ...] = args
            if len(types) != len(node.items):
                expected = f"{len(types)} items ({', '.join(map(describe, types))})"
                value = str(len(node.items))
                return self.wrong(f"expected {expected}, got {value}", node.mark, path, value=value, expected=expected)
        else:
            types = (args[0] if args else Any,) * len(node.items)
        before = len(self.problems)
        items = [
            self.decode(item, t, (*path, str(i))) for i, (item, t) in enumerate(zip(node.items, types, strict=True))
        ]
        return INVALID if len(self.problems) > before else make(items)

    # --- unions -------------------------------------------------------------------------------------------------

    def _union(self, node: Node, annotation: Annotation, members: tuple[Annotation, ...], path: Keys) -> object:
        """The value in the first member type that accepts it; members that suit the node's kind are tried first."""
        if isinstance(node, Scalar) and node.value is None and type(None) in members:
            return None
        attempts: list[tuple[Any, list[Problem]]] = []
        for member in sorted(members, key=lambda m: _suits(node, strip(m))):
            # A decoder of its own, so that the problems of a member that does not fit can be dropped.
            attempt = Decoder(self.root, self.old_keys)
            value = attempt.decode(node, member, path)
            if value is not INVALID:
                self.written |= attempt.written
                return value
            if attempt.out_of_range:  # the type is right and the number wrong, so another member would hide the cause
                self.out_of_range = True
                self.problems += attempt.problems
                return INVALID
            attempts.append((strip(member), attempt.problems))
        same_kind = [decoded for member, decoded in attempts if _kind(member) == _node_kind(node)]
        # For a mapping or a list, the member with the fewest problems is most likely the one that the user means.
        if _node_kind(node) != "scalar" and same_kind:
            self.problems += min(same_kind, key=len)
            return INVALID
        literals = [arg for m in members if get_origin(m) is Literal for arg in get_args(m) if isinstance(arg, str)]
        return self.expected(annotation, node, path, self._block_hint(node, path), names=literals)

    # --- scalars ------------------------------------------------------------------------------------------------

    def _text_value(self, node: Scalar, cls: Annotation, path: Keys) -> object:
        if node.value is None:
            return self.expected(cls, node, path)
        try:
            return cls.parse(node.text)
        except ValueError as error:
            return self.wrong(str(error), node.mark, path, value=node.text)

    def _scalar(self, node: Node, annotation: Annotation, path: Keys) -> object:
        if annotation in (str, Path) and not isinstance(node, Scalar) and node.text is not None:
            # On the command line `--tag [a]` looks like a list; where the field is text, it is the text `[a]`.
            return annotation(node.text)
        value = _scalar_value(node, annotation)
        if value is not INVALID:
            return value
        if isinstance(node, Scalar):
            if get_origin(annotation) is Literal:
                return self.expected(annotation, node, path, names=map(str, get_args(annotation)))
            if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
                names = [member.name for member in annotation]
                return self.expected(annotation, node, path, names=names)
        # Types that draccus alone knows, such as those that a plug-in registers, are decoded by draccus.
        codec = draccus.decode.dispatch(annotation) if isinstance(annotation, type) else None  # type: ignore[attr-defined]
        if codec is None or annotation in (bool, int, float, str, Path, timedelta):
            hint = "; quote it if you mean text" if annotation is str and isinstance(node, Scalar) else ""
            if annotation is Path and isinstance(node, Scalar) and "://" in node.text:
                hint = "; a path of this machine, not a URL"
            return self.expected(annotation, node, path, hint)
        try:
            return draccus.decode(annotation, to_plain(node))
        except (ValueError, draccus.ParsingError) as error:
            return self.wrong(str(error), node.mark, path, value=shown(node))


def _scalar_value(node: Node, annotation: Annotation) -> object:
    """The value of a scalar as one of the simple types, or `INVALID`."""
    if not isinstance(node, Scalar):
        return INVALID
    value, text = node.value, node.text
    if annotation is type(None):
        return None if value is None else INVALID
    if get_origin(annotation) is Literal:
        # A literal text matches the written word; a literal number must also have the same type, since `True == 1`.
        return next((a for a in get_args(annotation) if (a == value and type(a) is type(value)) or a == text), INVALID)
    if annotation is str:
        return INVALID if value is None or isinstance(value, bool) else text
    if annotation is Path:
        # An empty path would be the working folder, and a URL a folder `gs:` in it.
        refused = value is None or isinstance(value, bool) or not text.strip() or "://" in text
        return INVALID if refused else Path(text)
    if annotation is bool:
        # `"yes"` in quotes is text, as in YAML.
        return _BOOLS.get(text.lower(), INVALID) if node.plain else INVALID
    if annotation in (int, float, timedelta):
        return _number(text, annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return next((m for m in annotation if m.name == text or m.value == value), INVALID)
    return INVALID


def _number(text: str, annotation: type) -> object:
    try:
        if annotation is timedelta:
            return parse_duration(text)
        # `1_000` and `0x10` are numbers by YAML's rules, not by Python's `int`.
        value = scalar_value(text)
        # bool is a subclass of int in Python, but `true` is no number in a configuration.
        if isinstance(value, (bool, str)) or value is None:
            return INVALID
        if annotation is float:
            return float(value)
        exact = isinstance(value, int) or (value.is_integer() and "." not in text)  # `1e6` is an integer too
        return int(value) if exact else INVALID
    except (ValueError, OverflowError):
        return INVALID


def _kind(annotation: Annotation) -> Literal["scalar", "list", "mapping"]:
    if list_origin(annotation) is not None:
        return "list"
    if is_mapping(annotation) or is_choice(annotation) or is_dataclass(annotation):
        return "mapping"
    return "scalar"


def _node_kind(node: Node) -> Literal["scalar", "list", "mapping"]:
    return "scalar" if isinstance(node, Scalar) else "list" if isinstance(node, ListNode) else "mapping"


def _suits(node: Node, annotation: Annotation) -> int:
    """The rank of a member of a union: members of the node's own kind are tried first, text last."""
    if not isinstance(node, Scalar):
        return 0 if _kind(annotation) == _node_kind(node) else 1
    value = node.value
    if get_origin(annotation) is Literal:
        return 0
    # Text is last for a number, or `int | str` would never be an integer: every scalar can be read as text.
    order: tuple[Any, ...]
    if isinstance(value, str):
        order = (timedelta, str, Path, int, float, bool)
        if is_text_value(annotation) or (isinstance(annotation, type) and issubclass(annotation, enum.Enum)):
            return 1
    else:
        order = (type(value), int, float, timedelta, str, Path)
    return 2 + (order.index(annotation) if annotation in order else len(order))


def _entries(node: Node) -> Iterator[Entry]:
    """All entries in a node, at any depth."""
    if isinstance(node, MapNode):
        for entry in node:
            yield entry
            yield from _entries(entry.node)
    elif isinstance(node, ListNode):
        for item in node.items:
            yield from _entries(item)


def _unfolded(node: Node) -> Node:
    """Parses a mapping or list that is one word of the command line (`model: 2`); returns other nodes unchanged."""
    if isinstance(node, Scalar) and node.plain and node.mark.source == COMMAND_LINE:
        unfolded = compose(node.text, COMMAND_LINE, [], lambda *_: None)
        if unfolded is not None and not isinstance(unfolded, Scalar):
            return unfolded
    return node


def shown(node: Node) -> str:
    """A node as messages show it: the text of a scalar with its type, or `a list`, `a mapping`.

    >>> shown(Scalar(text="3", mark=Mark(source="a.yaml"))), shown(Scalar(text="on", mark=Mark(source="a.yaml")))
    ('3 (an integer)', '"on"')
    """
    if isinstance(node, ListNode):
        return "a list"
    if isinstance(node, MapNode):
        return "a mapping"
    value = node.value
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "an integer", float: "a number"}
    text = node.text if len(node.text) <= LONGEST_TEXT else f"{node.text[:LONGEST_TEXT]}…"
    return f'"{text}"' if isinstance(value, str) else f"{text} ({kinds[type(value)]})"
