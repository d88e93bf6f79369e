"""From "which model, on which mesh" to everything a run needs: shared by the entry points that read weights.

`describe_pretrained` finds the model (`origin`), resolves the mesh for its axes, plans every parameter's place and the
bytes to read, and collects what is wrong and what is unavailable. `load_pretrained` then streams the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
from jax.sharding import Mesh

from haliax_ext.abstract import Leaf, abstract, cast, leaves
from haliax_ext.load_plan import LoadPlan
from haliax_ext.loading import LoadedArrays
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightRules
from haliax_ext.sources import TensorSource
from levanter.commands.model.compiler import choose_compiler
from levanter.commands.model.cpu_layout import matrices_first
from levanter.commands.model.layers import layer_checks
from levanter.commands.model.naming import ReadsModel
from levanter.commands.model.quantization import QuantizationError, QuantizedModel, quantization_check, quantized
from levanter.commands.model.representation import Quantize, TiedHead
from levanter.commands.model.saved_adapters import SavedAdapters
from levanter.commands.model.saved_model import find_saved
from levanter.commands.model.sharding import (
    load_weights,
    planned_activations,
    planned_loading,
    resolved_on,
    vocabulary_axis,
)
from levanter.commands.model.source import ModelBlock, OpenedModel, Origin, find_origin, find_tokenizer, vocabulary
from levanter.commands.model.with_adapter import AdaptedModel, Adapter, WithAdapter, find_adapted
from levanter.data import Tokenizer
from levanter.hardware.compiler import Work
from levanter.layers.quantized import contracted_first
from levanter.mesh import ResolvedMesh
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Searchable, Target
from levanter.trainer.config import TrainerConfig

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A config's choice of model.

    Attributes:
        reference: Hugging Face files: a folder, a hub id, a URL, a .gguf file; None if none is named.
        model: the architecture as configured; explicit keys must agree with the checkpoint.
        tokenizer: a tokenizer other than the checkpoint's own; None for its own.
        trainer: mesh and precision.
        allow_pickle: accepts pickled weights (never needed for safetensors).
        memory_gib: host memory for reading.
        saved: a checkpoint of our own training runs, instead of `reference`.
        quantize: in what projections are held, if not in the compute dtype.
        tied_head: what a quantized model's head multiplies by where weights are tied.
        adapter: an adapter of the model, as peft reads them; None for none.
    """

    reference: str | None
    model: ModelBlock | None
    tokenizer: str | None
    trainer: TrainerConfig
    allow_pickle: bool = False
    memory_gib: float | None = None
    saved: str | None = None
    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"
    adapter: str | None = None

    @classmethod
    def of(
        cls,
        config: ReadsModel,
        *,
        files: str | None,
        saved: str | None,
        model: ModelBlock | None,
        tokenizer: str | None,
    ) -> "ModelChoice":
        """The choice of a configuration.

        Args:
            config: the configuration.
            files: the Hugging Face files that it names.
            saved: the checkpoint of ours that it names.
            model: its architecture.
            tokenizer: its tokenizer.
        """
        return cls(
            reference=files,
            model=model,
            tokenizer=tokenizer,
            trainer=config.trainer,
            allow_pickle=config.allow_pickle,
            memory_gib=config.load_memory_gib,
            saved=saved,
            quantize=config.quantize,
            tied_head=config.tied_head,
            adapter=config.adapter_path,
        )

    @property
    def memory_bytes(self) -> int | None:
        """The memory budget of loading in bytes; None for the default."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseLeaves:
    """A model without its adapter, as its files have it.

    Attributes:
        rules: where its leaves come from.
        own: its leaves.
    """

    rules: WeightRules
    own: tuple[Leaf, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainedModel:
    """A pretrained model as this run will hold it.

    Attributes:
        choice: what the config asks for.
        origin: where it comes from, as far as that is known here.
        config: its architecture, with the choices for this platform made.
        precision: the dtype policy; what is not quantized is loaded in its compute dtype, since nothing updates it.
        found_tokenizer: its tokenizer; None if it is not available here.
        Vocab: rows of its embedding.
        abstract: the module without memory.
        resolved: mesh and mappings.
        sharding: where every parameter goes.
        activations: the named activations under the compute mapping.
        load_plan: which bytes each host reads; None if `sharding` has errors.
        adapter: the adapter that is bound to it; None for none.
        base: what an adapter of a checkpoint of ours is compared with; None for nothing.
        compiler_options: XLA's, for the Programs that work with it.
        checks: those made so far.
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
    adapter: Adapter | None
    base: BaseLeaves | None
    compiler_options: Mapping[str, str]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    def searchable(
        self,
        *,
        positions: int,
        keys: Callable[[int, int], Mapping[str, int]] = lambda rows, _: {"trainer.per_device_eval_parallelism": rows},
    ) -> Searchable:
        """What the layout search needs to know about a run with this model.

        Args:
            positions: tokens in a sequence.
            keys: see `Searchable`.
        """
        sizes = {axis.name: axis.size for axis in self.config.axes.values()}
        return Searchable(
            training=False,
            parameters=tuple(each.leaf for each in self.sharding.leaves),
            sizes={**sizes, "vocab": self.Vocab.size, "position": positions},
            tensor_axes=self.config.tensor_axes,
            layers=len(self.config.layers),
            windows=tuple((group.window, group.features) for group in self.config.attention_groups),
            summed=sum(bool(part.tensor_axes) for layer in self.config.layers for part in layer.parts),
            batch_axis=self.resolved.batch_axis,
            compute_bytes=self.precision.compute.itemsize,
            keys=keys,
            overrides=self.choice.trainer.mesh.overrides,
        )

    @property
    def checkpoint(self) -> OpenedModel:
        """The checkpoint, during a run: a plan without it does not pass `RunPlan.check`."""
        assert self.origin.checkpoint is not None, f"{self.origin.description}: RunPlan.check() comes before a run"
        return self.origin.checkpoint

    @property
    def source(self) -> TensorSource:
        """The tensors of the checkpoint, and those of the adapter, during a run."""
        base = self.checkpoint.source
        return base if self.adapter is None else WithAdapter(base, self.adapter.source)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, during a run: a plan without it does not pass `RunPlan.check`."""
        assert self.found_tokenizer is not None, f"{self.origin.description}: RunPlan.check() comes before a run"
        return self.found_tokenizer


def describe_pretrained(
    choice: ModelChoice, target: Target, *, batch: Callable[[int], int], positions: int, work: Work = "score"
) -> PretrainedModel:
    """Describes the model of a run on `target`; reads metadata only.

    Args:
        choice: which model, mesh and precision.
        target: the devices.
        batch: number of batch shards of the mesh → the global batch.
        positions: tokens per sequence.
        work: what the run does with it.

    Raises:
        ValueError: checkpoint or tokenizer are broken, the architecture is unknown, or the mesh cannot be resolved at
            all. What is wrong with the sharding is in the plans; what is unavailable is a check.
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
    sizes = {"vocab": vocab, "positions": positions}
    resolved = resolved_on(target, trainer.mesh, config, **sizes, precision=precision, backward=False)
    config, reasons = replace(config, vocab_size=vocab).for_platform(
        target.platform, compute_dtype=precision.compute, length=positions, sequence_shards=resolved.query_ways
    )
    checks = [
        *origin.checks,
        tokenizer_check,
        Check(name="vocabulary", status="ok", message=f"{vocab} ids, {how}"),
        *(Check(name="kernels", status="ok", message=reason) for reason in reasons),
        *layer_checks(config, resolved, positions=positions),
        _precision_check(precision, choice.quantize),
    ]
    compiler = choose_compiler(trainer, target, resolved, works=(work,))
    checks += compiler.checks
    Vocab = vocabulary_axis(vocab, resolved)
    module = cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), precision.compute)
    rules = origin.weight_rules(config, Vocab, leaves(module))
    base = None if origin.adapters is None else BaseLeaves(rules=rules, own=tuple(leaves(module)))
    int8, quantizing = _quantized(choice, origin, module, rules)
    if int8 is not None:
        module, rules = int8.module, int8.rules
    adapted, adapting = _adapted(choice, origin, module, rules, config, Vocab, precision)
    if adapted is not None:
        module, rules = adapted.module, adapted.rules
    if work == "generate" and target.platform == "cpu":
        if resolved.spec.size == 1:
            module, rules = matrices_first(module, rules)
        module = contracted_first(module)
    sharding = plan_sharding(
        leaves(module),
        resolved.mappings,
        resolved.spec,
        hbm_bytes=trainer.mesh.hbm_bytes(target.hbm_bytes),
        on_conflict=trainer.mesh.on_conflict,
    )
    activations = planned_activations(
        config, resolved, rows=batch(resolved.batch_ways), positions=positions, Vocab=Vocab, precision=precision
    )
    checks += [*quantizing, *adapting, *([] if int8 is None else [quantization_check(int8, sharding)])]
    load_plan, adapter = None, None if adapted is None else adapted.adapter
    if not sharding.errors:
        load_plan, found = planned_loading(
            origin, config, Vocab, sharding, target, memory_bytes=choice.memory_bytes, rules=rules, adapter=adapter
        )
        checks += found
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
        adapter=adapter,
        base=base,
        compiler_options=compiler.working[work],
        checks=tuple(checks),
        notes=resolved.notes,
    )


