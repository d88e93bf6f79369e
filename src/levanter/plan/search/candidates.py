"""The legal layouts of a language model on the devices of a slice.

A candidate is a factoring of the devices into `replica × data × context × model × group`, the sharding of parameters
and of the residual stream between blocks, the number of rows of the batch that a device takes at a time, and for
training the checkpointing of blocks. `replica × data` shard the batch; parameters are sharded over `data` alone, or
replicated over both. `context` shards the positions of long sequences (`LONG`), and parameters like `data`. `model ×
group` together shard the axes that the layers name for tensor parallelism (`Part.tensor_axes`): a single axis (`mlp`)
is sharded by both; of axes that share the devices (attention heads: kv heads, and the query heads within their groups)
`model` shards the first and `group` the second; of a mixture of experts they shard the features of each expert, or
whole experts instead. Where it divides, they shard `vocab` too.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from haliax_ext.divisibility import divisors
from levanter.models.axes import COMPOSITES

Residual = Literal["whole", "embed", "position"]
Overrides = Mapping[str, Mapping[str, str | list[str] | None]]
"""Rules for some parameters, as under `trainer.mesh.overrides`."""
NO_OVERRIDES: Overrides = MappingProxyType({})
MLP, EXPERT = "mlp", "expert"
SLICES = "replica_dcn"
"""The mesh axis whose size is the number of slices."""
SCORING_ROWS = (1, 2, 4, 8, 16, 32, 64)
LONG = 32_768
"""Positions of a sequence from which they are worth sharding; shorter sequences shard rows instead."""
LEAST_PART = 2_048
"""Least positions on a device: with fewer the exchange takes longer than the products (published, on v5p)."""
# Axes of attention and MLPs, which get positions explicitly and so work in zigzag order.
_IN_ANY_ORDER = frozenset(("kv_head", "q_heads_per_group", "mlp", "expert"))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout of a run.

    Attributes:
        data: size of mesh axis `data`, which shards the batch.
        replica: size of mesh axis `replica`, which shards the batch and no parameter; 1 for no such axis.
        model: size of mesh axis `model`.
        group: size of mesh axis `group`; 1 for no such axis.
        fsdp: whether parameters (and optimizer state) are sharded over `data` along `embed`.
        vocab: whether `vocab` is sharded like `mlp`.
        residual: the axis of the residual stream that `model × group` shard between blocks.
        rows: rows of each shard of the batch that are processed at a time.
        remat: `model.gradient_checkpointing`; None for scoring.
        slices: slices that share the batch.
        cut: the axes that `model × group` shard in the layers, by their names in mappings.
        context: size of mesh axis `context`, which shards positions; 1 for no such axis.
        across: whether parameters are sharded over the slices too, beside `data`.
    """

    data: int
    model: int
    group: int = 1
    fsdp: bool = True
    vocab: bool = True
    residual: Residual = "whole"
    rows: int = 1
    remat: bool | str | None = None
    slices: int = 1
    replica: int = 1
    cut: tuple[str, ...] = ("mlp", "heads")
    context: int = 1
    across: bool = False

    @property
    def batch_ways(self) -> int:
        """The number of shards of the batch."""
        return self.replica * self.data * self.slices

    @property
    def tensor_ways(self) -> int:
        """The number of shards of heads and `mlp`."""
        return self.model * self.group

    def mesh_options(self, overrides: Overrides = NO_OVERRIDES) -> dict[str, Any]:
        """The options under `trainer.mesh:`, with `null` for every default rule that the layout does not have.

        Args:
            overrides: the run's rules for some parameters; those that apply to this mesh are kept.
        """
        tensor: str | list[str] = ["model", "group"] if self.group > 1 else "model"
        axes = {"data": -1, "model": self.model} | ({"group": self.group} if self.group > 1 else {})
        axes |= {"replica": self.replica} if self.replica > 1 else {}
        axes |= {"context": self.context} if self.context > 1 else {}
        # Sharding whole experts replaces sharding the features of each expert.
        whole = {MLP: None} if EXPERT in self.cut else {}
        options: dict[str, Any] = {
            "axes": axes,
            "shared_mapping": {**dict.fromkeys(self.cut, tensor), **whole, "vocab": tensor if self.vocab else None},
            "param_mapping": {"embed": [SLICES, "data"] if self.across else "data" if self.fsdp else None},
        }
        if self.context > 1:
            # Devices along `context` process other positions of the same rows with
            # the same weights, so they can shard them.
            over = [SLICES, "data", "context"] if self.across else ["data", "context"]
            options["param_mapping"] = {"embed": over if self.fsdp else None}
            options |= {"compute_mapping": {"position": "context"}, "attention_mapping": "auto"}
        if self.residual != "whole":
            options["residual_mapping"] = {self.residual: tensor}
        if kept := self._kept(overrides, set(axes)):
            options["overrides"] = kept
        return options

    def _kept(self, overrides: Overrides, axes: Set[str]) -> dict[str, dict[str, str | list[str] | None]]:
        """The rules over mesh axes of this layout; without FSDP none over `data` or `context`."""
        meant = axes if self.fsdp else axes - {"data", "context"}
        by_pattern = {
            pattern: {
                axis: value
                for axis, value in rule.items()
                if value is None or set([value] if isinstance(value, str) else value) <= meant
            }
            for pattern, rule in overrides.items()
        }
        return {pattern: rule for pattern, rule in by_pattern.items() if rule}

    @property
    def kind(self) -> Literal["across", "cut", "replica", "whole"]:
        """Whether parameters are sharded over all devices of the batch, over those of a slice, over some, or none."""
        if not self.fsdp:
            return "whole"
        if self.across:
            return "across"
        return "cut" if self.replica == 1 else "replica"

    @property
    def sizes(self) -> str:
        """The mesh, as text."""
        named = {
            "replica": self.replica,
            "data": self.data,
            "context": self.context,
            "model": self.model,
            "group": self.group,
        }
        return " × ".join(f"{name} {size}" for name, size in named.items() if size > 1 or name in ("data", "model"))

    def __str__(self) -> str:
        stored = (f"{SLICES} × " if self.across else "") + ("data × context" if self.context > 1 else "data")
        words = [self.sizes, f"embed → {stored}" if self.fsdp else f"parameters replicated over {stored}"]
        if self.context > 1:
            words.append("position → context")
        if EXPERT in self.cut:
            words.append("expert → model")
        if self.residual != "whole":
            words.append(f"residual {self.residual} → model")
        words.append(f"{self.rows} row{'s' if self.rows > 1 else ''} a device at a time")
        if self.remat is not None:
            words.append(f"gradient_checkpointing {str(self.remat).lower()}")
        return ", ".join(words)


