"""Text from the weights of a training run, between its steps: the engine that `sample_prompts` and the harness use.

The engine is that of `generate`, over weights that are handed over instead of read: `hand_over` makes a copy of the
current parameters in the compute dtype and the shards of generation, the Programs of the engine read it, and both the
copy and the cache are freed before the next step. So a step needs no further memory, and the plan counts the copy and
the cache beside the whole training state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import haliax as hax
from jax.sharding import Mesh

from haliax_ext.abstract import leaves
from haliax_ext.errors import gib
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.program import Program
from haliax_ext.pytree import PyTree
from levanter.commands.model.compiler import CompilerChoice
from levanter.commands.model.generation import GenerationPlan, PlacedModel, describe_generation, with_whole_embed
from levanter.commands.model.live_config import TrainingGenerationConfig
from levanter.commands.model.sharding import plan_activation_sharding, resolve_mesh
from levanter.commands.model.text_generator import ProcessEngine, process_engine
from levanter.distributed.compile_barrier import jit_together
from levanter.inference.capacity import MAX_CPU_ROWS, MAX_ROWS
from levanter.inference.config import CHUNK
from levanter.inference.engine import DeviceRunner, make_schedule
from levanter.inference.hand_over import HandOver, generation_module, plan_hand_over
from levanter.inference.scheduler import Schedule
from levanter.mesh import MeshConfig, ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Target, Workload
from levanter.trainer.trainable import bind

TASK_ROWS = 8
"""Least number of rows for tasks of the harness, whose number of texts is not known before they are loaded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveGeneration:
    """The engine over the weights of a training run, described.

    Attributes:
        config: the configuration.
        engine: cache, Programs and their cost.
        hand_over: how the weights get there.
    """

    config: TrainingGenerationConfig
    engine: GenerationPlan
    hand_over: HandOver

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every Program, in order."""
        program = self.hand_over.program
        return (*(() if program is None else (program,)), *self.engine.programs.all)

    @property
    def coresident(self) -> Mapping[str, int]:
        """Program → bytes on a device of the copied weights while it runs.

        They are no part of the training state, from which the plan subtracts the inputs of a Program: here for
        Programs that take them to restore what is subtracted too much, and for the others because they stay.
        """
        return {program.name: self.hand_over.copied_bytes for program in self.engine.programs.all}

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The work of the engine's Programs."""
        return self.engine.workloads

    @property
    def schedule(self) -> Schedule:
        """The schedule of the rows."""
        return make_schedule(self.engine.programs, share_prefixes=self.config.share_prefixes)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Lines of the plan."""
        copy, engine = self.hand_over, self.engine
        shared = f", {len(copy.shared):,} of {len(copy.sharding.leaves):,} arrays are those of training"
        weights = (
            f"weights in {engine.model.precision.compute.name}{' and int8' if self.config.quantize else ''}: "
            f"{gib(copy.copied_bytes)} more on each device while text is generated, of which {gib(copy.moved_bytes)} "
            f"come from other devices{shared if copy.shared else ''}"
        )
        # The plan of training has lines of these names already, about its own kernels and rows.
        renamed = {"kernels": "generation", "rows": "generation", "prompts": "generation"}
        checks = [replace(check, name=renamed.get(check.name, check.name)) for check in engine.checks]
        errors = [
            Check(name="generation", status="error", message=str(error), error=error) for error in copy.sharding.errors
        ]
        return (Check(name="generation", status="ok", message=weights), *checks, *errors)


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveModel:
    """A model whose weights are on the devices for another purpose than generation, described.

    Attributes:
        config: the architecture.
        Vocab: rows of embedding and head.
        build: makes the model without adapters, abstract.
        trained: the trained parameters, abstract: those of the model, or adapters.
        frozen: the other parameters, abstract; None for none.
        sharding: the placement of both.
        mesh: the configuration of the mesh.
        resolved: mesh and mappings of the run.
        precision: the dtype policy.
        compiler: options for XLA.
    """

    config: LmConfig
    Vocab: hax.Axis
    build: Callable[[], LmHeadModel]
    trained: PyTree
    frozen: LmHeadModel | None
    sharding: ShardingPlan
    mesh: MeshConfig
    resolved: ResolvedMesh
    precision: Precision
    compiler: CompilerChoice


def describe_live_generation(
    live: LiveModel,
    config: TrainingGenerationConfig,
    target: Target,
    *,
    texts: int,
    length: int,
) -> LiveGeneration:
    """Describes the engine over the weights of a run.

    Args:
        live: the model of the run.
        config: the `generation:` block.
        target: the devices.
        texts: how many texts are generated at a time, at least.
        length: positions of a row, if the configuration does not set them.

    Raises:
        ValueError: the model has no cache, its weights have no such representation, or the rows cannot be sharded.
    """
    resolved = _resolved(live, config, target)
    module = generation_module(
        live.build,
        live.trained,
        live.frozen,
        dtype=live.precision.compute,
        int8=config.quantize is not None,
        tied_head=config.tied_head,
        platform=target.platform,
        devices=resolved.spec.size,
    )
    # A configured limit also bounds what may be replicated without a finding.
    hbm_bytes = live.mesh.hbm_bytes(target.hbm_bytes)
    sharding = plan_sharding(
        leaves(module),
        resolved.mappings,
        resolved.spec,
        hbm_bytes=hbm_bytes,
        on_conflict=live.mesh.on_conflict,
    )
    placed = PlacedModel(
        config=live.config,
        module=module,
        Vocab=live.Vocab,
        sharding=sharding,
        # One part of one prompt on each shard is the largest call.
        activations=plan_activation_sharding(
            live.config,
            resolved,
            rows=resolved.batch_ways,
            positions=_chunk(config),
            Vocab=live.Vocab,
            precision=live.precision,
        ),
        resolved=resolved,
        precision=live.precision,
        compiler_options=dict(live.compiler.working["generate"]),
        hbm_bytes=hbm_bytes,
    )
    config = _with_sizes(config, resolved, target, texts=texts, length=length)
    return LiveGeneration(
        config=config,
        engine=describe_generation(placed, config, target),
        hand_over=plan_hand_over(
            # As in an evaluation: the whole model, with adapters bound.
            bind(live.trained, live.frozen),
            live.sharding,
            module,
            sharding,
            mappings=resolved.mappings,
            compiler_options=live.compiler.default,
        ),
    )


def _chunk(config: TrainingGenerationConfig) -> int:
    return CHUNK if config.prefill_chunk == "auto" else config.prefill_chunk


def _resolved(live: LiveModel, config: TrainingGenerationConfig, target: Target) -> ResolvedMesh:
    """The mesh of the run with the mappings of generation."""
    # The engine then gathers weights for every token, and the copy is as small as the state's parameters.
    if config.mapping == "train":
        return live.resolved
    # The model's true vocabulary: the embedding's rows are those of training.
    assert live.config.vocab_size is not None
    resolved = resolve_mesh(
        target,
        with_whole_embed(live.mesh),
        live.config,
        vocab=live.config.vocab_size,
        positions=_chunk(config),
        precision=live.precision,
        backward=False,
    )
    assert resolved.spec == live.resolved.spec, f"{resolved.spec} for generation, {live.resolved.spec} for the run"
    return resolved


def _with_sizes(
    config: TrainingGenerationConfig, resolved: ResolvedMesh, target: Target, *, texts: int, length: int
) -> TrainingGenerationConfig:
    """The configuration with the number of rows and their length."""
    rows = config.max_rows
    if rows == "auto":
        shards = resolved.batch_ways
        # At least one row on each shard, and a multiple of the shards.
        most = max(shards, (MAX_CPU_ROWS if target.platform == "cpu" else MAX_ROWS) // shards * shards)
        rows = min(-(-texts // shards) * shards, most)
    return replace(config, max_rows=rows, max_seq_len=config.max_seq_len or length)


class LiveEngine:
    """The engine of a run in progress.

    Args:
        generation: its description.
        mesh: the devices.
    """

    def __init__(self, generation: LiveGeneration, mesh: Mesh):
        self._generation, self._mesh = generation, mesh
        self._rows: DeviceRunner | None = None

    @contextmanager
    def over(self, model: PyTree) -> Iterator[ProcessEngine]:
        """The engine over a trained model, on every process; its memory is freed when the block ends.

        Args:
            model: bound, on the devices. It must not be donated before the block ends.
        """
        generation = self._generation
        # Every process hands over: the Program has collectives.
        weights = generation.hand_over(model, self._mesh, jit=jit_together)
        if self._rows is None:
            self._rows = DeviceRunner(generation.engine.programs, self._mesh, weights, jit=jit_together)
        else:
            # Nothing of earlier weights is kept: neither pages, nor the prefixes that were found in them.
            self._rows.update(weights)
        del weights
        try:
            with process_engine(self._rows, generation.schedule) as started:
                yield started
        # Also after an error, so that a run that goes on has its memory.
        finally:
            self._rows.release()
