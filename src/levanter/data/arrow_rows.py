"""Rows of Parquet and Arrow files as Python values.

Arrow gives every struct of a column the union of all fields: of two calls of different tools, each has the arguments of
both, null where it has none. A null field of a struct is therefore read as an absent one, so that a row is the record
that was written. Fields that are stored as JSON text (`arrow.json`, as `datasets` writes mixed types) are exact, and
keep their nulls. Text is text however it is stored: views, dictionaries (pandas' categories), and bytes that are UTF-8.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias

from levanter.base.bounded_json import parse_json
from levanter.base.input_limits import OutOfBoundsError
from levanter.data.errors import DataError
from levanter.io.paths import filesystem, missing_file, open_read

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 4096
_ARROW_MAGIC = b"ARROW1"
_Convert: TypeAlias = "Callable[[Any], Any] | None"
"""Converts one value as Arrow gives it; None where nothing is to be converted."""


def row_texts(path: str, kind: str, key: str) -> Iterator[tuple[str, str]]:
    """The texts of a column, each with its origin; a null is an empty text.

    Args:
        path: the file.
        kind: `parquet` or `arrow`.
        key: the column.

    Raises:
        DataError: there is no such column, it is not text, or the file is damaged.
    """
    import pyarrow as pa

    with _opened(path, kind) as (schema, batches):
        # A wrong column is reported before any row is read.
        if key not in schema.names:
            raise DataError(f"{path}: {missing_key('column', key, schema.names)}")
        column = schema.field(key).type
        stored = column.value_type if pa.types.is_dictionary(column) else column
        if not (_is_text(stored) or _is_bytes(stored) or pa.types.is_null(stored)):
            texts = [field.name for field in schema if _is_text(field.type)]
            ways = f"; set format.text_key to a column of text: {', '.join(texts)}" if texts else ""
            raise DataError(f"{path}: column {key!r} is {column}, expected string{ways}")
        for value, row in _values(path, batches([key]), lambda batch: batch.column(0).to_pylist()):
            origin = f"{path}:{row}"
            if isinstance(value, bytes):
                try:
                    value = value.decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"{origin}: {key!r} is not UTF-8 at byte {error.start} ({error.reason})") from error
            yield value or "", origin


def row_records(path: str, kind: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows as mappings, each with its origin; null fields of structs are left out.

    Args:
        path: the file.
        kind: `parquet` or `arrow`.

    Raises:
        DataError: the file is damaged.
    """
    with _opened(path, kind) as (schema, batches):
        converters = {field.name: convert for field in schema if (convert := _converter(field.type)) is not None}
        for record, row in _values(path, batches(None), lambda batch: batch.to_pylist()):
            origin = f"{path}:{row}"
            for key, convert in converters.items():
                if record[key] is None:
                    continue
                try:
                    record[key] = convert(record[key])
                except (json.JSONDecodeError, OutOfBoundsError) as error:
                    raise DataError(f"{origin}: {key!r}: not JSON ({error})") from error
            yield record, origin


def missing_key(what: str, key: str, keys: list[str]) -> str:
    """The message for a text key that a record or a file does not have."""
    close = get_close_matches(key, keys, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no {what} {key!r} (format.text_key); it has {', '.join(map(repr, keys)) or 'none'}{hint}"


@contextlib.contextmanager
def _opened(
    path: str, kind: str
) -> "Iterator[tuple[pa.Schema, Callable[[list[str] | None], Iterator[pa.RecordBatch]]]]":
    """The schema of a file, and a function from columns (None for all) to its batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs, name = filesystem(path)
    # `ParquetFile` on a missing path raises an error without the nearest names.
    if not fs.isfile(name):
        raise missing_file(path)
    with open_read(path) as raw:
        try:
            if kind == "parquet":
                file = pq.ParquetFile(raw)
                # In batches, so that a row group of gigabytes is not converted to Python objects at once.
                yield file.schema_arrow, lambda columns: file.iter_batches(columns=columns, batch_size=_BATCH_ROWS)
                return
            # `datasets` writes the stream format, Feather is the file format; both are called .arrow.
            is_file = raw.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
            raw.seek(0)
            reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
        except (pa.ArrowInvalid, OSError) as error:
            names = {"parquet": "a Parquet file", "arrow": "an Arrow file"}
            raise DataError(f"{path}: not {names[kind]} ({error})") from error
        yield reader.schema, lambda columns: _arrow_batches(reader, columns)


def _arrow_batches(
    reader: "pa.RecordBatchFileReader | pa.RecordBatchStreamReader", columns: list[str] | None
) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    if isinstance(reader, pa.RecordBatchStreamReader):
        stored = iter(reader)
    else:
        stored = (reader.get_batch(number) for number in range(reader.num_record_batches))
    for batch in stored:
        batch = batch if columns is None else batch.select(columns)
        # A batch of an Arrow file may have all of its rows.
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(start, _BATCH_ROWS)


def _values(path: str, batches: "Iterator[pa.RecordBatch]", values: Callable[[Any], list]) -> Iterator[tuple[Any, int]]:
    """The values of each row, and the row's number."""
    import pyarrow as pa

    row = 0
    try:
        for batch in batches:
            for value in values(batch):
                yield value, row
                row += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: damaged after row {row} ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 in or after row {row} ({error.reason})") from error


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _converter(kind: "pa.DataType") -> _Convert:
    """How values of a type are converted; the type decides, so that lists of token ids are not visited."""
    import pyarrow as pa

    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda text: None if text is None else parse_json(text)
    if pa.types.is_dictionary(kind):
        return _converter(kind.value_type)
    if _is_bytes(kind):
        return _text_or_bytes
    if pa.types.is_map(kind):
        inner = _converter(kind.item_type) or _same
        return lambda pairs: None if pairs is None else {key: inner(item) for key, item in pairs if item is not None}
    if pa.types.is_struct(kind):
        fields = {field.name: _converter(field.type) or _same for field in kind}
        return lambda struct: (
            None
            if struct is None
            else {name: convert(struct[name]) for name, convert in fields.items() if struct[name] is not None}
        )
    if hasattr(kind, "value_type") and (convert := _converter(kind.value_type)) is not None:
        return lambda items: None if items is None else [convert(item) for item in items]
    return None


def _same(value: object) -> object:
    return value


def _text_or_bytes(value: bytes | None) -> str | bytes | None:
    """Bytes as text where they are UTF-8: files without the annotation of text have bytes in its place."""
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value
