"""`BatchPlan`: how a global batch is divided over devices and microbatches, resolved before a device is touched.

    dp    = devices / (model × group × context)      the shards of the batch
    accum = global batch / (rows per device at a time × dp)

Rows are sequences. A *microbatch* is the rows of all devices at a time: `rows × dp`. The gradients of `accum`
microbatches are added up before the update. Pure arithmetic; every number has a reason, and sizes that do not divide
are refused with the nearest ones that do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from haliax_ext.divisibility import divisors
from levanter.trainer.config_blocks import BatchSizeStage


class BatchError(ValueError):
    """A batch that cannot be divided as configured; the message has the nearest sizes that can."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One resolved batch size.

    Attributes:
        rows: sequences per step, without padding.
        padding: rows of weight zero, added to make the batch divisible.
        ways: number of shards of the batch.
        per_device: rows per device at a time.
        accumulation: microbatches whose gradients are added up.
        positions: tokens per row.
        reasons: one line per number.
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
        """Rows of all devices at a time."""
        return self.per_device * self.ways

    @property
    def tokens(self) -> int:
        """Tokens per step, without padding."""
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
        batch: rows per step; -1 for `per_device × ways`.
        per_device: rows per device at a time; -1 for its whole share.
        ways: number of shards of the batch on the mesh.
        positions: tokens per row.
        pad: reasons for padding a batch that does not divide; if empty, such a batch is refused.
        mesh: the mesh as text, for messages.

    Raises:
        BatchError: the batch does not divide.
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
        # Padding rows have weight 0, so filling up to whole microbatches does not change the loss.
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
        # If the batch divides over the shards, another number of rows per device suffices; the batch size can stay.
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
    """Resolves a batch size, or a schedule of batch sizes.

    Raises:
        BatchError: lists all stages that do not divide.
    """
    # Each stage is compiled as a Program of its own, so each must divide.
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
    # The nearest multiples; 0 is not a batch size and is left out.
    below, above = batch // unit * unit, -(-batch // unit) * unit
    nearest = " or ".join(str(n) for n in (below, above) if n)
    return f"trainer.train_batch_size {batch} is not a multiple of {unit} {what}{on}; nearest: {nearest}"


def _cut_positions(batch: int, ways: int) -> str:
    """A suggestion for idle shards: to split positions instead of rows; empty if it does not apply."""
    # Splitting positions needs fewer rows than shards, and a whole number of shards per row.
    if batch >= ways or ways % batch:
        return ""
    return (
        f"; batch {batch} leaves {ways - batch} of {ways} data shards idle: use data {batch} × context {ways // batch} "
        "with trainer.mesh.compute_mapping: {position: context}"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
