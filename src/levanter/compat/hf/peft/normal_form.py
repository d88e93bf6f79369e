"""Rewrites adapters of peft into the form that a model of ours can hold, without changing their function.

Layers of ours are stacked in one array, so their factors have one rank and one scale. In peft every module has its own:

    rank 2 in a stack of rank 4    A gets two rows of zeros, B two columns of zeros
    scale 8 in a stack of scale 4  B is multiplied by 2
    no adapter in this layer       A and B are zero

An embedding table is a lookup and no projection. peft writes its factors (`lora_embedding_A [r, vocab]`,
`lora_embedding_B [embed, r]`) beside the table itself, which is read here with their product added.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from haliax_ext.rules import WeightRules
from haliax_ext.sources import ByteRange, Index, TensorInfo, TensorSource
from levanter.compat.hf.errors import CheckpointError, raise_if
from levanter.compat.hf.peft.config import CONFIG, MERGE_FIRST, PeftConfig
from levanter.compat.hf.peft.names import BASE, PREFIX, A, B, module_names, peft_rules
from levanter.models.adapters.lora_targets import TargetGroup

EMBEDDING_A, EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_WRAPPED = (".modules_to_save.weight", ".original_module.weight")
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """A tensor that is computed from stored ones.

    Attributes:
        info: its name, shape and dtype.
        read: computes a slice.
    """

    info: TensorInfo
    read: Callable[[Index], np.ndarray]


class ComputedSource:
    """A source in which some tensors are computed from others.

    Args:
        source: the stored tensors.
        computed: tensors that are added, or replace stored ones of their name.
        hidden: names of stored tensors that are left out.
    """

    def __init__(self, source: TensorSource, computed: Mapping[str, _Computed], hidden: Sequence[str] = ()):
        self._source, self._computed = source, computed
        # Computed tensors come last, and win where they have the name of a stored one.
        stored = {name: info for name, info in source.tensors.items() if name not in hidden}
        self.tensors = {**stored, **{name: tensor.info for name, tensor in computed.items()}}

    def byte_ranges(self, name: str, index: Index) -> Sequence[ByteRange]:
        """The byte ranges of a stored tensor; none for a computed one."""
        return () if name in self._computed else self._source.byte_ranges(name, index)

    def read(self, name: str, index: Index, out: np.ndarray | None = None) -> np.ndarray:
        """See `TensorSource`."""
        tensor = self._computed.get(name)
        if tensor is None:
            return self._source.read(name, index, out)
        values = tensor.read(index).astype(tensor.info.dtype, copy=False)
        if out is None:
            return values
        out[...] = values
        return out


def _info(name: str, shape: tuple[int, ...], dtype: np.dtype) -> TensorInfo:
    return TensorInfo(name, shape, dtype, math.prod(shape) * dtype.itemsize)


def merge_tables(source: TensorSource, config: PeftConfig, *, where: str) -> TensorSource:
    """The tensors of an adapter with each adapted embedding table as a full copy: W + s · (B A)ᵀ in float32.

    Of a table that was resized and is in `modules_to_save`, peft writes the trained one twice and the base's as well;
    only the first is left.

    Args:
        source: the adapter's tensors.
        config: its configuration.
        where: its name in messages.

    Raises:
        CheckpointError: factors of a table without the table, or of other shapes; lists all.
    """
    modules = [name.removesuffix(EMBEDDING_A) for name in source.tensors if name.endswith(EMBEDDING_A)]
    problems: list[str] = []
    computed: dict[str, _Computed] = {}
    hidden: list[str] = [
        name
        for name in source.tensors
        for ending in _WRAPPED
        if name.endswith(ending) and f"{name.removesuffix(ending)}.weight" in source.tensors
    ]
    for module in modules:
        names = (f"{module}{BASE}", f"{module}{EMBEDDING_A}", f"{module}{EMBEDDING_B}")
        label = module.removeprefix(PREFIX)
        if absent := [name for name in names if name not in source.tensors]:
            # peft writes the table by itself, unless it is called with save_embedding_layers=False.
            problems.append(f"{label}: an adapter of an embedding table, without {', '.join(absent)}")
            continue
        table, a, b = (source.tensors[name].shape for name in names)
        rank = config.module_rank(label)
        if len(table) != 2 or a != (rank, table[0]) or b != (table[1], rank):
            problems.append(
                f"{label}: a table {list(table)} with factors {list(a)} and {list(b)}, expected {[rank, *table[:1]]} "
                f"and {[*table[1:], rank]} (rank {rank} in {CONFIG})"
            )
            continue
        # The same patterns as for projections: peft looks tables up by their module's name, too.
        scale = config.scale(rank, config.module_alpha(label))
        hidden += names
        name = f"{module}.weight"
        computed[name] = _Computed(info=_info(name, table, _FLOAT32), read=_MergedTable(source, names, scale))
    raise_if(CheckpointError, where, problems, suggestion=MERGE_FIRST)
    return ComputedSource(source, computed, hidden) if computed or hidden else source


@dataclass(frozen=True)
class _MergedTable:
    """Slices of a table with its adapter added."""

    source: TensorSource
    names: tuple[str, str, str]
    scale: float

    def __call__(self, index: Index) -> np.ndarray:
        table, a, b = self.names
        # A slice of the table needs some columns of A and some rows of B, whatever the size of the vocabulary.
        rows, columns = index
        rank = self.source.tensors[a].shape[0]
        # [rank, rows] and [columns, rank]: only what the slice needs is read.
        a_rows = self.source.read(a, (slice(0, rank), rows)).astype(_FLOAT32)
        b_columns = self.source.read(b, (columns, slice(0, rank))).astype(_FLOAT32)
        return self.source.read(table, index).astype(_FLOAT32) + np.float32(self.scale) * (a_rows.T @ b_columns.T)


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """The stored factors of a module.

    Attributes:
        a, b: their names.
        rank: of both.
        scale: of their product.
    """

    a: str
    b: str
    rank: int
    scale: float


def uniform_layers(
    source: TensorSource, config: PeftConfig, groups: Sequence[TargetGroup], rules: WeightRules, *, where: str
) -> tuple[TensorSource, PeftConfig]:
    """The tensors of an adapter with one rank and one scale for all modules of a group, and its configuration.

    Args:
        source: the adapter's tensors, with a pair for each expert.
        config: its configuration.
        groups: all groups of the model.
        rules: of the model's weights.
        where: the adapter's name in messages.

    Raises:
        CheckpointError: the rank of a factor is not that of the configuration; lists all.
    """
    # Groups without a name in checkpoints have no adapters in files of peft.
    named = [group for group in groups if group.source is not None]
    spellings = peft_rules(named, rules).spellings
    problems: list[str] = []
    computed: dict[str, _Computed] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for group in named:
        modules = module_names(group)
        factors = {module: _stored_factors(module, source, config, spellings) for module in modules}
        stored = {module: pair for module, pair in factors.items() if pair is not None}
        problems += [
            f"{module}: rank {pair.rank}, but {CONFIG} says {config.module_rank(module)}"
            for module, pair in stored.items()
            if pair.rank != config.module_rank(module)
        ]
        kinds = {(pair.rank, pair.scale) for pair in stored.values()}
        shapes = {(source.tensors[pair.a].shape[1], source.tensors[pair.b].shape[0]) for pair in stored.values()}
        # Factors of several shapes are of another model, and a module that should have factors lost them: they stay as
        # they are, and are reported by name.
        incomplete = any(module not in stored and _is_expected(module, source, config, spellings) for module in modules)
        if len(shapes) != 1 or incomplete or (len(stored) == len(modules) and len(kinds) == 1):
            continue
        rank = max(pair.rank for pair in stored.values())
        # The largest scale: the factors B of the other modules then become smaller, and cannot overflow in 16 bits.
        scale = max((pair.scale for pair in stored.values()), key=abs)
        first = next(iter(stored.values()))
        for module in modules:
            computed |= _uniform(module, factors[module], first, rank, scale, source)
            # `alpha` is what gives the stack's scale at its rank.
            ranks[re.escape(module)] = rank
            alphas[re.escape(module)] = scale * (math.sqrt(rank) if config.use_rslora else rank)
    raise_if(CheckpointError, where, problems)
    if not computed:
        return source, config
    # The first pattern that matches wins: these name single modules, and come before the file's own.
    patterns = {
        "rank_pattern": {**ranks, **{key: x for key, x in config.rank_pattern.items() if key not in ranks}},
        "alpha_pattern": {**alphas, **{key: x for key, x in config.alpha_pattern.items() if key not in alphas}},
    }
    return ComputedSource(source, computed), replace(config, **patterns)


def _is_expected(
    module: str, source: TensorSource, config: PeftConfig, spellings: Callable[[str], Iterable[str]]
) -> bool:
    """Whether a module must have both factors: the configuration names it, or the file has one of them."""
    named = any(config.is_target(spelling.removeprefix(PREFIX)) for spelling in spellings(f"{PREFIX}{module}"))
    return named or any(name in source.tensors for which in (A, B) for name in spellings(f"{PREFIX}{module}{which}"))


def _stored_factors(
    module: str, source: TensorSource, config: PeftConfig, spellings: Callable[[str], Iterable[str]]
) -> _Factors | None:
    """The factors of a module; None if it has none, or no matrices (which are reported with their shapes)."""
    names = [
        next((name for name in spellings(f"{PREFIX}{module}{which}") if name in source.tensors), None)
        for which in (A, B)
    ]
    a, b = names
    if a is None or b is None or any(len(source.tensors[name].shape) != 2 for name in (a, b)):
        return None
    rank = source.tensors[a].shape[0]
    return _Factors(a=a, b=b, rank=rank, scale=config.scale(config.module_rank(module), config.module_alpha(module)))


def _uniform(
    module: str, factors: _Factors | None, like: _Factors, rank: int, scale: float, source: TensorSource
) -> dict[str, _Computed]:
    """A and B of a module with the stack's rank and scale.

    Args:
        module: the module.
        factors: its stored factors; None for none.
        like: the factors of another module of the stack, for their shapes.
        rank, scale: of the stack.
        source: the stored tensors.
    """
    # All modules of a group have the same shapes: those of one that has factors are those of all.
    inner, outer = source.tensors[like.a].shape[1], source.tensors[like.b].shape[0]
    computed: dict[str, _Computed] = {}
    for which, shape in ((A, (rank, inner)), (B, (outer, rank))):
        name = None if factors is None else factors.a if which == A else factors.b
        # Only B is multiplied: the product then has the module's scale, and A stays bit for bit.
        ratio = 1.0 if factors is None or which == A else factors.scale / scale
        here = f"{PREFIX}{module}{which}" if name is None else name
        computed[here] = _Computed(info=_info(here, shape, _FLOAT32), read=_Padded(source, name, shape, ratio))
    return computed


@dataclass(frozen=True)
class _Padded:
    """Slices of a factor, multiplied and with zeros in the ranks that it lacks; all zeros without a factor."""

    source: TensorSource
    name: str | None
    shape: tuple[int, ...]
    ratio: float

    def __call__(self, index: Index) -> np.ndarray:
        # Factors are small: the whole is assembled for any slice.
        values = np.zeros(self.shape, _FLOAT32)
        if self.name is not None:
            stored = self.source.tensors[self.name].shape
            factor = self.source.read(self.name, tuple(slice(0, size) for size in stored)).astype(_FLOAT32)
            values[tuple(slice(0, size) for size in stored)] = np.float32(self.ratio) * factor
        return values[index]
