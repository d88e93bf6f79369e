"""The plan of `generate`: the model, its KV cache, and the Programs that fill and read it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from haliax_ext.errors import gib
from levanter.commands.cli.outputs import output_checks
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.model.pretrained import ModelChoice, PretrainedModel, describe_pretrained
from levanter.commands.model.scoring_common import context_length_checks
from levanter.commands.model.source import ModelBlock
from levanter.commands.model.unsupported import unsupported_option_checks
from levanter.config import ExplicitKeys
from levanter.data.chat import is_template
from levanter.inference.capacity import ASSUMED_TEMP_BYTES, MAX_CPU_ROWS, MAX_ROWS, DecodeCost, decode_cost
from levanter.inference.config import CHUNK, InferenceConfig
from levanter.inference.kv_cache import CachePlan, plan_cache
from levanter.inference.programs import GenerationPrograms, ServedModel, generation_programs
from levanter.io import exists, is_remote, local_path, special_kind
from levanter.mesh.config import DEFAULT_BATCH_AXES
from levanter.models.decoder.config import DecoderConfig
from levanter.runplan import Check, RunPlan, Target, Workload
from levanter.trainer.config import TrainerConfig

NAME = "generate"
TILE = 128
"""Positions of a TPU tile: pages of a multiple of it are read without a relayout."""
CPU_BLOCK = 128
"""Positions of the cache that a decode step on CPUs reads at a time, up to the end of its longest row. A TPU computes
one product over all positions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        pretrained: the model.
        programs: the Programs that fill and read the cache.
        serving: memory and traffic of a decode step.
    """

    config: GenerateConfig
    pretrained: PretrainedModel
    programs: GenerationPrograms
    serving: DecodeCost


def describe(config: GenerateConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[GenerateWork]:
    """Describes the run for `target`; reads metadata, no weights.

    At a terminal one row is used at a time; there are as many rows as the mesh has shards of the batch.

    Args:
        config: what is generated.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows cannot be cut over it.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    inference = config.inference
    trainer, notes = _whole_parameters(config.trainer, written)
    pretrained = describe_pretrained(
        ModelChoice.of(
            replace(config, trainer=trainer),
            files=config.hf_checkpoint,
            saved=config.checkpoint_path,
            model=ModelBlock.of(config.model, written),
            tokenizer=config.tokenizer,
        ),
        target,
        # One part of one prompt on each shard is the largest call, so it decides the activations.
        batch=lambda ways: ways,
        positions=CHUNK if inference.prefill_chunk == "auto" else inference.prefill_chunk,
        work="generate",
    )
    model = pretrained.config
    if not isinstance(model, DecoderConfig):
        raise ValueError(f"text cannot be generated with a {type(model).__name__} yet: it has no cache")
    length = inference.max_seq_len or model.max_seq_len
    ways = pretrained.resolved.batch_ways
    if config.interactive and (rows := _at_terminal(inference, ways)) != inference.max_rows:
        inference = replace(inference, max_rows=rows)
        notes = (*notes, f"inference.max_rows: {rows}, one for each shard of the batch: a terminal asks one at a time")

    # Called for several row counts while the number of rows is chosen.
    def cache_with(rows: int) -> CachePlan:
        return plan_cache(
            model,
            pretrained.resolved.mappings,
            pretrained.resolved.spec,
            batch_axis=pretrained.resolved.batch_axis,
            rows=rows,
            max_seq_len=length,
            dtype=_cache_dtype(inference, pretrained, target),
            allocation=inference.allocation,
            page_size=inference.page_size,
            pages=inference.pages,
            hbm_bytes=trainer.mesh.hbm_bytes(target.hbm_bytes),
        )

    cache, why = plan_slots(cache_with, model, inference, pretrained, target, shards=ways)
    programs = _programs(pretrained, cache, inference, target)
    checks = _checks(config, written, pretrained, cache, why, target)
    checks += _chunk_notes(inference, cache, target)
    parameters = pretrained.sharding.bytes_per_device
    serving = plan_decode_cost(
        model,
        pretrained,
        cache,
        inference,
        decode={cache.rows: programs.decode.name},
        prefill={program.name: bucket for bucket, program in programs.prefill.items()},
        chip_hour_price=config.plan.chip_hour_price,
    )
    return pretrained.run_plan(
        NAME,
        target,
        checks=checks,
        computing=programs.all,
        workloads=_workloads(pretrained, programs),
        notes=notes,
        work=GenerateWork(config=config, pretrained=pretrained, programs=programs, serving=serving),
        resident_bytes={"parameters": parameters, "cache": cache.bytes_per_device},
        coresident_bytes={
            # Allocating the cache takes no input; the parameters are already there.
            programs.start.name: parameters,
            # Prompt scoring does not take the cache, which stays in memory.
            **{planned.name: cache.bytes_per_device for planned in programs.score.values()},
        },
        searchable="layouts of generation are not searched yet",
    )


