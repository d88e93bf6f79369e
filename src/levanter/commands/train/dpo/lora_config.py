"""The configuration of `lora_dpo`: upstream's keys for what `train_dpo` does with adapters and their base."""

from dataclasses import dataclass, field
from typing import ClassVar

from levanter.commands.train.config import translate
from levanter.commands.train.dpo.config import (
    AdapterBaseReferenceConfig,
    ReferenceEvalCacheConfig,
    TrainDpoConfig,
)
from levanter.config.plan_options import PlanOptions
from levanter.config.upstream.preferences import LORA_DPO
from levanter.config.validators import Decay, PathText, PositiveFloat, PositiveInt, Ranged, Seed
from levanter.data.config import LmDataConfig
from levanter.models.adapters.config import LoraConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class LoraDpoConfig(Ranged):
    """Train low-rank adapters of a pretrained model on preference pairs.

    Attributes:
        initialize_from_hf: the Hugging Face checkpoint that is adapted and is the reference model; its architecture is
            used.
        lora: the adapters.
        data: the pairs.
        trainer: devices, mesh, batch, precision, trackers, checkpoints.
        optimizer: optimizer and learning rate.
        beta: weight β of the log-probability difference between policy and base model.
        train_seq_len: tokens per sequence; default the checkpoint's.
        use_hf_model_config: accepted for compatibility; the checkpoint's architecture is always used.
        trust_remote_code: accepted for compatibility; no code of a checkpoint is executed.
        validation_split_fraction: fraction of each training set (its last pairs) that is used for validation.
        reference_eval_cache: whether the base model's log-probabilities of validation pairs are stored.
        peft_save_path, merged_hf_save_path, hf_save_steps: the exports of the adapters in peft's format and of the
            whole model with the adapters merged, and the steps between two exports.
        peft_hf_upload, merged_hf_upload: not supported yet.
        model: runtime settings of the model (`gradient_checkpointing`, …); its architecture is the checkpoint's. A
            complete block allows planning without access to the checkpoint.
        data_seed: seed of the data order; default `trainer.seed`.
        plan: assumptions for planning: values that a run determines from its data.
    """

    EARLIER: ClassVar[str] = LORA_DPO

    initialize_from_hf: PathText
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: LmDataConfig = field(default_factory=LmDataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    beta: PositiveFloat = 0.1
    train_seq_len: PositiveInt | None = None
    use_hf_model_config: bool = False
    trust_remote_code: bool = False
    validation_split_fraction: Decay | None = 0.1
    reference_eval_cache: ReferenceEvalCacheConfig = field(default_factory=ReferenceEvalCacheConfig)
    peft_save_path: PathText | None = None
    peft_hf_upload: bool | str | None = None
    merged_hf_save_path: PathText | None = None
    merged_hf_upload: str | None = None
    hf_save_steps: PositiveInt | None = 10_000
    model: LmConfig = field(default_factory=LlamaConfig)
    data_seed: Seed | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Builds the translated config now, so that keys that contradict each other are refused with the config, not
        # later.
        _ = self.training

    @property
    def training(self) -> TrainDpoConfig:
        """The run of `train_dpo` that this is."""
        # Upstream's command always compares with the base.
        reference = AdapterBaseReferenceConfig()
        return translate(self, TrainDpoConfig, use_hf_model_config=True, adapter=self.lora, reference=reference)
