"""What JSON holds, as Python has it."""

from typing import TypeAlias

Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
"""A JSON value. What is read from a file that may contain anything is `object` until it has been checked."""
