"""The pretrained model of a run: described from metadata, then loaded. Shared by all entry points that read weights.

`describe_pretrained` resolves the model's source, resolves the mesh for its axes, plans the sharding of every parameter
and the bytes to read, and collects errors and unavailable inputs as checks. `load_pretrained` streams the weights.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import haliax as hax
import jax
from haliax import NamedArray
from jax.sharding import Mesh

from haliax_ext.abstract import Leaf, abstract, cast, leaves
from haliax_ext.load_plan import LoadPlan
from haliax_ext.loading import LoadedArrays
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.program import Program
from haliax_ext.pytree import KeyPath, PyTree, path_string
from haliax_ext.rules import WeightRule, WeightRules
from haliax_ext.sources import TensorSource
from levanter.commands.model.compiler import choose_compiler
from levanter.commands.model.config import HasLoadKeys, Quantize, TiedHead
from levanter.commands.model.layers import layer_checks
from levanter.commands.model.quantization import (
    QuantizationError,
    QuantizedModel,
    quantization_check,
    quantize_projections,
)
from levanter.commands.model.sharding import (
    load_weights,
    pattern_checks,
    plan_activation_sharding,
    plan_weight_loading,
    resolve_mesh,
    vocabulary_axis,
)
from levanter.commands.model.source import (
    ModelBlock,
    ModelSource,
    OpenedModel,
    find_tokenizer,
    resolve_source,
    vocabulary,
)
from levanter.data import Tokenizer
from levanter.hardware.compiler import Work
from levanter.layers.cpu_matvec import MatrixFirst
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.quantized import EXPERT, contracted_first
from levanter.layers.unstacked import LAYERS, LayerMatrices
from levanter.mesh import ResolvedMesh
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, RunPlan, Searchable, Target, Workload
from levanter.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from levanter.commands.model.with_adapter import AdaptedModel, Adapter

W = TypeVar("W")

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model that a configuration names, and how it is read.

    Attributes:
        reference: Hugging Face files: a folder, a hub id, a URL, a .gguf file; None if none is named.
        model: the `model:` block; its explicit keys must agree with the checkpoint.
        tokenizer: a tokenizer that replaces the checkpoint's own; None for its own.
        trainer: mesh and precision.
        allow_pickle: accepts pickled weights (never needed for safetensors).
        memory_gib: host memory for read buffers.
        saved: a checkpoint of `train_lm`, instead of `reference`.
        quantize: representation of the projections, if not the compute dtype.
        tied_head: matrix of a tied output head of a quantized model.
        adapter: an adapter in peft's format; None for none.
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
        config: HasLoadKeys,
        *,
        files: str | None,
        saved: str | None,
        model: ModelBlock | None,
        tokenizer: str | None,
    ) -> "ModelChoice":
        """The choice that a configuration makes.

        Args:
            config: the configuration.
            files: the Hugging Face files that it names.
            saved: the checkpoint of `train_lm` that it names.
            model: its `model:` block.
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
    """A model without its adapter, as stored in its files.

    Attributes:
        rules: the weight rules of its leaves.
        leaves: its leaves.
    """

    rules: WeightRules
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PretrainedModel:
    """A pretrained model as this run will hold it in memory.

    Attributes:
        choice: the model that the config names.
        origin: its source, as far as it is known on this machine.
        config: its architecture, resolved for this platform.
        precision: the dtype policy; weights that are not quantized are loaded in its compute dtype, since no step
            updates them.
        local_tokenizer: its tokenizer; None if it is unavailable on this machine.
        Vocab: rows of its embedding.
        abstract: the module without memory.
        resolved: mesh and mappings.
        sharding: the sharding of every parameter.
        activations: the named activations under the compute mapping.
        load_plan: which bytes each host reads; None if `sharding` has errors.
        adapter: the adapter that is bound to it; None for none.
        base: the base model that saved adapters are compared with; None for no adapters.
        compiler_options: XLA options of the Programs that use it.
        checks: the checks so far.
        notes: decisions that the user did not configure.
    """

    choice: ModelChoice
    origin: ModelSource
    config: LmConfig
    precision: Precision
    local_tokenizer: Tokenizer | None
    Vocab: hax.Axis
    abstract: Any
    resolved: ResolvedMesh
    sharding: ShardingPlan
    activations: ShardingPlan
    load_plan: LoadPlan | None
    adapter: "Adapter | None"
    base: BaseLeaves | None
    compiler_options: Mapping[str, str]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    def run_plan(
        self,
        entry_point: str,
        target: Target,
        *,
        checks: Sequence[Check],
        computing: Sequence[Program],
        workloads: Sequence[Workload],
        work: W,
        searchable: Searchable | str,
        notes: Sequence[str] = (),
        resident_bytes: Mapping[str, int] | None = None,
        coresident_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> RunPlan[W]:
        """The plan of a run that loads this model and then runs Programs on it; see `RunPlan`.

        Args:
            entry_point: the name of the entry point.
            target: the devices.
            checks: all checks, those of this model included.
            computing: the Programs of the work, in order.
            workloads: the work of the Programs that make up the job's time.
            work: the other inputs of `execute`.
            searchable: the input of the search for a layout, or why there is nothing to search.
            notes: decisions of the run, after those about the model.
            resident_bytes, coresident_bytes: as in `RunPlan`.
        """
        return RunPlan(
            entry_point=entry_point,
            target=target,
            mesh=self.resolved.spec,
            checks=tuple(checks),
            sharding=self.sharding,
            activations=self.activations,
            load=self.load_plan,
            computing=tuple(computing),
            workloads=tuple(workloads),
            notes=(*self.notes, *notes),
            work=work,
            resident_bytes=resident_bytes,
            coresident_bytes=coresident_bytes,
            searchable=searchable,
        )

    def searchable(
        self,
        *,
        positions: int,
        keys: Callable[[int, int], Mapping[str, int]] = lambda rows, _: {"trainer.per_device_eval_parallelism": rows},
    ) -> Searchable:
        """The inputs of the layout search for a run with this model.

        Args:
            positions: tokens in a sequence.
            keys: see `Searchable`.
        """
        sizes = {axis.name: axis.size for axis in self.config.axes.values()}
        return Searchable(
            training=False,
            parameters=tuple(planned.leaf for planned in self.sharding.leaves),
            sizes={**sizes, "vocab": self.Vocab.size, "position": positions},
            tensor_axes=self.config.tensor_axes,
            layers=len(self.config.layers),
            windows=self.config.windows,
            summed=sum(bool(part.tensor_axes) for layer in self.config.layers for part in layer.parts),
            batch_axis=self.resolved.batch_axis,
            compute_bytes=self.precision.compute.itemsize,
            keys=keys,
            overrides=self.choice.trainer.mesh.overrides,
        )

    @property
    def checkpoint(self) -> OpenedModel:
        """The checkpoint, during a run; `RunPlan.check` refuses a plan without it."""
        assert self.origin.checkpoint is not None, f"{self.origin.description}: RunPlan.check() comes before a run"
        return self.origin.checkpoint

    @property
    def source(self) -> TensorSource:
        """The tensors of the checkpoint and of the adapter, during a run."""
        base = self.checkpoint.source
        if self.adapter is None:
            return base
        from levanter.commands.model.with_adapter import WithAdapter

        return WithAdapter(base, self.adapter.source)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, during a run; `RunPlan.check` refuses a plan without it."""
        assert self.local_tokenizer is not None, f"{self.origin.description}: RunPlan.check() comes before a run"
        return self.local_tokenizer


def describe_pretrained(
    choice: ModelChoice, target: Target, *, batch: Callable[[int], int], positions: int, work: Work = "score"
) -> PretrainedModel:
    """Describes the model of a run on `target`; reads metadata only.

    Args:
        choice: the model, mesh and precision.
        target: the devices.
        batch: number of batch shards of the mesh → the global batch.
        positions: tokens per sequence.
        work: the kind of work that the run does with the model.

    Raises:
        ValueError: the checkpoint or the tokenizer is broken, the architecture is unknown, or the mesh cannot be
            resolved. Sharding errors are in the plans; unavailable inputs are checks.
    """
    trainer = choice.trainer
    origin = _resolve_source(choice)
    precision = Precision.parse(trainer.mp)
    config, resizing = _with_adapter_vocabulary(choice, origin.architecture)
    tokenizer, tokenizer_check = find_tokenizer(choice.tokenizer, origin=origin, size=config.vocab_size)
    names = (choice.tokenizer, config.tokenizer, origin.reference)
    vocab, how = vocabulary(config, tokenizer=tokenizer, names=names)
    sizes = {"vocab": vocab, "positions": positions}
    resolved = resolve_mesh(target, trainer.mesh, config, **sizes, precision=precision, backward=False)
    # The attention backend and similar choices depend on the devices and on how queries are sharded.
    kernels = partial(replace(config, vocab_size=vocab).for_platform, target.platform, device_kind=target.kind)
    config, reasons = kernels(compute_dtype=precision.compute, length=positions, sequence_shards=resolved.query_ways)
    checks = [
        *origin.checks,
        *resizing,
        tokenizer_check,
        Check(name="vocabulary", status="ok", message=f"{vocab} ids, {how}"),
        *(Check(name="kernels", status="ok", message=reason) for reason in reasons),
        *layer_checks(config, resolved, positions=positions),
        _precision_check(precision, choice.quantize),
    ]
    compiler = choose_compiler(trainer, target, resolved, works=(work,))
    checks += compiler.checks
    Vocab = vocabulary_axis(vocab, resolved)  # rounded up to shards; `config.vocab_size` stays the true size
    module = cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), precision.compute)
    parameters = tuple(leaves(module))
    rules = origin.weight_rules(config, Vocab, parameters)
    base = None if origin.adapters is None else BaseLeaves(rules=rules, leaves=parameters)
    # Quantized before adapters are bound: an adapter wraps the int8 matrix.
    int8, quantizing = _quantized(choice, origin, module, rules)
    if int8 is not None:
        module, rules = int8.module, int8.rules
    adapted, adapting = _adapted(choice, origin, module, rules, config, Vocab, precision)
    if adapted is not None:
        module, rules = adapted.module, adapted.rules
    # Decoding on CPUs multiplies one row by each matrix, so the matrices are laid out for that.
    if work == "generate" and target.platform == "cpu":
        if resolved.spec.size == 1:  # several devices keep the stacked arrays, with contracted axes first
            module, rules = with_cpu_layout(module, rules)
        module = contracted_first(module)
    sharding = plan_sharding(
        leaves(module),
        resolved.mappings,
        resolved.spec,
        hbm_bytes=trainer.mesh.hbm_bytes(target.hbm_bytes),
        on_conflict=trainer.mesh.on_conflict,
    )
    activations = plan_activation_sharding(
        config, resolved, rows=batch(resolved.batch_ways), positions=positions, Vocab=Vocab, precision=precision
    )
    checks += [*quantizing, *adapting, *([] if int8 is None else [quantization_check(int8, sharding)])]
    # A load plan needs the shards of every leaf, which a sharding plan with errors does not have.
    load_plan, adapter = None, None if adapted is None else adapted.adapter
    if not sharding.errors:
        load_plan, load_checks = plan_weight_loading(
            origin, config, Vocab, sharding, target, memory_bytes=choice.memory_bytes, rules=rules, adapter=adapter
        )
        checks += load_checks
    return PretrainedModel(
        choice=choice,
        origin=origin,
        config=config,
        precision=precision,
        local_tokenizer=tokenizer,
        Vocab=Vocab,
        abstract=module,
        resolved=resolved,
        sharding=sharding,
        activations=activations,
        load_plan=load_plan,
        adapter=adapter,
        base=base,
        compiler_options=compiler.working[work],
        checks=(*checks, *pattern_checks(trainer.mesh, resolved.spec, (*parameters, *leaves(module)))),
        notes=resolved.notes,
    )


def _resolve_source(choice: ModelChoice) -> ModelSource:
    if choice.saved is None:
        return resolve_source(choice.reference, choice.model, allow_pickle=choice.allow_pickle)
    # Runs that read Hugging Face files need neither checkpoints of training nor adapters, nor their imports.
    from levanter.commands.model.saved_model import resolve_saved_source

    return resolve_saved_source(choice.saved, choice.model)


def _with_adapter_vocabulary(choice: ModelChoice, config: LmConfig) -> tuple[LmConfig, list[Check]]:
    """The architecture with the vocabulary that the run's adapter was trained with."""
    if choice.adapter is None:
        return config, []
    from levanter.commands.model.with_adapter import adapted_architecture

    return adapted_architecture(choice.adapter, config)


def _adapted(
    choice: ModelChoice,
    origin: ModelSource,
    module: PyTree,
    rules: WeightRules,
    config: LmConfig,
    Vocab: hax.Axis,
    precision: Precision,
) -> "tuple[AdaptedModel | None, list[Check]]":
    if choice.adapter is None and origin.adapters is None:
        return None, []
    # At most one source of adapters.
    if choice.adapter is None or origin.adapters is None:
        from levanter.commands.model.with_adapter import bind_adapter

        adapted, checks = bind_adapter(choice.adapter or origin.adapters, module, rules, config, Vocab, precision)
        # The adapters compensated the rounding of an int8 base; a base in full precision computes something else.
        if origin.adapters is not None and origin.adapters.config.base_dtype == "int8" and choice.quantize is None:
            message = "the adapters were trained on a base model in int8; set quantize: int8 for the same model"
            checks.append(Check(name="adapter", status="note", message=message))
        return adapted, checks
    error = ValueError(
        f"adapter_path: {choice.saved} contains adapters, and a model can have only one set of them; remove "
        "adapter_path, or set hf_checkpoint to their base model"
    )
    return None, [Check(name="adapter", status="error", message=str(error), error=error)]


def _precision_check(precision: Precision, quantize: Quantize | None) -> Check:
    others = "weights" if quantize is None else f"projections are {quantize}; all other weights"
    message = f"{precision}; {others} are loaded as {precision.compute.name}, the compute dtype"
    return Check(name="precision", status="ok", message=message)


def _quantized(
    choice: ModelChoice, origin: ModelSource, module: PyTree, rules: WeightRules
) -> tuple[QuantizedModel | None, list[Check]]:
    requested = choice.quantize is not None
    try:
        model = quantize_projections(
            module, rules, quantize_all=requested, tied_head=choice.tied_head, is_stored=origin.is_int8
        )
        return model, []
    # Reported with all other problems of the plan.
    except QuantizationError as error:
        return None, [Check(name="int8", status="error", message=str(error), error=error)]


def load_pretrained(model: PretrainedModel, mesh: Mesh, *, show: bool) -> LoadedArrays:
    """Streams the weights into their final shards on `mesh`, with progress over all of them."""
    assert model.load_plan is not None, "RunPlan.check() refuses a plan with errors before a run"
    if model.adapter is not None:
        from levanter.commands.model.saved_adapters import SavedAdapters

        # Compared before the first byte of a large array is read.
        if isinstance(model.adapter, SavedAdapters):
            assert model.base is not None, "saved adapters need their base to be compared with"
            model.adapter.check_base(model.base.rules, model.base.leaves, model.checkpoint.source)
    return load_weights(
        model.load_plan,
        model.sharding,
        model.source,
        mesh,
        show=show,
        memory_bytes=model.choice.memory_bytes,
        allow_nonfinite=model.choice.trainer.allow_nonfinite,
    )


def with_cpu_layout(module: PyTree, rules: WeightRules) -> tuple[PyTree, WeightRules]:
    """Lays out the matrices of a model for decoding on one CPU: one array per layer, contracted axes first.

    The new leaves are read directly from the checkpoint's tensors, so nothing is held twice. These keep their layout,
    with contracted axes first: projections whose layers are one stacked tensor of the checkpoint (as in checkpoints of
    training), weights that are no plain arrays (integers, adapters), and experts with their routers.

    Args:
        module: the model, abstract.
        rules: the weight rules of its leaves.

    Returns:
        The model, and the weight rules of its new leaves.
    """
    table, rewritten = rules.by_target(), dict[str, tuple[WeightRule, ...]]()

    def visit(keys: KeyPath, x: object) -> object:
        # Integers and adapters are no plain arrays, and keep their layout.
        if not isinstance(x, Linear | Embedding) or not isinstance(x.weight, NamedArray):
            return x
        target, weight = f"{path_string(keys)}.weight", x.weight
        rule = table.get(target)
        # Experts are multiplied in groups, not one row at a time.
        if rule is None or EXPERT in (axis.name for axis in weight.axes):
            return x
        Layers = next((axis for axis in weight.axes if axis.name == LAYERS), None)
        if Layers is None:
            # The same tensor; only the array in memory has another axis order.
            rewritten[target] = (replace(rule, target=f"{target}.array"),)
            return replace(x, weight=MatrixFirst(weight))
        # One tensor of the checkpoint has all layers: it cannot be read in pieces of one layer each.
        if LAYERS not in rule.stacked:
            return x
        # The rule of a stacked leaf names a tensor for each layer, so each layer gets a rule of its own.
        rewritten[target] = tuple(_layer_rule(rule, n) for n in range(Layers.size))
        matrix = _abstract_array(tuple(axis for axis in weight.axes if axis != Layers), weight)
        return replace(x, weight=LayerMatrices((MatrixFirst(matrix),) * Layers.size))

    converted = jax.tree_util.tree_map_with_path(visit, module, is_leaf=lambda x: isinstance(x, Linear | Embedding))
    # Rules of leaves that did not change stay as they are.
    read_rules = tuple(new_rule for rule in rules.rules for new_rule in rewritten.get(rule.target, (rule,)))
    return converted, replace(rules, rules=read_rules)


def _layer_rule(rule: WeightRule, layer: int) -> WeightRule:
    """The weight rule of one layer's matrix."""
    target = f"{rule.target}.matrices.{layer}.array"
    # The tensor of this layer.
    return replace(rule, target=target, source=rule.source_at(LAYERS, layer))


def _abstract_array(axes: tuple[hax.Axis, ...], like: NamedArray) -> NamedArray:
    array = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), like.dtype)
    return NamedArray(typing.cast(jax.Array, array), axes)
