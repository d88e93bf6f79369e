"""Block grids against a brute-force walk over every selected element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.compat.hf.strided_reads import GridRanges, block_grid


@st.composite
def selections(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    index = []
    for size in shape:
        start = draw(st.integers(0, size))
        index.append(slice(start, draw(st.integers(start, size))))
    return shape, tuple(index), draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 40)), draw(st.integers(1, 64))


def selected_bytes(shape, itemsize, index) -> set[int]:
    offsets = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)[index].reshape(-1) * itemsize
    return {int(offset) + byte for offset in offsets for byte in range(itemsize)}


@settings(max_examples=300, deadline=None)
@given(selections())
def test_ranges_hold_every_selected_byte_and_only_allowed_gaps(case):
    shape, index, itemsize, max_gap, page = case
    wanted = selected_bytes(shape, itemsize, index)
    ranges = GridRanges("f", 100, block_grid(shape, itemsize, index, max_gap=max_gap, page=page))
    listed = list(ranges)
    assert listed == [ranges[i] for i in range(len(ranges))] == ranges[:]
    assert ranges.nbytes == sum(r.nbytes for r in listed)
    touched = [byte for r in listed for byte in range(r.start - 100, r.stop - 100)]
    assert touched == sorted(set(touched)), "sorted and without overlap"
    assert wanted <= set(touched)
    if max_gap == 0 and page == 1:
        assert wanted == set(touched)
    if wanted:
        assert min(wanted) == touched[0] and max(wanted) == touched[-1]
    unwanted = sorted(set(touched) - wanted)
    longest = run = 0
    for previous, byte in zip([None, *unwanted], unwanted, strict=False):
        run = run + 1 if previous is not None and byte == previous + 1 else 1
        longest = max(longest, run)
    assert longest <= max(max_gap, page)


@pytest.mark.parametrize(
    ("index", "blocks", "span"),
    [
        ((slice(0, 8), slice(0, 1024)), 1, 16384),  # everything: one run
        ((slice(2, 5), slice(0, 1024)), 1, 6144),  # whole rows: one run
        ((slice(2, 3), slice(10, 20)), 1, 20),  # inside one row
        ((slice(0, 8), slice(0, 512)), 8, 1024),  # half of each row: a run a row
    ],
)
def test_the_longest_runs_are_found(index, blocks, span):
    grid = block_grid((8, 1024), 2, index, max_gap=0)
    assert grid is not None
    assert (grid.blocks, grid.span, grid.contiguous) == (blocks, span, True)


def test_gaps_are_read_where_skipping_costs_more():
    index = (slice(0, 8), slice(0, 1000))
    assert block_grid((8, 1024), 2, index, max_gap=47).blocks == 8
    merged = block_grid((8, 1024), 2, index, max_gap=48)
    assert (merged.blocks, merged.span, merged.contiguous) == (1, 7 * 2048 + 2000, False)


def test_a_column_slice_of_a_large_matrix_is_planned_without_a_list():
    grid = block_grid((1 << 20, 16384), 2, (slice(0, 1 << 20), slice(1024, 2048)), max_gap=512, page=4096)
    ranges = GridRanges("f", 0, grid)
    assert (len(ranges), ranges.nbytes) == (1 << 20, (1 << 20) * 2048)
    assert ranges[-1].stop == ((1 << 20) - 1) * 32768 + 4096
    with pytest.raises(IndexError):
        ranges[1 << 20]
