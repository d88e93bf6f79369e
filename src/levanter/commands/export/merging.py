"""Merging an adapter into its base while the base is exported."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import haliax as hax
import numpy as np

from haliax_ext.abstract import Leaf, leaves
from haliax_ext.pytree import PyTree
from haliax_ext.rules import WeightMismatchError, WeightRules
from haliax_ext.saving import Readable
from haliax_ext.sources import Index, TensorSource
from levanter.checkpoint import CheckpointMismatchError
from levanter.commands.model.saved_adapters import SavedAdapters
from levanter.commands.model.source import ModelSource
from levanter.compat.hf.errors import CheckpointError, MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.peft import PeftAdapter, UnsupportedTargetError, lazy_adapter, open_peft, plan_peft
from levanter.compat.hf.peft.config import MERGE_FIRST
from levanter.compat.hf.peft.merge import MergedTensors, copied_tensors, stored_leaves
from levanter.models.adapters.lora_targets import TargetGroup, target_groups
from levanter.models.adapters.whole import select_leaves
from levanter.models.registry import LmConfig
from levanter.runplan import Check


@dataclass(frozen=True, kw_only=True, eq=False)
class Merge:
    """A base and the adapter that is merged into it.

    Attributes:
        stored: the leaves of the base, with the dtypes that they are stored in.
        rules: of its weights.
        adapter: the adapter; None if it is not available here.
        targets: the modules that it changes.
        saved: our checkpoint that contains it; None if it is in files of peft.
        whole: paths of the leaves of which the adapter has whole copies.
    """

    stored: tuple[Leaf, ...]
    rules: WeightRules
    adapter: PeftAdapter | None
    targets: tuple[TargetGroup, ...]
    saved: SavedAdapters | None = None
    whole: tuple[str, ...] = ()

    def tensors(self, source: TensorSource) -> MergedTensors:
        """The base's tensors with the adapter merged, read on access."""
        assert self.adapter is not None, "a plan without its adapter must not run: RunPlan.check() comes first"
        # Our checkpoints record digests of the base, which is compared before anything is merged.
        if self.saved is not None:
            self.saved.check_base(self.rules, self.stored, source)
        return MergedTensors(
            source=source,
            rules=self.rules,
            adapter=self.adapter,
            targets=self.targets,
            copies=copied_tensors(self.stored, self.rules, self.whole),
        )


def find_merge(
    adapter_path: str | None,
    origin: ModelSource,
    model: LmConfig,
    Vocab: hax.Axis,
    module: PyTree,
    model_leaves: Sequence[Leaf],
) -> tuple[Merge, list[Check]]:
    """Plans the merge of an adapter into a checkpoint; reads headers only.

    Args:
        adapter_path: path of the adapter; None for the adapters of the checkpoint.
        origin: the checkpoint.
        model: its architecture, with `vocab_size`.
        Vocab: rows of its embedding.
        module: the model, abstract.
        model_leaves: its leaves.
    """
    rules = model.weight_rules(Vocab)
    source = None if origin.checkpoint is None else origin.checkpoint.source
    stored = stored_leaves(model_leaves, rules, source, origin.stored)
    # With the base's leaves alone the export can still be planned in full if the adapter is absent.
    nothing = Merge(stored=stored, rules=rules, adapter=None, targets=())
    try:
        if origin.has_int8:
            raise CheckpointError(
                origin.description,
                "its weights are 8-bit integers, to which nothing can be added; merge into the checkpoint before it "
                "was quantized",
            )
        # Names and shapes first: a wrong base is reported as such, not as a wrong adapter.
        if source is not None:
            rules.match(stored, source.tensors)
        every = target_groups(module, rules)
        if adapter_path is None:
            adapter, targets, whole = _of_checkpoint(origin, every, rules, module)
        else:
            adapter = open_peft(adapter_path).per_expert(every).uniform(every, rules)
            assert model.vocab_size is not None
            resized = adapter.resized_vocabulary(model_leaves, rules, model.vocab_size)
            if resized != model.vocab_size:
                problem = f"its vocabulary was resized from {model.vocab_size} to {resized}, which is not merged here"
                raise CheckpointError(adapter.where, problem, suggestion=MERGE_FIRST)
            whole = adapter.copied_paths(model_leaves, rules)
            targets = adapter.targets(every, rules, select_leaves(module, whole))
    # Files that are absent here may exist where the export runs.
    except (MissingCheckpointFileError, UnreachableError) as error:
        return nothing, [Check(name="adapter", status="unchecked", message=str(error), error=error)]
    except (CheckpointError, CheckpointMismatchError, WeightMismatchError, UnsupportedTargetError) as error:
        return nothing, [Check(name="adapter", status="error", message=str(error), error=error)]
    copies = f", and {len(whole)} arrays whole" if whole else ""
    ranks = _ranks_text({group.rank for group in targets})
    message = f"{adapter.where}: {len(targets)} kinds of modules, rank {ranks}{copies}"
    checks = [Check(name="adapter", status="ok", message=message)]
    # A base is often copied under another name, so a different name is only noted.
    if adapter_path is not None and adapter.config.base is not None and adapter.config.base != origin.reference:
        message = f"the adapter's config names the base {adapter.config.base}; it is merged into {origin.reference}"
        checks.append(Check(name="adapter", status="note", message=message))
    saved = origin.adapters if adapter_path is None else None
    return replace(nothing, adapter=adapter, targets=targets, saved=saved, whole=whole), checks


def _of_checkpoint(
    origin: ModelSource, every: Sequence[TargetGroup], rules: WeightRules, module: PyTree
) -> tuple[PeftAdapter, tuple[TargetGroup, ...], tuple[str, ...]]:
    """The adapter of one of our checkpoints, its target modules, and the paths of its whole copies."""
    saved = origin.adapters
    assert saved is not None
    # With rules of its own the base is one of our checkpoints, not Hugging Face files.
    if origin.rules is not None:
        raise CheckpointError(
            saved.where,
            f"its adapters are of a checkpoint of ours ({saved.part.origin}), and are merged into Hugging Face files "
            "only; export that checkpoint, and merge what peft_save_path has into the export",
        )
    targets = saved.targets(every)
    # The adapter is read in peft's form, so that both sources of adapters share one merge.
    adapter_leaves = leaves(saved.tree(targets, select_leaves(module, saved.part.whole)))
    plan = plan_peft(targets, every, rules, adapter_leaves, use_rslora=saved.config.use_rslora, base=origin.reference)
    # Lazy: a factor is read when its tensor is merged, in the slices that the merge needs.
    adapter = lazy_adapter(plan, Slices(saved.source), where=saved.where).per_expert(every)
    return adapter, targets, saved.part.whole


class Slices(Mapping[str, Readable]):
    """The tensors of a source, each read slice by slice."""

    def __init__(self, source: TensorSource):
        self._source = source

    def __getitem__(self, path: str) -> Readable:
        return _Slices(self._source, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.tensors)

    def __len__(self) -> int:
        return len(self._source.tensors)


@dataclass(frozen=True)
class _Slices:
    source: TensorSource
    path: str

    # Reads the requested slice from the files, nothing else.
    def __getitem__(self, index: Index, /) -> np.ndarray:
        return self.source.read(self.path, index)


def _ranks_text(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
