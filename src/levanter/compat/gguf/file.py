"""What a GGUF file says of itself: metadata and where its tensors are, without touching a weight.

The `gguf` library parses the file; what it found is copied into plain values and the file is let go, so nothing stays
mapped. *Quantized* tensors are stored in blocks of 32 or 256 numbers along their last axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter.compat.gguf.header import check_header
from levanter.compat.hf.errors import CorruptFileError, MissingCheckpointFileError, raise_if

MAGIC = b"GGUF"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file.

    Attributes:
        name: llama.cpp's name.
        shape: row-major shape (GGUF writes it reversed).
        kind: name of the storage type, as `F32` or `Q4_1`.
        block: numbers in a block.
        block_bytes: bytes of a block.
        start: where its bytes begin in the file.
        nbytes: how many.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    block: int
    block_bytes: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was parsed.

    Attributes:
        path: where it is.
        metadata: key → value; arrays are lists.
        tensors: llama.cpp name → tensor, by position in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def quantization(self) -> str:
        """The storage type that most of the weights have, as `Q4_1`."""
        total: dict[str, int] = {}
        for tensor in self.tensors.values():
            numbers = tensor.nbytes // tensor.block_bytes * tensor.block
            total[tensor.kind] = total.get(tensor.kind, 0) + numbers
        return max(total, key=lambda kind: total[kind]) if total else "empty"

    def get(self, key: str, default: object = None) -> Any:
        """The value of a metadata key, or `default` where the file has no such key."""
        return self.metadata.get(key, default)


def open_gguf(path: str | Path) -> GgufFile:
    """Parses a GGUF file.

    Raises:
        MissingCheckpointFileError: there is none.
        CorruptFileError: it is not GGUF, or damaged, or shorter than it says.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingCheckpointFileError(path, "there is no such file") from None
    if magic != MAGIC:
        raise CorruptFileError(path, f"it is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    check_header(path)
    metadata, tensors = _parse(path)
    size = path.stat().st_size
    raise_if(
        CorruptFileError,
        path,
        [
            f"truncated: tensor {tensor.name!r} ends at byte {tensor.start + tensor.nbytes}, the file at {size}"
            for tensor in tensors
            if tensor.start + tensor.nbytes > size
        ],
    )
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in sorted(tensors, key=lambda t: t.start)})


def _parse(path: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    from gguf import GGML_QUANT_SIZES, GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        # The library trips over whatever it reads first beyond the end of a cut file.
        raise CorruptFileError(
            path,
            f"it is a damaged or truncated GGUF file ({path.stat().st_size} bytes; {error})",
            suggestion="download or copy the file again",
        ) from error
    tensors = []
    for tensor in reader.tensors:
        block, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors.append(
            StoredTensor(
                tensor.name, shape, tensor.tensor_type.name, block, block_bytes, tensor.data_offset, tensor.n_bytes
            )
        )
    return metadata, tensors
