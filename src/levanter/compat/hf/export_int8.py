"""Exports with int8 weights: the tensors that replace a matrix, and the `quantization_config` that describes them.

A matrix is quantized on the host when it is written, from the values of the model and not from those rounded to the
export's dtype. So an export equals what `quantize: int8` loads from the same model, bit for bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import WeightRules
from haliax_ext.saving import OutTensor
from levanter.compat.hf.quantized.compressed_tensors import (
    PACKED_NAME,
    SCALE,
    SHAPE_NAME,
    packed,
    packed_shape,
    quantization_block,
    quantized_rows,
)

UNPACKED = 4
"""Input features must be a multiple of this, or the packed shape would not determine their number."""


class Int8ExportError(ValueError):
    """A model's matrices cannot be written as int8."""


@dataclass(frozen=True)
class StoredInt8Tensor:
    """A tensor as it is stored in a file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Int8Tensor(OutTensor):
    """A matrix `[out, in]` that is written as packed integers and scales; `dtype` is that of its values."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes as written."""
        return sum(stored.nbytes for stored in stored_tensors(self))


def stored_tensors(tensor: OutTensor) -> tuple[StoredInt8Tensor, ...]:
    """The stored tensors of a tensor of the export, in order."""
    if not isinstance(tensor, Int8Tensor):
        return (StoredInt8Tensor(tensor.name, tensor.dtype, tensor.shape),)
    return (
        StoredInt8Tensor(tensor.name + PACKED_NAME, np.dtype(np.int32), packed_shape(tensor.shape)),
        StoredInt8Tensor(tensor.name + SCALE, np.dtype(np.float32), (tensor.shape[0], 1)),
        StoredInt8Tensor(tensor.name + SHAPE_NAME, np.dtype(np.int64), (2,)),
    )


def encode(tensor: OutTensor, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays of the tensors that `stored_tensors` lists, in that order."""
    if not isinstance(tensor, Int8Tensor):
        return (values,)
    q, scale = quantized_rows(values)
    # The shape is stored because the packed columns are rounded up to a multiple of four.
    return packed(q), scale, np.asarray(values.shape, np.int64)


def quantize_tensors(
    tensors: Sequence[OutTensor],
    model_leaves: Sequence[Leaf],
    rules: WeightRules,
    inputs: Mapping[str, tuple[str, ...]],
) -> tuple[OutTensor, ...]:
    """Converts the projections among an export's tensors to int8.

    Args:
        tensors: the tensors of the export without quantization.
        model_leaves: the model's leaves.
        rules: the mapping from leaves to tensors.
        inputs: paths of the leaves that are int8, with the names of their contracted axes.

    Raises:
        Int8ExportError: rows of a matrix are not output channels, or not a multiple of four long; lists them.
    """
    table, dtypes = rules.by_target(), {leaf.path: leaf.dtype for leaf in model_leaves}
    problems: dict[str, None] = {}
    converted: list[OutTensor] = []
    for tensor in tensors:
        # A tensor of the file may hold several leaves (gate and up); it is int8 only if all of them are.
        targets = [piece.target for piece in tensor.pieces]
        if not all(target in inputs for target in targets):
            converted.append(tensor)
            continue
        # All leaves of a fused tensor have the same axes but for the fused one, so the first rule stands for all.
        rule = table[targets[0]]
        # A scale is per row of the file's matrix; that is an output
        # channel only if the columns are the contracted axes.
        if len(rule.axes) != 2 or any(set(table[t].axes[1]) != set(inputs[t]) for t in targets):
            problems[f"rows of {rule.source} are not output channels, and the format has no other kind"] = None
        elif tensor.shape[1] % UNPACKED:
            message = f"{rule.source} has {tensor.shape[1]} input features, which is not a multiple of {UNPACKED}"
            problems[message] = None
        else:
            # The same tensor in the dtype of the leaf: quantization starts from the values of the model, not from those
            # rounded to the dtype of the export.
            attributes = {field.name: getattr(tensor, field.name) for field in fields(tensor)}
            converted.append(Int8Tensor(**{**attributes, "dtype": dtypes[targets[0]]}))
    if problems:
        raise Int8ExportError("\n".join(f"int8: {problem}" for problem in problems) + "\n  → int8: false")
    return tuple(converted)


def quantization_config(
    model_leaves: Sequence[Leaf], rules: WeightRules, inputs: Mapping[str, tuple[str, ...]], linear: Sequence[str]
) -> Mapping[str, Any]:
    """`quantization_config` of an export.

    Args:
        model_leaves: the model's leaves.
        rules: the mapping from leaves to tensors.
        inputs: see `quantize_tensors`.
        linear: paths of the weights of all projections of the model; those not in `inputs` are listed under `ignore`.
    """
    table, leaves = rules.by_target(), {leaf.path: leaf for leaf in model_leaves}
    unquantized = [path for path in linear if path not in inputs and path in table]
    ignored = [name.removesuffix(".weight") for path in unquantized for name in table[path].source_names(leaves[path])]
    if not any("vocab" in leaves[path].names for path in inputs):
        # The head is the embedding table and has no tensor, but readers still create a Linear module for it.
        is_neox = any(rule.source.startswith("gpt_neox.") for rule in rules.rules)
        # Listed under the name that the reader's module has, since no tensor of ours carries it.
        ignored.append("embed_out" if is_neox else "lm_head")
    return quantization_block(ignored)
