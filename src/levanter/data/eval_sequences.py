"""Sequences for evaluation: every token after a document's first is scored exactly once.

The documents of a set are tokenized (with BOS and EOS as configured) and concatenated into one *stream*. Rows of
`max_length` tokens are cut from it so that neighbours share one token:

    stream   d₀ d₀ d₀ d₀ d₀ d₁ d₁ …
    row 0    d₀ d₀ d₀ d₀                  scores stream tokens 1, 2, 3
    row 1             d₀ d₀ d₁ d₁         scores 4 (given 3 only), and 6; not 5, which begins a document

The log-probability at position t of a row belongs to the row's token t+1, so a row of L tokens scores up to L−1, and
the shared token is context in the later row and scored in the earlier one. *Segment ids* number the documents of a row:
no token sees another document. A document that is split at a row border continues without the context of the earlier
row, so longer rows give better numbers. Sets do not share rows; a set's last row is padded, and masked.

Each token of the stream has a number of bytes, those of its document's text that it stands for (`byte_counts`). A set
in which ids do not keep the text has none, and says why (`text_loss`).

Rows are arithmetic on the stream: any row, and any batch, is computed on demand, and is the same on every process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from levanter.data.errors import DataError
from levanter.data.eval_sets import EvaluationSet
from levanter.data.readers import Document
from levanter.data.rows import next_tokens
from levanter.data.tokenizer import Tokenizer

PADDING_SEGMENT = -1
CHUNK_CHARS = 1_000_000
"""Characters handed to the tokenizer at once, which bounds the memory and makes progress regular."""


@dataclass(frozen=True, kw_only=True)
class SetSpan:
    """The part of the stream and of the rows that belongs to a set.

    Attributes:
        name, tags: as in the `EvaluationSet`.
        documents: documents with at least one token.
        start, stop: its part of the stream.
        first_row, rows: its rows.
        skipped: empty documents, which are left out.
        chars: characters read.
        stride: tokens from one row's beginning to the next one's; None for `max_length − 1`, so that neighbours share
            one token. Sets given as rows have a stride of `max_length`: their rows share none.
        text_loss: why the bytes of its tokens are not those of its text; None where they are.
    """

    name: str
    tags: tuple[str, ...]
    documents: int
    start: int
    stop: int
    first_row: int
    rows: int
    skipped: int
    chars: int
    stride: int | None = None
    text_loss: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the set, those that begin a document included."""
        return self.stop - self.start

    @property
    def scored_tokens(self) -> int:
        """Tokens that are predicted: all but the first of each document."""
        return self.tokens - self.documents


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalRows:
    """Some rows as arrays; `position` is the row's length, `max_length`.

    Attributes:
        rows: int64 `[batch]`, the index of each row among all; −1 for a padding row.
        tokens: int32 `[batch, position]`; 0 where padded.
        targets: int32 `[batch, position]`, the token after each position, see `next_tokens`.
        loss_mask: bool `[batch, position]`; whether the token *after* this position is scored here.
        segment_ids: int32 `[batch, position]`, numbering the documents of each row from 0; −1 where padded.
        scored_tokens: int64 `[batch]`, how many tokens the row scores.
        scored_bytes: int64 `[batch]`, the UTF-8 bytes of these tokens.
    """

    rows: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray
    scored_tokens: np.ndarray
    scored_bytes: np.ndarray

    @property
    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The inputs of a scoring Program other than the model: tokens, targets, segment ids."""
        return self.tokens, self.targets, self.segment_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalSequences:
    """The sets of an evaluation as one stream and its rows.

    Attributes:
        max_length: tokens in a row.
        sets: the sets in order.
        stream: int32 `[tokens]`, all sets end to end.
        document_starts: int64 `[documents]`, ascending: where each document begins in the stream.
        byte_counts: unsigned `[tokens]`, the UTF-8 bytes that each token stands for.
        separate_documents: whether documents get segments of their own.
        counts: bool `[tokens]`, whether a token is scored where it is predicted; None for all.
        real: bool `[tokens]`, false for the padding of sets given as rows; None if there is no padding in the stream.
    """

    max_length: int
    sets: tuple[SetSpan, ...]
    stream: np.ndarray
    document_starts: np.ndarray
    byte_counts: np.ndarray
    separate_documents: bool = True
    counts: np.ndarray | None = None
    real: np.ndarray | None = None

    @property
    def text_losses(self) -> list[str]:
        """The sets without bytes, each with the reason."""
        return [f"{span.name}: {span.text_loss}" for span in self.sets if span.text_loss is not None]

    @property
    def token_count(self) -> int:
        """Tokens of all sets, padding left out."""
        return len(self.stream) if self.real is None else int(self.real.sum())

    @property
    def row_count(self) -> int:
        """Rows of all sets together."""
        return sum(span.rows for span in self.sets)

    def selected_rows(self, max_rows_per_set: int | None = None) -> np.ndarray:
        """The row indices to evaluate: all, or the first so many of each set."""
        return np.concatenate(
            [
                np.arange(span.first_row, span.first_row + _at_most(span.rows, max_rows_per_set), dtype=np.int64)
                for span in self.sets
            ]
        )

    def set_indices(self, rows: np.ndarray) -> np.ndarray:
        """The index of the set that each row belongs to."""
        first_rows = np.array([span.first_row for span in self.sets], np.int64)
        # `side="right"`: a row that begins a set belongs to that set, not to the one before.
        return np.searchsorted(first_rows, rows, side="right") - 1

    def stream_indices(self, rows: np.ndarray) -> np.ndarray:
        """int64 `[rows, position]`: where in the stream each position of these rows is, beyond its end where padded."""
        # A padding row (−1) has no set; it is computed like row 0 and masked by the caller.
        set_index = self.set_indices(np.maximum(rows, 0))
        first_row = np.array([span.first_row for span in self.sets], np.int64)[set_index]
        start = np.array([span.start for span in self.sets], np.int64)[set_index]
        strides = [self.max_length - 1 if span.stride is None else span.stride for span in self.sets]
        # Row r of a set begins r strides behind the start of the set; a stride is one less than a row, since neighbours
        # share a token.
        begin = start + (rows - first_row) * np.array(strides, np.int64)[set_index]
        return begin[:, None] + np.arange(self.max_length)[None, :]

    def take(self, rows: np.ndarray) -> EvalRows:
        """The rows with these indices as arrays; −1 makes a padding row, which scores nothing."""
        rows = np.asarray(rows, np.int64)
        assert rows.ndim == 1 and (rows < self.row_count).all() and (rows >= -1).all(), rows
        set_index = self.set_indices(np.maximum(rows, 0))
        stop = np.array([span.stop for span in self.sets], np.int64)[set_index]
        stream_indices = self.stream_indices(rows)
        # A position behind the set's end would read the next set's tokens, so it is padding.
        real = (stream_indices < stop[:, None]) & (rows >= 0)[:, None]
        # Padded positions still need a valid index for the gathers below; their values are masked.
        stream_indices = np.clip(stream_indices, 0, len(self.stream) - 1)
        if self.real is not None:
            real &= self.real[stream_indices]
        tokens = np.where(real, self.stream[stream_indices], np.int32(0))
        # The document of each position; a token is scored if the one before it is of the same document.
        document = np.searchsorted(self.document_starts, stream_indices, side="right") - 1
        mask = np.zeros_like(real)
        mask[:, :-1] = real[:, 1:] & (document[:, 1:] == document[:, :-1])
        if self.counts is not None:
            mask[:, :-1] &= self.counts[stream_indices[:, 1:]]
        segments = document - document[:, :1] if self.separate_documents else np.zeros_like(document)
        segment_ids = np.where(real, segments, PADDING_SEGMENT).astype(np.int32)
        target_bytes = np.zeros(tokens.shape, np.int64)
        # Byte lengths belong to the predicted token, so they move with the targets by one position.
        target_bytes[:, :-1] = self.byte_counts[stream_indices[:, 1:]]
        return EvalRows(
            rows=rows,
            tokens=tokens,
            targets=next_tokens(tokens, segment_ids),
            loss_mask=mask,
            segment_ids=segment_ids,
            scored_tokens=mask.sum(axis=1, dtype=np.int64),
            scored_bytes=np.where(mask, target_bytes, 0).sum(axis=1),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalBatches:
    """The rows of an evaluation in batches of one size; the last one is filled up with padding rows.

    `batches[step]` is a pure function of the step. Every process makes the same global batches and hands its devices
    their part.
    """

    sequences: EvalSequences
    batch_size: int
    max_rows_per_set: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"the evaluation batch size must be at least 1, got {self.batch_size}")

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows that are evaluated, in order."""
        return self.sequences.selected_rows(self.max_rows_per_set)

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, step: int) -> EvalRows:
        if not 0 <= step < len(self):
            raise IndexError(step)
        # −1 fills up the last batch: all batches have one shape, so the Program is compiled once.
        rows = np.full(self.batch_size, -1, np.int64)
        chosen = self.rows[step * self.batch_size : (step + 1) * self.batch_size]
        rows[: len(chosen)] = chosen
        return self.sequences.take(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedText:
    """A set of text as ids.

    Attributes:
        ids: int32 `[tokens]`, its documents end to end.
        lengths: int64 `[documents]`, the tokens of each.
        skipped: empty documents, which are left out.
        chars: characters that were read.
        byte_counts: see `EvalSequences`.
        text_loss: see `SetSpan`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    skipped: int
    chars: int
    byte_counts: np.ndarray
    text_loss: str | None = None


def stored_byte_counts(tokenizer: Tokenizer, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The bytes of tokens whose text is not at hand, by the lengths of the vocabulary's spellings.

    Args:
        tokenizer: of the ids.
        ids: int32 `[tokens]`.
        starts: int64 `[documents]`, where each document begins.
    """
    counts = compact_counts(tokenizer.byte_lengths()[ids])
    if tokenizer.adds_space and tokenizer.bos_id is not None:
        # The first token is predicted only behind BOS.
        first = starts[ids[starts] == tokenizer.bos_id] + 1
        first = first[first < len(ids)]
        counts[first[counts[first] > 0]] -= 1
    return counts


def compact_counts(counts: np.ndarray) -> np.ndarray:
    """Numbers of bytes in two bytes each, as long as all of them fit."""
    fits = counts.max(initial=0) <= np.iinfo(np.uint16).max
    return counts.astype(np.uint16 if fits else np.uint32)


def build_sequences(
    sets: Sequence[EvaluationSet],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    enforce_bos: bool = True,
    enforce_eos: bool = True,
    separate_documents: bool = True,
    vocab_size: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    stored: "Callable[[EvaluationSet], TokenizedText | None]" = lambda _: None,
) -> EvalSequences:
    """Reads and tokenizes sets into rows of `max_length` tokens.

    Args:
        sets: what to read.
        tokenizer: text to ids.
        max_length: tokens in a row, at least 2.
        enforce_bos: whether documents begin with BOS, if the tokenizer has one. With it every token of the text is
            scored; without it a document's first token is context only.
        enforce_eos: whether documents end with EOS, if the tokenizer has one; it is scored and has no bytes.
        separate_documents: whether a token sees only its own document (`block_cross_document_attention`). Which tokens
            are scored does not depend on it.
        vocab_size: the model's vocabulary; ids beyond it are an error.
        on_progress: called with the number of characters tokenized so far.
        stored: returns a set's text if it is tokenized already, else None.

    Raises:
        DataError: a set without a token to score; an id outside the vocabulary; and whatever is wrong in a file.
        MissingFileError: a file no longer exists.
    """
    if max_length < 2:
        raise ValueError(f"max_eval_length must be at least 2 (a token and the next), got {max_length}")
    if not sets:
        raise DataError("no data set to evaluate")
    bos = tokenizer.bos_id if enforce_bos else None
    eos = tokenizer.eos_id if enforce_eos else None
    pieces: list[np.ndarray] = []
    byte_counts: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    spans: list[SetSpan] = []
    start = first_row = chars = 0
    for dataset in sets:
        text = stored(dataset) or _tokenize(
            dataset,
            tokenizer,
            bos=bos,
            eos=eos,
            limit=tokenizer.vocab_size if vocab_size is None else vocab_size,
            on_progress=None if on_progress is None else _shifted(on_progress, chars),
        )
        chars += text.chars
        tokens, documents = len(text.ids), int(np.count_nonzero(text.lengths))
        if tokens - documents < 1:
            what = "no text" if documents == 0 else "no document with at least two tokens"
            raise DataError(
                f"data set {dataset.name!r} is empty: {what} in {'; '.join(map(str, dataset.document_sources))}"
            )
        # ⌈(tokens − 1) / (max_length − 1)⌉: each row scores max_length − 1 tokens, and the set's first one is not
        # scored.
        rows = -(-(tokens - 1) // (max_length - 1))
        spans.append(
            SetSpan(
                name=dataset.name,
                tags=dataset.tags,
                documents=documents,
                start=start,
                stop=start + tokens,
                first_row=first_row,
                rows=rows,
                skipped=text.skipped,
                chars=text.chars,
                text_loss=text.text_loss,
            )
        )
        pieces.append(text.ids)
        byte_counts.append(text.byte_counts)
        # An empty document would begin at the same place as the next one and break the search for a position's
        # document.
        lengths.append(text.lengths[text.lengths > 0])
        start += tokens
        first_row += rows
    all_lengths = np.concatenate(lengths)
    return EvalSequences(
        max_length=max_length,
        sets=tuple(spans),
        stream=np.concatenate(pieces),
        document_starts=np.concatenate([[0], np.cumsum(all_lengths)[:-1]]).astype(np.int64),
        byte_counts=np.concatenate(byte_counts),
        separate_documents=separate_documents,
    )


def _tokenize(
    dataset: EvaluationSet,
    tokenizer: Tokenizer,
    *,
    bos: int | None,
    eos: int | None,
    limit: int,
    on_progress: Callable[[int], None] | None,
) -> TokenizedText:
    before = np.array([] if bos is None else [bos], np.int32)
    after = np.array([] if eos is None else [eos], np.int32)
    pieces: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    lengths: list[int] = []
    batch: list[Document] = []
    lost: list[str] = []
    batch_chars = chars = skipped = documents = 0

    def flush() -> None:
        nonlocal batch_chars, chars, documents
        for document, text_ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
            text_ids = np.asarray(text_ids, np.int32)
            ids = np.concatenate([before, text_ids, after])
            # Checked here rather than on the device, where an id outside the vocabulary reads an arbitrary row of the
            # embedding.
            outside = ids[(ids < 0) | (ids >= limit)]
            if len(outside):
                raise DataError(
                    f"{document.origin}: token id {outside[0]} is outside the model's vocabulary of {limit}; "
                    f"tokenizer {tokenizer.name} ({tokenizer.vocab_size} ids) and model do not match"
                )
            pieces.append(ids)
            lengths.append(len(ids))
            documents += 1
            byte_counts = tokenizer.byte_counts(document.text, text_ids)
            if byte_counts is None:
                lost.append(document.origin)
                byte_counts = np.zeros(len(text_ids), np.int32)
            # BOS and EOS are no part of the text.
            counts.append(np.pad(byte_counts, (len(before), len(after))))
        chars += batch_chars
        batch.clear()
        batch_chars = 0
        if on_progress is not None:
            on_progress(chars)

    for document in dataset.documents():
        if not document.text:
            skipped += 1
            continue
        batch.append(document)
        batch_chars += len(document.text)
        if batch_chars >= CHUNK_CHARS:
            flush()
    if batch:
        flush()
    stream = np.concatenate(pieces) if pieces else np.array([], np.int32)
    return TokenizedText(
        ids=stream,
        lengths=np.array(lengths, np.int64),
        skipped=skipped,
        chars=chars,
        byte_counts=compact_counts(np.concatenate(counts) if counts else np.array([], np.int32)),
        text_loss=_lost_documents(lost, documents, tokenizer),
    )


def _lost_documents(lost: Sequence[str], documents: int, tokenizer: Tokenizer) -> str | None:
    """Why a set has no bytes, some of whose documents are lost in their ids."""
    if not lost:
        return None
    reason = tokenizer.lost_text(np.array([], np.int32))
    why = "" if reason is None else f" ({reason})"
    return f"the ids of {len(lost):,} of {documents:,} documents do not keep their text{why}; the first is {lost[0]}"


def _shifted(on_progress: Callable[[int], None], base: int) -> Callable[[int], None]:
    return lambda done: on_progress(base + done)


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)
