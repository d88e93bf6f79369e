"""Builds the rows that an evaluation scores, for sets of any format.

Text is concatenated, so that every token after a document's first is scored once (`eval_sequences`). Formats with loss
weights (conversations, pairs of input and target, prebuilt ids) get the same rows as in training: whole records, packed
or padded as `pack` says, of which the tokens that count in training are scored.

An evaluation set given as rows keeps these rows: a document is complete within a row (or cut where training cuts it),
and a token is scored where its loss weight is above 0. Every scored token counts as one.

Held-out rows (`data.num_validation_sequences`) are rows as training would have seen them, scored in the same context.
Each set's held-out rows are a set of their own, `<set>/held_out`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from levanter.data.cache_staleness import refuse_stale
from levanter.data.config import LmDataConfig
from levanter.data.documents import FileDocuments
from levanter.data.errors import DataError, raise_problems
from levanter.data.eval_sequences import EvalSequences, SetSpan, TokenizedText, build_sequences, stored_byte_counts
from levanter.data.eval_sets import EvaluationSet
from levanter.data.formats import LmDatasetFormatBase
from levanter.data.manifest import StoreError, compare, read_manifest
from levanter.data.rows import PackedRows, TrainRows
from levanter.data.store import StoredTokens, Tokens, open_store
from levanter.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from levanter.data.train_dataset import TrainingData
    from levanter.data.train_sets import TrainingSet

SUFFIX = "/held_out"


def held_out_sequences(
    data: "TrainingData", tokenizer: Tokenizer, *, separate_documents: bool = True
) -> EvalSequences | None:
    """The held-out rows of all sets as sequences to evaluate; None if nothing is held out.

    Args:
        data: the training data.
        tokenizer: the one of the data.
        separate_documents: as in `build_sequences`.
    """
    sets = [
        RowSet(
            name=set_rows.name + SUFFIX,
            tags=(set_rows.name, set_rows.name + SUFFIX),
            rows=set_rows.held_out_rows(0, set_rows.held_out),
        )
        for set_rows in data.sets
        if set_rows.held_out
    ]
    return row_sequences(sets, tokenizer, positions=data.positions, separate_documents=separate_documents)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """A set given as rows.

    Attributes:
        name, tags: as in the `EvaluationSet`.
        rows: all of them.
        chars: the number of characters of their text; 0 if unknown.
    """

    name: str
    tags: tuple[str, ...]
    rows: TrainRows
    chars: int = 0


def row_sequences(
    sets: Sequence[RowSet], tokenizer: Tokenizer, *, positions: int, separate_documents: bool = True
) -> EvalSequences | None:
    """The rows of sets as sequences to evaluate; None if there is no set.

    For evaluation each piece of a document within a row is a document, whose first token is context.

    Args:
        sets: the rows, each of `positions` tokens.
        tokenizer: the one of the rows.
        positions: tokens in a row.
        separate_documents: as in `build_sequences`.
    """
    spans: list[SetSpan] = []
    lengths: list[np.ndarray] = []
    start = first_row = 0
    for row_set in sets:
        real, counted = row_set.rows.segment_ids >= 0, _counted(row_set.rows)
        # A document begins where the row or the segment changes; padding is one more, of which nothing is scored.
        # −2 is no segment, so every row begins a document, even if the row before ends with the same segment number.
        segment = np.concatenate([np.full((len(real), 1), -2), row_set.rows.segment_ids], axis=1)
        begins = np.diff(segment, axis=1) != 0
        spans.append(
            SetSpan(
                name=row_set.name,
                tags=row_set.tags,
                documents=int((begins & real).sum()),
                start=start,
                stop=start + real.size,
                first_row=first_row,
                rows=len(real),
                skipped=0,
                chars=row_set.chars,
                stride=positions,
                # The text of rows is not at hand.
                text_loss=tokenizer.lost_text(row_set.rows.tokens[counted]),
            )
        )
        # Lengths of documents over all tokens of the set, padding runs included, so that they add up to the stream.
        lengths.append(np.diff(np.append(np.flatnonzero(begins), real.size)))
        start, first_row = start + real.size, first_row + len(real)
    if not spans:
        return None
    stream = np.concatenate([row_set.rows.tokens.reshape(-1) for row_set in sets])
    starts = np.cumsum(np.concatenate([[0], *lengths]))[:-1].astype(np.int64)
    return EvalSequences(
        max_length=positions,
        sets=tuple(spans),
        stream=stream,
        document_starts=starts,
        byte_counts=stored_byte_counts(tokenizer, stream, starts),
        separate_documents=separate_documents,
        counts=np.concatenate([_counted(row_set.rows).reshape(-1) for row_set in sets]),
        real=np.concatenate([(row_set.rows.segment_ids >= 0).reshape(-1) for row_set in sets]),
    )


def _counted(rows: TrainRows) -> np.ndarray:
    """Whether each token counts where it is predicted; a weight is that of predicting *from* a place."""
    counted = np.zeros(rows.tokens.shape, bool)
    # `loss_weights[t]` belongs to the prediction of token t + 1, so the mask moves by one.
    counted[:, 1:] = rows.loss_weights[:, :-1] > 0
    return counted & (rows.segment_ids >= 0)


def concatenate_sequences(first: EvalSequences | None, second: EvalSequences | None) -> EvalSequences | None:
    """The sets of two evaluations as one; they must have rows of one length."""
    if first is None or second is None:
        return first or second
    assert first.max_length == second.max_length and first.separate_documents == second.separate_documents
    tokens, rows = len(first.stream), first.row_count
    # The second stream is appended to the first, so its positions and row numbers grow by the first one's sizes.
    moved = tuple(
        replace(span, start=span.start + tokens, stop=span.stop + tokens, first_row=span.first_row + rows)
        for span in second.sets
    )
    return replace(
        first,
        sets=(*first.sets, *moved),
        stream=np.concatenate([first.stream, second.stream]),
        document_starts=np.concatenate([first.document_starts, second.document_starts + tokens]),
        byte_counts=np.concatenate([first.byte_counts, second.byte_counts]),
        counts=_concatenate_marks(first, second, "counts"),
        real=_concatenate_marks(first, second, "real"),
    )


def _concatenate_marks(first: EvalSequences, second: EvalSequences, name: str) -> np.ndarray | None:
    """A mark of each token of both, where one of them has it."""
    marks = [getattr(sequences, name) for sequences in (first, second)]
    if all(mark is None for mark in marks):
        return None
    streams = (first.stream, second.stream)
    # A missing mark means that every token counts (or is real).
    return np.concatenate([np.ones(len(s), bool) if m is None else m for m, s in zip(marks, streams, strict=True)])


logger = logging.getLogger(__name__)


def evaluation_rows(
    config: LmDataConfig,
    sets: Sequence[EvaluationSet],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    vocab_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> EvalSequences:
    """Reads and tokenizes sets into rows of `max_length` tokens, in the order of the sets.

    Args:
        config: the `data:` block that the sets are of.
        sets: what to read.
        tokenizer: text to ids.
        max_length: tokens in a row, at least 2.
        vocab_size: the model's vocabulary; ids beyond it are an error.
        on_progress: called with the number of characters tokenized so far.

    Raises:
        DataError: a set without a token to score; an id outside the vocabulary; and whatever is wrong in a file.
        MissingFileError: a file no longer exists.
    """
    if not sets or max_length < 2:
        return _text(config, sets, tokenizer, max_length, vocab_size, on_progress)
    sequences: EvalSequences | None = None
    text_sets: list[EvaluationSet] = []
    done = 0

    def report(chars: int) -> None:
        if on_progress is not None:
            on_progress(done + chars)

    def flush_text() -> EvalSequences | None:
        if not text_sets:
            return sequences
        rows = _text(config, text_sets, tokenizer, max_length, vocab_size, report)
        text_sets.clear()
        return concatenate_sequences(sequences, rows)

    for dataset in sets:
        # Neighbouring texts are tokenized together; a set of records in between keeps the order of the sets.
        if dataset.is_text:
            text_sets.append(dataset)
            continue
        sequences = concatenate_sequences(flush_text(), _records(config, dataset, tokenizer, max_length, vocab_size))
        assert sequences is not None
        # Characters of the sets before; the tokenizer reports only its own.
        done = sum(span.chars for span in sequences.sets)
        report(0)
    sequences = flush_text()
    assert sequences is not None
    return sequences


def _text(
    config: LmDataConfig,
    sets: Sequence[EvaluationSet],
    tokenizer: Tokenizer,
    max_length: int,
    vocab_size: int | None,
    on_progress: Callable[[int], None] | None,
) -> EvalSequences:
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size

    def stored(dataset: EvaluationSet) -> TokenizedText | None:
        return _stored_text(config, dataset, tokenizer, limit)

    return build_sequences(
        sets,
        tokenizer,
        max_length=max_length,
        enforce_bos=config.enforce_bos,
        enforce_eos=config.enforce_eos,
        separate_documents=config.block_cross_document_attention,
        vocab_size=vocab_size,
        on_progress=on_progress,
        stored=stored,
    )


def _stored_text(
    config: LmDataConfig, dataset: EvaluationSet, tokenizer: Tokenizer, vocab_size: int
) -> TokenizedText | None:
    """A set's text from its token store, if it has one."""
    tokens = _open_store(config, dataset, tokenizer)
    if tokens is None:
        return None
    if tokens.largest_id >= vocab_size:
        from levanter.data.train_builder import vocabulary_error

        raise DataError(vocabulary_error(as_training_set(dataset), tokens.largest_id, vocab_size))
    # The whole set at once: evaluation needs all of it in memory anyway.
    ids, _ = tokens.read(np.array([0]), tokens.starts[-1:])
    shards = tokens.manifest.shards or ()
    starts = tokens.starts[:-1]
    return TokenizedText(
        ids=ids,
        lengths=np.diff(tokens.starts),
        # A store has ids only. An empty document begins where the next one does.
        byte_counts=stored_byte_counts(tokenizer, ids, starts[np.diff(tokens.starts) > 0]),
        text_loss=tokenizer.lost_text(ids),
        skipped=sum(shard.skipped for shard in shards),
        chars=sum(shard.chars for shard in shards),
    )


