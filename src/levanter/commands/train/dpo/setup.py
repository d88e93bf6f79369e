"""The reference of training on preference pairs: which model it is, where it is placed, and when it scores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from haliax_ext.errors import gib
from haliax_ext.planner import ShardingPlan
from haliax_ext.pytree import PyTree
from levanter.commands.cli.outputs import output_checks
from levanter.commands.train.data_task import find_validation
from levanter.commands.train.dpo.config import (
    AdapterBaseReferenceConfig,
    PrecomputedReferenceConfig,
    TrainDpoConfig,
)
from levanter.commands.train.reference_model import ReferenceModelError, find_reference_model
from levanter.commands.train.trained_run import ReferenceModel, TaskModels, TaskRows, TrainedRun
from levanter.data import EvaluationData
from levanter.io import join
from levanter.runplan import Check, Target
from levanter.trainer.dpo import PairModels, alone, pair_plan, with_base, with_other
from levanter.trainer.state import StatePlan

Kind = Literal["none", "adapter_base", "separate", "precomputed"]


SCORE = "reference_logprobs"
"""The Program that scores pairs with the reference alone, once."""
STORES = "reference_logprobs"
"""The default folder of stored log-probabilities, in `data.cache_dir`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Preferences(TaskModels):
    """The reference of a run on preferences, and what is compared with it.

    Attributes:
        config: the run's.
        kind: of the reference.
        text: text data on which the policy is also evaluated; None for none.
    """

    config: TrainDpoConfig
    kind: Kind
    text: EvaluationData | None = None

    @property
    def bind(self) -> Callable[..., PairModels]:
        """The function from trained and other parameters to the models that score pairs."""
        # `alone` covers "none" and "precomputed": the policy is the only model in memory.
        return {"adapter_base": with_base, "separate": with_other}.get(self.kind, alone)

    def model_plan(self, state: StatePlan) -> ShardingPlan:
        """The placement of the scoring models' parameters, by their paths in `PairModels`."""
        # The base of adapters is placed by the run's own state; a separate model has a plan of its own.
        of_kind = {"adapter_base": state.loaded, "separate": None if self.reference is None else self.reference.plan}
        return pair_plan(state.model, of_kind.get(self.kind))

    @property
    def resident(self) -> ReferenceModel | None:
        """The second model, if it stays on the devices during steps."""
        return self.reference if self.kind == "separate" else None

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
        model = self.reference
        return (frozen, state.loaded) if model is None else (model.module, model.plan)

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
        if self.kind == "adapter_base" or (self.reference is not None and config.reference_model == config.pretrained):
            return config.loss.at_start(config.beta)
        return None

    @property
    def forward_passes(self) -> float:
        """Additional forward passes of a step, in units of the policy's forward pass."""
        # 1.0: one forward pass of a model of the policy's size, without a backward pass.
        return 1.0 if self.kind in ("adapter_base", "separate") else 0.0


def cache_root(folder: str | None, cache_dir: str | None, key: str) -> str:
    """The folder of stored log-probabilities.

    Raises:
        ReferenceModelError: no folder is configured.
    """
    if folder is None and cache_dir is None:
        raise ReferenceModelError(f"{key}: names no folder, and data.cache_dir is null; name one of them")
    return join(str(cache_dir), STORES) if folder is None else folder


def kind_of_reference(config: TrainDpoConfig) -> Kind:
    """The kind of a run's reference."""
    if not config.loss.has_reference:
        return "none"
    if isinstance(config.reference, AdapterBaseReferenceConfig):
        return "adapter_base"
    return "precomputed" if isinstance(config.reference, PrecomputedReferenceConfig) else "separate"


def find_preferences(config: TrainDpoConfig, run: TrainedRun, target: Target) -> Preferences:
    """The reference of a run on preferences.

    Args:
        config: the run's.
        run: the same run, with the placement of its state.
        target: the devices.

    Raises:
        ValueError: the reference is broken, or has other ids.
    """
    kind = kind_of_reference(config)
    text = TaskRows(checks=()) if config.lm_validation_data is None else find_validation(config.lm_validation_data)
    # `stores` and `_store_checks` need the kind and the config only.
    bare = Preferences(config=config, kind=kind, text=text.validation)
    if kind == "separate" and not getattr(config.reference, "model_path", None):
        raise ReferenceModelError(
            "reference.model_path: type separate needs a separate model, and none is named; name it, use "
            "reference: {type: adapter_base} with an adapter, or {type: precomputed}"
        )
    checks = [*(replace(check, name="lm_validation_data") for check in text.checks), *_store_checks(bare)]
    if config.reference_model is None:
        if kind != "none":
            checks.append(_side_by_side(kind, run.state_plan.loaded.bytes_per_device))
        return replace(bare, checks=tuple(checks))
    is_hf = getattr(config.reference, "is_hf", True)
    reference = find_reference_model(run, target, config.reference_model, is_hf=is_hf)
    checks += [*reference.checks, _side_by_side(kind, reference.plan.bytes_per_device)]
    return replace(bare, reference=reference, checks=tuple(checks))


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
