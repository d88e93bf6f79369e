"""Readers: a file → its documents.

A *document* is a string with its origin. The file's name determines how it is read:

| name                       | one document is                                                                     |
|----------------------------|-------------------------------------------------------------------------------------|
| `.txt`, `.md`              | the file, or each line that is not blank (`format.txt_documents`)                   |
| `.jsonl`, `.ndjson`        | the text key of the object on each line                                             |
| `.json`                    | the text key of each object in a list, or of the one object; strings as they are    |
| `.parquet`, `.arrow`       | the text column of each row                                                         |

The name is only a claim where the content decides: gzip and Zstandard are recognized by their first bytes, with and
without `.gz` or `.zst` in the name, and a `.json` file with a value on each line is read as lines (a remote file cannot
be renamed). Text is UTF-8; a byte order mark at the beginning is dropped, nothing else is changed, neither line ends
nor the Unicode form.
"""

import contextlib
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import RECORD_BYTES, OutOfBoundsError, lines_bounded, read_bounded, shown_bytes
from levanter.data.arrow_rows import missing_key, row_records, row_texts
from levanter.data.errors import DataError
from levanter.data.formats import TextLmDatasetFormat
from levanter.data.record_values import checked_text, record_value
from levanter.io.paths import base_name, open_read

ROW_KINDS = ("parquet", "arrow")
"""Kinds of files that consist of rows and compress themselves."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """A text and where it came from (`file`, or `file:line`, `file:row`)."""

    text: str
    origin: str


def read_documents(path: str, format: TextLmDatasetFormat) -> Iterator[Document]:
    """Reads a file's documents one by one, in their order.

    Raises:
        MissingFileError: there is no such file.
        DataError: the ending is unknown; the content does not match the ending; text is not UTF-8 (with the byte
            offset); a record lacks the text key (with the line and the keys it has).
    """
    kind, compression = file_kind(path)
    if kind in ROW_KINDS:
        for text, origin in row_texts(path, kind, format.text_key):
            yield Document(text, origin)
        return
    with open_decompressed(path, compression) as file:
        if kind == "txt":
            yield from (_lines_as_text(path, file) if format.txt_documents == "line" else _whole_file(path, file))
            return
        for record, origin in _json_records(path, file, kind):
            # The items of a JSON list may be the texts themselves.
            is_text = kind == "json" and isinstance(record, str)
            text = checked_text(record, origin) if is_text else _record_text(record, format.text_key, origin)
            yield Document(text, origin)


def read_records(path: str) -> Iterator[tuple[Any, str]]:
    """Reads the records of a file, each with its origin: JSON values, or rows of Parquet as mappings.

    Raises:
        MissingFileError: there is no such file.
        DataError: another ending, damage, or a line that is not JSON.
    """
    kind, compression = file_kind(path)
    if kind == "txt":
        known = ".jsonl, .json (also with .gz or .zst), .arrow and .parquet"
        raise DataError(f"{path}: records are read from {known}, not from .{kind}")
    if kind in ROW_KINDS:
        yield from row_records(path, kind)
        return
    with open_decompressed(path, compression) as file:
        yield from _json_records(path, file, kind)


def file_kind(path: str) -> tuple[str, str | None]:
    """How a file is read, from its name: (`txt` | `json` | `jsonl` | `parquet` | `arrow`, None | `gz` | `zst`).

    Raises:
        DataError: no reader knows the ending.
    """
    # Without the query of a signed URL, which follows the name.
    name = base_name(path).lower().split("?")[0]
    compression = None
    for ending, method in ((".gz", "gz"), (".zst", "zst"), (".zstd", "zst")):
        if name.endswith(ending):
            name, compression = name.removesuffix(ending), method
            break
    kinds = {".txt": "txt", ".md": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
    for ending, kind in kinds.items():
        if name.endswith(ending):
            return kind, compression
    rows = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
    for ending, kind in rows.items():
        if name.endswith(ending) and compression is None:
            return kind, None
    known = f"{', '.join(kinds)} (each also with .gz or .zst), {', '.join(rows)}"
    raise DataError(f"{path}: no reader for this kind of file; known: {known}")


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_FOREIGN = {
    b"PAR1": "Parquet: its name must end in .parquet",
    b"ARROW1": "Arrow: its name must end in .arrow",
    b"\xfd7zXZ\x00": "compressed with xz: decompress it, or compress it with gzip or Zstandard",
    b"BZh91AY&SY": "compressed with bzip2: decompress it, or compress it with gzip or Zstandard",
    b"PK\x03\x04": "a zip archive: unpack it",
}
"""First bytes of files that are not read under a name of text, and what to do about them."""


def _compression(path: str, head: bytes, named: str | None) -> str | None:
    """How a file is compressed, from its first bytes; the name decides only about an empty file and rarer frames."""
    if head.startswith(_GZIP):
        return "gz"
    # Besides frames of data, Zstandard has frames that are skipped, which begin with one of 16 numbers.
    if head.startswith(_ZSTD) or (len(head) > 3 and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return "zst"
    for magic, advice in _FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path}: the content is {advice}")
    return named if not head else None


@contextlib.contextmanager
def open_decompressed(path: str, named: str | None) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed if they are compressed; damage to the compressed stream becomes a `DataError`."""
    with open_read(path) as raw:
        head = raw.read(_HEAD_BYTES)
        compression = _compression(path, head, named)
        # Some remote files can only be read forwards.
        stream = io.BufferedReader(_Prefixed(head, raw), 1 << 20)
        if raw.seekable():
            raw.seek(0)
            stream = raw
        try:
            if compression == "gz":
                with gzip.open(stream) as file:
                    yield file  # type: ignore[misc]
            elif compression == "zst":
                # Lines are read in small pieces, which this buffer serves.
                with io.BufferedReader(_ZstdStream(stream), 1 << 20) as file:
                    yield file
            else:
                yield stream
        except OutOfBoundsError as error:
            raise DataError(str(error)) from error
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{path}: the .{compression} stream is damaged or truncated ({error})") from error


