"""The configuration of the evaluation harness: the block `eval_harness:`, with upstream's keys and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from levanter.config.validators import Count, PathText, PositiveInt, Ranged

GENERATION: Mapping[str, Any] = {"max_gen_toks": 256, "temperature": 0.0, "n": 1, "seed": None}
"""Keys of generation for tasks that do not set them."""


@dataclass(frozen=True, kw_only=True)
class HarnessTaskConfig(Ranged):
    """One task with changes to its lm_eval definition; keys that are not given keep the values of lm_eval's file.

    An entry whose name is not an lm_eval task, with a `dataset_path` and an `output_type`, defines a new task.

    Attributes:
        task: name of a task, a group or a tag.
        task_alias: its name in the results; required where a task is listed in several variants.
        num_fewshot: number of solved examples before each question; of a group, for each of its tasks whose file does
            not set 0.
        additional_stop_strings: strings that end a generated text, in addition to the task's `until`.
        use_prompt, description, target_delimiter, fewshot_delimiter, doc_to_text, doc_to_target, doc_to_choice,
            dataset_path, dataset_name, output_type, test_split, training_split, validation_split, fewshot_split,
            metric_list, tag, metadata: lm_eval's keys of a task.
    """

    task: str
    task_alias: str | None = None
    num_fewshot: Count | None = None
    use_prompt: str | None = None
    description: str | None = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None
    doc_to_text: str | None = None
    doc_to_target: str | None = None
    doc_to_choice: str | list[str] | None = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    output_type: str | None = None
    test_split: str | None = None
    training_split: str | None = None
    validation_split: str | None = None
    fewshot_split: str | None = None
    metric_list: list[dict[str, Any]] | None = None
    tag: list[str] | str | None = None
    metadata: dict[str, Any] | None = None
    additional_stop_strings: list[str] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it defines a task without lm_eval's file."""
        return self.dataset_path is not None and self.output_type is not None

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that override the task's lm_eval definition."""
        excluded = ("task", "task_alias", "additional_stop_strings")
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in excluded}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SampleLoggingConfig(Ranged):
    """Upstream's keys for logging samples to its tracker; here samples are written to files, as with `log_samples`.

    Attributes:
        log_all: whether all samples are written.
        max_samples_per_benchmark: otherwise the number of samples per task; null for none.
    """

    log_all: bool = False
    max_samples_per_benchmark: Count | None = None

    @property
    def logs(self) -> bool:
        """Whether samples are written."""
        return self.log_all or bool(self.max_samples_per_benchmark)


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(Ranged):
    """The tasks of an evaluation and how requests are built.

    Attributes:
        task_spec: tasks, groups and tags of lm_eval by name, or with changes.
        max_examples: the largest number of documents of each task; null for all.
        max_length: the model's context length in tokens; null for its `max_seq_len`.
        log_samples: whether every document, request and response is written, one file per task.
        bootstrap_iters: bootstrap resamplings for standard errors of metrics without a formula; 0 for no standard
            errors.
        apply_chat_template: whether prompts are formatted with the tokenizer's chat template.
        fewshot_as_multiturn: whether few-shot examples are separate turns of the conversation.
        confirm_run_unsafe_code: whether tasks may execute code that a model generated; upstream's default is true.
        sample_logging: upstream's sample logging.
        generation_kwargs: default generation parameters for tasks that do not set them.
        include_path: folders with your own tasks, separated by commas.
    """

    range_prefix: ClassVar[str] = "eval_harness."

    task_spec: list[HarnessTaskConfig | str] = field(default_factory=list)
    max_examples: PositiveInt | None = None
    max_length: PositiveInt | None = None
    log_samples: bool = False
    bootstrap_iters: Count = 0
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    confirm_run_unsafe_code: bool = False
    sample_logging: SampleLoggingConfig = field(default_factory=SampleLoggingConfig)
    generation_kwargs: dict[str, Any] = field(default_factory=lambda: dict(GENERATION))
    include_path: PathText | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"eval_harness.max_length must be at least 2 (a token and the next), got {self.max_length}"
            )

    @property
    def tasks(self) -> tuple[HarnessTaskConfig, ...]:
        """The entries of `task_spec`; a name is an entry without changes."""
        return tuple(HarnessTaskConfig(task=task) if isinstance(task, str) else task for task in self.task_spec)


def listed(text: str | None) -> list[str]:
    """The items of a comma-separated list."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]
