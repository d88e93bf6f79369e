"""From "which model, on which mesh" to all that a run needs of it: what entry points that read weights share.

`describe_pretrained` opens the checkpoint's metadata, resolves the mesh for the model's axes, plans every parameter's
place and the bytes to read, and collects what is wrong. `load_pretrained` then streams the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
from jax.sharding import Mesh

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.activations import plan_activations
from haliax_ext.load_plan import LoadPlan
from haliax_ext.load_strategy import plan_loading
from haliax_ext.loading import Loaded, load
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.rules import WeightMismatchError
from levanter.compat.hf.checkpoint import PretrainedCheckpoint, open_checkpoint
from levanter.compat.hf.tokenizer import check_vocabulary
from levanter.compat.hf.tokenizer import load as load_tokenizer
from levanter.config import plain, written
from levanter.data import PassthroughTokenizer, Tokenizer
from levanter.io import Progress
from levanter.mesh import ModelAxes, ResolvedMesh, resolve
from levanter.models.activations import transformer_activations
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.models.scoring import DEFAULT_CHUNK
from levanter.run import Check, Target
from levanter.trainer.config import TrainerConfig

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What a config says about the model.

    Attributes:
        reference: Hugging Face files: a folder, a hub id, a URL, a .gguf file.
        model: the architecture as the config has it; it must agree with the checkpoint.
        tokenizer: a tokenizer other than the checkpoint's own; None for its own.
        trainer: mesh and precision.
        allow_pickle: accept pickled weights.
        memory_gib: host memory for reading.
    """

    reference: str
    model: LmConfig | None
    tokenizer: str | None
    trainer: TrainerConfig
    allow_pickle: bool = False
    memory_gib: float | None = None

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else int(self.memory_gib * GIB)


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainedModel:
    """A pretrained model as this run will hold it.

    Attributes:
        choice: what the config asked for.
        checkpoint: where it comes from.
        config: its architecture, with the choices for this platform made.
        precision: the dtype policy; weights are loaded in its compute dtype, since nothing updates them.
        tokenizer: its tokenizer.
        Vocab: rows of its embedding.
        abstract: the module without memory.
        resolved: mesh and mappings.
        sharding: where every parameter goes.
        activations: the named activations under the compute mapping.
        load_plan: which bytes are read by whom; None where `sharding` has errors.
        checks: what was looked at.
        notes: decisions the user did not write.
    """

    choice: ModelChoice
    checkpoint: PretrainedCheckpoint
    config: LmConfig
    precision: Precision
    tokenizer: Tokenizer
    Vocab: hax.Axis
    abstract: Any
    resolved: ResolvedMesh
    sharding: ShardingPlan
    activations: ShardingPlan
    load_plan: LoadPlan | None
    checks: tuple[Check, ...]
    notes: tuple[str, ...]


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
        ValueError: the checkpoint, the tokenizer or the mesh cannot be read or resolved at all. What is wrong with the
            sharding is in the plans.
    """
    trainer = choice.trainer
    checkpoint = open_checkpoint(choice.reference, allow_pickle=choice.allow_pickle)
    precision = Precision.parse(trainer.mp)
    config, reasons = _architecture(choice, checkpoint).for_platform(target.platform, compute_dtype=precision.compute)
    Vocab = hax.Axis("vocab", checkpoint.vocab_size)
    tokenizer = _tokenizer(choice, checkpoint)
    checks = [
        Check(name="model", status="ok", message=checkpoint.description),
        *(Check(name="model", status="note", message=f"not reached: {each}") for each in checkpoint.passed_over),
        *(Check(name="model", status="note", message=str(finding)) for finding in checkpoint.findings),
        Check(name="tokenizer", status="ok", message=f"{tokenizer.name}, {tokenizer.vocab_size} ids"),
        *(Check(name="kernels", status="ok", message=reason) for reason in reasons),
        Check(
            name="precision",
            status="ok",
            message=f"{precision}; weights are loaded as {precision.compute.name}, in which they are used",
        ),
    ]
    module = cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), precision.compute)
    batch_name = trainer.mesh.batch_axis_name or "batch"
    sizes = {axis.name: axis.size for axis in config.axes.values()}
    resolved = resolve(
        trainer.mesh,
        ModelAxes(sizes={**sizes, "vocab": Vocab.size, "position": positions}, known=KNOWN_AXES, aliases=ALIASES),
        devices=target.devices,
        granules=target.granules,
    )
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
            chunk=getattr(config, "cross_entropy_block_size", None) or DEFAULT_CHUNK,
            dtype=precision.compute,
        ),
        resolved.mappings,
        resolved.spec,
    )
    load_plan = None
    if not sharding.errors:
        try:
            load_plan = plan_loading(
                sharding,
                config.weight_rules(Vocab),
                checkpoint.source,
                hosts=target.host_layout(resolved.spec),
                memory_bytes=choice.memory_bytes,
            )
        except WeightMismatchError as error:
            checks.append(Check(name="weights", status="error", message=str(error), error=error))
    return PretrainedModel(
        choice=choice,
        checkpoint=checkpoint,
        config=config,
        precision=precision,
        tokenizer=tokenizer,
        Vocab=Vocab,
        abstract=module,
        resolved=resolved,
        sharding=sharding,
        activations=activations,
        load_plan=load_plan,
        checks=tuple(checks),
        notes=resolved.notes,
    )


def _architecture(choice: ModelChoice, checkpoint: PretrainedCheckpoint) -> LmConfig:
    """The checkpoint's architecture with the user's choices of how to run it (backend, blocks, lengths)."""
    if choice.model is None:
        return checkpoint.config
    keys = written(choice.model)
    block = {key: value for key, value in plain(choice.model).items() if key in keys or key == "type"}
    checkpoint.check_model_block(block)
    free = keys - set(checkpoint.bridged.family.architecture_fields)
    return replace(checkpoint.config, **{key: getattr(choice.model, key) for key in sorted(free)})


def _tokenizer(choice: ModelChoice, checkpoint: PretrainedCheckpoint) -> Tokenizer:
    if choice.tokenizer is None:
        return checkpoint.tokenizer()
    if choice.tokenizer == "passthrough":
        return PassthroughTokenizer(checkpoint.vocab_size)
    found = load_tokenizer(choice.tokenizer)
    check_vocabulary(found, checkpoint.vocab_size, where=checkpoint.where)
    return found


def load_pretrained(model: PretrainedModel, mesh: Mesh, *, show: bool) -> Loaded:
    """Streams the weights into their final shards on `mesh`, with progress over the whole job."""
    assert model.load_plan is not None, "a plan with errors must not run: RunPlan.check() comes first"
    total = model.load_plan.bytes_by_host[jax.process_index() if model.load_plan.num_hosts > 1 else 0]
    with Progress("loading weights", total=total, unit="bytes", show=show) as progress:
        return load(
            model.load_plan,
            model.sharding,
            model.checkpoint.source,
            mesh,
            memory_bytes=model.choice.memory_bytes,
            progress=lambda at: progress.advance_to(at.bytes_done, note=_where(at)),
        )


def _where(at: Any) -> str:
    return at.path if at.layer is None else f"{at.path}, layer {at.layer}"
