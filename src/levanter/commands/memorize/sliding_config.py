"""The configuration of `eval_sliding_lm`."""

from dataclasses import dataclass, field

from levanter.commands.memorize.config import model_problems, scheme_problems
from levanter.commands.model.config import LoadedModelKeys
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import NonNegativeFloat, PathText, PositiveFraction, PositiveInt
from levanter.data.config import LmDataConfig
from levanter.memorization.coverage import DEFAULT_THRESHOLD, Cover
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class EvalSlidingLmConfig(LoadedModelKeys):
    """Measure memorization of prepared prompt/suffix rows.

    Attributes:
        initialize_from_hf, use_hf_model_config, trainer, scheme, schemes, allow_nondivisible_batch_size,
            coverage_threshold, keep_text, if_exists, save_seconds, plan: as in `eval_careless_lm`.
        data: the prepared sets, one per component.
        split: the split of each component that is read: `validation` or `train`.
        max_batches: scores only the first so many batches of each set.
        eval_batch_size: rows per batch, over all devices; null for 32, or the next multiple of the batch shards.
        bos: begins every row with BOS.
        output_base_path: the folder of the results; each set has its own subfolder.
    """

    initialize_from_hf: PathText | None = None
    use_hf_model_config: bool | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: LmDataConfig = field(default_factory=LmDataConfig)
    split: str = "validation"
    max_batches: PositiveInt | None = None
    eval_batch_size: PositiveInt | None = None
    allow_nondivisible_batch_size: bool = False
    bos: bool = False
    scheme: str | None = None
    schemes: tuple[str, ...] = ()
    output_base_path: PathText = "logs/sliding"
    coverage_threshold: PositiveFraction = DEFAULT_THRESHOLD
    cover: Cover = "suffix"
    keep_text: bool = True
    if_exists: str = "resume"
    save_seconds: NonNegativeFloat = 30.0
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self):
        super().__post_init__()
        problems = model_problems(self)
        problems += scheme_problems([name for name in (self.scheme, *self.schemes) if name is not None])
        if self.split not in ("validation", "train"):
            problems.append(f"split: must be validation or train, got {self.split!r}")
        if self.if_exists not in ("resume", "replace"):
            problems.append(f"if_exists: must be resume or replace, got {self.if_exists!r}")
        for name in ("max_batches", "eval_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name}: must be at least 1, or null; got {value}")
        if not self.data.components:
            problems.append("data.components: no prepared set; give a component with validation_urls and a format")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def reference(self) -> str | None:
        """The model's reference under either key; None if there is none."""
        return self.hf_checkpoint or self.initialize_from_hf
