"""The configuration of `train_lm`."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from levanter.commands.model.live_config import TrainingGenerationConfig
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import Count, NonNegativeFloat, PathText, PositiveInt, Ranged, Seed
from levanter.data.config import LmDataConfig
from levanter.eval.harness.config import HarnessConfig
from levanter.models.adapters.config import AdapterConfig, LoraConfig
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer.config import TrainerConfig

C = TypeVar("C", bound=Ranged)


@dataclass(frozen=True, kw_only=True)
class TrainLmConfig(Ranged):
    """Train a language model.

    Attributes:
        data: the data sets and their weights.
        trainer: devices, mesh, batch, precision, trackers, checkpoints.
        model: the architecture.
        optimizer: optimizer and learning rate.
        train_seq_len: tokens per row; default `model.max_seq_len`.
        initialize_from_hf: a Hugging Face checkpoint to initialize from; true for the model's reference checkpoint.
        use_hf_model_config: whether the architecture of that checkpoint replaces `model`.
        hf_checkpoint: a Hugging Face checkpoint to initialize from, with its architecture and tokenizer; replaces the
            two keys above.
        initialize_from_checkpoint_path: a checkpoint of `train_lm` to initialize from: parameters and optimizer state.
        initialize_model_from_checkpoint_path: a checkpoint of `train_lm` to initialize from: parameters only.
        z_loss_weight: weight of the squared log-normalizer in the loss.
        data_seed: seed of the data order; default `trainer.seed`.
        epoch: passes over the data; 0 for as many as `num_train_steps` needs.
        hf_save_path, hf_save_steps, hf_save_dtype, hf_generation_eos_token_ids: the Hugging Face export, in folders
            `<hf_save_path>/<run id>/step-<N>`; N counts finished steps (upstream: from 0, one less).
        reinit_tokens: tokens whose rows of the embedding table and of the output head are reinitialized if the run
            starts from a Hugging Face checkpoint: drawn with the mean and standard deviation of all rows. False for
            none.
        reinit_embeddings, reinit_lm_head: whether the rows of the embedding table, and of the output head, are
            reinitialized.
        adapter: the adapters that are trained instead of the model's own weights: `{type: lora, …}`, or none.
        peft_save_path: the export of the adapters in peft's format, in folders `<peft_save_path>/<run id>/step-<N>`,
            every `hf_save_steps`.
        merged_hf_save_path: the export of the whole model with the adapters merged into the Hugging Face checkpoint
            that the run starts from, in the same kind of folders; `hf_save_dtype` applies to it too.
        peft_hf_upload, merged_hf_upload: not supported yet.
        eval_harness: lm-evaluation-harness tasks that are evaluated during training; no task for none.
        eval_harness_steps: steps between two evaluations on `eval_harness`; the last step is evaluated too.
        labeled_eval: not supported yet.
        sample_prompts: texts that the current parameters continue between steps; null for none.
        sample_every: steps between two lists of samples; the last step has samples too.
        generation: the engine that generates text between steps, for `sample_prompts` and for tasks of `eval_harness`.
        plan: assumptions for planning: values that a run determines from its data.
    """

    data: LmDataConfig = field(default_factory=LmDataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: LmConfig = field(default_factory=LlamaConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train_seq_len: PositiveInt | None = None
    initialize_from_hf: bool | str = False
    use_hf_model_config: bool = False
    hf_checkpoint: PathText | None = None
    initialize_from_checkpoint_path: PathText | None = None
    initialize_model_from_checkpoint_path: PathText | None = None
    z_loss_weight: NonNegativeFloat = 0.0
    data_seed: Seed | None = None
    epoch: Count = 0
    hf_save_path: PathText | None = None
    hf_save_steps: PositiveInt = 10_000
    hf_save_dtype: str | None = None
    hf_generation_eos_token_ids: list[Count] | None = None
    reinit_tokens: bool | list[str] = False
    reinit_embeddings: bool = True
    reinit_lm_head: bool = True
    adapter: AdapterConfig | None = None
    peft_save_path: PathText | None = None
    peft_hf_upload: str | None = None
    merged_hf_save_path: PathText | None = None
    merged_hf_upload: str | None = None
    eval_harness: HarnessConfig | None = None
    eval_harness_steps: PositiveInt = 10_000
    labeled_eval: dict[str, Any] | None = None
    sample_prompts: list[str] | None = None
    sample_every: PositiveInt | None = None
    generation: TrainingGenerationConfig = field(default_factory=TrainingGenerationConfig)
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        # Each of these gives the parameters of step 0, so at most one may be set.
        origins = {
            "hf_checkpoint": self.hf_checkpoint,
            "initialize_from_hf": self.initialize_from_hf,
            "initialize_from_checkpoint_path": self.initialize_from_checkpoint_path,
            "initialize_model_from_checkpoint_path": self.initialize_model_from_checkpoint_path,
            "trainer.initialize_from": self.trainer.initialize_from,
        }
        keys = [name for name, value in origins.items() if value]
        if len(keys) > 1:
            problems.append(f"{' and '.join(keys)}: a run begins from one of them only; keep one")
        if self.use_hf_model_config and not (self.initialize_from_hf or self.hf_checkpoint):
            problems.append("use_hf_model_config: needs initialize_from_hf, which names the checkpoint")
        if self.initialize_from_hf is True and self.model.reference_checkpoint is None:
            problems.append(
                "initialize_from_hf: true means model.reference_checkpoint, which is null; name a checkpoint"
            )
        problems += self._token_problems()
        problems += self._sample_problems()
        problems += self._adapter_problems()
        # The targets of a row are its tokens shifted by one: one token alone has no target.
        if self.train_seq_len is not None and self.train_seq_len < 2:
            problems.append(f"train_seq_len must be at least 2 (a token and the next), got {self.train_seq_len}")
        if problems:
            raise ValueError("\n".join(problems))

    def _sample_problems(self) -> list[str]:
        """Samples need prompts and an interval."""
        # `generation:` alone is no error: tasks of the harness may use it.
        if self.sample_prompts is None:
            return ["sample_every: there are no sample_prompts to sample"] if self.sample_every is not None else []
        problems: list[str] = []
        if not self.sample_prompts:
            problems.append("sample_prompts: an empty list; give at least one prompt, or leave it out")
        if self.sample_every is None:
            problems.append("sample_every: not set, and there are sample_prompts; give the steps between two samples")
        return problems

    def _token_problems(self) -> list[str]:
        """Problems of `reinit_tokens` with other keys."""
        if not self.reinit_tokens:
            return []
        if self.reinit_tokens is True:
            return ["reinit_tokens: true meant the tokens of one model's tokenizer; list the tokens to reinitialize"]
        problems = []
        if not self.pretrained:
            problems.append(
                "reinit_tokens: reinitializes rows of a checkpoint, and the run begins from no Hugging Face checkpoint "
                "(hf_checkpoint, initialize_from_hf)"
            )
        if self.lora is not None and self.lora.initialize_from is not None:
            problems.append(
                "reinit_tokens and adapter.initialize_from: the stored adapters contain these rows already; keep one"
            )
        return problems

    def _adapter_problems(self) -> list[str]:
        """Keys that contradict `adapter:`, or its absence."""
        if self.lora is None:
            needs = "saves adapters, and the run trains none; add adapter: {type: lora}"
            paths = {"peft_save_path": self.peft_save_path, "merged_hf_save_path": self.merged_hf_save_path}
            return [f"{key}: {needs}" for key, path in paths.items() if path is not None]
        problems = []
        # Parameters of the model and adapters are never trained together; the adapter freezes all of the model's own.
        if self.trainer.trainable is not None:
            problems.append("trainer.trainable: the run trains an adapter; remove one of the two keys")
        if self.hf_save_path is not None:
            problems.append("hf_save_path: exports a whole model, and the run trains an adapter; use peft_save_path")
        if self.initialize_from_checkpoint_path is not None:
            problems.append(
                "initialize_from_checkpoint_path: its optimizer state is of other parameters than the adapter's; use "
                "initialize_model_from_checkpoint_path"
            )
        if self.peft_save_path is not None and self.peft_save_path == self.merged_hf_save_path:
            problems.append("peft_save_path and merged_hf_save_path: they must be different folders")
        # The merged export rewrites the checkpoint's own files, so there must be such files.
        if self.merged_hf_save_path is not None and self.pretrained is None:
            problems.append(
                "merged_hf_save_path: adapters are merged into the files of a Hugging Face checkpoint, and the run "
                "begins from none (hf_checkpoint, initialize_from_hf); use peft_save_path"
            )
        if self.trainer.allow_partial_checkpoint:
            problems.append("trainer.allow_partial_checkpoint: is not implemented for adapters; leave it out")
        return problems

    @property
    def without_adapter(self) -> "TrainLmConfig":
        """The same run without adapters: the model's own weights are trained.

        Raises:
            ValueError: the run trains no adapters.
        """
        if self.lora is None:
            raise ValueError("adapter: not set, so the run trains the model's own weights already")
        return replace(self, adapter=None, peft_save_path=None, merged_hf_save_path=None)

    @property
    def exports(self) -> str | None:
        """The folder of the exports: whole models, adapters, or merged models."""
        # `peft_save_path` comes first where both folders are set; `merged` then gives the second one.
        return self.hf_save_path if self.lora is None else self.peft_save_path or self.merged_hf_save_path

    @property
    def merged(self) -> str | None:
        """The folder of merged models, if adapters have another one."""
        return self.merged_hf_save_path if self.peft_save_path is not None else None

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters that are trained; None if the model's own weights are trained."""
        return self.adapter if isinstance(self.adapter, LoraConfig) else None

    @property
    def pretrained(self) -> str | None:
        """The Hugging Face checkpoint that the run begins from."""
        # `true` stands for the reference checkpoint of the model's family.
        named = self.hf_checkpoint or self.initialize_from_hf
        return self.model.reference_checkpoint if named is True else named or None

    @property
    def begun_from_checkpoint(self) -> str | None:
        """Our own checkpoint whose parameters the run begins with, at step 0."""
        return self.initialize_model_from_checkpoint_path or self.initialize_from_checkpoint_path

    @property
    def takes_architecture(self) -> bool:
        """Whether the checkpoint's architecture replaces `model`."""
        return self.use_hf_model_config or self.hf_checkpoint is not None

    @property
    def positions(self) -> int:
        """Tokens per row."""
        return self.train_seq_len or self.model.max_seq_len


def translate(config: object, to: type[C], **changes: object) -> C:
    """A configuration of another class: fields of the same name keep their values, and others have their defaults.

    Args:
        config: what is translated, a dataclass.
        to: the other class.
        changes: fields whose values are not those of `config`.
    """
    shared = {field.name for field in fields(to)} - changes.keys()
    return to(**{name: getattr(config, name) for name in shared if hasattr(config, name)}, **changes)
