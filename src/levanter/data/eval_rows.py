"""The rows that an evaluation scores, of sets of any format.

Text is laid end to end, so that every token behind a document's first is scored once (`sequences`). What has weights
(conversations, pairs of input and target, prebuilt ids) is laid into rows as training lays it: whole records, packed or
padded as `pack` says, of which the tokens that count in training are scored.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from levanter.data.cache_staleness import refuse_stale
from levanter.data.config import LmDataConfig
from levanter.data.documents import FileDocuments
from levanter.data.errors import DataError, raise_problems
from levanter.data.eval_sequences import EvalSequences, TokenizedText, build_sequences
from levanter.data.eval_sets import EvaluationSet
from levanter.data.formats import LmDatasetFormatBase
from levanter.data.manifest import StoreError, compare, read_manifest
from levanter.data.row_windows import RowSet, concatenate_sequences, row_sequences
from levanter.data.rows import PackedRows
from levanter.data.store import StoredTokens, Tokens, open_store
from levanter.data.tokenizer import Tokenizer
from levanter.data.train_builder import build_tokens, plan_rows, store_identity, token_problems, vocabulary_error
from levanter.data.train_sets import TrainingSet

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
        on_progress: told the characters of text tokenized so far.

    Raises:
        DataError: a set without a token to score; an id outside the vocabulary; and whatever is wrong in a file.
        MissingFileError: a file is gone.
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

    for one in sets:
        if one.is_text:
            text_sets.append(one)
            continue
        sequences = concatenate_sequences(flush_text(), _records(config, one, tokenizer, max_length, vocab_size))
        assert sequences is not None
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

    def stored(one: EvaluationSet) -> TokenizedText | None:
        return _stored_text(config, one, tokenizer, limit)

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
    config: LmDataConfig, one: EvaluationSet, tokenizer: Tokenizer, vocab_size: int
) -> TokenizedText | None:
    """A set's text out of its token store, where there is one."""
    tokens = _open_store(config, one, tokenizer)
    if tokens is None:
        return None
    if tokens.largest_id >= vocab_size:
        raise DataError(vocabulary_error(as_training_set(one), tokens.largest_id, vocab_size))
    ids, _ = tokens.read(np.array([0]), tokens.starts[-1:])
    shards = tokens.manifest.shards or ()
    return TokenizedText(
        ids=ids,
        lengths=np.diff(tokens.starts),
        skipped=sum(shard.skipped for shard in shards),
        chars=sum(shard.chars for shard in shards),
    )


def _open_store(config: LmDataConfig, one: EvaluationSet, tokenizer: Tokenizer) -> StoredTokens | None:
    """The finished token store of a set, if it was made from what is configured; else the files are read."""
    if one.folder is None:
        return None
    try:
        manifest = read_manifest(one.folder)
        if manifest is None or manifest.shards is None:
            return None
        identity = store_identity(config, as_training_set(one), tokenizer)
        compare(one.folder, manifest.identity, identity, sources=True)
        refuse_stale(one.folder, manifest, identity)
    except (OSError, ValueError) as error:
        # Another model's store in the same folder, or storage that is out of reach: neither keeps the text from use.
        reason = "\n".join(str(error).splitlines()[:4]) if isinstance(error, StoreError) else str(error).splitlines()[0]
        logger.info("%s: its token store is not read, the text is tokenized: %s", one.name, reason)
        return None
    logger.info("%s: read from the token store %s", one.name, one.folder)
    return open_store(one.folder, manifest)


def as_training_set(one: EvaluationSet, *, folder: str | None = None) -> TrainingSet:
    """A set as training would see it.

    Args:
        one: the set.
        folder: where its token store is to be built; None for none.
    """
    # Texts may have a key of their own; sets whose files differ in it have no store.
    formats: list[LmDatasetFormatBase] = [
        part.format for part in one.document_sources if isinstance(part, FileDocuments)
    ]
    return TrainingSet(
        name=one.name,
        tags=one.tags,
        format=formats[0] if one.is_text and formats else one.format,
        document_sources=one.document_sources,
        folder=folder,
        pack=one.pack,
        built=None if folder is None else read_manifest(folder),
    )


def _records(
    config: LmDataConfig, one: EvaluationSet, tokenizer: Tokenizer, max_length: int, vocab_size: int | None
) -> EvalSequences:
    """A set of records in the rows that training would lay it into."""
    records = as_training_set(one)
    tokens: Tokens | None = _open_store(config, one, tokenizer)
    if tokens is None:
        (tokens,) = build_tokens(config, [records], tokenizer)
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    raise_problems(list(token_problems([records], [tokens], limit)))
    rows = plan_rows(config, records, tokens, max_length)
    if isinstance(rows, PackedRows) and (rows.kept or rows.dropped):
        if rows.cut or rows.dropped or rows.uncounted:
            logger.warning("%s: %s", one.name, rows.describe())
    elif isinstance(rows, PackedRows) and rows.cut:
        logger.warning(
            "%s: %d records are longer than %d tokens and are split; a later piece is predicted without the earlier "
            "one",
            one.name,
            rows.cut,
            max_length,
        )
    sequences = row_sequences(
        [RowSet(name=one.name, tags=one.tags, rows=rows.take(np.arange(len(rows))))],
        tokenizer.byte_lengths(),
        positions=max_length,
        separate_documents=config.block_cross_document_attention,
    )
    assert sequences is not None and sequences.counts is not None
    if not sequences.counts.any():
        raise DataError(f"data set {one.name!r}: no token is left to score in rows of {max_length} tokens")
    return sequences
