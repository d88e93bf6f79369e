"""Planning shared by the memorization entry points: from jobs to a described run.

A `BookJob` is one book or one prepared set: its output folder, the shape of its batches, and how its windows are made.
`describe_jobs` makes the `RunPlan` of a model and its jobs, with one Program per batch shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.source import ModelBlock, merge_architecture
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.open import open_checkpoint
from levanter.config import ExplicitKeys
from levanter.data import Tokenizer
from levanter.data.tokenizer import bos_note
from levanter.memorization.results import Scheme, Scores
from levanter.memorization.runner import BatchShape, WindowSource, sampling_laws, score_program
from levanter.models.registry import LmConfig, family_for_config
from levanter.runplan import Check, RunPlan, Target, Workload

DEFAULT_BATCH = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenJob:
    """A job's windows.

    Attributes:
        source: their tokens.
        spans: `token_spans`, `char_spans`, `suffix_char_spans` of a `BookResult`.
        facts: what the manifest records about them.
        aligned: turns scores of the batch shape into scores of suffixes.
    """

    source: WindowSource
    spans: Mapping[str, np.ndarray]
    facts: Mapping[str, Any] = field(default_factory=dict)
    aligned: Callable[[Scores], Scores] = lambda scores: scores


@dataclass(frozen=True, kw_only=True, eq=False)
class BookJob:
    """One book or prepared set.

    Attributes:
        key: short, for metrics and listings.
        title: for reports.
        folder: of its results.
        preset, scheme: its convention, and the decoding scheme that is reported first.
        positions, suffix_tokens, padded: of its windows.
        bos: whether every window begins with BOS.
        batch_size: windows of a batch as configured; None if left open.
        windows: number of windows, possibly estimated; None if unknown.
        windows_reason: the source of that number.
        identity: everything that its results depend on besides the model.
        text: the text; None if there is none, or none to keep.
        check: raises errors of the windows that can be found quickly; called before weights are read.
        open: builds the windows; called once, in a run.
        output_names: names of output files that differ from the defaults.
    """

    key: str
    title: str
    folder: str
    preset: str
    scheme: Scheme
    positions: int
    suffix_tokens: int
    padded: bool = False
    bos: bool = False
    batch_size: int | None
    windows: int | None
    windows_reason: str
    identity: Mapping[str, Any]
    text: str | None
    check: Callable[[Tokenizer], None] = lambda _: None
    open: Callable[[Tokenizer], OpenJob]
    output_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemorizationWork:
    """The resolved inputs of `execute_jobs` besides the Programs.

    Attributes:
        config: of the entry point.
        pretrained: the model.
        jobs: in order, each with its batch shape and the name of its Program.
        laws: the schemes that need a normalizer of their own.
    """

    config: Any
    pretrained: PretrainedModel
    jobs: tuple[tuple[BookJob, BatchShape, str], ...]
    laws: tuple[Scheme, ...]


def describe_jobs(
    config: Any,
    target: Target,
    jobs: Sequence[BookJob],
    *,
    entry_point: str,
    checks: Sequence[Check],
    schemes: Sequence[Scheme],
    tokenizer: str | None,
    written: ExplicitKeys,
) -> RunPlan[MemorizationWork]:
    """Describes a run; reads metadata, no weights.

    Args:
        config: with the fields that all memorization entry points have.
        target: the devices.
        jobs: the books or sets to score.
        entry_point: its name.
        checks: those made already.
        schemes: those that results must include.
        tokenizer: a tokenizer other than the checkpoint's own.
        written: the keys that the user wrote.
    """
    model, model_checks = model_block(config, written)
    assert jobs, "a run without jobs has nothing to describe"
    _check_folders_distinct(jobs)
    pretrained = describe_pretrained(
        ModelChoice.of(
            config,
            files=config.reference,
            saved=config.checkpoint_path,
            model=model,
            tokenizer=tokenizer,
        ),
        target,
        # The largest batch and the longest windows decide the activations.
        batch=lambda ways: max(_rounded(job.batch_size or DEFAULT_BATCH, ways) for job in jobs),
        positions=max(job.positions for job in jobs),
    )
    # The stored scores give full, greedy and k40; other schemes need a normalizer of their own from the Program.
    laws = sampling_laws(schemes)
    all_checks = [*checks, *model_checks, *pretrained.checks, *unsupported_option_checks(config, written)]
    if pretrained.local_tokenizer is not None:
        enforce = any(job.bos for job in jobs)
        note = bos_note(pretrained.local_tokenizer, enforce=enforce, what="window", key="bos")
        all_checks += [] if note is None else [Check(name="windows", status="note", message=note)]
    shaped: list[tuple[BookJob, BatchShape, str]] = []
    names: dict[BatchShape, str] = {}
    for job in jobs:
        check, rows = _batch(config, job, pretrained.resolved.batch_ways)
        all_checks += [check, *_length_checks(job, pretrained.config)]
        shape = BatchShape(rows=rows, positions=job.positions, suffix=job.suffix_tokens, padded=job.padded)
        # Jobs of the same shape share a Program; the first one is called `score`, as upstream's only one.
        names.setdefault(shape, "score" if not names else f"score_{len(names) + 1}")
        shaped.append((job, shape, names[shape]))
    programs = tuple(
        score_program(
            pretrained.abstract,
            shape,
            mappings=pretrained.resolved.mappings,
            placement=pretrained.sharding,
            batch_axis=pretrained.resolved.batch_axis,
            laws=laws,
            name=name,
            matmul_precision=pretrained.precision.matmul,
            compiler_options=pretrained.compiler_options,
        )
        for shape, name in names.items()
    )
    return pretrained.run_plan(
        entry_point,
        target,
        # Several jobs may give the same note.
        checks=tuple(dict.fromkeys(all_checks)),
        computing=programs,
        workloads=tuple(_workload(shape, name, shaped, pretrained) for shape, name in names.items()),
        work=MemorizationWork(config=config, pretrained=pretrained, jobs=tuple(shaped), laws=laws),
        searchable=pretrained.searchable(
            positions=max(job.positions for job in jobs),
            keys=lambda rows, ways: {"eval_batch_size": rows * ways},
        ),
    )


def _check_folders_distinct(jobs: Sequence[BookJob]) -> None:
    """Refuses jobs that would overwrite each other: names that differ in punctuation only share a folder."""
    by_folder: dict[str, list[str]] = {}
    for job in jobs:
        by_folder.setdefault(job.folder, []).append(job.key)
    shared = {folder: keys for folder, keys in by_folder.items() if len(keys) > 1}
    if shared:
        listed = "; ".join(f"{', '.join(map(repr, keys))} in {folder}" for folder, keys in shared.items())
        raise ValueError(
            f"several results would be written to one folder; use names that differ in letters or digits: {listed}"
        )


def model_block(config: Any, written: ExplicitKeys) -> tuple[ModelBlock | None, list[Check]]:
    """The `model:` block; with `use_hf_model_config`, only what the checkpoint does not contradict.

    Upstream never gave the block to the loader, so its configs carry blocks of other models.
    """
    block = ModelBlock.of(config.model, written)
    # The block is only relaxed where the user wrote `use_hf_model_config`.
    if block is None or getattr(config, "use_hf_model_config", None) is None or not config.reference:
        return block, []
    try:
        checkpoint = open_checkpoint(config.reference, allow_pickle=config.allow_pickle)
    except CheckpointError:
        return block, []
    try:
        merge_architecture(block, checkpoint.config, where=checkpoint.where)
    except CheckpointError as error:
        # Architecture fields are the checkpoint's; runtime settings (`gradient_checkpointing`, …) stay the user's.
        free = block.keys - set(family_for_config(type(checkpoint.config)).architecture_fields)
        model = replace(checkpoint.config, **{key: getattr(block.config, key) for key in sorted(free)})
        message = f"the checkpoint's architecture is used, as upstream does even if the block differs: {error}"
        # What remains contradicts nothing, so all of it counts as written.
        kept = ModelBlock(config=model, keys=ExplicitKeys.in_python(model).top)
        return kept, [Check(name="model block", status="note", message=message)]
    return block, []


def _rounded(rows: int, ways: int) -> int:
    return -(-rows // ways) * ways


def _batch(config: Any, job: BookJob, ways: int) -> tuple[Check, int]:
    requested = job.batch_size or DEFAULT_BATCH
    rows = _rounded(requested, ways)
    message = f"{rows} windows of {job.positions} tokens, {job.suffix_tokens} scored"
    if rows == requested:
        why = "eval_batch_size" if job.batch_size else "the default"
        return Check(name="batch", status="ok", message=f"{message}: {why}, sharded {ways} ways"), rows
    # The default batch size may be changed silently; an explicit one only with permission.
    if job.batch_size is None or config.allow_nondivisible_batch_size:
        why = f"{requested}, rounded up to a multiple of {ways} shards"
        return Check(name="batch", status="ok", message=f"{message}: {why}"), rows
    # The two nearest multiples of the shards; zero is none.
    legal = [n for n in (requested // ways * ways, rows) if n]
    error = ValueError(
        f"eval_batch_size: {requested} windows do not divide over the {ways} batch shards of the mesh\n"
        f"  → eval_batch_size: {' or '.join(map(str, legal))}, or allow_nondivisible_batch_size: true"
    )
    return Check(name="batch", status="error", message=str(error), error=error), rows


def _length_checks(job: BookJob, model: LmConfig) -> list[Check]:
    if job.positions <= model.max_seq_len:
        return []
    message = f"windows of {job.positions} tokens exceed the model's max_seq_len, {model.max_seq_len}"
    error = ValueError(f"{job.title}: {message}\n  → use shorter ones (chunk_size)")
    return [Check(name="window", status="error", message=message, error=error)]


def _workload(
    shape: BatchShape, name: str, jobs: Sequence[tuple[BookJob, BatchShape, str]], model: PretrainedModel
) -> Workload:
    """The work of a Program: all positions pass through the blocks, only the suffix through the head."""
    # 2 FLOPs a weight and token. The head is the difference of the counts with and without a vocabulary.
    body = 2.0 * model.config.matmul_parameters(0)
    head = 2.0 * model.config.matmul_parameters(model.Vocab.size) - body
    weights = shape.rows * (shape.positions * body + shape.suffix * head)

    def attention(pairs: Literal["causal", "full"]) -> float:
        # Attention FLOPs depend on the pairs of positions, weights do not.
        flops = model.config.flops(vocab_size=model.Vocab.size, context_length=shape.positions, attention=pairs)
        return flops.attention * shape.rows * shape.positions

    program_jobs = [job for job, _, program in jobs if program == name]
    counts = [job.windows for job in program_jobs]
    return Workload(
        program=name,
        tokens=shape.rows * shape.positions,
        unit="windows",
        items=shape.rows,
        flops_full=weights + attention("full"),
        flops_causal=weights + attention("causal"),
        # One unknown count makes the total unknown.
        executions=None if None in counts else sum(shape.batches(count) for count in counts if count is not None),
        reason="; ".join(f"{job.title}: {job.windows_reason}" for job in program_jobs),
    )
