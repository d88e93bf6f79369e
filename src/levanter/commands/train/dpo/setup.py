"""The setup of training on preference pairs: the objective, the reference model and its placement."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
from haliax import Axis

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.errors import gib
from haliax_ext.load_plan import LoadPlan
from haliax_ext.placement import LeafPlan
from haliax_ext.planner import ShardingPlan, plan_sharding
from haliax_ext.program import Program
from haliax_ext.pytree import PyTree
from levanter.commands.cli.outputs import output_checks
from levanter.commands.model.saved_model import resolve_saved_source
from levanter.commands.model.sharding import plan_weight_loading
from levanter.commands.model.source import ModelBlock, ModelSource, resolve_source
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.config import (
    AdapterBaseReferenceConfig,
    PrecomputedReferenceConfig,
    TrainDpoConfig,
)
from levanter.commands.train.lm.evaluation import find_validation
from levanter.config import ExplicitKeys
from levanter.data import FORMATS, PAIRS, EvaluationData
from levanter.data.documents import Formats
from levanter.io import join
from levanter.mesh import ResolvedMesh
from levanter.models.base import LmHeadModel
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check, Target
from levanter.trainer.dpo import PairModels, PreferenceObjective, alone, pair_plan, with_base, with_other
from levanter.trainer.state import StatePlan
from levanter.trainer.train_state import REFERENCE

Kind = Literal["none", "adapter_base", "separate", "precomputed"]


SCORE = "reference_logprobs"
"""The Program that scores pairs with the reference alone, once."""
STORES = "reference_logprobs"
"""The default folder of stored log-probabilities, in `data.cache_dir`."""


class ReferenceModelError(ValueError):
    """The configured reference model cannot be used with the policy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceModel:
    """A second model, which a policy is compared with.

    Attributes:
        origin: its source.
        config: its architecture.
        module: the model in the compute dtype, abstract.
        plan: its placement.
        load: the bytes that each host reads; None if the plan has errors.
    """

    origin: ModelSource
    config: LmConfig
    module: LmHeadModel
    plan: ShardingPlan
    load: LoadPlan | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Preferences:
    """The preference setup of a run.

    Attributes:
        config: the run's.
        kind: of the reference.
        model: the second model; None if none is loaded.
        text: text data on which the policy is also evaluated; None for none.
        checks: lines of the plan.
    """

    config: TrainDpoConfig
    kind: Kind
    model: ReferenceModel | None = None
    text: EvaluationData | None = None
    checks: tuple[Check, ...] = field(default=(), repr=False)

    @property
    def objective(self) -> PreferenceObjective:
        """The preference objective that is minimized."""
        return PreferenceObjective(loss=self.config.loss, beta=self.config.beta, stored=self.kind == "precomputed")

    @property
    def bind(self) -> Callable[..., PairModels]:
        """The function from trained and other parameters to the models that score pairs."""
        # `alone` covers "none" and "precomputed": the policy is the only model in memory.
        return {"adapter_base": with_base, "separate": with_other}.get(self.kind, alone)

    def model_plan(self, state: StatePlan) -> ShardingPlan:
        """The placement of the scoring models' parameters, by their paths in `PairModels`."""
        # The base of adapters is placed by the run's own state; a separate model has a plan of its own.
        of_kind = {"adapter_base": state.loaded, "separate": None if self.model is None else self.model.plan}
        return pair_plan(state.model, of_kind.get(self.kind))

    @property
    def resident(self) -> ReferenceModel | None:
        """The second model, if it stays on the devices during steps."""
        return self.model if self.kind == "separate" else None

    def with_reference(self, plan: ShardingPlan) -> ShardingPlan:
        """A plan of resident arrays, extended by the second model if that is resident."""
        return under_reference(plan, None if self.resident is None else self.resident.plan)

    @property
    def stores(self) -> str | None:
        """The folder of the reference's stored log-probabilities; None if they are not stored."""
        config = self.config
        if self.kind == "precomputed":
            return cache_root(
                getattr(config.reference, "cache_dir", None), config.data.cache_dir, "reference.cache_dir"
            )
        # A reference that is resident for steps may still store the numbers of its evaluations.
        if self.kind != "none" and config.reference_eval_cache.mode == "build_or_load":
            cache_dir = config.reference_eval_cache.cache_dir
            return cache_root(cache_dir, config.data.cache_dir, "reference_eval_cache.cache_dir")
        return None

    @property
    def evaluates_alone(self) -> bool:
        """Whether evaluations run the policy alone: the reference's numbers are stored, or there is no reference."""
        return self.kind == "none" or self.stores is not None

    def scored_once(self, frozen: PyTree, state: StatePlan) -> tuple[PyTree, ShardingPlan]:
        """The abstract model that scores pairs once, and its placement.

        Args:
            frozen: the frozen part of the policy: the base, if adapters are trained.
            state: the placement of the run's state.
        """
        return (frozen, state.loaded) if self.model is None else (self.model.module, self.model.plan)

    def in_order(self, programs: Sequence[Program]) -> list[Program]:
        """The Programs in their order of execution: a precomputed reference scores before all others."""
        first = [program for program in programs if program.name == SCORE and self.kind == "precomputed"]
        return [*first, *(program for program in programs if program not in first)]

    @property
    def first_loss(self) -> float | None:
        """The loss of the first step; None unless policy and reference start as the same model."""
        config = self.config
        lora = config.lora
        # Dropout draws bits, and a base in another dtype than the reference rounds differently.
        if lora is not None and (lora.dropout or (lora.base_dtype is not None and self.kind != "adapter_base")):
            return None
        # Our own checkpoint may hold any parameters; only a shared Hugging Face source is known to be equal.
        if config.begun_from_checkpoint is not None or config.trainer.initialize_from is not None:
            return None
        if self.kind == "adapter_base" or (self.model is not None and config.reference_model == config.pretrained):
            return config.loss.at_start(config.beta)
        return None

    @property
    def scored_besides(self) -> float:
        """Additional forward passes of a step, in units of the policy's forward pass."""
        # 1.0: one forward pass of a model of the policy's size, without a backward pass.
        return 1.0 if self.kind in ("adapter_base", "separate") else 0.0

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Bytes on a device of the second model while the run trains."""
        return {} if self.resident is None else {REFERENCE: self.resident.plan.bytes_per_device}


def cache_root(folder: str | None, cache_dir: str | None, key: str) -> str:
    """The folder of stored log-probabilities.

    Raises:
        ReferenceModelError: no folder is configured.
    """
    if folder is None and cache_dir is None:
        raise ReferenceModelError(f"{key}: names no folder, and data.cache_dir is null; name one of them")
    return join(str(cache_dir), STORES) if folder is None else folder


def data_formats(config: TrainLmConfig) -> Formats:
    """The formats of records that a run learns from."""
    return PAIRS if isinstance(config, TrainDpoConfig) else FORMATS


def kind_of_reference(config: TrainDpoConfig) -> Kind:
    """The kind of a run's reference."""
    if not config.loss.has_reference:
        return "none"
    if isinstance(config.reference, AdapterBaseReferenceConfig):
        return "adapter_base"
    return "precomputed" if isinstance(config.reference, PrecomputedReferenceConfig) else "separate"


