"""`read_quantization`: the stored format that the `quantization_config` of a config.json describes."""

from collections.abc import Mapping
from typing import Any, Protocol

from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.quantized.compressed_tensors import METHOD as COMPRESSED_TENSORS
from levanter.compat.hf.quantized.compressed_tensors import read_compressed_tensors
from levanter.compat.hf.quantized.fp8_blocks import METHOD as FP8
from levanter.compat.hf.quantized.fp8_blocks import read_fp8_blocks
from levanter.compat.hf.quantized.source import FIELD, DequantizingSource
from levanter.compat.hf.safetensors import SafetensorsSource

_READERS = {COMPRESSED_TENSORS: read_compressed_tensors, FP8: read_fp8_blocks}
_SUPPORTED = (
    "compressed-tensors with symmetric 8-bit integers per output channel and activations as they are (W8A16), and fp8 "
    "with a scale for each block of weights, are read"
)


class QuantizedFormat(Protocol):
    """A stored format of weights, with what config.json says of it."""

    @property
    def description(self) -> str | None:
        """The format in a few words; None where the dtype of the tensors says it."""
        ...

    def open(self, source: SafetensorsSource) -> DequantizingSource:
        """The tensors of files in this format.

        Raises:
            CheckpointError: the files are not in the format.
        """
        ...


def read_quantization(document: Mapping[str, Any], *, where: object) -> QuantizedFormat | None:
    """The stored format that a config.json describes; None if weights are not quantized.

    Args:
        document: the config.json.
        where: its name in messages.

    Raises:
        CheckpointError: the format is not supported; names it.
    """
    block = document.get(FIELD)
    if block is None:
        return None
    suggestion = f"{_SUPPORTED}; give the checkpoint before it was quantized, and `quantize: int8`"
    if not isinstance(block, Mapping):
        raise CheckpointError(where, f"{FIELD} is {block!r:.60}, expected a mapping", suggestion=suggestion)
    # The method alone is checked here; each format checks its own keys. No header of a weight file is read before.
    method = block.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        # GPTQ and AWQ write `bits`, compressed-tensors' relatives `num_bits`; a message without a width is fine too.
        bits = block.get("bits") or block.get("num_bits")
        width = f" of {bits} bits" if isinstance(bits, int) else ""
        problem = f"weights are quantized by {method!r:.40}{width} ({FIELD}.quant_method), which is not read"
        raise CheckpointError(where, problem, suggestion=suggestion)
    return _READERS[method](block, where=where, suggestion=suggestion)


def without_quantization(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json without its `quantization_config`, as that of the unquantized model."""
    return {key: value for key, value in document.items() if key != FIELD}
