"""Exports one of our checkpoints as a Hugging Face folder: config, weights, tokenizer, generation config.

    python -m levanter.main.export_lm_to_hf --checkpoint_path checkpoints/run --output_dir exported
    python -m levanter.main.export_lm_to_hf --hf_checkpoint BASE --adapter_path ADAPTER --output_dir merged

No device is needed: each tensor is assembled from the checkpoint's shards and written, one after another, so the host
needs memory for the largest of them. The folder appears under its name once it is complete and has been verified.
`transformers`, `eval_lm` and everything else that reads Hugging Face checkpoints accepts it. The second form merges an
adapter into its base, in float32 with one rounding, and prints the rounding errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import Leaf, abstract, leaves
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.rules import WeightMismatchError
from haliax_ext.sources import TensorSource
from levanter.checkpoint import same_names
from levanter.commands.cli.outputs import output_checks
from levanter.commands.cli.runner import run_config
from levanter.commands.export.config import ConvertLmConfig
from levanter.commands.export.merging import Merge, Slices, find_merge
from levanter.commands.model.saved_model import SavedModel, resolve_saved_source
from levanter.commands.model.source import ModelBlock, find_tokenizer, resolve_source, vocabulary
from levanter.compat.hf.export import ExportExtras, ExportPlan, plan_export, refuse_existing, write_export
from levanter.compat.hf.export_dir import ExportPathError
from levanter.compat.hf.export_int8 import Int8Tensor
from levanter.compat.hf.peft.merge import rounding_lines
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config import ExplicitKeys
from levanter.data import Tokenizer
from levanter.io import Output, Progress, is_remote, local_path
from levanter.layers.quantized import projections, quantizable
from levanter.models.registry import LmConfig
from levanter.runplan import BAD_INPUT, OK, Check, EntryPoint, RunPlan, RunRefused, Session, Target

NAME = "export_lm_to_hf"

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvertWork:
    """The resolved inputs of `execute`.

    Attributes:
        config: as the user wrote it.
        source: the checkpoint's tensors; None if they are not available here.
        merge: the adapter that is merged into them; None for none.
        files: the plan of the files.
        tokenizer: the tokenizer to write; None for none.
    """

    config: ConvertLmConfig
    source: TensorSource | None
    merge: Merge | None
    files: ExportPlan
    tokenizer: FastTokenizer | None


def describe(config: ConvertLmConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[ConvertWork]:
    """Describes an export; reads metadata only."""
    written = ExplicitKeys.in_python(config) if written is None else written
    block = ModelBlock.of(config.model, written)
    if config.checkpoint_path is None:
        origin = resolve_source(config.hf_checkpoint, block)
    else:
        origin = resolve_saved_source(config.checkpoint_path, block)
    model = origin.architecture
    saved = origin.checkpoint if isinstance(origin.checkpoint, SavedModel) else None
    checks = list(origin.checks)
    source_tokenizer = tokenizer = None
    if config.save_tokenizer:
        source_tokenizer, check = find_tokenizer(config.tokenizer, origin=origin, size=model.vocab_size)
        tokenizer = source_tokenizer if isinstance(source_tokenizer, FastTokenizer) else None
        if source_tokenizer is not None and tokenizer is None:
            check = Check(
                name="tokenizer", status="note", message="none is written: the training data was token ids, not text"
            )
        checks.append(check)
    rows = model.vocab_size
    if config.override_vocab_size is not None:
        rows, check = _rows(config.override_vocab_size, model.vocab_size, tokenizer)
        checks.append(check)
    if rows is None:
        rows = _known_rows(model, source_tokenizer, config, checks)
    Vocab = hax.Axis("vocab", model.vocab_size or rows)  # rows are dropped only while tensors are written
    module = abstract(lambda: model.build(Vocab, key=jax.random.PRNGKey(0)))
    merge = None
    if config.adapter_path is not None or origin.adapters is not None:
        checks += _refused_of_adapters(config)
        of_model = replace(model, vocab_size=rows)
        merge, merge_checks = find_merge(config.adapter_path, origin, of_model, Vocab, module, leaves(module))
        checks += merge_checks
    stored = _stored(leaves(module), saved, origin.stored) if merge is None else merge.stored
    if saved is not None:
        try:
            same_names(stored).match(stored, saved.source.tensors)  # names and shapes; reads no array
        except WeightMismatchError as error:
            checks.append(Check(name="weights", status="error", message=str(error), error=error))
    files = plan_export(
        stored,
        replace(model, vocab_size=rows),
        Vocab,
        vocab_size=rows,
        dtype=_dtype(config.dtype),  # None keeps each tensor's own
        max_bytes=config.max_shard_bytes,
        int8={f"{path}.weight": x.In for path, x in quantizable(module).items()} if config.int8 else None,
        linear=[f"{path}.weight" for path in projections(module)],
    )
    largest = max(files.tensors, key=lambda tensor: tensor.nbytes)  # tensors are written one after another
    as_integers = sum(isinstance(tensor, Int8Tensor) for tensor in files.tensors)
    int8_note = f" ({as_integers} of them int8)" if as_integers else ""
    buffer = "one tensor at a time" if merge is None else "some rows of a tensor at a time"
    message = (
        f"{len(files.tensors)} tensors{int8_note}, {files.nbytes / GIB:,.2f} GiB in {len(files.shards)} "
        f"file{'s' if len(files.shards) > 1 else ''}; the host holds {buffer}, the largest "
        f"{largest.nbytes / GIB:,.2f} GiB ({largest.name})"
    )
    checks.append(Check(name="export", status="ok", message=message))
    checks += _output(config)
    mesh = MeshSpec.of(data=target.devices)
    nothing = plan_sharding((), Mappings(), mesh)  # no device takes part
    return RunPlan(
        entry_point=NAME,
        target=target,
        mesh=mesh,
        checks=tuple(checks),
        sharding=nothing,
        activations=nothing,
        load=None,
        computing=(),
        notes=("no device is used: tensors are copied from file to file",),
        work=ConvertWork(
            config=config,
            source=None if origin.checkpoint is None else origin.checkpoint.source,
            merge=merge,
            files=files,
            tokenizer=tokenizer,
        ),
    )


def _refused_of_adapters(config: ConvertLmConfig) -> list[Check]:
    """Errors of options that are not implemented for a checkpoint of adapters."""
    unsupported = {"int8": config.int8, "override_vocab_size": config.override_vocab_size is not None}
    errors = [
        ValueError(f"{key}: not implemented for merged adapters; leave it out")
        for key in unsupported
        if unsupported[key]
    ]
    return [Check(name="adapter", status="error", message=str(error), error=error) for error in errors]


def _known_rows(model: LmConfig, tokenizer: Tokenizer | None, config: ConvertLmConfig, checks: Sequence[Check]) -> int:
    """The size of the vocabulary if neither the checkpoint nor the configuration has it.

    Raises:
        RunRefused: the size is unknown; lists what could not be read.
    """
    try:
        return vocabulary(model, tokenizer=tokenizer, names=(config.tokenizer, model.tokenizer))[0]
    except ValueError as error:
        # The earlier errors say why neither the checkpoint nor the tokenizer gave the size.
        before = [check.error for check in checks if check.error is not None]
        raise RunRefused([*before, error], exit_code=BAD_INPUT) from error


def _rows(wanted: int, available: int | None, tokenizer: FastTokenizer | None) -> tuple[int, Check]:
    """The number of exported ids, and a check on it."""
    # The tokenizer's ids must stay: only rows that pad the table may be dropped.
    least = 1 if tokenizer is None else tokenizer.vocab_size
    if available is not None and not least <= wanted <= available:
        why = "" if tokenizer is None else f", of which the tokenizer has {least}"
        error = ValueError(f"override_vocab_size: {wanted}, but the checkpoint has {available} ids{why}")
        return available, Check(name="vocabulary", status="error", message=str(error), error=error)
    return wanted, Check(name="vocabulary", status="ok", message=f"{wanted} of {available} ids (override_vocab_size)")


def _stored(model_leaves: Any, saved: SavedModel | None, stored: np.dtype) -> tuple[Leaf, ...]:
    """The leaves with the checkpoint's dtypes."""
    # An absent checkpoint is assumed to store all weights in one dtype.
    tensors = {} if saved is None else saved.source.tensors
    return tuple(
        replace(leaf, dtype=tensors[leaf.path].dtype if leaf.path in tensors else stored) for leaf in model_leaves
    )


