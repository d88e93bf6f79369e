"""The values of records: JSON objects and rows of Parquet, with checks of keys and types."""

from typing import TypeVar

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
        raise DataError(f"{origin}: {key!r} is {type(value[key]).__name__}, expected {names[kind]}")
    return value[key]
