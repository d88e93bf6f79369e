"""Adapters of experts as newer versions write them, seen as older ones do: one pair of factors for each expert.

transformers 4 has a module for each matrix of each expert, transformers 5 one parameter for all experts' gate and up,
and one for all that lead back. Format of the latter, seen in files of peft 0.21:

    <layer>.mlp.experts.base_layer.lora_A.weight   [(expert, r), in]     gate and up have it in common
    <layer>.mlp.experts.base_layer.lora_B.weight   [gate's rows, up's rows; (r, expert)]
    <layer>.mlp.experts.lora_A.weight, .lora_B.weight                    likewise, of the matrices that lead back

`base_layer` is before whichever was adapted first, and before neither where one of them is alone: shapes tell which is
which. Rows of A are counted in another order than columns of B. Gate and up get a pair each with the whole A, which is
the same function; training lets them part.
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
from levanter.compat.hf.peft.names import PREFIX, A, B, UnsupportedTargetError, layers_of, modules_of, peft_rules
from levanter.layers.quantized import EXPERT
from levanter.models.adapters.lora_targets import TargetGroup

GATE, UP, DOWN, ROUTER = "gate_proj", "up_proj", "down_proj", "router"
FUSED = {GATE: "gate_up_proj", UP: "gate_up_proj", DOWN: "down_proj"}
"""What transformers 5 calls the parameter that has a projection of experts."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """One expert's factor, as a part of a fused tensor."""

    source: str
    rows: slice
    columns: slice
    info: TensorInfo


class PerExpertSource:
    """A source whose fused tensors of experts are seen as a tensor for each expert.

    Args:
        source: with the fused ones.
        views: what is seen of them, by name.
        renamed: other tensors that have other names here: from the source's.
    """

    def __init__(self, source: TensorSource, views: Mapping[str, _View], renamed: Mapping[str, str]):
        self._source, self._views = source, views
        self._last: tuple[str, np.ndarray] = "", np.empty(0)
        self._renamed = {own: theirs for theirs, own in renamed.items()}
        hidden = {view.source for view in views.values()} | renamed.keys()
        kept = {name: info for name, info in source.tensors.items() if name not in hidden}
        moved = {own: replace(source.tensors[theirs], name=own) for own, theirs in self._renamed.items()}
        self.tensors = {**kept, **moved, **{name: view.info for name, view in views.items()}}

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """Where a tensor lies; nowhere for what is a part of another one."""
        return () if name in self._views else self._source.byte_ranges(self._renamed.get(name, name), index)

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        view = self._views.get(name)
        if view is None:
            return self._source.read(self._renamed.get(name, name), index, out)
        name, whole = self._last
        if name != view.source:
            # The other experts are in it too, and are read next.
            info = self._source.tensors[view.source]
            whole = self._source.read(view.source, tuple(slice(0, size) for size in info.shape))
            self._last = view.source, whole
        found = np.ascontiguousarray(whole[view.rows, view.columns][index])
        if out is None:
            return found
        out[...] = found
        return out


def one_by_one(
    source: TensorSource, config: PeftConfig, groups: Sequence[TargetGroup], *, where: str
) -> tuple[TensorSource, PeftConfig]:
    """The tensors of an adapter with a pair for each expert, and its configuration with their ranks.

    Args:
        source: the adapter's tensors.
        config: its configuration.
        groups: all of the model's.
        where: how messages call it.

    Raises:
        CheckpointError: fused factors have the shape of no parameter of the model's experts; lists all.
    """
    problems: list[str] = []
    views: dict[str, _View] = {}
    renamed: dict[str, str] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for layer in _layers(groups):
        for name in _fused(source, layer.fused):
            part = _part_of(source, name, layer)
            if part is None:
                shapes = " and ".join(str(source.tensors[f"{name}{which}"].shape) for which in (A, B))
                problems.append(f"{name.removeprefix(PREFIX)}: factors of {shapes} are of no parameter of its experts")
                continue
            rank = source.tensors[f"{name}{A}"].shape[0] // layer.experts
            alpha = config.alpha_of(f"{layer.fused}.{part}")
            for own in (GATE, UP) if part == FUSED[GATE] else (DOWN,):
                if own not in layer.modules:
                    continue
                for expert, module in enumerate(layer.modules[own]):
                    views |= _views(source, name, f"{PREFIX}{module}", layer, own, expert, rank)
                    ranks[re.escape(module)], alphas[re.escape(module)] = rank, alpha
        for which in (A, B):
            theirs, own = (f"{PREFIX}{name}{which}" for name in (layer.new_router, layer.router))
            if theirs != own and theirs in source.tensors:
                renamed[theirs] = own
                alphas[re.escape(layer.router)] = config.alpha_of(layer.new_router)
                ranks[re.escape(layer.router)] = config.rank_of(layer.new_router)
    raise_if(CheckpointError, where, problems)
    if not views and not renamed:
        return source, config
    patterns = {"rank_pattern": {**ranks, **config.rank_pattern}, "alpha_pattern": {**alphas, **config.alpha_pattern}}
    return PerExpertSource(source, views, renamed), replace(config, **patterns)


