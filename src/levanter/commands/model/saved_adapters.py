"""The adapters in one of our checkpoints: which they are, and whether a model is the one that they were trained on.

A checkpoint of adapters names its base: where it came from, and a digest of each of its arrays. Before the base is
loaded, its small arrays (norms, biases, whatever is up to `COMPARED_BYTES`) are read and compared with these; of
another model of the same shape, they differ.
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
from levanter.models.adapters.lora_targets import AdapterError, TargetGroup, find_targets
from levanter.models.adapters.tree import Adapters
from levanter.trainer.frozen_identity import FrozenPart, digest_on_host

COMPARED_BYTES = 4 << 20
"""Arrays of the base up to this size are compared with what a checkpoint says of them, before they are loaded."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The key of a checkpoint's configuration that describes its adapters."""

    adapter: AdapterConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedAdapters:
    """The adapters of a checkpoint.

    Attributes:
        ref: the checkpoint.
        part: what it says of the model that they are of.
        config: how they were made.
        source: their arrays, by their paths.
        padded: axes that may be longer here than there.
    """

    ref: CheckpointRef
    part: FrozenPart
    config: LoraConfig
    source: CheckpointSource
    padded: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """How messages call it."""
        return self.ref.path

    @staticmethod
    def of(ref: CheckpointRef, part: FrozenPart, *, prefix: str) -> "SavedAdapters":
        """The adapters of a checkpoint.

        Args:
            ref: the checkpoint.
            part: what it says of its base.
            prefix: of the paths of its arrays.

        Raises:
            UnreadableCheckpointError: it does not say how they were made.
        """
        said = ref.metadata.get("config")
        block = said.get("adapter") if isinstance(said, Mapping) else None
        try:
            found = parse_text(_Saved, json.dumps({"adapter": block}), source=f"{ref.path}/metadata.json").adapter
        except ConfigError as error:
            raise UnreadableCheckpointError(
                f"{ref.path}: metadata.json does not describe its adapters: {error}"
            ) from error
        if not isinstance(found, LoraConfig):
            raise UnreadableCheckpointError(f"{ref.path}: metadata.json does not say which adapters it has")
        return SavedAdapters(ref=ref, part=part, config=found, source=CheckpointSource(ref, prefix=prefix))

    def targets(self, groups: Sequence[TargetGroup]) -> tuple[TargetGroup, ...]:
        """The groups of a model that it adapts, with their ranks.

        Args:
            groups: all of the model's.

        Raises:
            CheckpointMismatchError: they are not those of the checkpoint.
        """
        try:
            found = find_targets(groups, self.config)
        except AdapterError as error:
            raise CheckpointMismatchError(f"{self.where}: its adapters do not go with the model:\n{error}") from error
        here, there = {group.path: group.rank for group in found}, dict(self.part.adapters or {})
        if here != there:
            others = sorted(here.items() ^ there.items())
            raise CheckpointMismatchError(
                f"{self.where}: its adapters are of other projections than the model has: {_some(others)}"
            )
        return found

    def tree(self, targets: Sequence[TargetGroup], whole: PyTree = None) -> Adapters:
        """Its factors and whole copies, without memory.

        Args:
            targets: from `targets`.
            whole: the part of the model, abstract, of which it has whole copies; None for nothing.
        """
        return abstract(lambda part: Adapters.init(targets, self.config, key=jax.random.PRNGKey(0), whole=part), whole)

    def check_base(self, rules: WeightRules, own: Sequence[Leaf], source: TensorSource) -> int:
        """Compares the small arrays of a model with those that the adapters were trained on.

        Args:
            rules: where the model's leaves come from.
            own: its leaves.
            source: its tensors.

        Returns:
            How many arrays were compared.

        Raises:
            CheckpointMismatchError: some differ; says which, and where both come from.
        """
        if self.part.dtype is None:
            return 0
        dtype = _dtype(self.part.dtype)
        table = rules.by_target()
        small = [
            replace(leaf, dtype=dtype)
            for leaf in own
            if leaf.path in self.part.digests and leaf.path in table and _size(leaf) * dtype.itemsize <= COMPARED_BYTES
        ]
        found = {leaf.path: digest_on_host(x) for leaf, x in _read(small, rules, source)}
        if others := sorted(path for path, digest in found.items() if digest != self.part.digests[path]):
            raise CheckpointMismatchError(
                f"{self.where}: its adapters were trained on another model: {len(others)} of the {len(found)} arrays "
                f"that were compared differ ({_some(others)}); the one that they were trained on came from "
                f"{self.part.origin}"
            )
        return len(found)


def _read(own: Sequence[Leaf], rules: WeightRules, source: TensorSource):
    """Leaves in the memory of this host, one after another."""
    for leaf in own:
        whole = np.zeros(leaf.shape, leaf.dtype)
        for name, (_, pieces) in rules.sources([leaf]).items():
            held = next(other for other in rules.spellings(name) if other in source.tensors)
            values = source.read(held, tuple(slice(0, size) for size in source.tensors[held].shape))
            for piece in pieces:
                # Rounded as it is when it is loaded.
                piece.read(values.astype(leaf.dtype), whole[tuple(slice(start, stop) for start, stop in piece.box)])
        yield leaf, whole


def _size(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _some(found: Sequence[object]) -> str:
    more = f", … {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more
