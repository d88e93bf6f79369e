"""The configuration of `generate`."""

from dataclasses import dataclass, field

from levanter.commands.model.config import LoadedModelKeys, model_key_problems
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText
from levanter.inference.config import InferenceConfig
from levanter.inference.requests import SamplingParams
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(LoadedModelKeys):
    """Generate text for a file of prompts with a pretrained model.

    Attributes:
        tokenizer: another tokenizer than the checkpoint's own.
        trainer: devices, mesh, precision, trackers.
        inference: decode slots and the KV cache.
        sampling: default sampling parameters for lines that do not set them.
        chat_template: chat template used instead of the tokenizer's own: Jinja text, or a file that contains it.
        enforce_bos: whether a text prompt begins with BOS; null for what the tokenizer's files decide.
        interactive: reads prompts from the terminal and prints the answers, instead of reading and writing files.
        input_path: prompts, one JSON object a line: `{"id": …, "prompt": "text" or [ids], …parameters}`, or `messages`
            instead of `prompt`.
        output_path: the results, one JSON object a line. Results of an interrupted run are kept, and the run continues
            after them.
        plan: assumptions for planning: values that a run determines from its data.
    """

    tokenizer: PathText | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None
    enforce_bos: bool | None = None
    interactive: bool = False
    input_path: PathText | None = None
    output_path: PathText | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = model_key_problems(self)
        if self.interactive and (self.input_path or self.output_path):
            problems.append("interactive: reads prompts from the terminal; remove input_path and output_path")
        if problems:
            raise ValueError("\n".join(problems))
