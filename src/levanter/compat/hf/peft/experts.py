"""LoRA factors of experts: converts between fused tensors (transformers 5) and one pair per expert (transformers 4).

transformers 4 has a module for each matrix of each expert. transformers 5 has one parameter for the gate and up
matrices of all experts, and one for all down matrices. Format of the latter, seen in files of peft 0.21:

    <layer>.mlp.experts.base_layer.lora_A.weight   [(expert, r), in]     shared by gate and up
    <layer>.mlp.experts.base_layer.lora_B.weight   [gate's rows, up's rows; (r, expert)]
    <layer>.mlp.experts.lora_A.weight, .lora_B.weight                    the same for down

The parameter that was adapted first has `base_layer` in its name, unless it is the only one: so only shapes tell which
is which. Rows of A are ordered by expert, then rank; columns of B by rank, then expert. On reading, gate and up each
get a pair with the whole A, which is the same function; training may make the two copies of A differ.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.leaf_layout import Box
from haliax_ext.rules import SourcePiece, WeightRules
from haliax_ext.saving import OutTensor
from haliax_ext.sources import ByteRange, Index, TensorInfo, TensorSource
from levanter.compat.hf.errors import CheckpointError, raise_if
from levanter.compat.hf.peft.config import PeftConfig
from levanter.compat.hf.peft.names import (
    PREFIX,
    A,
    B,
    UnsupportedTargetError,
    module_names,
    modules_by_layer,
    peft_rules,
)
from levanter.layers.quantized import EXPERT
from levanter.models.adapters.lora_targets import TargetGroup

GATE, UP, DOWN, ROUTER = "gate_proj", "up_proj", "down_proj", "router"
FUSED = {GATE: "gate_up_proj", UP: "gate_up_proj", DOWN: "down_proj"}
"""Our projection of experts → the parameter of transformers 5 that contains it."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """One expert's factor, as a part of a fused tensor."""

    source: str
    rows: slice
    columns: slice
    info: TensorInfo


class PerExpertSource:
    """A source that presents fused tensors of experts as one tensor for each expert.

    Args:
        source: the source with the fused tensors.
        views: the parts of them, by the name of the part.
        renamed: other tensors with a new name: the source's name → the new one.
    """

    def __init__(self, source: TensorSource, views: Mapping[str, _View], renamed: Mapping[str, str]):
        self._source, self._views = source, views
        # A cache of one fused tensor: experts are read one after another, and all are in the same one.
        self._last: tuple[str, np.ndarray] = "", np.empty(0)
        self._renamed = {new_name: stored_name for stored_name, new_name in renamed.items()}
        # Fused tensors are replaced by their views; renamed ones appear under the new name only.
        hidden = {view.source for view in views.values()} | renamed.keys()
        unchanged = {name: info for name, info in source.tensors.items() if name not in hidden}
        renamed_infos = {
            new_name: replace(source.tensors[stored_name], name=new_name)
            for new_name, stored_name in self._renamed.items()
        }
        self.tensors = {**unchanged, **renamed_infos, **{name: view.info for name, view in views.items()}}

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """The byte ranges of a tensor; none for a part of a fused tensor, which is read as a whole."""
        return () if name in self._views else self._source.byte_ranges(self._renamed.get(name, name), index)

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        view = self._views.get(name)
        if view is None:
            return self._source.read(self._renamed.get(name, name), index, out)
        name, fused = self._last
        if name != view.source:
            # The whole tensor is read: the other experts are in it, too, and are usually read next.
            info = self._source.tensors[view.source]
            fused = self._source.read(view.source, tuple(slice(0, size) for size in info.shape))
            self._last = view.source, fused
        # `view.columns` may have a stride (B), so the copy makes the expert's factor contiguous.
        values = np.ascontiguousarray(fused[view.rows, view.columns][index])
        if out is None:
            return values
        out[...] = values
        return out


