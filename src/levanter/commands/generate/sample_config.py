"""The configuration of `sample_lm`: upstream's keys, translated to those of `generate`."""

from dataclasses import dataclass, field

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.upstream_engine_config import InferenceEngineConfig
from levanter.commands.model.config import QuantizableModelKeys
from levanter.config import ExplicitKeys
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt
from levanter.inference.requests import Choices, SampleSeed, SamplingParams, Temperature
from levanter.trainer.config import TrainerConfig

PROMPTS = (
    "The three primary colors are",
    "Dear editor, I am writing to",
    "def fibonacci(n):",
    "It was the last train of the evening, and",
)
"""The default prompts."""


@dataclass(frozen=True, kw_only=True)
class SampleLmConfig(QuantizableModelKeys):
    """Sample continuations of a few prompts.

    Attributes:
        trainer: devices, mesh, precision, trackers.
        tokenizer: another tokenizer than the checkpoint's own.
        engine: rows and their cache, by upstream's keys.
        prompts: the prompts; null for four built-in ones.
        stop_sequence: string that ends a text; null for only the model's own end.
        max_new_tokens: largest number of tokens of a text.
        temperature: sampling temperature; 0 selects the most likely token (the lowest id on ties).
        seed: seed of the sampling noise of the first round; it increases by one each round.
        n_generations: continuations of each prompt.
        n_rounds: how many times all prompts are continued.
        profile: no effect; `trainer.profiler` profiles training runs.
        log_kernel_jaxprs_path: no effect.
        plan: assumptions for planning: values that a run determines from its data.
    """

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
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
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Builds the parameters once, so that invalid ones are refused with the config.
        _ = self.sampling

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts."""
        if self.prompts is None:
            return PROMPTS
        return (self.prompts,) if isinstance(self.prompts, str) else tuple(self.prompts)

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters."""
        return SamplingParams(
            temperature=self.temperature,
            n=self.n_generations,
            max_tokens=self.max_new_tokens,
            # An empty string is no stop string.
            stop=(self.stop_sequence,) if self.stop_sequence else (),
        )

    def generating(self, written: ExplicitKeys) -> GenerateConfig:
        """The equivalent configuration of `generate`, without files."""
        return GenerateConfig(
            hf_checkpoint=self.hf_checkpoint,
            checkpoint_path=self.checkpoint_path,
            tokenizer=self.tokenizer,
            model=self.model,
            trainer=self.trainer,
            # All continuations of a round run at once, if the cache has the slots.
            inference=self.engine.inference(needed=len(self.texts) * self.n_generations, written=written),
            sampling=self.sampling,
            quantize=self.quantize,
            tied_head=self.tied_head,
            adapter_path=self.adapter_path,
            plan=self.plan,
        )
