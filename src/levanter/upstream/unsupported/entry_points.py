"""Upstream entry points that are not implemented yet: their documents are read and checked, then refused by name.

    python -m levanter.main.train_asr --config_path my_asr.yaml

Reading comes first, so that a document's mistakes and old spellings are reported, `--help` explains the keys, and
`levanter.main.migrate` can rewrite it. None of these entry points has a file: `levanter.upstream.imports` creates its
module from this table, and `levanter.upstream.unsupported.refusal` is what the module runs. An entry point that is
implemented gets a file in `main/` and loses its row. The list of commands reads this table, too, so this file imports
only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, kw_only=True)
class AbsentEntryPoint:
    """An entry point that can be configured but not run.

    Attributes:
        config_name: the name of its configuration class in `levanter.upstream.unsupported.configs`.
        what: what the entry point does upstream.
        instead: the alternative today.
    """

    config_name: str
    what: str
    instead: str

    @property
    def config(self) -> type:
        """Its configuration class."""
        # Imported late: the classes import JAX, and the list of commands must not.
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
"""Entry point → its configuration, purpose and alternative."""
