"""Reads and writes int8 weights in compressed-tensors format: 8 bits, a scale per output channel (W8A16).

Instead of `X.weight`, `[out, in]`, such a folder has `X.weight_scale`, `[out, 1]`, and the integers: plain in
`X.weight` (format `int-quantized`), or in `X.weight_packed` (`pack-quantized`, which readers expect where activations
are not quantized), `[out, in / 4]` of int32: four to one, the first in the lowest byte, each with 128 added. Packed
ones come with `X.weight_shape`. The bytes in the file are thus those of the integers except for their highest bits, so
a slice is read as one of int8 numbers. Every other variant is refused by name.

Format: https://github.com/vllm-project/compressed-tensors
"""

import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from haliax_ext.sources import Index, TensorInfo
from levanter.compat.hf.errors import CheckpointError, ConfigMismatchError, CorruptFileError, raise_if
from levanter.compat.hf.quantized.source import FIELD, DequantizingSource, QuantizedTensor, StoredPart
from levanter.compat.hf.safetensors import SafetensorsSource
from levanter.layers.quantized import LARGEST, SMALLEST_SCALE, STEP

METHOD = "compressed-tensors"
PACKED, PLAIN = "pack-quantized", ("int-quantized", "naive-quantized")
SCALE = "_scale"
"""The suffix, after the weight's name, of the tensor of its scales."""
PACKED_NAME, SHAPE_NAME = "_packed", "_shape"
"""The suffixes of the tensors that replace a packed weight."""
_ZERO_POINT = "_zero_point"
_FOUR = 4
_OFFSET = np.uint8(128)
_LISTED = 8
_QUANTIZE_AGAIN = "copy the files again, or give the checkpoint before it was quantized, and `quantize: int8`"


@dataclass(frozen=True, kw_only=True)
class Int8Format:
    """The format of int8 weights, as a config.json describes it.

    Attributes:
        packed: whether four integers are stored in one.
        targets: kinds or names of quantized modules, `re:` before regular expressions.
        ignored: exceptions among them.
    """

    packed: bool
    targets: tuple[str, ...] = ("Linear",)
    ignored: tuple[str, ...] = ()

    @property
    def description(self) -> None:
        """None: the tensors are int8."""

    def covers(self, tensor: str) -> bool:
        """Whether the weight of a linear module is int8 according to config.json."""
        module = tensor.removesuffix(".weight")
        # A name in capitals is a class of modules, and these are linear ones whatever their class is called.
        targeted = any(_matches(pattern, module) or pattern[:1].isupper() for pattern in self.targets)
        return targeted and not any(_matches(pattern, module) for pattern in self.ignored)

    def check(self, tensors: Mapping[str, TensorInfo], linear: Collection[str], *, where: object) -> None:
        """Compares which weights are int8 with what config.json says.

        Args:
            tensors: the tensors that `open` offers.
            linear: names of the weights of the model's linear modules.
            where: the name of config.json in messages.

        Raises:
            ConfigMismatchError: some weights are int8 and config.json excludes them, or the reverse; lists all.
        """
        int8 = int8_weights(tensors)
        listed = f"{FIELD}'s targets and ignore"
        excluded = [name for name in sorted(int8) if not self.covers(name)]
        floating = [name for name in sorted(linear) if name in tensors and name not in int8 and self.covers(name)]
        problems = [f"{name} is stored as int8, but {listed} exclude it" for name in excluded]
        problems += [f"{name} is stored as {tensors[name].dtype.name}, but {listed} make it int8" for name in floating]
        # A pattern that matches nothing concerns every layer; a few lines show it.
        if len(problems) > _LISTED:
            problems = [*problems[:_LISTED], f"… and {len(problems) - _LISTED} more"]
        raise_if(
            ConfigMismatchError,
            where,
            problems,
            suggestion=f"correct {FIELD}.ignore if the weights are right; readers differ in what they trust",
        )

    def open(self, source: SafetensorsSource) -> DequantizingSource:
        """Every int8 weight as int8, `[out, in]`, under its own name, and its `…weight_scale`.

        Raises:
            CheckpointError: integers without scales, or packed ones without their shape or with another one.
        """
        stored = source.tensors
        packed = {name.removesuffix(PACKED_NAME) for name in stored if name.endswith(f".weight{PACKED_NAME}")}
        int8 = packed | int8_weights(stored)
        where = ", ".join(source.readers)
        raise_if(CheckpointError, where, _tensor_problems(stored, packed, int8))
        raise_if(CorruptFileError, where, _shape_problems(source, packed), suggestion=_QUANTIZE_AGAIN)
        # Symmetric integers have zero points of 0, where they have any.
        hidden = [name + ending for name in int8 for ending in (SHAPE_NAME, _ZERO_POINT)]
        # Integers that are not packed are read as they are stored. Scales are leaves of the int8 model, not of a part.
        tensors = [_packed_tensor(name, stored[name + PACKED_NAME]) for name in sorted(packed)]
        return DequantizingSource(source, tensors, hidden=hidden)


