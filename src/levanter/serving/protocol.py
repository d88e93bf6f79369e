"""JSON objects as frozen dataclasses, strictly: a field that is not known, or of another type, is said and not ignored.

The dataclasses are the protocol: requests are decoded by their annotations, and `/openapi.json` is made of the same.
Annotations are made of `str`, `int`, `float`, `bool`, `None`, `object` (any value), `Literal`, `tuple[T, ...]`,
`Mapping[str, T]`, other such dataclasses, and unions of these.
"""

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from levanter.base.input_limits import HINTS
from levanter.config.errors import did_you_mean
from levanter.inference.strict_json import NotAnObjectError, kind_of, object_in

D = TypeVar("D")
MOST_SAID = 20
"""Problems of one request that are said."""


class ProtocolError(ValueError):
    """A body that is no request; the message lists everything that is wrong with it."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(dict.fromkeys(problems))
        said = self.problems[:MOST_SAID]
        more = len(self.problems) - len(said)
        super().__init__("\n".join((*said, *((f"and {more} more",) if more else ()))))


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object that a body is.

    Raises:
        ProtocolError: it is none: not UTF-8, not JSON, another value, nested too deep, a field twice, half a surrogate.
    """
    problems: list[str] = []
    try:
        value = object_in(body, problems)
    except NotAnObjectError as error:
        raise ProtocolError([f"the body: {error}"]) from None
    if problems:
        raise ProtocolError(problems)
    return value


def names_of(cls: type) -> frozenset[str]:
    """The fields of a dataclass."""
    return frozenset(each.name for each in dataclasses.fields(cls))


def decode(cls: type[D], value: Mapping[str, object], *, where: str = "", beside: frozenset[str] = frozenset()) -> D:
    """An object as a dataclass; `null` stands for a field's default.

    Args:
        cls: the dataclass.
        value: the object.
        where: the path of it, for messages.
        beside: names of fields that may be there and are somebody else's.

    Raises:
        ProtocolError: lists every field that is unknown, missing or of another type.
    """
    problems: list[str] = []
    found = _object(cls, value, where, problems, beside)
    if problems:
        raise ProtocolError(problems)
    return found  # pyright: ignore[reportReturnType]


def _object(
    cls: type, value: Mapping[str, object], where: str, problems: list[str], beside: frozenset[str] = frozenset()
) -> object:
    hints, given = _hints(cls), {}
    prefix = f"{where}." if where else ""
    known = names_of(cls)
    for n, name in enumerate(sorted(set(value) - known - beside)):
        hint = did_you_mean(name, sorted(known | beside)) if n < HINTS else ""
        problems.append(f"{prefix}{name[:100]}: not a field{hint}")
    before = len(problems)
    for each in dataclasses.fields(cls):
        if value.get(each.name) is not None:
            given[each.name] = _value(hints[each.name], value[each.name], f"{prefix}{each.name}", problems)
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{each.name}: missing")
    if len(problems) > before:
        return None
    try:
        return cls(**given)
    except ProtocolError as error:
        problems += [f"{prefix}{one}" for one in error.problems]
        return None


def _value(hint: object, value: object, where: str, problems: list[str]) -> object:
    """A value of a type; what is wrong with it is added to `problems`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(args, value, where, problems)
    if hint is object:
        return value
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            problems.append(f"{where}: expected {_said(hint)}, got {_shown(value)}")
        return value
    if origin is tuple and isinstance(value, list):
        if args[0] in (int, str) and all(type(one) is args[0] for one in value):
            return tuple(value)
        return tuple(_value(args[0], one, f"{where}[{n}]", problems) for n, one in enumerate(value))
    if origin is _MAPPING:
        if isinstance(value, dict):
            return {key: _value(args[1], one, f"{where}.{key}", problems) for key, one in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _object(hint, value, where, problems)  # pyright: ignore[reportArgumentType]
    elif _is_scalar(hint, value):
        return _number(hint, value) if isinstance(value, (int, float)) else value
    problems.append(f"{where}: expected {_said(hint)}, got {_shown(value)}")
    return None


_MAPPING = get_origin(Mapping[str, object])


def _is_scalar(hint: object, value: object) -> bool:
    if hint is int:
        whole = isinstance(value, float) and value == value and abs(value) < 2**53 and value == int(value)
        return whole or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return hint in (str, bool) and isinstance(value, hint)


def _number(hint: object, value: int | float) -> int | float | bool:
    return value if isinstance(value, bool) else float(value) if hint is float else int(value)


def _one_of(args: tuple[Any, ...], value: object, where: str, problems: list[str]) -> object:
    """A value of one of several types; where it is of none, what is wrong with the one that comes closest."""
    closest: list[str] | None = None
    for hint in args:
        if hint is type(None):
            continue
        own: list[str] = []
        found = _value(hint, value, where, own)
        if not own:
            return found
        inner = not own[0].startswith(f"{where}: ")
        if inner and (closest is None or len(own) < len(closest)):
            closest = own
    if closest is not None:
        problems.extend(closest[:MOST_SAID])
        return None
    said = " or ".join(_said(hint) for hint in args if hint is not type(None))
    problems.append(f"{where}: expected {said}, got {_shown(value)}")
    return None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _said(hint: object) -> str:
    """A type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_said(one) for one in args if one is not type(None))
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(repr(one) for one in args)}"
    if origin is tuple:
        return f"a list ({_said(args[0])} each)"
    if origin is _MAPPING or dataclasses.is_dataclass(hint):
        return "an object"
    words = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", object: "a value"}
    return words[hint]


def _shown(value: object) -> str:
    """A value in a message; of what is large, only its kind."""
    if isinstance(value, (list, dict)):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
