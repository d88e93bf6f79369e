"""Index algebra against brute force: number every element of the source, rearrange with NumPy, compare."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haliax_ext.leaf_layout import (
    LeafLayout,
    box_shape,
    box_size,
    cut_digits,
    digit_boxes,
    intersect,
    merge_spans,
    runs,
    to_slices,
)

SIZES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


@st.composite
def boxes_in(draw, sizes):
    spans = []
    for size in sizes:
        start = draw(st.integers(0, size - 1))
        spans.append((start, draw(st.integers(start + 1, size))))
    return tuple(spans)


def flat_indices(box, sizes):
    return np.arange(math.prod(sizes)).reshape(sizes)[to_slices(box)].reshape(-1)


@given(data=st.data(), sizes=SIZES)
def test_runs_are_the_flattened_indices(data, sizes):
    box = data.draw(boxes_in(sizes))
    starts, length = runs(box, sizes)
    found = (starts[:, None] + np.arange(length)).reshape(-1)
    np.testing.assert_array_equal(found, flat_indices(box, sizes))


def test_slices_of_a_flattened_head_axis():
    sizes = (2, 3, 4)  # kv_head, q_heads_per_group, head_size
    starts, length = runs(((1, 2), (0, 3), (0, 4)), sizes)
    assert (starts.tolist(), length) == ([12], 12), "a slice of kv_head is contiguous rows"
    starts, length = runs(((0, 2), (0, 3), (2, 4)), sizes)
    assert (starts.tolist(), length) == ([2, 6, 10, 14, 18, 22], 2), "a slice of head_size is a list of row ranges"


@given(data=st.data(), sizes=SIZES)
def test_digit_boxes_tile_the_range_in_order(data, sizes):
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start, total))
    found = digit_boxes(start, stop, sizes)
    tiled = np.concatenate([flat_indices(box, sizes) for box in found]) if found else np.zeros(0, int)
    np.testing.assert_array_equal(tiled, np.arange(start, stop))
    assert len(found) <= max(2 * len(sizes) - 1, 1)


def test_digit_boxes_of_the_docstring():
    spans = [sum(d * 10 ** (2 - i) for i, (d, _) in enumerate(box)) for box in digit_boxes(37, 413, (10, 10, 10))]
    assert spans == [37, 40, 100, 400, 410]


@given(data=st.data(), sizes=SIZES, limit=st.integers(1, 40))
def test_cut_digits_keeps_order_and_limit(data, sizes, limit):
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    pieces = [p for box in digit_boxes(start, stop, sizes) for p in cut_digits(box, limit)]
    assert all(box_size(p) <= limit for p in pieces)
    tiled = np.concatenate([flat_indices(p, sizes) for p in pieces])
    np.testing.assert_array_equal(tiled, np.arange(start, stop))
    for piece in pieces:
        starts, _ = runs(piece, sizes)
        assert len(starts) == 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=8), st.integers(0, 4))
def test_merged_spans_hold_the_union_and_only_small_gaps(pieces, gap):
    starts = np.array([s for s, _ in pieces])
    stops = np.array([s + n for s, n in pieces])
    merged = merge_spans(starts, stops, gap)
    wanted = set(itertools.chain(*(range(s, s + n) for s, n in pieces)))
    held = set(itertools.chain(*(range(a, b) for a, b in merged)))
    assert wanted <= held
    assert all(b + gap < c for (_, b), (c, _) in itertools.pairwise(merged))
    for start, stop in merged:
        inside = sorted(wanted & set(range(start, stop)))
        assert inside[0] == start and inside[-1] == stop - 1
        assert all(y - x - 1 <= gap for x, y in itertools.pairwise(inside))


NAMES = "abcdef"


@st.composite
def layouts(draw):
    """A layout with any stack, flattening, transposition, part, wider digits and padding."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    names = NAMES[: len(sizes)]
    shuffled = draw(st.permutations(names))
    stacked = tuple(shuffled[: draw(st.integers(0, min(2, len(names))))])
    rest = list(shuffled[len(stacked) :])
    rank = draw(st.integers(1, 3))
    bounds = sorted(draw(st.lists(st.integers(0, len(rest)), min_size=rank - 1, max_size=rank - 1)))
    groups = tuple(tuple(rest[a:b]) for a, b in itertools.pairwise([0, *bounds, len(rest)]))
    extents = dict(zip(names, sizes, strict=True))
    padded = draw(st.sampled_from([None, *names]))
    axes = tuple((n, s + (2 if n == padded else 0)) for n, s in extents.items())
    wider = {}
    for name in itertools.chain(*groups):
        if name != padded and draw(st.integers(0, 3)) == 0:
            first = draw(st.integers(0, 3))
            wider[name] = (first, first + extents[name] + draw(st.integers(0, 2)))
    digits = extents | {name: of for name, (_, of) in wider.items()}
    part = tuple(math.prod(digits[n] for n in group) for group in groups)
    offsets = tuple(draw(st.integers(0, 3)) for _ in groups)
    shape = tuple(p + o + draw(st.integers(0, 2)) for p, o in zip(part, offsets, strict=True))
    return LeafLayout(
        axes=axes,
        stacked=stacked,
        groups=groups,
        source_shape=shape,
        offsets=offsets,
        extents=tuple(extents.values()),
        wider=wider,
    )


