"""Readers: a file → its documents.

A *document* is a string with its origin. The file's name determines how it is read:

| name                       | one document is                                                                     |
|----------------------------|-------------------------------------------------------------------------------------|
| `.txt`, `.md`              | the file, or each line that is not blank (`format.txt_documents`)                   |
| `.jsonl`, `.ndjson`        | the text key of the object on each line                                             |
| `.json`                    | the text key of each object in a list, or of the one object; strings as they are    |
| `.parquet`                 | the text column of each row                                                         |

Files with a further `.gz` or `.zst` are decompressed, except Parquet, which compresses itself. Text is UTF-8; a byte
order mark at the beginning is dropped, nothing else is changed, neither line ends nor the Unicode form.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import IO, TYPE_CHECKING, Any

import zstandard

from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import RECORD_BYTES, OutOfBoundsError, lines_bounded, read_bounded
from levanter.data.errors import DataError
from levanter.data.formats import TextLmDatasetFormat
from levanter.io.paths import base_name, filesystem, missing_file, open_read

if TYPE_CHECKING:
    import pyarrow.parquet as pq

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
    if kind == "parquet":
        yield from _parquet(path, format.text_key)
        return
    with _decompressed(path, compression) as file:
        if kind == "txt":
            yield from (_lines_as_text(path, file) if format.txt_documents == "line" else _whole_file(path, file))
        elif kind == "json":
            yield from _json(path, file, format.text_key)
        else:
            yield from _json_lines(path, file, format.text_key)


def read_records(path: str) -> Iterator[tuple[Any, str]]:
    """Reads the records of a file, each with its origin: JSON values, or rows of Parquet as mappings.

    Raises:
        MissingFileError: there is no such file.
        DataError: another ending, damage, or a line that is not JSON.
    """
    kind, compression = file_kind(path)
    if kind == "txt":
        known = ".jsonl, .json (also with .gz or .zst) and .parquet"
        raise DataError(f"{path}: records are read from {known}, not from .{kind}")
    if kind == "parquet":
        yield from _parquet_rows(path)
        return
    with _decompressed(path, compression) as file:
        yield from (_json_list(path, file) if kind == "json" else _json_values(path, file))


def file_kind(path: str) -> tuple[str, str | None]:
    """How a file is read, from its name: (`txt` | `json` | `jsonl` | `parquet`, None | `gz` | `zst`).

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
    if name.endswith(".parquet") and compression is None:
        return "parquet", None
    known = ", ".join(kinds)
    raise DataError(f"{path}: no reader for this kind of file; known: {known} (each also with .gz or .zst), .parquet")


@contextlib.contextmanager
def _decompressed(path: str, compression: str | None) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed; damage to the compressed stream becomes a `DataError`."""
    with open_read(path) as raw:
        try:
            if compression == "gz":
                with gzip.open(raw) as file:
                    yield file  # type: ignore[misc]
            elif compression == "zst":
                # Lines are read in small pieces, which this buffer serves.
                with io.BufferedReader(_ZstdStream(raw), 1 << 20) as file:
                    yield file
            else:
                yield raw
        except OutOfBoundsError as error:
            raise DataError(str(error)) from error
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{path}: the .{compression} stream is damaged or truncated ({error})") from error


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


def _content(path: str, file: IO[bytes]) -> bytes:
    """The content of a file. Compressed files are bounded, because their size does not limit their content."""
    if file_kind(path)[1] is None:
        return file.read()
    return read_bounded(file, RECORD_BYTES, where=path)


def _whole_file(path: str, file: IO[bytes]) -> Iterator[Document]:
    content, offset = _without_mark(_content(path, file))
    if content:
        yield Document(_decode(path, content, offset), path)


def _lines(path: str, file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank: (number from 1, byte offset, content without the line end)."""
    offset = 0
    for number, line in enumerate(lines_bounded(file, where=path), 1):
        # A byte order mark is one only at the beginning of the file; elsewhere it is text.
        content, skipped = _without_mark(line) if number == 1 else (line, 0)
        content = content.rstrip(b"\r\n")
        if content.strip():
            yield number, offset + skipped, content
        # The line as stored, its end included: error messages give byte offsets in the (decompressed) file.
        offset += len(line)


def _lines_as_text(path: str, file: IO[bytes]) -> Iterator[Document]:
    for number, offset, line in _lines(path, file):
        yield Document(_decode(path, line, offset), f"{path}:{number}")


