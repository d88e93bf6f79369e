"""From "which model, on which mesh" to all that a run needs of it: what entry points that read weights share.

`describe_pretrained` finds the model (`origin`), resolves the mesh for its axes, plans every parameter's place and the
bytes to read, and collects what is wrong and what is not at hand. `load_pretrained` then streams the weights.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
from jax.sharding import Mesh

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.activations import plan_activations
from haliax_ext.expected import ExpectedSource
from haliax_ext.load_plan import LoadPlan
from haliax_ext.load_strategy import plan_loading
from haliax_ext.loading import LoadedArrays, load
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.rules import WeightMismatchError
from levanter.commands.model.layers import layer_checks
from levanter.commands.model.origin import OpenedModel, Origin, find_origin, find_tokenizer, vocabulary
from levanter.commands.model.saved_model import find_saved
from levanter.commands.shell.sameness import require_same_weights
from levanter.data import Tokenizer
from levanter.hardware import compiler_options
from levanter.io import Progress
from levanter.mesh import ModelAxes, ResolvedMesh, resolve
from levanter.models.activations import transformer_activations
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.models.scoring import planned_chunk
from levanter.processes.barrier import barrier
from levanter.processes.together import jit_together
from levanter.run import Check, Target
from levanter.trainer.config import TrainerConfig

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What a config says about the model.

    Attributes:
        reference: Hugging Face files: a folder, a hub id, a URL, a .gguf file; None where none is named.
        model: the architecture as the config has it; it must agree with the checkpoint.
        tokenizer: a tokenizer other than the checkpoint's own; None for its own.
        trainer: mesh and precision.
        allow_pickle: accept pickled weights.
        memory_gib: host memory for reading.
        saved: a checkpoint of our own training runs, instead of `reference`.
    """

    reference: str | None
    model: LmConfig | None
    tokenizer: str | None
    trainer: TrainerConfig
    allow_pickle: bool = False
    memory_gib: float | None = None
    saved: str | None = None

    @property
    def memory_bytes(self) -> int | None:
        """The memory budget of loading in bytes; None for the default."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainedModel:
    """A pretrained model as this run will hold it.

    Attributes:
        choice: what the config asked for.
        origin: where it comes from, as far as that is known here.
        config: its architecture, with the choices for this platform made.
        precision: the dtype policy; weights are loaded in its compute dtype, since nothing updates them.
        found_tokenizer: its tokenizer; None where it is not here.
        Vocab: rows of its embedding.
        abstract: the module without memory.
        resolved: mesh and mappings.
        sharding: where every parameter goes.
        activations: the named activations under the compute mapping.
        load_plan: which bytes are read by whom; None where `sharding` has errors.
        compiler_options: XLA's, for the Programs of this run.
        checks: what was looked at.
        notes: decisions the user did not write.
    """

    choice: ModelChoice
    origin: Origin
    config: LmConfig
    precision: Precision
    found_tokenizer: Tokenizer | None
    Vocab: hax.Axis
    abstract: Any
    resolved: ResolvedMesh
    sharding: ShardingPlan
    activations: ShardingPlan
    load_plan: LoadPlan | None
    compiler_options: Mapping[str, str]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def checkpoint(self) -> OpenedModel:
        """The checkpoint, in a run: a plan without it does not pass `RunPlan.check`."""
        assert self.origin.checkpoint is not None, f"{self.origin.description}: RunPlan.check() comes before a run"
        return self.origin.checkpoint

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, in a run: a plan without it does not pass `RunPlan.check`."""
        assert self.found_tokenizer is not None, f"{self.origin.description}: RunPlan.check() comes before a run"
        return self.found_tokenizer


