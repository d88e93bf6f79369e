"""`LayerMatrices`: an operand of scanned projections that stores the matrix of each layer as an array of its own.

A loop over stacked weights slices each layer out of the stack. XLA for CPUs copies the slice to memory and then
multiplies by it, which is most of the time of products with few rows. Here the loop is over the layers' numbers, and
each product is a branch on the number: it reads only the layer's own array, in place, and everything but the products
is compiled once for all layers.

The caller assigns the numbers before it loops over the layers (`numbered`).
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
    """A matrix per layer, all with the same axes.

    Attributes:
        matrices: in the order of the layers, without the axis `layers`.
        number: the index of a layer's matrix, int32: `[layers]` in the stack, a scalar inside the loop; None until
            `numbered`.
    """

    matrices: tuple[Operand, ...]
    number: NamedArray | None = None

    @property
    def Layers(self) -> Axis:
        """The axis of the stack."""
        return Axis(LAYERS, len(self.matrices))

    @property
    def axes(self) -> tuple[Axis, ...]:
        # Inside the loop `number` has lost its axis `layers`, and this operand stands for one layer's matrix.
        matrix_axes = self.matrices[0].axes
        return matrix_axes if self.number is not None and not self.number.axes else (self.Layers, *matrix_axes)

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        return self._switch_over_layers(lambda matrix, x: matrix.dot(x, axis, dtype=dtype), x)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        return self._switch_over_layers(lambda matrix, x, sizes: matrix.ragged_dot(x, axis, sizes), x, sizes)

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        return self._switch_over_layers(lambda matrix, ids: matrix.rows(ids, axis), ids)

    def _switch_over_layers(self, product: Callable[..., NamedArray], *inputs: NamedArray) -> NamedArray:
        assert self.number is not None and not self.number.axes, (
            "LayerMatrices outside of a loop over `numbered` layers"
        )
        # The matrices have the same shapes, so under `jit` the product is traced once and reused for all branches.
        product = jax.jit(product)
        branches = [partial(product, matrix) for matrix in self.matrices]
        # Only the selected branch runs, so only its matrix is read.
        return jax.lax.switch(self.number.array, branches, *inputs)


def numbered(stack: M) -> M:
    """A stack of layers whose `LayerMatrices` have their numbers, for a loop over the axis `layers`."""

    def visit(x: object) -> object:
        if not isinstance(x, LayerMatrices):
            return x
        # Along the stack's axis, so a scan over the stack hands each iteration its own number.
        return dataclasses.replace(x, number=hax.named(jnp.arange(x.Layers.size, dtype=jnp.int32), x.Layers))

    return jax.tree.map(visit, stack, is_leaf=lambda x: isinstance(x, LayerMatrices))