def split_experts(
    source: TensorSource, config: PeftConfig, groups: Sequence[TargetGroup], *, where: str
) -> tuple[TensorSource, PeftConfig]:
    """The tensors of an adapter with a pair for each expert, and its configuration with their ranks.

    Args:
        source: the adapter's tensors.
        config: its configuration.
        groups: all groups of the model.
        where: the adapter's name in messages.

    Raises:
        CheckpointError: fused factors fit no parameter of the model's experts; lists all.
    """
    problems: list[str] = []
    views: dict[str, _View] = {}
    renamed: dict[str, str] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for layer in _layers(groups):
        for name in _fused_names(source, layer.fused):
            parameter = _fused_parameter(source, name, layer)
            if parameter is None:
                shapes = " and ".join(str(source.tensors[f"{name}{which}"].shape) for which in (A, B))
                problems.append(f"{name.removeprefix(PREFIX)}: factors of {shapes} are of no parameter of its experts")
                continue
            # Rows of A are (expert, rank).
            rank = source.tensors[f"{name}{A}"].shape[0] // layer.experts
            alpha = config.module_alpha(f"{layer.fused}.{parameter}")
            for projection in (GATE, UP) if parameter == FUSED[GATE] else (DOWN,):
                if projection not in layer.modules:
                    continue
                for expert, module in enumerate(layer.modules[projection]):
                    views |= _views(source, name, f"{PREFIX}{module}", layer, projection, expert, rank)
                    # Keys of rank_pattern are regular expressions, so a module's name must be escaped.
                    ranks[re.escape(module)], alphas[re.escape(module)] = rank, alpha
        for which in (A, B):
            stored_name, name_here = (f"{PREFIX}{name}{which}" for name in (layer.new_router, layer.router))
            if stored_name != name_here and stored_name in source.tensors:
                renamed[stored_name] = name_here
                alphas[re.escape(layer.router)] = config.module_alpha(layer.new_router)
                ranks[re.escape(layer.router)] = config.module_rank(layer.new_router)
    raise_if(CheckpointError, where, problems)
    if not views and not renamed:
        return source, config
    # The file's own patterns come last: of equal keys, theirs win.
    patterns = {"rank_pattern": {**ranks, **config.rank_pattern}, "alpha_pattern": {**alphas, **config.alpha_pattern}}
    return PerExpertSource(source, views, renamed), replace(config, **patterns)


@dataclass(frozen=True, kw_only=True)
class FusedExperts:
    """The factors of experts in the fused format.

    Attributes:
        tensors: the fused factors.
        parameters: the parameters that they adapt.
        ranks, alphas: by parameter.
    """

    tensors: tuple[OutTensor, ...]
    parameters: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]


def fuse_experts(
    targets: Sequence[TargetGroup], rules: WeightRules, factor_leaves: Sequence[Leaf], *, use_rslora: bool
) -> FusedExperts:
    """Fuses the factors of experts into transformers 5's format: one pair for gate and up, with B in two blocks.

    Args:
        targets: the groups of experts with factors, and routers.
        rules: of the model's weights.
        factor_leaves: the leaves of the factors.
        use_rslora: see `LoraConfig`.

    Raises:
        UnsupportedTargetError: gate and up have different scales; lists all.
    """
    # Only factors of experts are fused; `targets` also has routers, which keep a pair of their own.
    expert_groups = [group for group in targets if is_expert_group(group)]
    paths = {rule.target for rule in peft_rules(expert_groups, rules).rules}
    factor_sources = peft_rules(expert_groups, rules).sources([leaf for leaf in factor_leaves if leaf.path in paths])
    leaves = {leaf.path: leaf for leaf in factor_leaves}
    tensors: list[OutTensor] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    problems: list[str] = []
    parameters: dict[str, None] = {}
    groups = {group.members[0].name: group for group in expert_groups}
    for layer in _layers(targets):
        name_sets = [tuple(name for name in names if name in layer.modules) for names in ((GATE, UP), (DOWN,))]
        for names in filter(None, name_sets):
            fused_groups = [groups[name] for name in names]
            scales = {_scale(group, use_rslora) for group in fused_groups}
            # Gate and up become one product: their A factors are stacked along the rank, and B is block-diagonal,
            # so the fused rank is the sum. The blocks off the diagonal stay 0.
            rank = sum(group.rank for group in fused_groups)
            # One pair has one scale, alpha / r, in peft's files.
            if len(scales) > 1:
                problems.append(
                    f"{fused_groups[0].path} and {fused_groups[1].path} share one adapter in peft files, but have "
                    "different scales (alpha / r); give them the same rank_pattern and alpha_pattern"
                )
                continue
            parameter = f"experts.{FUSED[names[0]]}"
            parameters[f"mlp.{parameter}"] = None
            # `.base_layer` is what was adapted first.
            inner = ".base_layer" if names != (DOWN,) and DOWN in layer.modules else ""
            name = f"{PREFIX}{layer.fused}{inner}"
            ranks[re.escape(f"mlp.{parameter}")] = rank
            # The fused rank differs from the groups' ranks: alpha is set so that alpha / r keeps their scale.
            alphas[re.escape(f"mlp.{parameter}")] = scales.pop() * (math.sqrt(rank) if use_rslora else rank)
            tensors += _fused_tensors(name, layer, names, fused_groups, rank, factor_sources, leaves)
    for group in targets:
        if group.is_router:
            parameters["mlp.gate.weight"] = None
    if problems:
        raise UnsupportedTargetError("\n".join(dict.fromkeys(problems)))
    return FusedExperts(tensors=tuple(tensors), parameters=tuple(parameters), ranks=ranks, alphas=alphas)


