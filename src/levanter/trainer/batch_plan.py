"""`BatchPlan`: how a global batch becomes what a device holds at once, resolved before a device is touched.

    dp    = devices / (model × group × context)      the shards of the batch
    accum = global batch / (rows that a device takes at once × dp)

Rows are sequences. A *microbatch* is what all devices take at once: `rows × dp`. Gradients of `accum` microbatches are
added up before the parameters move. Pure arithmetic; every number comes with its reason, and what does not divide is
refused with the nearest sizes that are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from haliax_ext.divisibility import divisors
from levanter.trainer.config_blocks import BatchSizeStage


class BatchError(ValueError):
    """A batch that cannot be divided as asked; the message has the nearest that can."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One batch size, resolved.

    Attributes:
        rows: sequences of a step that count.
        padding: rows of zero weight added so that the devices divide the batch.
        ways: how many shards the batch has.
        per_device: rows that a device takes at once.
        accumulation: microbatches whose gradients are added up.
        positions: tokens in a row.
        reasons: a line for each number.
    """

    rows: int
    padding: int
    ways: int
    per_device: int
    accumulation: int
    positions: int
    reasons: tuple[str, ...] = ()

    @property
    def placed_rows(self) -> int:
        """Rows of the arrays, padding included."""
        return self.rows + self.padding

    @property
    def microbatch(self) -> int:
        """Rows that all devices take at once."""
        return self.per_device * self.ways

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.positions

    def __str__(self) -> str:
        return (
            f"{self.rows} rows × {self.positions} tokens = {self.tokens:,} tokens per step: {self.per_device} rows "
            f"per device × {self.ways} batch shards × {self.accumulation} accumulated"
            + ("".join(f"; {r}" for r in self.reasons))
        )


@dataclass(frozen=True, kw_only=True)
class BatchStage:
    """A batch plan and the step from which it holds."""

    start: int
    plan: BatchPlan


def plan_batch(
    batch: int, *, per_device: int, ways: int, positions: int, pad: Sequence[str] = (), mesh: str = ""
) -> BatchPlan:
    """Resolves one batch size.

    Args:
        batch: rows of a step; -1 for `per_device × ways`.
        per_device: rows that a device takes at once; -1 for all of its share.
        ways: how many shards the mesh makes of the batch.
        positions: tokens in a row.
        pad: a reason to pad a batch that does not divide; without one it is refused.
        mesh: for the messages.

    Raises:
        BatchError: it does not divide.
    """
    on = f" on mesh {mesh}" if mesh else ""
    reasons = [f"the batch is sharded {ways} ways{on}"]
    if batch == -1:
        if per_device == -1:
            raise BatchError(
                "trainer.train_batch_size and trainer.per_device_parallelism are both -1; give one of them"
            )
        batch = per_device * ways
        reasons.append(f"train_batch_size -1: {per_device} rows per device × {ways} batch shards")
    placed = batch
    if pad:
        unit = ways if per_device == -1 else ways * per_device
        placed = -(-batch // unit) * unit
        if placed != batch:
            reasons.append(f"{placed - batch} rows of padding: {'; '.join(pad)}")
    if per_device == -1:
        if placed % ways:
            raise BatchError(_uneven(batch, ways, "ways", on) + _cut_positions(batch, ways))
        per_device = placed // ways
        reasons.append(f"per_device_parallelism -1: {placed} / {ways} = {per_device} rows, nothing is accumulated")
    micro = per_device * ways
    if placed % micro:
        share = _cut_positions(batch, ways)
        if placed % ways == 0:
            share = f"; or per_device_parallelism {_listed(divisors(placed // ways))}"
        raise BatchError(
            _uneven(batch, micro, f"rows per microbatch ({per_device} per device × {ways} batch shards)", on) + share
        )
    accumulation = placed // micro
    if accumulation > 1:
        reasons.append(f"{placed} / ({per_device} × {ways}) = {accumulation} microbatches")
    return BatchPlan(
        rows=batch,
        padding=placed - batch,
        ways=ways,
        per_device=per_device,
        accumulation=accumulation,
        positions=positions,
        reasons=tuple(reasons),
    )


def plan_batches(
    sizes: int | Sequence[BatchSizeStage],
    *,
    per_device: int,
    ways: int,
    positions: int,
    allow_padding: bool = False,
    mesh: str = "",
) -> tuple[BatchStage, ...]:
    """Resolves a batch size, or a schedule of them.

    Raises:
        BatchError: lists every stage that does not divide.
    """
    stages = [(0, sizes)] if isinstance(sizes, int) else [(stage.start, stage.value) for stage in sizes]
    pad = ("trainer.allow_nondivisible_batch_size",) if allow_padding else ()
    batch_stages, problems = [], []
    for start, size in stages:
        try:
            plan = plan_batch(size, per_device=per_device, ways=ways, positions=positions, pad=pad, mesh=mesh)
            batch_stages.append(BatchStage(start=start, plan=plan))
        except BatchError as error:
            problems.append(str(error) if len(stages) == 1 else f"from step {start}: {error}")
    if problems:
        raise BatchError("\n".join(problems))
    return tuple(batch_stages)


def _uneven(batch: int, unit: int, what: str, on: str) -> str:
    below, above = batch // unit * unit, -(-batch // unit) * unit
    nearest = " or ".join(str(n) for n in (below, above) if n)
    return f"trainer.train_batch_size {batch} is not a multiple of {unit} {what}{on}; nearest: {nearest}"


def _cut_positions(batch: int, ways: int) -> str:
    """What shards that would have no row are good for."""
    if batch >= ways or ways % batch:
        return ""
    return (
        f"; batch {batch} leaves {ways - batch} of {ways} data shards idle: use data {batch} × context {ways // batch} "
        "with trainer.mesh.compute_mapping: {position: context}"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
