"""The configuration of `serve`."""

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.model.representation import Quantize, TiedHead
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveFloat, PositiveInt, Range, Ranged
from levanter.inference.config import Auto, InferenceConfig
from levanter.inference.requests import SamplingParams
from levanter.models.registry import LmConfig
from levanter.serving.limits import LimitsConfig
from levanter.trainer.config import TrainerConfig

Port: TypeAlias = Annotated[int, Range(0, 65_535)]


@dataclass(frozen=True, kw_only=True)
class ServerInferenceConfig(InferenceConfig):
    """`inference` of a server, which takes as many rows as there is room for whatever else is said of them.

    Attributes:
        max_rows: rows that run at once, over all devices; a multiple of the batch's shards. `auto` takes as many as the
            plan finds room for, 256 at most, and on CPUs 32.
    """

    max_rows: PositiveInt | Auto = "auto"


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Ranged):
    """Which model is served, where, and to whom.

    Attributes:
        hf_checkpoint: Hugging Face files: a folder, a hub id (`org/name@revision`), a URL, or a .gguf file.
        checkpoint_path: a checkpoint of our own training runs, or a run's folder for its newest one.
        tokenizer: another tokenizer than the checkpoint's own.
        model: the architecture, if the checkpoint does not give it; checked against the checkpoint if it does.
        trainer: devices, mesh, precision, trackers.
        inference: rows and their cache.
        sampling: how tokens are chosen where a request does not say.
        chat_template: makes a text of a conversation, instead of the tokenizer's own: Jinja, or a file that has it.
        enforce_bos: whether a prompt that is a text begins with BOS, where the tokenizer has one.
        host: the address that is listened on; one that other machines reach needs `api_key`, or `insecure`.
        port: its port; 0 for any that is free.
        api_key: a file with the key that requests must carry, or `env:NAME` for an environment variable with it; null
            asks for none.
        insecure: listen to other machines without a key.
        max_queued_tokens: tokens of prompts that may wait for a row; requests beyond are sent away.
        drain_seconds: how long requests may go on when the server is told to end.
        limits: how much clients may send, how slowly and how often.
        adapter_path: an adapter of the model, as peft or `peft_save_path` wrote it: a folder, a hub id, or a URL.
        plan: assumptions for planning that a run would find out by itself.
        allow_pickle: accept pickled weights (never needed for safetensors).
        load_memory_gib: host memory for reading, beyond the arrays; default a tenth of them, within [0.25, 4] GiB.
        quantize, tied_head: as in `generate`.
    """

    hf_checkpoint: PathText | None = None
    checkpoint_path: PathText | None = None
    tokenizer: PathText | None = None
    model: LmConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    inference: ServerInferenceConfig = field(default_factory=ServerInferenceConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None
    enforce_bos: bool = True
    host: str = "127.0.0.1"
    port: Port = 8000
    api_key: PathText | None = None
    insecure: bool = False
    max_queued_tokens: PositiveInt = 65_536
    drain_seconds: PositiveFloat = 30.0
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    plan: PlanOptions = field(default_factory=PlanOptions)
    allow_pickle: bool = False
    load_memory_gib: PositiveFloat | None = None
    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"
    adapter_path: PathText | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.is_local or self.api_key or self.insecure):
            raise ValueError(
                f"host: {self.host} is reached from other machines, and nothing keeps them out\n"
                "  → api_key: a file with a key, or host: 127.0.0.1, or insecure: true"
            )
        _ = self.generating

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def generating(self) -> GenerateConfig:
        """The same as `generate` has it, without files."""
        return GenerateConfig(
            hf_checkpoint=self.hf_checkpoint,
            checkpoint_path=self.checkpoint_path,
            tokenizer=self.tokenizer,
            model=self.model,
            trainer=self.trainer,
            inference=self.inference,
            sampling=self.sampling,
            chat_template=self.chat_template,
            enforce_bos=self.enforce_bos,
            plan=self.plan,
            allow_pickle=self.allow_pickle,
            load_memory_gib=self.load_memory_gib,
            quantize=self.quantize,
            tied_head=self.tied_head,
            adapter_path=self.adapter_path,
        )
