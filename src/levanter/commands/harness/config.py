"""The configuration of `eval_harness`."""

from dataclasses import dataclass, field, replace

from levanter.commands.model.config import (
    LoadedModelKeys,
    hf_files,
    model_key_problems,
    saved_checkpoint,
)
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt
from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig, listed
from levanter.inference.config import InferenceConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class EvalHarnessConfig(LoadedModelKeys):
    """Evaluate a model on lm-evaluation-harness tasks.

    Attributes:
        eval_harness: the tasks and their settings.
        tasks: names of tasks, groups or tags, separated by commas; overrides `eval_harness.task_spec`.
        limit: largest number of documents of each task; overrides `eval_harness.max_examples`.
        include_path: folders with your own tasks, separated by commas, in addition to `eval_harness.include_path`.
        tokenizer: another tokenizer than the checkpoint's own.
        checkpoint_is_hf: whether `checkpoint_path` names Hugging Face files.
        apply_chat_template, fewshot_as_multiturn: see `eval_harness`; true in either place enables it.
        trainer: devices, mesh, precision, trackers.
        inference: decode slots for tasks that generate text.
        output_path: folder for the results; default `<trainer.log_dir>/<run id>/harness`.
        against: results of another run on the same tasks (`results_<date>.json`, with its samples in the same folder)
            to compare with.
        plan: assumptions for planning: values that a run determines from its data.
    """

    eval_harness: HarnessConfig = field(default_factory=HarnessConfig)
    tasks: str | None = None
    limit: PositiveInt | None = None
    include_path: PathText | None = None
    tokenizer: PathText | None = None
    checkpoint_is_hf: bool = False
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    output_path: PathText | None = None
    against: PathText | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = model_key_problems(self, purpose="to evaluate")
        if self.tasks is not None and self.eval_harness.task_spec:
            problems.append("tasks and eval_harness.task_spec both name tasks; give one")
        elif not self.harness.task_spec:
            problems.append("no tasks: give tasks (names, separated by commas) or eval_harness.task_spec")
        if self.limit is not None and self.eval_harness.max_examples is not None:
            problems.append("limit and eval_harness.max_examples are one key; give one")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def harness(self) -> HarnessConfig:
        """The tasks and their settings, from both sets of keys."""
        # Names alone, without settings; `task_spec` may have some. Both at once were refused above.
        named = [HarnessTaskConfig(task=name) for name in listed(self.tasks)]
        block = self.eval_harness
        return replace(
            block,
            task_spec=[*named, *block.task_spec],
            max_examples=self.limit or block.max_examples,
            # True in either place enables them, since false is the default of both.
            apply_chat_template=self.apply_chat_template or block.apply_chat_template,
            fewshot_as_multiturn=self.fewshot_as_multiturn or block.fewshot_as_multiturn,
        )

    @property
    def folders(self) -> list[str]:
        """Folders with tasks in addition to lm_eval's own, from both keys."""
        return list(dict.fromkeys([*listed(self.include_path), *listed(self.eval_harness.include_path)]))

    @property
    def files(self) -> str | None:
        """The Hugging Face files that are named, under either key."""
        return hf_files(self)

    @property
    def saved(self) -> str | None:
        """The checkpoint of our own training that is named."""
        return saved_checkpoint(self)
