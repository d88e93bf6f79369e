"""The training loop's room; its configuration serves every entry point."""

from levanter.processes.distributed import DistributedConfig
from levanter.trainer.config import TrainerConfig
from levanter.trainer.parts import (
    BatchSizeStage,
    CheckpointDebugConfig,
    CheckpointerConfig,
    CheckpointInterval,
    EmaDecaySqrtConfig,
    EmaModelAveragingConfig,
    ModelAveragingConfig,
    ProfileOptionsConfig,
    ProfilerConfig,
    WatchConfig,
)

__all__ = [
    "BatchSizeStage",
    "CheckpointDebugConfig",
    "CheckpointInterval",
    "CheckpointerConfig",
    "DistributedConfig",
    "EmaDecaySqrtConfig",
    "EmaModelAveragingConfig",
    "ModelAveragingConfig",
    "ProfileOptionsConfig",
    "ProfilerConfig",
    "TrainerConfig",
    "WatchConfig",
]
