"""Trains adapters of a Hugging Face checkpoint on preferences, by upstream's keys.

    python -m levanter.main.lora_dpo --config_path my_lora_dpo.yaml

The run is that of `train_dpo` with `adapter: {type: lora, …}` and `reference: {type: adapter_base}`.
"""

from levanter.commands.cli.runner import run_config
from levanter.commands.train.describe import training_entry_point
from levanter.commands.train.dpo.lora_config import LoraDpoConfig
from levanter.commands.train.dpo.run import PreferenceTask
from levanter.config import ExplicitKeys

NAME = "lora_dpo"
ENTRY_POINT = training_entry_point(NAME, LoraDpoConfig, lambda config: PreferenceTask(config=config.training))
describe = ENTRY_POINT.describe


def main(config: LoraDpoConfig, *, written: ExplicitKeys | None = None) -> int:
    """Trains; returns 75 if a signal stopped the run before its end and its state was saved."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
