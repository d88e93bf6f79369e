"""Grouped products and sorts against hand arithmetic."""

import math
from dataclasses import replace

import pytest

from haliax_ext.hlo import Kernel, Scope, Shape
from levanter.hardware import parse_accelerator
from levanter.plan.kernel_cost import GROUPED, LANES, SORT_CYCLES, grouped_product, kernel_cost

pytestmark = pytest.mark.quick

POD = parse_accelerator("v6e-64")
ROWS, GROUPS, EMBED, MLP = 16384, 8, 6144, 16384


def grouped(rows: int, groups: int, inner: int, outer: int, *, tile: int = 256) -> Kernel:
    """As libtpu prints it: tables of groups and tiles, rows, matrices."""
    visits = rows // tile + groups - 1
    tables = tuple(Shape("s32", (size,)) for size in (1, groups + 1, visits, visits, 1))
    arrays = (Shape("bf16", (rows, inner)), Shape("bf16", (groups, inner, outer)))
    return Kernel("ragged-dot-none", 1, (*tables, *arrays), (Shape("bf16", (rows, outer)),), Scope("mlp.experts"))


def visited_rows(bounds: list[int], tile: int) -> int:
    """Rows that are gone through where groups end at `bounds`: every tile that a group touches, whole."""
    return sum(
        tile * len({row // tile for row in range(first, last)})
        for first, last in zip([0, *bounds], bounds, strict=False)
    )


@pytest.mark.parametrize("tile", [128, 256])
def test_a_grouped_product_goes_twice_through_a_tile_where_a_group_ends(tile):
    rows, bounds = 4096, [300, 1000, 1500, 1700, 2222, 3001, 3999, 4096]
    kernel = grouped(rows, len(bounds), 512, 1024, tile=tile)
    found = grouped_product(kernel)
    assert found is not None and (found.tile, found.groups, found.rows) == (tile, 8, rows)
    assert found.flops == sum(2 * 512 * 1024 for _ in range(rows))
    # Unless a group happens to end where a tile does.
    assert found.computed == 2 * 512 * 1024 * visited_rows(bounds, tile)


def test_the_cost_of_many_rows_is_that_of_what_is_computed():
    cost = kernel_cost(grouped(ROWS, GROUPS, EMBED, MLP), POD)
    by_row = 2 * EMBED * MLP
    assert cost is not None
    assert cost.at_peak == pytest.approx(by_row * ROWS / 918e12)
    assert cost.expected == pytest.approx(by_row * (ROWS + 7 * 256) / (GROUPED * 918e12))


def test_a_device_with_a_part_of_the_experts_multiplies_a_part_of_the_rows():
    whole = kernel_cost(grouped(ROWS, GROUPS, EMBED, MLP), POD, experts=GROUPS)
    part = kernel_cost(grouped(ROWS, 1, EMBED, MLP), POD, experts=GROUPS)
    assert whole is not None and part is not None
    assert part.at_peak == pytest.approx(whole.at_peak / GROUPS)
    # One group ends in no tile but its last.
    assert part.expected == pytest.approx(part.at_peak / GROUPED)


def test_few_rows_wait_for_their_matrices():
    kernel = grouped(64, GROUPS, EMBED, MLP, tile=64)
    cost = kernel_cost(kernel, POD)
    nbytes = 2 * (64 * EMBED + GROUPS * EMBED * MLP + 64 * MLP)
    assert cost is not None and cost.expected == cost.at_peak == pytest.approx(nbytes / 1638e9, rel=1e-3)


def test_matrices_in_chip_memory_are_not_read_from_hbm():
    near = Shape("bf16", (GROUPS, EMBED, MLP), memory_space=1)
    kernel = Kernel("ragged-dot", 1, (Shape("bf16", (8, EMBED)), near), (Shape("bf16", (8, MLP)),), Scope("x"))
    cost = kernel_cost(kernel, POD)
    assert cost is not None and cost.expected < 2 * GROUPS * EMBED * MLP / 1638e9 / 10


def test_other_kernels_are_none_of_these():
    known = grouped(ROWS, GROUPS, EMBED, MLP)
    assert kernel_cost(replace(known, name="my_kernel"), POD) is None
    assert kernel_cost(Kernel("ragged-dot", 1, (), (), Scope("x")), POD) is None
    metadata = kernel_cost(Kernel("ragged-dot-metadata", 1, (Shape("s32", (8,)),), (), Scope("x")), POD)
    assert metadata is not None and metadata.expected == 0


@pytest.mark.parametrize("elements", [1024, 4096, 1 << 17])
def test_a_sort_by_counting_the_network(elements):
    """Batcher's bitonic network, stage by stage: merges of 2, 4, 8, … elements, each of so many halvings."""
    passes = sum(math.ceil(math.log2(size)) for size in (2**n for n in range(1, int(math.log2(elements)) + 1)))
    pair = (Shape("s32", (elements,)), Shape("s32", (elements,)))
    cost = kernel_cost(Kernel("sort", 1, pair, pair, Scope("experts")), POD)
    assert cost is not None
    assert cost.expected == pytest.approx(passes * 2 * (elements / LANES) * SORT_CYCLES / 1.75e9)
