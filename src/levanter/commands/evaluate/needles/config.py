"""The configuration of `eval_needles`."""

from dataclasses import dataclass, field
from typing import Literal

from levanter.commands.model.config import (
    LoadedModelKeys,
    hf_files,
    model_key_problems,
    saved_checkpoint,
)
from levanter.config.errors import did_you_mean
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt, Seed
from levanter.eval.needles.prompts import NeedleSpec
from levanter.eval.needles.tasks import TASKS
from levanter.trainer.config import TrainerConfig

SHORTEST, LONGEST = 16, 1 << 24
MOST_TOKENS = 1 << 30
"""Largest number of tokens of all questions, which are in the host's memory at once."""


@dataclass(frozen=True, kw_only=True)
class EvalNeedlesConfig(LoadedModelKeys):
    """RULER needle-in-a-haystack evaluation.

    Attributes:
        checkpoint_is_hf: whether `checkpoint_path` names Hugging Face files.
        tasks: names of tasks; all tasks if empty.
        lengths: context lengths in tokens, including question and answer.
        samples: samples per task and length.
        depths: number of needle depths, from the beginning of a text to its end.
        seed: seed of the texts.
        trainer: devices, mesh, precision, trackers; rows per batch (`per_device_eval_parallelism`, default 1).
        tokenizer: another tokenizer than the checkpoint's own.
        output_path: folder of the results; default `<trainer.log_dir>/needles`, the same for every run, so that a
            killed run can resume.
        if_exists: existing results: `resume` continues a run of the same configuration and refuses results of another;
            `replace` discards them.
        plan: assumptions for planning: values that a run determines from its data.
    """

    checkpoint_is_hf: bool = False
    tasks: list[str] = field(default_factory=list)
    lengths: list[PositiveInt] = field(default_factory=lambda: [4096])
    samples: PositiveInt = 10
    depths: PositiveInt = 5
    seed: Seed = 0
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tokenizer: PathText | None = None
    output_path: PathText | None = None
    if_exists: Literal["resume", "replace"] = "resume"
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = model_key_problems(self, purpose="to evaluate")
        for name in self.tasks:
            if name not in TASKS:
                problems.append(f"tasks: {name!r} is none of {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
        for key, values in (("tasks", self.tasks), ("lengths", self.lengths)):
            again = [value for n, value in enumerate(values) if value in values[:n]]
            if again:
                problems.append(f"{key}: {', '.join(map(str, again))} is named more than once")
        if not self.lengths:
            problems.append("lengths: none is given; expected tokens, such as [4096, 8192]")
        # Every task has the given number of samples at every length.
        tokens = self.samples * len(self.tasks or TASKS) * sum(self.lengths)
        if tokens > MOST_TOKENS:
            fewer = max(1, self.samples * MOST_TOKENS // tokens)
            problems.append(
                f"samples: {self.samples:,} questions of each task and length are {tokens:,} tokens, and "
                f"the limit is {MOST_TOKENS:,}; reduce samples to {fewer:,}"
            )
        problems += [f"lengths: {length} is below {SHORTEST} tokens" for length in self.lengths if length < SHORTEST]
        problems += [f"lengths: {length:,} is above {LONGEST:,} tokens" for length in self.lengths if length > LONGEST]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def spec(self) -> NeedleSpec:
        """The questions: tasks, lengths, samples, depths and seed."""
        return NeedleSpec(
            tasks=tuple(self.tasks or TASKS),
            lengths=tuple(sorted(self.lengths)),
            samples=self.samples,
            depths=self.depths,
            seed=self.seed,
        )

    @property
    def files(self) -> str | None:
        """The Hugging Face files that are named, under either key."""
        return hf_files(self)

    @property
    def saved(self) -> str | None:
        """The checkpoint of our own training that is named."""
        return saved_checkpoint(self)
