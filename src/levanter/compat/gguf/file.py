"""Parses GGUF files: metadata and tensor positions, without reading a weight.

The `gguf` library parses the file; the result is copied into plain values and the file is closed, so nothing stays
mapped. *Quantized* tensors are stored in blocks of 32 or 256 numbers along their last axis.

The `gguf` library trusts a file's counts: a header of 60 bytes that claims 2⁶⁰ numbers makes it allocate memory until
it is killed. So `check_header` walks over the header first: every count must fit in the rest of the file.
The format is described in the ggml project's `docs/gguf.md`.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter.base.input_limits import HEADER_AXES, HEADER_DEPTH
from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError, raise_if

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type's number; 8 is text, 9 an array."""
_TEXT, _ARRAY = 8, 9
# Shortest entries: a key's length (8), a value's type (4),
# one byte; a name's length (8), number of axes, kind, offset.
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_NUMBERS_A_BYTE = 8
"""More numbers in a byte than any quantization stores: the smallest takes 1.56 bits a number."""
_AGAIN = "download or copy the file again; it is not what was written"


def check_header(path: Path) -> None:
    """Checks that the header's counts and lengths fit in the file.

    Raises:
        CorruptFileError: one does not fit; nothing was allocated for it.
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
    # After the magic "GGUF"; `at` is the position of the walk, in bytes.
    at: int = 4
    order: str = "<"

    def wrong(self, problem: str) -> CorruptFileError:
        return CorruptFileError(
            self.path, f"it is a damaged or truncated GGUF file ({self.size} bytes; {problem})", suggestion=_AGAIN
        )

    def header(self) -> None:
        # The version is below 65,536; if its low half is 0, the bytes are in the other order.
        version = self.number("I")
        if version & 0xFFFF == 0:  # written in the other byte order
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise self.wrong(f"version {version}; versions 2 and 3 are read")
        # Both counts are bounded by the bytes that their shortest entries would need.
        # The counts come in this order, but the metadata comes first in the file.
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
        # Before any loop over `count`, so that a false count cannot make the walk long.
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
            # An element that is a text or an array takes at least the 8 bytes of its length.
            self.fit(count, _SCALARS.get(inner, 8), "values of an array")
            if inner in _SCALARS:
                # Numbers are skipped without reading; texts and nested arrays carry lengths of their own and must be
                # walked.
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
        # Python integers do not overflow, unlike the library's.
        if math.prod(shape) > self.size * _NUMBERS_A_BYTE:
            sizes = " × ".join(f"{size:,}" for size in shape)
            raise self.wrong(f"tensor {name!r} of {sizes} numbers, more than a file of this size holds")


MAGIC = b"GGUF"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it is stored in the file.

    Attributes:
        name: llama.cpp's name.
        shape: row-major shape (GGUF writes it reversed).
        kind: name of the storage type, e.g. `F32` or `Q4_1`.
        block: numbers in a block.
        block_bytes: bytes of a block.
        start: offset of its bytes in the file.
        nbytes: number of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    block: int
    block_bytes: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed GGUF file.

    Attributes:
        path: its path.
        metadata: key → value; arrays are lists.
        tensors: llama.cpp name → tensor, by position in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def quantization(self) -> str:
        """The storage type of most weights, e.g. `Q4_1`."""
        total: dict[str, int] = {}
        for tensor in self.tensors.values():
            # By numbers, not by bytes: a few float32 tensors would outweigh many quantized ones.
            numbers = tensor.nbytes // tensor.block_bytes * tensor.block
            total[tensor.kind] = total.get(tensor.kind, 0) + numbers
        return max(total, key=lambda kind: total[kind]) if total else "empty"

    def get(self, key: str, default: object = None) -> Any:
        """The value of a metadata key, or `default` if the file has no such key."""
        return self.metadata.get(key, default)


def open_gguf(path: str | Path) -> GgufFile:
    """Parses a GGUF file.

    Raises:
        MissingCheckpointFileError: there is no such file.
        CorruptFileError: it is not GGUF, or damaged, or shorter than its header says.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingCheckpointFileError(path, "there is no such file") from None
    if magic != MAGIC:
        raise CorruptFileError(path, f"it is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    check_header(path)
    metadata, tensors = _parse(path)
    size = path.stat().st_size
    raise_if(
        CorruptFileError,
        path,
        [
            f"truncated: tensor {tensor.name!r} ends at byte {tensor.start + tensor.nbytes}, the file at {size}"
            for tensor in tensors
            if tensor.start + tensor.nbytes > size
        ],
    )
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in sorted(tensors, key=lambda t: t.start)})


def _parse(path: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    from gguf import GGML_QUANT_SIZES, GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        # Reading past the end of a truncated file raises various errors in the library.
        raise CorruptFileError(
            path,
            f"it is a damaged or truncated GGUF file ({path.stat().st_size} bytes; {error})",
            suggestion="download or copy the file again",
        ) from error
    tensors = []
    for tensor in reader.tensors:
        block, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
        # GGUF lists sizes from the innermost axis outwards; NumPy from the outermost inwards.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors.append(
            StoredTensor(
                tensor.name, shape, tensor.tensor_type.name, block, block_bytes, tensor.data_offset, tensor.n_bytes
            )
        )
    return metadata, tensors
