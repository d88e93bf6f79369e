"""The configuration of `export_lm_to_hf`."""

from dataclasses import dataclass, field
from typing import Any

from levanter.compat.hf.limits import MAX_SHARD_BYTES
from levanter.config.plan_options import PlanOptions
from levanter.config.ranges import Count, ManyInt, PathText, PositiveInt, Ranged
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ConvertLmConfig(Ranged):
    """What `export_lm_to_hf` exports, and where to.

    Attributes:
        checkpoint_path: a checkpoint of `train_lm`, or the folder of a run, for its newest.
        output_dir: the folder or URL that is written; it must not exist.
        overwrite: whether an existing folder is replaced: on a disk, once the new one is whole; behind a URL, file by
            file.
        dtype: of the weights; default as in the checkpoint.
        max_shard_bytes: of one file of weights.
        save_tokenizer: whether the tokenizer is laid beside the weights.
        tokenizer: another one than the checkpoint's training data had.
        generation_eos_token_ids: ids that end a generated text; default the tokenizer's own.
        override_vocab_size: ids that there are, where the model's last ones are not wanted.
        config_overrides: keys of config.json that replace ours.
        model: the architecture; the checkpoint says it, and it must agree.
        trainer: taken for compatibility; no device is used.
        upload_to_hf: not supported yet.
        use_cpu: taken for compatibility; no device is used.
        plan: what planning is told that a run would find out by itself.
    """

    checkpoint_path: PathText
    output_dir: PathText
    overwrite: bool = False
    dtype: str | None = None
    max_shard_bytes: ManyInt = MAX_SHARD_BYTES
    save_tokenizer: bool = True
    tokenizer: PathText | None = None
    generation_eos_token_ids: list[Count] | None = None
    override_vocab_size: PositiveInt | None = None
    config_overrides: dict[str, Any] | None = None
    model: LmConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    upload_to_hf: bool | str | None = None
    use_cpu: bool = False
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.upload_to_hf:
            problems.append("upload_to_hf: not supported yet; upload output_dir afterwards")
        if self.dtype is not None and self.dtype not in DTYPES:
            problems.append(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.tokenizer is not None and not self.save_tokenizer:
            problems.append("tokenizer: is not written with save_tokenizer: false; leave one of them out")
        if problems:
            raise ValueError("\n".join(problems))
