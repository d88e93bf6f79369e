"""nanochat's checkpoint folders: `model_000650.pt` and `meta_000650.json`, in and out.

The tensors are offered under the names of our own checkpoint form (`models.nanochat.family`), as they lie in the file:
rows that pad the vocabulary are cut off, and the scalars of all layers, one vector there, are a tensor each.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from haliax_ext.sources import ByteRange, Index, TensorInfo, TensorSource
from levanter.base.bounded_json import parse_json_object
from levanter.compat.hf.errors import CheckpointError, raise_if
from levanter.compat.hf.readers import LocalFile
from levanter.compat.hf.strided_reads import block_grid, read_region
from levanter.compat.nanochat.torch_zip import TorchTensor, read_torch_zip, write_torch_zip
from levanter.models.nanochat.config import VARIANTS, NanochatConfig

_MODEL = re.compile(r"model_(\d{6,})\.pt")
_COMPILED = "_orig_mod."
"""torch.compile's prefix of names."""
ROW_TILE = 64
"""nanochat pads its vocabulary to a multiple of this."""

_SIZES = {
    "sequence_len": "max_seq_len",
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_kv_head": "num_kv_heads",
    "n_embd": "hidden_dim",
}
"""Field of `model_config` in the meta file → field of ours."""

_PER_LAYER = {
    "attn.c_q.weight": "self_attn.q_proj.weight",
    "attn.c_k.weight": "self_attn.k_proj.weight",
    "attn.c_v.weight": "self_attn.v_proj.weight",
    "attn.c_proj.weight": "self_attn.o_proj.weight",
    "mlp.c_fc.weight": "mlp.fc1.weight",
    "mlp.c_proj.weight": "mlp.fc2.weight",
    "attn.ve_gate.weight": "self_attn.value_embedding.gate.weight",
}
_SCALARS = {"resid_lambdas": "stream_scale", "x0_lambdas": "x0_scale"}
_TABLE = "self_attn.value_embedding.table"


@dataclass(frozen=True)
class TensorPart:
    """Where a tensor of ours lies in nanochat's.

    Attributes:
        name: nanochat's tensor.
        shape: its shape; the first axis may have more rows.
        first: the first element of ours.
        ours: the shape of ours.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    ours: tuple[int, ...]


def tensor_parts(config: NanochatConfig) -> dict[str, TensorPart]:
    """Our tensors, by name, as parts of nanochat's."""
    width, mlp, heads = config.hidden_dim, config.intermediate_dim, config.num_heads * config.HeadSize.size
    kv, ids = config.num_kv_heads * config.HeadSize.size, config.vocab_size
    assert ids is not None
    shapes = {
        "attn.c_q.weight": (heads, width),
        "attn.c_k.weight": (kv, width),
        "attn.c_v.weight": (kv, width),
        "attn.c_proj.weight": (width, heads),
        "mlp.c_fc.weight": (mlp, width),
        "mlp.c_proj.weight": (width, mlp),
        "attn.ve_gate.weight": (config.num_kv_heads, 12),
    }

    def whole(name: str, shape: tuple[int, ...], ours: tuple[int, ...] | None = None) -> TensorPart:
        return TensorPart(name, shape, 0, shape if ours is None else ours)

    stored_parts = {
        "model.embed_tokens.weight": whole("transformer.wte.weight", (ids, width)),
        "lm_head.weight": whole("lm_head.weight", (ids, width)),
    }
    for layer in range(config.num_layers):
        here = f"model.layers.{layer}"
        for name, target in _PER_LAYER.items():
            if name != "attn.ve_gate.weight" or config.has_value_embedding(layer):
                stored_parts[f"{here}.{target}"] = whole(f"transformer.h.{layer}.{name}", shapes[name])
        if config.has_value_embedding(layer):
            stored_parts[f"{here}.{_TABLE}"] = whole(f"value_embeds.{layer}.weight", (ids, kv))
        if config.residual_scalars:
            # One vector holds the scalars of all layers.
            for name, target in _SCALARS.items():
                stored_parts[f"{here}.{target}"] = TensorPart(name, (config.num_layers,), layer, ())
    if config.smear:
        stored_parts["model.smear.gate.weight"] = whole("smear_gate.weight", (1, 24), (24,))
        stored_parts["model.smear.scale"] = whole("smear_lambda", (1,), ())
    if config.backout is not None:
        stored_parts["model.backout_scale"] = whole("backout_lambda", (1,), ())
    return stored_parts