def find_preferences(
    config: TrainLmConfig,
    written: ExplicitKeys,
    origin: ModelSource | None,
    *,
    vocab: tuple[Axis, int],
    precision: Precision,
    resolved: ResolvedMesh,
    target: Target,
    hbm_bytes: int | None,
    base_bytes: int,
) -> Preferences | None:
    """The preference setup of a run; None if it trains on text.

    Args:
        config: the run.
        written: the keys that the user wrote.
        origin: the policy's Hugging Face checkpoint; None for none.
        vocab: rows of the embedding: the axis, and how many of them are ids.
        precision: the dtype policy.
        resolved: mesh and mappings.
        target: the devices.
        hbm_bytes: usable memory of one.
        base_bytes: of the model that adapters are of, on one.

    Raises:
        ValueError: the reference is broken, or has other ids.
    """
    if not isinstance(config, TrainDpoConfig):
        return None
    kind = kind_of_reference(config)
    text, text_checks = (None, []) if config.lm_validation_data is None else find_validation(config.lm_validation_data)
    # `stores` and `_store_checks` need the kind and the config only.
    bare = Preferences(config=config, kind=kind, text=text)
    if kind == "separate" and not getattr(config.reference, "model_path", None):
        raise ReferenceModelError(
            "reference.model_path: type separate needs a separate model, and none is named; name it, use "
            "reference: {type: adapter_base} with an adapter, or {type: precomputed}"
        )
    bare = replace(
        bare, checks=(*(replace(check, name="lm_validation_data") for check in text_checks), *_store_checks(bare))
    )
    if config.reference_model is None:
        return bare if kind == "none" else replace(bare, checks=(*bare.checks, _side_by_side(kind, base_bytes)))
    theirs = _origin(config, written, origin)
    Vocab, ids = vocab
    # None where the architecture leaves the size of the vocabulary open.
    reference_ids = theirs.architecture.vocab_size
    if reference_ids is not None and reference_ids != ids:
        raise ReferenceModelError(
            f"reference: {config.reference_model} has {reference_ids} ids, the model that is trained has {ids}; "
            "log-probabilities over different vocabularies cannot be compared"
        )
    if theirs.has_int8:
        raise ReferenceModelError(
            f"reference: {config.reference_model} has 8-bit weights, which are not supported for a reference yet"
        )
    # The same kernels as the policy's, so that equal weights give equal log-probabilities.
    model, _ = replace(theirs.architecture, vocab_size=ids).for_platform(
        target.platform, compute_dtype=precision.compute, length=config.positions, sequence_shards=resolved.query_ways
    )
    # In the compute dtype: the reference takes no updates, so it has no float32 copy.
    module = cast(abstract(lambda: model.build(Vocab, key=jax.random.PRNGKey(0))), precision.compute)
    plan = plan_sharding(leaves(module), resolved.mappings, resolved.spec, hbm_bytes=hbm_bytes)
    load, problems = None, []
    if not plan.errors:
        load, problems = plan_weight_loading(theirs, model, Vocab, plan, target)
    return replace(
        bare,
        model=ReferenceModel(
            origin=theirs,
            config=model,
            module=module,
            plan=plan,
            # The policy's load plan is there as well, and two transfers must not share a name.
            load=None if load is None else replace(load, name=f"load.{REFERENCE}"),
        ),
        checks=(
            *bare.checks,
            *_renamed(theirs.checks),
            *_renamed(problems),
            _side_by_side(kind, plan.bytes_per_device),
        ),
    )


