"""The runs that can be planned, by the names users call them. Naming one imports nothing of it."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from levanter.config import load
from levanter.run import RunPlan, Target


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """A run that can be planned: its module has `describe(config, target)`.

    Attributes:
        name: the module's name in `levanter.main`.
        config: the name of its config class there.
        summary: what it does, for `--help`.
    """

    name: str
    config: str
    summary: str

    def load(self, argv: Sequence[str]) -> tuple[Any, Callable[[Any, Target], RunPlan]]:
        """The config of a command line, and what describes it.

        Raises:
            ConfigError: with everything that is wrong.
            HelpRequested: `--help` is among the words.
        """
        module = importlib.import_module(f"levanter.main.{self.name}")
        return load(getattr(module, self.config), list(argv)), module.describe


ENTRY_POINTS = {
    entry.name: entry
    for entry in (
        EntryPoint(name="eval_lm", config="EvalLmConfig", summary="loss, perplexity, bits per byte of a model on text"),
        EntryPoint(
            name="eval_careless_lm", config="EvalCarelessLmConfig", summary="memorization of books, window by window"
        ),
        EntryPoint(
            name="eval_sliding_total", config="EvalCarelessLmConfig", summary="another name of eval_careless_lm"
        ),
        EntryPoint(
            name="eval_sliding_lm", config="EvalSlidingLmConfig", summary="memorization of prepared prompts, row by row"
        ),
        EntryPoint(name="train_lm", config="TrainLmConfig", summary="training"),
        EntryPoint(name="export_lm_to_hf", config="ConvertLmConfig", summary="a checkpoint as a Hugging Face folder"),
        EntryPoint(name="viz_logprobs", config="VizLmConfig", summary="a page with every token's log-probability"),
    )
}
