"""The configuration of `generate`."""

from dataclasses import dataclass, field

from levanter.commands.model.config import Quantize, TiedHead, model_key_problems
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveFloat, Ranged
from levanter.inference.config import InferenceConfig
from levanter.inference.requests import SamplingParams
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Ranged):
    """Generate text for a file of prompts with a pretrained model.

    Attributes:
        hf_checkpoint: Hugging Face files: a folder, a hub id (`org/name@revision`), a URL, or a .gguf file.
        checkpoint_path: a checkpoint of `train_lm`, or a run's folder for its newest one.
        tokenizer: another tokenizer than the checkpoint's own.
        model: the architecture, if the checkpoint has no config; otherwise it is checked against the checkpoint.
        trainer: devices, mesh, precision, trackers.
        inference: decode slots and the KV cache.
        sampling: default sampling parameters for lines that do not set them.
        chat_template: chat template used instead of the tokenizer's own: Jinja text, or a file that contains it.
        enforce_bos: whether a text prompt begins with BOS, if the tokenizer has one.
        interactive: reads prompts from the terminal and prints the answers, instead of reading and writing files.
        input_path: prompts, one JSON object a line: `{"id": …, "prompt": "text" or [ids], …parameters}`, or `messages`
            instead of `prompt`.
        output_path: the results, one JSON object a line. Results of an interrupted run are kept, and the run continues
            after them.
        adapter_path: an adapter to apply to the model, in the format of peft or `peft_save_path`: a folder, a hub id,
            or a URL.
        plan: assumptions for planning: values that a run determines from its data.
        allow_pickle: accepts pickled weights (never needed for safetensors).
        load_memory_gib: host memory for read buffers in GiB, in addition to the arrays; default a tenth of them, within
            [0.25, 4].
        quantize: `int8` stores all projections as 8-bit integers with a scale per output channel, quantized while they
            are read; null keeps them in the compute dtype.
        tied_head: with `quantize` and tied embeddings: `copy` gives the output head an int8 copy of the embedding
            table, `share` multiplies by the table itself.
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
        problems = model_key_problems(self)
        if self.interactive and (self.input_path or self.output_path):
            problems.append("interactive: reads prompts from the terminal; remove input_path and output_path")
        if problems:
            raise ValueError("\n".join(problems))
