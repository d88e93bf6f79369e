"""Training: state, objectives, step and loop. The configuration `TrainerConfig` serves every entry point."""

from levanter.distributed.initialize import DistributedConfig
from levanter.trainer.config import TrainerConfig
from levanter.trainer.config_blocks import (
    BatchSizeStage,
    CheckpointDebugConfig,
    CheckpointerConfig,
    CheckpointInterval,
    EmaDecaySqrtConfig,
    EmaModelAveragingConfig,
    ModelAveragingConfig,
    ProfileOptionsConfig,
    ProfilerConfig,
    ProgressWatchdogConfig,
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
    "ProgressWatchdogConfig",
    "TrainerConfig",
    "WatchConfig",
]
