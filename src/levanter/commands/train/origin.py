"""The Hugging Face checkpoint that a training run begins from, and what the run takes from it beside the weights."""

from dataclasses import replace
from typing import TYPE_CHECKING

from levanter.commands.model.origin import Origin, find_origin
from levanter.config import written

if TYPE_CHECKING:
    from levanter.commands.train.train_lm import TrainLmConfig


def beginning(config: "TrainLmConfig") -> Origin | None:
    """The checkpoint, as far as it can be reached; None where weights are made."""
    if config.reference is None:
        return None
    replaces = config.takes_architecture
    return find_origin(config.reference, config.model, block_is_whole=not replaces, block_yields=replaces)


def completed(config: "TrainLmConfig", origin: Origin | None) -> "TrainLmConfig":
    """`config` with what it leaves to its checkpoint: the length of rows, and the tokenizer."""
    if origin is None or not config.takes_architecture:
        return config
    if config.train_seq_len is None:
        config = replace(config, train_seq_len=origin.architecture.max_seq_len)
    if config.hf_checkpoint is not None and "tokenizer" not in written(config.data):
        config = replace(config, data=replace(config.data, tokenizer=config.hf_checkpoint))
    return config
