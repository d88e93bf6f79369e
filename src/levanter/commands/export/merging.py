"""An adapter to be merged into its base while that is exported."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import haliax as hax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightMismatchError, WeightRules
from haliax_ext.sources import TensorSource
from levanter.commands.model.origin import Origin
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.peft import PeftAdapter, open_peft
from levanter.compat.hf.peft.merge import MergedLeaves, stored_leaves
from levanter.models.adapters.targets import TargetGroup, groups_of
from levanter.models.registry import LmConfig
from levanter.run import Check


@dataclass(frozen=True, kw_only=True, eq=False)
class Merge:
    """What is merged.

    Attributes:
        own: the leaves of the base, with the dtypes that they are stored in.
        rules: of its weights.
        adapter: the adapter; None where it is not available here.
        targets: the modules that it changes.
    """

    own: tuple[Leaf, ...]
    rules: WeightRules
    adapter: PeftAdapter | None
    targets: tuple[TargetGroup, ...]

    def leaves(self, source: TensorSource, dtype: np.dtype | None) -> MergedLeaves:
        """The base's leaves with the adapter in them, each read when it is asked for."""
        assert self.adapter is not None, "a plan without its adapter must not run: RunPlan.check() comes first"
        return MergedLeaves(source, self.rules, self.own, self.adapter, self.targets, dtype)


def find_merge(
    adapter_path: str, origin: Origin, model: LmConfig, Vocab: hax.Axis, module: PyTree, own: Sequence[Leaf]
) -> tuple[Merge, list[Check]]:
    """What merging an adapter into a checkpoint means; reads headers only.

    Args:
        adapter_path: where the adapter is.
        origin: the checkpoint.
        model: its architecture, with `vocab_size`.
        Vocab: rows of its embedding.
        module: the model, abstract.
        own: its leaves.
    """
    rules = model.weight_rules(Vocab)
    source = None if origin.checkpoint is None else origin.checkpoint.source
    stored = stored_leaves(own, rules, source, origin.stored)
    nothing = Merge(own=stored, rules=rules, adapter=None, targets=())
    try:
        if origin.has_int8:
            raise CheckpointError(
                origin.description,
                "its weights are 8-bit integers, to which nothing can be added; merge into the checkpoint before it "
                "was quantized",
            )
        if source is not None:
            rules.match(stored, source.tensors)
        adapter = open_peft(adapter_path)
        targets = adapter.targets(groups_of(module, rules), rules)
    except (MissingCheckpointFileError, UnreachableError) as error:
        return nothing, [Check(name="adapter", status="unchecked", message=str(error), error=error)]
    except (CheckpointError, WeightMismatchError) as error:
        return nothing, [Check(name="adapter", status="error", message=str(error), error=error)]
    said = f"{adapter.where}: {len(targets)} kinds of modules, rank {_some({group.rank for group in targets})}"
    checks = [Check(name="adapter", status="ok", message=said)]
    if adapter.config.base is not None and adapter.config.base != origin.reference:
        message = f"the adapter says that it is of {adapter.config.base}; it is merged into {origin.reference}"
        checks.append(Check(name="adapter", status="note", message=message))
    return replace(nothing, adapter=adapter, targets=targets), checks


def _some(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
