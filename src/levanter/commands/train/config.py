"""The configuration of `train_lm`."""

from dataclasses import dataclass, field
from typing import Any

from levanter.config.plan_options import PlanOptions
from levanter.config.ranges import Count, NonNegativeFloat, PathText, PositiveInt, Ranged, Seed
from levanter.data.config import LmDataConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class TrainLmConfig(Ranged):
    """What `train_lm` trains, on what, and where.

    Attributes:
        data: the data sets and their weights.
        trainer: devices, mesh, batch, precision, trackers, checkpoints.
        model: the architecture.
        optimizer: optimizer and learning rate.
        train_seq_len: tokens per row; default `model.max_seq_len`.
        initialize_from_hf: a Hugging Face checkpoint to begin from; true for the model's reference checkpoint.
        use_hf_model_config: whether that checkpoint's architecture replaces `model`.
        hf_checkpoint: both in one key: a Hugging Face checkpoint to begin from, with its architecture and tokenizer.
        initialize_from_checkpoint_path: one of our checkpoints to begin from: parameters and optimizer state.
        initialize_model_from_checkpoint_path: one of our checkpoints to begin from: parameters only.
        z_loss_weight: weight of the squared log-normalizer in the loss.
        data_seed: seed of the data's order; default `trainer.seed`.
        epoch: passes over the data; 0 for as many as the steps take.
        hf_save_path, hf_save_steps, hf_save_dtype, hf_generation_eos_token_ids: the Hugging Face export, in folders
            `<hf_save_path>/<run id>/step-<N>`; N counts finished steps (upstream: from 0, one less).
        adapter, peft_save_path, peft_hf_upload, merged_hf_save_path, merged_hf_upload: low-rank adapters.
        eval_harness, eval_harness_steps, labeled_eval: what is evaluated during training.
        plan: assumptions for planning that a run would find out by itself.
    """

    data: LmDataConfig = field(default_factory=LmDataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: LmConfig = field(default_factory=LlamaConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train_seq_len: PositiveInt | None = None
    initialize_from_hf: bool | str = False
    use_hf_model_config: bool = False
    hf_checkpoint: PathText | None = None
    initialize_from_checkpoint_path: PathText | None = None
    initialize_model_from_checkpoint_path: PathText | None = None
    z_loss_weight: NonNegativeFloat = 0.0
    data_seed: Seed | None = None
    epoch: Count = 0
    hf_save_path: PathText | None = None
    hf_save_steps: PositiveInt = 10_000
    hf_save_dtype: str | None = None
    hf_generation_eos_token_ids: list[Count] | None = None
    adapter: dict[str, Any] | None = None
    peft_save_path: PathText | None = None
    peft_hf_upload: str | None = None
    merged_hf_save_path: PathText | None = None
    merged_hf_upload: str | None = None
    eval_harness: dict[str, Any] | None = None
    eval_harness_steps: PositiveInt = 10_000
    labeled_eval: dict[str, Any] | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        begins = {
            "hf_checkpoint": self.hf_checkpoint,
            "initialize_from_hf": self.initialize_from_hf,
            "initialize_from_checkpoint_path": self.initialize_from_checkpoint_path,
            "initialize_model_from_checkpoint_path": self.initialize_model_from_checkpoint_path,
            "trainer.initialize_from": self.trainer.initialize_from,
        }
        given = [name for name, value in begins.items() if value]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)}: a run begins from one of them only; keep one")
        if self.use_hf_model_config and not (self.initialize_from_hf or self.hf_checkpoint):
            problems.append("use_hf_model_config: needs initialize_from_hf, which names the checkpoint")
        if self.initialize_from_hf is True and self.model.reference_checkpoint is None:
            problems.append(
                "initialize_from_hf: true means model.reference_checkpoint, which is null; name a checkpoint"
            )
        if self.train_seq_len is not None and self.train_seq_len < 2:
            problems.append(f"train_seq_len must be at least 2 (a token and the next), got {self.train_seq_len}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def reference(self) -> str | None:
        """The Hugging Face checkpoint that the run begins from."""
        named = self.hf_checkpoint or self.initialize_from_hf
        return self.model.reference_checkpoint if named is True else named or None

    @property
    def begun_from_checkpoint(self) -> str | None:
        """Our own checkpoint whose parameters the run begins with, at step 0."""
        return self.initialize_model_from_checkpoint_path or self.initialize_from_checkpoint_path

    @property
    def takes_architecture(self) -> bool:
        """Whether the checkpoint's architecture replaces `model`."""
        return self.use_hf_model_config or self.hf_checkpoint is not None

    @property
    def positions(self) -> int:
        """Tokens per row."""
        return self.train_seq_len or self.model.max_seq_len