def brute_force(layout, rng):
    """Random source tensors, and the leaf assembled from them by plain NumPy (zeros where padded)."""
    extents = dict(zip([n for n, _ in layout.axes], layout.extents, strict=True))
    stack_shape = tuple(extents[n] for n in layout.stacked)
    sources = rng.integers(1, 10_000, (*stack_shape, *layout.source_shape))
    part = tuple(slice(o, o + p) for o, p in zip(layout.offsets, layout.part_shape, strict=True))
    flat_names = [*layout.stacked, *itertools.chain(*layout.groups)]
    digits = {name: layout.wider.get(name, (0, extent)) for name, extent in extents.items()}
    unflattened = sources[(*[slice(None)] * len(stack_shape), *part)].reshape([digits[n][1] for n in flat_names])
    firsts = [(digits[n][0], extents[n]) for n in flat_names]
    unflattened = unflattened[tuple(slice(first, first + extent) for first, extent in firsts)]
    whole = unflattened.transpose([flat_names.index(n) for n, _ in layout.axes])
    target = np.zeros([s for _, s in layout.axes], whole.dtype)
    target[tuple(slice(0, e) for e in whole.shape)] = whole
    return sources, target


@settings(max_examples=300, deadline=None)
@given(data=st.data(), layout=layouts(), seed=st.integers(0, 99))
def test_a_block_read_through_cover_and_copies_equals_numpy(data, layout, seed):
    sources, target = brute_force(layout, np.random.default_rng(seed))
    blocks = [data.draw(boxes_in(target.shape)) for _ in range(data.draw(st.integers(1, 3)))]
    found = [np.zeros(box_shape(box), target.dtype) for box in blocks]
    held = [(box, array) for box, array in zip(blocks, found, strict=True) if layout.clipped(box)]
    if held:
        clipped = [layout.clipped(box) for box, _ in held]
        spans = layout.cover(clipped, itemsize=8, gap_bytes=data.draw(st.sampled_from([0, 16, 1000])))
        limit = data.draw(st.integers(1, 100))
        per_axis = [
            [piece for a, b in axis for box in digit_boxes(a, b, sizes) for piece in cut_digits(box, limit)]
            for axis, sizes in zip(spans, layout.group_sizes, strict=True)
        ]
        for stack in sorted({s for box in clipped for s in layout.stack_indices(box)}):
            for digits in itertools.product(*per_axis):
                buffer = np.ascontiguousarray(sources[(*stack, *to_slices(layout.source_box(digits)))])
                for box, array in held:
                    copy = layout.copy(stack, digits, box)
                    if copy is not None:
                        memory = copy.in_place(array, buffer.shape)
                        if memory is not None:
                            assert np.shares_memory(memory, array)
                            memory[...] = buffer
                        else:
                            copy.scatter(buffer, array)
    for box, array in zip(blocks, found, strict=True):
        np.testing.assert_array_equal(array, target[to_slices(box)])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), layout=layouts(), seed=st.integers(0, 99))
def test_exact_source_boxes_hold_exactly_the_block(data, layout, seed):
    sources, target = brute_force(layout, np.random.default_rng(seed))
    box = layout.clipped(data.draw(boxes_in(target.shape)))
    if box is None:
        return
    needed = [
        sources[(*stack, *to_slices(piece))].reshape(-1)
        for stack in layout.stack_indices(box)
        for piece in layout.source_boxes(box)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(needed)), np.sort(target[to_slices(box)].reshape(-1)))


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 99))
def test_gather_is_the_inverse_of_scatter(layout, seed):
    sources, target = brute_force(layout, np.random.default_rng(seed))
    whole = tuple((0, size) for size in target.shape)
    digits = [tuple((0, s) for s in sizes) for sizes in layout.group_sizes]
    for stack in layout.stack_indices(layout.whole):
        wanted = sources[(*stack, *to_slices(layout.source_box(digits)))]
        # What lies between the pieces of wider digits is not touched.
        untouched = np.full(layout.source_shape, -1)
        mine = np.zeros(untouched.shape, bool)
        for box in layout.source_boxes(layout.whole):
            mine[to_slices(box)] = True
        there = to_slices(layout.source_box(digits))
        buffer = np.ascontiguousarray(np.where(mine, 0, untouched)[there])
        layout.copy(stack, digits, whole).gather(target, buffer)
        np.testing.assert_array_equal(buffer, np.where(mine[there], wanted, -1))


def test_the_cover_reads_through_small_gaps_only():
    layout = LeafLayout(
        axes=(("rows", 8), ("columns", 16)),
        stacked=(),
        groups=(("rows",), ("columns",)),
        source_shape=(8, 16),
        offsets=(0, 0),
        extents=(8, 16),
    )
    left_half = ((0, 8), (0, 8))
    assert layout.cover([left_half], itemsize=4, gap_bytes=0) == ([(0, 8)], [(0, 8)])
    assert layout.cover([left_half], itemsize=4, gap_bytes=32) == ([(0, 8)], [(0, 16)])
    one_row = ((2, 3), (0, 8))
    assert layout.cover([one_row], itemsize=4, gap_bytes=32) == ([(2, 3)], [(0, 8)])
    two_rows = [((0, 1), (0, 16)), ((2, 3), (0, 16))]
    assert layout.cover(two_rows, itemsize=4, gap_bytes=63) == ([(0, 1), (2, 3)], [(0, 16)])
    assert layout.cover(two_rows, itemsize=4, gap_bytes=64) == ([(0, 3)], [(0, 16)])


@pytest.mark.parametrize(("a", "b", "both"), [(((0, 4),), ((2, 6),), ((2, 4),)), (((0, 2),), ((2, 6),), None)])
def test_intersection(a, b, both):
    assert intersect(a, b) == both
