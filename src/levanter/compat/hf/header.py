"""Parses and validates the header of a safetensors file.

A file is `u64 little-endian n`, `n` bytes of JSON, data. The JSON maps a tensor's name to dtype, shape and
`[begin, end)` relative to the data. Everything a reader relies on later is checked here, before memory is allocated:
the header fits in the file, every tensor's range has the length its dtype and shape say, and the ranges tile the data
without overlap or hole and end exactly where the file ends.

Format: https://github.com/huggingface/safetensors#format
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from levanter.base.bounded_json import parse_json
from levanter.compat.hf.errors import CorruptFileError, raise_if
from levanter.compat.hf.readers import ByteReader

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation (Rust)."""

MAX_AXES = 32
"""Safely below NumPy's limit; a longer shape is a sign of damage."""

FIRST_READ_BYTES = 64 << 10

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        name: np.dtype(dtype)
        for name, dtype in (
            ("F64", np.float64),
            ("F32", np.float32),
            ("F16", np.float16),
            ("BF16", ml_dtypes.bfloat16),
            ("F8_E4M3", ml_dtypes.float8_e4m3fn),
            ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
            ("F8_E5M2", ml_dtypes.float8_e5m2),
            ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
            ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
            ("I64", np.int64),
            ("I32", np.int32),
            ("I16", np.int16),
            ("I8", np.int8),
            ("U64", np.uint64),
            ("U32", np.uint32),
            ("U16", np.uint16),
            ("U8", np.uint8),
            ("BOOL", np.bool_),
            ("C64", np.complex64),
        )
    }
)
"""safetensors dtypes whose elements fill complete bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype, shape, and the absolute range of its bytes in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ShardHeader:
    """The contents of a safetensors file according to its header, in the order of the data."""

    file: str
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    # JSON parsers keep the last of duplicate keys silently; two parsers could then disagree on a tensor's bytes.
    for key, value in pairs:
        if key in values:
            raise _DuplicateKey(key)
        values[key] = value
    return values


def _is_size(value: object) -> bool:
    # bool is a subclass of int; 2**63, because offsets must fit in int64.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def header_length(first_bytes: bytes, *, file: str, size: int) -> int:
    """The length of the JSON header, from the first 8 bytes of a file of `size` bytes."""
    if len(first_bytes) < 8 or size < 8:
        raise CorruptFileError(
            file,
            f"corrupt safetensors header: the file has {size} bytes, fewer than the 8 that give the length of its "
            "header",
            suggestion=_AGAIN,
        )
    # A damaged file can claim any length up to 2**64: it is checked before anything of that size is allocated.
    (length,) = struct.unpack("<Q", first_bytes[:8])
    if length > MAX_HEADER_BYTES:
        raise CorruptFileError(
            file,
            f"corrupt safetensors header: it claims to be {length} bytes long (the format allows {MAX_HEADER_BYTES})",
            suggestion=_AGAIN,
        )
    if 8 + length > size:
        raise CorruptFileError(
            file,
            f"corrupt safetensors header: it claims to be {length} bytes long in a file of {size} bytes",
            suggestion=_AGAIN,
        )
    return length


_AGAIN = "download or copy the file again; its content has changed since it was written"


def parse_header(text: bytes, *, file: str, size: int) -> ShardHeader:
    """Checks the JSON header of a safetensors file and converts its offsets to absolute ones.

    Args:
        text: the JSON, without the 8 bytes of its length.
        file: the file's name in messages.
        size: bytes of the whole file.

    Raises:
        CorruptFileError: lists every problem of the header.
    """
    try:
        document = parse_json(text.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise CorruptFileError(file, f"corrupt safetensors header: it names {error.args[0]!r} twice") from None
    except ValueError as error:
        raise CorruptFileError(
            file, f"corrupt safetensors header: it is not UTF-8 JSON ({error})", suggestion=_AGAIN
        ) from None
    if not isinstance(document, dict):
        raise CorruptFileError(file, "corrupt safetensors header: it is not a JSON object", suggestion=_AGAIN)
    metadata = document.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CorruptFileError(file, "corrupt safetensors header: __metadata__ is not a JSON object")

    data_start = 8 + len(text)
    problems: list[str] = []
    entries: list[TensorEntry] = []
    for name, value in document.items():
        entry = _entry(name, value, data_start, problems)
        if entry is not None:
            entries.append(entry)
    # The layout is checked in the order of the data; JSON may list tensors in any order.
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    # A cut-off download is the usual cause, and the only one for which copying again helps.
    truncated = bool(entries) and entries[-1].stop > size
    if not problems:  # a tensor that failed above leaves a hole, which would be a misleading second problem
        problems = _layout_problems(entries, data_start, size)
    raise_if(CorruptFileError, file, problems, suggestion=_AGAIN if truncated else None)
    return ShardHeader(file, tuple(entries), {str(k): str(v) for k, v in metadata.items()})


def _entry(name: str, value: object, data_start: int, problems: list[str]) -> TensorEntry | None:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        problems.append(f"tensor {name!r}: expected dtype, shape and data_offsets, got {value!r:.80}")
        return None
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        problems.append(f"tensor {name!r}: dtype {value['dtype']!r} is not one of {', '.join(DTYPES)}")
        return None
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(map(_is_size, shape)):
        problems.append(f"tensor {name!r}: shape {shape!r:.80} is not a list of sizes")
        return None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        problems.append(f"tensor {name!r}: data_offsets {offsets!r:.80} is not [begin, end]")
        return None
    dtype = DTYPES[value["dtype"]]
    # Python integers, which cannot overflow whatever sizes a damaged header claims.
    expected = math.prod(shape) * dtype.itemsize
    begin, end = offsets
    if end - begin != expected:
        problems.append(
            f"tensor {name!r}: data_offsets [{begin}, {end}] are {end - begin} bytes, "
            f"but {value['dtype']} {shape} takes {expected}"
        )
        return None
    # data_offsets count from the end of the header; readers want positions in the file.
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _layout_problems(entries: list[TensorEntry], data_start: int, size: int) -> list[str]:
    """Overlaps, holes and truncation of ranges that are sorted by start."""
    problems = []
    cut = [entry for entry in entries if entry.stop > size]
    if cut:
        problems.append(
            f"truncated: the file has {size} bytes, its header describes {max(entry.stop for entry in cut)}; "
            f"{len(cut)} of {len(entries)} tensors are truncated, the first is {cut[0].name!r}"
        )
    # Sweep over the ranges: `at` is the end of everything seen so far. A range that begins before it overlaps,
    # one that begins behind it leaves a hole.
    at, previous = data_start, None
    for entry in entries:
        if entry.start < at and previous is not None:
            problems.append(f"tensors {previous!r} and {entry.name!r} overlap in the file")
        elif entry.start > at:
            problems.append(f"{entry.start - at} bytes before tensor {entry.name!r} belong to no tensor")
        # An entry inside an earlier, longer one must not move the sweep backwards.
        if entry.stop >= at:
            at, previous = entry.stop, entry.name
    if at < size and not problems:
        problems.append(f"{size - at} bytes after the last tensor belong to no tensor")
    return problems


def read_header(reader: ByteReader, file: str) -> ShardHeader:
    """Reads and checks the header of a file; touches no tensor data.

    Args:
        reader: the source of the bytes.
        file: the file's name in the returned header; messages use the reader's.
    """
    size = reader.size
    # One request is enough for most headers, which are far smaller than FIRST_READ_BYTES.
    first = reader.peek(0, min(size, FIRST_READ_BYTES))
    length = header_length(first, file=reader.name, size=size)
    text = first[8 : 8 + length]
    # The header is longer than the first read: one more request for the rest.
    if len(text) < length:
        text += reader.peek(8 + len(text), 8 + length)
    header = parse_header(text, file=reader.name, size=size)
    return ShardHeader(file, header.tensors, header.metadata)