def _store_checks(pairs: Preferences) -> list[Check]:
    """Checks of the folder in which log-probabilities are stored."""
    folder = pairs.stores
    if folder is None:
        return []
    what = "all pairs are scored once, and the reference is not loaded for steps"
    if pairs.kind != "precomputed":
        what = "validation pairs are scored once"
    message = f"{what}; its log-probabilities are stored in {folder}"
    return [*output_checks("reference", folder), Check(name="reference", status="ok", message=message)]


def _side_by_side(kind: Kind, nbytes: int) -> Check:
    """A note with the cost of each kind of reference, whichever the run has.

    Args:
        kind: the run's.
        nbytes: of a second model on a device.
    """
    what = {
        "separate": f"{gib(nbytes)} on each device and one more forward pass a step",
        "adapter_base": "nothing on a device and one more forward pass a step (of adapters)",
        "precomputed": "nothing on a device and no pass in a step, after one pass over all pairs",
    }
    choices = [f"{name}: {takes}{' (this run)' if name == kind else ''}" for name, takes in what.items()]
    return Check(name="reference", status="note", message="; ".join(choices))


def _origin(config: TrainDpoConfig, written: ExplicitKeys, policy: ModelSource | None) -> ModelSource:
    path = config.reference_model
    assert path is not None
    block = ModelBlock.of(config.model, written)
    if not getattr(config.reference, "is_hf", True):
        # A `model:` block that yields to the checkpoint says nothing about the reference's architecture.
        return resolve_saved_source(path, block if not config.takes_architecture else None, key="reference.model_path")
    # The same files: its headers are read and its checks are listed once.
    if policy is not None and path == config.pretrained:
        return policy
    return resolve_source(path, block, block_is_whole=not config.takes_architecture, block_yields=True)


def _renamed(checks: Iterable[Check]) -> list[Check]:
    return [replace(check, name=f"reference {check.name}") for check in checks]


def under(name: str, planned: LeafPlan) -> LeafPlan:
    """A leaf's plan with `name` as a prefix of its path."""
    return replace(planned, leaf=replace(planned.leaf, path=f"{name}.{planned.leaf.path}"))


def under_reference(plan: ShardingPlan, reference: ShardingPlan | None) -> ShardingPlan:
    """A plan extended by a second model's leaves under `reference.`, and their errors."""
    if reference is None:
        return plan
    moved = (under(REFERENCE, planned) for planned in reference.leaves)
    errors = (
        # Errors only: notes about the reference are among its own checks.
        replace(planned, path=f"{REFERENCE}.{planned.path}")
        for planned in reference.findings
        if planned.error is not None
    )
    return replace(plan, leaves=(*plan.leaves, *moved), findings=(*plan.findings, *errors))
