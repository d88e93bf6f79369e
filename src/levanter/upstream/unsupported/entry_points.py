"""Upstream entry points that are not implemented yet: their documents are read and checked, then refused by name.

    python -m levanter.main.train_asr --config_path my_asr.yaml

Reading comes first, so that a document's mistakes and its old spellings are shown, `--help` explains the keys, and
`levanter.main.migrate` can rewrite it. None of these entry points has a file: `levanter.upstream.imports` makes its
module of the table here, and `levanter.upstream.unsupported.refusal` is what it runs. When one is built, it gets its
door in `main/` and its row goes. The table is read by the list of commands too, so this file imports the standard
library alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, kw_only=True)
class AbsentEntryPoint:
    """An entry point that can be configured but not run.

    Attributes:
        config_name: its configuration class in `levanter.upstream.unsupported.configs`.
        what: what it would do.
        instead: what can be done today.
    """

    config_name: str
    what: str
    instead: str

    @property
    def config(self) -> type:
        """Its configuration class."""
        return getattr(import_module("levanter.upstream.unsupported.configs"), self.config_name)


ABSENT: Mapping[str, AbsentEntryPoint] = {
    "export_hf_to_lm": AbsentEntryPoint(
        config_name="ExportHfToLmConfig",
        what="converting a Hugging Face checkpoint to our format",
        instead="not needed: every entry point reads Hugging Face files directly",
    ),
    "train_asr": AbsentEntryPoint(
        config_name="TrainAsrConfig", what="training on speech", instead="this project trains on text only"
    ),
}
"""Entry point → what it would do."""