@dataclass(frozen=True, kw_only=True)
class FusedExperts:
    """How the experts of a model are written.

    Attributes:
        tensors: the factors.
        parameters: the parameters that they are of.
        ranks, alphas: by parameter.
    """

    tensors: tuple[OutTensor, ...]
    parameters: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]


def fused_experts(
    targets: Sequence[TargetGroup], rules: WeightRules, own: Sequence[Leaf], *, use_rslora: bool
) -> FusedExperts:
    """The factors of experts as transformers 5 has them: one pair for gate and up, with B in two blocks.

    Args:
        targets: the groups of experts that have factors, and routers.
        rules: of the model's weights.
        own: the leaves of the factors.
        use_rslora: see `LoraConfig`.

    Raises:
        UnsupportedTargetError: gate and up are multiplied by different numbers; lists all.
    """
    chosen = [each for each in targets if is_of_experts(each)]
    paths = {rule.target for rule in peft_rules(chosen, rules).rules}
    of_factors = peft_rules(chosen, rules).sources([leaf for leaf in own if leaf.path in paths])
    leaves = {leaf.path: leaf for leaf in own}
    tensors: list[OutTensor] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    problems: list[str] = []
    parameters: dict[str, None] = {}
    groups = {each.members[0].name: each for each in chosen}
    for layer in _layers(targets):
        parts = [tuple(name for name in names if name in layer.modules) for names in ((GATE, UP), (DOWN,))]
        for names in filter(None, parts):
            of_part = [groups[name] for name in names]
            scales = {_scale(each, use_rslora) for each in of_part}
            rank = sum(each.rank for each in of_part)
            if len(scales) > 1:
                problems.append(
                    f"{of_part[0].path} and {of_part[1].path} have one adapter in files of peft, and here they are "
                    "multiplied by different numbers (alpha / r); give them the same rank_pattern and alpha_pattern"
                )
                continue
            part = f"experts.{FUSED[names[0]]}"
            parameters[f"mlp.{part}"] = None
            # `.base_layer` is what was adapted first.
            inner = ".base_layer" if names != (DOWN,) and DOWN in layer.modules else ""
            name = f"{PREFIX}{layer.fused}{inner}"
            ranks[re.escape(f"mlp.{part}")] = rank
            alphas[re.escape(f"mlp.{part}")] = scales.pop() * (math.sqrt(rank) if use_rslora else rank)
            tensors += _fused_tensors(name, layer, names, of_part, rank, of_factors, leaves)
    for each in targets:
        if each.is_router:
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
    of_factors: Mapping[str, tuple[tuple[int, ...], tuple[SourcePiece, ...]]],
    leaves: Mapping[str, Leaf],
) -> Iterator[OutTensor]:
    """A and B of one parameter: ranks of one expert follow one another in A, those of one rank in B."""
    inner, outer = layer.sizes[names[0]]
    shapes = {
        A: (layer.experts * rank, inner),
        B: (outer if names == (DOWN,) else 2 * outer, rank * layer.experts),
    }
    for which in (A, B):
        pieces: list[SourcePiece] = []
        begun = 0
        for own, group in zip(names, groups, strict=True):
            ended, first = begun + group.rank, outer if own == UP else 0
            for expert, module in enumerate(layer.modules[own]):
                place = (
                    (slice(expert * rank + begun, expert * rank + ended), slice(0, inner))
                    if which == A
                    else (
                        slice(first, first + outer),
                        slice(begun * layer.experts + expert, ended * layer.experts, layer.experts),
                    )
                )
                _, found = of_factors[f"{PREFIX}{module}{which}"]
                pieces += [
                    _InFused(**{each.name: getattr(x, each.name) for each in fields(x)}, place=place) for x in found
                ]
            begun = ended
        (dtype,) = {leaves[piece.target].dtype for piece in pieces}
        yield OutTensor(name=f"{name}{which}", shape=shapes[which], dtype=dtype, pieces=tuple(pieces))


