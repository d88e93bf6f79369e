"""Upstream's options that are read and not supported: a request for one is refused, or reported to have no effect.

No configuration class has these keys. They are removed from a document before it is decoded, so documents of either
generation keep working. What a document *requests* this way (anything but null, false or `none`) is recorded beside the
configuration, in `levanter.config.ExplicitKeys`, and becomes a check of the run's plan. To support one of them, add the
key to its class and remove its row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from levanter.config.upstream.changes import Keys
from levanter.config.yaml_nodes import ListNode, MapNode, Node, to_plain


@dataclass(frozen=True, kw_only=True)
class NotCarried:
    """A key that is read and not carried.

    Attributes:
        block: the mapping that contains it; "" for the document.
        name: the key.
        why: the reason, or the replacement.
        refused: whether a request for it is an error; otherwise the run logs that it has no effect.
        entry_point_keys: top-level keys that identify the entry points with this key; one of them suffices.
        neutral: values that request nothing, besides null, false, `none` and what is empty.
        of_type: the `type:` of the mapping that has the key; "" for any.
        opt_in: whether the key is a block that requests something only with `enabled: true`.
    """

    block: str
    name: str
    why: str
    refused: bool = True
    entry_point_keys: tuple[str, ...] = ()
    neutral: tuple[object, ...] = ()
    of_type: str = ""
    opt_in: bool = False

    @property
    def key(self) -> str:
        """The dotted key."""
        return f"{self.block}.{self.name}".lstrip(".")

    @property
    def path(self) -> Keys:
        """Its path in a document; `*` is any key of a mapping."""
        return (*filter(None, self.block.split(".")), self.name)

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
_TRAIN, _EVAL, _SERVE, _EXPORT = "z_loss_weight", "max_eval_length", "drain_seconds", "max_shard_bytes"
_ONE_AT_A_TIME = "tensors are written one after another; the plan shows the memory that this takes"
_PHASES = (
    "not supported: a stage with another length is a run of its own, from the export of the previous one; leave it out"
)
_CATALOG = "upstream's token caches are not read; leave it out, and name sources, or `cache_dir` of components"
_ROUTER = "not supported: only the selected experts contribute to the router's gradient; leave it out"

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
    NotCarried(
        block="trainer",
        name="xla_dump_upload",
        why="the tracker's `save_xla_dumps` saves the folder that $XLA_FLAGS names in `--xla_dump_to`",
        refused=False,
        opt_in=True,
    ),
    NotCarried(
        block="trainer.profiler",
        name="upload",
        why="a profile stays in `trainer.log_dir`, which the run prints",
        refused=False,
    ),
    NotCarried(
        block="trainer.checkpointer",
        name="write",
        why="checkpoints are written by Orbax, each array by the hosts that hold it",
        refused=False,
    ),
    NotCarried(
        block="trainer.tracker",
        name="service_teardown_timeout",
        why="`background_finish_timeout` limits how long the end of a run waits for wandb",
        refused=False,
        of_type="wandb",
    ),
    *(
        NotCarried(block=block, name=name, why=why)
        for block in ("data", "lm_validation_data")
        for name, why in (("cache_catalog", _CATALOG), ("prior_context_phases", _PHASES))
    ),
    *(NotCarried(block=block, name="dense_router_gradient", why=_ROUTER) for block in ("model", "*.model")),
    NotCarried(
        block="",
        name="checkpoint_subpath",
        why="our checkpoints have the model under `model`; leave it out",
        entry_point_keys=(_EXPORT,),
        neutral=("model",),
    ),
    *(
        NotCarried(block="", name=name, why=_ONE_AT_A_TIME, refused=False, entry_point_keys=(_EXPORT,))
        for name in ("export_host_budget_bytes", "max_concurrent_shards")
    ),
)
"""Every such key, in the order in which they are reported."""


def unsupported_rows(path: Keys, takes: Collection[str]) -> Mapping[str, NotCarried]:
    """The rows of the mapping at `path` by name, for a document whose class takes the keys `takes` at the top."""
    # Rows are looked up by the mapping that contains the key, for hints about misspelt keys as well.
    rows = (row for row in NOT_CARRIED if _matches(row.path[:-1], path))
    return {row.name: row for row in rows if path or row.applies_to(takes)}


def _matches(block: Keys, path: Keys) -> bool:
    return len(block) == len(path) and all(part in ("*", key) for part, key in zip(block, path, strict=True))


def is_requested(value: object, row: NotCarried | None = None) -> bool:
    """Whether a value requests the option of a row."""
    if row is not None and value in row.neutral:
        return False
    # A block may say itself that it is off; without `enabled`, what upstream does by default decides.
    if isinstance(value, Mapping):
        enabled = value.get("enabled", row is None or not row.opt_in)
        return bool(value) and enabled not in (False, None)
    return value not in (None, False, "none", "", [], ())


def remove_unsupported(document: MapNode, takes: Collection[str]) -> tuple[MapNode, tuple[NotCarried, ...]]:
    """A document without these keys, and the rows of those that the document requests.

    Args:
        document: in today's spelling otherwise.
        takes: the keys that its class takes at the top.
    """
    requested = []
    for row in NOT_CARRIED:
        # The same top-level key may be one that another entry point has.
        if not row.block and not row.applies_to(takes):
            continue
        # The key is removed also where it requests nothing: no class has it.
        result, values = _without(document, row.path[:-1], row)
        assert isinstance(result, MapNode)
        document = result
        if any(is_requested(value, row) for value in values):
            requested.append(row)
    return document, tuple(requested)


def _without(node: Node, block: Keys, row: NotCarried) -> tuple[Node, list[object]]:
    """A node without the key of a row in the mappings at `block` below it, and the values of those keys."""
    # Of trackers there may be one or a list; an index is not part of a row's path.
    if isinstance(node, ListNode):
        pairs = [_without(item, block, row) for item in node.items]
        values = [value for _, removed in pairs for value in removed]
        # The text of a command line is kept where nothing changes.
        return (replace(node, items=tuple(item for item, _ in pairs), text=None) if values else node), values
    if not isinstance(node, MapNode):
        return node, []
    if not block:
        entry, kind = node.entry(row.name), node.entry("type")
        if entry is None or (row.of_type and (kind is None or to_plain(kind.node) != row.of_type)):
            return node, []
        return node.without(row.name), [to_plain(entry.node)]
    values = []
    # Nodes are immutable: only mappings on the way to a removed key are built anew.
    for entry in [entry for entry in node if block[0] in ("*", entry.key)]:
        inner, removed = _without(entry.node, block[1:], row)
        if removed:
            node, values = node.with_entry(replace(entry, node=inner)), values + removed
    return node, values