def describe_pretrained(
    choice: ModelChoice, target: Target, *, batch: Callable[[int], int], positions: int
) -> PretrainedModel:
    """Describes the model of a run on `target`; reads metadata only.

    Args:
        choice: which model, mesh and precision.
        target: the devices.
        batch: the global batch for the number of ways that the mesh cuts it.
        positions: tokens in a sequence.

    Raises:
        ValueError: checkpoint or tokenizer are there and broken, nothing says what the model looks like, or the mesh
            cannot be resolved at all. What is wrong with the sharding is in the plans; what is not here is a check.
    """
    trainer = choice.trainer
    if choice.saved is not None:
        origin = find_saved(choice.saved, choice.model)
    else:
        origin = find_origin(choice.reference, choice.model, allow_pickle=choice.allow_pickle)
    precision = Precision.parse(trainer.mp)
    config = origin.architecture
    tokenizer, tokenizer_check = find_tokenizer(choice.tokenizer, origin=origin, size=config.vocab_size)
    names = (choice.tokenizer, config.tokenizer, origin.reference)
    vocab, how = vocabulary(config, tokenizer=tokenizer, names=names)
    sizes = {axis.name: axis.size for axis in config.axes.values()}
    resolved = resolve(
        trainer.mesh,
        ModelAxes(sizes={**sizes, "vocab": vocab, "position": positions}, known=KNOWN_AXES, aliases=ALIASES),
        devices=target.devices,
        granules=target.granules,
    )
    config, reasons = replace(config, vocab_size=vocab).for_platform(
        target.platform, compute_dtype=precision.compute, length=positions, parts=resolved.position_ways
    )
    checks = [
        *origin.checks,
        tokenizer_check,
        Check(name="vocabulary", status="ok", message=f"{vocab} ids, {how}"),
        *(Check(name="kernels", status="ok", message=reason) for reason in reasons),
        *layer_checks(config),
        Check(
            name="precision",
            status="ok",
            message=f"{precision}; weights are loaded as {precision.compute.name}, in which they are used",
        ),
    ]
    batch_name = trainer.mesh.batch_axis_name or "batch"
    Vocab = hax.Axis("vocab", vocabulary_rows(vocab, resolved))
    module = cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), precision.compute)
    hbm = trainer.mesh.hbm_gib
    sharding = plan_sharding(
        leaves(module),
        resolved.mappings,
        resolved.spec,
        hbm_bytes=target.hbm_bytes if hbm is None else int(hbm * GIB),
        on_conflict=trainer.mesh.on_conflict,
    )
    activations = plan_activations(
        transformer_activations(
            config,
            batch=(batch_name, batch(resolved.batch_ways)),
            positions=positions,
            vocab=Vocab.size,
            chunk=planned_chunk(
                config,
                batch=(batch_name, batch(resolved.batch_ways)),
                vocab=Vocab.size,
                mapping=resolved.mappings.compute,
                mesh=resolved.spec,
            ),
            dtype=precision.compute,
        ),
        resolved.mappings,
        resolved.spec,
    )
    load_plan = None
    if not sharding.errors:
        rules = origin.weight_rules(config, Vocab, leaves(module))
        expected = ExpectedSource.of(rules, leaves(module), dtype=origin.stored)
        try:
            load_plan = plan_loading(
                sharding,
                rules,
                expected if origin.checkpoint is None else origin.checkpoint.source,
                hosts=target.host_layout(resolved.spec),
                memory_bytes=choice.memory_bytes,
            )
        except WeightMismatchError as error:
            checks.append(Check(name="weights", status="error", message=str(error), error=error))
    return PretrainedModel(
        choice=choice,
        origin=origin,
        config=config,
        precision=precision,
        found_tokenizer=tokenizer,
        Vocab=Vocab,
        abstract=module,
        resolved=resolved,
        sharding=sharding,
        activations=activations,
        load_plan=load_plan,
        compiler_options=compiler_options(target.platform, target.kind),
        checks=tuple(checks),
        notes=resolved.notes,
    )


def vocabulary_rows(vocab: int, resolved: ResolvedMesh) -> int:
    """The vocabulary's size up to the next multiple of what parameter and compute mapping cut it into."""
    mappings = resolved.mappings
    cuts = [resolved.spec.ways(mapping.mesh_axes("vocab")) for mapping in (mappings.params, mappings.compute)]
    unit = math.lcm(*cuts)
    return -(-vocab // unit) * unit


def load_pretrained(model: PretrainedModel, mesh: Mesh, *, show: bool) -> LoadedArrays:
    """Streams the weights into their final shards on `mesh`, with progress over the whole job."""
    assert model.load_plan is not None, "a plan with errors must not run: RunPlan.check() comes first"
    require_same_weights(model.checkpoint.source)
    barrier("loading weights")
    total = model.load_plan.bytes_by_host[jax.process_index() if model.load_plan.num_hosts > 1 else 0]
    with Progress("loading weights", total=total, unit="bytes", show=show) as progress:
        return load(
            model.load_plan,
            model.sharding,
            model.checkpoint.source,
            mesh,
            memory_bytes=model.choice.memory_bytes,
            jit=jit_together,
            progress=lambda at: progress.advance_to(at.bytes_done, note=_where(at)),
        )


def _where(at: Any) -> str:
    return at.path if at.layer is None else f"{at.path}, layer {at.layer}"
