"""Configurations of entry points that are not implemented yet: upstream's keys, so that documents can be read.

`entry_points` maps entry points to these classes, and `refusal` refuses to run them. The keys are those of both
upstream generations, after the translation of old spellings.
"""

from dataclasses import dataclass, field
from typing import Any

from levanter.models import LlamaConfig, LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class ExportHfToLmConfig:
    """Conversion of a Hugging Face checkpoint to our format."""

    hf_checkpoint: str
    output_path: str
    model: LmConfig = field(default_factory=LlamaConfig)
    use_hf_model_config: bool = True
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    dtype: str | None = "bfloat16"
    resize_vocab_to_match_tokenizer: bool = False
    subpath: str | None = None
    emit_padded_tokenizer: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainAsrConfig:
    """Training of a speech recognition model."""

    data: dict[str, Any] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: LmConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    batch_size: int = 16
    train_seq_len: int = 448
    initialize_from_hf: bool | str = False
    use_hf_model_config: bool = False
    data_seed: int | None = None
    hf_save_path: str | None = None
    hf_upload: bool | str | None = None
    hf_save_steps: int = 10_000
