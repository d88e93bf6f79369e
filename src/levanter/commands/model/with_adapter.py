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
from levanter.models.adapters.lora import Adapters, factors
from levanter.models.adapters.lora_targets import TargetGroup, target_groups
from levanter.models.adapters.whole import copy_path, leaf_paths, select_leaves
from levanter.models.precision import Precision
from levanter.models.registry import LmConfig
from levanter.runplan import Check

Adapter = PeftAdapter | SavedAdapters
"""The files of an adapter: in peft's format, or a checkpoint of `train_lm`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedModel:
    """A model with an adapter.

    Attributes:
        module: with the adapter bound, abstract.
        rules: weight rules of its leaves, from the files of the base and of the adapter.
        adapter: the adapter's files.
    """

    module: PyTree
    rules: WeightRules
    adapter: Adapter


def adapted_architecture(adapter: str | None, config: LmConfig) -> tuple[LmConfig, list[Check]]:
    """The architecture of a model with an adapter: with the adapter's vocabulary, if the base's was resized for it.

    Args:
        adapter: the path of an adapter in peft's format; None for none.
        config: the base's architecture.

    Returns:
        The architecture, and a note if it is not the base's. Errors are left to `bind_adapter`.
    """
    if adapter is None or config.vocab_size is None:
        return config, []
    Vocab = hax.Axis("vocab", config.vocab_size)
    module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    try:
        size = open_peft(adapter).resized_vocabulary(leaves(module), config.weight_rules(Vocab), config.vocab_size)
    except (CheckpointError, UnreachableError):
        return config, []
    if size == config.vocab_size:
        return config, []
    message = f"{adapter}: trained with {size} ids, which replace the {config.vocab_size} of the base"
    return replace(config, vocab_size=size), [Check(name="adapter", status="note", message=message)]


def bind_adapter(
    adapter: str | SavedAdapters | None,
    module: PyTree,
    rules: WeightRules,
    config: LmConfig,
    Vocab: hax.Axis,
    precision: Precision,
) -> tuple[AdaptedModel | None, list[Check]]:
    """Binds an adapter to a model; returns None with checks if there is none or it does not match.

    Args:
        adapter: the path of an adapter in peft's format; the adapters of a checkpoint; None for none.
        module: the model, abstract; its projections may be integers.
        rules: the weight rules of its leaves.
        config: its architecture, with `vocab_size`.
        Vocab: rows of its embedding.
        precision: the dtype policy; factors are loaded in its compute dtype.
    """
    if adapter is None:
        return None, []
    # Targets are defined by the family's names, also for a quantized module.
    family_rules = config.weight_rules(Vocab)
    try:
        if isinstance(adapter, SavedAdapters):
            opened, targets = adapter, adapter.targets(target_groups(module, family_rules))
            part = _copied_part(module, adapter.part.whole, adapter.where)
            tree = cast(opened.tree(targets, part), precision.compute)
            # Our own checkpoints store adapters by leaf path.
            adapter_rules = same_names(leaves(tree), padded=adapter.padded)
        else:
            groups = target_groups(module, family_rules)
            opened = open_peft(adapter).per_expert(groups).uniform(groups, family_rules)
            # The unquantized model: copies in peft's files have the shapes of plain weights.
            plain = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
            assert config.vocab_size is not None
            opened.resized_vocabulary(leaves(plain), family_rules, config.vocab_size)
            part = _copied_part(module, opened.copied_paths(leaves(plain), family_rules), opened.where)
            targets = opened.targets(groups, family_rules, part)
            tree = cast(opened.tree(targets, part), precision.compute)
            adapter_rules = peft_rules(targets, family_rules, leaf_paths(part))
    except (MissingCheckpointFileError, UnreachableError) as error:
        return None, [Check(name="adapter", status="unchecked", message=str(error), error=error)]
    except (CheckpointError, CheckpointMismatchError) as error:
        return None, [Check(name="adapter", status="error", message=str(error), error=error)]
    ranks = ", ".join(str(rank) for rank in sorted({group.rank for group in targets}))
    copies = f", with full copies of {len(whole)} arrays" if (whole := leaf_paths(part)) else ""
    message = f"{opened.where}: adapts {len(targets)} kinds of projections, rank {ranks}{copies}"
    adapted = AdaptedModel(
        module=tree.bound_to(module), rules=_bound_rules(rules, adapter_rules, targets, tree), adapter=opened
    )
    return adapted, [Check(name="adapter", status="ok", message=message)]


def _bound_rules(
    rules: WeightRules, adapter_rules: WeightRules, targets: Sequence[TargetGroup], tree: Adapters
) -> WeightRules:
    """The weight rules of the bound model.

    Args:
        rules: weight rules of the base.
        adapter_rules: weight rules of the factors.
        targets: the adapted projections.
        tree: the factors.
    """
    table = adapter_rules.by_target()
    # Weights whose leaves move one element deeper.
    adapted = {f"{member.path}.weight" for group in targets for member in group.members}
    read = {rule.path for rule in rules.derived}

    def bound_path(path: str) -> str:
        """The path of a base leaf in the bound model, where an adapted matrix is one element deeper (`.base`)."""
        # Quantized weights have two leaves below the weight's path (`.q`, `.scale`), hence the prefix.
        whole = next((weight for weight in adapted if path == weight or path.startswith(f"{weight}.")), None)
        return path if whole is None else f"{whole}.base{path.removeprefix(whole)}"

    # A full copy is read instead of the array that it copies.
    copies = {path: replace(table[copy_path(path)], target=path) for path in leaf_paths(tree.whole)}
    used = (copies.get(rule.target, rule) for rule in rules.rules)
    # The source of a load transform is no leaf of the model, so its path does not move.
    base = (rule if rule.target in read else replace(rule, target=bound_path(rule.target)) for rule in used)
    derived = tuple(
        replace(
            rule,
            targets=tuple(map(bound_path, rule.targets)),
            like=bound_path(rule.like),
            derive=_WithBoundPaths(rule.derive, bound_path),
        )
        for rule in rules.derived
    )
    of_factors = (replace(table[factor.adapter_path], target=factor.bound_path) for factor in factors(tree))
    aliases = (*rules.aliases, *adapter_rules.aliases)
    # Tensors that a copy replaces stay in the base's files unread, and must not count as unexpected.
    unread = (
        _name_pattern(name) for rule in rules.rules if rule.target in copies for name in rules.spellings(rule.source)
    )
    ignored = (*rules.ignored, *adapter_rules.ignored, *unread)
    return replace(rules, rules=(*base, *of_factors), derived=derived, aliases=aliases, ignored=ignored)


def _name_pattern(source: str) -> str:
    """A glob that matches the names of a rule's tensors."""
    return re.sub(r"\{[^{}]*\}", "*", source)


