"""`CheckpointSource`: a checkpoint of ours as a `TensorSource`, so that it loads and exports like any other.

The names are the leaves' paths, without the part that says where in the training state they were. Padding is left out.
A slice is read from the pieces that hold it, and nothing else is; pieces that neighbouring slices share stay in a cache
of bounded size.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRule, WeightRules
from haliax_ext.sources import ByteRange, Index, TensorInfo
from levanter.checkpoint.errors import UnreadableCheckpointError
from levanter.checkpoint.refs import CheckpointRef, absolute
from levanter.io.paths import is_remote

if TYPE_CHECKING:
    import tensorstore

CACHE_BYTES = 256 << 20


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
        try:
            found = self._stored(name)[index].read().result()
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from error
        if out is None:
            return np.asarray(found)
        out[...] = found
        return out

    def _stored(self, name: str) -> "tensorstore.TensorStore":
        """The leaf in its store, opened once."""
        with self._lock:
            if name not in self._open:
                # Planning does without.
                import tensorstore

                if self._context is None:
                    self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": self._cache_bytes}})
                base = absolute(self._ref.arrays_path)
                base = base if is_remote(base) else f"file://{base}"
                spec = {
                    "driver": "zarr3",
                    "kvstore": {"driver": "ocdbt", "base": f"{base}/", "path": f"{self._prefix}{name}/"},
                    "recheck_cached_data": False,
                }
                opened = tensorstore.open(spec, open=True, read=True, context=self._context).result()
                saved = self._ref.leaves[f"{self._prefix}{name}"]
                if tuple(opened.shape) != saved.shape:
                    raise ValueError(f"its shape is {list(opened.shape)}, but metadata.json says {list(saved.shape)}")
                self._open[name] = opened
            return self._open[name]

    def _unreadable(self, name: str, error: Exception) -> UnreadableCheckpointError:
        text = " ".join(str(error).split())
        return UnreadableCheckpointError(
            f"{self._ref.path}: {name} cannot be read: {type(error).__name__}: {text[:300]}"
        )


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
