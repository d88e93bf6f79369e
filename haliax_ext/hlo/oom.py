"""The compiler's "does not fit" as a value.

The TPU compiler refuses a program in one of two texts: an early one that states only what is needed and what there is
("the total memory required for HLO temporaries (32.41G) exceeds available HBM (31.25G)"; the arguments are in that
total), and a later one, from the packing of buffers, that lists the largest allocations with their operator, shape
and padding. Both are read; the sizes are the compiler's, in GiB although printed as G.
"""

import re
from dataclasses import dataclass

from haliax_ext.hlo.op_metadata import Scope, parse_scope
from haliax_ext.hlo.parser import Shape, parse_shapes

# The compiler prints G for GiB, and so on: all units are binary.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([\d.]+)([KMGT]?)B?"


@dataclass(frozen=True)
class Allocation:
    """One of the compiler's largest allocations.

    Attributes:
        nbytes: with layout padding.
        shape: the array, `None` where none is printed.
        op_name: the compiler's name of its origin.
        kind: the compiler's word for its purpose, e.g. `HLO temp` or `Argument`.
    """

    nbytes: int
    shape: Shape | None
    op_name: str
    kind: str

    @property
    def scope(self) -> Scope:
        """The module and the pass that the allocation belongs to."""
        return parse_scope(self.op_name)


@dataclass(frozen=True)
class OutOfMemory:
    """A refusal: `needed` bytes on a device that has `available`.

    Attributes:
        needed: arguments and temporaries together.
        available: usable HBM as the compiler states it.
        allocations: the largest, as far as the compiler lists them.
        message: the first line of the compiler's message.
    """

    needed: int
    available: int
    allocations: tuple[Allocation, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.needed / (1 << 30):.2f} GiB > {self.available / (1 << 30):.2f} GiB"


def read_out_of_memory(message: str) -> OutOfMemory | None:
    """Reads the text of a compile error; `None` if the error has another cause."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    # First the early text, which states the total alone; then that of the buffer packing, which lists allocations.
    match = re.search(rf"\({_SIZE}\) exceeds available \w+ \({_SIZE}\)", message) or re.search(
        rf"Used {_SIZE} of {_SIZE} hbm", message
    )
    if not match:
        return None
    needed, needed_unit, available, available_unit = match.groups()
    # The list is numbered, and each entry begins with its size: `1. Size: 2.00G`.
    allocations = tuple(_allocation(part) for part in re.split(r"\n\s*\d+\. (?=Size: )", message)[1:])
    return OutOfMemory(
        needed=_bytes(needed, needed_unit),
        available=_bytes(available, available_unit),
        allocations=tuple(sorted(allocations, key=lambda a: -a.nbytes)),
        message=message.strip().splitlines()[0],
    )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _allocation(text: str) -> Allocation:
    def line(label: str) -> str:
        match = re.search(rf"{label}: (.*)", text)
        return match.group(1).strip() if match else ""

    size = re.match(_SIZE, line("Size"))
    shapes = parse_shapes(line("Shape"))
    op_name = re.search(r'op_name="([^"]*)"', text)
    return Allocation(
        nbytes=_bytes(*size.groups()) if size else 0,
        shape=shapes[0] if shapes else None,
        op_name=op_name.group(1) if op_name else "",
        kind=line("Allocation type"),
    )
