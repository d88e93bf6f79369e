"""The legal ways to lay a language model over the devices of a slice.

A candidate is a factoring of the devices into `replica × data × context × model × group`, what the parameters are cut
by beside that, where the residual stream lies between blocks, how many rows of the batch a device handles at a time,
and for training what is kept for the backward pass. `replica × data` cut the batch; parameters are cut over `data`
alone, or are whole over both. `context` cuts the positions of long sequences (`LONG`), and parameters like `data`.
`model × group` together cut what the layers say that tensor parallelism cuts (`Part.tensor_axes`): an axis by itself
(`mlp`) is cut by both; of axes that share the devices (attention heads: those with keys and values of their own, and
the query heads within their groups) `model` cuts the first and `group` the second; of a mixture of experts they cut the
features of each expert, or whole experts in their place. Where it divides, they cut `vocab` too.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from haliax_ext.divisibility import divisors
from levanter.models.axes import COMPOSITES

Residual = Literal["whole", "embed", "position"]
Overrides = Mapping[str, Mapping[str, str | list[str] | None]]
"""Rules for some parameters, as `trainer.mesh.overrides` has them."""
NO_OVERRIDES: Overrides = MappingProxyType({})
MLP, EXPERT = "mlp", "expert"
SCORING_ROWS = (1, 2, 4, 8, 16, 32, 64)
LONG = 32_768
"""Positions of a sequence from which they are worth cutting; with fewer, rows are."""
LEAST_PART = 2_048
"""Positions that a device keeps: with fewer the exchange takes longer than the products (published, on v5p)."""
_IN_ANY_ORDER = frozenset(("kv_head", "q_heads_per_group", "mlp", "expert"))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay out a run.

    Attributes:
        data: size of mesh axis `data`, which cuts the batch.
        replica: size of mesh axis `replica`, which cuts the batch too and no parameter; 1 for no such axis.
        model: size of mesh axis `model`.
        group: size of mesh axis `group`; 1 for no such axis.
        fsdp: whether parameters (and optimizer state) are cut over `data` along `embed`.
        vocab: whether `vocab` is cut like `mlp`.
        residual: what the residual stream is cut along over `model × group`, between blocks.
        rows: rows of the batch for each of the ways it is cut, at a time.
        remat: `model.gradient_checkpointing`; None for scoring.
        slices: slices that share the batch.
        cut: what `model × group` cut in the layers, as mappings call it.
        context: size of mesh axis `context`, which cuts positions; 1 for no such axis.
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

    @property
    def batch_ways(self) -> int:
        """Into how many parts the batch is cut."""
        return self.replica * self.data * self.slices

    @property
    def tensor_ways(self) -> int:
        """Into how many parts heads and `mlp` are cut."""
        return self.model * self.group

    def mesh_options(self, overrides: Overrides = NO_OVERRIDES) -> dict[str, Any]:
        """What to write under `trainer.mesh:`, every rule of a default that it departs from included.

        Args:
            overrides: the run's own rules for some parameters; what of them has a meaning here is kept.
        """
        tensor: str | list[str] = ["model", "group"] if self.group > 1 else "model"
        axes = {"data": -1, "model": self.model} | ({"group": self.group} if self.group > 1 else {})
        axes |= {"replica": self.replica} if self.replica > 1 else {}
        axes |= {"context": self.context} if self.context > 1 else {}
        # A device has whole experts, or a part of each.
        whole = {MLP: None} if EXPERT in self.cut else {}
        options: dict[str, Any] = {
            "axes": axes,
            "shared_mapping": {**dict.fromkeys(self.cut, tensor), **whole, "vocab": tensor if self.vocab else None},
            "param_mapping": {"embed": "data" if self.fsdp else None},
        }
        if self.context > 1:
            options["param_mapping"] = {"embed": ["data", "context"] if self.fsdp else None}
            options |= {"compute_mapping": {"position": "context"}, "attention_mapping": "auto"}
        if self.residual != "whole":
            options["residual_mapping"] = {self.residual: tensor}
        if kept := self._kept(overrides, set(axes)):
            options["overrides"] = kept
        return options

    def _kept(self, overrides: Overrides, axes: Set[str]) -> dict[str, dict[str, str | list[str] | None]]:
        """The rules whose mesh axes there are; where parameters are whole over `data`, none that cuts some over it."""
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
    def kind(self) -> Literal["cut", "replica", "whole"]:
        """Whether parameters are cut over all that cuts the batch, over a part of it, or over none."""
        if not self.fsdp:
            return "whole"
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
        stored = "data × context" if self.context > 1 else "data"
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
) -> list[Candidate]:
    """Every candidate whose sizes divide, in a fixed order.

    Args:
        sizes: the model's axes: `embed`, `vocab`, and those of `tensor_axes`.
        tensor_axes: what tensor parallelism cuts in the layers.
        devices: of one slice.
        global_batch: rows of a training step, over all slices; None for scoring, where any batch will do.
        slices: slices that share the batch.
    """
    listed: list[Candidate] = []
    for axes in _cuts(sizes, tensor_axes):
        cut = tuple(_name(names) for names in sorted(axes, key=len))
        for ways in divisors(devices):
            both = _factored(ways, [tuple(sizes[name] for name in names) for names in axes])
            # One way cuts nothing, neither experts nor the features inside of them.
            if both is None or (ways == 1 and EXPERT in cut):
                continue
            divides = sizes["vocab"] % ways == 0
            base = Candidate(data=devices // ways, model=both[0], group=both[1], vocab=divides, slices=slices, cut=cut)
            contexts = _contexts(sizes, tensor_axes, devices // ways) if global_batch is not None else [1]
            for residual in _residuals(sizes, ways, training=global_batch is not None):
                for context in contexts:
                    rest = replace(base, residual=residual, data=base.data // context, context=context)
                    for laid_out in _placed(rest, sizes["embed"]):
                        listed += _with_batch(laid_out, global_batch)
    return listed


def _contexts(sizes: Mapping[str, int], tensor_axes: Sequence[tuple[str, ...]], devices: int) -> list[int]:
    """Into how many parts positions may be cut: one, or several of those that are long.

    Layers that take positions to be in their own order cannot have them in another; what tensor parallelism cuts in a
    layer tells attention and MLPs from those.
    """
    positions = sizes.get("position", 0)
    if positions < LONG or not {name for axes in tensor_axes for name in axes} <= _IN_ANY_ORDER:
        return [1]
    return [n for n in divisors(devices) if n == 1 or (positions % (2 * n) == 0 and positions // n >= LEAST_PART)]


def _cuts(sizes: Mapping[str, int], tensor_axes: Sequence[tuple[str, ...]]) -> Iterator[Sequence[tuple[str, ...]]]:
    """What tensor parallelism may cut: the features of an MLP, or in their place whole experts where there are some."""
    yield tensor_axes
    if EXPERT in sizes and (MLP,) in tensor_axes:
        yield [(EXPERT,) if axes == (MLP,) else axes for axes in tensor_axes]


def _placed(base: Candidate, embed: int) -> Iterator[Candidate]:
    """Where parameters lie beside tensor parallelism: whole, cut over all that cuts the batch, over a part of it."""
    yield replace(base, fsdp=False)
    for data in reversed(divisors(base.data)):
        if data * base.context > 1 and embed % (data * base.context) == 0:
            yield replace(base, data=data, replica=base.data // data)


def _factored(ways: int, cuts: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """The largest `model`, and its `group`, of so many ways in all that divide every cut; None if there are none.

    An axis by itself is divided by both; of two that share the devices, `model` divides the first.
    """
    if any(len(sizes) == 1 and sizes[0] % ways for sizes in cuts):
        return None
    shared = [sizes for sizes in cuts if len(sizes) > 1]
    if not shared:
        return ways, 1
    for model in reversed(divisors(ways)):
        if all(first % model == 0 and second % (ways // model) == 0 for first, second in shared):
            return model, ways // model
    return None


def _name(axes: tuple[str, ...]) -> str:
    """What mappings call axes that are cut together."""
    return axes[0] if len(axes) == 1 else next(name for name, members in COMPOSITES.items() if members == axes)


def _residuals(sizes: Mapping[str, int], ways: int, *, training: bool) -> Iterator[Residual]:
    yield "whole"
    # For scoring the residual stream is small; cutting it would only buy memory that is not needed.
    if training and ways > 1 and sizes["embed"] % ways == 0:
        yield "embed"


def _with_batch(base: Candidate, global_batch: int | None) -> Iterator[Candidate]:
    if global_batch is None:
        yield from (replace(base, rows=rows) for rows in SCORING_ROWS)
        return
    if global_batch % base.batch_ways:
        return
    for rows in divisors(global_batch // base.batch_ways):
        if rows & (rows - 1) == 0:
            yield from (replace(base, rows=rows, remat=remat) for remat in (True, False))
