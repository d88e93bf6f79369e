"""Reads peft's adapters; their targets and ranks are determined by tensor names and shapes alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from haliax_ext.abstract import Leaf, abstract, leaves, with_arrays
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightMismatchError, WeightRules
from haliax_ext.sources import TensorSource
from levanter.compat.hf.errors import CheckpointError, CorruptFileError, MissingCheckpointFileError, raise_if
from levanter.compat.hf.locate import locate_first
from levanter.compat.hf.peft.config import CONFIG, MERGE_FIRST, WEIGHTS, PeftConfig, read_peft_config
from levanter.compat.hf.peft.experts import split_experts
from levanter.compat.hf.peft.names import BASE, PREFIX, A, B, module_names, peft_rules
from levanter.compat.hf.peft.normal_form import merge_tables, uniform_layers
from levanter.compat.hf.repository import read_json, require_file
from levanter.compat.hf.safetensors import SafetensorsSource
from levanter.compat.hf.tied import same_values
from levanter.models.adapters.config import LoraConfig
from levanter.models.adapters.lora import Adapters
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.whole import leaf_paths
from levanter.models.param_groups import EMBEDDING, HEAD, parameter_group

PICKLED = "adapter_model.bin"


@dataclass(frozen=True, kw_only=True, eq=False)
class PeftAdapter:
    """An opened adapter.

    Attributes:
        where: its name in messages.
        config: its `adapter_config.json`.
        source: its tensors.
        tables: names of the embedding tables that it has factors of; `source` has them with their product added.
    """

    where: str
    config: PeftConfig
    source: TensorSource
    tables: frozenset[str] = frozenset()

    def per_expert(self, groups: Sequence[TargetGroup]) -> "PeftAdapter":
        """The adapter with separate factors for each expert, if the file fuses them over all experts of a layer.

        Args:
            groups: all groups of the model.

        Raises:
            CheckpointError: the fused factors fit no experts of the model.
        """
        source, config = split_experts(self.source, self.config, groups, where=self.where)
        return replace(self, source=source, config=config)

    def uniform(self, groups: Sequence[TargetGroup], rules: WeightRules) -> "PeftAdapter":
        """The adapter with one rank and one scale for the layers of a stack, as a model of ours holds it.

        The function is the same. Ranks that a layer lacked are zeros, in which training would change nothing.

        Args:
            groups: all groups of the model.
            rules: of the model's weights.

        Raises:
            CheckpointError: the ranks of factors are not those of `adapter_config.json`; lists all.
        """
        source, config = uniform_layers(self.source, self.config, groups, rules, where=self.where)
        return replace(self, source=source, config=config)

    def resized_vocabulary(self, model_leaves: Sequence[Leaf], rules: WeightRules, vocab_size: int) -> int:
        """The vocabulary size of the model: that of the adapter's own tables, if it was trained with another one.

        peft then writes the table and the output head by itself, and with them the adapter is complete.

        Args:
            model_leaves: the base's leaves.
            rules: the weight rules of the base.
            vocab_size: the base's vocabulary size.

        Raises:
            CheckpointError: it has only some of the tables, or tables of several sizes; lists all.
        """
        table = rules.by_target()
        by_rows = [leaf for leaf in model_leaves if "vocab" in leaf.names and leaf.path in table]
        sizes: dict[str, int | None] = {}
        for leaf in by_rows:
            name = table[leaf.path].source
            spellings = list(_table_names(name, rules))
            names = [*spellings, *(f"{spelling.removesuffix('.weight')}{BASE}" for spelling in spellings)]
            stored = next((self.source.tensors[other] for other in names if other in self.source.tensors), None)
            # Rows are the first axis of tables and heads in all formats.
            sizes[name] = None if stored is None or len(stored.shape) != 2 else stored.shape[0]
        # Tables that the adapter lacks are the base's, and have its number of rows.
        resized = {size for size in sizes.values() if size is not None} - {vocab_size}
        if not resized:
            return vocab_size
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name}: {size or 'none'}" for name, size in sizes.items())
            raise CheckpointError(
                self.where,
                f"its vocabulary was resized from {vocab_size}, and its tables have {listed} rows",
                suggestion=MERGE_FIRST,
            )
        return resized.pop()

    def copied_paths(self, model_leaves: Sequence[Leaf], rules: WeightRules) -> tuple[str, ...]:
        """The paths of a model's parameters that the adapter replaces by full copies.

        Args:
            model_leaves: the model's leaves.
            rules: the weight rules of the model.

        Raises:
            CheckpointError: the model's weights are tied, and the adapter has different tables for head and tokens.
        """
        table = rules.by_target()
        stored = frozenset(self.source.tensors)

        def is_stored(name: str) -> bool:
            return any(
                spelling in stored or f"{spelling.removesuffix('.weight')}{BASE}" in stored
                for spelling in _table_names(name, rules)
            )

        paths = tuple(
            leaf.path
            for leaf in model_leaves
            if leaf.path in table and any(is_stored(name) for name in table[leaf.path].source_names(leaf))
        )
        # A model without a leaf of the head ties the head to its embedding table.
        if HEAD in {parameter_group(leaf) for leaf in model_leaves}:
            return paths
        for leaf in model_leaves:
            if leaf.path in paths and parameter_group(leaf) == EMBEDDING and "vocab" in leaf.names:
                self._check_tied(table[leaf.path].source, rules)
        return paths

    def _check_tied(self, name: str, rules: WeightRules) -> None:
        """Refuses a copy of a tied model's embedding table that is not the output head's too.

        Args:
            name: the table's name in the base.
            rules: the weight rules of the model.
        """
        stored = self.source.tensors
        here = next(other for other in _table_names(name, rules) if other in stored)
        if here in self.tables:
            raise CheckpointError(
                self.where,
                f"{name}: it adapts the embedding table of a model whose output head is that table (tied weights), and "
                "the head keeps the one of the base",
                suggestion=MERGE_FIRST,
            )
        module = name.removesuffix(".weight")
        # A table that peft saved by itself (of a resized vocabulary) is loaded into the base's, which both share. Its
        # copy under the head's name must be equal.
        heads = [f"{PREFIX}{head}" for head in rules.ignored if "*" not in head and f"{PREFIX}{head}" in stored]
        is_shared = not any(module.endswith(saved) for saved in self.config.saved) and all(
            same_values(self.source, here, self.source, head) for head in heads if head != here
        )
        if not (self.config.tied or is_shared):
            raise CheckpointError(
                self.where,
                "modules_to_save has the embedding table of a model whose output head is that table (tied "
                "weights), and the head kept the one of the base: with ensure_weight_tying: true both are the "
                "copy, and nothing else is implemented",
                suggestion=MERGE_FIRST,
            )

    def targets(
        self, groups: Sequence[TargetGroup], rules: WeightRules, whole: PyTree = None
    ) -> tuple[TargetGroup, ...]:
        """The groups of a model that the adapter has factors for, with their ranks.

        Args:
            groups: all groups of the model.
            rules: of the model's weights.
            whole: the abstract part of the model that the adapter has full copies of; None for nothing.

        Raises:
            CheckpointError: it adapts only some of the stacked layers, or with different ranks, or nothing.
            WeightMismatchError: it has tensors that fit no projection of the model, or have another shape.
        """
        problems: list[str] = []
        adapted: list[TargetGroup] = []
        # Needed only for the alternative spellings of a factor's name.
        rank_rules = peft_rules([group for group in groups if group.source is not None], rules)
        for group in groups:
            if group.source is None:
                continue
            ranks = {module: self._rank(module, rank_rules) for module in module_names(group)}
            if all(rank is None for rank in ranks.values()):
                continue
            # Layers are stacked in one array, so a factor must exist for all of them or for none.
            absent = [module for module, rank in ranks.items() if rank is None]
            if absent:
                problems.append(
                    f"{absent[0]} has no adapter, and {len(ranks) - len(absent)} of the {len(ranks)} modules of its "
                    "kind have one; adapters of some layers only (layers_to_transform) are not trained"
                )
                continue
            first = next(iter(ranks))
            alphas = {self.config.module_alpha(module) for module in ranks}
            if len(set(ranks.values())) > 1 or len(alphas) > 1:
                problems.append(
                    f"{group.source}: layers have different ranks or values of alpha (rank_pattern, alpha_pattern), "
                    "which layers that are stacked cannot be trained with"
                )
                continue
            rank = ranks[first]
            assert rank is not None
            # The shapes determine the rank; adapter_config.json must agree, since it determines the scale alpha / r.
            if rank != self.config.module_rank(first):
                problems.append(f"{first}: rank {rank}, but {CONFIG} says {self.config.module_rank(first)}")
            adapted.append(replace(group, rank=rank, alpha=self.config.module_alpha(first)))
        # What is not a factor is a full copy of a module.
        copied = {name.removeprefix(PREFIX).rsplit(".", 1)[0] for name in self.source.tensors if not _is_factor(name)}
        problems += [
            f"modules_to_save: {name!r}, and it has no tensor of a module of that name"
            for name in self.config.saved
            if not any(module.removesuffix(".base_layer").endswith(name) for module in copied)
        ]
        raise_if(CheckpointError, self.where, problems)
        self._match(adapted, rules, whole)
        if not adapted and not leaf_paths(whole):
            raise CheckpointError(self.where, "it has no adapter of any projection")
        return tuple(adapted)

    def _rank(self, module: str, rules: WeightRules) -> int | None:
        for name in rules.spellings(f"{PREFIX}{module}{A}"):
            if name in self.source.tensors:
                # A tensor with another number of axes gets rank 0, which the match below reports with its shape.
                shape = self.source.tensors[name].shape
                return shape[0] if len(shape) == 2 else 0
        return None

    def _match(self, groups: Sequence[TargetGroup], rules: WeightRules, whole: PyTree) -> None:
        tree = self.tree(groups, whole)
        table = peft_rules(groups, rules, leaf_paths(whole))
        try:
            table.match(leaves(tree), self.source.tensors)
        except WeightMismatchError as error:
            message = f"it does not go with the model:\n{error}"
            raise CheckpointError(self.where, message, suggestion=f"name its own base, or {MERGE_FIRST}") from error

    def tree(self, groups: Sequence[TargetGroup], whole: PyTree = None) -> Adapters:
        """The factors and full copies as abstract arrays.

        Args:
            groups: from `targets`.
            whole: see `targets`.
        """
        # The ranks and alphas come from the groups; only the kind of scale is a setting of the whole.
        shaped = LoraConfig(use_rslora=self.config.use_rslora)
        return abstract(lambda part: Adapters.init(groups, shaped, key=jax.random.PRNGKey(0), whole=part), whole)

    def read(
        self,
        groups: Sequence[TargetGroup],
        rules: WeightRules,
        whole: PyTree = None,
        *,
        true_sizes: Mapping[str, int] | None = None,
    ) -> Adapters:
        """Reads the factors and full copies into float32 arrays in host memory.

        Args:
            groups: from `targets`.
            rules: of the model's weights.
            whole: see `targets`.
            true_sizes: sizes, in the file, of axes that are longer in the model; zeros fill the rest.

        Raises:
            CorruptFileError: a factor holds numbers that are not finite; lists all of these.
        """
        tree = self.tree(groups, whole)
        table, by_path = peft_rules(groups, rules, leaf_paths(whole)), {leaf.path: leaf for leaf in leaves(tree)}
        arrays = {path: np.zeros(leaf.shape, np.float32) for path, leaf in by_path.items()}
        problems: list[str] = []
        for name, (_, pieces) in table.sources(by_path.values(), true_sizes=true_sizes).items():
            stored_name = next(other for other in table.spellings(name) if other in self.source.tensors)
            info = self.source.tensors[stored_name]
            values = self.source.read(stored_name, tuple(slice(0, size) for size in info.shape)).astype(np.float32)
            # A NaN or infinity in a factor would spread to every activation, far from its cause.
            if not np.isfinite(values).all():
                problems.append(f"{stored_name}: {int((~np.isfinite(values)).sum()):,} numbers are not finite")
            # One tensor may fill several leaves (parts of a fused B); `box` is the region of the leaf.
            for piece in pieces:
                block = arrays[piece.target][tuple(slice(start, stop) for start, stop in piece.box)]
                piece.read(values, block)
        raise_if(CorruptFileError, self.where, problems)
        return with_arrays(tree, arrays)


def _table_names(name: str, rules: WeightRules) -> Iterator[str]:
    """The names of a base's tensor in an adapter; of a tied table not that of the output head, which is its copy."""
    return (f"{PREFIX}{spelling}" for spelling in rules.spellings(name) if spelling not in rules.ignored)


