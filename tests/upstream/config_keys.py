"""Collects the keys of a version of upstream's configurations, for the environment that has it installed:

    UPSTREAM_PYTHON tests/upstream/config_keys.py tests/golden/legacy/upstream_0_2_227.json

The keys are those of its dataclasses: of entry points, of the blocks of `train_lm`, and of everything that is chosen by
`type:`. `tests/levanter/config/test_legacy_keys.py` reads each of them here. It runs where this project is not
installed, so it imports nothing of it.
"""

import dataclasses
import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ENTRY_POINTS = {
    "train_lm": "TrainLmConfig",
    "eval_lm": "EvalLmConfig",
    "lora_lm": "LoraLmConfig",
    "export_lm_to_hf": "ConvertLmConfig",
    "export_hf_to_lm": "ImportHfConfig",
    "sample_lm": "SampleLmConfig",
    "viz_logprobs": "VizLmConfig",
    "train_asr": "TrainASRConfig",
    "train_dpo": "TrainDpoConfig",
    "lora_dpo": "LoraDpoConfig",
    "perplexity_gap": "GapFinderConfig",
}
BLOCKS = {
    "train_lm.trainer": ("levanter.trainer", "TrainerConfig"),
    "train_lm.trainer.checkpointer": ("levanter.checkpoint", "CheckpointerConfig"),
    "train_lm.trainer.profiler": ("levanter.callbacks.profiler", "ProfilerConfig"),
    "train_lm.trainer.progress_watchdog": ("levanter.callbacks.progress_watchdog", "ProgressWatchdogConfig"),
    "train_lm.trainer.watch": ("levanter.callbacks.watch", "WatchConfig"),
    "train_lm.trainer.distributed": ("levanter.distributed", "DistributedConfig"),
    "train_lm.trainer.mesh": ("levanter.utils.mesh", "MeshConfig"),
    "train_lm.data": ("levanter.data.text.datasets", "LmDataConfig"),
    "lora_lm.lora": ("levanter.adaptor", "LoraConfig"),
    "sample_lm.engine": ("levanter.inference.engine", "InferenceEngineConfig"),
    "eval_harness": ("levanter.eval_harness", "EvalHarnessMainConfig"),
    "eval_harness.eval_harness": ("levanter.eval_harness", "LmEvalHarnessConfig"),
    "perplexity_gap.model_a": ("levanter.main.perplexity_gap", "GapFinderModelConfig"),
}
CHOICES = {
    "models": ("levanter.models.lm_model", "LmConfig"),
    "optimizers": ("levanter.optim.config", "OptimizerConfig"),
    "trackers": ("levanter.tracker.tracker", "TrackerConfig"),
    "formats": ("levanter.data.text.formats", "LmDatasetFormatBase"),
    "sources": ("levanter.data.text.datasets", "LmDatasetSourceConfigBase"),
    "components": ("levanter.data.text.datasets", "DatasetComponentBase"),
}
# Modules that register choices and that nothing above imports.
REGISTER = ("levanter.tracker.telemetry", "levanter.models.modernbert", "levanter.models.snowball")


def keys(module: str, name: str) -> list[str]:
    """The keys of one dataclass."""
    return [field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))]


def main() -> None:
    """Writes the keys to the file that the command line names."""
    for module in REGISTER:
        importlib.import_module(module)
    found: dict[str, Any] = {"source": f"marin-levanter {metadata.version('marin-levanter')}, its own classes"}
    found["entry_points"] = {name: keys(f"levanter.main.{name}", cls) for name, cls in ENTRY_POINTS.items()}
    found["entry_points"] |= {path: keys(*at) for path, at in BLOCKS.items()}
    for kind, (module, name) in CHOICES.items():
        choices = getattr(importlib.import_module(module), name).get_known_choices()
        found[kind] = {
            choice: [field.name for field in dataclasses.fields(cls)] for choice, cls in sorted(choices.items())
        }
    # One mapping a line: the file is read as a diff.
    blocks = []
    for kind, value in found.items():
        rows = value.items() if isinstance(value, dict) else ()
        lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(listed)}" for name, listed in rows)
        blocks.append(f"{json.dumps(kind)}: " + (f"{{\n{lines}\n}}" if rows else json.dumps(value)))
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
