"""The configuration of text that a training run generates between its steps."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from levanter.commands.model.config import Quantize, TiedHead
from levanter.config.validators import PositiveInt
from levanter.inference.config import Auto, InferenceConfig
from levanter.inference.requests import SamplingParams


@dataclass(frozen=True, kw_only=True)
class TrainingGenerationConfig(InferenceConfig):
    """The engine of a training run, for `sample_prompts` and for tasks of `eval_harness` that generate text.

    Attributes:
        mapping: placement of the weights that generate: `auto` keeps them whole along `embed`, so that no token waits
            for gathered weights; `train` keeps the shards of training, which need less memory and more time.
        quantize: `int8` generates with 8-bit integers in all projections, quantized when the weights are handed over;
            null generates in the compute dtype.
        tied_head: with `quantize` and tied embeddings: `copy` gives the output head an int8 copy of the embedding
            table, `share` multiplies by the table itself.
        sampling: sampling parameters of `sample_prompts`; greedy by default.
        max_rows: decode slots over all devices (sequences that are generated concurrently); a multiple of the batch
            shards. `auto` takes as many as there are prompts, and at least 8 for tasks of `eval_harness`; at most 256,
            and 32 on CPUs.
        max_seq_len: the largest number of positions of a slot, prompt and generated text together; null for the
            length of training rows, and of the requests of `eval_harness` if some generate text.
    """

    range_prefix: ClassVar[str] = "generation."

    mapping: Literal["auto", "train"] = "auto"
    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, max_tokens=64))
    max_rows: PositiveInt | Auto = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Keys that the engine has for files of prompts, and that would have no effect here.
        problems = []
        if self.prompt_logprobs:
            problems.append("generation.prompt_logprobs: prompts are not scored between steps; leave it out")
        if self.sampling.echo:
            problems.append("generation.sampling.echo: prompts are written beside their texts anyway; leave it out")
        if self.sampling.counts_tokens and not self.penalties:
            problems.append("generation.penalties: false, and generation.sampling has penalties, which count tokens")
        if problems:
            raise ValueError("\n".join(problems))