def _copied_part(module: PyTree, whole: Sequence[str], where: str) -> PyTree:
    """The part of a model that an adapter has full copies of.

    Raises:
        CheckpointError: some of it is quantized.
    """
    if absent := set(whole) - {leaf.path for leaf in leaves(module)}:
        raise CheckpointError(
            where,
            f"it has full copies of {', '.join(sorted(absent))}, which would be 8-bit integers; remove quantize, "
            "or merge the adapter into its base before quantizing",
        )
    return select_leaves(module, whole)


@dataclass(frozen=True)
class _WithBoundPaths:
    """A load transform whose results have the paths of the bound model."""

    derive: Callable[[NamedArray], Mapping[str, NamedArray]]
    path: Callable[[str], str]

    def __call__(self, weight: NamedArray) -> Mapping[str, NamedArray]:
        return {self.path(path): x for path, x in self.derive(weight).items()}


class WithAdapter:
    """The tensors of a base and of its adapter, as one source.

    Args:
        base: tensors of the base.
        adapter: tensors of the adapter.
    """

    def __init__(self, base: TensorSource, adapter: TensorSource):
        self._base, self._adapter = base, adapter
        # Names cannot clash: the adapter's tensors have peft's or a checkpoint's names.
        self._tensors = {**base.tensors, **adapter.tensors}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, the base's first."""
        return self._tensors

    @property
    def remote(self) -> RemoteAccess | None:
        """Remote access to the base's files, if they are on another machine."""
        # Adapter files are small, so only the base's access matters.
        return self._base.remote if isinstance(self._base, RemoteSource) else None

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """See `TensorSource`."""
        return self._source(name).byte_ranges(name, index)

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        return self._source(name).read(name, index, out)

    def read_adjacent(self, slices: Sequence[tuple[str, Index, np.ndarray]]) -> None:
        """See `AdjacentSource`; adjacent slices are in one file and so belong to one of the two sources."""
        source = self._source(slices[0][0])
        if isinstance(source, AdjacentSource):
            source.read_adjacent(slices)
            return
        for name, index, out in slices:
            source.read(name, index, out)

    def _source(self, name: str) -> TensorSource:
        return self._adapter if name in self._adapter.tensors else self._base