def _dtype(name: str | None) -> np.dtype | None:
    # NumPy has no bfloat16 of its own.
    import ml_dtypes

    return None if name is None else np.dtype(getattr(ml_dtypes, name, name))


def _output(config: ConvertLmConfig) -> list[Check]:
    if not config.overwrite:
        # Checked before the export starts; `write_export` checks again when it creates the folder.
        try:
            refuse_existing(config.output_dir)
        except ExportPathError as error:
            return [Check(name="output", status="error", message=str(error), error=error)]
        except ValueError as error:
            # Another machine may have the missing package.
            return [Check(name="output", status="unchecked", message=str(error), error=error)]
    return output_checks("output_dir", config.output_dir)


def execute(plan: RunPlan[ConvertWork], mesh: Mesh | None = None, session: Session | None = None) -> str:
    """Writes the folder.

    Raises:
        UnreadableCheckpointError: files of the checkpoint are missing or damaged; nothing that counts as an export is
            left.
        OSError: not writable, or the disk is full; an earlier export on a disk stays.
    """
    del mesh
    work, show = plan.work, session is not None and session.show
    assert work.source is not None, "a plan without its checkpoint must not run: RunPlan.check() comes first"
    config = work.config
    # Read lazily: each tensor is merged when it is written.
    merged = None if work.merge is None else work.merge.tensors(work.source)
    with Progress("exporting", total=work.files.nbytes, unit="bytes", show=show) as progress:
        folder = write_export(
            work.files,
            Slices(work.source) if merged is None else merged,
            config.output_dir if is_remote(config.output_dir) else local_path(config.output_dir),
            extras=ExportExtras(
                tokenizer=work.tokenizer,
                eos_ids=tuple(config.generation_eos_token_ids or ()),
                overrides=config.config_overrides or {},
            ),
            overwrite=config.overwrite,
            progress=lambda done, _: progress.advance_to(done),
        )
    # Known only now, since rounding errors are collected during the merge.
    if merged is not None and show:
        print("\n".join(rounding_lines(tuple(merged.rounding.values()))), flush=True)
    return folder


def outputs(plan: RunPlan[ConvertWork], session: Session) -> tuple[Output, ...]:
    """The folder, which appears once it is complete."""
    del session
    work = plan.work
    return (Output(key="output_dir", path=work.config.output_dir, kind="new folder", nbytes=work.files.nbytes),)


def finish(plan: RunPlan[ConvertWork], folder: str, session: Session) -> int:
    """Prints the path of the folder."""
    del plan, session
    print(f"Hugging Face folder: {folder}")
    return OK


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=ConvertLmConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
    uses_devices=False,
)


def main(config: ConvertLmConfig, *, written: ExplicitKeys | None = None) -> int:
    """Exports a checkpoint; of several processes, only the first does."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
