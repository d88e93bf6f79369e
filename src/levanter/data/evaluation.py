"""What an evaluation reads: the `data:` block resolved into sets, before anything expensive happens.

`resolve_evaluation` looks at names only: it expands patterns, checks that every file exists and that a reader knows it,
and collects everything that is wrong. An `EvaluationSet` then reads its documents when asked. Evaluation tokenizes as
it reads; token caches and everything that only orders or weighs training data have no effect on it, and the keys of
the configuration for which that is so are listed in `notes`.
"""

import pydoc_data.topics
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from levanter.data.config import (
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    DirectDatasetComponent,
    LmDataConfig,
)
from levanter.data.errors import DataError, raise_problems
from levanter.data.formats import LmDatasetFormatBase, TextLmDatasetFormat, format_name
from levanter.data.readers import Document, kind_of, read_documents
from levanter.data.sources import DatasetSourceBase, HfDatasetSource, PythonDocsSource, UrlDatasetSource
from levanter.io.paths import MissingFileError, expand


@dataclass(frozen=True, kw_only=True)
class FileDocuments:
    """The documents of files, in the order of the files."""

    paths: tuple[str, ...]
    format: TextLmDatasetFormat

    def __iter__(self) -> Iterator[Document]:
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
class GivenDocuments:
    """Documents given in the configuration."""

    texts: tuple[str, ...]
    origin: str

    def __iter__(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            yield Document(text, f"{self.origin}[{number}]")

    def __str__(self) -> str:
        return f"{len(self.texts)} texts in the configuration"


Documents = FileDocuments | PythonDocuments | GivenDocuments


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """One named set of documents, evaluated on its own.

    Attributes:
        name: the component's name.
        tags: the names under which its numbers are aggregated; its own name is the last of them.
        parts: where its documents are, in order.
    """

    name: str
    tags: tuple[str, ...]
    parts: tuple[Documents, ...]

    def documents(self) -> Iterator[Document]:
        """Reads the documents one by one."""
        for part in self.parts:
            yield from part

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(map(str, self.parts))}"


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The sets of an evaluation in order, and what the user should know about the configuration."""

    sets: tuple[EvaluationSet, ...]
    notes: tuple[str, ...]


def python_docs_text(max_chars: int | None = None) -> str:
    """The topics of Python's `help`, sorted by name, joined by two newlines, cut behind `max_chars` characters."""
    topics: Mapping[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))[:max_chars]


def resolve_evaluation(config: LmDataConfig, *, split: str | None = None) -> EvaluationData:
    """Resolves the `data:` block into the sets to evaluate, without reading a document.

    Args:
        config: the block.
        split: `train` to evaluate on training data, `validation`, or None for each component's own `split`.

    Raises:
        DataError: with everything that is wrong at once: missing files with the nearest names, patterns without a
            match, unknown endings, formats and sources that evaluation does not read, no set at all.
    """
    problems, sets, without = [], [], []
    for name, component in config.components.items():
        where = f"data.components.{name}"
        try:
            parts = _component_parts(where, component, split)
        except (DataError, MissingFileError) as error:
            problems.append(str(error) if str(error).startswith(where) else f"{where}: {error}")
            continue
        if parts:
            sets.append(EvaluationSet(name=name, tags=_tags(name, component), parts=parts))
        else:
            without.append(name)
    if config.num_validation_sequences:
        problems.append(
            "data.num_validation_sequences: splitting validation sequences off the training data is not supported; "
            "give the component validation_urls"
        )
    if not sets and not problems:
        problems.append(_nothing_to_evaluate(without, split))
    raise_problems(problems)
    notes = [f"{name}: no {split or 'validation'} data, not evaluated" for name in without]
    return EvaluationData(sets=tuple(sets), notes=tuple(notes + _unused_keys(config)))


def _nothing_to_evaluate(without: list[str], split: str | None) -> str:
    if not without:
        return "data.components: no data set is configured; expected NAME: {source: {validation_urls: [FILE, …]}}"
    key = "train_urls" if split == "train" else "validation_urls"
    return f"data.components: none of {', '.join(without)} has {split or 'validation'} data ({key} is empty)"


