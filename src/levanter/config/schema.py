"""The meaning of a type annotation for the decoder of YAML.

Configurations are frozen dataclasses. Besides them a field may be a bool, int, float, str, `Path`, `timedelta`, an
enum, a `Literal`, a list, tuple, set or mapping of these, a union, `Any`, and two kinds of class:

- a *choice*: a base class with draccus's registry (`draccus.ChoiceRegistry`, `draccus.PluginRegistry`), whose
  `type:` key picks the registered dataclass. Families register themselves there; this package imports none of them.
- a *text value*: any class with a classmethod `parse(text)` that undoes its `str()`, such as a repository reference.

A type with a codec in `draccus.decode` is read by that codec.
"""

import enum
import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from draccus.choice_types import CHOICE_TYPE_KEY, ChoiceType
from draccus.utils import is_choice_type

TYPE_KEY = CHOICE_TYPE_KEY

Annotation: TypeAlias = Any
"""A type annotation from `typing.get_type_hints`: a class, a union, a generic alias, … They have no common type."""

_SIMPLE = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    timedelta: "a duration such as 15m",
    type(None): "null",
}


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A field of a configuration class, its annotation resolved."""

    name: str
    type: Annotation
    required: bool
    field: Field[Any]

    @property
    def default(self) -> object:
        """The default value; only for fields that are not required."""
        if self.field.default is not MISSING:
            return self.field.default
        assert self.field.default_factory is not MISSING
        return self.field.default_factory()


@functools.cache
def config_fields(cls: type) -> Mapping[str, ConfigField]:
    """The fields of a dataclass that its constructor takes, by name, in order."""
    hints = _hints(cls)
    return {
        f.name: ConfigField(
            name=f.name,
            type=hints[f.name],
            required=f.default is MISSING and f.default_factory is MISSING,
            field=f,
        )
        for f in fields(cls)
        if f.init
    }


def _hints(cls: type) -> dict[str, Annotation]:
    """The annotations of a class; a field that is repeated without `Annotated` keeps the metadata of its base class.

    A subclass that changes a default repeats the type of the field, but not the range of its values.
    """
    # Both with and without `Annotated`: where they are equal, this class declares no metadata of its own.
    full, bare = get_type_hints(cls, include_extras=True), get_type_hints(cls)
    for base in cls.__mro__[1:]:
        annotations = inspect.get_annotations(base)
        for name in annotations if is_dataclass(base) else ():
            # The subclass annotates the field without metadata; take it from the base, unless the type differs.
            if full[name] == bare[name]:
                base_hint = get_type_hints(base, include_extras=True)[name]
                if base_hint != bare[name] and get_type_hints(base)[name] == bare[name]:
                    full[name] = base_hint
    return full


def strip(annotation: Annotation) -> Annotation:
    """The annotation without `Annotated` and `NewType`.

    >>> strip(Annotated[int, "at least 1"])
    <class 'int'>
    """
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        else:
            return annotation


def union_members(annotation: Annotation) -> tuple[Annotation, ...]:
    """The members of a union, flattened; the annotation alone where it is none."""
    annotation = strip(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for arg in get_args(annotation) for member in union_members(arg))
    return (annotation,)


def annotated_members(annotation: Annotation) -> tuple[Annotation, ...]:
    """As `union_members`, each with what it is annotated with."""
    bare = strip(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return tuple(member for arg in get_args(bare) for member in annotated_members(arg))
    return (annotation,)


def is_choice(annotation: Annotation) -> bool:
    """Whether the annotation is the base class of a registry."""
    return isinstance(annotation, type) and is_choice_type(annotation)


def choice_names(base: type[ChoiceType]) -> tuple[str, ...]:
    """Every name that a registry takes, sorted.

    A registry whose choices are found in packages has a class method `choice_names` of its own, which names those that
    are not imported yet too; `get_choice_class` imports them.
    """
    list_names = getattr(base, "choice_names", base.get_known_choices)
    # A registry's own method also names choices of packages that are not imported yet.
    return tuple(sorted(list_names()))


def offered_names(base: type[ChoiceType]) -> tuple[str, ...]:
    """The names of a registry that a run can use: those whose classes only read upstream's documents are left out.

    These classes, or their bases, are in modules called `unsupported`.
    """
    known = base.get_known_choices()

    def is_refused(cls: type | None) -> bool:
        return cls is not None and any(c.__module__.endswith(".unsupported") for c in cls.__mro__)

    # A name whose class is not imported yet is one of ours.
    return tuple(name for name in choice_names(base) if not is_refused(known.get(name)))


def registered_name(cls: type) -> str | None:
    """The name under which a class is registered with one of its base classes."""
    for base in cls.__mro__[1:]:
        if is_choice(base):
            for name, choice in base.get_known_choices().items():  # type: ignore[attr-defined]
                if choice is cls:
                    return name
    return None


def is_text_value(annotation: Annotation) -> bool:
    """Whether the annotation is a class with a `parse(text)` of its own."""
    return isinstance(annotation, type) and callable(getattr(annotation, "parse", None))


def list_origin(annotation: Annotation) -> type | None:
    """`list`, `tuple`, `set` or `frozenset` where the annotation is one (a `Sequence` is read as a tuple)."""
    origin = get_origin(annotation) or annotation
    if not isinstance(origin, type) or issubclass(origin, (str, bytes)):
        # Text is a sequence too, and no list.
        return None
    for concrete in (list, tuple, frozenset, set):
        if issubclass(origin, concrete):
            return concrete
    if origin in (Sequence, Set):
        return tuple if origin is Sequence else frozenset
    return None


def is_mapping(annotation: Annotation) -> bool:
    """Whether the annotation is a `dict` or a `Mapping`."""
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Mapping)


def describe(annotation: Annotation) -> str:
    """The annotated type in words, for messages and `--help`.

    >>> describe(int | None), describe(list[str]), describe(Literal["data", "model"])
    ('an integer or null', 'a list of text', 'one of data, model')
    """
    members = union_members(annotation)
    if len(members) > 1:
        words = list(dict.fromkeys(describe(member) for member in members))
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
    only = strip(annotation)
    if only in _SIMPLE:
        return _SIMPLE[only]
    if get_origin(only) is Literal:
        return "one of " + ", ".join(map(str, get_args(only)))
    if isinstance(only, type) and issubclass(only, enum.Enum):
        return "one of " + ", ".join(member.name for member in only)
    if list_origin(only) is not None:
        args = [arg for arg in get_args(only) if arg is not Ellipsis]
        # A tuple of different types has no common word; its length is checked by the decoder.
        if not args or len(set(map(repr, args))) > 1 or args[0] is Any:
            return "a list"
        if get_origin(args[0]) is Literal:
            return "a list of them: " + ", ".join(map(str, get_args(args[0])))
        return f"a list of {describe(args[0])}"
    if is_choice(only):
        return f"a mapping with `{TYPE_KEY}:`"
    if is_mapping(only) or is_dataclass(only):
        return "a mapping" if not is_text_value(only) else "text or a mapping"
    if is_text_value(only):
        return f"text ({only.__name__})"
    return "any value" if only is Any else getattr(only, "__name__", str(only))


def type_name(annotation: Annotation) -> str:
    """The short name of a type in `--help`.

    >>> type_name(int | None), type_name(list[str]), type_name(str | list[str]), type_name(Literal["data", "model"])
    ('int or null', 'list of str', 'str or a list of them', 'data | model')
    """
    members = union_members(annotation)
    if len(members) > 1:
        names = list(dict.fromkeys(type_name(member) for member in members))
        # `str or list of str`, in any order, reads better as `str or a list of them`; null is always the last.
        names.sort(key=lambda name: (name == "null", name.startswith("list of ")))
        return " or ".join(
            "a list of them" if name.removeprefix("list of ") in names[:n] else name for n, name in enumerate(names)
        )
    only = strip(annotation)
    if only in (bool, int, float, str):
        return only.__name__
    if only in (Path, timedelta, type(None)):
        return {Path: "path", timedelta: "duration"}.get(only, "null")
    if get_origin(only) is Literal:
        return " | ".join(map(str, get_args(only)))
    if isinstance(only, type) and issubclass(only, enum.Enum):
        return " | ".join(member.name for member in only)
    if list_origin(only) is not None:
        args = [arg for arg in get_args(only) if arg is not Ellipsis]
        if not args or len(set(map(repr, args))) > 1 or args[0] is Any:
            return "list"
        return f"list of {type_name(args[0])}"
    if is_choice(only):
        return f"{{{TYPE_KEY}: …}}"
    if is_text_value(only):
        return "str or mapping" if is_mapping(only) or is_dataclass(only) else "str"
    if is_mapping(only) or is_dataclass(only):
        return "mapping"
    return "any" if only is Any else getattr(only, "__name__", str(only))


@functools.cache
def key_paths(cls: type) -> Mapping[str, tuple[str, ...]]:
    """Every key below a configuration class → the dotted paths at which it stands (choices are not entered)."""
    paths_by_name: dict[str, list[str]] = {}
    for path in _walk(cls, (), ()):
        paths_by_name.setdefault(path[-1], []).append(".".join(path))
    return {name: tuple(paths) for name, paths in paths_by_name.items()}


def _walk(cls: type, path: tuple[str, ...], seen: tuple[type, ...]) -> Iterator[tuple[str, ...]]:
    for name, config_field in config_fields(cls).items():
        yield (*path, name)
        for member in union_members(config_field.type):
            # `seen` stops recursive configuration classes. A choice is not entered, because its keys depend on its
            # type.
            if is_dataclass(member) and isinstance(member, type) and not is_choice(member) and member not in seen:
                yield from _walk(member, (*path, name), (*seen, cls))