def _matches(pattern: str, module: str) -> bool:
    # compressed-tensors matches regular expressions from the start of the name only (re.match).
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern in ("Linear", module)


def read_compressed_tensors(block: Mapping[str, Any], *, where: object, suggestion: str) -> Int8Format:
    """Reads a `quantization_config` of compressed-tensors.

    Args:
        block: the `quantization_config`.
        where: the name of config.json in messages.
        suggestion: what to do about another variant of the format.

    Raises:
        CheckpointError: weights are not W8A16; lists what differs.
    """
    raise_if(CheckpointError, where, list(_problems(block)), suggestion=suggestion)
    groups = block["config_groups"].values()
    targets = [target for group in groups for target in group.get("targets") or ("Linear",)]
    return Int8Format(
        packed=block["format"] == PACKED,
        targets=tuple(dict.fromkeys(map(str, targets))),
        ignored=tuple(map(str, block.get("ignore") or ())),
    )


def _problems(block: Mapping[str, Any]) -> Sequence[str]:
    """The settings of a compressed-tensors block that differ from W8A16."""
    problems = []
    if block.get("format") not in (PACKED, *PLAIN):
        problems.append(f"{FIELD}.format is {block.get('format')!r:.40}, not {PACKED} or {' or '.join(PLAIN)}")
    if block.get("kv_cache_scheme") is not None:
        problems.append(f"{FIELD}.kv_cache_scheme: a quantized cache of keys and values is not read")
    sparse = block.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparse, Mapping) or sparse.get("format") != "dense":
        problems.append(f"{FIELD}.sparsity_config: sparse weights are not read")
    problems += _pattern_problems(f"{FIELD}.ignore", block.get("ignore"))
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        return [*problems, f"{FIELD}.config_groups is {groups!r:.60}, expected a mapping of groups"]
    for name, group in groups.items():
        where = f"{FIELD}.config_groups.{name}"
        problems += _pattern_problems(f"{where}.targets", group.get("targets"))
        for part in ("input_activations", "output_activations"):
            if group.get(part) is not None:
                problems.append(f"{where}.{part}: quantized activations are not supported")
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            problems.append(f"{where}.weights is {weights!r:.60}, expected a mapping")
            continue
        # compressed-tensors leaves out fields with their defaults. Where `strategy` is missing, it follows from
        # `group_size`: -1 means one scale per channel, no size at all one scale per tensor.
        required = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        settings = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False} | dict(weights)
        if settings.get("strategy") is None and settings.get("group_size") in (None, -1):
            settings["strategy"] = "channel" if settings.get("group_size") == -1 else "tensor"
        problems += [
            f"{where}.weights.{key} is {settings.get(key)!r:.40}, not {value!r}"
            for key, value in required.items()
            if settings.get(key) != value
        ]
    return problems


def _pattern_problems(key: str, value: object) -> list[str]:
    """Problems of a list of module names, of which some are regular expressions."""
    # A text would otherwise be read as a list of letters, none of which names a module.
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        return [f"{key} is {value!r:.60}, expected a list of names"]
    problems = []
    for pattern in value:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            if pattern.startswith("re:"):
                problems.append(f"{key}: {pattern!r:.60} is not a regular expression: {error}")
    return problems