def _is_factor(name: str) -> bool:
    return name.endswith((A, B))


def open_peft(reference: str) -> PeftAdapter:
    """Opens an adapter: reads its configuration and the header of its weights.

    Args:
        reference: a folder, a hub id, or a URL.

    Raises:
        CheckpointError: it is not an adapter, is damaged, or sets an option that is not implemented.
    """
    repository = locate_first(reference).repository
    if CONFIG not in repository.files and "config.json" in repository.files:
        raise MissingCheckpointFileError(
            repository.name, f"it is a model and not an adapter: there is no {CONFIG}, but a config.json"
        )
    document = read_json(repository, CONFIG, purpose="what an adapter of peft is described by")
    config = read_peft_config(document, where=repository.where(CONFIG))
    if WEIGHTS not in repository.files and PICKLED in repository.files:
        raise CheckpointError(
            repository.name,
            f"its weights are pickled ({PICKLED}), which could run code",
            suggestion="save it with a newer peft, which writes safetensors",
        )
    require_file(repository, WEIGHTS, purpose="the weights of the adapter")
    source = SafetensorsSource({repository.where(WEIGHTS): repository.reader(WEIGHTS)})
    merged = merge_tables(source, config, where=repository.name)
    tables = frozenset(merged.tensors) - frozenset(source.tensors)
    return PeftAdapter(where=repository.name, config=config, source=merged, tables=tables)
