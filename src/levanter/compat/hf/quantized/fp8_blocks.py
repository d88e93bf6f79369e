"""FP8 weights with a scale for each block, as DeepSeek-V3 and Qwen3-FP8 store them.

In the place of a matrix `X` there are its values divided by scales, `X` in float8_e4m3fn, and the scales,
`X_scale_inv`, one for each block of `weight_block_size` (128 x 128) elements of the last two axes. The last block of an
axis may be incomplete. In spite of its name, a value is *multiplied* by `scale_inv`. The product is in float32; the
loader rounds it once, to the dtype of the leaf.

Format: `inference/kernel.py` of https://github.com/deepseek-ai/DeepSeek-V3 (`weight_dequant`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from haliax_ext.sources import Index, TensorInfo
from levanter.compat.hf.errors import CheckpointError, raise_if
from levanter.compat.hf.quantized.source import (
    FIELD,
    DequantizingSource,
    QuantizedTensor,
    StoredPart,
    block_counts,
    spread_blocks,
)
from levanter.compat.hf.safetensors import SafetensorsSource

METHOD = "fp8"
"""`quant_method` of the format."""
SCALE_INV = "_scale_inv"
"""The suffix of the name of a weight's scales."""
VALUES = np.dtype(ml_dtypes.float8_e4m3fn)
"""The dtype of the values."""
SCALES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
"""Dtypes of scales: DeepSeek-V3 has float32, Qwen3-FP8 bfloat16."""
_FLOAT32 = np.arange(256, dtype=np.uint8).view(VALUES).astype(np.float32)
"""The number of each byte."""
_FLOAT8 = tuple(np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))


@dataclass(frozen=True)
class _DecodeBlocks:
    """Multiplies each value by the scale of its block."""

    block: tuple[int, ...]

    def __call__(self, components: Sequence[np.ndarray], index: Index, out: np.ndarray) -> None:
        values, scales = components
        # A table is several times as fast as the cast of ml_dtypes, which converts one value at a time.
        np.take(_FLOAT32, values.view(np.uint8), out=out, mode="clip")
        # A NaN or an infinity stays one: the loader reports weights that are not finite by name.
        out *= spread_blocks(scales.astype(np.float32), self.block, index)


@dataclass(frozen=True, kw_only=True)
class Fp8BlockFormat:
    """FP8 values and a scale for each block of a matrix.

    Attributes:
        block: rows and columns of a block.
    """

    block: tuple[int, int] = (128, 128)

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"{VALUES.name} in {self.block[0]} x {self.block[1]} blocks"

    def open(self, source: SafetensorsSource) -> DequantizingSource:
        """The weights in float32, computed from values and scales.

        Raises:
            CheckpointError: values without scales, scales without values, or shapes or dtypes of another format.
        """
        stored = source.tensors
        # From both sides, so that values without scales and scales without values are found. config.json's
        # `modules_to_not_convert` is not needed: weights that are not quantized have neither.
        scaled = [name.removesuffix(SCALE_INV) for name in stored if name.endswith(SCALE_INV)]
        values = [name for name, info in stored.items() if info.dtype in _FLOAT8]
        names = tuple(dict.fromkeys((*values, *scaled)))
        problems = [problem for name in names if (problem := _matrix_problem(name, stored)) is not None]
        raise_if(CheckpointError, ", ".join(source.readers), problems)
        return DequantizingSource(source, [self.tensor(name, stored[name].shape) for name in names])

    def tensor(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        """A matrix, or matrices stacked along outer axes, that is stored in blocks.

        Args:
            name: of the weight.
            shape: of the weight.
        """
        # Blocks span the last two axes only: stacked matrices (experts) share no scale.
        # Experts may be stacked in one tensor: each matrix has a grid of blocks of its own.
        block = (*(1 for _ in shape[:-2]), *self.block)
        return QuantizedTensor(
            name=name,
            shape=shape,
            dtype=np.dtype(np.float32),
            components=(
                StoredPart(name=name, shape=shape, dtypes=(VALUES,), block=tuple(1 for _ in shape)),
                StoredPart(
                    name=name + SCALE_INV, shape=block_counts(shape, block), dtypes=SCALES, block=block, cached=True
                ),
            ),
            decode=_DecodeBlocks(block),
        )


def _matrix_problem(name: str, stored: Mapping[str, TensorInfo]) -> str | None:
    info = stored.get(name)
    if info is None:
        return f"tensor {name!r} is missing: there are its scales, {name + SCALE_INV!r}, expected {VALUES.name} values"
    if len(info.shape) < 2:
        return f"tensor {name!r} has shape {list(info.shape)}, expected a matrix: blocks are rows by columns"
    return None


def read_fp8_blocks(block: Mapping[str, Any], *, where: object, suggestion: str) -> Fp8BlockFormat:
    """Reads a `quantization_config` of method `fp8`.

    Args:
        block: the `quantization_config`.
        where: the name of config.json in messages.
        suggestion: what to do about another variant of the format.

    Raises:
        CheckpointError: scales are not for blocks of weights, or activations have stored scales.
    """
    problems: list[str] = []
    if block.get("fmt", "e4m3") != "e4m3":
        problems.append(f"{FIELD}.fmt is {block['fmt']!r:.40}, not 'e4m3'")
    # `dynamic` leaves no trace in the files: scales of activations are computed during the run.
    if block.get("activation_scheme", "dynamic") != "dynamic":
        problems.append(f"{FIELD}.activation_scheme is {block['activation_scheme']!r:.40}, not 'dynamic'")
    size = block.get("weight_block_size")
    # Without sizes there is one scale per tensor, `weight_scale`. `True` is an `int` to isinstance, hence `type`.
    is_size = isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not is_size:
        problems.append(f"{FIELD}.weight_block_size is {size!r:.40}, expected two sizes: a scale for each block")
    raise_if(CheckpointError, where, problems, suggestion=suggestion)
    rows, columns = block["weight_block_size"]
    return Fp8BlockFormat(block=(rows, columns))
