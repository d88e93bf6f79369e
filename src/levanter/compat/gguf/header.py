"""What the header of a GGUF file claims, compared with the file before anything is made of it.

The `gguf` library takes a file's counts at their word: a header of 60 bytes that promises 2⁶⁰ numbers keeps it busy,
and asking for memory, until somebody ends it. `check_header` walks over the header first; a count must fit in the bytes
that are left. The format is described in the ggml project's `docs/gguf.md`.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from levanter.base.input_limits import HEADER_AXES, HEADER_DEPTH
from levanter.compat.hf.errors import CorruptFileError

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type's number; 8 is text, 9 an array."""
_TEXT, _ARRAY = 8, 9
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_NUMBERS_A_BYTE = 8
"""More than any kind of quantization stores: the smallest takes 1.56 bits for one."""
_AGAIN = "download or copy the file again; it is not what was written"


def check_header(path: Path) -> None:
    """Looks whether the header's counts and lengths fit in the file.

    Raises:
        CorruptFileError: one does not; nothing was allocated for it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        walk = _HeaderWalk(path, content, len(content))
        try:
            walk.header()
        except struct.error:
            raise walk.wrong("it ends in the middle of its header") from None


@dataclass
class _HeaderWalk:
    """Walks over a header; the contents of texts and arrays of numbers are skipped."""

    path: Path
    content: mmap.mmap
    size: int
    at: int = 4
    order: str = "<"

    def wrong(self, problem: str) -> CorruptFileError:
        return CorruptFileError(
            self.path, f"it is a damaged or truncated GGUF file ({self.size} bytes; {problem})", suggestion=_AGAIN
        )

    def header(self) -> None:
        version = self.number("I")
        if version & 0xFFFF == 0:  # written by a machine of the other byte order
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise self.wrong(f"version {version}; versions 2 and 3 are read")
        tensors, pairs = self.number("Q"), self.number("Q")
        self.fit(pairs, _LEAST_PAIR, "pairs of metadata")
        self.fit(tensors, _LEAST_TENSOR, "tensors")
        for _ in range(pairs):
            self.text()
            self.value(self.number("I"), 0)
        for _ in range(tensors):
            self.tensor()

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(self.order + code, self.content, self.at)
        self.at += struct.calcsize(self.order + code)
        return value

    def fit(self, count: int, least: int, what: str) -> None:
        if count * least > self.size - self.at:
            raise self.wrong(f"its header claims {count:,} {what}, more than fit in the rest of the file")

    def text(self) -> str:
        length = self.number("Q")
        self.fit(length, 1, "bytes of a text")
        self.at += length
        return bytes(self.content[self.at - length : self.at][:80]).decode("utf-8", "replace")

    def value(self, kind: int, depth: int) -> None:
        if kind == _TEXT:
            self.text()
        elif kind == _ARRAY:
            if depth >= HEADER_DEPTH:
                raise self.wrong(f"arrays are nested more than {HEADER_DEPTH} deep, the limit for metadata")
            inner, count = self.number("I"), self.number("Q")
            self.fit(count, _SCALARS.get(inner, 8), "values of an array")
            if inner in _SCALARS:
                self.at += count * _SCALARS[inner]
            else:
                for _ in range(count):
                    self.value(inner, depth + 1)
        elif kind in _SCALARS:
            self.fit(1, _SCALARS[kind], "values")
            self.at += _SCALARS[kind]
        else:
            raise self.wrong(f"a value of type {kind}, which does not exist")

    def tensor(self) -> None:
        name, axes = self.text(), self.number("I")
        if axes > HEADER_AXES:
            raise self.wrong(f"tensor {name!r} has {axes:,} axes; {HEADER_AXES} is the bound")
        shape = [self.number("Q") for _ in range(axes)]
        self.at += 12  # its kind and its offset
        if math.prod(shape) > self.size * _NUMBERS_A_BYTE:
            sizes = " × ".join(f"{size:,}" for size in shape)
            raise self.wrong(f"tensor {name!r} of {sizes} numbers, more than a file of this size holds")
