"""A model of ours as a Hugging Face checkpoint: config.json, safetensors shards with their index, the tokenizer.

Tensors go from device shards, or from the files of another checkpoint, into the file one at a time
(`haliax_ext.saving`), so that a host needs memory for one of them. The folder appears under its name only when all of
it is written; an export that was killed leaves a folder `<name>.incomplete`, which the next one replaces. One that was
killed while it replaced another may leave that other as `<name>.replaced`, which the next one puts back first. The
files are read again after writing: header, names and shapes.

Format: https://github.com/huggingface/safetensors#format and the index files of transformers.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import Leaf, leaves, map_arrays
from haliax_ext.saving import OutTensor, Readable, plan_saving, tensors_of
from levanter.compat.hf.config_bridge import write_config
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.header import DTYPES
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.repository import LocalFolder
from levanter.compat.hf.rope import Spelling
from levanter.compat.hf.tokenizer import DEFINITION, FastTokenizer
from levanter.io import atomic_write
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig

MAX_SHARD_BYTES = 5 * 10**9
INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ExportPathError(CheckpointError):
    """The place of an export is taken."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One safetensors file of an export."""

    file: str
    tensors: tuple[OutTensor, ...]

    @property
    def header(self) -> bytes:
        """What the file begins with, length included; data begins on a multiple of 8 bytes."""
        document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in self.tensors:
            document[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        text = json.dumps(document, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def shards_of(tensors: Sequence[OutTensor], *, max_bytes: int = MAX_SHARD_BYTES) -> tuple[Shard, ...]:
    """The files of an export: tensors in order, as many to a file as fit."""
    groups: list[list[OutTensor]] = []
    held = 0
    for tensor in tensors:
        if not groups or held + tensor.nbytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    if len(groups) == 1:
        return (Shard(file="model.safetensors", tensors=tuple(groups[0])),)
    return tuple(
        Shard(file=f"model-{n:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for n, group in enumerate(groups, 1)
    )


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Which files of weights an export has, and what config.json says of the model.

    Attributes:
        config: the architecture.
        vocab_size: ids that there are.
        shards: the files.
    """

    config: LmConfig
    vocab_size: int | None
    shards: tuple[Shard, ...]

    @property
    def tensors(self) -> tuple[OutTensor, ...]:
        """All tensors, in the order of writing."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What lies beside the weights.

    Attributes:
        tokenizer: the tokenizer; None for none.
        eos_ids: ids that end a generated text, in generation_config.json; empty for the tokenizer's own.
        overrides: keys of config.json that replace ours.
        spelling: for which transformers config.json is written; version 5 reads both.
    """

    tokenizer: FastTokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    spelling: Spelling = "transformers5"


def export(
    model: LmHeadModel,
    config: LmConfig,
    folder: str | Path,
    *,
    vocab_size: int | None = None,
    dtype: str | np.dtype | None = None,
    beside: Beside | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a model as a folder that `transformers` and `eval_lm` read.

    With several processes every one must call it; the first one writes.

    Args:
        model: with real arrays, in any sharding.
        config: its architecture.
        folder: a local path that does not exist yet.
        vocab_size: ids that there are, where the model has more rows; default `config.vocab_size`.
        dtype: of the weights; None keeps the model's.
        beside: what lies beside the weights; None for config.json alone.
        max_shard_bytes: of one file.
        overwrite: whether an existing folder is replaced, once the new one is whole.
        progress: told (bytes written, bytes in all).

    Returns:
        The folder.

    Raises:
        ExportPathError: the folder exists.
        CheckpointError: what was written does not read back.
        OSError: not writable, or the disk is full; what was there before stays.
    """
    plan = plan_export(
        tuple(leaves(model)), config, _vocab_axis(model), vocab_size=vocab_size, dtype=dtype, max_bytes=max_shard_bytes
    )
    arrays: dict[str, Any] = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, model)
    return write_export(plan, arrays, folder, beside=beside or Beside(), overwrite=overwrite, progress=progress)


def plan_export(
    own: Sequence[Leaf],
    config: LmConfig,
    Vocab: hax.Axis,
    *,
    vocab_size: int | None = None,
    dtype: str | np.dtype | None = None,
    max_bytes: int = MAX_SHARD_BYTES,
) -> ExportPlan:
    """Plans an export; reads no array.

    Args:
        own: the model's leaves.
        config: its architecture.
        Vocab: rows of its embedding.
        vocab_size: ids that there are; default `config.vocab_size`.
        dtype: of the weights; None keeps the leaves'.
        max_bytes: of one file.
    """
    rows = vocab_size if vocab_size is not None else config.vocab_size
    tensors = plan_saving(
        own,
        # Rows that are left out must be called padding by the rules.
        (config if rows is None else replace(config, vocab_size=rows)).weight_rules(Vocab),
        dtype=None if dtype is None else np.dtype(dtype),
        true_sizes={} if rows is None else {"vocab": rows},
    )
    return ExportPlan(config=config, vocab_size=rows, shards=shards_of(tensors, max_bytes=max_bytes))


def refuse_taken(folder: str | Path) -> None:
    """Refuses a folder that exists.

    Raises:
        ExportPathError: it does.
    """
    if Path(folder).exists():
        raise ExportPathError(
            str(folder), "it exists already", suggestion="name another folder, or allow it to be replaced"
        )


def write_export(
    plan: ExportPlan,
    arrays: Mapping[str, jax.Array | Readable],
    folder: str | Path,
    *,
    beside: Beside,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a planned export; see `export`.

    Args:
        plan: from `plan_export`.
        arrays: by leaf path; on devices, in memory, or in files that are read slice by slice.
        folder, overwrite, progress: as `export` takes them.
        beside: what lies beside the weights.
    """
    target = Path(folder)
    writes = jax.process_index() == 0
    replaced = target.with_name(target.name + REPLACED)
    if writes:
        _put_back(target, replaced)
        if not overwrite:
            refuse_taken(target)
    shards = plan.shards
    partial = target.with_name(target.name + INCOMPLETE)
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    total, done = plan.nbytes, 0
    for shard in shards:
        for size in _write_shard(partial / shard.file, shard, arrays, writes=writes):
            done += size
            if progress is not None:
                progress(done, total)
    if writes:
        _write_beside(partial, plan, beside)
        _check(partial, plan.tensors)
        if target.exists():
            os.replace(target, replaced)
            os.replace(partial, target)
            shutil.rmtree(replaced)
        else:
            os.replace(partial, target)
    return target


def _put_back(target: Path, replaced: Path) -> None:
    """Finishes what an export that was killed while it replaced another one left undone."""
    if not replaced.exists():
        return
    if target.exists():
        shutil.rmtree(replaced)
    else:
        os.replace(replaced, target)


def _vocab_axis(model: LmHeadModel) -> Any:
    return model.head_weight().resolve_axis("vocab")


def _write_shard(path: Path, shard: Shard, arrays: Mapping[str, Any], *, writes: bool) -> Iterator[int]:
    """Writes one file; yields bytes as they are written."""
    if not writes:
        for tensor, _ in tensors_of(shard.tensors, arrays):
            yield tensor.nbytes
        return
    with atomic_write(str(path)) as file:
        file.write(shard.header)
        for tensor, values in tensors_of(shard.tensors, arrays):
            file.write(np.ascontiguousarray(values).view(np.uint8).data)
            yield tensor.nbytes


def _write_beside(folder: Path, plan: ExportPlan, beside: Beside) -> None:
    dtypes = sorted({tensor.dtype.name for tensor in plan.tensors})
    document = write_config(plan.config, vocab_size=plan.vocab_size, dtype=dtypes[0], spelling=beside.spelling)
    tokenizer, shards = beside.tokenizer, plan.shards
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        _write_json(folder / DEFINITION, tokenizer.definition)
        roles = {
            f"{role}_token": tokenizer.token(number)
            for role in ("bos", "eos", "pad")
            if (number := getattr(tokenizer, f"{role}_id")) is not None
        }
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
        roles = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
        ids = {name: number for name, number in roles.items() if number is not None}
    _write_json(folder / "config.json", {**document, **ids, **beside.overrides})
    if beside.eos_ids:
        ids = {**ids, "eos_token_id": list(beside.eos_ids)}
    if ids:
        _write_json(folder / "generation_config.json", ids)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))},
        )


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with atomic_write(str(path)) as file:
        file.write(json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")


def _check(folder: Path, plan: Iterable[OutTensor]) -> None:
    """Reads the headers again.

    Raises:
        CheckpointError: a tensor is not there as it was meant to be.
    """
    found = open_weights(LocalFolder(folder)).tensors
    wrong = [t.name for t in plan if t.name not in found or found[t.name].shape != t.shape]
    if wrong:
        raise CheckpointError(
            str(folder), f"after writing, {len(wrong)} tensors do not read back: {', '.join(wrong[:5])}"
        )
