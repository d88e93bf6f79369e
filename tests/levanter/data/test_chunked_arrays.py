"""Spans out of stored chunks against NumPy, with room for all chunks and for a few."""

import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.data.chunked_arrays import LEAST_SLOTS, Chunks

pytestmark = pytest.mark.quick

CHUNK = 8


class Damaged(Exception):
    """A part that cannot be read."""


def stored(values: np.ndarray, chunk: int = CHUNK):
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": {
            "shape": [len(values)],
            "data_type": str(values.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        },
    }
    array = tensorstore.open(spec, create=True).result()
    array.write(values).result()
    return array


def chunks_of(parts, slots: int) -> Chunks:
    def damaged(number, start, stop, error):
        return Damaged(number, start, stop, error)

    return Chunks([stored(part) for part in parts], dtype=np.int32, cache_bytes=slots * CHUNK * 4, damaged=damaged)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=4).filter(any),
    st.lists(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=30), min_size=1, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_spans_are_numpys(sizes, calls):
    """Over the ends of arrays and chunks, empty spans among them, again and again, with far fewer slots than chunks."""
    parts = [np.arange(size, dtype=np.int32) + 10_000 * n for n, size in enumerate(sizes)]
    whole = np.concatenate(parts)
    found = chunks_of(parts, slots=LEAST_SLOTS)
    for spans in calls:
        begins = np.array([begin % (len(whole) + 1) for begin, _ in spans], np.int64)
        counts = np.array([min(count, len(whole) - b) for (_, count), b in zip(spans, begins, strict=True)], np.int64)
        expected = [whole[b : b + c] for b, c in zip(begins, counts, strict=True)]
        np.testing.assert_array_equal(
            found.read(begins, counts), np.concatenate(expected) if expected else np.zeros(0, np.int32)
        )


def test_long_spans_are_numpys():
    values = np.random.default_rng(0).integers(0, 1000, 30_000).astype(np.int32)
    arrays = [stored(values[:10_500], chunk=2048), stored(values[10_500:], chunk=2048)]
    found = Chunks(arrays, dtype=np.int32, cache_bytes=1 << 20, damaged=lambda *_: Damaged())
    begins = np.array([0, 9_000, 29_000, 10_499, 3])
    counts = np.array([5_000, 4_096, 1_000, 2_000, 1])
    expected = [values[b : b + c] for b, c in zip(begins, counts, strict=True)]
    np.testing.assert_array_equal(found.read(begins, counts), np.concatenate(expected))


def test_what_was_read_is_not_read_again():
    class Counted:
        def __init__(self, array):
            self.array, self.shape, self.chunk_layout, self.asked = array, array.shape, array.chunk_layout, []

        def __getitem__(self, index):
            self.asked.append(index.start // CHUNK)
            return self.array[index]

    values = np.arange(40 * CHUNK, dtype=np.int32)
    counted = Counted(stored(values))
    found = Chunks([counted], dtype=np.int32, cache_bytes=20 * CHUNK * 4, damaged=lambda *_: Damaged())
    for begin in (3, 5, 19 * CHUNK, 4):
        np.testing.assert_array_equal(found.read(np.array([begin]), np.array([6])), values[begin : begin + 6])
    assert counted.asked == [0, 1, 19]
    # Twenty slots: the chunks that were used longest ago make room.
    found.read(np.arange(20, 37) * CHUNK, np.full(17, CHUNK))
    assert counted.asked[3:] == list(range(20, 37))
    found.read(np.array([0, 37 * CHUNK]), np.array([1, 1]))
    assert counted.asked[20:] == [37]
    found.read(np.array([19 * CHUNK]), np.array([1]))
    assert counted.asked[21:] == [19]


def test_a_part_that_cannot_be_read_is_named():
    class Gone:
        def __init__(self, array):
            self.array, self.shape, self.chunk_layout = array, array.shape, array.chunk_layout

        def __getitem__(self, index):
            if index.start >= 2 * CHUNK:
                raise_later = tensorstore.Promise.new()
                raise_later[0].set_exception(ValueError("checksum"))
                return type("Read", (), {"read": lambda _: raise_later[1]})()
            return self.array[index]

    values = np.arange(4 * CHUNK, dtype=np.int32)
    found = Chunks(
        [stored(values), Gone(stored(values))], dtype=np.int32, cache_bytes=1, damaged=lambda *at: Damaged(*at)
    )
    with pytest.raises(Damaged) as caught:
        found.read(np.array([CHUNK, 4 * CHUNK + 17]), np.array([3, 3]))
    assert caught.value.args[:3] == (1, 2 * CHUNK, 3 * CHUNK)
    # What can be read still is.
    np.testing.assert_array_equal(found.read(np.array([CHUNK]), np.array([3])), values[CHUNK : CHUNK + 3])
