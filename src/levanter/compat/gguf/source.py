"""`GgufSource`: a GGUF file's tensors under Hugging Face names; slices are dequantized when they are read.

Two things differ from a Hugging Face checkpoint besides the names. Quantized blocks lie along the last axis, so a slice
of columns reads all blocks that it touches. And llama.cpp stores the rows of q and k in another order: the two rows
`(i, i + size/2)` of a head, which Hugging Face rotates together, are stored as neighbours `(2i, 2i + 1)` (`permute` in
llama.cpp's convert_hf_to_gguf.py). Reading restores the order of rows.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import ml_dtypes
import numpy as np

from haliax_ext.errors import nearest
from haliax_ext.sources import ByteRange, Index, TensorInfo
from levanter.compat.gguf.file import GgufFile, StoredTensor
from levanter.compat.hf.errors import CheckpointError, raise_if
from levanter.compat.hf.readers import LocalFile
from levanter.compat.hf.strided_reads import block_grid, read_region

CHUNK_NUMBERS = 1 << 20
"""Elements dequantized at a time."""

_PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)$")
# Read by `gguf.config`, which turns it into rope parameters.
_IN_CONFIG = ("rope_freqs.weight",)


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a llama tensor; None for an unknown one."""
    match = _TENSOR.match(name)
    if match is None or match["part"] not in _NAMES:
        return None
    prefix = "" if match["layer"] is None else f"model.layers.{int(match['layer'])}."
    return f"{prefix}{_NAMES[match['part']]}.{match['kind']}"


