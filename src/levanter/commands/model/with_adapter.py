"""A pretrained model with an adapter bound to it, loaded from the files of both."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray

from haliax_ext.abstract import abstract, cast, leaves
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightRules
from haliax_ext.sources import AdjacentSource, ByteRange, Index, RemoteAccess, RemoteSource, TensorInfo, TensorSource
from levanter.checkpoint import CheckpointMismatchError, same_names
from levanter.commands.model.saved_adapters import SavedAdapters
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.peft import PeftAdapter, open_peft
from levanter.compat.hf.peft.names import peft_rules
from levanter.models.adapters.lora_targets import TargetGroup, target_groups
from levanter.models.adapters.tree import Adapters, factors
from levanter.models.adapters.whole import copy_path, leaf_paths, select_leaves
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check

Adapter = PeftAdapter | SavedAdapters
"""The files of an adapter: what peft or `peft_save_path` wrote, or one of our checkpoints."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedModel:
    """A model with an adapter.

    Attributes:
        module: with the adapter bound, abstract.
        rules: where its leaves come from: the base's files, and the adapter's.
        adapter: the adapter's files.
    """

    module: PyTree
    rules: WeightRules
    adapter: Adapter


def find_adapted(
    adapter: str | SavedAdapters | None,
    module: PyTree,
    rules: WeightRules,
    config: LmConfig,
    Vocab: hax.Axis,
    precision: Precision,
) -> tuple[AdaptedModel | None, list[Check]]:
    """The model with an adapter; None, and why, where there is none or it cannot be bound.

    Args:
        adapter: the path of one as peft or `peft_save_path` wrote it; that of a checkpoint of ours; None for none.
        module: the model, abstract; projections of it may be integers.
        rules: where its leaves come from.
        config: its architecture, with `vocab_size`.
        Vocab: rows of its embedding.
        precision: in whose compute dtype the factors are loaded.
    """
    if adapter is None:
        return None, []
    named = config.weight_rules(Vocab)
    try:
        if isinstance(adapter, SavedAdapters):
            opened, targets = adapter, adapter.targets(target_groups(module, named))
            part = _copied(module, adapter.part.whole, adapter.where)
            tree = cast(opened.tree(targets, part), precision.compute)
            own = same_names(leaves(tree), padded=adapter.padded)
        else:
            every = target_groups(module, named)
            opened = open_peft(adapter).per_expert(every)
            plain = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
            part = _copied(module, opened.copied_paths(leaves(plain), named), opened.where)
            targets = opened.targets(every, named, part)
            tree = cast(opened.tree(targets, part), precision.compute)
            own = peft_rules(targets, named, leaf_paths(part))
    except (MissingCheckpointFileError, UnreachableError) as error:
        return None, [Check(name="adapter", status="unchecked", message=str(error), error=error)]
    except (CheckpointError, CheckpointMismatchError) as error:
        return None, [Check(name="adapter", status="error", message=str(error), error=error)]
    ranks = ", ".join(str(rank) for rank in sorted({group.rank for group in targets}))
    copies = f", and {len(whole)} arrays whole" if (whole := leaf_paths(part)) else ""
    message = f"{opened.where}: of {len(targets)} kinds of projections, rank {ranks}{copies}"
    found = AdaptedModel(module=tree.bound_to(module), rules=_bound(rules, own, targets, tree), adapter=opened)
    return found, [Check(name="adapter", status="ok", message=message)]


def _bound(rules: WeightRules, own: WeightRules, targets: Sequence[TargetGroup], tree: Adapters) -> WeightRules:
    """Where the leaves of the bound model come from.

    Args:
        rules: where those of the base do.
        own: where those of the factors do.
        targets: what is adapted.
        tree: the factors.
    """
    table = own.by_target()
    adapted = {f"{member.path}.weight" for group in targets for member in group.members}
    read = {rule.path for rule in rules.derived}

    def moved(path: str) -> str:
        """The path of a base's leaf in the bound model: of its matrix, or of a part of that."""
        whole = next((each for each in adapted if path == each or path.startswith(f"{each}.")), None)
        return path if whole is None else f"{whole}.base{path.removeprefix(whole)}"

    # A copy is read in the place of what it is of.
    copies = {path: replace(table[copy_path(path)], target=path) for path in leaf_paths(tree.whole)}
    used = (copies.get(rule.target, rule) for rule in rules.rules)
    # What is read to be derived from is no leaf.
    base = (rule if rule.target in read else replace(rule, target=moved(rule.target)) for rule in used)
    derived = tuple(
        replace(rule, targets=tuple(map(moved, rule.targets)), like=moved(rule.like), derive=_Moved(rule.derive, moved))
        for rule in rules.derived
    )
    of_factors = (replace(table[factor.adapter_path], target=factor.bound_path) for factor in factors(tree))
    aliases = (*rules.aliases, *own.aliases)
    unread = (_any(name) for rule in rules.rules if rule.target in copies for name in rules.spellings(rule.source))
    ignored = (*rules.ignored, *own.ignored, *unread)
    return replace(rules, rules=(*base, *of_factors), derived=derived, aliases=aliases, ignored=ignored)


def _any(source: str) -> str:
    """A pattern of the names of a rule's tensors."""
    return re.sub(r"\{[^{}]*\}", "*", source)


def _copied(module: PyTree, whole: Sequence[str], where: str) -> PyTree:
    """The part of a model of which there are whole copies.

    Raises:
        CheckpointError: some of it is held in integers.
    """
    if absent := set(whole) - {leaf.path for leaf in leaves(module)}:
        raise CheckpointError(
            where,
            f"it has whole copies of {', '.join(sorted(absent))}, which would be 8-bit integers; leave quantize out, "
            "or merge the adapter into its base before that is quantized",
        )
    return select_leaves(module, whole)


@dataclass(frozen=True)
class _Moved:
    """What is derived, under the paths that it has in a bound model."""

    derive: Callable[[NamedArray], Mapping[str, NamedArray]]
    path: Callable[[str], str]

    def __call__(self, weight: NamedArray) -> Mapping[str, NamedArray]:
        return {self.path(path): x for path, x in self.derive(weight).items()}


class WithAdapter:
    """The tensors of a base and of its adapter, as one source.

    Args:
        base: the base's.
        adapter: the adapter's.
    """

    def __init__(self, base: TensorSource, adapter: TensorSource):
        self._base, self._adapter = base, adapter
        self._tensors = {**base.tensors, **adapter.tensors}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, the base's first."""
        return self._tensors

    @property
    def remote(self) -> RemoteAccess | None:
        """The base's files, where they are on another machine."""
        return self._base.remote if isinstance(self._base, RemoteSource) else None

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """See `TensorSource`."""
        return self._of(name).byte_ranges(name, index)

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        return self._of(name).read(name, index, out)

    def read_adjacent(self, slices: Sequence[tuple[str, Index, np.ndarray]]) -> None:
        """See `AdjacentSource`; what follows one another is in one file, and so of one of the two."""
        source = self._of(slices[0][0])
        if isinstance(source, AdjacentSource):
            source.read_adjacent(slices)
            return
        for name, index, out in slices:
            source.read(name, index, out)

    def _of(self, name: str) -> TensorSource:
        return self._adapter if name in self._adapter.tensors else self._base
