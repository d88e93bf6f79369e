"""`Table`: the rows of a list of queries, which all processes execute, as one frozen value with a digest.

Process 0 builds it from queries; the other processes receive it (`broadcast`) and execute the same batches without
further communication. Only process 0 knows to which query a target belongs.
"""

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import PackedQueries, RowShape, UniqueQueries, group_queries, max_branch_tokens, pack

PADDING = -1
"""The segment of positions without a token, and the query of slots without a target."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The inputs of one execution of a Program.

    Attributes:
        tokens, segment_ids, positions: int32 `[rows, length]`; positions count from the beginning of a segment, or
            continue those of its trunk.
        target_positions, targets: int32 `[rows, slots]`: the position that predicts a target, and the target's id.
        queries, target_indices: int64 `[rows, slots]`: the query of a target, and the target's index in it; `PADDING`
            for empty slots. None on processes that do not know them.
        trunks: int32 `[rows, length]`: the segment that each segment continues, its own id if it continues none; None
            for rows without branches.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    target_positions: np.ndarray
    targets: np.ndarray
    queries: np.ndarray | None = None
    target_indices: np.ndarray | None = None
    trunks: np.ndarray | None = None

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """The Program's inputs other than the model."""
        trunks = () if self.trunks is None else (self.trunks,)
        return self.tokens, self.segment_ids, self.positions, self.target_positions, self.targets, *trunks


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The rows of a list of queries.

    Attributes:
        items: the sequences in the rows.
        packed: the rows, by shape.
        tokens: inputs of all queries together, if none were shared.
    """

    items: UniqueQueries
    packed: tuple[PackedQueries, ...]
    tokens: int = 0

    @staticmethod
    def from_queries(
        queries: Sequence[Query], shapes: Sequence[RowShape], cost: Callable[[RowShape], float]
    ) -> "Table":
        """The table of a list of queries.

        Args:
            queries: the queries.
            shapes: shapes of the rows for which there are Programs.
            cost: cost of a batch, in any unit.
        """
        items = group_queries(queries, branch_tokens=max_branch_tokens(shapes))
        tokens = sum(len(query.inputs) for query in queries)
        return Table(items=items, packed=pack(items, shapes, cost), tokens=tokens)

    @property
    def computed_tokens(self) -> int:
        """Tokens that the Programs process, padding included."""
        return sum(rows.batches * rows.shape.rows * rows.shape.length for rows in self.packed)

    @property
    def executions(self) -> Mapping[str, int]:
        """Program name → number of executions."""
        return {rows.shape.name: rows.batches for rows in self.packed}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of everything that is computed."""
        result = hashlib.sha256()
        for array in self._digest_arrays():
            result.update(array.astype("<i8").tobytes())
            result.update(b"|")
        return result.hexdigest()

    def _digest_arrays(self) -> Iterator[np.ndarray]:
        yield np.asarray([len(array) for array in self.items.inputs], np.int64)
        yield from self.items.inputs
        yield np.asarray([len(array) for array in self.items.targets], np.int64)
        for array in self.items.targets:
            # Without the query of a target, which other processes do not know: their digest must be the same.
            yield array[:, :2]
        # Items without branches have one segment, whose size is the length that is hashed above.
        if any(len(sizes) > 1 for sizes in self.items.segment_sizes):
            yield np.asarray([len(array) for array in self.items.segment_sizes], np.int64)
            yield np.concatenate(self.items.segment_sizes)
        for array in self.packed:
            shape = array.shape
            yield np.asarray([shape.length, shape.slots, shape.rows, len(array.rows)], np.int64)
            for row in array.rows:
                yield np.asarray(row, np.int64).reshape(-1, 3)

    def batches(self, packed: PackedQueries) -> Iterator[Batch]:
        """The batches of one shape, in order; the last one is completed with empty rows."""
        for first in range(0, len(packed.rows), packed.shape.rows):
            yield self._batch(packed.shape, packed.rows[first : first + packed.shape.rows])

    def _batch(self, shape: RowShape, rows: Sequence[Sequence[tuple[int, int, int]]]) -> Batch:
        # Positions and slots without content keep these values; results of the query `PADDING` are skipped.
        row_shape, slot_shape = (shape.rows, shape.length), (shape.rows, shape.slots)
        tokens, positions = np.zeros(row_shape, np.int32), np.zeros(row_shape, np.int32)
        segments, trunks = np.full(row_shape, PADDING, np.int32), np.full(row_shape, PADDING, np.int32)
        target_positions, targets = np.zeros(slot_shape, np.int32), np.zeros(slot_shape, np.int32)
        origins = np.full((*slot_shape, 2), PADDING, np.int64)
        # Pieces of a row are placed one after the other: tokens from `at`, targets from `slot`, segment ids from
        # `segment`.
        for n, row in enumerate(rows):
            at = slot = segment = 0
            for item, first, count in row:
                ids, sizes = self.items.inputs[item], self.items.segment_sizes[item]
                item_targets = self.items.targets[item][first : first + count]
                end = at + len(ids)
                # Branches continue the trunk's positions, each from the trunk's end.
                item_positions = np.concatenate(
                    [np.arange(sizes[0]), *(sizes[0] + np.arange(row_shape) for row_shape in sizes[1:])]
                )
                # All segments of an item continue its first one, the trunk, whose own entry is its own id.
                tokens[n, at:end], positions[n, at:end], trunks[n, at:end] = ids, item_positions, segment
                segments[n, at:end] = segment + np.repeat(np.arange(len(sizes)), sizes)
                target_positions[n, slot : slot + count], targets[n, slot : slot + count] = (
                    at + item_targets[:, 0],
                    item_targets[:, 1],
                )
                origins[n, slot : slot + count] = item_targets[:, 2:]
                at, slot, segment = end, slot + count, segment + len(sizes)
        return Batch(
            tokens=tokens,
            segment_ids=segments,
            positions=positions,
            target_positions=target_positions,
            targets=targets,
            queries=origins[..., 0],
            target_indices=origins[..., 1],
            trunks=trunks if shape.branches else None,
        )

    def message(self) -> dict[str, Any]:
        """The table as JSON for other processes; it does not contain which query a target belongs to."""
        inputs, targets = self.items.inputs, self.items.targets
        rows = [
            {
                "shape": [packed.shape.length, packed.shape.slots, packed.shape.rows, packed.shape.branches],
                "sizes": _packed_array([len(row) for row in packed.rows]),
                "pieces": _packed_array([piece for row in packed.rows for piece in row]),
            }
            for packed in self.packed
        ]
        return {
            "digest": self.digest,
            "lengths": _packed_array([len(item) for item in inputs]),
            "ids": _packed_array(np.concatenate(inputs)),
            "branches": _packed_array([len(item) for item in self.items.segment_sizes]),
            "segment_sizes": _packed_array(np.concatenate(self.items.segment_sizes)),
            "counts": _packed_array([len(item) for item in targets]),
            "targets": _packed_array(np.concatenate(targets)[:, :2]),
            "rows": rows,
        }

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> "Table":
        """The table from its `message`.

        Raises:
            ValueError: the message is damaged.
        """
        inputs = _cut(_array(message["ids"]), _array(message["lengths"]))
        segment_sizes = _cut(_array(message["segment_sizes"]), _array(message["branches"]))
        targets = _cut(_array(message["targets"]).reshape(-1, 2), _array(message["counts"]))
        # Columns of the query and the index, which the message does not contain.
        unknown = [np.pad(values, ((0, 0), (0, 2)), constant_values=PADDING) for values in targets]
        packed = []
        for values in message["rows"]:
            length, slots, count, branches = values["shape"]
            pieces = _cut(_array(values["pieces"]).reshape(-1, 3), _array(values["sizes"]))
            rows = tuple(tuple((a, b, c) for a, b, c in row.tolist()) for row in pieces)
            shape = RowShape(length=length, slots=slots, rows=count, branches=branches)
            packed.append(PackedQueries(shape=shape, rows=rows))
        items = UniqueQueries(
            inputs=tuple(values.astype(np.int32) for values in inputs),
            targets=tuple(unknown),
            segment_sizes=tuple(tuple(values.tolist()) for values in segment_sizes),
        )
        table = Table(items=items, packed=tuple(packed))
        # Two processes with different rows would run the same collectives on different data, and return wrong numbers.
        if table.digest != message["digest"]:
            raise ValueError(f"a table of requests was damaged in transit: {table.digest} is not {message['digest']}")
        return table


