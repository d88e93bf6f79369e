"""The configuration of `inference_repl`: upstream's keys, translated to those of `generate`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.upstream_engine_config import InferenceEngineConfig
from levanter.commands.model.config import Quantize, TiedHead
from levanter.config import ExplicitKeys
from levanter.config.plan_options import PlanOptions
from levanter.config.validators import Count, NonNegativeFloat, PathText, PositiveInt, Ranged
from levanter.inference.requests import SampleSeed, SamplingParams, Temperature
from levanter.models.registry import LmConfig
from levanter.trainer.config import TrainerConfig

COMMANDS = ("chat", "complete", "batch", "help")
"""The values of `command`."""
ELSEWHERE = {
    "load": "restart with another checkpoint",
    "unload": "a model stays until the program ends",
    "serve": "`python -m levanter.main.serve` is the server",
}
"""Upstream's commands that are refused, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class InferenceServerConfig(Ranged):
    """Upstream's `server:` block. Only `service` and `tokenizer` have an effect; no server is started.

    Attributes:
        trainer, model, checkpoint_path, hf_checkpoint: no effect; the top-level keys are used.
        tokenizer: used if no top-level `tokenizer` is set.
        service: decode slots and the KV cache, with upstream's keys.
        temperature, seed: no effect; the top-level keys are used.
        batch_timeout: no effect; requests are not delayed to form batches.
        host, port: no effect; no server is started.
    """

    range_prefix: ClassVar[str] = "server."

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: LmConfig | None = None
    checkpoint_path: PathText | None = None
    hf_checkpoint: PathText | None = None
    tokenizer: PathText | None = None
    # Upstream's defaults of this entry point, which differ from those of `InferenceEngineConfig`.
    service: InferenceEngineConfig = field(
        default_factory=lambda: InferenceEngineConfig(
            page_size=8,
            max_pages=512,
            max_seq_len=64,
            max_seqs=2,
            max_queued_tokens=64,
            max_seqs_in_prefill=1,
            max_prefill_size=64,
            max_rounds=4,
        )
    )
    temperature: Temperature = 0.7
    seed: SampleSeed = 42
    batch_timeout: NonNegativeFloat = 0.1
    host: str = "localhost"
    port: Count = 0


@dataclass(frozen=True, kw_only=True)
class InferenceReplConfig(Ranged):
    """Chat with a model at the terminal.

    Attributes:
        checkpoint: Hugging Face files (a folder, a hub id, a URL or a .gguf file), or a checkpoint of `train_lm`.
        model: the architecture, if the checkpoint has no config.
        tokenizer: another tokenizer than the checkpoint's own.
        trainer: devices, mesh, precision, trackers.
        server: upstream's `server` block; its `service` configures decode slots and the KV cache.
        temperature: sampling temperature; 0 selects the most likely token (the lowest id on ties).
        seed: seed of the sampling noise.
        max_tokens: largest number of tokens of an answer.
        command: `chat`, `complete`, `batch` or `help`, instead of a session; null for a session.
        args: the argument of the command: a message, a text, or for `batch` a list of requests as JSON or a file of
            them.
        quantize: `int8` stores all projections as 8-bit integers; see `generate`.
        tied_head: with `quantize` and tied embeddings, the matrix of the output head: an int8 `copy` of the embedding
            table, or `share` for the table itself.
        adapter_path: an adapter to apply to the model, in the format of peft or `peft_save_path`: a folder, a hub id,
            or a URL.
        plan: assumptions for planning: values that a run determines from its data.
    """

    checkpoint: PathText
    model: LmConfig | None = None
    tokenizer: PathText | None = None
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(mp="f32"))
    server: InferenceServerConfig = field(default_factory=InferenceServerConfig)
    temperature: Temperature = 0.7
    seed: SampleSeed = 42
    max_tokens: PositiveInt = 64
    command: str | None = None
    args: str = ""
    quantize: Quantize | None = None
    tied_head: TiedHead = "copy"
    adapter_path: PathText | None = None
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.command in ELSEWHERE:
            problems.append(f"command: {self.command}: {ELSEWHERE[self.command]}")
        elif self.command is not None and self.command not in COMMANDS:
            problems.append(f"command: one of {', '.join(COMMANDS)}, or null; got {self.command!r}")
        elif self.command in ("complete", "batch") and not self.args:
            problems.append(f"args: `{self.command}` needs an argument")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters."""
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)

    def generating(self, written: ExplicitKeys, *, ours: bool) -> GenerateConfig:
        """The equivalent configuration of `generate`, interactive.

        Args:
            written: the keys of the document.
            ours: whether the checkpoint is one of our own training runs.
        """
        engine = self.server.service
        # `max_rounds` counts as written: upstream's default of this entry point is a choice too.
        keys = {"engine.max_rounds", *(f"engine.{key}" for key in written_below(written, SERVICE))}
        return GenerateConfig(
            hf_checkpoint=None if ours else self.checkpoint,
            checkpoint_path=self.checkpoint if ours else None,
            tokenizer=self.tokenizer or self.server.tokenizer,
            model=self.model,
            trainer=self.trainer,
            # One conversation at a time: `max_seqs` is both the need and the limit.
            inference=engine.inference(needed=engine.max_seqs, written=ExplicitKeys(frozenset(keys))),
            sampling=self.sampling,
            interactive=True,
            quantize=self.quantize,
            tied_head=self.tied_head,
            adapter_path=self.adapter_path,
            plan=self.plan,
        )

    def notes(self, written: ExplicitKeys) -> Iterator[str]:
        """Notes on keys that were written and have no effect."""
        # The notes name keys as `engine.…`; here the block is `server.service`.
        below = ExplicitKeys(frozenset(f"engine.{key}" for key in written_below(written, SERVICE)))
        for note in self.server.service.notes(below):
            yield f"{SERVICE}{note.removeprefix('engine')}"
        for key, why in WITHOUT_EFFECT.items():
            if f"server.{key}" in written:
                yield f"server.{key}: without effect; {why}"


SERVICE = "server.service"
WITHOUT_EFFECT = {
    "trainer": "the document's own `trainer` is used",
    "model": "the document's own `model` is used",
    "checkpoint_path": "the document's own `checkpoint` is used",
    "hf_checkpoint": "the document's own `checkpoint` is used",
    "temperature": "the document's own `temperature` is used",
    "seed": "the document's own `seed` is used",
    "batch_timeout": "requests are not delayed to form batches",
    "host": "no server is started",
    "port": "no server is started",
}
"""Keys of `server:` without effect, and why."""


def written_below(written: ExplicitKeys, block: str) -> frozenset[str]:
    """The keys that were written in a block, directly or deeper, by their names in it."""
    return frozenset(key.removeprefix(f"{block}.") for key in written.keys if key.startswith(f"{block}."))
