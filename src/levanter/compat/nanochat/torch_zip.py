"""torch's file format (`torch.save` since 1.6) for dictionaries of tensors, read without executing a pickle.

A file is a zip archive of uncompressed entries: `data.pkl` describes the tensors, `data/<key>` are their bytes. The
description is a pickle, a program for a small machine that can call any function of Python. Here the program is not
run: `pickletools` splits it into operations, and an interpreter below knows only those that describe tensors, and only
the names in `_STORAGES` and `_CALLS`. Any other name or operation is an error that says what it is.

Bytes of tensors are found from the archive's directory, so slices are read by ranges.
"""

import io
import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np

from levanter.compat.hf.errors import CheckpointError

DESCRIPTION = "data.pkl"
MAX_DESCRIPTION = 16 << 20
"""Bytes of a description, at most: about 80,000 tensors."""
MAX_AXES = 32
"""Axes of a tensor, at most."""

_STORAGES: Mapping[str, np.dtype] = MappingProxyType(
    {
        f"torch {name}Storage": np.dtype(dtype)
        for name, dtype in {
            "Double": "<f8",
            "Float": "<f4",
            "Half": "<f2",
            "BFloat16": ml_dtypes.bfloat16,
            "Long": "<i8",
            "Int": "<i4",
            "Short": "<i2",
            "Char": "i1",
            "Byte": "u1",
            "Bool": "?",
        }.items()
    }
)
_ORDERED, _TENSOR, _PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
_CALLS = (_ORDERED, _TENSOR, _PARAMETER)


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of the file: contiguous elements.

    Attributes:
        start: its first byte in the file.
        shape: its shape.
        dtype: of its elements.
    """

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, first: int, shape: tuple[int, ...]) -> "TorchTensor":
        """The elements from `first` on, in order, as a tensor of another shape."""
        assert first + math.prod(shape) <= math.prod(self.shape), (first, shape, self.shape)
        return TorchTensor(self.start + first * self.dtype.itemsize, shape, self.dtype)


@dataclass(frozen=True)
class _Name:
    """A global of Python that the pickle refers to."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """The elements of one entry of the archive."""

    key: str
    dtype: np.dtype
    elements: int


class _Refused(ValueError):
    """What the description contains that no dictionary of tensors does."""


def read_torch_zip(path: Path) -> dict[str, TorchTensor]:
    """The tensors of a file, by name. Only the directory and the description are read.

    Raises:
        CheckpointError: it is no such file, it is damaged, or it contains anything but named tensors.
    """
    with open(path, "rb") as file:
        try:
            return _opened(file)
        except _DAMAGED as error:
            raise CheckpointError(path, str(error) or "it is damaged") from error


_DAMAGED = (ValueError, OSError, EOFError, RuntimeError, ArithmeticError, struct.error, zlib.error, zipfile.BadZipFile)
"""What `zipfile` raises for archives whose directory or headers are damaged; `_Refused` is a ValueError."""


def _opened(file: io.BufferedReader) -> dict[str, TorchTensor]:
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        description = _description(archive, entries)
        size = file.seek(0, io.SEEK_END)
        starts = {
            name.removeprefix("data/"): (_first_byte(file, entry, size), entry.file_size)
            for name, entry in entries.items()
            if name.startswith("data/")
        }
    return _tensors(_interpreted(description), starts)


def _description(archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo]) -> bytes:
    """The bytes of the pickle."""
    if DESCRIPTION not in entries:
        raise _Refused(f"the archive has no {DESCRIPTION}, so torch.save did not write it")
    if entries[DESCRIPTION].file_size > MAX_DESCRIPTION:
        raise _Refused(f"{DESCRIPTION} has {entries[DESCRIPTION].file_size:,} bytes, more than {MAX_DESCRIPTION:,}")
    if "byteorder" in entries and archive.read(entries["byteorder"])[:8] != b"little":
        raise _Refused("its numbers are big-endian; write it on a little-endian machine")
    with archive.open(entries[DESCRIPTION]) as file:
        # The size in the directory may be wrong; what is read is bounded.
        return file.read(MAX_DESCRIPTION)


def _first_byte(file: io.BufferedReader, entry: zipfile.ZipInfo, size: int) -> int:
    """The position of an entry's data, which is stored as it is."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise _Refused(f"entry {entry.filename!r} is compressed; torch.save stores tensors as they are")
    file.seek(entry.header_offset)
    header = file.read(30)
    # The local header repeats the name, and may have another extra field than the directory (torch aligns with it).
    signature, name_length, extra_length = struct.unpack("<4s22xHH", header)
    start = entry.header_offset + 30 + name_length + extra_length
    if signature != b"PK\x03\x04" or start + entry.file_size > size:
        raise _Refused(f"entry {entry.filename!r} reaches beyond the file: it is cut off or damaged")
    return start