class NanochatSource:
    """The tensors of a `.pt` file under our names, readable by slices."""

    def __init__(self, path: Path, stored: Mapping[str, TorchTensor]):
        """Offers located tensors.

        Args:
            path: the file.
            stored: by our names.
        """
        self._path, self._stored, self._reader = path, stored, LocalFile(path)
        self._tensors = MappingProxyType(
            {name: TensorInfo(name, x.shape, x.dtype, x.nbytes) for name, x in stored.items()}
        )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor."""
        return self._tensors

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """The bytes that reading `index` of `name` touches."""
        stored, reader = self._stored[name], self._reader
        grid = block_grid(stored.shape, stored.dtype.itemsize, index, max_gap=reader.max_gap, page=reader.page)
        if grid is None:
            return []
        starts = [stored.start + offset for offset in grid.offsets().tolist()]
        return [ByteRange(str(self._path), start, start + grid.span) for start in starts]

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """The slice, written into `out` (same shape and dtype) if given."""
        stored = self._stored[name]
        if out is None:
            out = np.empty([piece.stop - piece.start for piece in index], stored.dtype)
        read_region(self._reader, stored.start, stored.shape, index, out)
        return out


@dataclass(frozen=True, kw_only=True)
class NanochatFolder:
    """An opened checkpoint.

    Attributes:
        config: the architecture.
        source: its tensors, under the names of `config.weight_rules()`.
        step: the training step.
        meta: the meta file.
        ignored: tensors of the file that the architecture does not have.
    """

    config: NanochatConfig
    source: NanochatSource
    step: int
    meta: Mapping[str, Any]
    ignored: tuple[str, ...]


def is_nanochat_folder(files: frozenset[str]) -> bool:
    """Whether a folder with these files is a checkpoint of nanochat."""
    return any(_MODEL.fullmatch(name) and _meta_name(name) in files for name in files)


def _meta_name(model: str) -> str:
    return model.replace("model_", "meta_").replace(".pt", ".json")


def open_nanochat(folder: Path, *, step: int | None = None) -> NanochatFolder:
    """Opens a checkpoint folder; no weight is read, and no pickle is executed.

    Args:
        folder: with `model_<step>.pt` and `meta_<step>.json`.
        step: of the training; None for the last.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    steps = {int(match[1]): path for path in folder.glob("model_*.pt") if (match := _MODEL.fullmatch(path.name))}
    if not steps or (step is not None and step not in steps):
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(folder, f"there is no model_{step or 0:06d}.pt; steps in the folder: {known}")
    number = max(steps) if step is None else step
    path = steps[number]
    meta_path = path.with_name(_meta_name(path.name))
    problems: list[str] = []
    if not meta_path.is_file():
        raise CheckpointError(meta_path, "it is missing; it says how large the model is")
    try:
        meta = parse_json_object(meta_path.read_bytes(), problems)
    except ValueError as error:
        raise CheckpointError(meta_path, str(error)) from error
    raise_if(CheckpointError, meta_path, problems)
    stored = {name.removeprefix(_COMPILED): x for name, x in read_torch_zip(path).items()}
    config = _config(meta, stored, meta_path)
    located: dict[str, TorchTensor] = {}
    stored_parts = tensor_parts(config)
    for name, part in stored_parts.items():
        tensor = stored.get(part.name)
        if tensor is None:
            problems.append(f"tensor {part.name!r} is missing")
        # Rows that pad the vocabulary come last, so ours are the first ones.
        elif tensor.shape != part.shape and not _is_padded(part.name, tensor.shape, part.shape):
            problems.append(f"tensor {part.name!r} has shape {tensor.shape}; by the meta file it is {part.shape}")
        elif tensor.dtype.kind in "iub?":
            problems.append(f"tensor {part.name!r} holds {tensor.dtype}, not floating-point numbers")
        else:
            located[name] = tensor.part(part.first, part.ours)
    raise_if(CheckpointError, path, problems)
    known = {part.name for part in stored_parts.values()}
    ignored = tuple(sorted(set(stored) - known))
    return NanochatFolder(config=config, source=NanochatSource(path, located), step=number, meta=meta, ignored=ignored)


