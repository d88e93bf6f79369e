"""Checkpoints with quantized weights: tensors that are computed, slice by slice, from what the files store.

`DequantizingSource` is the loader's view of such a checkpoint. A stored format lists `QuantizedTensor`s for it: the
components in the files (values, scales) and the function that decodes them. `read_quantization` chooses the format by
the `quantization_config` of config.json.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.compat.hf.quantized.compressed_tensors import Int8Format as Int8Format
    from levanter.compat.hf.quantized.formats import QuantizedFormat as QuantizedFormat
    from levanter.compat.hf.quantized.formats import read_quantization as read_quantization
    from levanter.compat.hf.quantized.formats import without_quantization as without_quantization
    from levanter.compat.hf.quantized.fp8_blocks import Fp8BlockFormat as Fp8BlockFormat
    from levanter.compat.hf.quantized.source import DequantizingSource as DequantizingSource
    from levanter.compat.hf.quantized.source import QuantizedTensor as QuantizedTensor
    from levanter.compat.hf.quantized.source import StoredPart as StoredPart
    from levanter.compat.hf.quantized.source import spread_blocks as spread_blocks

export_on_demand(__name__)