class GgufSource:
    """The weights of a llama GGUF file, dequantized, under Hugging Face names.

    Unquantized tensors keep their dtype; quantized ones are float32.
    """

    def __init__(self, file: GgufFile, *, heads: int, kv_heads: int):
        """Opens the weights of a parsed file.

        Args:
            file: the file.
            heads: query heads.
            kv_heads: key/value heads.

        Raises:
            CheckpointError: it holds tensors with unknown names, or of types that cannot be dequantized.
        """
        self.file = file
        self._reader = LocalFile(file.path)
        self._stored: dict[str, StoredTensor] = {}
        self._heads: dict[str, int] = {}
        problems: list[str] = []
        readable: dict[str, bool] = {}
        for stored in file.tensors.values():
            if stored.name in _IN_CONFIG:
                continue
            name = hf_name(stored.name)
            if name is None:
                close = nearest(stored.name.split(".")[-2] if "." in stored.name else stored.name, _NAMES)
                hint = f" (nearest known part: {close[0]})" if close else ""
                problems.append(f"tensor {stored.name!r} does not belong to a llama model{hint}")
                continue
            # Trying a kind costs a call of the library, so it is done once for each kind.
            if stored.kind not in readable:
                readable[stored.kind] = stored.kind in _PLAIN or _can_dequantize(stored)
            if not readable[stored.kind]:
                problems.append(f"tensor {stored.name!r} is stored as {stored.kind}, which cannot be dequantized")
            self._stored[name] = stored
            # Values and outputs are not rotated, so llama.cpp leaves their rows as they are.
            for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if f".{part}." in name:
                    self._heads[name] = count
                    if stored.shape[0] % (2 * count):
                        problems.append(f"tensor {stored.name!r} has {stored.shape[0]} rows for {count} heads")
        raise_if(CheckpointError, file.path, problems)
        self._tensors = MappingProxyType(
            {
                name: TensorInfo(name, stored.shape, np.dtype(_PLAIN.get(stored.kind, np.float32)), stored.nbytes)
                for name, stored in self._stored.items()
            }
        )
        self._lock = threading.Lock()
        self._bytes_read = 0

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by position in the file."""
        return self._tensors

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from the file so far."""
        return self._bytes_read

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """The bytes that reading `index` of `name` touches."""
        stored = self._stored[name]
        ranges: list[ByteRange] = []
        for _, rows in self._pieces(name, index):
            # Ranges are counted in bytes (item size 1), over whole blocks along the last axis.
            shape, region = _byte_region(stored, rows)
            grid = block_grid(shape, 1, region, max_gap=self._reader.max_gap, page=self._reader.page)
            if grid is None:
                continue
            for offset in grid.offsets().tolist():
                begin = stored.start + offset
                # Pieces that follow one another in the file are reported as one range.
                if ranges and ranges[-1].stop == begin:
                    ranges[-1] = ByteRange(ranges[-1].file, ranges[-1].start, begin + grid.span)
                else:
                    ranges.append(ByteRange(str(self.file.path), begin, begin + grid.span))
        return ranges

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """The slice, dequantized, written into `out` (same shape and dtype) if given."""
        stored, dtype = self._stored[name], self._tensors[name].dtype
        shape = tuple(piece.stop - piece.start for piece in index)
        if out is None:
            out = np.empty(shape, dtype)
        assert out.shape == shape and out.dtype == dtype, (out.shape, shape, out.dtype, dtype)
        if 0 in shape:
            return out
        heads, first = self._heads.get(name), index[0].start
        # `wanted` are Hugging Face's rows, `stored_index` the range of the file that contains them.
        for requested, stored_index in self._pieces(name, index):
            numbers = self._dequantized(stored, stored_index)
            if heads is not None:
                # Fancy indexing undoes the permutation among the rows that were read.
                rows = _stored_rows(np.arange(requested.start, requested.stop), stored.shape[0] // heads)
                numbers = numbers[rows - stored_index[0].start]
            out[requested.start - first : requested.stop - first] = numbers
        return out

    def _pieces(self, name: str, index: Index) -> Iterator[tuple[slice, Index]]:
        """Splits a slice into pieces that are read at once: the requested rows, and the region that stores them."""
        stored = self._stored[name]
        first, rest = index[0], index[1:]
        width = 1
        for size in stored.shape[1:]:
            width *= size
        rows_at_once = max(1, CHUNK_NUMBERS // width)
        # A vector's only axis is that of its blocks: pieces must begin at multiples of a block.
        if len(stored.shape) == 1:
            rows_at_once = -(-rows_at_once // stored.block) * stored.block
        if name not in self._heads:
            for start in range(first.start, first.stop, rows_at_once):
                rows = slice(start, min(first.stop, start + rows_at_once))
                yield rows, (rows, *rest)
            return
        head_size = stored.shape[0] // self._heads[name]
        step = max(1, rows_at_once // head_size) * head_size
        start = first.start
        while start < first.stop:
            # Whole heads together; a slice that begins or ends inside a head takes the rows it needs of that head.
            # From the beginning of a head: as many complete heads as fit. From inside a head: up to its end.
            stop = min(first.stop, (start // head_size) * head_size + (step if start % head_size == 0 else head_size))
            if stop % head_size and stop - start > head_size:
                stop = (stop // head_size) * head_size
            # The reordering stays within heads, so the stored rows of a piece lie within its heads; the smallest range
            # around them is read.
            rows = _stored_rows(np.arange(start, stop), head_size)
            yield slice(start, stop), (slice(int(rows.min()), int(rows.max()) + 1), *rest)
            start = stop

    def _dequantized(self, stored: StoredTensor, index: Index) -> np.ndarray:
        shape, region = _byte_region(stored, index)
        raw = np.empty([piece.stop - piece.start for piece in region], np.uint8)
        bytes_read = read_region(self._reader, stored.start, shape, region, raw)
        with self._lock:
            self._bytes_read += bytes_read
        if stored.kind in _PLAIN:
            # Bytes of the last axis regroup into numbers of the stored type.
            return raw.view(_PLAIN[stored.kind])
        from gguf import GGMLQuantizationType, quants

        # Complete blocks were read; the slice begins `offset` numbers behind the first of them.
        # dequantize maps [..., bytes] to float32 [..., numbers], block by block.
        numbers = quants.dequantize(raw, GGMLQuantizationType[stored.kind])
        offset = index[-1].start % stored.block
        return numbers[..., offset : offset + index[-1].stop - index[-1].start]


def _can_dequantize(stored: StoredTensor) -> bool:
    """Whether the library can dequantize this kind, found by trying it on one block of zeros."""
    from gguf import GGMLQuantizationType, quants

    try:
        quants.dequantize(np.zeros((1, stored.block_bytes), np.uint8), GGMLQuantizationType[stored.kind])
    except NotImplementedError:
        return False
    return True


def _stored_rows(rows: np.ndarray, head_size: int) -> np.ndarray:
    """The positions at which llama.cpp stores Hugging Face's rows of q or k."""
    head, row = np.divmod(rows, head_size)
    half, pair = np.divmod(row, head_size // 2)
    # Row i of the first half goes to 2i, row i of the second half to 2i + 1, within each head.
    return head * head_size + 2 * pair + half


def _byte_region(stored: StoredTensor, index: Index) -> tuple[tuple[int, ...], Index]:
    """Converts a slice of numbers to a slice of the array of bytes, widened to whole blocks along the last axis."""
    block, block_bytes = stored.block, stored.block_bytes
    shape = (*stored.shape[:-1], stored.shape[-1] // block * block_bytes)
    last = index[-1]
    if last.stop <= last.start:
        return shape, (*index[:-1], slice(0, 0))
    # First block that begins at or before the start, to the last block that reaches the stop.
    columns = slice(last.start // block * block_bytes, -(-last.stop // block) * block_bytes)
    return shape, (*index[:-1], columns)