def _is_padded(name: str, shape: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    by_token = name in ("transformer.wte.weight", "lm_head.weight") or name.startswith("value_embeds.")
    return by_token and shape == (-(-ours[0] // ROW_TILE) * ROW_TILE, *ours[1:])


def _config(meta: Mapping[str, Any], stored: Mapping[str, TorchTensor], where: Path) -> NanochatConfig:
    """The architecture, by the sizes in the meta file and the tensors that there are."""
    sizes = meta.get("model_config")
    if not isinstance(sizes, dict):
        raise CheckpointError(where, "model_config is missing")
    problems: list[str] = []
    fields: dict[str, Any] = {}
    for name, ours in _SIZES.items():
        value = sizes.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append(f"model_config.{name} is {value!r:.40}, not a number")
        else:
            fields[ours] = value
    raise_if(CheckpointError, where, problems)
    scalars, tables = "resid_lambdas" in stored, any(name.startswith("value_embeds.") for name in stored)
    smear, backout = "smear_lambda" in stored, "backout_lambda" in stored
    variant = "today" if smear or backout or tables else "tpu_fork" if scalars else "october_2025"
    if variant == "today" and not (smear and backout and tables and scalars):
        raise CheckpointError(
            where,
            "a form of nanochat between October 2025 and July 2026, which is not supported: it has only some of "
            "scalars, value tables, smear and backout",
        )
    # Checkpoints from before windows have no pattern.
    pattern = str(sizes.get("window_pattern") or "L").upper()
    changes = dict(VARIANTS[variant]) | {"pattern": pattern, "intermediate_dim": 4 * fields.get("hidden_dim", 0)}
    try:
        return NanochatConfig(**(fields | changes))
    except ValueError as error:
        raise CheckpointError(where, str(error)) from error


def write_nanochat(folder: Path, config: NanochatConfig, source: TensorSource, *, step: int) -> Path:
    """Writes a checkpoint folder that nanochat and `torch.load(weights_only=True)` read; the path of the tensors.

    Args:
        folder: made if it does not exist.
        config: the architecture.
        source: tensors under the names of `config.weight_rules()`, as of an exported model.
        step: for the names of the files.

    Raises:
        ValueError: nanochat's files have no place for some setting.
    """
    pattern = config.pattern or "SSSL"
    letters = (pattern * config.num_layers)[: config.num_layers - 1] + "L"
    default = dataclasses.replace(config, sliding_window=None, pattern="L").short_window
    if config.layer_types is not None or "(" in pattern or ("S" in letters and config.short_window != default):
        raise ValueError(
            f"model.layer_types, and a model.sliding_window other than {default}, have no place in nanochat's files"
        )
    arrays: dict[str, np.ndarray] = {}
    for name, part in tensor_parts(config).items():
        info = source.tensors[name]
        values = source.read(name, tuple(slice(0, size) for size in info.shape))
        if part.name not in arrays:
            by_token = _is_padded(part.name, (-(-part.shape[0] // ROW_TILE) * ROW_TILE, *part.shape[1:]), part.shape)
            rows = -(-part.shape[0] // ROW_TILE) * ROW_TILE if by_token else part.shape[0]
            arrays[part.name] = np.zeros((rows, *part.shape[1:]), values.dtype)
        flat = arrays[part.name].reshape(-1)
        flat[part.first : part.first + values.size] = values.reshape(-1)
    folder.mkdir(parents=True, exist_ok=True)
    model_config = {name: getattr(config, ours) for name, ours in _SIZES.items()} | {"window_pattern": pattern}
    path = folder / f"model_{step:06d}.pt"
    write_torch_zip(path, arrays)
    (folder / _meta_name(path.name)).write_text(json.dumps({"step": step, "model_config": model_config}, indent=2))
    return path
