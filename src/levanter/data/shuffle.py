"""Shuffles: permutations of `n` items that are computed, not stored.

A *permutation* computes which item is at position i, for any `i`, without the positions before it. So a run that
resumes at step 300,000 reads exactly the rows that it would have read, at once and without any saved state.

- `Feistel`: a keyed bijection. The index is two halves of equally many bits; eight rounds add a keyed hash of one half
  to the other; a result outside `[0, n)` is permuted again until it is inside (*cycle walking*; at most 4 times on
  average, since the domain is less than `4n`).
- `Affine`: `a·i + b mod n` with `a` prime to `n`. Cheap, but regular.
- `ShuffledWindows`: consecutive windows, each permuted on its own (upstream's `shuffle: 10000`: *eras*).
- `Blocks`: blocks of consecutive items are put into a random order, then items are permuted within windows of several
  blocks. Items that are read at about the same time lie in few blocks, so a remote store is read in few large requests.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Permutation(Protocol):
    """A bijection of `[0, size)`."""

    @property
    def size(self) -> int:
        """The number of items."""
        ...

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The items at these positions: int64, of the shape of `positions`."""
        ...


def subkey(key: int, *words: int | str) -> int:
    """A key of 64 bits derived from another one and some words; the same on every machine."""
    # Python integers are unbounded; the state is reduced to 64 bits at the beginning and in every `_mix_int`.
    state = key & (2**64 - 1)
    for word in words:
        content = word.encode() if isinstance(word, str) else int(word).to_bytes(16, "little", signed=True)
        # 255 ends a word: no UTF-8 byte has this value, so ("ab", "c") and ("a", "bc") differ.
        for byte in content + b"\xff":
            state = _mix_int((state ^ byte) + 0x9E3779B97F4A7C15)
    return state


def _mix_int(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014) on one number."""
    x &= 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def _mix(x: np.ndarray) -> np.ndarray:
    """The same on uint64 arrays, whose products wrap around modulo 2^64 as required."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_words(key: int, numbers: np.ndarray, purpose: int) -> np.ndarray:
    """Pseudorandom integers in [0, 2^53), one for each number; of different purposes they are independent.

    Args:
        key: of 64 bits.
        numbers: int64, of any shape.
        purpose: what the draw is for.
    """
    offset = np.uint64(subkey(key, "draw", purpose))
    # Two rounds: the second makes neighbouring numbers independent of the first one's structure.
    mixed = _mix(_mix(np.asarray(numbers).astype(np.uint64) * _GOLDEN + offset) ^ offset)
    return (mixed >> np.uint64(11)).astype(np.int64)


@dataclass(frozen=True)
class Identity:
    """No shuffle."""

    size: int

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        return np.asarray(positions, np.int64)


