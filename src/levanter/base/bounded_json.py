"""JSON from outside: the type `Json`, a reader with limits, and a strict reader for the objects of requests.

`JSON_DEPTH` limits nesting, and numbers have a maximal length, so that a hostile text cannot exhaust the stack or the
CPU. The strict reader refuses what is ambiguous, such as a key that occurs twice.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from levanter.base.input_limits import JSON_DEPTH, OutOfBoundsError

Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
"""A JSON value. What is read from a file that may contain anything is `object` until it has been checked."""


NAME_CHARACTERS = 100
"""Characters of a name that are shown in a message."""
NUMBER_CHARACTERS = 4000
"""Of a number with a point or an exponent."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(
    text: str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], object] | None = None,
    is_measured: bool = False,
) -> Any:
    """The value of a JSON text.

    Args:
        text: the text.
        object_pairs_hook: makes the value of an object.
        is_measured: whether the text is long and its shape was compared with limits, its depth too. Its numbers are
            then converted in Python, which lets other threads run in between.

    Raises:
        json.JSONDecodeError: it is no JSON.
        OutOfBoundsError: it is nested deeper than `JSON_DEPTH`, or has a number of thousands of digits.
    """
    # Counting is cheap; the exact depth is computed only for texts that could exceed the limit.
    if not is_measured and text.count("[") + text.count("{") > JSON_DEPTH and _depth(text) > JSON_DEPTH:
        raise OutOfBoundsError(f"lists and objects are nested more than {JSON_DEPTH} deep, the limit for JSON")
    numbers = {"parse_int": _integer, "parse_float": _real} if is_measured else {}
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook, **numbers)
    except json.JSONDecodeError:
        raise
    # The text is within the limit, but the caller's stack may be deep already.
    except RecursionError:
        raise OutOfBoundsError(f"lists and objects are nested more than {JSON_DEPTH} deep") from None
    except ValueError as error:
        # The hook may raise a ValueError of its own; the other one is the limit of int() on digits.
        if object_pairs_hook is not None and "limit" not in str(error):
            raise
        raise OutOfBoundsError(f"a number is longer than the limit ({error})") from error


def _integer(digits: str) -> int:
    return int(digits)


def _real(digits: str) -> float:
    # `int` has such a limit of its own.
    if len(digits) > NUMBER_CHARACTERS:
        raise OutOfBoundsError(f"a number is longer than the limit of {NUMBER_CHARACTERS:,} characters")
    return float(digits)


def _depth(text: str) -> int:
    # Strings are tokens of the pattern, so that brackets inside of them do not count.
    depth = deepest = 0
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in "[{":
            depth += 1
            if depth > deepest:
                deepest = depth
                if deepest > JSON_DEPTH:
                    return deepest
        elif sign in "]}":
            depth -= 1
    return deepest


def lone_surrogate(text: str) -> int | None:
    """The index of half a surrogate pair in a text, which UTF-8 cannot encode; None where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


class NotAnObjectError(ValueError):
    """Bytes that are no JSON object."""


def parse_json_object(raw: bytes, problems: list[str], *, is_measured: bool = False) -> dict[str, object]:
    """Reads a JSON object from bytes.

    Args:
        raw: the bytes.
        problems: receives the duplicate names and the paths of strings with half of a surrogate pair.
        is_measured: see `parse_json`.

    Raises:
        NotAnObjectError: not UTF-8, not JSON, nested too deep, or another JSON value.
    """
    duplicates: list[str] = []

    def to_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # The last of two equal names would win silently, and a proxy in front may take the first.
        result = dict(pairs)
        if len(result) < len(pairs):
            duplicates.extend(sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
        return result

    try:
        value = parse_json(raw.decode(), object_pairs_hook=to_dict, is_measured=is_measured)
    except UnicodeDecodeError as error:
        raise NotAnObjectError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise NotAnObjectError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except OutOfBoundsError as error:
        raise NotAnObjectError(str(error)) from None
    if not isinstance(value, dict):
        raise NotAnObjectError(f"expected an object, got {json_kind(value)}")
    problems += [_printable(f"{name[:NAME_CHARACTERS]}: written twice") for name in duplicates]
    # UTF-8 has no surrogates: only an escape can write one.
    if _SURROGATE.search(raw) and (where := find_surrogate(value)) is not None:
        problems.append(_printable(f"{where}: half of a surrogate pair, which no text has"))
    return value


def find_surrogate(value: object, where: str = "") -> str | None:
    """The path in a JSON value of a string with half of a surrogate pair, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return where if lone_surrogate(value) is not None else None
    if isinstance(value, dict):
        for key, item in value.items():
            name = key[:NAME_CHARACTERS]
            inner = f"{where}.{name}" if where else name
            if lone_surrogate(key) is not None:
                return inner
            if (path := find_surrogate(item, inner)) is not None:
                return path
    if isinstance(value, list):
        for n, item in enumerate(value):
            if (path := find_surrogate(item, f"{where}[{n}]")) is not None:
                return path
    return None


def json_kind(value: object) -> str:
    """The kind of a JSON value, in words."""
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _printable(problem: str) -> str:
    """A problem as text that can be written: names may have halves of surrogate pairs themselves."""
    return problem.encode("utf-8", "backslashreplace").decode()
