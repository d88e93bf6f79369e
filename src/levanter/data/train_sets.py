"""Resolves the `data:` block into training sets with weights, without reading a document.

`resolve_training` looks at names only, as `resolve_evaluation` does: which components have training data, where their
files and token stores are, which weights apply from which step. All problems are reported at once.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from levanter.data.component_formats import FORMATS, format_and_pack, is_set, store_folder, with_template
from levanter.data.config import (
    BlockShuffleConfig,
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    FillInMiddleConfig,
    LmDataConfig,
)
from levanter.data.conversations import format_identity
from levanter.data.documents import Documents, FileDocuments, Formats, component_documents
from levanter.data.errors import AbsentTextError, DataError, ManyDataErrors, raise_problems
from levanter.data.eval_sets import component_tags
from levanter.data.formats import (
    ChatLmDatasetFormat,
    LmDatasetFormatBase,
    PreferenceChatLmDatasetFormat,
    TextLmDatasetFormat,
    format_name,
)
from levanter.data.manifest import Manifest, SourceFile, StoreError, is_empty, read_manifest
from levanter.data.preference import pair_identity
from levanter.data.readers import read_documents, read_records
from levanter.data.tokenizer import Tokenizer
from levanter.io.file_identity import file_version
from levanter.io.paths import MissingFileError, exists, file_size, is_remote, join

UPSTREAM_LEDGER = "shard_ledger.json"


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """The records of one file."""

    path: str
    format: LmDatasetFormatBase

    def records(self) -> Iterator[Any]:
        """The file's records in order: documents for text, JSON objects for other formats."""
        return (
            read_documents(self.path, self.format)
            if isinstance(self.format, TextLmDatasetFormat)
            else read_records(self.path)
        )

    def describe(self) -> SourceFile:
        """The file's path and size, which identify it in a store, and its version, which shows changes."""
        return SourceFile(name=self.path, size=file_size(self.path), version=file_version(self.path))


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Documents in memory, without a file."""

    documents: Documents

    def records(self) -> Iterator[Any]:
        """The documents, in order."""
        return iter(self.documents)

    def describe(self) -> SourceFile:
        """The text's name, bytes and SHA-256, which identify it in a store."""
        digest, size = hashlib.sha256(), 0
        for document in self.documents:
            # With the length in front: moving text from one document to the next changes the digest.
            content = document.text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
            size += len(content)
        return SourceFile(name=str(self.documents), size=size, digest=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """One component as training sees it.

    Attributes:
        name: the component's name.
        tags: names under which its numbers are aggregated.
        format: the format of a record.
        document_sources: the sources of its documents; None if only its token store is available.
        folder: its token store; None if it is tokenized at the start of the run.
        pack: the component's key.
        built: the manifest of its token store, if there is one already.
        fim: how documents are changed for filling in the middle; None for not at all.
        note: a remark for its description.
    """

    name: str
    tags: tuple[str, ...]
    format: LmDatasetFormatBase
    document_sources: tuple[Documents, ...] | None
    folder: str | None
    pack: bool | int | str | None
    built: Manifest | None
    fim: FillInMiddleConfig | None = None
    note: str = ""

    def sources(self) -> list[FileSource | TextSource]:
        """Its records, file by file."""
        records: list[FileSource | TextSource] = []
        for part in self.document_sources or ():
            if isinstance(part, FileDocuments):
                records += [FileSource(path=path, format=self.format) for path in part.paths]
            else:
                records.append(TextSource(documents=part))
        return records

    def format_json(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The format as recorded in a manifest.

        Args:
            tokenizer: its template is used for conversations without another one.

        Raises:
            DataError: conversations without a template.
        """
        if isinstance(self.format, ChatLmDatasetFormat):
            # What counts of a conversation is a rule of its own: a store of another one has other weights.
            return {"type": format_name(self.format), **format_identity(self.format, tokenizer)}
        if isinstance(self.format, PreferenceChatLmDatasetFormat):
            return {"type": format_name(self.format), **pair_identity(self.format, tokenizer)}
        return {"type": format_name(self.format), **asdict(self.format)}

    def __str__(self) -> str:
        where = "token store only" if self.document_sources is None else "; ".join(map(str, self.document_sources))
        if self.built is not None and self.built.shards is not None:
            store = f"token store {self.folder} of {self.built.tokens:,} tokens"
        elif self.built is not None:
            store = f"token store {self.folder} is incomplete"
        else:
            store = (
                "tokenized at the start of the run" if self.folder is None else f"token store {self.folder} to be built"
            )
        return f"{self.name}: {where}; {store}{self.note and '; ' + self.note}"


@dataclass(frozen=True, kw_only=True)
class TrainingSets:
    """The sets of a training run and their weights.

    Attributes:
        sets: the sets with a positive weight at some step.
        stages: (first step, weights), ascending from step 0.
        notes: notes for the user about the configuration.
    """

    sets: tuple[TrainingSet, ...]
    stages: tuple[tuple[int, Mapping[str, float]], ...]
    notes: tuple[str, ...]

    def describe(self) -> list[str]:
        """A line for each set, and for each stage of the weights."""
        lines = [str(training_set) for training_set in self.sets]
        if len(self.sets) > 1 or len(self.stages) > 1:
            for step, weights in self.stages:
                total = sum(weights.values())
                shown = ", ".join(f"{name} {weight / total:.2%}" for name, weight in weights.items() if weight)
                lines.append(f"mixture from step {step}: {shown}")
        return lines


def resolve_training(config: LmDataConfig, *, formats: Formats = FORMATS) -> TrainingSets:
    """Resolves the `data:` block into what training reads, without reading a document.

    Args:
        config: the block.
        formats: the formats of records that can be trained on.

    Raises:
        DataError: with all problems at once: missing files, sets that have a weight and no training data, formats and
            keys that training does not know, weights whose stages do not ascend.
        AbsentTextError: one of them, if absent data is the only problem (no data at all included): a run needs the
            data, planning does not.
    """
    problems, absent = list(_config_problems(config)), []
    stages, weighted = _stages(config, problems)
    sets, without = [], []
    for name, component in config.components.items():
        # A set without a weight at any step is not resolved: its files need not exist.
        if weighted is not None and name not in weighted:
            continue
        where = f"data.components.{name}"
        try:
            training_set = _training_set(config, where, name, component, formats)
        except MissingFileError as error:
            absent.append(_at(where, error))
        except ManyDataErrors as error:
            problems += [_at(where, problem) for problem in error.problems]
        except DataError as error:
            problems.append(_at(where, error))
        else:
            if training_set is None:
                without.append(name)
            else:
                sets.append(training_set)
    if weighted is not None:
        problems += [
            f"data.components.{name}: has a weight in data.train_weights but no training data (train_urls is empty)"
            for name in without
        ]
    if not sets and not problems and not absent:
        which = f"none of {', '.join(without)} has training data (train_urls is empty)" if without else "no data set"
        hint = "expected data.components: {NAME: {source: {train_urls: [FILE, …]}}}"
        absent.append(f"data.components: {which if without else 'no data set is configured'}; {hint}")
    if absent and not problems:
        raise AbsentTextError(absent)
    raise_problems([*problems, *absent])
    names = [one.name for one in sets]
    # Without weights all sets are drawn equally often.
    if stages is None:
        stages = [(0, dict.fromkeys(names, 1.0))]
    notes = [f"data.components.{name}: no training data, so it is not trained on" for name in without]
    unweighted = [name for name in config.components if weighted is not None and name not in weighted]
    notes += [
        f"data.components.{name}: no weight in data.train_weights, so it is not trained on" for name in unweighted
    ]
    return TrainingSets(sets=tuple(sets), stages=tuple(stages), notes=tuple(notes + _unused_keys(config)))


def _at(where: str, error: Exception | str) -> str:
    # Errors of the component's own keys begin with its key already.
    return str(error) if str(error).startswith(where) else f"{where}: {error}"


def _stages(
    config: LmDataConfig, problems: list[str]
) -> tuple[list[tuple[int, Mapping[str, float]]] | None, set[str] | None]:
    """The weights by first step, and the sets that have one above 0; None if the configuration has no weights."""
    configured = config.train_weights
    if configured is None:
        return None, None
    stages = (
        [(0, configured)] if isinstance(configured, dict) else [(int(step), weights) for step, weights in configured]
    )
    starts = [step for step, _ in stages]
    if not stages or starts[0] != 0:
        problems.append(f"data.train_weights: the first stage must begin at step 0, got {starts[:1] or 'none'}")
    problems += [
        f"data.train_weights: the stage at step {after} comes after one at step {before}; steps must ascend"
        for before, after in pairwise(starts)
        if after <= before
    ]
    problems += [
        f"data.train_weights: no weight is positive from step {step} on: {dict(weights)}"
        for step, weights in stages
        if sum(weights.values()) <= 0
    ]
    # A set with weight 0 in every stage is not read at all.
    names = {name for _, weights in stages for name, weight in weights.items() if weight > 0}
    return [(step, weights) for step, weights in stages], names


def _training_set(
    config: LmDataConfig, where: str, name: str, component: DatasetComponentBase, formats: Formats
) -> TrainingSet | None:
    folder = store_folder(config, name, component, "train")
    component = with_template(component, config.chat_template)
    format, pack = format_and_pack(where, component, formats)
    built = None if folder is None else _manifest(where, folder)
    finished = built is not None and built.shards is not None
    note = other_cache = "" if built is not None else _other_cache(folder)
    documents: tuple[Documents, ...] | None
    # A component without a source names a store that was built elsewhere, so it must be finished.
    if isinstance(component, DatasetComponent) and component.source is None:
        if folder is None:
            raise DataError(f"{where}: has neither a source nor a cache_dir")
        if not finished:
            raise MissingFileError(
                f"{where}: has no source, and there is no finished token store in {folder}"
                f"{other_cache and '; ' + other_cache}"
            )
        # Nothing to compare the store with, and nothing to build it from.
        documents = None
    else:
        try:
            documents = component_documents(where, component, "train", formats=formats)
        except MissingFileError as error:
            if not finished:
                raise
            # A finished store suffices for training, for instance on a machine without the original text.
            documents, note = (
                None,
                f"its files are not available here and were not compared ({str(error).splitlines()[0]})",
            )
        if documents == ():
            return None
    if not finished and folder is not None and not config.auto_build_caches:
        raise MissingFileError(
            f"{where}: no finished token store in {folder}, and data.auto_build_caches is false; build it with "
            "python -m levanter.main.cache_dataset"
        )
    return TrainingSet(
        name=name,
        tags=component_tags(name, component),
        format=format,
        document_sources=documents,
        folder=folder,
        pack=pack,
        built=built,
        fim=_fill_in_middle(where, component, format),
        note=note,
    )


def _fill_in_middle(
    where: str, component: DatasetComponentBase, format: LmDatasetFormatBase
) -> FillInMiddleConfig | None:
    """The component's `fim`.

    Raises:
        DataError: its records are not plain text, or its children have keys of their own.
    """
    if isinstance(component, ConcatDatasetComponent):
        named = [name for name, child in component.children.items() if child.fim is not None]
        if named:
            raise DataError(f"{where}.children.{named[0]}.fim: children share their rows; make it a component")
        return None
    fim = getattr(component, "fim", None)
    if fim is not None and not isinstance(format, TextLmDatasetFormat):
        raise DataError(f"{where}.fim: documents of plain text have a middle; the format is `{format_name(format)}`")
    return fim


def _other_cache(folder: str | None) -> str:
    """The note about a token cache of upstream's Levanter in the folder of our store."""
    if folder is None or not exists(join(folder, UPSTREAM_LEDGER)):
        return ""
    return "upstream's token cache in this folder is not read; the text is tokenized again in the same folder"


def _manifest(where: str, folder: str) -> Manifest | None:
    """The manifest of a store that has at least one finished shard, else None."""
    try:
        manifest = read_manifest(folder)
        return None if manifest is None or is_empty(folder, manifest) else manifest
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        # A local folder that cannot be read is an error; remote storage may only be out of reach, which planning
        # tolerates.
        if not is_remote(folder):
            raise
        raise MissingFileError(f"{where}: {folder}: {error}") from error


def _config_problems(config: LmDataConfig) -> Iterator[str]:
    """Problems of the keys themselves."""
    if config.mixture_block_size < 1:
        yield f"data.mixture_block_size must be at least 1, got {config.mixture_block_size}"
    shuffle = config.shuffle
    if isinstance(shuffle, BlockShuffleConfig):
        for key in ("io_block_size", "window_blocks"):
            if getattr(shuffle, key) < 1:
                yield f"data.shuffle.{key} must be at least 1, got {getattr(shuffle, key)}"
    # `bool` is a subclass of `int`; a number is the length of an era.
    elif not isinstance(shuffle, bool) and shuffle < 0:
        yield f"data.shuffle: the length of an era must be at least 1 (or 0, false: no shuffle), got {shuffle}"
    for key in ("num_validation_sequences", "max_train_batches"):
        for name, count in (getattr(config, key) or {}).items():
            if name not in config.components:
                known = ", ".join(sorted(config.components)) or "none"
                yield f"data.{key}: {name!r} is not a component (components: {known})"
            elif count < 0:
                yield f"data.{key}.{name}: must not be negative, got {count}"
    target, experiment = config.target_budget, config.experiment_budget
    if (target is None) != (experiment is None):
        yield "data.target_budget and data.experiment_budget: give both or neither"
    elif target is not None and experiment is not None and not 0 < experiment <= target:
        yield f"data.experiment_budget {experiment} must be between 1 and data.target_budget {target}"


_UNUSED = ("cache_options.batch_size", "cache_options.target_size_per_flush")


def _unused_keys(config: LmDataConfig) -> list[str]:
    """Notes about keys that are set and that training does not use."""
    unused = [f"data.{key}" for key in _UNUSED if is_set(config.cache_options, key.split(".")[1])]
    notes = [f"{', '.join(unused)}: no effect; the token store chooses the sizes of its batches and files"]
    return notes if unused else []
