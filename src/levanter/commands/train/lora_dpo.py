"""Trains adapters of a Hugging Face checkpoint on preferences, by upstream's keys.

    python -m levanter.main.lora_dpo --config_path my_lora_dpo.yaml

The run is that of `train_dpo` with `adapter: {type: lora, …}` and `reference: {type: adapter_base}`.
"""

from levanter.commands.shell.perform import perform
from levanter.commands.train.by_other_keys import by_other_keys
from levanter.commands.train.lora_dpo_config import LoraDpoConfig
from levanter.config import Written

NAME = "lora_dpo"
ENTRY_POINT = by_other_keys(NAME, LoraDpoConfig, lambda config: config.training)
describe = ENTRY_POINT.describe


def main(config: LoraDpoConfig, *, written: Written | None = None) -> int:
    """Trains; returns 75 if the run was told to stop before its end and saved itself."""
    return perform(ENTRY_POINT, config, written=written).exit_code