def _checks(
    config: GenerateConfig,
    written: ExplicitKeys,
    pretrained: PretrainedModel,
    cache: CachePlan,
    why: str | None,
    target: Target,
) -> tuple[Check, ...]:
    """The checks of the plan; `why` explains the number of rows."""
    assert isinstance(pretrained.config, DecoderConfig)
    # The kernel check is about attention within whole sequences; attention to a cache has its own line below.
    checks = [check for check in pretrained.checks if check.name != "kernels"]
    checks += [*unsupported_option_checks(config, written), *_length_checks(cache.max_seq_len, pretrained.config)]
    checks += [*_tile_notes(cache, target), *_slow_cache_notes(cache, target)]
    checks.append(Check(name="kernels", status="ok", message="attention to the cache: the plain formula"))
    checks.append(Check(name="cache", status="ok", message=str(cache)))
    checks += [Check(name="rows", status="note", message=why)] if why else []
    checks += [Check(name="cache", status="error", message=str(e), error=e) for e in cache.sharding.errors]
    return (*checks, *template_checks(config.chat_template), *_file_checks(config))


def _chunk_notes(inference: InferenceConfig, cache: CachePlan, target: Target) -> tuple[Check, ...]:
    """A note on the prefill chunk where `auto` differs from the common value."""
    rows = cache.rows_per_shard
    if inference.prefill_chunk != "auto" or (chunk := inference.chunk(rows, platform=target.platform)) == CHUNK:
        return ()
    message = (
        f"inference.prefill_chunk: auto is {chunk}: on CPUs a call takes as long as it has tokens, and {rows} rows get "
        "theirs between two of them"
    )
    return (Check(name="prompts", status="note", message=message),)


