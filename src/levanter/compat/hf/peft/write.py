"""Writes an adapter as a folder that peft reads; the folder gets its final name once it is complete."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.rules import SourcePiece, WeightRules
from haliax_ext.saving import OutTensor, Readable, contribute_tensors, gather_tensors, plan_saving
from haliax_ext.sources import ByteRange, Index, TensorInfo
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.export import Shard
from levanter.compat.hf.export_dir import export_dir
from levanter.compat.hf.peft.config import CONFIG, WEIGHTS, PeftConfig, peft_document
from levanter.compat.hf.peft.experts import fuse_experts, is_expert_group, with_new_router
from levanter.compat.hf.peft.names import (
    BASE,
    PREFIX,
    as_pattern,
    is_transposed,
    module_names,
    peft_rules,
    saved_names,
    short_names,
)
from levanter.compat.hf.peft.read import PeftAdapter
from levanter.compat.hf.safetensors import SafetensorsSource
from levanter.distributed.compile_barrier import jit_together
from levanter.io import leased
from levanter.models.adapters.lora_targets import TargetGroup
from levanter.models.adapters.whole import WHOLE, leaf_named
from levanter.models.param_groups import HEAD, parameter_group

Folder = TypeVar("Folder", bound=str | Path)


@dataclass(frozen=True, kw_only=True)
class PeftPlan:
    """The planned content of an adapter's folder.

    Attributes:
        config: the content of `adapter_config.json`.
        transposed: whether the base stores its matrices `[in, out]`.
        tensors: the tensors to write.
    """

    config: PeftConfig
    transposed: bool
    tensors: tuple[OutTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_peft(
    targets: Sequence[TargetGroup],
    all_groups: Sequence[TargetGroup],
    rules: WeightRules,
    adapter_leaves: Sequence[Leaf],
    *,
    use_rslora: bool,
    base: str | None,
    true_sizes: Mapping[str, int] | None = None,
) -> PeftPlan:
    """Plans the files of an adapter; reads no array.

    Args:
        targets: the groups that have factors.
        all_groups: all groups of the model.
        rules: of the model's weights.
        adapter_leaves: the leaves of the factors and full copies.
        use_rslora: see `LoraConfig`.
        base: the base model's name.
        true_sizes: true sizes of axes that are padded in the leaves.

    Raises:
        UnsupportedTargetError: a target has no name in peft's files; lists all.
    """
    expert_groups = [group for group in targets if is_expert_group(group)]
    fused = fuse_experts(targets, rules, adapter_leaves, use_rslora=use_rslora) if expert_groups else None
    # In transformers 5, the experts' router is a parameter and not a Linear, so it is listed with the experts.
    plain = [group for group in targets if group not in expert_groups and not (expert_groups and group.is_router)]
    routers = [group for group in targets if expert_groups and group.is_router]
    whole = tuple(leaf.path.removeprefix(f"{WHOLE}.") for leaf in adapter_leaves if leaf.path.startswith(f"{WHOLE}."))
    table = peft_rules([*plain, *routers], rules, whole)
    paths = table.by_target()
    tensors = plan_saving([leaf for leaf in adapter_leaves if leaf.path in paths], table, true_sizes=true_sizes)
    modules = {module: group for group in plain for module in module_names(group)}
    known = [module for group in all_groups if group.source is not None for module in module_names(group)]
    counted = list(modules.values()) or list(targets)
    # The most frequent values become `r` and `lora_alpha`; patterns list the exceptions only.
    rank, _ = Counter(group.rank for group in counted).most_common(1)[0]
    alpha, _ = Counter(group.alpha for group in counted).most_common(1)[0]

    def pattern(attribute: str, default: float) -> dict[str, Any]:
        pattern_values: dict[str, Any] = {}
        for value in sorted({getattr(group, attribute) for group in plain} - {default}):
            named = [module for module, group in modules.items() if getattr(group, attribute) == value]
            others = [module for module, group in modules.items() if getattr(group, attribute) != value]
            pattern_values |= {as_pattern(name): value for name in short_names(named, [*named, *others])}
        if routers and getattr(routers[0], attribute) != default:
            pattern_values[as_pattern("mlp.gate.weight")] = getattr(routers[0], attribute)
        return pattern_values

    ranks, alphas = pattern("rank", rank), pattern("alpha", alpha)
    saved, tied = _saved(tensors, rules), _is_tied(whole, rules)
    if tied:
        tensors = (*tensors, *_head_tensors(tensors, rules))
    if fused is not None:
        tensors = (*(replace(tensor, name=with_new_router(tensor.name, routers)) for tensor in tensors), *fused.tensors)
        ranks |= {name: value for name, value in fused.ranks.items() if value != rank}
        alphas |= {name: value for name, value in fused.alphas.items() if value != alpha}
    return PeftPlan(
        config=PeftConfig(
            r=rank,
            alpha=alpha,
            use_rslora=use_rslora,
            rank_pattern=ranks,
            alpha_pattern=alphas,
            targets=short_names(tuple(modules), known),
            parameters=() if fused is None else fused.parameters,
            base=base,
            saved=saved,
            tied=tied,
        ),
        transposed=any(is_transposed(group) for group in plain),
        tensors=tensors,
    )


def _saved(tensors: Sequence[OutTensor], rules: WeightRules) -> tuple[str, ...]:
    """The modules with full copies, as names for `modules_to_save`."""
    chosen = {
        tensor.name.removeprefix(PREFIX).rsplit(".", 1)[0]
        for tensor in tensors
        # A copy under `base_layer` belongs to an adapted module; peft finds it without listing it.
        if any(piece.target.startswith(f"{WHOLE}.") for piece in tensor.pieces) and not tensor.name.endswith(BASE)
    }
    # One module of each kind is enough: all layers of a kind are chosen, or none.
    all_modules = [rule.source_name([0] * len(rule.stacked)).rsplit(".", 1)[0] for rule in rules.rules]
    return saved_names(sorted(chosen), all_modules)


def _is_tied(whole: Sequence[str], rules: WeightRules) -> bool:
    """Whether a copied table is also the output head."""
    has_head = any(parameter_group(leaf_named(rule.target.rsplit(".", 1)[0])) == HEAD for rule in rules.rules)
    return not has_head and any("vocab" in group for path in whole for group in rules.by_target()[path].axes)


def _head_tensors(tensors: Sequence[OutTensor], rules: WeightRules) -> Iterator[OutTensor]:
    """A tied model's table a second time, under the head's name, which peft requires."""
    # The last name without a wildcard is the family's own name of the head (see `decoder_rules`).
    *_, head = (name for name in rules.ignored if "*" not in name)
    for tensor in tensors:
        if any(piece.target.startswith(f"{WHOLE}.") and "vocab" in _axes(piece, rules) for piece in tensor.pieces):
            yield replace(tensor, name=f"{PREFIX}{head}")


def _axes(piece: SourcePiece, rules: WeightRules) -> set[str]:
    rule = rules.by_target()[piece.target.removeprefix(f"{WHOLE}.")]
    return {name for group in rule.axes for name in group}


def gather_adapter(plan: PeftPlan, arrays: Mapping[str, jax.Array | Readable], *, where: str) -> PeftAdapter:
    """Gathers an adapter in the memory of process 0; the other processes take part and get an empty one.

    Args:
        plan: from `plan_peft`.
        arrays: the factors by path, on devices or in memory.
        where: the adapter's name in messages.
    """
    if jax.process_index() != 0:
        # The gathers are collectives: every process must run all of them, in the same order.
        for _ in contribute_tensors(plan.tensors, arrays, jit=jit_together):
            pass
        return PeftAdapter(where=where, config=plan.config, source=_MemorySource({}))
    arrays_by_name = {tensor.name: values for tensor, values in gather_tensors(plan.tensors, arrays, jit=jit_together)}
    return PeftAdapter(where=where, config=plan.config, source=_MemorySource(arrays_by_name))


def lazy_adapter(plan: PeftPlan, arrays: Mapping[str, Readable], *, where: str) -> PeftAdapter:
    """An adapter whose tensors are assembled when they are read.

    Args:
        plan: from `plan_peft`.
        arrays: the factors by path, read slice by slice.
        where: the adapter's name in messages.
    """
    return PeftAdapter(where=where, config=plan.config, source=_LazySource(plan, arrays))


class _LazySource:
    """A source of the tensors of a plan, assembled from arrays on each read."""

    def __init__(self, plan: PeftPlan, arrays: Mapping[str, Readable]):
        self._arrays, self._plan = arrays, {tensor.name: tensor for tensor in plan.tensors}
        self.tensors = {name: TensorInfo(name, x.shape, x.dtype, x.nbytes) for name, x in self._plan.items()}

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """None: the tensor is not stored as a whole."""
        del name, index
        return ()

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        # One tensor at a time: the whole is assembled for any slice, since factors are small.
        ((_, whole),) = gather_tensors((self._plan[name],), self._arrays)
        if out is None:
            return whole[index]
        out[...] = whole[index]
        return out


class _MemorySource:
    """Tensors in memory as a source."""

    def __init__(self, values: Mapping[str, np.ndarray]):
        self._values = values
        self.tensors = {name: TensorInfo(name, x.shape, x.dtype, x.nbytes) for name, x in values.items()}

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """None: there is no storage."""
        del name, index
        return ()

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        selection = self._values[name][index]
        if out is None:
            return selection
        out[...] = selection
        return out


def write_peft(
    plan: PeftPlan,
    arrays: Mapping[str, jax.Array | Readable],
    folder: Folder,
    *,
    extra_files: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Folder:
    """Writes a planned adapter. With several processes, every process must call it; process 0 writes.

    Args:
        plan: from `plan_peft`.
        arrays: the factors by path, on devices or in memory.
        folder: a path or URL.
        extra_files: further files, as name → JSON document, such as a tokenizer's.
        overwrite: whether an existing folder is replaced.

    Returns:
        The folder.

    Raises:
        ExportPathError: the folder exists.
        CheckpointError: the written file does not read back as intended.
        OSError: not writable, or the disk is full; on a disk, an existing folder stays as it was.
    """
    if jax.process_index() != 0:
        for _ in contribute_tensors(plan.tensors, arrays, jit=jit_together):
            pass
        return folder
    target = export_dir(folder)
    with leased(target.name, what="an adapter", advice="name another folder", folder=target.lease) as lease:
        # The order is that of `export.write_export`: recover, begin, weights, check, config last, finish.
        target.recover()
        if not overwrite:
            target.refuse_existing()
        target.begin()
        with target.open(WEIGHTS) as file:
            file.write(Shard(file=WEIGHTS, tensors=plan.tensors).header)
            for _, values in gather_tensors(plan.tensors, arrays, jit=jit_together):
                file.write(np.ascontiguousarray(values).view(np.uint8).data)
        for name, document in (extra_files or {}).items():
            with target.open(name) as file:
                file.write(_json(document))
        _check(plan, SafetensorsSource({WEIGHTS: target.written().reader(WEIGHTS)}), target.name)
        # Last: with it, the folder is an adapter.
        with target.open(CONFIG) as file:
            file.write(_json(peft_document(plan.config, transposed=plan.transposed)))
        # Another process may have taken over the lease meanwhile; then the folder is not ours to publish.
        lease.check()
        target.finish()
    return folder


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _check(plan: PeftPlan, source: SafetensorsSource, where: str) -> None:
    wrong = [
        tensor.name
        for tensor in plan.tensors
        if tensor.name not in source.tensors or source.tensors[tensor.name].shape != tensor.shape
    ]
    if wrong:
        some = ", ".join(wrong[:5])
        raise CheckpointError(where, f"{len(wrong)} tensors do not read back as they were written: {some}")