def _open_store(config: LmDataConfig, dataset: EvaluationSet, tokenizer: Tokenizer) -> StoredTokens | None:
    """The finished token store of a set, if its identity is the configured one; None if the files must be read."""
    if dataset.folder is None:
        return None
    try:
        manifest = read_manifest(dataset.folder)
        if manifest is None or manifest.shards is None:
            return None
        # It brings chat templates, preferences and mixtures, which the evaluation of text without a store lacks.
        from levanter.data.train_builder import store_identity

        identity = store_identity(config, as_training_set(dataset), tokenizer)
        compare(dataset.folder, manifest.identity, identity, sources=True)
        refuse_stale(dataset.folder, manifest, identity)
    except (OSError, ValueError) as error:
        # Another model's store in the same folder, or storage that is out of reach: neither keeps the text from use.
        reason = "\n".join(str(error).splitlines()[:4]) if isinstance(error, StoreError) else str(error).splitlines()[0]
        if isinstance(error, OSError) and error.strerror:
            reason = f"{dataset.folder}: {error.strerror}"
        logger.info("%s: its token store is not used, the text is tokenized instead: %s", dataset.name, reason)
        return None
    logger.info("%s: read from the token store %s", dataset.name, dataset.folder)
    return open_store(dataset.folder, manifest)


