"""The configuration of `perplexity_gap`."""

from dataclasses import dataclass, field

from levanter.commands.model.config import LoadedModelKeys, hf_files
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt, Ranged
from levanter.data.config import DatasetComponentBase
from levanter.trainer.config import TrainerConfig

MODELS = ("model_a", "model_b", "model")


@dataclass(frozen=True, kw_only=True)
class GapModelConfig(LoadedModelKeys):
    """One of the models.

    Attributes:
        checkpoint_is_hf: whether `checkpoint_path` names Hugging Face files.
        tokenizer: another tokenizer than the checkpoint's own.
        tokenizer_backend: no effect; tokenizers are read by the `tokenizers` library.
        trust_remote_code: no effect; no code of a repository is executed.
    """

    checkpoint_is_hf: bool = False
    tokenizer: PathText | None = None
    tokenizer_backend: str = "hf"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.checkpoint_path is None) == (self.hf_checkpoint is None):
            raise ValueError("give one model: checkpoint_path, or hf_checkpoint")

    @property
    def files(self) -> str | None:
        """The Hugging Face files that are named, under either key."""
        return hf_files(self)

    @property
    def saved(self) -> str | None:
        """The checkpoint of our own training that is named."""
        return None if self.files else self.checkpoint_path


@dataclass(frozen=True, kw_only=True)
class PerplexityGapConfig(Ranged):
    """Compare two models on the same bytes, or score one.

    Attributes:
        model_a, model_b: the two models to compare.
        model: instead of two models, a single model to score.
        datasets: the text data sets by name.
        trainer: devices, mesh, precision, trackers.
        output_path: folder of the results; default `perplexity-gap`, or `model-perplexity` for a single model.
        max_eval_length: tokens per row; at most the smaller `max_seq_len`.
        max_docs_per_dataset: largest number of documents of each data set; null for all.
        max_doc_bytes: largest number of bytes of a document; null for all.
        plan: assumptions for planning: values that a run determines from its data.
    """

    model_a: GapModelConfig | None = None
    model_b: GapModelConfig | None = None
    model: GapModelConfig | None = None
    datasets: dict[str, DatasetComponentBase] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    output_path: PathText | None = None
    max_eval_length: PositiveInt = 4096
    max_docs_per_dataset: PositiveInt | None = 256
    max_doc_bytes: PositiveInt | None = 32_768
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        source_keys = [name for name in MODELS if getattr(self, name) is not None]
        # A pair or a single model, nothing else: half a pair is most likely a mistake.
        if source_keys not in (["model_a", "model_b"], ["model"]):
            sources = ", ".join(source_keys) or "none"
            problems.append(f"give model_a and model_b, which are compared, or one model to score; there is {sources}")
        if not self.datasets:
            problems.append(
                "datasets: no data set is configured; expected NAME: {source: {validation_urls: [FILE, …]}}"
            )
        if self.max_eval_length < 2:
            problems.append(f"max_eval_length must be at least 2 (a token and the next), got {self.max_eval_length}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def models(self) -> dict[str, GapModelConfig]:
        """The models by their keys."""
        by_key = {name: getattr(self, name) for name in MODELS}
        return {name: model for name, model in by_key.items() if model is not None}

    @property
    def folder(self) -> str:
        """The folder of the files."""
        return self.output_path or ("perplexity-gap" if self.model is None else "model-perplexity")
