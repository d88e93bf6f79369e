"""A model of ours as a Hugging Face checkpoint: config.json, safetensors shards with their index, the tokenizer.

Tensors go from device shards into the file one at a time (`haliax_ext.saving`), so that a host needs memory for one of
them. The folder appears under its name only when all of it is written; an export that was killed leaves a folder
`<name>.incomplete`, which the next one replaces. The files are read again after writing: header, names and shapes.

Format: https://github.com/huggingface/safetensors#format and the index files of transformers.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haliax_ext.abstract import leaves, map_arrays
from haliax_ext.saving import OutTensor, plan_saving, tensors_of
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


def export(
    model: LmHeadModel,
    config: LmConfig,
    folder: str | Path,
    *,
    tokenizer: FastTokenizer | None = None,
    vocab_size: int | None = None,
    dtype: str | np.dtype | None = None,
    spelling: Spelling = "transformers5",
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
        tokenizer: to lay beside it.
        vocab_size: ids that there are, where the model has more rows; default `config.vocab_size`.
        dtype: of the weights; None keeps the model's.
        spelling: for which transformers config.json is written; version 5 reads both.
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
    target = Path(folder)
    writes = jax.process_index() == 0
    if writes and target.exists() and not overwrite:
        raise ExportPathError(
            str(target), "it exists already", suggestion="name another folder, or allow it to be replaced"
        )
    rows = vocab_size if vocab_size is not None else config.vocab_size
    own = tuple(leaves(model))
    true_sizes = {} if rows is None else {"vocab": rows}
    plan = plan_saving(
        own,
        config.weight_rules(_vocab_axis(model)),
        dtype=None if dtype is None else np.dtype(dtype),
        true_sizes=true_sizes,
    )
    shards = shards_of(plan, max_bytes=max_shard_bytes)
    arrays: dict[str, Any] = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, model)
    partial = target.with_name(target.name + INCOMPLETE)
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    total = sum(tensor.nbytes for tensor in plan)
    done = 0
    for shard in shards:
        for size in _write_shard(partial / shard.file, shard, arrays, writes=writes):
            done += size
            if progress is not None:
                progress(done, total)
    if writes:
        names = {tensor.dtype.name for tensor in plan}
        document = write_config(config, vocab_size=rows, dtype=sorted(names)[0], spelling=spelling)
        _write_beside(partial, shards, document, tokenizer, total)
        _check(partial, plan)
        if target.exists():
            replaced = target.with_name(target.name + ".replaced")
            os.replace(target, replaced)
            os.replace(partial, target)
            shutil.rmtree(replaced)
        else:
            os.replace(partial, target)
    return target


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


def _write_beside(
    folder: Path, shards: Sequence[Shard], document: Mapping[str, Any], tokenizer: FastTokenizer | None, total: int
) -> None:
    if tokenizer is not None:
        _write_json(folder / DEFINITION, tokenizer.definition)
        roles = {
            f"{role}_token": tokenizer.token(number)
            for role in ("bos", "eos", "pad")
            if (number := getattr(tokenizer, f"{role}_id")) is not None
        }
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
        document = {**document, **{name: number for name, number in ids.items() if number is not None}}
    _write_json(folder / "config.json", document)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
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
