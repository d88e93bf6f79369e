"""The configurations of `eval_lm` and `viz_logprobs`."""

from dataclasses import dataclass, field

from levanter.commands.model.config import (
    LoadedModelKeys,
    QuantizableModelKeys,
    hf_files,
    model_key_problems,
)
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt, Seed
from levanter.data.config import LmDataConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class EvalLmConfig(LoadedModelKeys):
    """Evaluate loss, perplexity and bits per byte of a model on text.

    Attributes:
        initialize_from_hf: alias of `hf_checkpoint`.
        trainer: devices, mesh, precision, trackers.
        data: the data sets.
        eval_on_train: evaluates on training data instead of validation data.
        max_eval_length: tokens per row; default at most the model's `max_seq_len`.
        output_path: file for the results as JSON; default `<trainer.log_dir>/<run id>/eval_lm.json`.
        plan: assumptions for planning: values that a run determines from its data.
    """

    initialize_from_hf: PathText | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: LmDataConfig = field(default_factory=LmDataConfig)
    eval_on_train: bool = False
    max_eval_length: PositiveInt = 2048
    output_path: PathText | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self):
        super().__post_init__()
        problems = model_key_problems(self, alias=self.initialize_from_hf, purpose="to evaluate")
        if self.max_eval_length < 2:
            problems.append(f"max_eval_length must be at least 2 (a token and the next), got {self.max_eval_length}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def reference(self) -> str:
        """The model's reference under either key; empty if there is none."""
        # Both keys may be set to one value; two different values were refused.
        return self.hf_checkpoint or self.initialize_from_hf or ""


@dataclass(frozen=True, kw_only=True)
class VizLmConfig(QuantizableModelKeys):
    """Write an HTML page that shows the log-probability of every token of a text.

    Attributes:
        checkpoint_is_hf: whether `checkpoint_path` names Hugging Face files.
        path: file for the page.
        num_docs: number of rows of text to show.
        data_seed: seed of the choice of rows; null for the first rows.
        max_eval_length: tokens per row; default at most the model's `max_seq_len`.
        trainer: devices, mesh, precision.
        data: the data sets.
        comparison_model_path, comparison_is_hf: a second model to compare with, not supported yet.
        plan: assumptions for planning: values that a run determines from its data.
    """

    checkpoint_is_hf: bool = False
    path: PathText = "logprobs.html"
    num_docs: PositiveInt = 32
    data_seed: Seed | None = 0
    max_eval_length: PositiveInt = 4096
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    data: LmDataConfig = field(default_factory=LmDataConfig)
    comparison_model_path: str | None = None
    comparison_is_hf: bool = False
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        # Exactly one of the two: both equal to None, or both set, is a mistake.
        if (self.checkpoint_path is None) == (self.hf_checkpoint is None):
            problems.append("give one model: checkpoint_path, or hf_checkpoint")
        if self.comparison_model_path is not None:
            problems.append("comparison_model_path: not supported yet; make one page per model")
        if self.max_eval_length < 2:
            problems.append(f"max_eval_length must be at least 2 (a token and the next), got {self.max_eval_length}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def evaluation(self) -> EvalLmConfig:
        """The evaluation whose results are shown."""
        named = hf_files(self)
        return EvalLmConfig(
            hf_checkpoint=named,
            checkpoint_path=None if named else self.checkpoint_path,
            trainer=self.trainer,
            data=self.data,
            model=self.model,
            max_eval_length=self.max_eval_length,
            output_path=self.path,
            quantize=self.quantize,
            tied_head=self.tied_head,
            adapter_path=self.adapter_path,
            plan=self.plan,
        )