_HEAD_BYTES = 16


class _Prefixed(io.RawIOBase):
    """Bytes that were read already, and then the rest of their file."""

    def __init__(self, head: bytes, rest: IO[bytes]):
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        block = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(block)] = block
        return len(block)


_ZSTD_BYTES = 4096


class _ZstdStream(io.RawIOBase):
    """The content of Zstandard frames, one after the other.

    The library's own reader treats a truncated stream as a complete one; this one raises `EOFError`.
    """

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest = b""  # compressed bytes behind the end of a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._ready:
            block = self._rest or self._raw.read(1 << 18)
            # A few bytes may decompress to megabytes; `_ZSTD_BYTES` decompress to at most 128 MiB.
            block, self._rest = block[:_ZSTD_BYTES], block[_ZSTD_BYTES:]
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(block))
            # Frames may follow each other in one file; what this frame did not use begins the next one.
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data + self._rest, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _decode(path: str, content: bytes, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        position = offset + error.start
        invalid = content[error.start : error.start + 4].hex(" ")
        raise DataError(f"{path}: not UTF-8 at byte {position} ({invalid}: {error.reason})") from error


def _without_mark(content: bytes) -> tuple[bytes, int]:
    """The content without a byte order mark, and the offset at which it begins."""
    return (content[3:], 3) if content.startswith(BYTE_ORDER_MARK) else (content, 0)


def _whole_file(path: str, file: IO[bytes]) -> Iterator[Document]:
    content, offset = _without_mark(_rest(path, file))
    if content:
        yield Document(_decode(path, content, offset), path)


def _rest(path: str, file: IO[bytes]) -> bytes:
    """What is left of a file. Compressed files are bounded, because their size does not limit their content."""
    compressed = isinstance(file, gzip.GzipFile) or isinstance(getattr(file, "raw", None), _ZstdStream)
    return read_bounded(file, RECORD_BYTES, where=path) if compressed else file.read()


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank: (number from 1, byte offset, content without the line end)."""
    offset = 0
    for number, line in enumerate(lines, 1):
        # A byte order mark is one only at the beginning of the file; elsewhere it is text.
        content, skipped = _without_mark(line) if number == 1 else (line, 0)
        content = content.rstrip(b"\r\n")
        if content.strip():
            yield number, offset + skipped, content
        # The line as stored, its end included: error messages give byte offsets in the (decompressed) file.
        offset += len(line)


def _lines_as_text(path: str, file: IO[bytes]) -> Iterator[Document]:
    for number, offset, line in _numbered(lines_bounded(file, where=path)):
        yield Document(_decode(path, line, offset), f"{path}:{number}")


def _json_records(path: str, file: IO[bytes], kind: str) -> Iterator[tuple[Any, str]]:
    """The JSON values of a file, each with its origin: those on its lines, or the items of one list.

    A first line that is a value by itself, with more lines behind it, is one of many; the name decides about one line.
    """
    head = _head_lines(file)
    error = _first_error(path, head)
    if kind == "json" and head and error is None and (more := _head_lines(file)):
        head, kind = [*head, *more], "jsonl"
    if kind == "jsonl" and error is None:
        yield from _json_lines(path, itertools.chain(head, lines_bounded(file, where=path, before=len(head))))
        return
    unfinished = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
    if kind == "jsonl" and not unfinished:
        raise _line_error(path, head)
    try:
        # Lines that follow a truncated first line are not all read before the error is reported.
        rest = read_bounded(file, RECORD_BYTES, where=path) if kind == "jsonl" else _rest(path, file)
        records = _json_list(path, b"".join(head) + rest)
    except (DataError, OutOfBoundsError):
        if kind == "jsonl":
            raise _line_error(path, head) from None
        raise
    yield from records


def _head_lines(file: IO[bytes]) -> list[bytes]:
    """The next lines, up to the first that is not blank; none if only blank ones are left."""
    lines: list[bytes] = []
    # One line may have a whole list, which is larger than a record.
    while line := file.readline(RECORD_BYTES + 1):
        lines.append(line)
        if _without_mark(line)[0].strip():
            return lines
    return []


def _first_error(path: str, head: list[bytes]) -> Exception | None:
    """Why the last of some lines is not a JSON value by itself; None if it is one, or if there is no line."""
    if head and len(head[-1]) > RECORD_BYTES:
        return OutOfBoundsError(f"{path}:{len(head)}: a line has more than {shown_bytes(RECORD_BYTES)}, the limit")
    try:
        for _, offset, line in _numbered(head):
            parse_json(_decode(path, line, offset))
    except (DataError, OutOfBoundsError, json.JSONDecodeError) as error:
        return error
    return None


def _line_error(path: str, head: list[bytes]) -> DataError:
    """The error of the last of some lines, which is not a JSON value."""
    try:
        list(_json_lines(path, lines_bounded(io.BytesIO(b"".join(head)), where=path)))
    except (DataError, OutOfBoundsError) as error:
        return DataError(str(error))
    raise AssertionError(head)


def _json_lines(path: str, lines: Iterable[bytes]) -> Iterator[tuple[Any, str]]:
    for number, offset, line in _numbered(lines):
        origin = f"{path}:{number}"
        text = _decode(path, line, offset)
        try:
            record = parse_json(text)
        except OutOfBoundsError as error:
            raise DataError(f"{origin}: {error}") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{origin}: not JSON at column {error.colno} ({error.msg})") from error
        yield record, origin


def _json_list(path: str, stored: bytes) -> list[tuple[Any, str]]:
    content, offset = _without_mark(stored)
    text = _decode(path, content, offset)
    try:
        value = parse_json(text)
    except OutOfBoundsError as error:
        raise DataError(f"{path}: {error}") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON at column {error.colno} ({error.msg})") from error
    if not isinstance(value, list):
        return [(value, path)]
    # The whole file is one JSON value, so all of it is parsed before the first record.
    return [(record, f"{path}[{number}]") for number, record in enumerate(value)]


def _record_text(record: object, key: str, origin: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{origin}: expected an object with the key {key!r}, found {type(record).__name__}")
    if key not in record:
        raise DataError(f"{origin}: {missing_key('key', key, list(record))}")
    # A null is an empty text, as in Parquet, where rows without a text have one.
    return "" if record[key] is None else record_value(record, key, str, origin)
