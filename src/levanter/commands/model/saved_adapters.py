"""Adapters in a checkpoint of `train_lm`, and the check that a model is the base that they were trained on.

A checkpoint of adapters records its base model: its source, and a digest of each of its arrays. Before the base is
loaded, its small arrays (norms, biases, all up to `COMPARED_BYTES`) are read and their digests compared; another model
of the same shape has different ones.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from haliax_ext.abstract import Leaf, abstract
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightRules
from haliax_ext.sources import TensorSource
from levanter.checkpoint import CheckpointMismatchError, CheckpointRef, CheckpointSource, UnreadableCheckpointError
from levanter.config import ConfigError, parse_text
from levanter.models.adapters.config import AdapterConfig, LoraConfig
from levanter.models.adapters.lora import Adapters
from levanter.models.adapters.lora_targets import AdapterError, TargetGroup, find_targets
from levanter.trainer.frozen_identity import FrozenPart, digest_on_host

COMPARED_BYTES = 4 << 20
"""Largest size in bytes of the base's arrays whose digests are compared before loading."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The key of a checkpoint's configuration that describes its adapters; parsed from metadata.json."""

    adapter: AdapterConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedAdapters:
    """The adapters of a checkpoint.

    Attributes:
        ref: the checkpoint.
        part: the checkpoint's record of the base model.
        config: the configuration of the adapters.
        source: their arrays, by path.
        padded: axes that may be longer in this run than in the checkpoint.
    """

    ref: CheckpointRef
    part: FrozenPart
    config: LoraConfig
    source: CheckpointSource
    padded: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The name of the adapters in messages."""
        return self.ref.path

    @staticmethod
    def of(ref: CheckpointRef, part: FrozenPart, *, prefix: str) -> "SavedAdapters":
        """The adapters of a checkpoint.

        Args:
            ref: the checkpoint.
            part: the checkpoint's record of the base model.
            prefix: prefix of the paths of its arrays.

        Raises:
            UnreadableCheckpointError: metadata.json has no valid configuration of them.
        """
        run_config = ref.metadata.get("config")
        # Only the block `adapter` of the run's configuration is parsed: other keys may be of a newer version.
        block = run_config.get("adapter") if isinstance(run_config, Mapping) else None
        try:
            config = parse_text(_Saved, json.dumps({"adapter": block}), source=f"{ref.path}/metadata.json").adapter
        except ConfigError as error:
            raise UnreadableCheckpointError(
                f"{ref.path}: metadata.json does not describe its adapters: {error}"
            ) from error
        if not isinstance(config, LoraConfig):
            raise UnreadableCheckpointError(f"{ref.path}: metadata.json does not name a type of adapters")
        return SavedAdapters(ref=ref, part=part, config=config, source=CheckpointSource(ref, prefix=prefix))

    def targets(self, groups: Sequence[TargetGroup]) -> tuple[TargetGroup, ...]:
        """The projection groups of a model that the adapters adapt, with their ranks.

        Args:
            groups: all projection groups of the model.

        Raises:
            CheckpointMismatchError: the checkpoint has other groups or ranks.
        """
        try:
            # The groups are derived from the configuration again and compared with the ranks that the checkpoint
            # recorded.
            target_groups = find_targets(groups, self.config)
        except AdapterError as error:
            raise CheckpointMismatchError(f"{self.where}: its adapters do not match the model:\n{error}") from error
        ranks, saved_ranks = {group.path: group.rank for group in target_groups}, dict(self.part.adapters or {})
        if ranks != saved_ranks:
            differing = sorted(ranks.items() ^ saved_ranks.items())
            raise CheckpointMismatchError(
                f"{self.where}: its adapters belong to other projections than the model has: {_abbreviated(differing)}"
            )
        return target_groups

    def tree(self, targets: Sequence[TargetGroup], whole: PyTree = None) -> Adapters:
        """The factors and full copies, abstract.

        Args:
            targets: from `targets`.
            whole: the part of the model, abstract, that is trained as full copies; None for none.
        """
        # `init` is only traced, for shapes.
        return abstract(lambda part: Adapters.init(targets, self.config, key=jax.random.PRNGKey(0), whole=part), whole)

    def check_base(self, rules: WeightRules, model_leaves: Sequence[Leaf], source: TensorSource) -> int:
        """Compares the small arrays of a model with those of the base that the adapters were trained on.

        Args:
            rules: the weight rules of the model's leaves.
            model_leaves: the model's leaves.
            source: the model's tensors.

        Returns:
            The number of compared arrays.

        Raises:
            CheckpointMismatchError: some differ; names them and the sources of both models.
        """
        # Without a common dtype the digests cannot be computed from the files.
        if self.part.dtype is None:
            return 0
        dtype = _dtype(self.part.dtype)
        table = rules.by_target()
        small = [
            # In the dtype that the base was held in when its digests were made.
            replace(leaf, dtype=dtype)
            for leaf in model_leaves
            if leaf.path in self.part.digests and leaf.path in table and _size(leaf) * dtype.itemsize <= COMPARED_BYTES
        ]
        digests = {leaf.path: digest_on_host(x) for leaf, x in _read(small, rules, source)}
        # Another model of the same shape differs in its norms and biases too, so small arrays suffice.
        if differing := sorted(path for path, digest in digests.items() if digest != self.part.digests[path]):
            raise CheckpointMismatchError(
                f"{self.where}: its adapters were trained on another model: {len(differing)} of the {len(digests)} "
                f"compared arrays differ ({_abbreviated(differing)}); the one that they were trained on came from "
                f"{self.part.origin}"
            )
        return len(digests)


def _read(leaves: Sequence[Leaf], rules: WeightRules, source: TensorSource):
    """Reads whole leaves into host memory, one after another."""
    for leaf in leaves:
        # The whole leaf in host memory; only small leaves come here.
        array = np.zeros(leaf.shape, leaf.dtype)
        for name, (_, pieces) in rules.sources([leaf]).items():
            # The files may use another prefix than the rules.
            stored_name = next(other for other in rules.spellings(name) if other in source.tensors)
            values = source.read(stored_name, tuple(slice(0, size) for size in source.tensors[stored_name].shape))
            # `box` is the part of the leaf that a piece fills, as (start, stop) for each axis.
            for piece in pieces:
                # Rounded to the dtype of loading first, so that the digest is that of the loaded array.
                piece.read(values.astype(leaf.dtype), array[tuple(slice(start, stop) for start, stop in piece.box)])
        yield leaf, array


def _size(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _abbreviated(items: Sequence[object]) -> str:
    more = f", … {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
