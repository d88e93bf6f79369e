"""Leaves that no file contains: initialized on the devices while the others are loaded.

For a factor of an adapter, or a head for another task, the table of rules names an initializer instead of a tensor. One
Program initializes all of them, each device its own shards. The values depend on the leaf's path and a seed alone, so
they are the same on every mesh.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.abstract import Leaf
from haliax_ext.program import Placement, Program


class Initializer(Protocol):
    """Makes the values of a leaf; its text says in plans what they are."""

    def __call__(self, leaf: Leaf, key: jax.Array) -> hax.NamedArray:
        """The values, with the axes and the dtype of the leaf; traced under jit."""
        ...


@dataclass(frozen=True)
class Constant:
    """One value everywhere.

    Attributes:
        value: the value.
    """

    value: float = 0.0

    def __call__(self, leaf: Leaf, key: jax.Array) -> hax.NamedArray:
        del key
        return hax.full(haliax_axes(leaf), self.value, dtype=leaf.dtype)

    def __str__(self) -> str:
        return f"{self.value:g} everywhere"


@dataclass(frozen=True)
class Normal:
    """Normally distributed values around 0, made in float32.

    Attributes:
        std: the standard deviation.
    """

    std: float

    def __call__(self, leaf: Leaf, key: jax.Array) -> hax.NamedArray:
        # Drawn in float32 and then cast, so that a bfloat16 leaf is the rounded float32 one.
        values = hax.random.normal(key, haliax_axes(leaf), dtype=jnp.float32) * np.float32(self.std)
        return values.astype(leaf.dtype)

    def __str__(self) -> str:
        return f"normal, σ {self.std:g}"


@dataclass(frozen=True, kw_only=True)
class InitialRule:
    """The initialization of a leaf that the source does not have.

    Attributes:
        target: the leaf's path.
        values: makes it.
        seed: of random values.
    """

    target: str
    values: Initializer
    seed: int = 0

    def array(self, leaf: Leaf) -> hax.NamedArray:
        """The values of `leaf`; call it inside `jit`."""
        # CRC-32 is the same in every process and Python version, unlike `hash`.
        key = jax.random.fold_in(jax.random.key(self.seed), np.uint32(zlib.crc32(leaf.path.encode())))
        values = self.values(leaf, key)
        named = tuple((axis.name, axis.size) for axis in values.axes)
        assert named == leaf.axes and values.dtype == leaf.dtype, f"{self.values} made {values.axes} for {leaf}"
        return values


@dataclass(frozen=True, kw_only=True)
class LeafInit:
    """One leaf that is made.

    Attributes:
        leaf: path, axes and the dtype it is made in.
        rule: how.
    """

    leaf: Leaf
    rule: InitialRule

    @property
    def path(self) -> str:
        """The leaf's path."""
        return self.leaf.path

    def __str__(self) -> str:
        return f"{self.leaf}: {self.rule.values}"


def haliax_axes(leaf: Leaf) -> tuple[hax.Axis, ...]:
    """The axes of a leaf as Haliax has them."""
    return tuple(hax.Axis(name, size) for name, size in leaf.axes)


def initialize_program(initial: Sequence[LeafInit], placement: Placement) -> Program:
    """The Program that makes leaves: nothing in, a dictionary by path out."""

    def run() -> Mapping[str, hax.NamedArray]:
        return {init.path: init.rule.array(init.leaf) for init in initial}

    return Program(name="load.initialize", function=run, inputs=(), out_placement=placement)
