"""The runs that can be planned, by the names that users know. Listing one imports nothing of it."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from levanter.runplan import EntryPoint


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An entry point, as far as it can be known without importing it.

    Attributes:
        name: the module's name in `levanter.main`.
        module: where its `ENTRY_POINT` is.
        config: the name of its config class.
        config_module: where that is; a module that imports no more than configurations need.
        summary: what it does, for `--help`.
    """

    name: str
    module: str
    config: str
    config_module: str
    summary: str

    def load(self) -> "EntryPoint[Any, Any, Any]":
        """The entry point itself."""
        return importlib.import_module(self.module).ENTRY_POINT

    def config_class(self) -> type:
        """The class of its configuration; imports nothing else of the entry point."""
        return getattr(importlib.import_module(self.config_module), self.config)


ENTRY_POINTS: Mapping[str, Listed] = MappingProxyType(
    {
        name: Listed(
            name=name,
            module=f"levanter.commands.{module}",
            config=config,
            config_module=f"levanter.commands.{config_module}",
            summary=summary,
        )
        for name, module, config_module, config, summary in (
            (
                "eval_lm",
                "evaluate.eval_lm",
                "evaluate.config",
                "EvalLmConfig",
                "loss, perplexity, bits per byte of a model on text",
            ),
            (
                "eval_harness",
                "harness.eval_harness",
                "harness.config",
                "EvalHarnessConfig",
                "tasks of the evaluation harness",
            ),
            (
                "perplexity_gap",
                "evaluate.gap.run",
                "evaluate.gap.config",
                "PerplexityGapConfig",
                "two models on the same bytes",
            ),
            (
                "eval_needles",
                "evaluate.needles.run",
                "evaluate.needles.config",
                "EvalNeedlesConfig",
                "what a model finds in long texts",
            ),
            (
                "eval_careless_lm",
                "memorize.eval_careless_lm",
                "memorize.config",
                "EvalCarelessLmConfig",
                "memorization of books, window by window",
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
                "memorization of prepared prompts, row by row",
            ),
            ("train_lm", "train.lm.train_lm", "train.config", "TrainLmConfig", "training"),
            ("sft", "train.lm.train_lm", "train.lm.sft_config", "SftConfig", "training, by upstream's keys of sft too"),
            (
                "sft_mixture",
                "train.lm.train_lm",
                "train.lm.sft_config",
                "SftMixtureConfig",
                "training, by upstream's keys of sft_mixture too",
            ),
            ("lora_lm", "train.lm.lora_lm", "train.lm.lora_config", "LoraLmConfig", "training of low-rank adapters"),
            ("train_dpo", "train.dpo.train_dpo", "train.dpo.config", "TrainDpoConfig", "training on preferences"),
            (
                "lora_dpo",
                "train.dpo.lora_dpo",
                "train.dpo.lora_config",
                "LoraDpoConfig",
                "training of low-rank adapters on preferences",
            ),
            (
                "export_lm_to_hf",
                "export.export_lm_to_hf",
                "export.config",
                "ConvertLmConfig",
                "a checkpoint as a Hugging Face folder",
            ),
            ("generate", "generate.generate", "generate.config", "GenerateConfig", "text behind prompts, line by line"),
            (
                "sample_lm",
                "generate.sample_lm",
                "generate.sample_config",
                "SampleLmConfig",
                "texts behind a few prompts",
            ),
            ("serve", "serve.serve", "serve.config", "ServeConfig", "a model over HTTP, for OpenAI's clients"),
            (
                "inference_repl",
                "generate.repl",
                "generate.repl_config",
                "InferenceReplConfig",
                "a model at the terminal",
            ),
            (
                "viz_logprobs",
                "evaluate.viz_logprobs",
                "evaluate.config",
                "VizLmConfig",
                "a page with every token's log-probability",
            ),
        )
    }
)
"""Entry points by name."""
