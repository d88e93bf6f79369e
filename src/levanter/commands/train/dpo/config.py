"""The configuration of `train_dpo`: the keys of `train_lm`, and those of the preference loss and its reference."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, cast

import draccus

from levanter.commands.train.config import TrainLmConfig
from levanter.config.upstream.preferences import TRAIN_DPO
from levanter.config.validators import Count, Decay, PathText, PositiveFloat, PositiveInt, Ranged
from levanter.data.config import LmDataConfig
from levanter.io.names import name_problem
from levanter.trainer.dpo import PreferenceLossConfig


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(Ranged, draccus.ChoiceRegistry):
    """The reference of a preference loss (`reference: {type: …}`; `separate` if no type is given)."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        """The type of a reference without `type`: a separate model."""
        return "separate"


@ReferenceConfig.register_subclass("separate")
@dataclass(frozen=True, kw_only=True)
class SeparateReferenceConfig(ReferenceConfig):
    """A separate model, loaded in addition to the one that is trained.

    Attributes:
        model_path: Hugging Face files (a folder, a hub id, a URL), or one of our checkpoints.
        is_hf: whether `model_path` names Hugging Face files.
    """

    model_path: str = ""
    is_hf: bool = True


@ReferenceConfig.register_subclass("adapter_base")
@dataclass(frozen=True, kw_only=True)
class AdapterBaseReferenceConfig(ReferenceConfig):
    """The base model of the trained adapters, without the adapters; needs no further memory."""


@ReferenceConfig.register_subclass("precomputed")
@dataclass(frozen=True, kw_only=True)
class PrecomputedReferenceConfig(ReferenceConfig):
    """A model that scores all pairs before the first step and is not in memory afterwards.

    Attributes:
        model_path: the model; null for the Hugging Face checkpoint that the run begins from.
        is_hf: whether that is Hugging Face files, or one of our checkpoints.
        cache_dir: the folder of its log-probabilities; `reference_logprobs` in `data.cache_dir` by default.
    """

    model_path: PathText | None = None
    is_hf: bool = True
    cache_dir: PathText | None = None


@dataclass(frozen=True, kw_only=True)
class ReferenceEvalCacheConfig(Ranged):
    """Whether the reference's log-probabilities of validation pairs are computed once and stored.

    Attributes:
        mode: `build_or_load`, or `disabled`.
        cache_dir: the folder; default `reference_logprobs` in `data.cache_dir`.
    """

    mode: Literal["disabled", "build_or_load"] = "disabled"
    cache_dir: PathText | None = None


@dataclass(frozen=True, kw_only=True)
class TrainDpoConfig(TrainLmConfig):
    """Train a language model on preference pairs: the keys of `train_lm`, plus those of the loss and the reference.

    Attributes:
        beta: weight β of the log-probability difference between policy and reference.
        loss: the preference loss.
        reference: the reference model.
        validation_split_fraction: fraction of each training set (its last pairs) that is used for validation; null for
            none.
        reference_eval_cache: whether the reference's log-probabilities of validation pairs are stored.
        lm_validation_data: text on which the policy is also evaluated, as in `train_lm`.
        lm_validation_prefix: prefix of the names of its metrics.
        scheduled_eval_steps: steps after which the policy is evaluated; null for every `trainer.steps_per_eval`.
        run_initial_eval: whether the policy is evaluated before the first step.
        hf_save_steps: null for no exports.
        peft_hf_upload: not supported yet; false is accepted.
    """

    EARLIER: ClassVar[str] = TRAIN_DPO

    beta: PositiveFloat = 0.1
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    reference: ReferenceConfig = field(default_factory=SeparateReferenceConfig)
    validation_split_fraction: Decay | None = 0.1
    reference_eval_cache: ReferenceEvalCacheConfig = field(default_factory=ReferenceEvalCacheConfig)
    lm_validation_data: LmDataConfig | None = None
    lm_validation_prefix: str = "lm_eval"
    scheduled_eval_steps: list[Count] | None = None
    run_initial_eval: bool = False
    peft_hf_upload: bool | str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    hf_save_steps: PositiveInt | None = 10_000  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [*self._reference_problems(), *self._data_problems()]
        if self.z_loss_weight:
            problems.append("z_loss_weight: preferences have no z-loss; leave it out")
        if problem := name_problem(self.lm_validation_prefix, max_components=0):
            problems.append(f"lm_validation_prefix: {problem}")
        if problems:
            raise ValueError("\n".join(problems))

    def _reference_problems(self) -> list[str]:
        # Losses without a reference (SimPO, ORPO) accept the key's default only.
        reference, named = self.reference, getattr(self.reference, "model_path", None)
        if not self.loss.has_reference:
            # The default is `separate` without a path, which means that the user wrote nothing.
            if named or not isinstance(reference, SeparateReferenceConfig):
                return [f"reference: {self.loss.type} compares with no reference; leave it out"]
            if self.reference_eval_cache.mode != "disabled":
                return [f"reference_eval_cache: {self.loss.type} compares with no reference; leave it out"]
            return []
        if isinstance(reference, AdapterBaseReferenceConfig) and self.lora is None:
            return ["reference: type adapter_base compares with the adapter's base; add adapter: {type: lora}"]
        if isinstance(reference, PrecomputedReferenceConfig):
            if named is None and self.pretrained is None:
                return [
                    "reference.model_path: null means the Hugging Face checkpoint that the run begins from, and it "
                    "begins from none (hf_checkpoint, initialize_from_hf); name the reference"
                ]
            # It would store the same numbers twice.
            if self.reference_eval_cache.mode != "disabled":
                return ["reference_eval_cache: a precomputed reference stores validation pairs too; leave it out"]
        return []

    def _data_problems(self) -> list[str]:
        if self.validation_split_fraction and self.data.num_validation_sequences:
            # Each of the two would hold out other pairs of the same set.
            return [
                "validation_split_fraction and data.num_validation_sequences: both hold pairs out of the training "
                "sets; set one of them to null"
            ]
        return []

    @property
    def without_adapter(self) -> "TrainDpoConfig":
        """The same run with the model's own weights trained, compared with the model that the adapters were of.

        Raises:
            ValueError: the run trains no adapters, or no checkpoint can serve as the reference.
        """
        if self.lora is None or not isinstance(self.reference, AdapterBaseReferenceConfig):
            return cast("TrainDpoConfig", super().without_adapter)
        if self.pretrained is None:
            raise ValueError(
                "reference: without adapters it is a separate model, and the run names no files to load it from"
            )
        # Fully trained weights change, so the adapters' base must be loaded a second time as the reference.
        other = SeparateReferenceConfig(model_path=self.pretrained)
        return replace(self, adapter=None, peft_save_path=None, merged_hf_save_path=None, reference=other)

    @property
    def exports(self) -> str | None:
        """The folder of the exports; None if `hf_save_steps` is null."""
        return None if self.hf_save_steps is None else super().exports

    @property
    def merged(self) -> str | None:
        """The folder of merged models, if adapters have another one."""
        return None if self.hf_save_steps is None else super().merged

    @property
    def reference_model(self) -> str | None:
        """The path of the separate reference model; None if there is none."""
        # The base of adapters is part of the policy, so nothing is loaded besides it.
        if not self.loss.has_reference or isinstance(self.reference, AdapterBaseReferenceConfig):
            return None
        named = getattr(self.reference, "model_path", None)
        return named or (self.pretrained if isinstance(self.reference, PrecomputedReferenceConfig) else None)
