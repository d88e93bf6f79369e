"""The description of generation: cache, Programs and their cost for a model in memory, wherever its weights come from.

`generate`, `serve` and the harness read a checkpoint's weights into the layout of generation; training hands the
weights of its state over (`levanter.inference.hand_over`). Both describe the engine with `describe_generation`, so the
same model has the same Programs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import haliax as hax
import jax.numpy as jnp
import numpy as np

from haliax_ext.errors import gib
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import PyTree
from levanter.commands.model.scoring_common import context_length_checks
from levanter.config import ExplicitKeys
from levanter.inference.capacity import ASSUMED_TEMP_BYTES, MAX_CPU_ROWS, MAX_ROWS, DecodeCost, decode_cost
from levanter.inference.config import CHUNK, InferenceConfig
from levanter.inference.kv_cache import KIND_NAMES, CachePlan, plan_cache
from levanter.inference.programs import GenerationPrograms, ServedModel, generation_programs
from levanter.mesh import ResolvedMesh
from levanter.mesh.config import DEFAULT_BATCH_AXES, MeshConfig
from levanter.models.base import Decodes
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Target, Workload
from levanter.trainer.config import TrainerConfig

TILE = 128
"""Positions of a TPU tile: pages of a multiple of it are read without a relayout."""
CPU_BLOCK = 128
"""Positions of the cache that a decode step on CPUs reads at a time, up to the end of its longest row. A TPU computes
one product over all positions."""
SNAPSHOTS_PER_ROW = 1
"""Snapshots of state that pages cannot share, for each row: they take as much memory as that state of the rows."""
HOST_SHARE = 2
"""The divisor for memory that devices share with the rest of a host: rows take at most this part of it."""
_GPU_PREFILL_BYTES = 512 << 20
"""What prefill calls take on GPUs beside the assumed temporaries: scores of 512 queries of 32 heads over 8,192
positions are half a GiB in float32. Llama 3.1 8B took 0.82 GiB in all, compiled for h100x1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedModel:
    """A model that generates text: its module and placement, without the source of its weights.

    Attributes:
        config: the architecture, resolved for the platform.
        module: abstract, in the dtypes and the layout that the Programs take.
        Vocab: rows of its embedding.
        sharding: the sharding of its parameters.
        activations: the named activations of the largest prefill call.
        resolved: mesh and mappings.
        precision: the dtype policy.
        compiler_options: XLA options of the Programs.
        hbm_bytes: memory of a device by the configuration; None if neither it nor the device limits it.
    """

    config: LmConfig
    module: PyTree
    Vocab: hax.Axis
    sharding: ShardingPlan
    activations: ShardingPlan
    resolved: ResolvedMesh
    precision: Precision
    compiler_options: dict[str, str]
    hbm_bytes: int | None

    @property
    def decodes(self) -> Decodes:
        """The module, which continues texts.

        Raises:
            ValueError: it does not.
        """
        if isinstance(self.module, Decodes):
            return self.module
        raise ValueError(
            f"text cannot be generated with a {type(self.module).__name__}: it does not continue texts (it lacks "
            "`start` and `advance` of levanter.models.base.Decodes)"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationPlan:
    """The engine of a model, described.

    Attributes:
        model: the model.
        inference: the configuration of the rows.
        programs: the Programs, with their cache.
        cost: memory and traffic of a decode step.
        workloads: the work of a decode step at full length, and of each prefill call.
        checks: lines of the plan.
    """

    model: PlacedModel
    inference: InferenceConfig
    programs: GenerationPrograms
    cost: DecodeCost
    workloads: tuple[Workload, ...]
    checks: tuple[Check, ...]

    @property
    def cache(self) -> CachePlan:
        """The cache of all rows."""
        return self.programs.cache

    @property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes on a device, by kind."""
        state = {KIND_NAMES[kind]: nbytes for kind, nbytes in self.cache.bytes_by_kind.items()}
        return {"parameters": self.model.sharding.bytes_per_device, **state}

    @property
    def coresident_bytes(self) -> dict[str, int]:
        """Bytes on a device that are allocated while a Program runs and are not among its inputs, by its name."""
        return {
            # Allocating the cache takes no input; the parameters are already there.
            self.programs.start.name: self.model.sharding.bytes_per_device,
            # Prompt scoring does not take the cache, which stays in memory.
            **{planned.name: self.cache.bytes_per_device for planned in self.programs.score.values()},
        }


def describe_generation(
    model: PlacedModel,
    inference: InferenceConfig,
    target: Target,
) -> GenerationPlan:
    """Describes the engine of a model for `target`; needs no weights and no device.

    Args:
        model: the model, wherever its weights come from.
        inference: rows and their cache.
        target: the devices.

    Raises:
        ValueError: the model has no cache, or the rows cannot be sharded over the mesh. Errors of the cache's sharding
            are among the checks.
    """

    # Called for several row counts while the number of rows is chosen.
    def cache_with(rows: int) -> CachePlan:
        return plan_cache(
            model.decodes,
            model.resolved.mappings,
            model.resolved.spec,
            batch_axis=model.resolved.batch_axis,
            rows=rows,
            max_seq_len=inference.max_seq_len or model.config.max_seq_len,
            dtype=_cache_dtype(inference, model, target),
            allocation=inference.allocation,
            page_size=inference.page_size,
            pages=inference.pages,
            snapshots_per_row=SNAPSHOTS_PER_ROW if inference.share_prefixes else 0,
            hbm_bytes=model.hbm_bytes,
        )

    cache, why = _plan_slots(cache_with, model, inference, target)
    programs = _programs(model, cache, inference, target)
    return GenerationPlan(
        model=model,
        inference=inference,
        programs=programs,
        cost=_decode_cost(
            model,
            cache,
            inference,
            decode={cache.rows: programs.decode.name},
            prefill={program.name: bucket for bucket, program in programs.prefill.items()},
        ),
        workloads=_workloads(model, programs),
        checks=_checks(model, inference, cache, why, target),
    )


def whole_parameters(trainer: TrainerConfig, written: ExplicitKeys) -> tuple[TrainerConfig, tuple[str, ...]]:
    """The trainer with parameters stored as they are used: FSDP would gather all of them for every token."""
    mesh = trainer.mesh
    # A placement that the user wrote is not changed.
    if "embed" in mesh.param_mapping and "trainer.mesh.param_mapping" in written:
        return trainer, ()
    note = "trainer.mesh.param_mapping: embed is whole on every device, so that no token waits for gathered weights"
    return replace(trainer, mesh=with_whole_embed(mesh)), (note,)


def with_whole_embed(mesh: MeshConfig) -> MeshConfig:
    """The mesh with parameters that are whole along `embed`."""
    rules = {**mesh.param_mapping, "embed": None}
    # Parameters that lie whole on the batch axes are intended here, so they are no finding of silent replication.
    return replace(mesh, param_mapping=rules, allow_replicated=[*mesh.allow_replicated, *DEFAULT_BATCH_AXES])


def _checks(
    model: PlacedModel, inference: InferenceConfig, cache: CachePlan, why: str, target: Target
) -> tuple[Check, ...]:
    """The checks of the engine; `why` explains the number of rows."""
    checks = [*_length_checks(inference, cache.max_seq_len, model.config)]
    checks += [*_tile_notes(inference, cache, target), *_slow_cache_notes(inference, cache, target)]
    checks += _stack_notes(model.config, target)
    checks.append(Check(name="kernels", status="ok", message="attention to the cache: the plain formula"))
    checks.append(Check(name="cache", status="ok", message=str(cache)))
    checks += [Check(name="rows", status="note", message=why)] if why else []
    checks += [Check(name="cache", status="error", message=str(e), error=e) for e in cache.sharding.errors]
    return (*checks, *_chunk_notes(inference, cache, target), *_prefix_notes(inference, cache))


def _chunk_notes(inference: InferenceConfig, cache: CachePlan, target: Target) -> tuple[Check, ...]:
    """A note on the prefill chunk where `auto` differs from the common value."""
    rows = cache.rows_per_shard
    if inference.prefill_chunk != "auto" or (chunk := inference.chunk(rows, platform=target.platform)) == CHUNK:
        return ()
    message = (
        f"{inference.range_prefix}prefill_chunk: auto is {chunk}: on CPUs a call takes as long as it has tokens, and "
        f"{rows} rows get theirs between two of them"
    )
    return (Check(name="prompts", status="note", message=message),)


def _prefix_notes(inference: InferenceConfig, cache: CachePlan) -> tuple[Check, ...]:
    """A note if rows share the pages of a common prefix up to a snapshot only."""
    if not cache.snapshots:
        return ()
    message = (
        f"{inference.range_prefix}share_prefixes: prefixes are shared up to the last of {cache.snapshots:,} snapshots: "
        "some layers keep a state of fixed size for each row, which is copied at the ends of pages"
    )
    return (Check(name="prompts", status="note", message=message),)


def _cache_dtype(inference: InferenceConfig, model: PlacedModel, target: Target) -> np.dtype:
    """The dtype of keys and values in the cache: the compute dtype unless the config has another one.

    On CPUs float32 takes the place of bfloat16: XLA converts the entire cache and back for what a layer writes.
    """
    if inference.cache_dtype is not None:
        return jnp.dtype(inference.cache_dtype)
    compute = model.precision.compute
    # See `_slow_cache_notes`.
    return jnp.dtype(jnp.float32) if target.platform == "cpu" and compute == jnp.bfloat16 else compute


def _programs(model: PlacedModel, cache: CachePlan, inference: InferenceConfig, target: Target) -> GenerationPrograms:
    """The Programs of the run."""
    served = ServedModel(
        abstract=model.decodes,
        sharding=model.sharding,
        counts_tokens=inference.penalties,
        # On CPUs the time grows with the positions read, so only filled blocks are read.
        cache_block=CPU_BLOCK if target.platform == "cpu" else None,
        matrix_unit=target.platform == "tpu",
        matmul_precision=model.precision.matmul,
        compiler_options=dict(model.compiler_options),
    )
    prefill = inference.prefill_calls(cache.rows_per_shard, cache.max_seq_len, platform=target.platform)
    longest = min(CHUNK if inference.prefill_chunk == "auto" else inference.prefill_chunk, cache.max_seq_len)
    # Prompt scores need the longest chunk and the whole context.
    score = (longest, cache.max_seq_len) if inference.prompt_logprobs else ()
    return generation_programs(served, cache, prefill=prefill, steps=inference.steps, score=score)


def _length_checks(inference: InferenceConfig, length: int, model: LmConfig) -> list[Check]:
    """Refuses or notes rows that are longer than the trained context."""
    if length <= model.max_seq_len:
        return []
    key = f"{inference.range_prefix}max_seq_len:"
    return context_length_checks(model, f"{key} {length:,} positions", name="rows", advice=key)


def _tile_notes(inference: InferenceConfig, cache: CachePlan, target: Target) -> list[Check]:
    """A note if the pages of a TPU's cache do not fill its tiles."""
    if target.platform != "tpu" or cache.page_size % TILE == 0:
        return []
    key = inference.range_prefix + ("max_seq_len" if cache.allocation == "fixed" else "page_size")
    message = (
        f"{key}: {cache.page_size:,} positions do not fill tiles of {TILE}: a decode step of 70B on v6e-8 had 2.4 "
        f"times the cycles with 1,500 that it had with 1,536; "
        f"{-(-cache.page_size // TILE) * TILE:,} is the next multiple"
    )
    return [Check(name="cache", status="note", message=message)]


def _stack_notes(model: LmConfig, target: Target) -> list[Check]:
    """A note on the cost of stacked layers on GPUs."""
    if target.platform != "gpu" or not getattr(model, "scan_layers", False):
        return []
    message = (
        "model.scan_layers: XLA for GPUs copies the weights of each layer out of the stack before it multiplies by "
        "them: with false a decode step of 4 layers of Llama 3.1 8B on an H100 takes 3.15 ms and not 4.45 (modelled), "
        "and each layer is compiled by itself"
    )
    return [Check(name="layers", status="note", message=message)]


def _slow_cache_notes(inference: InferenceConfig, cache: CachePlan, target: Target) -> list[Check]:
    """A note on the cost of a bfloat16 cache on CPUs."""
    if target.platform != "cpu" or cache.dtype.name != "bfloat16":
        return []
    message = (
        f"{inference.range_prefix}cache_dtype: bfloat16: XLA for CPUs converts the entire cache and back for what each "
        "layer writes, which takes a hundred times as long as the rest of a step; float32, the default here, and "
        "float16 are written in place"
    )
    return [Check(name="cache", status="note", message=message)]


def _workloads(model: PlacedModel, programs: GenerationPrograms) -> tuple[Workload, ...]:
    """The work of a decode step at full length, and of each prefill call."""
    cache = programs.cache

    def total_flops(rows: int, tokens: int, kind: Literal["causal", "full"]) -> float:
        flops = model.config.flops(vocab_size=model.Vocab.size, context_length=cache.max_seq_len, attention=kind)
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


def _plan_slots(
    make: Callable[[int], CachePlan], model: PlacedModel, inference: InferenceConfig, target: Target
) -> tuple[CachePlan, str]:
    """The cache of a run, and the reason for its number of rows; "" if the config sets the number.

    Args:
        make: rows → cache.
        model: the model.
        inference: the config.
        target: the devices.

    Raises:
        ValueError: the number is `auto`, and the memory of a device is unknown.
    """
    if inference.max_rows != "auto":
        return make(inference.max_rows), ""
    key = f"{inference.range_prefix}max_rows"
    shards, configured = model.resolved.batch_ways, model.hbm_bytes
    least = make(shards)
    limit = target.limit_bytes if configured is None else configured
    if limit is None:
        raise ValueError(
            f"{key}: auto: the memory of a device of {target.name} is not known, so neither is "
            f"how many rows it holds\n  → {key}: {max(8 // shards, 1) * shards}, or trainer.mesh.hbm_gib"
        )
    shared = configured is None and target.hbm_bytes is None
    value = _decode_cost(model, least, inference, decode={}, prefill={})
    reserved = _program_bytes(model)
    if target.platform == "gpu":
        # XLA for GPUs copies the keys and values of the layer that it is at, of all rows, out of the cache.
        layers = sum(count for _, count in value.mixers)
        reserved += _GPU_PREFILL_BYTES
        reserved += max(0, limit - value.weights.total - reserved) // (layers + 1)
    # The largest number of rows whose cache, with weights and temporaries, stays below the limit.
    most = value.fitting(limit // (HOST_SHARE if shared else 1), _pages_per_slot(least, inference), temp_bytes=reserved)
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
    return make(rows), f"{key}: auto is {rows}: {why}"


def _pages_per_slot(cache: CachePlan, inference: InferenceConfig) -> int:
    """Positions that a slot reserves: its whole pages, or 1 if the number of pages is configured separately."""
    # With configured pages the size of the cache is fixed, so further rows cost hardly anything.
    return cache.pages_per_row * cache.page_size if inference.pages is None else 1


def _program_bytes(model: PlacedModel) -> int:
    """Bytes on a device that Programs need besides their inputs: activations of a prefill chunk and temporaries."""
    return ASSUMED_TEMP_BYTES + sum(planned.bytes_per_device for planned in model.activations.leaves)


def _decode_cost(
    model: PlacedModel,
    cache: CachePlan,
    inference: InferenceConfig,
    *,
    decode: dict[int, str],
    prefill: dict[str, tuple[int, int]],
) -> DecodeCost:
    """Memory and traffic of decoding.

    Args:
        model: the model.
        cache: of its rows.
        inference: the config.
        decode, prefill: see `DecodeCost`.
    """
    return decode_cost(
        model.config,
        model.sharding,
        cache,
        vocab_size=model.Vocab.size,
        devices=model.resolved.spec.size,
        steps=inference.steps,
        decode=decode,
        prefill=prefill,
        counts_tokens=inference.penalties,
        automatic=inference.max_rows == "auto",
        temp_bytes=_program_bytes(model),
    )
