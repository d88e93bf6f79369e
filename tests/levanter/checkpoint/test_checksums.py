"""Digests notice what they promise to notice, and copies are copies."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from levanter.checkpoint.checksums import (
    ArrayDigests,
    array_digest,
    chunks_in,
    copy_with_digest,
    encode_digests,
    merge_digests,
)

pytestmark = pytest.mark.quick


def oracle(data: bytes) -> str:
    """The definition, with Python's own integers."""
    whole = len(data) // 8 * 8
    sums = []
    for begin in range(0, whole, 1 << 18):
        piece = data[begin : min(begin + (1 << 18), whole)]
        sums.append(sum(int.from_bytes(piece[n : n + 8], "little") for n in range(0, len(piece), 8)) % 2**64)
    sums += [int.from_bytes(data[whole:], "little"), len(data)]
    return hashlib.blake2b(b"".join(n.to_bytes(8, "little") for n in sums), digest_size=8).hexdigest()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_, np.int32, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (130, 517)], ids=str)
def test_a_digest_is_what_it_is_said_to_be(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    target = np.zeros_like(values)
    assert copy_with_digest(values, target) == array_digest(values) == oracle(values.tobytes())
    assert target.tobytes() == values.tobytes()


def test_of_parts_that_do_not_lie_together():
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    target = np.zeros((6, 8), np.float32)
    assert copy_with_digest(values[1:5, 2:7], target[1:5, 2:7]) == oracle(values[1:5, 2:7].tobytes())
    assert (target[1:5, 2:7] == values[1:5, 2:7]).all() and target.sum() == values[1:5, 2:7].sum()


def test_every_flipped_bit_is_noticed():
    values = np.random.default_rng(1).standard_normal(37).astype(np.float32)
    whole = bytearray(values.tobytes())
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        assert array_digest(np.frombuffer(bytes(whole), np.float32)) != array_digest(values)
        whole[bit // 8] ^= 1 << bit % 8


def test_pieces_that_changed_places_are_noticed():
    values = np.arange(1 << 17, dtype=np.float32)
    half = values.size // 2
    assert array_digest(np.concatenate([values[half:], values[:half]])) != array_digest(values)


def test_the_chunks_of_a_box():
    found = dict(chunks_in(((3, 9), (0, 4)), (4, 4), (10, 6)))
    assert found == {(0, 0): ((0, 4), (0, 4)), (1, 0): ((4, 8), (0, 4)), (2, 0): ((8, 10), (0, 4))}


def test_what_several_processes_wrote():
    first = {"a": ArrayDigests(chunk=(2,), by_number={(0,): "00"})}
    second = {"a": ArrayDigests(chunk=(2,), by_number={(1,): "11", (2,): "22"})}
    with pytest.raises(KeyError):
        first["a"].in_order((5,))
    whole = merge_digests(first, encode_digests(second))["a"]
    assert whole.in_order((5,)) == ["00", "11", "22"]
    assert ArrayDigests.of((5,), (2,), ["00", "11", "22"]) == whole
    with pytest.raises(ValueError, match="longer"):
        ArrayDigests.of((5,), (2,), ["00", "11", "22", "33"])
