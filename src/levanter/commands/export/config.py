"""The configuration of `export_lm_to_hf`."""

from dataclasses import dataclass, field
from typing import Any

from levanter.commands.model.config import ModelKeys
from levanter.compat.hf.index import MAX_SHARD_BYTES
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import Count, ManyInt, PathText, PositiveInt
from levanter.trainer.config import TrainerConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ConvertLmConfig(ModelKeys):
    """Export a checkpoint as a Hugging Face folder.

    Attributes:
        hf_checkpoint: instead of `checkpoint_path`: Hugging Face files into which an adapter is merged.
        adapter_path: the adapter to merge, in the format of peft or `peft_save_path`: a folder, a hub id, or a URL.
        output_dir: the folder or URL to write; it must not exist unless `overwrite` is set.
        overwrite: whether an existing folder is replaced: on a disk atomically, once the new one is complete; at a URL,
            file by file.
        dtype: dtype of the weights; default the checkpoint's.
        int8: whether projections are written as 8-bit integers with a scale per output channel (compressed-tensors,
            W8A16); `dtype` applies to the other weights.
        max_shard_bytes: largest size of a weights file, in bytes.
        save_tokenizer: whether the tokenizer is written too.
        tokenizer: the tokenizer to export; default that of the checkpoint's training data.
        generation_eos_token_ids: token ids that end generated text; default the tokenizer's own.
        override_vocab_size: number of vocabulary rows to export, to drop the last ones.
        config_overrides: keys of config.json that override ours.
        model: the architecture; must agree with the checkpoint's.
        trainer: accepted for compatibility; no device is used.
        upload_to_hf: not supported yet.
        use_cpu: accepted for compatibility; no device is used.
        plan: assumptions for planning: values that a run determines from its data.
    """

    output_dir: PathText
    overwrite: bool = False
    dtype: str | None = None
    int8: bool = False
    max_shard_bytes: ManyInt = MAX_SHARD_BYTES
    save_tokenizer: bool = True
    tokenizer: PathText | None = None
    generation_eos_token_ids: list[Count] | None = None
    override_vocab_size: PositiveInt | None = None
    config_overrides: dict[str, Any] | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    upload_to_hf: bool | str | None = None
    use_cpu: bool = False
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.checkpoint_path is None and self.hf_checkpoint is None:
            problems.append("checkpoint_path: missing; or hf_checkpoint and adapter_path, to merge an adapter")
        if self.checkpoint_path is not None and self.hf_checkpoint is not None:
            problems.append("checkpoint_path and hf_checkpoint: one of them is exported; keep one")
        # An adapter needs a base and vice versa; our own checkpoint of adapters has both.
        if (self.hf_checkpoint is None) != (self.adapter_path is None):
            absent = "hf_checkpoint, which it is of" if self.hf_checkpoint is None else "adapter_path, to merge into it"
            key = "adapter_path" if self.hf_checkpoint is None else "hf_checkpoint"
            problems.append(f"{key}: needs {absent}")
        if self.int8 and self.adapter_path is not None:
            problems.append(
                "int8: not implemented for merged adapters; export again from the merged folder's checkpoint"
            )
        if self.override_vocab_size is not None and self.adapter_path is not None:
            problems.append("override_vocab_size: not implemented for merged adapters; leave it out")
        if self.upload_to_hf:
            problems.append("upload_to_hf: not supported yet; upload output_dir afterwards")
        if self.dtype is not None and self.dtype not in DTYPES:
            problems.append(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.tokenizer is not None and not self.save_tokenizer:
            problems.append("tokenizer: not written with save_tokenizer: false; remove one of the two")
        if problems:
            raise ValueError("\n".join(problems))