def _json_lines(path: str, file: IO[bytes], key: str) -> Iterator[Document]:
    for record, origin in _json_values(path, file):
        yield Document(_record_text(record, key, origin), origin)


def _json_values(path: str, file: IO[bytes]) -> Iterator[tuple[Any, str]]:
    for number, offset, line in _lines(path, file):
        origin = f"{path}:{number}"
        text = _decode(path, line, offset)
        try:
            record = parse_json(text)
        except OutOfBoundsError as error:
            raise DataError(f"{origin}: {error}") from error
        except json.JSONDecodeError as error:
            # A pretty-printed JSON file has an opening bracket alone on its first line.
            hint = "; the file looks like one JSON value: name it .json" if number == 1 and text.strip() in "[{" else ""
            raise DataError(f"{origin}: not JSON at column {error.colno} ({error.msg}){hint}") from error
        yield record, origin


def _json(path: str, file: IO[bytes], key: str) -> Iterator[Document]:
    for record, origin in _json_list(path, file):
        text = _checked(record, origin) if isinstance(record, str) else _record_text(record, key, origin)
        yield Document(text, origin)


def _json_list(path: str, file: IO[bytes]) -> Iterator[tuple[Any, str]]:
    content, offset = _without_mark(_content(path, file))
    text = _decode(path, content, offset)
    try:
        value = parse_json(text)
    except OutOfBoundsError as error:
        raise DataError(f"{path}: {error}") from error
    except json.JSONDecodeError as error:
        hint = "; a file with one JSON value per line should be named .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{path}:{error.lineno}: not JSON at column {error.colno} ({error.msg}){hint}") from error
    # The whole file is one JSON value, so all of it is parsed before the first record.
    records = value if isinstance(value, list) else [value]
    for number, record in enumerate(records):
        yield record, f"{path}[{number}]" if isinstance(value, list) else path


def _record_text(record: object, key: str, origin: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{origin}: expected an object with the key {key!r}, found {type(record).__name__}")
    if key not in record:
        raise DataError(f"{origin}: {_missing_key('key', key, list(record))}")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{origin}: {key!r} is {type(text).__name__}, expected a string")
    return _checked(text, origin)


def _checked(text: str, origin: str) -> str:
    """Returns the text; refuses half of a surrogate pair, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: not text: \\u{ord(text[error.start]):04x} at character {error.start} is half of a surrogate "
            "pair"
        ) from error
    return text


def _missing_key(what: str, key: str, keys: list[str]) -> str:
    close = get_close_matches(key, keys, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no {what} {key!r} (format.text_key); it has {', '.join(map(repr, keys)) or 'none'}{hint}"


@contextlib.contextmanager
def _parquet_file(path: str) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs, name = filesystem(path)
    # `ParquetFile` on a missing path raises an error without the nearest names.
    if not fs.isfile(name):
        raise missing_file(path)
    with open_read(path) as raw:
        try:
            file = pq.ParquetFile(raw)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: not a Parquet file ({error})") from error
        yield file


def _parquet(path: str, key: str) -> Iterator[Document]:
    import pyarrow as pa

    with _parquet_file(path) as file:
        # The schema is in the footer: a wrong column is reported before any row is read.
        schema = file.schema_arrow
        if key not in schema.names:
            raise DataError(f"{path}: {_missing_key('column', key, schema.names)}")
        kind = schema.field(key).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{path}: column {key!r} is {kind}, expected string")
        for text, row in _rows(path, file, [key], lambda batch: batch.column(0).to_pylist()):
            if text is None:
                raise DataError(f"{path}: row {row} has no {key!r} (null)")
            yield Document(text, f"{path}:{row}")


def _parquet_rows(path: str) -> Iterator[tuple[Any, str]]:
    with _parquet_file(path) as file:
        for record, row in _rows(path, file, None, lambda batch: batch.to_pylist()):
            yield record, f"{path}:{row}"


def _rows(
    path: str, file: "pq.ParquetFile", columns: list[str] | None, values: Callable[[Any], list]
) -> Iterator[tuple[Any, int]]:
    """The values of each row of some columns, and the row's number."""
    import pyarrow as pa

    row = 0
    try:
        # In batches, so that a row group of gigabytes is not converted to Python objects at once.
        for batch in file.iter_batches(columns=columns, batch_size=4096):
            for value in values(batch):
                yield value, row
                row += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: damaged after row {row} ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 in or after row {row} ({error.reason})") from error
