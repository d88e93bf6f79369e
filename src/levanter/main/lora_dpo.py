"""Trains adapters of a pretrained language model on preferences."""

from typing import TYPE_CHECKING

from haliax_ext.on_demand import export_on_demand
from levanter.commands.shell.door import enter, leave

if TYPE_CHECKING:
    from levanter.commands.train.lora_dpo import ENTRY_POINT, describe, main
    from levanter.commands.train.lora_dpo_config import LoraDpoConfig

__all__ = ["ENTRY_POINT", "LoraDpoConfig", "describe", "main"]
export_on_demand(__name__)

if __name__ == "__main__":
    leave(enter("lora_dpo"))
