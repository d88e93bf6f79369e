"""`CheckpointSource`: one of our checkpoints as a `TensorSource`, so that it loads and exports like any other.

The names are the leaves' paths, without their prefix in the training state. Padding is left out. A slice is read from
the chunks that hold it and from no others; each is compared with its digest. Chunks that
neighbouring slices share stay in a cache of bounded size.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.leaf_layout import intersect, to_slices
from haliax_ext.rules import WeightRule, WeightRules
from haliax_ext.sources import ByteRange, Index, TensorInfo
from levanter.checkpoint.checksums import ArrayDigests, Box, Number, array_digest, chunks_in
from levanter.checkpoint.discovery import unreadable_error
from levanter.checkpoint.errors import UnreadableCheckpointError
from levanter.checkpoint.file_digests import check_files
from levanter.checkpoint.refs import CheckpointRef, SavedLeaf, absolute
from levanter.io.paths import is_remote

if TYPE_CHECKING:
    import tensorstore

log = logging.getLogger(__name__)
CACHE_BYTES = 256 << 20
_AHEAD = 4
"""Chunks of an array that are read at once."""


class CheckpointSource:
    """The leaves of a checkpoint below a prefix, readable by slices.

    Args:
        ref: the checkpoint.
        prefix: of the leaves that are wanted (`model.`); the names do without it.
        cache_bytes: of pieces that are kept in memory.
    """

    def __init__(self, ref: CheckpointRef, *, prefix: str = "", cache_bytes: int = CACHE_BYTES):
        self._ref, self._prefix, self._cache_bytes = ref, prefix, cache_bytes
        self._lock = threading.Lock()
        self._open: dict[str, "tensorstore.TensorStore"] = {}
        self._chunks: dict[tuple[str, Number], np.ndarray] = {}
        self._is_logged = False
        self._are_files_checked = False
        self._context: "tensorstore.Context | None" = None
        self._tensors = {
            path.removeprefix(prefix): TensorInfo(
                path.removeprefix(prefix), leaf.meant, dtype, int(np.prod(leaf.meant, dtype=np.int64)) * dtype.itemsize
            )
            for path, leaf in ref.leaves.items()
            if path.startswith(prefix)
            for dtype in [_dtype(leaf.dtype)]
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every leaf, by path."""
        return self._tensors

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """None: which bytes of which file a slice is, the storage format alone knows."""
        del name, index
        return ()

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """The slice as a NumPy array, written into `out` if given.

        Raises:
            UnreadableCheckpointError: files of the checkpoint are missing or damaged.
        """
        path = f"{self._prefix}{name}"
        leaf, digests = self._ref.leaves[path], self._ref.digests.get(path)
        if out is None:
            out = np.empty([part.stop - part.start for part in index], _dtype(leaf.dtype))
        if digests is None:
            self._log_unverified()
        self._check_files()
        try:
            if digests is None:
                # Without digests TensorStore reads exactly the slice; with them whole chunks must be read to be
                # verified.
                out[...] = self._stored(name)[index].read().result()
            else:
                self._read_chunks(name, tuple((part.start, part.stop) for part in index), digests, out)
        except (OSError, ValueError) as error:
            if isinstance(error, UnreadableCheckpointError):
                raise
            raise self._unreadable(name, str(error)) from error
        return out

    def _read_chunks(self, name: str, box: Box, digests: ArrayDigests, out: np.ndarray) -> None:
        shape = self._ref.leaves[f"{self._prefix}{name}"].shape
        touched = list(chunks_in(box, digests.chunk, shape))
        # A few chunks at a time: their reads overlap, and memory stays bounded.
        for begin in range(0, len(touched), _AHEAD):
            group = touched[begin : begin + _AHEAD]
            stored = self._stored(name)
            coming = {
                number: stored[to_slices(chunk_box)].read()
                for number, chunk_box in group
                if (name, number) not in self._chunks
            }
            for number, chunk_box in group:
                values = self._verified(name, number, coming.get(number), digests)
                common = intersect(chunk_box, box)
                assert common is not None
                # The common part in coordinates of the chunk, and below in coordinates of the slice.
                inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, chunk_box, strict=True))
                landing = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
                out[..., *to_slices(landing)] = values[..., *to_slices(inside)]
                # Only chunks that a neighbouring slice may need again are cached: those of which this slice takes a
                # part.
                if common != chunk_box and coming.get(number) is not None:
                    self._keep(name, number, values)

    def _verified(
        self, name: str, number: Number, coming: "tensorstore.Future[np.ndarray] | None", digests: ArrayDigests
    ) -> np.ndarray:
        """A chunk whose values are those that were saved."""
        if coming is None:
            with self._lock:
                kept = self._chunks.get((name, number))
            if kept is not None:
                return kept
            # Another thread may have removed the chunk from the cache since this read was planned: it is read again.
            chunk_box = tuple((n * part, (n + 1) * part) for n, part in zip(number, digests.chunk, strict=True))
            shape = self._ref.leaves[f"{self._prefix}{name}"].shape
            clipped = tuple((a, min(b, size)) for (a, b), size in zip(chunk_box, shape, strict=True))
            coming = self._stored(name)[to_slices(clipped)].read()
        values = np.asarray(coming.result())
        if array_digest(values) != digests.by_number[number]:
            raise self._unreadable(name, f"chunk {list(number)} is damaged: it is not what was saved (digests differ)")
        return values

    def _keep(self, name: str, number: Number, values: np.ndarray) -> None:
        with self._lock:
            self._chunks[name, number] = values
            # The oldest chunk goes first: dictionaries keep the order of insertion.
            while sum(chunk.nbytes for chunk in self._chunks.values()) > self._cache_bytes:
                self._chunks.pop(next(iter(self._chunks)))

    def _check_files(self) -> None:
        """Compares the small files of the checkpoint once; of several processes, each compares some."""
        with self._lock:
            if not self._are_files_checked:
                check_files(self._ref, share=jax.process_index(), shares=jax.process_count())
                self._are_files_checked = True

    def _log_unverified(self) -> None:
        with self._lock:
            is_logged, self._is_logged = self._is_logged, True
        if not is_logged:
            log.warning(
                "%s: unverified: it was saved without digests, so damage to its arrays would go unseen", self._ref
            )

    def _stored(self, name: str) -> "tensorstore.TensorStore":
        """The leaf in its store, opened once."""
        with self._lock:
            if name not in self._open:
                # Planning does without.
                import tensorstore

                if self._context is None:
                    # Verified chunks are kept here, not there.
                    limit = 0 if self._ref.digests else self._cache_bytes
                    self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": limit}})
                base = absolute(self._ref.arrays_path)
                base = base if is_remote(base) else f"file://{base}"
                spec = {
                    "driver": "zarr3",
                    "kvstore": {"driver": "ocdbt", "base": f"{base}/", "path": f"{self._prefix}{name}/"},
                    "recheck_cached_data": False,
                }
                opened = tensorstore.open(spec, open=True, read=True, context=self._context).result()
                saved = self._ref.leaves[f"{self._prefix}{name}"]
                store = SavedLeaf(shape=tuple(opened.shape), dtype=opened.dtype.name)
                if (store.shape, store.dtype) != (saved.shape, saved.dtype):
                    raise ValueError(f"the files have {store}, but metadata.json says {saved}")
                self._open[name] = opened
            return self._open[name]

    def _unreadable(self, name: str, why: str) -> UnreadableCheckpointError:
        # TensorStore repeats where all of it is.
        why = why.replace(f"{absolute(self._ref.arrays_path)}/", "")
        return unreadable_error(
            self._ref.path, self._ref.arrays, f"{self._prefix}{name} cannot be read: {first_lines(why)}"
        )


def first_lines(text: str) -> str:
    """The beginning of a library's message, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else text[:400] + " …"


def same_names(leaves: Iterable[Leaf], *, padded: Sequence[str] = ()) -> WeightRules:
    """The rules of a model whose tensors have the names and axes of its leaves.

    Args:
        leaves: the model's.
        padded: axes that may be longer in the model than in the source.
    """
    return WeightRules(
        rules=tuple(
            WeightRule(
                target=leaf.path,
                source=leaf.path,
                axes=tuple((name,) for name in leaf.names),
                padded=tuple(name for name in leaf.names if name in padded),
            )
            for leaf in leaves
        )
    )


def _dtype(name: str) -> np.dtype:
    # Importing it teaches NumPy the names of the narrow floating types.
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