def _adapted(
    choice: ModelChoice,
    origin: Origin,
    module: PyTree,
    rules: WeightRules,
    config: LmConfig,
    Vocab: hax.Axis,
    precision: Precision,
) -> tuple[AdaptedModel | None, list[Check]]:
    if choice.adapter is None or origin.adapters is None:
        found, checks = find_adapted(choice.adapter or origin.adapters, module, rules, config, Vocab, precision)
        if origin.adapters is not None and origin.adapters.config.base_dtype == "int8" and choice.quantize is None:
            message = "the adapters were trained beside weights in int8; with quantize: int8 it is the same model"
            checks.append(Check(name="adapter", status="note", message=message))
        return found, checks
    error = ValueError(
        f"adapter_path: {choice.saved} contains adapters of its own, and a model takes those of one place; leave "
        "adapter_path out, or give the model that they are of as hf_checkpoint"
    )
    return None, [Check(name="adapter", status="error", message=str(error), error=error)]


def _precision_check(precision: Precision, quantize: Quantize | None) -> Check:
    others = "weights" if quantize is None else f"projections are {quantize}; all other weights"
    message = f"{precision}; {others} are loaded as {precision.compute.name}, in which they are used"
    return Check(name="precision", status="ok", message=message)


def _quantized(
    choice: ModelChoice, origin: Origin, module: PyTree, rules: WeightRules
) -> tuple[QuantizedModel | None, list[Check]]:
    asked = choice.quantize is not None
    try:
        found = quantized(module, rules, asked=asked, tied_head=choice.tied_head, is_stored=origin.is_int8)
        return found, []
    except QuantizationError as error:
        return None, [Check(name="int8", status="error", message=str(error), error=error)]


def load_pretrained(model: PretrainedModel, mesh: Mesh, *, show: bool) -> LoadedArrays:
    """Streams the weights into their final shards on `mesh`, with progress over all of them."""
    assert model.load_plan is not None, "a plan with errors must not run: RunPlan.check() comes first"
    if isinstance(model.adapter, SavedAdapters):
        assert model.base is not None, "adapters of a checkpoint are compared with their base"
        model.adapter.check_base(model.base.rules, model.base.own, model.checkpoint.source)
    return load_weights(
        model.load_plan,
        model.sharding,
        model.source,
        mesh,
        show=show,
        memory_bytes=model.choice.memory_bytes,
        allow_nonfinite=model.choice.trainer.allow_nonfinite,
    )
