"""The entry points that can be planned, by command name. Listing them imports none of their modules."""

import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from levanter.runplan import EntryPoint


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses the garbage collector where imports create objects that all stay (a sixth of their CPU seconds)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Moves the new objects to the oldest generation. As young ones they would all be traversed at once.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class EntryPointRef:
    """A reference to an entry point, whose modules are imported on demand.

    Attributes:
        name: the module's name in `levanter.main`.
        module: the module that defines its `ENTRY_POINT`.
        config: the name of its config class.
        config_module: the module of the config class, which imports no more than configurations need.
        summary: one line for the list of entry points in `plan --help`.
    """

    name: str
    module: str
    config: str
    config_module: str
    summary: str

    def load(self) -> "EntryPoint[Any, Any, Any]":
        """Imports the entry point."""
        with collection_paused():
            return importlib.import_module(self.module).ENTRY_POINT

    def config_class(self) -> type:
        """Imports its config class, and nothing else of the entry point."""
        return getattr(importlib.import_module(self.config_module), self.config)


ENTRY_POINTS: Mapping[str, EntryPointRef] = MappingProxyType(
    {
        name: EntryPointRef(
            name=name,
            module=f"levanter.commands.{module}",
            config=config,
            config_module=f"levanter.commands.{config_module}",
            summary=summary,
        )
        # Names instead of imports, so that `plan --help` stays fast.
        for name, module, config_module, config, summary in (
            (
                "eval_lm",
                "evaluate.eval_lm",
                "evaluate.config",
                "EvalLmConfig",
                "loss, perplexity and bits per byte of a model on text",
            ),
            (
                "eval_harness",
                "harness.eval_harness",
                "harness.config",
                "EvalHarnessConfig",
                "lm-evaluation-harness tasks",
            ),
            (
                "perplexity_gap",
                "evaluate.gap.run",
                "evaluate.gap.config",
                "PerplexityGapConfig",
                "bits per byte of two models on the same text",
            ),
            (
                "eval_needles",
                "evaluate.needles.run",
                "evaluate.needles.config",
                "EvalNeedlesConfig",
                "RULER needle-in-a-haystack evaluation",
            ),
            (
                "eval_careless_lm",
                "memorize.eval_careless_lm",
                "memorize.config",
                "EvalCarelessLmConfig",
                "memorization of books, by sliding windows",
            ),
            (
                "eval_sliding_total",
                "memorize.eval_careless_lm",
                "memorize.config",
                "EvalCarelessLmConfig",
                "alias of eval_careless_lm",
            ),
            (
                "eval_sliding_lm",
                "memorize.eval_sliding_lm",
                "memorize.sliding_config",
                "EvalSlidingLmConfig",
                "memorization of prepared prompts",
            ),
            ("train_lm", "train.lm.train_lm", "train.config", "TrainLmConfig", "language-model training"),
            (
                "sft",
                "train.lm.train_lm",
                "train.lm.sft_config",
                "SftConfig",
                "train_lm with upstream's keys of sft",
            ),
            (
                "sft_mixture",
                "train.lm.train_lm",
                "train.lm.sft_config",
                "SftMixtureConfig",
                "train_lm with upstream's keys of sft_mixture",
            ),
            (
                "lora_lm",
                "train.lm.lora_lm",
                "train.lm.lora_config",
                "LoraLmConfig",
                "LoRA training",
            ),
            (
                "train_dpo",
                "train.dpo.train_dpo",
                "train.dpo.config",
                "TrainDpoConfig",
                "preference training (DPO)",
            ),
            (
                "lora_dpo",
                "train.dpo.lora_dpo",
                "train.dpo.lora_config",
                "LoraDpoConfig",
                "LoRA preference training",
            ),
            (
                "export_lm_to_hf",
                "export.export_lm_to_hf",
                "export.config",
                "ConvertLmConfig",
                "export of a checkpoint as a Hugging Face folder",
            ),
            (
                "generate",
                "generate.generate",
                "generate.config",
                "GenerateConfig",
                "text generation from a file",
            ),
            (
                "sample_lm",
                "generate.sample_lm",
                "generate.sample_config",
                "SampleLmConfig",
                "sampled continuations of a few prompts",
            ),
            ("serve", "serve.serve", "serve.config", "ServeConfig", "OpenAI-compatible HTTP server"),
            (
                "inference_repl",
                "generate.repl",
                "generate.repl_config",
                "InferenceReplConfig",
                "chat with a model at the terminal",
            ),
            (
                "viz_logprobs",
                "evaluate.viz_logprobs",
                "evaluate.config",
                "VizLmConfig",
                "page with the log-probability of every token",
            ),
        )
    }
)
"""Entry points by name."""
