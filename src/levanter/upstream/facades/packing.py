"""Upstream's packing: short sequences that share a row, kept apart by segment ids.

    packer = SequencePacker(Pos, max_pack_size=8, pad_token=0)
    packer.add_example([5, 6, 7], loss_mask=[0, 1, 0])
    example = packer.pack()                                  # an LmExample
    ids, losses = per_segment_loss(example, losses, hax.Axis("segment", 8))

Sequences stay in their order, and only neighbours share a row. A run packs by lengths instead, with less padding:
`pack: …` of a component, `levanter.data.packing.pack`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from haliax_ext.pytree import PyTree, path_string
from levanter.layers.attention import AttentionMask
from levanter.upstream.facades.datasets import AsyncDataset
from levanter.upstream.facades.models import LmExample

PADDING = -1
"""The segment of padding."""


class SequencePacker:
    """Collects sequences for one row.

    Args:
        Pos: the row's axis.
        max_pack_size: sequences in a row, at most.
        pad_token: fills the rest of the row.
    """

    def __init__(self, Pos: Axis, max_pack_size: int, pad_token: int):
        self.Pos, self.max_pack_size, self.pad_token = Pos, max_pack_size, pad_token
        self.num_segments = 0
        self._ids: list[int] = []
        self._weights: list[float] = []
        self._segments: list[int] = []

    def can_pack(self, ids: Sequence[int]) -> bool:
        """Whether one more sequence fits."""
        return len(self._ids) + len(ids) <= self.Pos.size and self.num_segments < self.max_pack_size

    def add_example(
        self, ids: Sequence[int], loss_mask: Sequence[Any] | np.ndarray, segment_id: int | None = None
    ) -> None:
        """Adds a sequence; an empty one is left out.

        Args:
            ids: its tokens.
            loss_mask: the weight of the prediction after each token.
            segment_id: its segment; by default its number in the row.

        Raises:
            ValueError: the lengths differ, or the sequence does not fit.
        """
        if len(ids) != len(loss_mask):
            raise ValueError(f"ids and loss_mask must have the same length, got {len(ids)} and {len(loss_mask)}")
        if not len(ids):
            return
        if len(self._ids) + len(ids) > self.Pos.size:
            raise ValueError(f"Too many tokens: {len(ids)} more than the {len(self._ids)} of a row of {self.Pos.size}")
        if self.num_segments >= self.max_pack_size:
            raise ValueError(f"Too many segments: the row has max_pack_size = {self.max_pack_size}")
        self._ids += [int(token) for token in ids]
        self._weights += [float(weight) for weight in loss_mask]
        self._segments += [self.num_segments if segment_id is None else segment_id] * len(ids)
        self.num_segments += 1

    def pack(self) -> LmExample:
        """The row, padded."""
        return _row(self.Pos, self._ids, self._weights, self._segments, self.pad_token)


def _row(Pos: Axis, ids: list[int], weights: list[float], segments: list[int], pad_token: int) -> LmExample:
    rest = Pos.size - len(ids)
    # Made by NumPy: rows are made by the thousand, and placed on devices by a loader.
    arrays = (
        np.array(ids + [pad_token] * rest, np.int32),
        np.array(weights + [0] * rest, np.float32),
        np.array(segments + [PADDING] * rest, np.int32),
    )
    tokens, weight, segment_ids = (NamedArray(jnp.asarray(array), (Pos,)) for array in arrays)
    return LmExample(tokens, weight, AttentionMask.causal().with_segment_ids(segment_ids))


@dataclasses.dataclass(frozen=True)
class PromptCompletion:
    """A prompt and its completion in one list of ids.

    Attributes:
        ids: the tokens of both.
        prompt_length: tokens of the prompt.
        segment_id: the segment in a row; None for the next one.

    Raises:
        ValueError: there is no token, or none behind the prompt.
    """

    ids: list[int]
    prompt_length: int
    segment_id: int | None = None

    def __post_init__(self) -> None:
        if not len(self.ids):
            raise ValueError("PromptCompletion must have at least one token")
        if len(self.ids) <= self.prompt_length:
            raise ValueError(
                f"PromptCompletion must have a token behind its prompt, got {len(self.ids)} tokens with "
                f"prompt_length {self.prompt_length}"
            )

    @property
    def weights(self) -> list[float]:
        """1 at each token that is followed by one of the completion."""
        last = len(self.ids) - 1
        return [float(self.prompt_length - 1 <= n < last) for n in range(len(self.ids))]


def pack_prompt_completions(
    Pos: Axis,
    sequences: Iterable[PromptCompletion],
    pad_token: int,
    max_segments_per_example: int = 64,
    max_buffered_examples: int = 64,
) -> Iterator[LmExample]:
    """Packs sequences as they come, into the first row in which they fit.

    Args:
        Pos: the axis of a row.
        sequences: the sequences.
        pad_token: fills the rest of a row.
        max_segments_per_example: sequences in a row, at most.
        max_buffered_examples: rows that are open at the same time, at most; the oldest is closed first.
    """
    rows = [SequencePacker(Pos, max_segments_per_example, pad_token)]
    for sequence in sequences:
        row = next((row for row in rows if row.can_pack(sequence.ids)), None)
        if row is None:
            row = SequencePacker(Pos, max_segments_per_example, pad_token)
            rows.append(row)
        row.add_example(sequence.ids, sequence.weights, sequence.segment_id)
        if row.num_segments == max_segments_per_example:
            rows.remove(row)
            yield row.pack()
        while len(rows) >= max(max_buffered_examples, 1) and rows[0].num_segments:
            yield rows.pop(0).pack()
    yield from (row.pack() for row in rows if row.num_segments)


def greedy_pack_prompt_completions(
    Pos: Axis, sequences: Iterable[PromptCompletion], pad_token: int, max_segments_per_example: int = 64
) -> list[LmExample]:
    """Packs neighbours while they fit; a sequence that is too long loses its first tokens.

    The segment of a sequence is its number in `sequences`.
    """
    items = list(sequences)
    lengths = np.array([len(item.ids) for item in items], np.int64)
    rows = pack_documents(lengths, Pos.size, max_segments_per_example, slice_too_long_examples=True)
    examples = []
    for row in rows:
        ids = [token for n in row for token in items[n].ids][-Pos.size :]
        weights = [weight for n in row for weight in items[n].weights][-Pos.size :]
        segments = [n for n in row for _ in items[n].ids][-Pos.size :]
        examples.append(_row(Pos, ids, weights, segments, pad_token))
    return examples


def pack_documents(
    lengths: PyTree,
    max_length: PyTree,
    max_segments_per_example: int | None = None,
    slice_too_long_examples: bool = False,
) -> list[range]:
    """Plans rows of neighbouring documents.

    Args:
        lengths: a tree of int arrays `[documents]`: the length of each document in each leaf.
        max_length: the tokens of a row in each leaf, or one number for all.
        max_segments_per_example: documents in a row, at most.
        slice_too_long_examples: whether a document that is too long gets a row of its own.

    Returns:
        The documents of each row.

    Raises:
        ValueError: a document is too long, the leaves have different numbers of documents, or a limit is below 1.
    """
    if max_segments_per_example is not None and max_segments_per_example < 1:
        raise ValueError(f"max_segments_per_example must be a positive integer, got {max_segments_per_example}")
    leaves = jax.tree_util.tree_flatten_with_path(lengths)[0]
    limits = _limits(max_length, jax.tree.structure(lengths))
    counts = {len(leaf) for _, leaf in leaves}
    if len(counts) != 1:
        raise ValueError(f"All leaves must have the same number of documents, got {sorted(counts)}")
    for (path, leaf), limit in zip(leaves, limits, strict=True):
        long = np.flatnonzero(np.asarray(leaf) > limit)
        if len(long) and not slice_too_long_examples:
            raise ValueError(
                f"Document {long[0]} in leaf '{path_string(path)}' has length {leaf[long[0]]} which exceeds maximum "
                f"allowed length {limit}; {len(long)} of {len(leaf)} documents do. Raise max_length, or cut them: "
                f"slice_too_long_examples (slice_strategy of a data set)"
            )
    ends = [np.cumsum(np.concatenate([[0], leaf])) for _, leaf in leaves]
    rows, start, documents = [], 0, counts.pop()
    most = max_segments_per_example or documents
    while start < documents:
        # The last document that ends within the row, in every leaf.
        stops = [
            int(np.searchsorted(end, end[start] + limit, "right")) - 1 for end, limit in zip(ends, limits, strict=True)
        ]
        stop = max(min(*stops, start + most), start + 1)
        rows.append(range(start, stop))
        start = stop
    return rows


def _limits(max_length: PyTree, structure: PyTree) -> list[int]:
    return [max_length] * structure.num_leaves if isinstance(max_length, int) else structure.flatten_up_to(max_length)


class GreedyPrepackedDataset(AsyncDataset[tuple[PyTree, PyTree]]):
    """Rows of neighbouring documents of stores: (values, segment ids), each a tree like the stores'.

    Args:
        dataset: a tree of `JaggedArrayStore`s with rows of one axis: the leaves of each document.
        max_length: the tokens of a row in each leaf, or one number for all.
        max_segments_per_example: documents in a row, at most.
        pad_with_zeros: whether rows are filled with zeros, whose segment is −1.
        slice_strategy: what is kept of a document that is too long: its `left` or its `right` end; `raise` refuses it.

    Raises:
        ValueError: a document is too long, or the strategy is unknown.
    """

    def __init__(
        self,
        dataset: PyTree,
        max_length: PyTree,
        max_segments_per_example: int | None = None,
        pad_with_zeros: bool = True,
        slice_strategy: Literal["left", "right", "raise"] = "raise",
    ):
        if slice_strategy not in ("left", "right", "raise"):
            raise ValueError(f"slice_strategy must be one of 'left', 'right', or 'raise', got {slice_strategy!r}")
        self.dataset, self.max_length, self.pad_with_zeros = dataset, max_length, pad_with_zeros
        self.max_segments_per_example, self.slice_strategy = max_segments_per_example, slice_strategy
        self._stores, self._structure = jax.tree.flatten(dataset)
        lengths = jax.tree.unflatten(self._structure, [np.diff(store.ends) for store in self._stores])
        self._pack_indices = pack_documents(lengths, max_length, max_segments_per_example, slice_strategy != "raise")
        self._sizes = _limits(max_length, self._structure)

    async def async_len(self) -> int:
        """The number of rows."""
        return len(self._pack_indices)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[tuple[PyTree, PyTree]]:
        """The rows with these indices."""
        rows = [self._pack_indices[index] for index in indices]
        # All documents of a leaf at once: TensorStore then reads a chunk once.
        batches = [await store.get_batch([n for row in rows for n in row]) for store in self._stores]
        first = np.cumsum([0, *map(len, rows)])
        return [self._packed(row, [batch[first[n] : first[n + 1]] for batch in batches]) for n, row in enumerate(rows)]

    def _packed(self, row: range, documents: list[list[np.ndarray]]) -> tuple[PyTree, PyTree]:
        values, segments = [], []
        for leaf, size in zip(documents, self._sizes, strict=True):
            value = np.concatenate(leaf)
            segment = np.repeat(np.asarray(row), [len(document) for document in leaf])
            keep = slice(-size, None) if self.slice_strategy == "right" else slice(size)
            value, segment = value[keep], segment[keep]
            fill = (0, size - len(value) if self.pad_with_zeros else 0)
            values.append(np.pad(value, fill))
            segments.append(np.pad(segment, fill, constant_values=PADDING))
        return jax.tree.unflatten(self._structure, values), jax.tree.unflatten(self._structure, segments)


# --- results by segment ---


def _segments(example: LmExample, Segments: Axis) -> tuple[NamedArray, NamedArray]:
    """The segments of a row in ascending order, `[Segments]`, −1 behind them; and 1 where a position is in one."""
    segment_ids = example.attn_mask.query_segments
    if segment_ids is None or segment_ids.ndim != 1:
        raise ValueError("the example must be one row with segment ids in its mask; use hax.vmap for a batch")
    unique = hax.named(jnp.unique(segment_ids.array, size=Segments.size, fill_value=PADDING), Segments)
    within = unique == segment_ids.broadcast_axis(Segments)
    assert isinstance(within, NamedArray)
    return unique, within


def per_segment_loss(
    packed_example: LmExample, losses: NamedArray, max_Segments: Axis
) -> tuple[NamedArray, NamedArray]:
    """The segments of a row, and the sum of the weighted losses of each.

    Args:
        packed_example: the row.
        losses: `[position]`.
        max_Segments: the axis of segments, −1 for those that the row does not have.

    Raises:
        ValueError: the example has no segment ids, or is a batch.
    """
    unique, inside = _segments(packed_example, max_Segments)
    weighted = losses * packed_example.loss_weight
    return unique, hax.dot(inside.astype(weighted.dtype), weighted, axis=packed_example.tokens.axes[0])


def per_segment_correct(
    packed_example: LmExample, correct: NamedArray, max_Segments: Axis
) -> tuple[NamedArray, NamedArray]:
    """The segments of a row, and whether every token of each that counts is correct.

    Args:
        packed_example: the row.
        correct: bool `[position]`.
        max_Segments: the axis of segments, −1 for those that the row does not have.

    Raises:
        ValueError: the example has no segment ids, or is a batch.
    """
    unique, inside = _segments(packed_example, max_Segments)
    wrong = ~correct & (packed_example.loss_weight > 0) & inside
    return unique, ~hax.any(wrong, axis=packed_example.tokens.axes[0])
