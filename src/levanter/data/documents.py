"""Resolves a component of the `data:` block into document sources, without reading a document.

`component_documents` looks at names only: it expands patterns and checks that every file exists and that a reader knows
its type. The result reads its documents when iterated, in the same order every time.
"""

import pydoc_data.topics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from levanter.data.config import (
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    DirectDatasetComponent,
)
from levanter.data.errors import DataError, raise_problems
from levanter.data.formats import LmDatasetFormatBase, TextLmDatasetFormat, format_name
from levanter.data.readers import Document, file_kind, read_documents
from levanter.data.record_values import checked_text
from levanter.data.sources import HfDatasetSource, PythonDocsSource, UrlDatasetSource
from levanter.io.paths import MissingFileError, expand, is_remote


@dataclass(frozen=True, kw_only=True)
class FileDocuments:
    """The documents of files, in the order of the files; iterates over text only, not over records of other formats."""

    paths: tuple[str, ...]
    format: LmDatasetFormatBase

    def __iter__(self) -> Iterator[Document]:
        assert isinstance(self.format, TextLmDatasetFormat), self.format
        for path in self.paths:
            yield from read_documents(path, self.format)

    def __str__(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else f"{len(self.paths)} files: {self.paths[0]}, …"


@dataclass(frozen=True, kw_only=True)
class PythonDocuments:
    """The one document of `PythonDocsSource`."""

    max_chars: int | None

    def __iter__(self) -> Iterator[Document]:
        yield Document(python_docs_text(self.max_chars), str(self))

    def __str__(self) -> str:
        limit = "" if self.max_chars is None else f", first {self.max_chars:,} characters"
        return f"python: pydoc_data.topics{limit}"


@dataclass(frozen=True, kw_only=True)
class PythonTopics:
    """The topics of `PythonDocsSource`, each a document, divided between training and validation."""

    max_chars: int | None
    hold_out_every: int
    split: str

    def __iter__(self) -> Iterator[Document]:
        topics: Mapping[str, str] = pydoc_data.topics.topics
        # Characters are counted over all topics, before the division, so both splits see the same beginning of the
        # text.
        remaining = self.max_chars
        for number, name in enumerate(sorted(topics)):
            text = topics[name][:remaining]
            remaining = None if remaining is None else remaining - len(text)
            # The last topic of every group of `hold_out_every`, sorted by name: independent of Python's dictionary
            # order.
            held_out = number % self.hold_out_every == self.hold_out_every - 1
            if text and held_out == (self.split == "validation"):
                yield Document(text, f"pydoc_data.topics[{name!r}]")

    def __str__(self) -> str:
        limit = "" if self.max_chars is None else f" of the first {self.max_chars:,} characters"
        which = "every" if self.split == "validation" else "all but every"
        return f"python: pydoc_data.topics, {which} {self.hold_out_every}th topic{limit}"


@dataclass(frozen=True, kw_only=True)
class InlineDocuments:
    """Documents given in the configuration."""

    texts: tuple[str, ...]
    origin: str

    def __iter__(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            origin = f"{self.origin}[{number}]"
            # YAML has escapes for half of a surrogate pair, too.
            yield Document(checked_text(text, origin), origin)

    def __str__(self) -> str:
        return f"{len(self.texts)} texts in the configuration"


Documents = FileDocuments | PythonDocuments | PythonTopics | InlineDocuments


def python_docs_text(max_chars: int | None = None) -> str:
    """The topics of Python's `help`, sorted by name, joined by two newlines, truncated to `max_chars` characters."""
    topics: Mapping[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))[:max_chars]


Formats = tuple[type[LmDatasetFormatBase], ...]


def component_documents(
    where: str, component: DatasetComponentBase, split: str | None, *, formats: Formats
) -> tuple[Documents, ...]:
    """The sources of a component's documents in a split; empty if it has no such split.

    Args:
        where: the component's key, for messages.
        component: what to resolve.
        split: `train` or `validation`; None for the component's own.
        formats: the formats that the caller can read.

    Raises:
        MissingFileError: files do not exist or cannot be reached.
        DataError: anything else is wrong: an unknown ending, a format or source that cannot be read.
    """
    if isinstance(component, ConcatDatasetComponent):
        return tuple(
            part
            for name, child in component.children.items()
            for part in component_documents(f"{where}.children.{name}", child, split, formats=formats)
        )
    if isinstance(component, DirectDatasetComponent):
        texts = component.datasets.get(split or "validation", [])
        origin = f"{where}.datasets.{split or 'validation'}"
        return (InlineDocuments(texts=tuple(texts), origin=origin),) if texts else ()
    assert isinstance(component, DatasetComponent), component
    return _source_documents(where, component, split or component.split, formats)


def _source_documents(where: str, component: DatasetComponent, split: str, formats: Formats) -> tuple[Documents, ...]:
    source = component.source
    if source is None:
        raise DataError(f"{where}: has no source; evaluation reads documents, not token caches")
    if isinstance(source, PythonDocsSource):
        return _python_documents(source, split)
    format = component_format(where, component, formats)
    if isinstance(source, HfDatasetSource):
        key, patterns = _hub_patterns(where, source, split)
    else:
        assert isinstance(source, UrlDatasetSource), source
        if split not in ("train", "validation"):
            raise DataError(f"{where}.split: {split!r}; a url source has only `train` and `validation`")
        key, patterns = f"{where}.source.{split}_urls", source.urls(split)
    if not patterns:
        return ()
    try:
        paths = expand(patterns)
    except MissingFileError as error:
        raise MissingFileError("\n".join(f"{key}: {line}" for line in str(error).splitlines())) from error
    except (ValueError, OSError) as error:
        # A local failure is a mistake in the configuration. A remote one may be temporary, and `plan` may go on without
        # the text.
        if not any(map(is_remote, patterns)):
            raise DataError(f"{key}: {error}") from error
        # Out of reach: no network, no permission, or no package for this kind of URL.
        raise MissingFileError(f"{key}: {error}") from error
    unreadable = []
    for path in paths:
        try:
            # By the name alone. All files are checked, so that one message lists every file of an unknown kind.
            file_kind(path)
        except DataError as error:
            unreadable.append(f"{key}: {error}")
    raise_problems(unreadable)
    return (FileDocuments(paths=tuple(paths), format=format),)


def _python_documents(source: PythonDocsSource, split: str) -> tuple[Documents, ...]:
    if source.hold_out_every is not None:
        return (PythonTopics(max_chars=source.max_chars, hold_out_every=source.hold_out_every, split=split),)
    return (PythonDocuments(max_chars=source.max_chars),) if split == source.split else ()


def _hub_patterns(where: str, source: HfDatasetSource, split: str) -> tuple[str, list[str]]:
    """The configuration key for messages, and the pattern of the Parquet files that the Hub makes of every data set."""
    if source.revision is not None:
        raise DataError(
            f"{where}.source: the Hub has Parquet files for the newest revision of a data set only; for another "
            "revision use "
            f"`type: url` with {split}_urls: [hf://datasets/{source.id}@{source.revision}/PATH/*.parquet]"
        )
    if source.splits is not None and split not in source.splits:
        # Not an error: the user has listed the splits that exist.
        return "", []
    # The Hub converts every data set to Parquet on this branch, one folder per configuration and split, whatever the
    # original format is.
    folder = f"hf://datasets/{source.id}@refs/convert/parquet/{source.name or 'default'}/{split}"
    return f"{where}.source", [f"{folder}/*.parquet"]


def component_format(where: str, component: DatasetComponent, formats: Formats) -> LmDatasetFormatBase:
    """The component's format, or the source's where only that one is set.

    Raises:
        DataError: both are set and differ; it is not among `formats`.
    """
    default = TextLmDatasetFormat()
    source_format: LmDatasetFormatBase = getattr(component.source, "format", default)
    # A format equal to the default counts as unset: after parsing, a default and an explicit `type: text` look the
    # same.
    format = component.format if component.format != default else source_format
    if default not in (component.format, source_format) and component.format != source_format:
        raise DataError(f"{where}: format is {component.format}, but source.format is {source_format}; keep one")
    if not isinstance(format, formats):
        known = ", ".join(f"`{LmDatasetFormatBase.get_choice_name(format_type)}`" for format_type in formats)
        raise DataError(f"{where}.format: {known} are read; `{format_name(format)}` is not")
    return format
