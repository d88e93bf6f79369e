"""The legal ways to lay a decoder-only transformer over the devices of a slice.

A candidate is a factoring of the devices into `data × model × group`, what the parameters are cut by beside that, where
the residual stream lies between blocks, how many rows of the batch a device handles at a time, and for training what is
kept for the backward pass. `model × group` together cut `mlp`, the attention heads (`model` the groups of K and V,
`group` the queries within them) and, where it divides, `vocab`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from haliax_ext.divisibility import divisors
from levanter.mesh.heads import KV_HEAD, Q_PER_GROUP, factor

Residual = Literal["whole", "embed", "position"]
SCORING_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay out a run.

    Attributes:
        data: size of mesh axis `data`, which cuts the batch.
        model: size of mesh axis `model`.
        group: size of mesh axis `group`; 1 for no such axis.
        fsdp: whether parameters (and optimizer state) are cut over `data` along `embed`.
        vocab: whether `vocab` is cut like `mlp`.
        residual: what the residual stream is cut along over `model × group`, between blocks.
        rows: rows of the batch for each of the ways it is cut, at a time.
        remat: `model.gradient_checkpointing`; None for scoring.
        slices: slices that share the batch.
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

    @property
    def batch_ways(self) -> int:
        """Into how many parts the batch is cut."""
        return self.data * self.slices

    @property
    def tensor_ways(self) -> int:
        """Into how many parts heads and `mlp` are cut."""
        return self.model * self.group

    def mesh_options(self) -> dict[str, Any]:
        """What to write under `trainer.mesh:`, every rule of a default that it departs from included."""
        tensor: str | list[str] = ["model", "group"] if self.group > 1 else "model"
        axes = {"data": -1, "model": self.model} | ({"group": self.group} if self.group > 1 else {})
        options: dict[str, Any] = {
            "axes": axes,
            "shared_mapping": {"mlp": tensor, "heads": tensor, "vocab": tensor if self.vocab else None},
            "param_mapping": {"embed": "data" if self.fsdp else None},
        }
        if self.residual != "whole":
            options["residual_mapping"] = {self.residual: tensor}
        return options

    def __str__(self) -> str:
        parts = [f"data {self.data} × model {self.model}" + (f" × group {self.group}" if self.group > 1 else "")]
        parts.append("embed → data" if self.fsdp else "parameters whole over data")
        if self.residual != "whole":
            parts.append(f"residual {self.residual} → model")
        parts.append(f"{self.rows} row{'s' if self.rows > 1 else ''} a device at a time")
        if self.remat is not None:
            parts.append(f"gradient_checkpointing {str(self.remat).lower()}")
        return ", ".join(parts)


def candidates(sizes: Mapping[str, int], *, devices: int, global_batch: int | None, slices: int = 1) -> list[Candidate]:
    """Every candidate whose sizes divide, in a fixed order.

    Args:
        sizes: the model's axes: `embed`, `mlp`, `kv_head`, `q_heads_per_group`, `vocab`.
        devices: of one slice.
        global_batch: rows of a training step, over all slices; None for scoring, where any batch will do.
        slices: slices that share the batch.
    """
    found: list[Candidate] = []
    for ways in divisors(devices):
        both = factor(ways, kv_heads=sizes[KV_HEAD], q_per_group=sizes[Q_PER_GROUP])
        if both is None or sizes["mlp"] % ways:
            continue
        data = devices // ways
        base = Candidate(data=data, model=both[0], group=both[1], vocab=sizes["vocab"] % ways == 0, slices=slices)
        for fsdp in (True, False) if data > 1 else (False,):
            if fsdp and sizes["embed"] % data:
                continue
            for residual in _residuals(sizes, ways, training=global_batch is not None):
                laid_out = replace(base, fsdp=fsdp, residual=residual)
                found += _with_batch(laid_out, global_batch)
    return found


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
