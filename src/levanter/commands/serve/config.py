"""The configuration of `serve`."""

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.model.config import LoadedModelKeys
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import PathText, PositiveFloat, PositiveInt, Range
from levanter.inference.config import Auto, InferenceConfig
from levanter.inference.requests import SamplingParams
from levanter.serving.limits import LimitsConfig
from levanter.trainer.config import TrainerConfig

Port: TypeAlias = Annotated[int, Range(0, 65_535)]


@dataclass(frozen=True, kw_only=True)
class ServerInferenceConfig(InferenceConfig):
    """The `inference:` block of a server, which decodes as many sequences as fit by default.

    Attributes:
        max_rows: decode slots over all devices (sequences that are generated concurrently); a multiple of the batch
            shards. `auto` takes as many as fit by the plan, at most 256, and 32 on CPUs.
    """

    max_rows: PositiveInt | Auto = "auto"


@dataclass(frozen=True, kw_only=True)
class ServeConfig(LoadedModelKeys):
    """OpenAI-compatible HTTP server.

    Attributes:
        tokenizer: another tokenizer than the checkpoint's own.
        trainer: devices, mesh, precision, trackers.
        inference: decode slots and the KV cache.
        sampling: default sampling parameters for requests that do not set them.
        chat_template: chat template used instead of the tokenizer's own: Jinja text, or a file that contains it.
        enforce_bos: whether a text prompt begins with BOS; null for what the tokenizer's files decide.
        served_model_name: the model's name in requests and responses; null for the last part of its source. Its source
            is accepted as well.
        host: the address to listen on; an address that other machines can reach needs `api_key` or `insecure`.
        port: the port to listen on; 0 for any free port.
        api_key: the key that requests must carry: a file that contains it, or `env:NAME` for an environment variable;
            null for no authentication.
        insecure: accepts requests from other machines without a key.
        max_queued_tokens: largest number of prompt tokens in the queue; requests beyond it are rejected.
        drain_seconds: seconds that running requests may take to finish at shutdown.
        limits: limits on the size, duration and rate of requests.
        plan: assumptions for planning: values that a run determines from its data.
    """

    tokenizer: PathText | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    inference: ServerInferenceConfig = field(default_factory=ServerInferenceConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None
    enforce_bos: bool | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: Port = 8000
    api_key: PathText | None = None
    insecure: bool = False
    max_queued_tokens: PositiveInt = 65_536
    drain_seconds: PositiveFloat = 30.0
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError("served_model_name: expected a name, got an empty text")
        # A server that other machines reach answers everyone, so it needs a key or an explicit decision.
        if not (self.is_local or self.api_key or self.insecure):
            raise ValueError(
                f"host: {self.host} accepts requests of other machines, and has no key\n"
                "  → api_key: a file with a key, or host: 127.0.0.1, or insecure: true"
            )
        # Builds the equivalent config now, so that its errors are raised with this one's.
        _ = self.generating

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        # A name other than `localhost` may resolve to any address, so it does not count as local.
        except ValueError:
            return False

    @property
    def generating(self) -> GenerateConfig:
        """The equivalent config of `generate`, without input and output files."""
        return GenerateConfig(
            **self.model_keys,
            tokenizer=self.tokenizer,
            trainer=self.trainer,
            inference=self.inference,
            sampling=self.sampling,
            chat_template=self.chat_template,
            enforce_bos=self.enforce_bos,
            plan=self.plan,
        )
