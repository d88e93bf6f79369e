"""Upstream's stores of rows of different sizes: `JaggedArrayStore` for one array a row, `TreeStore` for a tree of them.

    store = TreeStore.open({"input_ids": np.zeros((0,), np.int32)}, "cache/train", mode="w")
    store.extend([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    store[1]["input_ids"]                                     # array([8])

The files are laid out as upstream's, so either project reads what the other wrote: for each leaf of the tree, `data`
has the values end to end; `offsets` the number of rows, then where each ends; `shapes`, for leaves of more than one
axis, the sizes of all axes but the last. The arrays of a run's own tokens are `levanter.data.store`'s.
"""

import asyncio
import dataclasses
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.pytree import PyTree, path_string
from levanter.data.store import kvstore, open_specified
from levanter.io.paths import join

_CHUNK_ROWS, _FILE_ROWS = 1 << 13, 1 << 22
"""Rows in a chunk, which a read decodes, and in a file."""
_MOST_ROWS = 1 << 54
"""The declared size of every array; `offsets[0]` says how many rows are there."""
_MODES = {
    "r": {"open": True},
    "w": {"create": True, "delete_existing": True},
    "a": {"open": True, "create": True},
}
_threads = ThreadPoolExecutor(4, "tree-store")


def _open(path: str | None, rest: tuple[int, ...], dtype: PyTree, mode: str) -> PyTree:
    chunk = {"chunk_shape": [_CHUNK_ROWS, *rest], "codecs": [{"name": "blosc", "configuration": {"clevel": 5}}]}
    specification: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": f"memory://{uuid.uuid4().hex}/" if path is None else kvstore(path),
    }
    if mode == "r":
        # An existing array names its own layout.
        return open_specified(specification, **_MODES[mode])
    specification["metadata"] = {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [_FILE_ROWS, *rest]}},
        "codecs": [{"name": "sharding_indexed", "configuration": chunk}],
    }
    shape = [_MOST_ROWS, *rest]
    return open_specified(specification, dtype=jnp.dtype(dtype).name, shape=shape, **_MODES[mode])


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedBatch:
    """Rows as they are stored.

    Attributes:
        data: the values, end to end.
        offsets: int64 `[rows]`, where each row ends.
        shapes: int64 `[rows, axes - 1]`, the sizes of all axes but the last; None for rows of one axis.
    """

    data: np.ndarray
    offsets: np.ndarray
    shapes: np.ndarray | None

    @staticmethod
    def from_batch(items: Sequence[Any], item_rank: int | None = None) -> "PreparedBatch":
        """Prepares rows, all of as many axes.

        Raises:
            ValueError: a row has another number of axes.
        """
        rows = [np.asarray(item) for item in items]
        rank = item_rank if item_rank is not None else rows[0].ndim if rows else 1
        if wrong := [row.shape for row in rows if row.ndim != rank]:
            raise ValueError(f"expected rows of {rank} axes, got one of shape {wrong[0]}")
        data = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.zeros(0)
        offsets = np.cumsum([row.size for row in rows], dtype=np.int64)
        shapes = np.array([row.shape[:-1] for row in rows], np.int64).reshape(len(rows), rank - 1)
        return PreparedBatch(data, offsets, shapes if rank > 1 else None)

    def astype(self, dtype: PyTree) -> "PreparedBatch":
        """The rows with another dtype."""
        return PreparedBatch(self.data.astype(dtype), self.offsets, self.shapes)


