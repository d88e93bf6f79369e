"""Digests of arrays: what a checkpoint records about each stored chunk, so that readers can verify that it is intact.

A digest is of the values in row-major order, not of files: it covers everything between the memory that was saved
and the memory that is read into. It costs almost nothing where values are copied anyway: pieces that fit a core's
cache are summed and copied together.

The 64-bit words of each piece of 256 KiB are added modulo 2⁶⁴; BLAKE2b of these sums and the length is the digest. Any
change within one word is noticed, so any flipped bit, as are pieces that are lost, repeated or exchanged; of other
damage one case in 2⁶⁴ is not. It is no protection against deliberate changes.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Box = tuple[tuple[int, int], ...]
Number = tuple[int, ...]
"""A chunk's index along each axis of its array."""

_WORDS = 32 * 1024
"""Words of a piece."""
_AT_ONCE = 2 * _WORDS
"""Words that are added up and copied at once: half of the second-level cache of common cores."""


@dataclass(frozen=True, kw_only=True)
class ArrayDigests:
    """The digests of an array's chunks.

    Attributes:
        chunk: the shape of a chunk.
        by_number: digests, as hexadecimal digits; in one of several processes, of the chunks that it wrote.
    """

    chunk: tuple[int, ...]
    by_number: Mapping[Number, str]

    def in_order(self, shape: Sequence[int]) -> list[str]:
        """The digests of all chunks of an array, the last axis running fastest.

        Raises:
            KeyError: some chunk has none.
        """
        return [self.by_number[number] for number in numbers(shape, self.chunk)]

    @classmethod
    def of(cls, shape: Sequence[int], chunk: Sequence[int], digests: Sequence[str]) -> "ArrayDigests":
        """The digests that `in_order` gave.

        Raises:
            ValueError: there are more or fewer of them than chunks.
        """
        if len(chunk) != len(shape) or not all(size > 0 for size in chunk):
            raise ValueError(f"a chunk of {list(chunk)} in an array of {list(shape)}")
        by_number = dict(zip(numbers(shape, chunk), digests, strict=True))
        return cls(chunk=tuple(chunk), by_number=by_number)


def encode_digests(digests: Mapping[str, ArrayDigests]) -> bytes:
    """The digests of one process's chunks, for another process."""
    return json.dumps(
        {name: [[list(n), x] for n, x in array_digests.by_number.items()] for name, array_digests in digests.items()}
    ).encode()


def merge_digests(local: Mapping[str, ArrayDigests], text: bytes) -> dict[str, ArrayDigests]:
    """Digests of a process's own chunks, with those that `encode_digests` gave of another's."""
    others = {name: {tuple(n): x for n, x in pairs} for name, pairs in json.loads(text).items()}
    return {
        name: ArrayDigests(chunk=digests.chunk, by_number={**digests.by_number, **others[name]})
        for name, digests in local.items()
    }


def numbers(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Number]:
    """All chunks of an array, the last axis running fastest."""
    # The last chunk along an axis may be shorter, hence the rounding up.
    return itertools.product(*(range(-(-size // part)) for size, part in zip(shape, chunk, strict=True)))


def chunks_in(box: Box, chunk: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Number, Box]]:
    """The chunks of an array that a box of it touches, each with its own box."""
    touched = (range(start // part, -(-stop // part)) for (start, stop), part in zip(box, chunk, strict=True))
    for number in itertools.product(*touched):
        ends = zip(number, chunk, shape, strict=True)
        yield number, tuple((n * part, min((n + 1) * part, size)) for n, part, size in ends)


def box_chunks(box: Box, chunk: Sequence[int]) -> Iterator[tuple[Number, tuple[slice, ...]]]:
    """The chunks of a box, each with its slices inside the box; chunks divide the box."""
    # Chunks are numbered from the beginning of the array; the box's end is as good as the array's, since chunks divide
    # it.
    ends = tuple(stop for _, stop in box)
    for number, chunk_box in chunks_in(box, chunk, ends):
        yield number, tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(chunk_box, box, strict=True))


def array_digest(array: np.ndarray) -> str:
    """The digest of an array's values."""
    return _digest(np.ascontiguousarray(array), None)


def copy_with_digest(source: np.ndarray, target: np.ndarray) -> str:
    """Copies an array into another of the same shape and dtype, and returns the digest of its values."""
    assert source.shape == target.shape and source.dtype == target.dtype
    if source.flags.c_contiguous and target.flags.c_contiguous:
        return _digest(source, target)
    np.copyto(target, source)
    return array_digest(target)


def _digest(source: np.ndarray, target: np.ndarray | None) -> str:
    source_bytes = _bytes(source)
    target_bytes = None if target is None else _bytes(target)
    whole = source_bytes.size // 8 * 8
    words = source_bytes[:whole].view("<u8")
    copies = None if target_bytes is None else target_bytes[:whole].view("<u8")
    sums: list[int] = []
    full = words.size // _WORDS * _WORDS
    # Added up first and copied then: the cache has the words for the copy, which writes past it.
    for begin in range(0, full, _AT_ONCE):
        piece = words[begin : min(begin + _AT_ONCE, full)]
        # uint64 addition wraps, which is addition modulo 2⁶⁴.
        sums += np.add.reduce(piece.reshape(-1, _WORDS), axis=1).tolist()
        if copies is not None:
            np.copyto(copies[begin : begin + piece.size], piece)
    if full < words.size:
        sums.append(int(np.add.reduce(words[full:])))
        if copies is not None:
            np.copyto(copies[full:], words[full:])
    rest = source_bytes[whole:]
    if target_bytes is not None:
        target_bytes[whole:] = rest
    # The bytes behind the last word, and the length, so that an array is not equal to itself with zeros appended.
    sums += [int.from_bytes(rest.tobytes(), "little"), source_bytes.size]
    return hashlib.blake2b(np.asarray(sums, "<u8").tobytes(), digest_size=8).hexdigest()


def _bytes(array: np.ndarray) -> np.ndarray:
    # Arrays of no axes, and of dtypes that NumPy does not know itself, have bytes too.
    assert math.prod(array.shape)
    return array.reshape(-1).view(np.uint8)
