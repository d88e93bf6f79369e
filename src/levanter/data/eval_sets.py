"""Resolves the `data:` block into evaluation sets, before anything expensive happens.

`resolve_evaluation` looks at names only: it expands patterns, checks that every file exists and that a reader knows it,
and collects everything that is wrong. An `EvaluationSet` of text then reads its documents when asked; records of other
formats are read and laid into rows as in training (`evaluation_rows`). Evaluation tokenizes the text itself, or reads a
token store that `cache_dataset` has built. Keys that only order or weigh training data have no effect, and `notes`
lists those that are set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from levanter.data.component_formats import FORMATS, format_and_pack, is_set, store_folder, with_template
from levanter.data.config import (
    ConcatDatasetComponent,
    DatasetComponent,
    DatasetComponentBase,
    LmDataConfig,
)
from levanter.data.documents import Documents, FileDocuments, Formats, component_documents
from levanter.data.errors import AbsentTextError, DataError, ManyDataErrors, raise_problems
from levanter.data.formats import (
    ChatLmDatasetFormat,
    LmDatasetFormatBase,
    PrebuiltLmDatasetFormat,
    TextLmDatasetFormat,
)
from levanter.data.readers import Document
from levanter.data.sources import DatasetSourceBase
from levanter.io.paths import MissingFileError


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """One named set of documents or records, evaluated on its own.

    Attributes:
        name: the component's name.
        tags: the names under which its numbers are aggregated; its own name is the last of them.
        document_sources: the sources of its documents, in order.
        format: the format of a record, including the chat template if there is one.
        pack: how records other than text are packed into rows.
        folder: the folder of its token store if `cache_dataset` has built one; None if it cannot have one.
    """

    name: str
    tags: tuple[str, ...]
    document_sources: tuple[Documents, ...]
    format: LmDatasetFormatBase = field(default_factory=TextLmDatasetFormat)
    pack: bool | int | str | None = None
    folder: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is plain text, every token of which is scored."""
        return isinstance(self.format, TextLmDatasetFormat)

    def documents(self) -> Iterator[Document]:
        """Reads the documents of a text one by one."""
        for part in self.document_sources:
            yield from part

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(map(str, self.document_sources))}"


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """The sets of an evaluation in order, and notes for the user about the configuration."""

    sets: tuple[EvaluationSet, ...]
    notes: tuple[str, ...]


def resolve_evaluation(
    config: LmDataConfig, *, split: str | None = None, in_training: bool = False, formats: Formats = FORMATS
) -> EvaluationData:
    """Resolves the `data:` block into the sets to evaluate, without reading a document.

    Args:
        config: the block.
        split: `train` to evaluate on training data, `validation`, or None for each component's own `split`.
        in_training: whether this is the evaluation of a training run, which has the sequences that are held out
            (`data.num_validation_sequences`), uses the keys of training, and may do without any validation set.
        formats: the formats of records that can be scored.

    Raises:
        DataError: with everything that is wrong at once: missing files with the nearest names, patterns without a
            match, unknown endings, formats and sources that are not read, no set at all.
        AbsentTextError: one of them, where files that are absent or out of reach are all that is wrong.
    """
    problems, absent, sets, without = [], [], [], []
    for name, component in config.components.items():
        where = f"data.components.{name}"
        if in_training and isinstance(component, DatasetComponent) and component.source is None:
            without.append(name)  # a token store that was built elsewhere: to train on, not to evaluate
            continue
        try:
            component = with_template(component, config.chat_template)
            documents = component_documents(where, component, split, formats=formats)
            format, pack = _format_and_pack(where, component, formats) if documents else (TextLmDatasetFormat(), None)
        except (DataError, MissingFileError) as error:
            # Absent files are collected apart: planning works without them, while a run needs them.
            problem_list = absent if isinstance(error, MissingFileError) else problems
            error_problems = error.problems if isinstance(error, ManyDataErrors) else [str(error)]
            problem_list += [text if text.startswith(where) else f"{where}: {text}" for text in error_problems]
            continue
        if documents:
            sets.append(
                EvaluationSet(
                    name=name,
                    tags=component_tags(name, component),
                    document_sources=documents,
                    format=format,
                    pack=pack,
                    folder=_store(config, name, component, split, documents),
                )
            )
        else:
            without.append(name)
    if config.num_validation_sequences and not in_training:
        problems.append(
            "data.num_validation_sequences: these sequences are held out when training data is prepared, which an "
            "evaluation does not do; give the component validation_urls"
        )
    # No set is an error only if nothing else explains it; a training run may go without evaluation.
    if not sets and not problems and not absent and not in_training:
        problems.append(_nothing_to_evaluate(without, split))
    # Absent files alone are reported as such, so that planning can go on without them.
    if absent and not problems:
        raise AbsentTextError(absent)
    raise_problems([*absent, *problems])
    notes = [f"{name}: no {split or 'validation'} data, so it is not evaluated" for name in without]
    weighted = [
        f"data.components.{dataset.name}: tokens with a weight above 0 are scored, each counting as one"
        for dataset in sets
        if isinstance(dataset.format, PrebuiltLmDatasetFormat) and dataset.format.loss_weights_key is not None
    ]
    unused = [] if in_training else _unused_keys(config, sets)
    return EvaluationData(sets=tuple(sets), notes=tuple(notes + weighted + unused))


