"""Entry points of upstream's that are not here yet: their documents are read and checked, then refused by name.

    python -m levanter.main.lora_lm --config_path my_lora.yaml

Reading comes first, so that a document's mistakes and its old spellings are shown, `--help` explains the keys, and
`levanter.main.migrate` can write it anew. Each of these entry points is a module of one call (`lora_lm.py`, …); what
they are is the table here. When one is built, its module is replaced and its row goes.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from levanter.commands.shell.entry import shell
from levanter.config import load
from levanter.io import setup_logging
from levanter.legacy import absent_configs as configs


class AbsentEntryPointError(ValueError):
    """What was asked for is not here yet."""


@dataclass(frozen=True, kw_only=True)
class AbsentEntryPoint:
    """An entry point that can be configured, not run.

    Attributes:
        config: its configuration class.
        what: what it would do.
        instead: what can be done today.
    """

    config: type
    what: str
    instead: str


_SFT_INSTEAD = (
    "`train_lm` trains on conversations: give each set as data.components.<name> with format: {type: chat}, "
    "and the checkpoint as initialize_from_hf"
)
_SAMPLE_INSTEAD = "`train_lm` exports Hugging Face folders (hf_save_path), which any tool that samples can read"

ABSENT: Mapping[str, AbsentEntryPoint] = {
    "lora_lm": AbsentEntryPoint(
        config=configs.LoraLmConfig,
        what="fine-tuning with low-rank adapters",
        instead="`train_lm` with initialize_from_hf trains all parameters",
    ),
    "export_hf_to_lm": AbsentEntryPoint(
        config=configs.ExportHfToLmConfig,
        what="writing a Hugging Face checkpoint as one of ours",
        instead="nothing needs it: every entry point reads Hugging Face files themselves",
    ),
    "sample_lm": AbsentEntryPoint(config=configs.SampleLmConfig, what="sampling from a model", instead=_SAMPLE_INSTEAD),
    "inference_repl": AbsentEntryPoint(
        config=configs.InferenceReplConfig, what="a conversation on a terminal", instead=_SAMPLE_INSTEAD
    ),
    "sft": AbsentEntryPoint(
        config=configs.SftConfig, what="supervised fine-tuning by its own keys", instead=_SFT_INSTEAD
    ),
    "sft_mixture": AbsentEntryPoint(
        config=configs.SftMixtureConfig, what="supervised fine-tuning by its own keys", instead=_SFT_INSTEAD
    ),
    "train_dpo": AbsentEntryPoint(
        config=configs.TrainDpoConfig,
        what="direct preference optimization",
        instead="`train_lm` trains on chosen answers alone (format: {type: chat})",
    ),
    "lora_dpo": AbsentEntryPoint(
        config=configs.LoraDpoConfig,
        what="direct preference optimization of low-rank adapters",
        instead="`train_lm` trains on chosen answers alone (format: {type: chat})",
    ),
    "perplexity_gap": AbsentEntryPoint(
        config=configs.PerplexityGapConfig,
        what="comparing two models on the same bytes",
        instead="`eval_lm` once for each model: bits per byte compare across tokenizers",
    ),
    "train_asr": AbsentEntryPoint(
        config=configs.TrainAsrConfig, what="training on speech", instead="text is what this project trains on"
    ),
    "eval_harness": AbsentEntryPoint(
        config=configs.EvalHarnessConfig,
        what="the tasks of the evaluation harness",
        instead="`eval_lm` gives losses and bits per byte; an exported checkpoint runs in the harness itself",
    ),
}
"""Entry point → what it would be."""


def run_absent(name: str, argv: Sequence[str] | None = None) -> int:
    """Reads the configuration of an absent entry point, then refuses to run it.

    Returns:
        The exit code: 0 for `--help`, else 2.
    """
    row = ABSENT[name]

    def refuse() -> int:
        setup_logging()
        load(row.config, sys.argv[1:] if argv is None else argv, program=f"python -m levanter.main.{name}")
        raise AbsentEntryPointError(
            f"levanter.main.{name} is not here yet ({row.what}); the configuration was read and is sound\n"
            f"today: {row.instead}"
        )

    return shell(refuse)