def candidates(
    sizes: Mapping[str, int],
    *,
    tensor_axes: Sequence[tuple[str, ...]],
    devices: int,
    global_batch: int | None,
    slices: int = 1,
    across: bool = False,
) -> list[Candidate]:
    """Every candidate whose sizes divide, in a fixed order.

    Args:
        sizes: the model's axes: `embed`, `vocab`, and those of `tensor_axes`.
        tensor_axes: the axes of the layers that tensor parallelism shards.
        devices: of one slice.
        global_batch: rows of a training step, over all slices; None for scoring, which allows any batch.
        slices: slices that share the batch.
        across: whether parameters may be sharded over slices, as on GPUs, whose slices are small.
    """
    listed: list[Candidate] = []
    for axes in _cuts(sizes, tensor_axes):
        cut = tuple(_name(names) for names in sorted(axes, key=len))
        # `ways` devices share each row by tensor parallelism; the others take different rows or positions.
        for ways in divisors(devices):
            factors = _factored(ways, [tuple(sizes[name] for name in names) for names in axes])
            # With one way nothing is sharded, so the layout with whole experts equals the one without.
            if factors is None or (ways == 1 and EXPERT in cut):
                continue
            divides = sizes["vocab"] % ways == 0
            base = Candidate(
                data=devices // ways, model=factors[0], group=factors[1], vocab=divides, slices=slices, cut=cut
            )
            contexts = _contexts(sizes, tensor_axes, devices // ways) if global_batch is not None else [1]
            for residual in _residuals(sizes, ways, training=global_batch is not None):
                for context in contexts:
                    rest = replace(base, residual=residual, data=base.data // context, context=context)
                    for laid_out in _placed(rest, sizes["embed"], across=across and slices > 1):
                        listed += _with_batch(laid_out, global_batch)
    return listed


def _contexts(sizes: Mapping[str, int], tensor_axes: Sequence[tuple[str, ...]], devices: int) -> list[int]:
    """The sizes that the mesh axis `context` may have: 1, and more for long sequences.

    Layers that process positions in order (recurrent ones) do not work in zigzag order; the axes of tensor parallelism
    tell them from attention and MLPs.
    """
    positions = sizes.get("position", 0)
    if positions < LONG or not {name for axes in tensor_axes for name in axes} <= _IN_ANY_ORDER:
        return [1]
    # Zigzag order gives each of n devices two runs of positions, so 2 · n must divide them.
    return [n for n in divisors(devices) if n == 1 or (positions % (2 * n) == 0 and positions // n >= LEAST_PART)]


def _cuts(sizes: Mapping[str, int], tensor_axes: Sequence[tuple[str, ...]]) -> Iterator[Sequence[tuple[str, ...]]]:
    """The choices of axes for tensor parallelism: features of an MLP, or whole experts instead where there are some."""
    yield tensor_axes
    if EXPERT in sizes and (MLP,) in tensor_axes:
        yield [(EXPERT,) if axes == (MLP,) else axes for axes in tensor_axes]


def _placed(base: Candidate, embed: int, *, across: bool) -> Iterator[Candidate]:
    """The shardings of parameters besides tensor parallelism: none, over all batch axes, over a part of them."""
    yield replace(base, fsdp=False)
    if across and embed % (base.slices * base.data * base.context) == 0:
        yield replace(base, across=True)
    for data in reversed(divisors(base.data)):
        if data * base.context > 1 and embed % (data * base.context) == 0:
            yield replace(base, data=data, replica=base.data // data)


def _factored(ways: int, cuts: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """The largest `model` and its `group` whose product is `ways` and that divide every axis; None if there are none.

    A single axis is divided by the product; of two axes that share the devices, `model` divides the first.
    """
    if any(len(sizes) == 1 and sizes[0] % ways for sizes in cuts):
        return None
    shared = [sizes for sizes in cuts if len(sizes) > 1]
    if not shared:
        return ways, 1
    # A larger `group` replicates kv heads over more devices, so the largest `model` comes first.
    for model in reversed(divisors(ways)):
        if all(first % model == 0 and second % (ways // model) == 0 for first, second in shared):
            return model, ways // model
    return None


def _name(axes: tuple[str, ...]) -> str:
    """The name in mappings of axes that are sharded together."""
    return axes[0] if len(axes) == 1 else next(name for name, members in COMPOSITES.items() if members == axes)


def _residuals(sizes: Mapping[str, int], ways: int, *, training: bool) -> Iterator[Residual]:
    yield "whole"
    # For scoring the residual stream is small, and sharding it would save memory that is not needed.
    if training and ways > 1 and sizes["embed"] % ways == 0:
        yield "embed"


def _with_batch(base: Candidate, global_batch: int | None) -> Iterator[Candidate]:
    if global_batch is None:
        yield from (replace(base, rows=rows) for rows in SCORING_ROWS)
        return
    # A training step needs its exact global batch; microbatches of `rows` must divide each shard of it.
    if global_batch % base.batch_ways:
        return
    for rows in divisors(global_batch // base.batch_ways):
        if rows & (rows - 1) == 0:
            yield from (replace(base, rows=rows, remat=remat) for remat in (True, False))
