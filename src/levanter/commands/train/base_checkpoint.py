"""The Hugging Face checkpoint that a training run begins from, and what the run takes from it besides weights."""

from dataclasses import replace

from levanter.commands.model.quantization import QuantizationError
from levanter.commands.model.source import ModelBlock, ModelSource, resolve_source
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.context_extension import reach_checks, stage_of
from levanter.config import ExplicitKeys
from levanter.runplan import Check


def beginning(config: TrainLmConfig, written: ExplicitKeys) -> ModelSource | None:
    """The checkpoint, as far as it is reachable; None if weights are initialized."""
    if config.pretrained is None:
        return None
    replaces = config.takes_architecture
    block = ModelBlock.of(config.model, written)
    if (stage := stage_of(config, written)) is not None:
        origin = stage.origin(config.pretrained)
    else:
        origin = resolve_source(config.pretrained, block, block_is_whole=not replaces, block_yields=replaces)
        origin = replace(origin, checks=(*origin.checks, *reach_checks(origin, config)))
    # Adapters leave the weights as they are.
    return origin if config.lora is not None else replace(origin, checks=(*origin.checks, *_integers(origin)))


def _integers(origin: ModelSource) -> list[Check]:
    """Refuses weights that are integers."""
    if not origin.has_int8:
        return []
    error = QuantizationError(
        f"{origin.reference}: its weights are 8-bit integers, which take no updates; train adapters of it "
        "(adapter: {type: lora}), or begin from the checkpoint before it was quantized"
    )
    return [Check(name="weights", status="error", message=str(error), error=error)]


def completed(config: TrainLmConfig, origin: ModelSource | None, written: ExplicitKeys) -> TrainLmConfig:
    """`config` with what it leaves to its checkpoint: the length of rows, and the tokenizer."""
    if origin is None or not config.takes_architecture:
        return config
    if config.train_seq_len is None:
        config = replace(config, train_seq_len=origin.architecture.max_seq_len)
    if config.hf_checkpoint is not None and "data.tokenizer" not in written:
        config = replace(config, data=replace(config.data, tokenizer=config.hf_checkpoint))
    return config
