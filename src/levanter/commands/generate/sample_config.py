"""The configuration of `sample_lm`: upstream's keys, and what `generate` has for them."""

from dataclasses import dataclass, field

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.upstream_engine_config import InferenceEngineConfig
from levanter.commands.model.representation import Quantize, TiedHead
from levanter.config import ExplicitKeys
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt, Ranged
from levanter.inference.requests import Choices, SampleSeed, SamplingParams, Temperature
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig

PROMPTS = (
    "The three primary colors are",
    "Dear editor, I am writing to",
    "def fibonacci(n):",
    "It was the last train of the evening, and",
)
"""What is gone on with where a document names no prompts."""


@dataclass(frozen=True, kw_only=True)
class SampleLmConfig(Ranged):
    """What texts are sampled behind, with which model, and where.

    Attributes:
        checkpoint_path: a checkpoint of our own training runs, or a run's folder for its newest one.
        hf_checkpoint: Hugging Face files: a folder, a hub id, a URL, or a .gguf file.
        trainer: devices, mesh, precision, trackers.
        model: the architecture, if the checkpoint does not give it.
        tokenizer: another tokenizer than the checkpoint's own.
        engine: rows and their cache, by upstream's keys.
        prompts: what is gone on with; null for four of our own.
        stop_sequence: where a text ends; null for its own end.
        max_new_tokens: tokens of a text.
        temperature: 0 takes the likeliest token.
        seed: of the first round's noise; each round has the next one.
        n_generations: texts behind each prompt.
        n_rounds: how often all prompts are gone through.
        profile: without effect; `trainer.profiler` profiles training runs.
        log_kernel_jaxprs_path: without effect.
        quantize: `int8` holds all projections as 8-bit integers; see `generate`.
        tied_head: with `quantize`, what a head multiplies by that is the embedding table: `copy` or `share`.
        adapter_path: an adapter of the model, as peft or `peft_save_path` wrote it: a folder, a hub id, or a URL.
        plan: assumptions for planning that a run would find out by itself.
    """

    checkpoint_path: PathText | None = None
    hf_checkpoint: PathText | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: LmConfig | None = None
    tokenizer: PathText | None = None
    engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    prompts: list[str] | str | None = None
    stop_sequence: str | None = "."
    max_new_tokens: PositiveInt = 192
    temperature: Temperature = 0.7
    seed: SampleSeed = 2
    n_generations: Choices = 1
    n_rounds: PositiveInt = 4
    profile: bool = False
    log_kernel_jaxprs_path: str | None = None
    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"
    adapter_path: PathText | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sampling

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts."""
        if self.prompts is None:
            return PROMPTS
        return (self.prompts,) if isinstance(self.prompts, str) else tuple(self.prompts)

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen."""
        return SamplingParams(
            temperature=self.temperature,
            n=self.n_generations,
            max_tokens=self.max_new_tokens,
            stop=(self.stop_sequence,) if self.stop_sequence else (),
        )

    def generating(self, written: ExplicitKeys) -> GenerateConfig:
        """The same as `generate` has it, without files."""
        return GenerateConfig(
            hf_checkpoint=self.hf_checkpoint,
            checkpoint_path=self.checkpoint_path,
            tokenizer=self.tokenizer,
            model=self.model,
            trainer=self.trainer,
            inference=self.engine.inference(needed=len(self.texts) * self.n_generations, written=written),
            sampling=self.sampling,
            quantize=self.quantize,
            tied_head=self.tied_head,
            adapter_path=self.adapter_path,
            plan=self.plan,
        )
