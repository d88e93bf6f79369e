"""`Table`: what all processes compute, as one frozen value with a digest.

Process 0 makes it of a list of questions; the others hear it (`following`) and run the same batches, with nothing to
say to each other. Only process 0 knows which question a target belongs to.
"""

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import PackedQueries, RowShape, UniqueQueries, branching_room, items_of, pack

PADDING = -1
"""The segment of positions without a token, and the question of slots without a target."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One execution of a Program.

    Attributes:
        tokens, segment_ids, positions: int32 `[rows, length]`; positions count from the beginning of a segment, or go
            on from its trunk's.
        places, targets: int32 `[rows, slots]`: where a target is predicted, and its id.
        questions, numbers: int64 `[rows, slots]`: whose target it is, and which of its; `PADDING` for none. None on
            processes that do not know.
        trunks: int32 `[rows, length]`: the segment that each segment goes on from, itself where it begins there; None
            where rows have no branches.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    questions: np.ndarray | None = None
    numbers: np.ndarray | None = None
    trunks: np.ndarray | None = None

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """What the Program takes besides the model."""
        trunks = () if self.trunks is None else (self.trunks,)
        return self.tokens, self.segment_ids, self.positions, self.places, self.targets, *trunks


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Rows of questions.

    Attributes:
        items: the sequences in them.
        packed: the rows, by shape.
        tokens: that the model would see, were every question asked alone.
    """

    items: UniqueQueries
    packed: tuple[PackedQueries, ...]
    tokens: int = 0

    @staticmethod
    def of(questions: Sequence[Query], shapes: Sequence[RowShape], cost: Callable[[RowShape], float]) -> "Table":
        """The table of a list of questions.

        Args:
            questions: the questions.
            shapes: of the rows that there are Programs for.
            cost: of a batch, in any unit.
        """
        items = items_of(questions, room=branching_room(shapes))
        tokens = sum(len(each.inputs) for each in questions)
        return Table(items=items, packed=pack(items, shapes, cost), tokens=tokens)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the Programs take, padding included."""
        return sum(each.batches * each.shape.rows * each.shape.length for each in self.packed)

    @property
    def executions(self) -> Mapping[str, int]:
        """How often each Program runs, by its name."""
        return {each.shape.name: each.batches for each in self.packed}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of what is computed."""
        found = hashlib.sha256()
        for part in self._parts():
            found.update(part.astype("<i8").tobytes())
            found.update(b"|")
        return found.hexdigest()

    def _parts(self) -> Iterator[np.ndarray]:
        yield np.asarray([len(each) for each in self.items.inputs], np.int64)
        yield from self.items.inputs
        yield np.asarray([len(each) for each in self.items.targets], np.int64)
        for each in self.items.targets:
            yield each[:, :2]
        if any(len(parts) > 1 for parts in self.items.parts):
            yield np.asarray([len(each) for each in self.items.parts], np.int64)
            yield np.concatenate(self.items.parts)
        for each in self.packed:
            shape = each.shape
            yield np.asarray([shape.length, shape.slots, shape.rows, len(each.rows)], np.int64)
            for row in each.rows:
                yield np.asarray(row, np.int64).reshape(-1, 3)

    def batches(self, packed: PackedQueries) -> Iterator[Batch]:
        """The batches of one shape, in order; the last one is filled up with empty rows."""
        for first in range(0, len(packed.rows), packed.shape.rows):
            yield self._batch(packed.shape, packed.rows[first : first + packed.shape.rows])

    def _batch(self, shape: RowShape, rows: Sequence[Sequence[tuple[int, int, int]]]) -> Batch:
        size, slots = (shape.rows, shape.length), (shape.rows, shape.slots)
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        segments, trunks = np.full(size, PADDING, np.int32), np.full(size, PADDING, np.int32)
        places, targets = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        asked = np.full((*slots, 2), PADDING, np.int64)
        for n, row in enumerate(rows):
            at = slot = segment = 0
            for item, first, count in row:
                ids, parts = self.items.inputs[item], self.items.parts[item]
                mine = self.items.targets[item][first : first + count]
                end = at + len(ids)
                within = np.concatenate([np.arange(parts[0]), *(parts[0] + np.arange(size) for size in parts[1:])])
                tokens[n, at:end], positions[n, at:end], trunks[n, at:end] = ids, within, segment
                segments[n, at:end] = segment + np.repeat(np.arange(len(parts)), parts)
                places[n, slot : slot + count], targets[n, slot : slot + count] = at + mine[:, 0], mine[:, 1]
                asked[n, slot : slot + count] = mine[:, 2:]
                at, slot, segment = end, slot + count, segment + len(parts)
        return Batch(
            tokens=tokens,
            segment_ids=segments,
            positions=positions,
            places=places,
            targets=targets,
            questions=asked[..., 0],
            numbers=asked[..., 1],
            trunks=trunks if shape.branches else None,
        )

    def message(self) -> dict[str, Any]:
        """The table as JSON, for other processes: without whose targets they are."""
        inputs, targets = self.items.inputs, self.items.targets
        rows = [
            {
                "shape": [each.shape.length, each.shape.slots, each.shape.rows, each.shape.branches],
                "sizes": _packed_array([len(row) for row in each.rows]),
                "pieces": _packed_array([piece for row in each.rows for piece in row]),
            }
            for each in self.packed
        ]
        return {
            "digest": self.digest,
            "lengths": _packed_array([len(each) for each in inputs]),
            "ids": _packed_array(np.concatenate(inputs)),
            "branches": _packed_array([len(each) for each in self.items.parts]),
            "parts": _packed_array(np.concatenate(self.items.parts)),
            "counts": _packed_array([len(each) for each in targets]),
            "targets": _packed_array(np.concatenate(targets)[:, :2]),
            "rows": rows,
        }

    @staticmethod
    def of_message(message: Mapping[str, Any]) -> "Table":
        """What `message` was made of.

        Raises:
            ValueError: it is damaged.
        """
        inputs = _cut(_array(message["ids"]), _array(message["lengths"]))
        parts = _cut(_array(message["parts"]), _array(message["branches"]))
        targets = _cut(_array(message["targets"]).reshape(-1, 2), _array(message["counts"]))
        unknown = [np.pad(each, ((0, 0), (0, 2)), constant_values=PADDING) for each in targets]
        packed = []
        for each in message["rows"]:
            length, slots, count, branches = each["shape"]
            pieces = _cut(_array(each["pieces"]).reshape(-1, 3), _array(each["sizes"]))
            rows = tuple(tuple((a, b, c) for a, b, c in row.tolist()) for row in pieces)
            shape = RowShape(length=length, slots=slots, rows=count, branches=branches)
            packed.append(PackedQueries(shape=shape, rows=rows))
        items = UniqueQueries(
            inputs=tuple(each.astype(np.int32) for each in inputs),
            targets=tuple(unknown),
            parts=tuple(tuple(each.tolist()) for each in parts),
        )
        table = Table(items=items, packed=tuple(packed))
        if table.digest != message["digest"]:
            raise ValueError(f"a table of requests was damaged on its way: {table.digest} is not {message['digest']}")
        return table


def _packed_array(values: ArrayLike) -> str:
    return base64.b64encode(zlib.compress(np.asarray(values, "<i8").tobytes(), 1)).decode()


def _array(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").astype(np.int64)


def _cut(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1]) if len(sizes) else []