def _at_terminal(inference: InferenceConfig, ways: int) -> int:
    """The rows of an interactive run: one for each shard, or the configured number."""
    wanted = inference.max_rows
    # Rounded up to a multiple of the shards.
    return ways if wanted == "auto" else -(-wanted // ways) * ways


def _whole_parameters(trainer: TrainerConfig, written: ExplicitKeys) -> tuple[TrainerConfig, tuple[str, ...]]:
    """The trainer with parameters stored as they are used: FSDP would gather all of them for every token."""
    mesh = trainer.mesh
    # A placement that the user wrote is not changed.
    if "embed" in mesh.param_mapping and "trainer.mesh.param_mapping" in written:
        return trainer, ()
    rules = {**mesh.param_mapping, "embed": None}
    # Parameters that lie whole on the batch axes are intended here, so they are no finding of silent replication.
    allowed = [*mesh.allow_replicated, *DEFAULT_BATCH_AXES]
    changed = replace(mesh, param_mapping=rules, allow_replicated=allowed)
    note = "trainer.mesh.param_mapping: embed is whole on every device, so that no token waits for gathered weights"
    return replace(trainer, mesh=changed), (note,)


def _cache_dtype(inference: InferenceConfig, pretrained: PretrainedModel, target: Target) -> np.dtype:
    """The dtype of keys and values in the cache: the compute dtype unless the config has another one.

    On CPUs float32 takes the place of bfloat16: XLA converts the entire cache and back for what a layer writes.
    """
    import jax.numpy as jnp

    if inference.cache_dtype is not None:
        return jnp.dtype(inference.cache_dtype)
    compute = pretrained.precision.compute
    # See `_slow_cache_notes`.
    return jnp.dtype(jnp.float32) if target.platform == "cpu" and compute == jnp.bfloat16 else compute


def _programs(
    pretrained: PretrainedModel, cache: CachePlan, inference: InferenceConfig, target: Target
) -> GenerationPrograms:
    """The Programs of the run."""
    served = ServedModel(
        abstract=pretrained.abstract,
        sharding=pretrained.sharding,
        counts_tokens=inference.penalties,
        # On CPUs the time grows with the positions read, so only filled blocks are read.
        cache_block=CPU_BLOCK if target.platform == "cpu" else None,
        matrix_unit=target.platform == "tpu",
        matmul_precision=pretrained.precision.matmul,
        compiler_options=dict(pretrained.compiler_options),
    )
    prefill = inference.prefill_calls(cache.rows_per_shard, cache.max_seq_len, platform=target.platform)
    longest = min(CHUNK if inference.prefill_chunk == "auto" else inference.prefill_chunk, cache.max_seq_len)
    # Prompt scores need the longest chunk and the whole context.
    score = (longest, cache.max_seq_len) if inference.prompt_logprobs else ()
    return generation_programs(served, cache, prefill=prefill, steps=inference.steps, score=score)


def _length_checks(length: int, model: DecoderConfig) -> list[Check]:
    """Refuses or notes rows that are longer than the trained context."""
    if length <= model.max_seq_len:
        return []
    message = f"inference.max_seq_len: {length:,} positions"
    return context_length_checks(model, message, name="rows", advice="inference.max_seq_len:")


def _tile_notes(cache: CachePlan, target: Target) -> list[Check]:
    """A note if the pages of a TPU's cache do not fill its tiles."""
    if target.platform != "tpu" or cache.page_size % TILE == 0:
        return []
    key = "inference.max_seq_len" if cache.allocation == "fixed" else "inference.page_size"
    message = (
        f"{key}: {cache.page_size:,} positions do not fill tiles of {TILE}: a decode step of 70B on v6e-8 had 2.4 "
        f"times the cycles with 1,500 that it had with 1,536; "
        f"{-(-cache.page_size // TILE) * TILE:,} is the next multiple"
    )
    return [Check(name="cache", status="note", message=message)]


def _slow_cache_notes(cache: CachePlan, target: Target) -> list[Check]:
    """A note on the cost of a bfloat16 cache on CPUs."""
    if target.platform != "cpu" or cache.abstract.pages[0].dtype.name != "bfloat16":
        return []
    message = (
        "inference.cache_dtype: bfloat16: XLA for CPUs converts the entire cache and back for what each layer writes, "
        "which takes a hundred times as long as the rest of a step; float32, the default here, and float16 are "
        "written in place"
    )
    return [Check(name="cache", status="note", message=message)]


def _file_checks(config: GenerateConfig) -> list[Check]:
    checks = []
    if config.interactive:
        return checks
    for key, path in (("input_path", config.input_path), ("output_path", config.output_path)):
        if path is None:
            message = "a run needs it; a plan does not"
            checks.append(Check(name=key, status="unchecked", message=message, error=ValueError(f"{key}: {message}")))
    if config.input_path is not None and not exists(config.input_path):
        message = f"{config.input_path}: no such file"
        error = ValueError(f"input_path: {message}")
        checks.append(Check(name="input_path", status="unchecked", message=message, error=error))
    if config.output_path is not None:
        checks += output_checks("output_path", config.output_path)
    for key, problem in _not_files(config):
        error = ValueError(problem)
        checks.append(Check(name=key, status="unchecked", message=problem, error=error))
    return checks


def _not_files(config: GenerateConfig) -> Iterator[tuple[str, str]]:
    """Problems of paths that exist but are no regular files, or the same file twice; by key."""
    read, written = config.input_path, config.output_path
    # Read twice: for the identity of the run, and for its requests.
    if read is not None and (kind := _kind(read)) is not None:
        yield "input_path", f"input_path: {read} is a {kind}; a run reads its prompts twice\n  → name a file"
    if written is not None and (kind := _kind(written)) is not None:
        yield (
            "output_path",
            f"output_path: {written} is a {kind}; resuming a run needs a regular file\n  → name a file",
        )
    if read is not None and written is not None and _same_file(read, written):
        yield "output_path", f"output_path: {written} is the file of the prompts\n  → name another file"


def _kind(path: str) -> str | None:
    return None if is_remote(path) else special_kind(path)


def _same_file(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        # Symbolic links and relative paths may name one file.
        return one == other
    return os.path.realpath(local_path(one)) == os.path.realpath(local_path(other))


def _workloads(pretrained: PretrainedModel, programs: GenerationPrograms) -> tuple[Workload, ...]:
    """The work of a decode step at full length, and of each prefill call."""
    cache = programs.cache

    def total_flops(rows: int, tokens: int, kind: Literal["causal", "full"]) -> float:
        flops = pretrained.config.flops(
            vocab_size=pretrained.Vocab.size, context_length=cache.max_seq_len, attention=kind
        )
        return rows * tokens * flops.scoring

    # A decode call gives each row `steps` tokens.
    sizes = [(programs.decode.name, cache.rows, programs.steps)]
    sizes += [(program.name, rows, tokens) for (rows, tokens), program in programs.prefill.items()]
    sizes += [(program.name, cache.shards, tokens) for tokens, program in programs.score.items()]
    return tuple(
        Workload(
            program=name,
            tokens=rows * tokens,
            unit="tokens",
            items=rows * tokens,
            flops_full=total_flops(rows, tokens, "full"),
            # A decode step attends to every position before its token, which is the full context here.
            flops_causal=total_flops(rows, tokens, "full" if name == programs.decode.name else "causal"),
            executions=None,
            reason="how many depends on the prompts and on how long the texts get",
        )
        for name, rows, tokens in sizes
    )


def template_checks(template: str | None) -> Iterator[Check]:
    """An `unchecked` check if the template's file does not exist here."""
    if template is not None and not is_template(template) and not exists(template):
        error = ValueError(f"chat_template: {template}: no such file, and no Jinja either")
        yield Check(name="chat_template", status="unchecked", message=str(error), error=error)


HOST_SHARE = 2
"""The divisor for memory that devices share with the rest of a host: rows take at most this part of it."""


def plan_slots(
    make: Callable[[int], CachePlan],
    model: DecoderConfig,
    inference: InferenceConfig,
    pretrained: PretrainedModel,
    target: Target,
    *,
    shards: int,
) -> tuple[CachePlan, str]:
    """The cache of a run, and the reason for its number of rows; "" if the config sets the number.

    Args:
        make: rows → cache.
        model: the architecture.
        inference: the config.
        pretrained: the model on its mesh.
        target: the devices.
        shards: of the rows.

    Raises:
        ValueError: the number is `auto`, and the memory of a device is unknown.
    """
    if inference.max_rows != "auto":
        return make(inference.max_rows), ""
    least = make(shards)
    configured = pretrained.choice.trainer.mesh.hbm_bytes(target.hbm_bytes)
    limit = target.limit_bytes if configured is None else configured
    if limit is None:
        raise ValueError(
            f"inference.max_rows: auto: the memory of a device of {target.name} is not known, so neither is "
            f"how many rows it holds\n  → inference.max_rows: {max(8 // shards, 1) * shards}, or trainer.mesh.hbm_gib"
        )
    shared = configured is None and target.hbm_bytes is None
    value = plan_decode_cost(model, pretrained, least, inference, decode={}, prefill={})
    reserved = program_bytes(pretrained)
    # The largest number of rows whose cache, with weights and temporaries, stays below the limit.
    most = value.fitting(limit // (HOST_SHARE if shared else 1), pages_per_slot(least, inference), temp_bytes=reserved)
    # Configured pages limit the rows too: each row needs at least the pages of one context.
    if inference.pages is not None:
        most = min(most, inference.pages // shards // least.pages_per_row * shards)
    taken = MAX_CPU_ROWS if target.platform == "cpu" else MAX_ROWS
    # A multiple of the shards, and at least one row on each.
    rows = max(shards, min(most, taken // shards * shards))
    why = f"{most:,} of {least.max_seq_len:,} positions fit {gib(limit)} a device"
    why += ", of which the machine keeps half" if shared else ""
    why += f", with {gib(reserved)} left for what Programs make"
    if most > rows:
        why += f"; {taken} are taken at most"
        why += ", since on CPUs more of them make hardly more tokens a second" if target.platform == "cpu" else ""
    return make(rows), f"inference.max_rows: auto is {rows}: {why}"


def pages_per_slot(cache: CachePlan, inference: InferenceConfig) -> int:
    """Positions that a slot reserves: its whole pages, or 1 if the number of pages is configured separately."""
    # With configured pages the size of the cache is fixed, so further rows cost hardly anything.
    return cache.pages_per_row * cache.page_size if inference.pages is None else 1


def program_bytes(pretrained: PretrainedModel) -> int:
    """Bytes on a device that Programs need besides their inputs: activations of a prefill chunk and temporaries."""
    return ASSUMED_TEMP_BYTES + sum(planned.bytes_per_device for planned in pretrained.activations.leaves)


def plan_decode_cost(
    model: DecoderConfig,
    pretrained: PretrainedModel,
    cache: CachePlan,
    inference: InferenceConfig,
    *,
    decode: dict[int, str],
    prefill: dict[str, tuple[int, int]],
    chip_hour_price: float | None = None,
) -> DecodeCost:
    """Memory and traffic of decoding.

    Args:
        model: the architecture.
        pretrained: the model on its mesh.
        cache: of its rows.
        inference: the config.
        decode, prefill: see `DecodeCost`.
        chip_hour_price: dollars.
    """
    return decode_cost(
        model,
        pretrained.sharding,
        cache,
        vocab_size=pretrained.Vocab.size,
        devices=pretrained.resolved.spec.size,
        steps=inference.steps,
        decode=decode,
        prefill=prefill,
        counts_tokens=inference.penalties,
        automatic=inference.max_rows == "auto",
        temp_bytes=program_bytes(pretrained),
        chip_hour_price=chip_hour_price,
    )