def as_training_set(dataset: EvaluationSet, *, folder: str | None = None) -> "TrainingSet":
    """A set as training would see it.

    Args:
        dataset: the set.
        folder: where its token store is to be built; None for none.
    """
    from levanter.data.train_sets import TrainingSet

    # Texts may have a key of their own; sets whose files differ in it have no store.
    formats: list[LmDatasetFormatBase] = [
        part.format for part in dataset.document_sources if isinstance(part, FileDocuments)
    ]
    return TrainingSet(
        name=dataset.name,
        tags=dataset.tags,
        format=formats[0] if dataset.is_text and formats else dataset.format,
        document_sources=dataset.document_sources,
        folder=folder,
        pack=dataset.pack,
        built=None if folder is None else read_manifest(folder),
    )


def _records(
    config: LmDataConfig, dataset: EvaluationSet, tokenizer: Tokenizer, max_length: int, vocab_size: int | None
) -> EvalSequences:
    """A set of records in the rows that training would lay it into."""
    from levanter.data.train_builder import build_tokens, plan_rows, token_problems

    records = as_training_set(dataset)
    tokens: Tokens | None = _open_store(config, dataset, tokenizer)
    if tokens is None:
        # Records without a store are tokenized in memory: an evaluation builds no store.
        (tokens,) = build_tokens(config, [records], tokenizer)
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    raise_problems(list(token_problems([records], [tokens], limit)))
    rows = plan_rows(config, records, tokens, max_length)
    # Only warn about rows that differ from what the user would expect: truncated or omitted records.
    if isinstance(rows, PackedRows) and (rows.kept or rows.dropped):
        if rows.cut or rows.dropped or rows.uncounted:
            logger.warning("%s: %s", dataset.name, rows.describe())
    elif isinstance(rows, PackedRows) and rows.cut:
        logger.warning(
            "%s: %d records are longer than %d tokens and are split; a later piece is predicted without the earlier "
            "one",
            dataset.name,
            rows.cut,
            max_length,
        )
    sequences = row_sequences(
        [RowSet(name=dataset.name, tags=dataset.tags, rows=rows.take(np.arange(len(rows))))],
        tokenizer,
        positions=max_length,
        separate_documents=config.block_cross_document_attention,
    )
    assert sequences is not None and sequences.counts is not None
    if not sequences.counts.any():
        raise DataError(f"data set {dataset.name!r}: no token is left to score in rows of {max_length} tokens")
    return sequences
