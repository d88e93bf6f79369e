"""`SafetensorsSource`: reads slices of tensors from safetensors files; a slice costs the bytes of the slice.

Opening reads only headers (in parallel for several files). `read` maps a slice to a `BlockGrid`, and fills
the caller's array directly wherever that array is contiguous: for a whole tensor, or a range of its first axis, that
is one `preadv` into the final place.
"""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np

from haliax_ext.sources import Index, TensorInfo
from levanter.compat.hf.errors import CorruptFileError, raise_if
from levanter.compat.hf.header import ShardHeader, TensorEntry, read_header
from levanter.compat.hf.readers import ByteReader, LocalFile, RemoteFile, RemoteFiles
from levanter.compat.hf.strided_reads import GridRanges, block_grid, read_region


class SafetensorsSource:
    """Named tensors of one or more safetensors files.

    Attributes:
        readers: file name → reader. `byte_ranges` uses the same file names.
        headers: one per file.
        metadata: the files' `__metadata__`, merged.
        notes: what a user should know about how the tensors were found.
    """

    def __init__(
        self,
        readers: Mapping[str, ByteReader],
        headers: Iterable[ShardHeader] | None = None,
        *,
        notes: Iterable[str] = (),
    ):
        """Opens the files of a checkpoint.

        Args:
            readers: file name → reader.
            headers: one per file; read from the files if omitted.
            notes: see the class.

        Raises:
            CorruptFileError: a header is damaged, or two files hold a tensor of the same name.
        """
        self.readers = dict(sorted(readers.items()))
        self.headers = tuple(read_headers(self.readers) if headers is None else headers)
        self.notes = tuple(notes)
        self._entries: dict[str, tuple[str, TensorEntry]] = {}
        self.metadata: dict[str, str] = {}
        duplicates = []
        # Sorted, so that `metadata` and the messages do not depend on the order in which headers were read.
        for header in sorted(self.headers, key=lambda header: header.file):
            self.metadata.update(header.metadata)
            for entry in header.tensors:
                if entry.name in self._entries:
                    duplicates.append(
                        f"tensor {entry.name!r} is both in {self._entries[entry.name][0]} and in {header.file}"
                    )
                self._entries[entry.name] = (header.file, entry)
        raise_if(CorruptFileError, ", ".join(self.readers), duplicates)
        self._tensors = MappingProxyType(
            {
                name: TensorInfo(name, entry.shape, entry.dtype, entry.stop - entry.start)
                for name, (_, entry) in self._entries.items()
            }
        )
        self._lock = threading.Lock()
        self._bytes_read = 0

    @classmethod
    def from_files(cls, *paths: str | Path) -> "SafetensorsSource":
        """A source over local files, named by their paths."""
        return cls({str(path): LocalFile(Path(path)) for path in paths})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by file and position in the file."""
        return self._tensors

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from storage so far, gaps included."""
        return self._bytes_read

    @property
    def remote(self) -> RemoteFiles | None:
        """The files, if they are remote; None for local ones."""
        files = tuple(reader for reader in self.readers.values() if isinstance(reader, RemoteFile))
        return RemoteFiles(files) if files else None

    def byte_ranges(self, name: str, index: Index) -> GridRanges:
        """The bytes that reading `index` of `name` touches; a lazy sequence with a constant-time `nbytes`."""
        file, entry = self._entries[name]
        reader = self.readers[file]
        grid = block_grid(entry.shape, entry.dtype.itemsize, index, max_gap=reader.max_gap, page=reader.page)
        return GridRanges(file, entry.start, grid)

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """The slice in the tensor's dtype, written into `out` (same shape and dtype) if given."""
        file, entry = self._entries[name]
        shape = tuple(piece.stop - piece.start for piece in index)
        if out is None:
            out = np.empty(shape, dtype=entry.dtype)
        # The fast path views `out` as bytes, which is right only for exactly this shape and dtype.
        assert out.shape == shape and out.dtype == entry.dtype, (out.shape, shape, out.dtype, entry.dtype)
        # Outside the lock: reads of several threads run at the same time, only the counter is shared.
        bytes_read = read_region(self.readers[file], entry.start, entry.shape, index, out)
        with self._lock:
            self._bytes_read += bytes_read
        return out

    def read_adjacent(self, slices: Sequence[tuple[str, Index, np.ndarray]]) -> None:
        """Fills arrays with slices that follow one another in a file, by one request if it is remote."""
        file, _ = self._entries[slices[0][0]]
        reader = self.readers[file]
        if not isinstance(reader, RemoteFile):
            for name, index, out in slices:
                self.read(name, index, out)
            return
        ranges = [byte_range for name, index, _ in slices for byte_range in self.byte_ranges(name, index)]
        # The caller (read coalescing) promises adjacency; one request then fills all arrays in order.
        assert all(a.file == b.file and a.stop == b.start for a, b in itertools.pairwise(ranges)), ranges
        # Each array is viewed as flat bytes: the adjacent slices are contiguous, so they arrive in memory order.
        reader.read_range(ranges[0].start, *(out.reshape(-1).view(np.uint8).data for _, _, out in slices))
        with self._lock:
            self._bytes_read += ranges[-1].stop - ranges[0].start


def read_headers(readers: Mapping[str, ByteReader]) -> list[ShardHeader]:
    """The headers of several files, read in parallel; all damaged files are reported together."""

    def one(item: tuple[str, ByteReader]) -> ShardHeader | CorruptFileError:
        try:
            return read_header(item[1], item[0])
        # Returned instead of raised, so that one damaged file does not hide the others.
        except CorruptFileError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(16, max(1, len(readers)))) as pool:
        results = list(pool.map(one, readers.items()))
    errors = [result for result in results if isinstance(result, CorruptFileError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CorruptFileError(
            f"{len(errors)} of {len(readers)} files",
            [f"{error.where}: {problem}" for error in errors for problem in error.problems],
            suggestion=next((error.suggestion for error in errors if error.suggestion), None),
        )
    return [result for result in results if isinstance(result, ShardHeader)]