@dataclass(frozen=True)
class Feistel:
    """A pseudorandom permutation of `[0, size)`."""

    size: int
    key: int

    @cached_property
    def _half_bits(self) -> int:
        # ⌈bits / 2⌉ for each half: the domain 4^half_bits is at least `size` and less than 4 times as large.
        return max(1, -(-max(self.size - 1, 1).bit_length() // 2))

    @cached_property
    def _round_keys(self) -> tuple[np.uint64, ...]:
        return tuple(np.uint64(_mix_int(self.key + i * int(_GOLDEN))) for i in range(1, _ROUNDS + 1))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        items = self._once(np.asarray(positions).astype(np.uint64))
        # Cycle walking: the domain is a power of 4, so some results are outside [0, size); they are permuted again. It
        # stays a bijection, since every cycle of the larger permutation is followed to its next element inside.
        outside = items >= self.size
        while outside.any():
            items[outside] = self._once(items[outside])
            outside = items >= self.size
        return items.astype(np.int64)

    def _once(self, x: np.ndarray) -> np.ndarray:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        # A Feistel network with xor: invertible whatever the round function is.
        high, low = x >> bits, x & mask
        for key in self._round_keys:
            # The old low half becomes the high one; the round can be undone because it is still there.
            high, low = low, high ^ (_mix((low + _GOLDEN) ^ key) & mask)
        return (high << bits) | low


@dataclass(frozen=True)
class Affine:
    """`a·i + b mod size`: every `a`-th item, from `b` on.

    Raises:
        ValueError: more than 2³² items, whose products no longer fit into 64 bits.
    """

    size: int
    key: int

    def __post_init__(self) -> None:
        if self.size > 2**32:
            raise ValueError(f"a linear permutation covers at most {2**32:,} rows, got {self.size:,}; use feistel")

    @cached_property
    def factors(self) -> tuple[int, int]:
        """`a`, which is prime to the size, and `b`."""
        factor = subkey(self.key, "factor") % self.size
        # The next factor prime to the size; 1 is reached in the worst case.
        while math.gcd(factor, self.size) != 1:
            factor = (factor + 1) % self.size
        return factor, subkey(self.key, "offset") % self.size

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        factor, offset = self.factors
        size = np.uint64(self.size)
        # Both factors are below 2³², so their product fits into 64 bits.
        product = np.asarray(positions).astype(np.uint64) * np.uint64(factor) % size
        return ((product + np.uint64(offset)) % size).astype(np.int64)


def permutation(kind: str | None, size: int, key: int) -> Permutation:
    """The permutation called `feistel` or `linear`; None is `feistel`."""
    return Affine(size, key) if kind == "linear" else Feistel(size, key)


@dataclass(frozen=True)
class ShuffledWindows:
    """Consecutive windows of `window` items, each permuted on its own."""

    size: int
    key: int
    window: int
    kind: str | None = "feistel"

    def __post_init__(self) -> None:
        assert self.window >= 1, self.window

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, np.int64)
        number = positions // self.window
        items = np.empty_like(positions)
        for index in np.unique(number):
            start = int(index) * self.window
            # The last window may be short.
            order = permutation(self.kind, min(self.window, self.size - start), subkey(self.key, int(index)))
            mask = number == index
            items[mask] = start + order(positions[mask] - start)
        return items


@dataclass(frozen=True)
class Blocks:
    """Blocks in random order, then items within windows of blocks; the last block may be short.

    Attributes:
        block: items in a block.
        window: blocks in a window.
    """

    size: int
    key: int
    block: int
    window: int
    kind: str | None = "feistel"

    def __post_init__(self) -> None:
        assert self.block >= 1 and self.window >= 1, (self.block, self.window)

    @property
    def _blocks(self) -> int:
        return -(-self.size // self.block)

    @cached_property
    def _order(self) -> Permutation:
        return permutation(self.kind, self._blocks, subkey(self.key, "blocks"))

    @cached_property
    def _short(self) -> tuple[int, int]:
        """The slot of the last block in the order, and how many items it lacks."""
        lacking = self._blocks * self.block - self.size
        if lacking == 0:
            return self._blocks, 0
        # A search, once: a permutation here knows no inverse. Slots are few.
        # In pieces of 2^20, so that the memory does not grow with the number of blocks.
        step = 1 << 20
        for start in range(0, self._blocks, step):
            slots = np.arange(start, min(start + step, self._blocks))
            hits = np.flatnonzero(self._order(slots) == self._blocks - 1)
            if len(hits):
                return start + int(hits[0]), lacking
        raise AssertionError("a permutation without its last element")

    def _slot_start(self, slot: np.ndarray) -> np.ndarray:
        # A *slot* is a place in the order of blocks. Slot s begins at s·block, less what the short block before it
        # lacks.
        short_slot, lacking = self._short
        return slot * self.block - np.where(slot > short_slot, lacking, 0)

    def _slots(self, position: np.ndarray) -> np.ndarray:
        short_slot, lacking = self._short
        # Slots in front of the short block are `block` long; behind it every slot begins `lacking` earlier.
        after_short = position >= (short_slot + 1) * self.block - lacking
        return np.where(after_short, (position + lacking) // self.block, position // self.block)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, np.int64)
        # Windows are runs of `window` consecutive slots; the short block makes its window shorter.
        windows = self._slots(positions) // self.window
        items = np.empty_like(positions)
        for index in np.unique(windows):
            first = int(index) * self.window
            start, stop = self._slot_start(np.array([first, min(first + self.window, self._blocks)]))
            order = permutation(self.kind, int(stop - start), subkey(self.key, "window", int(index)))
            mask = windows == index
            # First within the window: `moved` is a position in the order of blocks; its slot then gives the block and
            # the offset.
            moved = start + order(positions[mask] - start)
            slot = self._slots(moved)
            items[mask] = self._order(slot) * self.block + (moved - self._slot_start(slot))
        return items
