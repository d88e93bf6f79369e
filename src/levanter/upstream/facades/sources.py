"""Upstream's data sources of files: records by shard and row.

    rows = datasource_from_jsonl(["a.jsonl", "b.jsonl.gz"]).map_batches(tokenize, 128)
    cache = rows.build_or_load_cache("cache/train")

A *shard* is a file here; its name is the path without what all paths have in common. The files are read by
`levanter.data.readers`, so compression, encodings and errors are those of `data.components`. Sources of a script's own
derive from `levanter.upstream.facades.caches.ShardedDataSource`.
"""

from abc import ABC
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from os.path import commonprefix, dirname
from typing import Any, TypeVar

from haliax_ext.pytree import PyTree
from levanter.compat.hf.hub import cached_dataset_files
from levanter.data.errors import DataError
from levanter.data.readers import file_kind, open_decompressed, read_records
from levanter.io.paths import expand
from levanter.upstream.facades.caches import ShardedDataSource

T = TypeVar("T")
U = TypeVar("U")


class UrlBackedShardedDataSource(ShardedDataSource[T], ABC):
    """Files as shards.

    Args:
        urls: paths or URLs, with braces and wildcards.
    """

    def __init__(self, urls: str | Sequence[str]):
        self.urls = [urls] if isinstance(urls, str) else list(urls)

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Shard → file.

        Raises:
            MissingFileError: listing the files that do not exist.
            ValueError: two files have one name.
        """
        paths = expand(self.urls)
        # By characters, as upstream names them; `commonpath` would also shorten `gs://` to `gs:/`.
        common = dirname(paths[0]) if len(paths) == 1 else commonprefix(paths)  # noqa: RUF071
        names = [path[len(common) :].lstrip("/").replace(".", "_") for path in paths]
        if twice := sorted({path for n, path in enumerate(paths) if names[n] in names[:n]}):
            raise ValueError(f"files with the name of another one, or listed twice: {', '.join(twice)}")
        return dict(zip(names, paths, strict=True))

    @property
    def shard_names(self) -> Sequence[str]:
        """The files' names, without what their paths have in common."""
        return list(self._paths)


class UrlDataSource(UrlBackedShardedDataSource[Any]):
    """The records of files of JSON, lines of JSON, Parquet or Arrow; `columns` selects keys of each."""

    def __init__(self, urls: str | Sequence[str], columns: Sequence[str] | None = None):
        super().__init__(urls)
        self.columns = columns

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[Any]:
        """The records of a file from a row on."""
        for record, origin in islice(read_records(self._paths[shard_name]), row, None):
            if self.columns and (missing := [name for name in self.columns if name not in record]):
                raise DataError(f"{origin}: no key {', '.join(missing)}; the record has {', '.join(map(str, record))}")
            yield {name: record[name] for name in self.columns} if self.columns else record


class JsonlDataSource(UrlDataSource):
    """The records of files of JSON lines."""


class JsonDataSource(UrlDataSource):
    """The items of files that are one JSON list each."""


class ParquetDataSource(UrlDataSource):
    """The rows of Parquet files."""


class TextUrlDataSource(UrlBackedShardedDataSource[str]):
    """Texts: the lines of text files, with their line ends, or a key of records."""

    def __init__(self, urls: str | Sequence[str], text_key: str = "text"):
        super().__init__(urls)
        self.text_key = text_key

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[str]:
        """The texts of a file from a row on."""
        path = self._paths[shard_name]
        kind, compression = file_kind(path)
        if kind == "txt":
            with open_decompressed(path, compression) as file:
                yield from (line.decode() for line in islice(file, row, None))
            return
        records = UrlDataSource(path, columns=[self.text_key])
        for record in records.open_shard_at_row(records.shard_names[0], row):
            yield record[self.text_key]


def datasource_from_jsonl(urls_or_paths: Sequence[str]) -> ShardedDataSource[Any]:
    """The records of files of JSON lines."""
    return JsonlDataSource(urls_or_paths)


def datasource_from_json(urls_or_paths: Sequence[str]) -> ShardedDataSource[Any]:
    """The items of files that are one JSON list each."""
    return JsonDataSource(urls_or_paths)


def datasource_from_parquet(urls_or_paths: Sequence[str]) -> ShardedDataSource[Any]:
    """The rows of Parquet files."""
    return ParquetDataSource(urls_or_paths)


class WrappedHFDataSource(ShardedDataSource[Any]):
    """A split of a data set of the Hub: its Parquet files, from the Hub's cache if they are there.

    Args:
        id: of the data set.
        split: the split.
        name: the data set's configuration; None for the default one.
        streaming: accepted for compatibility.
        more: refused: options of the package `datasets`.
    """

    def __init__(self, id: str, *, split: str, name: str | None = None, streaming: bool = True, **more: object):
        del streaming
        if more:
            raise ValueError(f"WrappedHFDataSource: {', '.join(sorted(more))}: only split and name select files here")
        self.id, self.split, self.name = id, split, name

    @cached_property
    def files(self) -> UrlDataSource:
        """The files.

        Raises:
            MissingFileError: they are neither in the cache nor at the Hub.
        """
        return UrlDataSource(
            cached_dataset_files(self.id, self.name, self.split) or _hub_files(self.id, self.name, self.split)
        )

    @property
    def shard_names(self) -> Sequence[str]:
        """The files' names."""
        return self.files.shard_names

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[Any]:
        """The rows of a file from a row on."""
        return self.files.open_shard_at_row(shard_name, row)


def datasource_from_hf(id: str, *, split: str, **keys: PyTree) -> ShardedDataSource[Any]:
    """A split of a data set of the Hub."""
    return WrappedHFDataSource(id, split=split, **keys)


def _hub_files(id: str, name: str | None, split: str) -> str:
    # The Hub converts every data set to Parquet on this branch.
    return f"hf://datasets/{id}@refs/convert/parquet/{name or 'default'}/{split}/*.parquet"


def sniff_format(url: str) -> str:
    """`.jsonl`, `.json`, `.parquet`, …: how a file is read; a `.json` file with a value on each line is `.jsonl`.

    Raises:
        DataError: no reader knows the ending.
    """
    kind, compression = file_kind(url)
    if kind != "json":
        return f".{kind}"
    with open_decompressed(url, compression) as file:
        head = file.read(2)
    # An object that begins on the first line and goes on there is a line of its own.
    return ".jsonl" if head[:1] == b"{" and head[1:] not in (b"\n", b"\r") else ".json"