class JaggedArrayStore:
    """Rows of different sizes in one array that grows.

    Attributes:
        offsets, data, shapes: the arrays of TensorStore, see the module.
        item_rank: axes of a row.
    """

    def __init__(self, offsets: PyTree, data: PyTree, shapes: PyTree, item_rank: int):
        self.offsets, self.data, self.shapes, self.item_rank = offsets, data, shapes, item_rank
        self._ends: np.ndarray | None = None

    @staticmethod
    def open(
        path: str | None, *, mode: str = "a", item_rank: int = 1, dtype: PyTree, cache_metadata: bool = False
    ) -> "JaggedArrayStore":
        """Opens or creates a store.

        Args:
            path: its folder; None for one in memory.
            mode: `r` to read, `w` to begin anew, `a` to append.
            item_rank: axes of a row.
            dtype: of the values.
            cache_metadata: accepted for compatibility; what is known of the rows is always kept.

        Raises:
            ValueError: another mode, or rows without an axis.
            FileNotFoundError: there is no store to read.
        """
        del cache_metadata
        if mode not in _MODES or item_rank < 1:
            raise ValueError(f"mode must be one of r, w, a and item_rank at least 1, got {mode!r} and {item_rank}")
        at = {name: None if path is None else join(path, name) for name in ("offsets", "data", "shapes")}
        offsets = _open(at["offsets"], (), np.int64, mode)
        data = _open(at["data"], (), dtype, mode)
        shapes = _open(at["shapes"], (item_rank - 1,), np.int64, mode) if item_rank > 1 else None
        return JaggedArrayStore(offsets, data, shapes, item_rank)

    @staticmethod
    async def open_async(path: str | None, **keys: PyTree) -> "JaggedArrayStore":
        """`open`, in another thread."""
        return await _in_thread(lambda: JaggedArrayStore.open(path, **keys))

    # --- sizes ---

    @property
    def ends(self) -> np.ndarray:
        """int64 `[rows + 1]`: where each row begins; the last entry is the number of values."""
        if self._ends is None:
            rows = int(self.offsets[0].read().result())
            self._ends = np.concatenate([np.zeros(1, np.int64), self.offsets[1 : rows + 1].read().result()])
        return self._ends

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        # Without the ends of the rows, of which there may be millions.
        return len(self._ends) - 1 if self._ends is not None else int(self.offsets[0].read().result())

    def __len__(self) -> int:
        return self.num_rows

    @property
    def data_size(self) -> int:
        """The number of values of all rows."""
        return int(self.ends[-1])

    def reload(self) -> "JaggedArrayStore":
        """The store with the rows that it has by now."""
        return JaggedArrayStore(self.offsets, self.data, self.shapes, self.item_rank)

    async def reload_async(self) -> "JaggedArrayStore":
        """`reload`."""
        return self.reload()

    # --- writing ---

    def append(self, row: PyTree) -> None:
        """Adds one row at the end."""
        self.extend([row])

    def extend(self, rows: Sequence[Any] | PreparedBatch) -> None:
        """Adds rows at the end.

        Raises:
            ValueError: a row has another number of axes, or a value that the store's integers do not have.
        """
        batch = rows if isinstance(rows, PreparedBatch) else PreparedBatch.from_batch(rows, self.item_rank)
        axes = 1 if batch.shapes is None else batch.shapes.shape[1] + 1
        if axes != self.item_rank:
            raise ValueError(f"expected rows of {self.item_rank} axes, got {axes}")
        count, values = len(batch.offsets), self.data_size
        if not count:
            return
        ends = batch.offsets + values
        with np.errstate(invalid="ignore"):
            stored = batch.data.astype(self.data.dtype.numpy_dtype)
        # An id beyond the dtype would come back as another one. Floats may lose digits, integers nothing.
        if np.issubdtype(stored.dtype, np.integer) and not np.array_equal(stored, batch.data):
            lost = batch.data[stored != batch.data][0]
            raise ValueError(f"{lost} cannot be stored as {stored.dtype}, the dtype of the exemplar")
        writes = [self.data[values : values + len(batch.data)].write(stored)]
        writes.append(self.offsets[self.num_rows + 1 : self.num_rows + count + 1].write(ends))
        if self.shapes is not None:
            writes.append(self.shapes[self.num_rows : self.num_rows + count].write(batch.shapes))
        for write in writes:
            write.result()
        # Their number last: a reader never sees a row that is not complete.
        self.offsets[0].write(self.num_rows + count).result()
        self._ends = np.concatenate([self.ends, ends])

    def trim_to_size(self, size: int) -> None:
        """Removes the rows from `size` on, and their values."""
        if size >= self.num_rows:
            return
        self.offsets[0].write(size).result()
        begin, stop = int(self.ends[size]), self.data_size
        # Zeros are the fill value: chunks of nothing else are deleted.
        self.data[begin:stop].write(np.zeros((), self.data.dtype.numpy_dtype)).result()
        self.offsets[size + 1 : self.num_rows + 1].write(0).result()
        if self.shapes is not None:
            self.shapes[size : self.num_rows].write(0).result()
        self._ends = self.ends[: size + 1]

    async def append_async(self, row: PyTree) -> None:
        """`append`, in another thread."""
        await _in_thread(lambda: self.append(row))

    async def extend_async(self, rows: Sequence[Any] | PreparedBatch) -> None:
        """`extend`, in another thread."""
        await _in_thread(lambda: self.extend(rows))

    async def trim_to_size_async(self, size: int) -> None:
        """`trim_to_size`, in another thread."""
        await _in_thread(lambda: self.trim_to_size(size))

    # --- reading ---

    def get_batch_sync(self, indices: Sequence[int]) -> list[np.ndarray]:
        """The rows with these indices.

        Raises:
            IndexError: there is no such row.
        """
        rows = [int(index) + (self.num_rows if index < 0 else 0) for index in indices]
        if outside := [index for index, row in zip(indices, rows, strict=True) if not 0 <= row < self.num_rows]:
            raise IndexError(f"row {outside[0]} of {self.num_rows}")
        # All reads begin before the first is awaited.
        values = [self.data[int(self.ends[row]) : int(self.ends[row + 1])].read() for row in rows]
        if self.shapes is None:
            return [value.result() for value in values]
        shapes = [self.shapes[row].read() for row in rows]
        return [_shaped(v.result(), s.result()) for v, s in zip(values, shapes, strict=True)]

    async def get_batch(self, indices: Sequence[int]) -> list[np.ndarray]:
        """`get_batch_sync`, in another thread."""
        return await _in_thread(lambda: self.get_batch_sync(indices))

    async def get_item_async(self, index: int) -> np.ndarray:
        """The row with this index."""
        return (await self.get_batch([index]))[0]

    def __getitem__(self, item: int | slice) -> PyTree:
        if isinstance(item, slice):
            return self.get_batch_sync(range(*item.indices(self.num_rows)))
        return self.get_batch_sync([item])[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(self.num_rows))


