"""Exports a model as a Hugging Face checkpoint: config.json, safetensors shards with their index, the tokenizer.

Tensors are written one at a time, from device shards or from the files of another checkpoint (`haliax_ext.saving`), so
a host needs memory for one tensor. The folder is local or a URL; it counts as an export only once it is complete
(`export_dir`). After writing, headers, names and shapes are read back and compared.

Format: https://github.com/huggingface/safetensors#format and the index files of transformers.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import Leaf, leaves, map_arrays
from haliax_ext.saving import OutTensor, Readable, contribute_tensors, gather_tensors, plan_saving
from levanter.compat.hf.config_bridge import write_config
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.export_dir import CONFIG, ExportDir, export_dir
from levanter.compat.hf.export_dir import INCOMPLETE as INCOMPLETE
from levanter.compat.hf.export_dir import ExportPathError as ExportPathError
from levanter.compat.hf.export_int8 import Int8Tensor, encode, quantization_config, quantize_tensors, stored_tensors
from levanter.compat.hf.header import DTYPES
from levanter.compat.hf.index import MAX_SHARD_BYTES, open_weights
from levanter.compat.hf.quantized.source import FIELD
from levanter.compat.hf.tokenizer import DEFINITION, FastTokenizer
from levanter.distributed.compile_barrier import jit_together
from levanter.io import leased
from levanter.models.base import LmHeadModel
from levanter.models.config_json import Spelling
from levanter.models.registry import LmConfig

Folder = TypeVar("Folder", bound=str | Path)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One safetensors file of an export."""

    file: str
    tensors: tuple[OutTensor, ...]

    @property
    def header(self) -> bytes:
        """The first bytes of the file: header length and header, padded to 8 bytes."""
        # transformers refuses safetensors files whose metadata has no `format`; "pt" is what it writes itself.
        document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        # An int8 matrix is stored as several tensors; offsets count from the end of the header.
        for stored in (stored_tensor for tensor in self.tensors for stored_tensor in stored_tensors(tensor)):
            document[stored.name] = {
                "dtype": _NAMES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [at, at + stored.nbytes],
            }
            at += stored.nbytes
        text = json.dumps(document, separators=(",", ":")).encode()
        # The format allows trailing spaces in the header; with them the data is aligned for every dtype.
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def split_shards(tensors: Sequence[OutTensor], *, max_bytes: int = MAX_SHARD_BYTES) -> tuple[Shard, ...]:
    """Splits the tensors of an export into files of at most `max_bytes`, in order."""
    groups: list[list[OutTensor]] = []
    nbytes = 0
    for tensor in tensors:
        # A tensor larger than the limit gets a file of its own.
        if not groups or nbytes + tensor.nbytes > max_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(tensor)
        nbytes += tensor.nbytes
    # transformers' names: a single file has no number and needs no index.
    if len(groups) == 1:
        return (Shard(file="model.safetensors", tensors=tuple(groups[0])),)
    return tuple(
        Shard(file=f"model-{n:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for n, group in enumerate(groups, 1)
    )


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """The files of weights of an export, and the architecture for config.json.

    Attributes:
        config: the architecture.
        vocab_size: number of ids, without padding rows.
        shards: the files.
        quantization: `quantization_config` of int8 weights; None if there are none.
    """

    config: LmConfig
    vocab_size: int | None
    shards: tuple[Shard, ...]
    quantization: Mapping[str, Any] | None = None

    @property
    def tensors(self) -> tuple[OutTensor, ...]:
        """All tensors, in the order of writing."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class ExportExtras:
    """The files of an export other than the weights.

    Attributes:
        tokenizer: the tokenizer; None for none.
        eos_ids: ids that end a generated text, in generation_config.json; empty for the tokenizer's own.
        overrides: keys of config.json that replace ours.
        spelling: the version of transformers to write config.json for; version 5 reads both spellings.
    """

    tokenizer: FastTokenizer | None = None
    eos_ids: tuple[int, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    spelling: Spelling = "transformers5"


def export(
    model: LmHeadModel,
    config: LmConfig,
    folder: Folder,
    *,
    vocab_size: int | None = None,
    dtype: str | np.dtype | None = None,
    extras: ExportExtras | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Folder:
    """Writes a model as a folder that `transformers` and `eval_lm` read.

    With several processes, every process must call it; process 0 writes.

    Args:
        model: with real arrays, in any sharding.
        config: its architecture.
        folder: a path or URL that does not exist yet.
        vocab_size: number of ids, if the model has padding rows; default `config.vocab_size`.
        dtype: dtype of the weights; None keeps the model's.
        extras: tokenizer and config overrides; None for config.json alone.
        max_shard_bytes: largest size of one file.
        overwrite: whether an existing folder is replaced: on a disk atomically, once the new one is complete; at a URL,
            file by file.
        progress: called with (bytes written, bytes in total).

    Returns:
        The folder.

    Raises:
        ExportPathError: the folder exists.
        CheckpointError: the written files do not read back as intended.
        OSError: not writable, or the disk is full; on a disk, an existing folder stays as it was.
    """
    plan = plan_export(
        tuple(leaves(model)), config, model.Vocab, vocab_size=vocab_size, dtype=dtype, max_bytes=max_shard_bytes
    )
    arrays: dict[str, Any] = {}
    # Collects the arrays by path in the traversal order of `leaves`; the returned tree is discarded.
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, model)
    return write_export(plan, arrays, folder, extras=extras or ExportExtras(), overwrite=overwrite, progress=progress)


def plan_export(
    model_leaves: Sequence[Leaf],
    config: LmConfig,
    Vocab: hax.Axis,
    *,
    vocab_size: int | None = None,
    dtype: str | np.dtype | None = None,
    max_bytes: int = MAX_SHARD_BYTES,
    int8: Mapping[str, tuple[str, ...]] | None = None,
    linear: Sequence[str] = (),
) -> ExportPlan:
    """Plans an export; reads no array.

    Args:
        model_leaves: the model's leaves.
        config: its architecture.
        Vocab: rows of its embedding.
        vocab_size: number of ids; default `config.vocab_size`.
        dtype: dtype of the weights; None keeps the leaves'.
        max_bytes: largest size of one file.
        int8: paths of the weights that are written as int8, with the names of their contracted axes; None for none.
        linear: with `int8`, paths of the weights of all projections.

    Raises:
        Int8ExportError: weights cannot be written as int8.
    """
    rows = vocab_size if vocab_size is not None else config.vocab_size
    # With the true vocab_size, the rules mark the model's further rows as padding, and only padding may be left out.
    rules = (config if rows is None else replace(config, vocab_size=rows)).weight_rules(Vocab)
    tensors = plan_saving(
        model_leaves,
        rules,
        dtype=None if dtype is None else np.dtype(dtype),
        true_sizes={} if rows is None else {"vocab": rows},
    )
    quantization = None
    if int8 is not None:
        tensors = quantize_tensors(tensors, model_leaves, rules, int8)
        quantization = quantization_config(model_leaves, rules, int8, linear)
    return ExportPlan(
        config=config,
        vocab_size=rows,
        shards=split_shards(tensors, max_bytes=max_bytes),
        quantization=quantization,
    )


def refuse_existing(folder: str | Path) -> None:
    """Refuses a folder that exists.

    Raises:
        ExportPathError: the folder exists.
    """
    export_dir(folder).refuse_existing()


class StreamedTensors(Protocol):
    """Tensors that the writing process computes on its host, some rows at a time."""

    def rows(self, tensor: OutTensor) -> Iterator[np.ndarray]:
        """The rows of a tensor in order, in the dtype of the file."""
        ...


Arrays = Mapping[str, jax.Array | Readable] | StreamedTensors
"""The data to write: leaves by path, or tensors by rows."""


def write_export(
    plan: ExportPlan,
    arrays: Arrays,
    folder: Folder,
    *,
    extras: ExportExtras,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Folder:
    """Writes a planned export; see `export`.

    Args:
        plan: from `plan_export`.
        arrays: by leaf path; on devices, in memory, or in files that are read slice by slice; or tensors by rows.
        folder, overwrite, progress: see `export`.
        extras: tokenizer and config overrides.
    """
    # Gathers are collective: every process must take part in each of them, in the same order, or process 0 waits
    # forever.
    if jax.process_index() != 0:
        _write_weights(None, plan, arrays, progress)
        return folder
    target = export_dir(folder)
    advice = "name another folder"
    with leased(target.name, what="an export", advice=advice, folder=target.lease) as lease:
        # The lease is held: no other export touches the folder, so leftovers are those of a process that was killed.
        target.recover()
        if not overwrite:
            target.refuse_existing()
        target.begin()
        _write_weights(target, plan, arrays, progress)
        # Another process may have taken over the lease while the weights were written; then the files are not ours.
        lease.check()
        config = _write_extras(target, plan, extras)
        # Before config.json makes the folder a checkpoint: a
        # folder with a config but broken weights must never exist.
        _check(target, plan.tensors)
        # Last: with it, the folder is a checkpoint.
        _write_json(target, CONFIG, config)
        lease.check()
        target.finish()
    return folder


def _write_weights(
    target: ExportDir | None,
    plan: ExportPlan,
    arrays: Arrays,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Gathers the weights on process 0, which writes them."""
    total, bytes_written = plan.nbytes, 0
    for shard in plan.shards:
        for size in _write_shard(target, shard, arrays):
            bytes_written += size
            if progress is not None:
                progress(bytes_written, total)


def _write_shard(target: ExportDir | None, shard: Shard, arrays: Arrays) -> Iterator[int]:
    """Writes one file on process 0, joins its gathers elsewhere; yields bytes as they are written."""
    # Streamed rows are on the writer's host already: no gather, and other processes have nothing to do.
    if not isinstance(arrays, Mapping):
        if target is not None:
            with target.open(shard.file) as file:
                file.write(shard.header)
                for tensor in shard.tensors:
                    for rows in arrays.rows(tensor):
                        file.write(np.ascontiguousarray(rows).view(np.uint8).data)
                        yield rows.nbytes
        return
    if target is None:
        # Same order and same tensors as `gather_tensors` on process 0: each gather is one collective.
        for tensor in contribute_tensors(shard.tensors, arrays, jit=jit_together):
            yield tensor.nbytes
        return
    with target.open(shard.file) as file:
        file.write(shard.header)
        for tensor, values in gather_tensors(shard.tensors, arrays, jit=jit_together):
            # `encode` turns an int8 matrix into its integers, scales and shape; other tensors pass unchanged.
            for array in encode(tensor, values):
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
            yield tensor.nbytes


def _write_extras(target: ExportDir, plan: ExportPlan, extras: ExportExtras) -> Mapping[str, Any]:
    """Writes tokenizer, generation config and index; returns the content of config.json."""
    dtypes = sorted({tensor.dtype.name for tensor in plan.tensors if not isinstance(tensor, Int8Tensor)})
    document = write_config(plan.config, vocab_size=plan.vocab_size, dtype=dtypes[0], spelling=extras.spelling)
    tokenizer, shards = extras.tokenizer, plan.shards
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        for file, text in tokenizer_documents(tokenizer).items():
            _write_json(target, file, text)
        roles = {f"{role}_token_id": getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
        ids = {name: number for name, number in roles.items() if number is not None}
    quantization = {} if plan.quantization is None else {FIELD: plan.quantization}
    # The user's overrides come last and win over everything.
    config = {**document, **ids, **quantization, **extras.overrides}
    if extras.eos_ids:
        ids = {**ids, "eos_token_id": list(extras.eos_ids)}
    if ids:
        _write_json(target, "generation_config.json", ids)
    if len(shards) > 1:
        weight_map = {
            stored.name: shard.file for shard in shards for tensor in shard.tensors for stored in stored_tensors(tensor)
        }
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(target, "model.safetensors.index.json", index)
    return config


def tokenizer_documents(tokenizer: FastTokenizer) -> dict[str, Mapping[str, Any]]:
    """The files of a tokenizer: name → JSON content."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.settings}
    return {DEFINITION: tokenizer.document, "tokenizer_config.json": config}


def _write_json(target: ExportDir, file: str, document: Mapping[str, Any]) -> None:
    with target.open(file) as opened:
        opened.write(json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")


def _check(target: ExportDir, plan: Iterable[OutTensor]) -> None:
    """Reads the written headers back and compares names and shapes.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    tensors = open_weights(target.written()).tensors
    expected = [stored for tensor in plan for stored in stored_tensors(tensor)]
    wrong = [x.name for x in expected if x.name not in tensors or tensors[x.name].shape != x.shape]
    if wrong:
        raise CheckpointError(
            target.name, f"{len(wrong)} tensors do not read back as they were written: {', '.join(wrong[:5])}"
        )