def _component_parts(where: str, component: DatasetComponentBase, split: str | None) -> tuple[Documents, ...]:
    if isinstance(component, ConcatDatasetComponent):
        return tuple(
            part
            for name, child in component.children.items()
            for part in _component_parts(f"{where}.children.{name}", child, split)
        )
    if isinstance(component, DirectDatasetComponent):
        texts = component.datasets.get(split or "validation", [])
        origin = f"{where}.datasets.{split or 'validation'}"
        return (GivenDocuments(texts=tuple(texts), origin=origin),) if texts else ()
    assert isinstance(component, DatasetComponent), component
    return _source_parts(where, component, split or component.split)


def _source_parts(where: str, component: DatasetComponent, split: str) -> tuple[Documents, ...]:
    source = component.source
    if source is None:
        raise DataError(f"{where}: has no source; evaluation reads documents, not token caches")
    if isinstance(source, PythonDocsSource):
        return (PythonDocuments(max_chars=source.max_chars),) if split == source.split else ()
    if isinstance(source, HfDatasetSource):
        repository = source.id if source.revision is None else f"{source.id}@{source.revision}"
        raise DataError(
            f"{where}.source: data sets of the Hub are read as files; use `type: url` with "
            f"validation_urls: [hf://datasets/{repository}/PATH/*.parquet]"
        )
    assert isinstance(source, UrlDatasetSource), source
    if split not in ("train", "validation"):
        raise DataError(f"{where}.split: {split!r}; a url source has `train` and `validation`")
    patterns = source.urls(split)
    if not patterns:
        return ()
    format = _format(where, component, source)
    key = f"{where}.source.{split}_urls"
    try:
        paths = expand(patterns)
    except MissingFileError as error:
        raise MissingFileError("\n".join(f"{key}: {line}" for line in str(error).splitlines())) from error
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    unreadable = []
    for path in paths:
        try:
            kind_of(path)
        except DataError as error:
            unreadable.append(f"{key}: {error}")
    raise_problems(unreadable)
    return (FileDocuments(paths=tuple(paths), format=format),)


def _format(where: str, component: DatasetComponent, source: UrlDatasetSource) -> TextLmDatasetFormat:
    """The component's format, or the source's where only that one is set."""
    default = TextLmDatasetFormat()
    format: LmDatasetFormatBase = component.format if component.format != default else source.format
    if default not in (component.format, source.format) and component.format != source.format:
        raise DataError(f"{where}: format is {component.format}, but source.format is {source.format}; give one")
    if not isinstance(format, TextLmDatasetFormat):
        raise DataError(f"{where}.format: evaluation reads plain `text`; `{format_name(format)}` is not supported")
    return format


def _tags(name: str, component: DatasetComponentBase) -> tuple[str, ...]:
    source: DatasetSourceBase | None = getattr(component, "source", None)
    tags = getattr(component, "tags", None) or getattr(source, "tags", None) or []
    return (*(tag for tag in dict.fromkeys(tags) if tag != name), name)


_CACHE_KEYS = ("cache_options", "auto_build_caches")
_TRAINING_KEYS = (
    "shuffle",
    "permutation_type",
    "train_weights",
    "stop_strategy",
    "target_budget",
    "experiment_budget",
    "mixture_block_size",
    "max_train_batches",
    "shuffle_before_trainval_split",
    "ignore_token_id",
)


def _unused_keys(config: LmDataConfig) -> list[str]:
    """A note for the keys that are set and that evaluation has no use for."""
    notes = []
    cache = [f"data.{key}" for key in ("cache_dir", *_CACHE_KEYS) if _is_set(config, key)]
    cache += [
        f"data.components.{name}.{key}"
        for name, component in config.components.items()
        if isinstance(component, DatasetComponent)
        for key in ("cache_dir", "flat_cache")
        if _is_set(component, key)
    ]
    if cache:
        notes.append(f"{', '.join(cache)}: no effect; evaluation tokenizes as it reads and keeps no cache")
    training = [f"data.{key}" for key in _TRAINING_KEYS if _is_set(config, key)]
    training += [
        f"data.components.{name}.pack"
        for name, component in config.components.items()
        if isinstance(component, DatasetComponent) and component.pack is not None
    ]
    if training:
        notes.append(f"{', '.join(training)}: no effect; only training uses them")
    if config.chat_template is not None:
        notes.append("data.chat_template: no effect; evaluation reads plain text")
    return notes


def _is_set(config: Any, key: str) -> bool:
    """Whether a key differs from its default."""
    found = next(field for field in fields(config) if field.name == key)
    default = found.default_factory() if found.default_factory is not MISSING else found.default
    return getattr(config, key) != default
