"""Costs of grouped matmuls and sorts from their shapes, for which the compiler states no cycles.

A *grouped product* (`ragged_dot`) multiplies each row by the matrix of its group: the experts of a mixture. The TPU
compiler implements it by a kernel that processes the rows tile by tile, and twice a tile in which a group ends: with
`R` rows in `G` groups and tiles of `T` rows (their number is in the kernel's table, `R / T + G − 1`) it computes `R +
(G − 1) · T` rows, and reads the matrices once:

    seconds = max(2 · (R + (G − 1) · T) · K · N / (peak · GROUPED),  bytes / HBM bandwidth)

Where a device has a part of the experts, it multiplies only the rows that are routed to them; with balanced routers
that is the same part of all rows. The gradient of the matrices is not such a kernel but products that have cycles.

A *sort* of `n` elements is a network of log n · (log n + 1) / 2 passes of compare and exchange; each pass touches every
vector register of 1,024 elements of every operand, `SORT_CYCLES` times.
"""

import math
from dataclasses import dataclass

from haliax_ext.hlo import Kernel, Shape
from levanter.hardware import Accelerator

GROUPED_NAME, METADATA, SORT = "ragged-dot", "ragged-dot-metadata", "sort"
GROUPED = 0.7
"""The share of peak that the kernel reaches over the tiles it processes. Not measured here: the compiler's own
cycles for a batch of the same products come to 0.65 (v6e) to 0.88 (v5p) of peak."""
TILE = 128
"""Rows of a tile where the kernel has no table of tiles."""
SORT_CYCLES = 4
LANES = 1024


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """Seconds of one execution: at the peak of whatever bounds it, and as expected."""

    at_peak: float
    expected: float


def kernel_cost(kernel: Kernel, pod: Accelerator, *, experts: int | None = None) -> KernelCost | None:
    """The cost of a grouped product or a sort; None for other kernels, and for shapes that are neither.

    Args:
        kernel: from the compiled text, for one device.
        pod: what it runs on.
        experts: of a layer, all devices together; None for as many as the kernel has.
    """
    if kernel.name == SORT:
        return _sort(kernel, pod)
    if kernel.name == METADATA:
        # The table itself: a few hundred integers.
        return KernelCost(at_peak=0.0, expected=0.0)
    return _grouped(kernel, pod, experts) if kernel.name.startswith(GROUPED_NAME) else None


@dataclass(frozen=True, kw_only=True)
class GroupedProduct:
    """The work of a grouped product on one device.

    Attributes:
        flops: of the rows that are in a group.
        rows: their number.
        reached: their share of all rows.
        groups: matrices.
        tile: rows that the kernel takes at a time.
    """

    flops: float
    rows: float
    reached: float
    groups: int
    tile: int

    @property
    def computed(self) -> float:
        """FLOPs with the tiles that are computed twice."""
        return self.flops * (self.rows + (self.groups - 1) * self.tile) / self.rows


def grouped_product(kernel: Kernel, *, experts: int | None = None) -> GroupedProduct | None:
    """The grouped product of a kernel, from its shapes; None for shapes of other kernels.

    Args:
        kernel: rows [R, K] and matrices [G, K, N] are among its operands.
        experts: see `kernel_cost`.
    """
    arrays = [shape.sizes for shape in kernel.operands if shape.dtype in ("bf16", "f16", "f32")]
    rows = next((sizes for sizes in arrays if len(sizes) == 2), None)
    matrices = next((sizes for sizes in arrays if len(sizes) == 3), None)
    if rows is None or matrices is None or rows[1] not in matrices[1:] or not rows[0]:
        return None
    groups = matrices[0]
    reached = min(1.0, groups / experts) if experts else 1.0
    # The longest int32 vector is the table of tiles, of R / T + G − 1 entries; solved for T. The other one has
    # the group sizes, and alone it says nothing about tiles.
    tables = [shape.sizes[0] for shape in kernel.operands if shape.dtype == "s32" and len(shape.sizes) == 1]
    tiles = max(tables, default=0) - (groups - 1)
    tile = rows[0] // tiles if tiles > 1 and len(tables) > 1 else TILE
    return GroupedProduct(
        flops=2.0 * reached * rows[0] * math.prod(matrices[1:]),
        rows=reached * rows[0],
        reached=reached,
        groups=groups,
        tile=min(tile, rows[0]),
    )


def _grouped(kernel: Kernel, pod: Accelerator, experts: int | None) -> KernelCost | None:
    product = grouped_product(kernel, experts=experts)
    if product is None:
        return None
    # Matrices [G, K, N] are read in full; of rows and results only the part
    # that is routed to this device moves.
    read = sum(_hbm(shape) for shape in kernel.operands if len(shape.sizes) == 3)
    streamed = sum(_hbm(shape) for shape in (*kernel.operands, *kernel.results) if len(shape.sizes) == 2)
    memory = (read + streamed * product.reached) / pod.hbm_bandwidth
    return KernelCost(
        at_peak=max(product.flops / pod.peak_flops(), memory),
        expected=max(product.computed / (pod.peak_flops() * GROUPED), memory),
    )


def _sort(kernel: Kernel, pod: Accelerator) -> KernelCost | None:
    clock, shapes = pod.generation.clock_hz, kernel.operands or kernel.results
    if clock is None or not shapes:
        return None
    elements = max(math.prod(shape.sizes) for shape in shapes)
    # The axis that is sorted is not in the shape; the longest is the most that it can be.
    steps = math.ceil(math.log2(max(2, max(max(shape.sizes, default=1) for shape in shapes))))
    passes = steps * (steps + 1) // 2
    cycles = passes * math.ceil(elements / LANES) * len(shapes) * SORT_CYCLES
    return KernelCost(at_peak=cycles / SORT_CYCLES / clock, expected=cycles / clock)


def _hbm(shape: Shape) -> int:
    return shape.nbytes if shape.memory_space == 0 else 0