def int8_weights(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Names of the weights that are int8, among tensors as stored or as `Int8Format.open` offers them."""
    return frozenset(name for name, info in tensors.items() if name.endswith(".weight") and info.dtype == np.int8)


def _packed_tensor(name: str, stored: TensorInfo) -> QuantizedTensor:
    """Integers that are packed, as int8."""
    # Four integers fill an int32, lowest byte first, so the bytes of the file are those of an int8 array of this shape.
    rows, words = stored.shape
    int8 = np.dtype(np.int8)
    part = StoredPart(name=stored.name, shape=stored.shape, dtypes=(np.dtype(np.int32),), block=(1, 1), view=int8)
    return QuantizedTensor(
        name=name, shape=(rows, words * _FOUR), dtype=int8, components=(part,), decode=_subtract_offset
    )


def _subtract_offset(components: Sequence[np.ndarray], index: Index, out: np.ndarray) -> None:
    # The part is `out` itself, read in place. Packed integers are stored with 128 added. Modulo 256 this flips the
    # highest bit, and flipping it again undoes it.
    del components, index
    bits = out.view(np.uint8)
    np.bitwise_xor(bits, _OFFSET, out=bits)


def _tensor_problems(stored: Mapping[str, TensorInfo], packed: Collection[str], int8: Collection[str]) -> Sequence[str]:
    problems = []
    for name in sorted(int8):
        entry = stored[name + PACKED_NAME if name in packed else name]
        scale = stored.get(name + SCALE)
        if name in packed and (entry.dtype != np.int32 or len(entry.shape) != 2):
            problems.append(
                f"tensor {entry.name!r} is {entry.dtype.name}{list(entry.shape)}, expected int32[out, in / 4]"
            )
        elif scale is None:
            problems.append(f"tensor {name!r} is int8, and there is no {name + SCALE!r}")
        # One scale for each row of [out, in]: a group-wise scale would have more columns.
        elif scale.shape != (entry.shape[0], 1):
            problems.append(
                f"tensor {scale.name!r} has shape {list(scale.shape)}, expected {[entry.shape[0], 1]}: a scale per "
                "output channel"
            )
    # What is left of a weight whose integers are missing.
    problems += [
        f"tensor {name!r} describes a weight that is not stored as int8"
        for name in stored
        for ending in (SCALE, SHAPE_NAME)
        if name.endswith(f".weight{ending}") and name.removesuffix(ending) not in int8
    ]
    return problems


def _shape_problems(source: SafetensorsSource, packed: Collection[str]) -> list[str]:
    """Packed weights whose recorded shape is missing or is not that of the integers."""
    present = [name for name in sorted(packed) if name + SHAPE_NAME in source.tensors]
    problems = [
        f"tensor {name + PACKED_NAME!r} has no {name + SHAPE_NAME!r}, which records its unpacked shape"
        for name in sorted(packed)
        if name + SHAPE_NAME not in source.tensors
    ]

    def read(name: str) -> list[int] | None:
        info = source.tensors[name + SHAPE_NAME]
        if info.dtype.kind not in "iu" or info.shape != (2,):
            return None
        return [int(size) for size in source.read(info.name, (slice(0, 2),))]

    # A few bytes for each matrix: on another machine, a request for each.
    with ThreadPoolExecutor(16 if source.remote else 1) as pool:
        recorded = dict(zip(present, pool.map(read, present), strict=True))
    for name, shape in recorded.items():
        rows, words = source.tensors[name + PACKED_NAME].shape
        if shape is None:
            info = source.tensors[name + SHAPE_NAME]
            problems.append(f"tensor {info.name!r} is {info.dtype.name}{list(info.shape)}, expected two integers")
        elif shape != [rows, words * _FOUR]:
            # Rows shorter than their words are legal in the format; `in` of such a model is no multiple of 4.
            partial = shape[0] == rows and -(-shape[1] // _FOUR) == words and shape[1] > 0
            hint = ": rows that do not fill their integers are not read" if partial else ""
            problems.append(
                f"tensor {name + SHAPE_NAME!r} says {shape}, and {name + PACKED_NAME!r} holds "
                f"{[rows, words * _FOUR]}{hint}"
            )
    if len(problems) > _LISTED:
        problems = [*problems[:_LISTED], f"… and {len(problems) - _LISTED} more"]
    return problems


def quantized_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers and scales of the rows of a matrix: the numbers of `levanter.layers.quantized.int8_matrix`.

    Args:
        matrix: `[out, in]`, floating.

    Returns:
        int8 `[out, in]`, and float32 `[out, 1]`.
    """
    q = np.empty(matrix.shape, np.int8)
    scales = np.empty((matrix.shape[0], 1), np.float32)
    # About 4 Mi numbers at a time: float32 temporaries stay at 16 MiB whatever the size of the matrix.
    step = max(1, (1 << 22) // max(matrix.shape[1], 1))
    for at in range(0, matrix.shape[0], step):
        exact = matrix[at : at + step].astype(np.float32)
        # A row with an infinity or a NaN gets an infinite scale and integers of 0: reading back gives NaN for the row,
        # not a silently wrong number. Scales too small for their inverse count as 0.
        finite = np.isfinite(exact)
        # The row's largest magnitude maps to LARGEST (127): scale = max|row| · STEP, with STEP = 1 / 127.
        scale = np.where(finite, np.abs(exact), np.float32(np.inf)).max(axis=1, keepdims=True, initial=0) * STEP
        scale = np.where(scale < SMALLEST_SCALE, np.float32(0), scale)
        usable = (scale > 0) & np.isfinite(scale)
        inverse = np.where(usable, np.float32(1) / np.where(usable, scale, np.float32(1)), np.float32(0))
        scaled = np.where(finite, exact, np.float32(0)) * inverse
        # np.rint rounds halves to even, like XLA's round_nearest_even, so that both give the same integers.
        q[at : at + step] = np.clip(np.rint(scaled), -LARGEST, LARGEST)
        scales[at : at + step] = scale
    return q, scales


def packed_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of a packed matrix `[out, in]`."""
    rows, columns = shape
    return rows, -(-columns // _FOUR)


def packed(q: np.ndarray) -> np.ndarray:
    """int8 `[out, in]` as int32, four to one."""
    rows, words = packed_shape(q.shape)
    # The columns are padded to a multiple of four with 128, which is 0 after the offset.
    padded = np.full((rows, words * _FOUR), _OFFSET, np.uint8)
    padded[:, : q.shape[1]] = q.view(np.uint8) ^ _OFFSET
    # Little-endian view: byte 0 of each int32 is the lowest, as the format wants.
    return padded.view("<i4")


def quantization_block(ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a folder of packed int8 weights.

    Args:
        ignored: linear modules that are not quantized.
    """
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": PACKED,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(ignored),
        "config_groups": {"group_0": group},
    }