_MARK = object()
Stack = list[object]


def _interpreted(description: bytes) -> object:
    """The value that a description builds, by the few operations that torch uses for tensors."""
    stack: Stack = []
    memo: dict[int, object] = {}
    try:
        for operation, argument, _ in pickletools.genops(description):
            if operation.name == "STOP":
                (value,) = stack
                return value
            _step(operation.name, argument, stack, memo)
    # The interpreter's own assertions about the stack, and pickletools' complaints about damaged bytes.
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise _Refused(f"{DESCRIPTION} is damaged: {type(error).__name__}") from error
    except _Refused:
        raise
    except ValueError as error:
        raise _Refused(f"{DESCRIPTION} is damaged: {error}") from error
    raise _Refused(f"{DESCRIPTION} ends without a value")


_CONSTANTS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "EMPTY_DICT": dict,
        "EMPTY_LIST": list,
        "EMPTY_TUPLE": tuple,
        "MARK": lambda: _MARK,
        "NONE": lambda: None,
        "NEWTRUE": lambda: True,
        "NEWFALSE": lambda: False,
    }
)
_VALUES = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _step(name: str, argument: object, stack: Stack, memo: dict[int, object]) -> None:
    """One operation of the machine."""
    if name in ("PROTO", "FRAME"):
        return
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name]())
    elif name in _VALUES:
        stack.append(argument)
    elif name in _TUPLES:
        count = _TUPLES[name]
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "TUPLE":
        stack.append(tuple(_above_mark(stack)))
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[_integer(argument)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[_integer(argument)])
    elif name == "GLOBAL":
        stack.append(_allowed(str(argument)))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        stack.append(_call(function, arguments))
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _set(stack[-1], (key, value))
    elif name == "SETITEMS":
        pairs = _above_mark(stack)
        _set(stack[-1], pairs)
    elif name == "BUILD" and isinstance(stack[-1], dict) and isinstance(stack[-2], dict):
        # torch's state dictionaries carry versions of modules in an attribute, which no tensor depends on.
        stack.pop()
    else:
        raise _Refused(f"{DESCRIPTION} uses the operation {name}, which no dictionary of tensors needs")


def _above_mark(stack: Stack) -> list[object]:
    """Removes and returns what was pushed since the last mark."""
    values = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        # Not shown: a tuple of tuples may have a representation of any length.
        raise _Refused(f"{DESCRIPTION} is damaged: a {type(value).__name__} instead of a number")
    return value


def _allowed(name: str) -> _Name:
    if name not in _STORAGES and name not in _CALLS:
        raise _Refused(
            f"{DESCRIPTION} refers to {name.replace(' ', '.'):.80}, which is no part of a tensor; the file may run "
            "code when torch loads it, and is refused"
        )
    return _Name(name)


def _storage(reference: object) -> _Storage:
    """A reference `("storage", type, key, device, elements)`."""
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise _Refused(f"{DESCRIPTION} refers to something else than elements of a tensor")
    _, kind, key, _, elements = reference
    if not isinstance(kind, _Name) or kind.name not in _STORAGES or not isinstance(key, str):
        raise _Refused(f"{DESCRIPTION} refers to elements of an unknown kind")
    return _Storage(key, _STORAGES[kind.name], _integer(elements))