def _format_and_pack(
    where: str, component: DatasetComponentBase, formats: Formats
) -> tuple[LmDatasetFormatBase, bool | int | str | None]:
    """A component's format and packing; texts may have several formats, because all text is concatenated."""
    if isinstance(component, ConcatDatasetComponent):
        children = [
            _format_and_pack(f"{where}.children.{name}", child, formats) for name, child in component.children.items()
        ]
        if all(isinstance(format, TextLmDatasetFormat) for format, _ in children):
            return TextLmDatasetFormat(), None
    return format_and_pack(where, component, formats)


def _nothing_to_evaluate(without: list[str], split: str | None) -> str:
    if not without:
        return "data.components: no data set is configured; expected NAME: {source: {validation_urls: [FILE, …]}}"
    key = "train_urls" if split == "train" else "validation_urls"
    return f"data.components: none of {', '.join(without)} has {split or 'validation'} data ({key} is empty)"


def component_tags(name: str, component: DatasetComponentBase) -> tuple[str, ...]:
    """The names under which a component's numbers are aggregated; its own name is the last of them."""
    source: DatasetSourceBase | None = getattr(component, "source", None)
    tags = getattr(component, "tags", None) or getattr(source, "tags", None) or []
    # `dict.fromkeys` removes repeated tags and keeps their order.
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


def _store(
    config: LmDataConfig, name: str, component: DatasetComponentBase, split: str | None, documents: Sequence[Documents]
) -> str | None:
    """The folder of a set's token store, which holds one split of files of one format; None if there can be none."""
    # Children may read different text keys; a store records one format, so it could not describe them.
    formats = {part.format for part in documents if isinstance(part, FileDocuments)}
    if getattr(component, "flat_cache", False) or len(formats) > 1:
        return None
    return store_folder(config, name, component, split or getattr(component, "split", "validation"))


def _unused_keys(config: LmDataConfig, sets: Sequence[EvaluationSet]) -> list[str]:
    """Notes about keys that are set and that evaluation does not use."""
    notes = []
    cache = [f"data.{key}" for key in _CACHE_KEYS if is_set(config, key)]
    cache += [
        f"data.components.{name}.flat_cache"
        for name, component in config.components.items()
        if isinstance(component, DatasetComponent) and component.flat_cache
    ]
    if cache:
        notes.append(f"{', '.join(cache)}: no effect; an evaluation builds no token store, cache_dataset does")
    records = {dataset.name for dataset in sets if not dataset.is_text}
    training = [f"data.{key}" for key in _TRAINING_KEYS if is_set(config, key)]
    # `pack` affects sets of records, which evaluation lays into rows as training does; text it ignores.
    training += [
        f"data.components.{name}.pack"
        for name, component in config.components.items()
        if isinstance(component, DatasetComponent) and component.pack is not None and name not in records
    ]
    if training:
        notes.append(f"{', '.join(training)}: no effect; only training uses them")
    if config.chat_template is not None and not any(
        isinstance(dataset.format, ChatLmDatasetFormat) for dataset in sets
    ):
        notes.append("data.chat_template: no effect; no evaluated set holds conversations")
    return notes
