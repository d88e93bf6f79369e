"""JSON objects that requests are written as, read strictly: what is ambiguous in one is said and not guessed."""

import json
from collections import Counter

from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import OutOfBoundsError
from levanter.inference.params import lone_surrogate


class NotAnObjectError(ValueError):
    """Bytes that are no JSON object."""


def object_in(raw: bytes, problems: list[str]) -> dict[str, object]:
    """The JSON object that bytes are.

    Args:
        raw: the bytes.
        problems: names of fields that are written twice, and where a string has half of a surrogate pair, are added.

    Raises:
        NotAnObjectError: they are none: not UTF-8, not JSON, nested too deep, another value.
    """
    twice: list[str] = []

    def pairs(given: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(given)
        if len(made) < len(given):
            twice.extend(sorted(name for name, count in Counter(name for name, _ in given).items() if count > 1))
        return made

    try:
        value = parse_json(raw.decode(), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise NotAnObjectError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise NotAnObjectError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except OutOfBoundsError as error:
        raise NotAnObjectError(str(error)) from None
    if not isinstance(value, dict):
        raise NotAnObjectError(f"expected an object, got {kind_of(value)}")
    problems += [_shown(f"{name}: written twice") for name in twice]
    if (where := surrogate_in(value)) is not None:
        problems.append(_shown(f"{where}: half of a surrogate pair, which no text has"))
    return value


def surrogate_in(value: object, where: str = "") -> str | None:
    """Where in a JSON value a string has half of a surrogate pair."""
    if isinstance(value, str):
        return where if lone_surrogate(value) is not None else None
    if isinstance(value, dict):
        for key, one in value.items():
            inner = f"{where}.{key}" if where else str(key)
            if lone_surrogate(key) is not None:
                return inner
            if (found := surrogate_in(one, inner)) is not None:
                return found
    if isinstance(value, list):
        for n, one in enumerate(value):
            if (found := surrogate_in(one, f"{where}[{n}]")) is not None:
                return found
    return None


def kind_of(value: object) -> str:
    """What kind of JSON value something is, in words."""
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _shown(problem: str) -> str:
    """A problem as text that can be written: names may have halves of surrogate pairs themselves."""
    return problem.encode("utf-8", "backslashreplace").decode()