@dataclass(frozen=True)
class _View:
    """A tensor, before its bytes are located."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _call(function: object, arguments: object) -> object:
    """The value of the few functions that a description may call; none of them is called."""
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise _Refused(f"{DESCRIPTION} calls something that is no function")
    if function.name == _ORDERED and not arguments:
        return {}
    if function.name == _PARAMETER and arguments and isinstance(arguments[0], _View):
        return arguments[0]
    if function.name == _TENSOR and len(arguments) >= 4:
        storage, offset, shape, strides, *_ = arguments
        if isinstance(storage, _Storage) and isinstance(shape, tuple) and isinstance(strides, tuple):
            sizes, steps = tuple(map(_integer, shape)), tuple(map(_integer, strides))
            bounded = all(0 <= number < 1 << 62 for number in (*sizes, _integer(offset)))
            if not bounded or len(sizes) != len(steps) or len(sizes) > MAX_AXES:
                raise _Refused(f"{DESCRIPTION} has a tensor of an impossible shape")
            return _View(storage, _integer(offset), sizes, steps)
    raise _Refused(f"{DESCRIPTION} calls {function.name.replace(' ', '.')} with arguments that describe no tensor")


def _set(target: object, pairs: Sequence[object]) -> None:
    if not isinstance(target, dict) or len(pairs) % 2:
        raise _Refused(f"{DESCRIPTION} is damaged: entries of something that is no dictionary")
    # Only texts: the hash of a tuple of tuples that refers to itself many times would take forever.
    if not all(isinstance(key, str) for key in pairs[::2]):
        raise _Refused(f"{DESCRIPTION} has an entry without a name")
    target.update(zip(pairs[::2], pairs[1::2], strict=True))


def _tensors(value: object, starts: Mapping[str, tuple[int, int]]) -> dict[str, TorchTensor]:
    """The located tensors of a description's value."""
    if not isinstance(value, dict):
        raise _Refused(f"the file holds a {type(value).__name__}, not a dictionary of tensors")
    problems: list[str] = []
    tensors: dict[str, TorchTensor] = {}
    for name, view in value.items():
        if not isinstance(view, _View):
            problems.append(f"entry {name!r:.60} is not a named tensor")
            continue
        storage, count = view.storage, math.prod(view.shape)
        start, nbytes = starts.get(storage.key, (0, -1))
        # Strides of axes of size 1 do not matter, as in torch.
        steps = [step for size, step in zip(view.shape, view.strides, strict=True) if size != 1]
        if nbytes < (view.offset + count) * storage.dtype.itemsize:
            problems.append(f"tensor {name!r:.60} has fewer bytes in the archive than its shape {view.shape} needs")
        elif count and steps != list(_contiguous([size for size in view.shape if size != 1])):
            problems.append(f"tensor {name!r:.60} is not contiguous; save tensor.contiguous()")
        else:
            at = start + view.offset * storage.dtype.itemsize
            tensors[name] = TorchTensor(at, view.shape, storage.dtype)
    if problems:
        raise _Refused("\n".join(problems[:20]))
    return tensors


def _contiguous(shape: Sequence[int]) -> Iterator[int]:
    for axis in range(len(shape)):
        yield math.prod(shape[axis + 1 :])


def write_torch_zip(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file that `torch.load(path, weights_only=True)` reads as a dictionary of tensors.

    Raises:
        ValueError: torch has no such dtype.
    """
    kinds = {dtype: name for name, dtype in _STORAGES.items()}
    body = io.BytesIO()
    body.write(b"\x80\x02}(")
    for number, (name, array) in enumerate(tensors.items()):
        if array.dtype not in kinds:
            raise ValueError(f"tensor {name!r}: torch files have no {array.dtype}")
        storage = b"((" + _text("storage") + _global(kinds[array.dtype]) + _text(str(number)) + _text("cpu")
        body.write(_text(name) + _global(_TENSOR) + storage + _number(array.size) + b"tQ" + _number(0))
        body.write(_numbers(array.shape) + _numbers(tuple(_contiguous(array.shape))))
        # Requires no gradient, and has no hooks.
        body.write(b"\x89" + _global(_ORDERED) + b")RtR")
    body.write(b"u.")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        root = path.stem
        archive.writestr(f"{root}/{DESCRIPTION}", body.getvalue())
        archive.writestr(f"{root}/byteorder", "little")
        for number, array in enumerate(tensors.values()):
            with archive.open(f"{root}/data/{number}", "w", force_zip64=array.nbytes >= 1 << 31) as entry:
                entry.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        archive.writestr(f"{root}/version", "3\n")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _global(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return f"c{module}\n{attribute}\n".encode()


def _number(number: int) -> bytes:
    """An integer of any size."""
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