@dataclass(frozen=True, kw_only=True)
class RequestCount:
    """The requests of a run and the executions that they take.

    Attributes:
        executions: Program name → number of executions; Programs that are not listed do not run.
        requests: number of requests of all tasks.
        exact: whether every document was read.
        is_assumed: whether the number of requests is an assumption.
        shapes: shapes of the rows: as planned, or fitted to the requests if all are known.
    """

    executions: Mapping[str, int]
    requests: int
    exact: bool
    is_assumed: bool = False
    shapes: tuple[RowShape, ...] = ()

    @property
    def reason(self) -> str:
        """The source of the numbers, for reports."""
        if self.is_assumed:
            return f"{self.requests:,} requests (plan.assume_requests)"
        return f"{self.requests:,} requests of the tasks" + ("" if self.exact else ", by a sample of their documents")

    def message(self) -> dict[str, Any]:
        """The count as JSON, for other processes."""
        return asdict(self)

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> "RequestCount":
        """The count from its `message`."""
        return RequestCount(**{**message, "shapes": tuple(RowShape(**shape) for shape in message["shapes"])})

    @staticmethod
    def assumed(requests: int, tokens: int, shapes: Sequence[RowShape]) -> "RequestCount":
        """The count for an assumed number of requests of equal length, in the smallest sparse shape that holds one.

        Args:
            requests: number of requests.
            tokens: tokens of each request.
            shapes: shapes of the rows.
        """
        # The usual request scores a few tokens of many.
        sparse = [shape for shape in shapes if not shape.is_dense] or list(shapes)
        fitting = [shape for shape in sparse if shape.length >= tokens] or sparse[-1:]
        shape = min(fitting, key=lambda candidate: candidate.length)
        rows = -(-requests // max(1, shape.length // tokens))
        return RequestCount(
            executions={shape.name: -(-rows // shape.rows)},
            requests=requests,
            exact=False,
            is_assumed=True,
            shapes=tuple(shapes),
        )


def _packed_array(values: ArrayLike) -> str:
    # The fastest level suffices: most of the eight bytes of each number are zero.
    return base64.b64encode(zlib.compress(np.asarray(values, "<i8").tobytes(), 1)).decode()


def _array(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").astype(np.int64)


def _cut(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1]) if len(sizes) else []