def _scale(group: TargetGroup, use_rslora: bool) -> float:
    return group.alpha / (math.sqrt(group.rank) if use_rslora else group.rank)


def _fused_tensors(
    name: str,
    layer: "_Layer",
    names: Sequence[str],
    groups: Sequence[TargetGroup],
    rank: int,
    factor_sources: Mapping[str, tuple[tuple[int, ...], tuple[SourcePiece, ...]]],
    leaves: Mapping[str, Leaf],
) -> Iterator[OutTensor]:
    """A and B of one parameter: rows of A are ordered (expert, rank), columns of B (rank, expert)."""
    inner, outer = layer.sizes[names[0]]
    shapes = {
        A: (layer.experts * rank, inner),
        # Gate and up are stacked along the rows of B; down is alone.
        B: (outer if names == (DOWN,) else 2 * outer, rank * layer.experts),
    }
    for which in (A, B):
        pieces: list[SourcePiece] = []
        start = 0
        for projection, group in zip(names, groups, strict=True):
            # `start` to `stop` are this projection's ranks within the fused rank.
            stop, first = start + group.rank, outer if projection == UP else 0
            for expert, module in enumerate(layer.modules[projection]):
                # A is [(expert, rank), in]: a contiguous run of rows per expert. B is [out, (rank, expert)]: each
                # expert has every `experts`-th column, and up has the rows behind those of gate.
                region = (
                    (slice(expert * rank + start, expert * rank + stop), slice(0, inner))
                    if which == A
                    else (
                        slice(first, first + outer),
                        slice(start * layer.experts + expert, stop * layer.experts, layer.experts),
                    )
                )
                _, factor_pieces = factor_sources[f"{PREFIX}{module}{which}"]
                pieces += [
                    _FusedPiece(**{attribute.name: getattr(x, attribute.name) for attribute in fields(x)}, place=region)
                    for x in factor_pieces
                ]
            start = stop
        (dtype,) = {leaves[piece.target].dtype for piece in pieces}
        yield OutTensor(name=f"{name}{which}", shape=shapes[which], dtype=dtype, pieces=tuple(pieces))