@dataclass(frozen=True, kw_only=True)
class _InFused(SourcePiece):
    """A factor of one expert, as a part of one of all experts.

    Attributes:
        place: where it lies in that.
    """

    place: tuple[slice, slice]

    def write(self, block: np.ndarray, tensor: np.ndarray, box: Box | None = None) -> None:
        """See `SourcePiece`."""
        own = np.ascontiguousarray(tensor[self.place])
        super().write(block, own, box)
        tensor[self.place] = own


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The experts of a layer.

    Attributes:
        fused: what transformers 5 calls all of them.
        modules: what a checkpoint calls the matrix of each expert, by projection.
        sizes: of a projection, (in, out).
        router, new_router: what a checkpoint calls the router, and what transformers 5 does.
    """

    fused: str
    modules: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, tuple[int, int]]
    router: str
    new_router: str

    @property
    def experts(self) -> int:
        """How many there are."""
        return len(next(iter(self.modules.values())))


def _layers(groups: Sequence[TargetGroup]) -> list[_Layer]:
    of_experts = [each for each in groups if each.source is not None and is_of_experts(each)]
    found: list[_Layer] = []
    parents = dict.fromkeys(str(each.source).partition(".experts.")[0] for each in of_experts)
    for parent in parents:
        own = {each.members[0].name: each for each in of_experts if str(each.source).startswith(f"{parent}.experts.")}
        routers = [each for each in groups if each.is_router and str(each.source).rpartition(".")[0] == parent]
        names = {name: layers_of(each) for name, each in own.items()}
        for n, modules in enumerate(next(iter(names.values()))):
            here = modules[0].partition(".experts.")[0]
            new = f"{here.rpartition('.')[0]}.mlp"
            router = layers_of(routers[0])[n][0] if routers else f"{here}.gate"
            found.append(
                _Layer(
                    fused=f"{new}.experts",
                    modules={name: each[n] for name, each in names.items()},
                    sizes={name: each.sides for name, each in own.items()},
                    router=router,
                    new_router=f"{new}.{router.rpartition('.')[2]}",
                )
            )
    return found


def is_of_experts(group: TargetGroup) -> bool:
    """Whether it has a matrix for each expert."""
    return any(axis.name == EXPERT for axis in group.copies) and group.members[0].name in FUSED


def _fused(source: TensorSource, fused: str) -> list[str]:
    """What the fused tensors of a layer are called, without the factor's name."""
    pattern = re.compile(rf"({re.escape(PREFIX + fused)}(\.base_layer)*){re.escape(A)}")
    found = (pattern.fullmatch(name) for name in source.tensors)
    return [each[1] for each in found if each is not None and f"{each[1]}{B}" in source.tensors]


def _part_of(source: TensorSource, name: str, layer: _Layer) -> str | None:
    """Which parameter fused factors are of, by their shapes."""
    (rows, inner), (outer, columns) = (source.tensors[f"{name}{which}"].shape for which in (A, B))
    if rows != columns or rows % layer.experts:
        return None
    for own in (GATE, DOWN):
        sizes = layer.sizes.get(own)
        if sizes is not None and (inner, outer) == (sizes[0], sizes[1] * (2 if own == GATE else 1)):
            return FUSED[own]
    return None


def _views(
    source: TensorSource, name: str, module: str, layer: _Layer, own: str, expert: int, rank: int
) -> dict[str, _View]:
    inner, outer = layer.sizes[own]
    first = outer if own == UP else 0
    regions = {
        A: (slice(expert * rank, (expert + 1) * rank), slice(0, inner), (rank, inner)),
        B: (slice(first, first + outer), slice(expert, None, layer.experts), (outer, rank)),
    }
    found: dict[str, _View] = {}
    for which, (rows, columns, shape) in regions.items():
        held = source.tensors[f"{name}{which}"]
        nbytes = shape[0] * shape[1] * held.dtype.itemsize
        info = TensorInfo(f"{module}{which}", shape, held.dtype, nbytes)
        found[info.name] = _View(source=f"{name}{which}", rows=rows, columns=columns, info=info)
    return found


def with_new_router(name: str, routers: Sequence[TargetGroup]) -> str:
    """A tensor's name, as transformers 5 has it where it is a router's."""
    for group in routers:
        for module in modules_of(group):
            if name.startswith(f"{PREFIX}{module}."):
                parent, last = module.rsplit(".", 1)
                return f"{PREFIX}{parent.rpartition('.')[0]}.mlp.{last}{name.removeprefix(PREFIX + module)}"
    return name
