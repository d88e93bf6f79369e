"""`LayerMatrices`: the matrices of a stack of layers, each by itself, as what a scanned projection multiplies by.

A loop over stacked weights takes each layer out of the stack. XLA for CPUs writes what it takes to memory and then
multiplies by it, which is most of the time of a few rows' products. Here the loop goes over the layers' numbers, and
the products over a branch for each: only its own array is read, where it lies, and all that is not a product is
compiled once for all layers.

The number comes from the stack: whoever goes through the layers gives it to them first (`numbered`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.linear import Operand

M = TypeVar("M")

LAYERS = "layers"


class LayerMatrices(Operand):
    """A matrix for each layer, all of the same axes.

    Attributes:
        matrices: in the order of the layers, without the axis `layers`.
        number: which of them is meant, int32: `[layers]` in the stack, a scalar in a layer; None until `numbered`.
    """

    matrices: tuple[Operand, ...]
    number: NamedArray | None = None

    @property
    def Layers(self) -> Axis:
        """The axis of the stack."""
        return Axis(LAYERS, len(self.matrices))

    @property
    def axes(self) -> tuple[Axis, ...]:
        matrix_axes = self.matrices[0].axes
        return matrix_axes if self.number is not None and not self.number.axes else (self.Layers, *matrix_axes)

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        return self._switch_over_layers(lambda matrix, x: matrix.dot(x, axis, dtype=dtype), x)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        return self._switch_over_layers(lambda matrix, x, sizes: matrix.ragged_dot(x, axis, sizes), x, sizes)

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        return self._switch_over_layers(lambda matrix, ids: matrix.rows(ids, axis), ids)

    def _switch_over_layers(self, product: Callable[..., NamedArray], *inputs: NamedArray) -> NamedArray:
        assert self.number is not None and not self.number.axes, "a layer's matrices are multiplied by inside its stack"
        # Under `jit` it is traced for the first layer and known for the others.
        product = jax.jit(product)
        branches = [partial(product, matrix) for matrix in self.matrices]
        return jax.lax.switch(self.number.array, branches, *inputs)


def numbered(stack: M) -> M:
    """A stack of layers that know their numbers, for a loop over its axis `layers`."""

    def visit(x: object) -> object:
        if not isinstance(x, LayerMatrices):
            return x
        return dataclasses.replace(x, number=hax.named(jnp.arange(x.Layers.size, dtype=jnp.int32), x.Layers))

    return jax.tree.map(visit, stack, is_leaf=lambda x: isinstance(x, LayerMatrices))