@dataclass(frozen=True, kw_only=True)
class _FusedPiece(SourcePiece):
    """A factor of one expert, as a part of one of all experts.

    Attributes:
        place: its region in the fused tensor.
    """

    place: tuple[slice, slice]

    def write(self, block: np.ndarray, tensor: np.ndarray, box: Box | None = None) -> None:
        """See `SourcePiece`."""
        # The strided region is copied, filled as a matrix of its own, and copied back.
        factor = np.ascontiguousarray(tensor[self.place])
        super().write(block, factor, box)
        tensor[self.place] = factor


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The experts of a layer.

    Attributes:
        fused: transformers 5's name of the experts module.
        modules: the checkpoint's names of each expert's matrix, by projection.
        sizes: (in, out) of a projection.
        router, new_router: the router's name in the checkpoint, and in transformers 5.
    """

    fused: str
    modules: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, tuple[int, int]]
    router: str
    new_router: str

    @property
    def experts(self) -> int:
        """The number of experts."""
        return len(next(iter(self.modules.values())))


def _layers(groups: Sequence[TargetGroup]) -> list[_Layer]:
    expert_groups = [group for group in groups if group.source is not None and is_expert_group(group)]
    layers: list[_Layer] = []
    parents = dict.fromkeys(str(group.source).partition(".experts.")[0] for group in expert_groups)
    for parent in parents:
        by_projection = {
            group.members[0].name: group
            for group in expert_groups
            if str(group.source).startswith(f"{parent}.experts.")
        }
        routers = [group for group in groups if group.is_router and str(group.source).rpartition(".")[0] == parent]
        names = {name: modules_by_layer(group) for name, group in by_projection.items()}
        for n, modules in enumerate(next(iter(names.values()))):
            block = modules[0].partition(".experts.")[0]
            # transformers 5 calls the block `mlp` in all families, e.g. Mixtral's `block_sparse_moe` of version 4.
            new = f"{block.rpartition('.')[0]}.mlp"
            router = modules_by_layer(routers[0])[n][0] if routers else f"{block}.gate"
            layers.append(
                _Layer(
                    fused=f"{new}.experts",
                    modules={name: group[n] for name, group in names.items()},
                    sizes={name: group.sides for name, group in by_projection.items()},
                    router=router,
                    new_router=f"{new}.{router.rpartition('.')[2]}",
                )
            )
    return layers


def is_expert_group(group: TargetGroup) -> bool:
    """Whether it has a matrix for each expert."""
    return any(axis.name == EXPERT for axis in group.copies) and group.members[0].name in FUSED


def _fused_names(source: TensorSource, fused: str) -> list[str]:
    """The names of a layer's fused tensors, without the factor's suffix."""
    # peft nests `.base_layer` once for each parameter of a module that was adapted later.
    pattern = re.compile(rf"({re.escape(PREFIX + fused)}(\.base_layer)*){re.escape(A)}")
    matches = (pattern.fullmatch(name) for name in source.tensors)
    return [match[1] for match in matches if match is not None and f"{match[1]}{B}" in source.tensors]


def _fused_parameter(source: TensorSource, name: str, layer: _Layer) -> str | None:
    """The parameter that fused factors adapt, by their shapes; None if none fits."""
    (rows, inner), (outer, columns) = (source.tensors[f"{name}{which}"].shape for which in (A, B))
    # Rows of A and columns of B are both expert × rank.
    if rows != columns or rows % layer.experts:
        return None
    for projection in (GATE, DOWN):
        sizes = layer.sizes.get(projection)
        if sizes is not None and (inner, outer) == (sizes[0], sizes[1] * (2 if projection == GATE else 1)):
            return FUSED[projection]
    return None


def _views(
    source: TensorSource, name: str, module: str, layer: _Layer, projection: str, expert: int, rank: int
) -> dict[str, _View]:
    inner, outer = layer.sizes[projection]
    first = outer if projection == UP else 0
    regions = {
        # The inverse of the layout in `_fused_tensors`; A is shared by gate and up.
        A: (slice(expert * rank, (expert + 1) * rank), slice(0, inner), (rank, inner)),
        B: (slice(first, first + outer), slice(expert, None, layer.experts), (outer, rank)),
    }
    views: dict[str, _View] = {}
    for which, (rows, columns, shape) in regions.items():
        fused_info = source.tensors[f"{name}{which}"]
        nbytes = shape[0] * shape[1] * fused_info.dtype.itemsize
        info = TensorInfo(f"{module}{which}", shape, fused_info.dtype, nbytes)
        views[info.name] = _View(source=f"{name}{which}", rows=rows, columns=columns, info=info)
    return views


def with_new_router(name: str, routers: Sequence[TargetGroup]) -> str:
    """A tensor's name, in transformers 5's form if it belongs to a router."""
    for group in routers:
        for module in module_names(group):
            if name.startswith(f"{PREFIX}{module}."):
                parent, last = module.rsplit(".", 1)
                return f"{PREFIX}{parent.rpartition('.')[0]}.mlp.{last}{name.removeprefix(PREFIX + module)}"
    return name
