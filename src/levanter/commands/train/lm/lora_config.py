"""The configuration of `lora_lm`: upstream's keys for what `train_lm` does with `adapter: {type: lora}`."""

from dataclasses import dataclass, field

from levanter.commands.model.live_config import TrainingGenerationConfig
from levanter.commands.train.config import TrainLmConfig, translate
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveInt, Ranged
from levanter.data.config import LmDataConfig
from levanter.models.adapters.config import LoraConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class LoraLmConfig(Ranged):
    """Train low-rank adapters of a pretrained model.

    Attributes:
        initialize_from_hf: the Hugging Face checkpoint that is adapted; its architecture is used.
        lora: the adapters.
        data: the data sets and their weights.
        trainer: devices, mesh, batch, precision, trackers, checkpoints.
        optimizer: optimizer and learning rate.
        train_seq_len: tokens per row.
        peft_save_path, merged_hf_save_path, hf_save_steps: the exports of the adapters in peft's format and of the
            whole model with the adapters merged, and the steps between two exports.
        peft_hf_upload, merged_hf_upload: not supported yet.
        model: runtime settings of the model (`gradient_checkpointing`, …); its architecture is the checkpoint's. A
            complete block allows planning without access to the checkpoint.
        sample_prompts: texts that the current parameters continue between steps; null for none.
        sample_every: steps between two lists of samples; the last step has samples too.
        generation: the engine that generates them.
        trust_remote_code: accepted for compatibility; no code of a checkpoint is executed.
        plan: assumptions for planning: values that a run determines from its data.
    """

    initialize_from_hf: PathText
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: LmDataConfig = field(default_factory=LmDataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train_seq_len: PositiveInt = 4096
    peft_save_path: PathText | None = None
    peft_hf_upload: str | None = None
    merged_hf_save_path: PathText | None = None
    merged_hf_upload: str | None = None
    hf_save_steps: PositiveInt = 1000
    model: LmConfig = field(default_factory=LlamaConfig)
    trust_remote_code: bool = False
    sample_prompts: list[str] | None = None
    sample_every: PositiveInt | None = None
    generation: TrainingGenerationConfig = field(default_factory=TrainingGenerationConfig)
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Builds the translated config now, so that keys that contradict each other are refused with the config, not
        # later.
        _ = self.training

    @property
    def training(self) -> TrainLmConfig:
        """The run of `train_lm` that this is."""
        # The architecture is always the checkpoint's; `model` only adds runtime settings.
        return translate(self, TrainLmConfig, use_hf_model_config=True, adapter=self.lora)
