"""The values of records: JSON objects and rows of Parquet, with checks of keys, types and characters."""

from collections.abc import Mapping
from typing import Any, TypeVar

from levanter.base.bounded_json import lone_surrogate
from levanter.data.errors import DataError

T = TypeVar("T")


def record_value(value: object, key: str, kind: type[T], origin: str) -> T:
    """The value of a record's key.

    Args:
        value: the record.
        key: the key.
        kind: the type that its value must have.
        origin: the file and position of the record, for messages.

    Raises:
        DataError: the record is no object, or it has no such key, or one of another type.
    """
    if not isinstance(value, dict):
        raise DataError(f"{origin}: expected an object with the key {key!r}, found {type(value).__name__}")
    if key not in value:
        raise DataError(f"{origin}: no key {key!r}; it has {', '.join(map(repr, value)) or 'none'}")
    if not isinstance(value[key], kind):
        names = {list: "a list", str: "a string"}
        kind_name = "null" if value[key] is None else type(value[key]).__name__
        raise DataError(f"{origin}: {key!r} is {kind_name}, expected {names[kind]}")
    if isinstance(value[key], str):
        checked_text(value[key], f"{origin}: {key!r}")
    return value[key]


def checked_text(text: str, where: str) -> str:
    """Returns the text; refuses half of a surrogate pair, which JSON can represent and UTF-8 cannot.

    Raises:
        DataError: names the character.
    """
    if (start := lone_surrogate(text)) is not None:
        code = f"\\u{ord(text[start]):04x}"
        raise DataError(f"{where}: not text: {code} at character {start} is half of a surrogate pair")
    return text


class ParsedArguments(dict[str, Any]):
    """The arguments of a call that were JSON text, as an object; some templates write the text as it is.

    Args:
        value: the object.
        json_text: the text.
    """

    def __init__(self, value: Mapping[str, Any], json_text: str):
        super().__init__(value)
        self.json_text = json_text