def _shaped(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    rest = int(np.prod(sizes))
    return values.reshape(*sizes, values.size // rest if rest else 0)


async def _in_thread(function: PyTree) -> PyTree:
    return await asyncio.get_running_loop().run_in_executor(_threads, function)


class TreeStore:
    """Rows that are trees of arrays of different sizes: a `JaggedArrayStore` for each leaf.

    Attributes:
        tree: the exemplar's tree, its leaves the stores.
        path: the folder; None for a store in memory.
        mode: how it was opened.
        scalars: for each leaf, whether its rows are single numbers, which are stored as rows of one.
    """

    def __init__(self, tree: PyTree, path: str | None, mode: str, scalars: Sequence[bool] | None = None):
        self.tree, self.path, self.mode = tree, path, mode
        self.scalars = [False] * len(self._stores) if scalars is None else list(scalars)

    @staticmethod
    def open(exemplar: PyTree, path: str | None, *, mode: str = "a", cache_metadata: bool = False) -> "TreeStore":
        """Opens or creates a store of rows like an exemplar, whose leaves give dtypes and numbers of axes."""
        del cache_metadata

        def leaf_store(keys: PyTree, leaf: PyTree) -> JaggedArrayStore:
            array = np.asarray(leaf)
            folder = None if path is None else join(path, *path_string(keys).split("."))
            # Numbers are stored as rows of one value.
            return JaggedArrayStore.open(folder, mode=mode, item_rank=max(array.ndim, 1), dtype=array.dtype)

        # A list is a leaf: rows may hold plain lists of numbers.
        tree = jax.tree_util.tree_map_with_path(leaf_store, exemplar, is_leaf=_is_list)
        scalars = [np.ndim(leaf) == 0 for leaf in jax.tree.leaves(exemplar, is_leaf=_is_list)]
        return TreeStore(tree, path, mode, scalars)

    @property
    def _stores(self) -> list[JaggedArrayStore]:
        return jax.tree.leaves(self.tree)

    @property
    def batch_preparer(self) -> "BatchPreparer":
        """A function that prepares rows for `extend_with_batch`."""
        return BatchPreparer([store.item_rank for store in self._stores], jax.tree.structure(self.tree))

    def extend(self, batch: PyTree) -> None:
        """Adds rows at the end: a list of trees, a mapping of columns, or an Arrow batch."""
        self.extend_with_batch(self.batch_preparer(list_rows(batch)))

    def extend_with_batch(self, batch: PyTree) -> None:
        """Adds rows at the end, from one tree whose leaves are lists of rows, or prepared ones."""
        leaves = jax.tree.structure(self.tree).flatten_up_to(batch)
        for store, rows in zip(self._stores, leaves, strict=True):
            store.extend(rows)

    async def extend_with_batch_async(self, batch: PyTree) -> None:
        """`extend_with_batch`, in another thread."""
        await _in_thread(lambda: self.extend_with_batch(batch))

    def trim_to_size(self, size: int) -> None:
        """Removes the rows from `size` on."""
        for store in self._stores:
            store.trim_to_size(size)

    def reload(self) -> "TreeStore":
        """The store with the rows that it has by now."""
        return TreeStore(jax.tree.map(lambda store: store.reload(), self.tree), self.path, self.mode, self.scalars)

    def __len__(self) -> int:
        return min((len(store) for store in self._stores), default=0)

    async def async_len(self) -> int:
        """The number of rows."""
        return len(self)

    def get_batch_sync(self, indices: Sequence[int]) -> list[PyTree]:
        """The rows with these indices."""
        columns = [
            [row.reshape(()) for row in store.get_batch_sync(indices)] if scalar else store.get_batch_sync(indices)
            for store, scalar in zip(self._stores, self.scalars, strict=True)
        ]
        structure = jax.tree.structure(self.tree)
        return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]

    async def get_batch(self, indices: Sequence[int]) -> list[PyTree]:
        """`get_batch_sync`, in another thread."""
        return await _in_thread(lambda: self.get_batch_sync(indices))

    def __getitem__(self, item: int | slice) -> PyTree:
        if isinstance(item, slice):
            return self.get_batch_sync(range(*item.indices(len(self))))
        return self.get_batch_sync([item])[0]

    def __iter__(self) -> Iterator[PyTree]:
        return (self[row] for row in range(len(self)))


def list_rows(batch: PyTree) -> list[Any]:
    """A processor's result as a list of rows: it may be one already, a mapping of columns, or an Arrow batch.

    Raises:
        ValueError: the columns differ in length.
    """
    if hasattr(batch, "to_pylist"):
        return batch.to_pylist()
    if not isinstance(batch, Mapping):
        return list(batch)
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a batch differ in length: {lengths}")
    return [{name: batch[name][n] for name in batch} for n in range(next(iter(lengths.values()), 0))]


def _is_list(value: object) -> bool:
    return isinstance(value, list) and not any(isinstance(item, Mapping) for item in value)


@dataclasses.dataclass(frozen=True)
class BatchPreparer:
    """Prepares lists of rows, each a tree, as one tree of `PreparedBatch`es."""

    ranks: list[int]
    structure: PyTree

    def __call__(self, batch: Sequence[PyTree]) -> PyTree:
        rows = [self.structure.flatten_up_to(row) for row in batch]
        columns = [
            PreparedBatch.from_batch([np.atleast_1d(np.asarray(row[n])) for row in rows], rank)
            for n, rank in enumerate(self.ranks)
        ]
        return jax.tree.unflatten(self.structure, columns)
