"""Upstream's options that are read and not supported: a request for one is refused, or reported to have no effect.

No configuration class has these keys. They are removed from a document before it is decoded, so documents of either
generation keep working. What a document *requests* this way (anything but null, false or `none`) is recorded beside the
configuration, in `levanter.config.ExplicitKeys`, and becomes a check of the run's plan. To support one of them, add the
key to its class and remove its row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from levanter.config.upstream.changes import Keys, removed
from levanter.config.yaml_nodes import MapNode, to_plain


@dataclass(frozen=True, kw_only=True)
class NotCarried:
    """A key that is read and not carried.

    Attributes:
        block: the mapping that contains it; "" for the document.
        name: the key.
        why: the reason, or the replacement.
        refused: whether a request for it is an error; otherwise the run logs that it has no effect.
        entry_point_keys: top-level keys that identify the entry points with this key; one of them suffices.
    """

    block: str
    name: str
    why: str
    refused: bool = True
    entry_point_keys: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The dotted key."""
        return f"{self.block}.{self.name}".lstrip(".")

    @property
    def path(self) -> Keys:
        """Its path in a document."""
        return (*filter(None, (self.block,)), self.name)

    @property
    def message(self) -> str:
        """The message for a run that requests it."""
        return f"{self.key}: {self.why}" if self.refused else f"{self.key}: no effect; {self.why}"

    def applies_to(self, takes: Collection[str]) -> bool:
        """Whether it is an unsupported key of the class with the top-level keys `takes`."""
        return self.name not in takes and (
            not self.entry_point_keys or any(name in takes for name in self.entry_point_keys)
        )


_HLO = "`levanter.main.plan … --keep_hlo FOLDER` writes the programs"
_LATER = "not supported yet; set it to false"
_TRAIN, _EVAL, _SERVE = "z_loss_weight", "max_eval_length", "drain_seconds"

NOT_CARRIED: tuple[NotCarried, ...] = (
    NotCarried(block="", name="log_entropy", why=_LATER, entry_point_keys=(_TRAIN, _EVAL)),
    NotCarried(block="", name="log_top2_gap", why=_LATER, entry_point_keys=(_EVAL,)),
    NotCarried(block="", name="log_param_stats", why=_LATER, entry_point_keys=(_EVAL,)),
    NotCarried(
        block="",
        name="hf_upload",
        why="exports are written but not uploaded; leave it out and run `hf upload` on the folder",
        entry_point_keys=(_TRAIN,),
    ),
    NotCarried(
        block="",
        name="pad_tokenizer_to_match_model",
        why="not needed: a tokenizer may have fewer ids than the model's vocabulary; leave it out",
        entry_point_keys=(_TRAIN,),
    ),
    NotCarried(
        block="",
        name="quantize",
        why="training updates weights, and 8-bit integers cannot be updated; leave it out, and quantize the trained "
        "model: eval_lm, viz_logprobs, eval_careless_lm, eval_sliding_lm, generate and sample_lm have this key",
        entry_point_keys=(_TRAIN,),
    ),
    NotCarried(
        block="",
        name="batch_timeout",
        why="a prompt starts as soon as a row is free, without waiting for other requests; leave it out",
        entry_point_keys=(_SERVE,),
    ),
    NotCarried(
        block="trainer",
        name="quantization",
        why="not supported yet, and it would change the results; set it to null",
    ),
    NotCarried(
        block="trainer", name="use_explicit_mesh_axes", why="not supported; mesh axes are of JAX's automatic type"
    ),
    NotCarried(
        block="trainer",
        name="shutdown_at_exit",
        why="not supported: a run does not shut down its machine; do that after the command",
    ),
    NotCarried(block="trainer", name="log_jaxprs", why=_HLO, refused=False),
    NotCarried(block="trainer", name="log_xla_hlo", why=_HLO, refused=False),
)
"""Every such key, in the order in which they are reported."""


def unsupported_rows(path: Keys, takes: Collection[str]) -> Mapping[str, NotCarried]:
    """The rows of the mapping at `path` by name, for a document whose class takes the keys `takes` at the top."""
    # Rows are looked up by the mapping that contains the key, for hints about misspelt keys as well.
    rows = (row for row in NOT_CARRIED if row.path[:-1] == path)
    return {row.name: row for row in rows if path or row.applies_to(takes)}


def is_requested(value: object) -> bool:
    """Whether a value requests the option."""
    return value not in (None, False, "none", "")


def remove_unsupported(document: MapNode, takes: Collection[str]) -> tuple[MapNode, tuple[NotCarried, ...]]:
    """A document without these keys, and the rows of those that the document requests.

    Args:
        document: in today's spelling otherwise.
        takes: the keys that its class takes at the top.
    """
    requested = []
    for row in (*unsupported_rows((), takes).values(), *unsupported_rows(("trainer",), takes).values()):
        entry = document.at(row.path)
        if entry is None:
            continue
        if is_requested(to_plain(entry.node)):
            requested.append(row)
        # The key is removed also where it requests nothing: no class has it.
        document = removed(document, row.path)
    return document, tuple(requested)
