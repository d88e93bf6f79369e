"""The configuration of `generate`."""

from dataclasses import dataclass, field

from levanter.commands.model.naming import naming_problems
from levanter.commands.model.representation import Quantize, TiedHead
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveFloat, Ranged
from levanter.inference.config import InferenceConfig
from levanter.inference.requests import SamplingParams
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Ranged):
    """Which prompts `generate` continues, with which model, and where the texts go.

    Attributes:
        hf_checkpoint: Hugging Face files: a folder, a hub id (`org/name@revision`), a URL, or a .gguf file.
        checkpoint_path: a checkpoint of our own training runs, or a run's folder for its newest one.
        tokenizer: another tokenizer than the checkpoint's own.
        model: the architecture, if the checkpoint does not give it; checked against the checkpoint if it does.
        trainer: devices, mesh, precision, trackers.
        inference: rows and their cache.
        sampling: how tokens are chosen where a line does not say.
        chat_template: makes a text of a conversation, instead of the tokenizer's own: Jinja, or a file that has it.
        enforce_bos: whether a prompt that is a text begins with BOS, where the tokenizer has one.
        interactive: asks at the terminal and answers there, instead of reading and writing files.
        input_path: prompts, one JSON object a line: `{"id": …, "prompt": "text" or [ids], …parameters}`, or `messages`
            instead of `prompt`.
        output_path: a line of JSON for each of them. What is there from an interrupted run is kept, and the run goes on
            behind it.
        adapter_path: an adapter of the model, as peft or `peft_save_path` wrote it: a folder, a hub id, or a URL.
        plan: assumptions for planning that a run would find out by itself.
        allow_pickle: accept pickled weights (never needed for safetensors).
        load_memory_gib: host memory for reading, beyond the arrays; default a tenth of them, within [0.25, 4] GiB.
        quantize: `int8` holds all projections as 8-bit integers with a scale per output channel, made while they are
            read; null keeps them in the compute dtype.
        tied_head: with `quantize`, where the head is the embedding table: whether it multiplies by an int8 `copy`, or
            they `share` the table as it is.
    """

    hf_checkpoint: PathText | None = None
    checkpoint_path: PathText | None = None
    tokenizer: PathText | None = None
    model: LmConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None
    enforce_bos: bool = True
    interactive: bool = False
    input_path: PathText | None = None
    output_path: PathText | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)
    allow_pickle: bool = False
    load_memory_gib: PositiveFloat | None = None
    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"
    adapter_path: PathText | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = naming_problems(self)
        if self.interactive and (self.input_path or self.output_path):
            problems.append("interactive: asks at the terminal, so there is no input_path and no output_path")
        if problems:
            raise ValueError("\n".join(problems))
