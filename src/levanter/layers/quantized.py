"""Weights as 8-bit integers with a scale per output channel: `Int8Matrix`, and a model whose projections are such.

Symmetric, per output channel: with the contracted axes `In`, `scale = max |w| / 127` over *all* of them, and
`q = round(w / scale)` in [−127, 127]. The maximum is that of the entire axis, however it is sharded, so the integers
are the same on every mesh. `y = (x · q) · scale`: the scale comes in after the reduction, sums are float32, and the
integers are converted inside the product. An element is off by at most half a scale, so |Δy| ≤ ½ · scale · ‖x‖₁.

What is quantized is every `Linear` but a router, experts each on their own, and the output head. Embeddings, norms and
biases stay as they are.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from haliax_ext.pytree import KeyPath, PyTree, path_string
from levanter.layers.linear import Linear, Operand

M = TypeVar("M")

LARGEST = 127
"""The largest integer: the range is symmetric, −128 is not used."""
STEP = np.float32(1 / LARGEST)
SMALLEST_SCALE = np.finfo(np.float32).tiny
"""A channel with a smaller scale is 0: it is not a normal number, and platforms differ about others."""
EXPERT = "expert"
COPIES = ("layers", EXPERT)
"""Axes that count copies of a matrix."""
ROUTER = "router"
"""What mixtures of experts call the projection that chooses among them. It stays as it is: it is small, and what it
decides is discrete."""


class Int8Matrix(Operand):
    """Integers times a scale per output channel.

    Attributes:
        q: int8, `[*Out, *In]`.
        scale: float32, `[*Out]`; axes that count copies of the matrix (`layers`, `expert`) are among those of `Out`.
    """

    q: NamedArray
    scale: NamedArray

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.q.axes

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        scale_axes = {axis_.name for axis_ in self.scale.axes}
        copies = tuple(name for name in axis if name in scale_axes)
        contracted = tuple(name for name in axis if name not in scale_axes)
        product = hax.dot(x, self.q.astype(x.dtype), axis=contracted, preferred_element_type=jnp.float32)
        product = (product * self.scale).rearrange(product.axes)
        if copies:
            product = hax.sum(product, copies)
        return product.astype(x.dtype if dtype is None else dtype)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        (Group,) = sizes.axes
        (Token,) = (axis_ for axis_ in x.axes if axis_.name != axis)
        (Out,) = (axis_ for axis_ in self.scale.axes if axis_.name != Group.name)
        matrices = self.q.rearrange((Group.name, axis, Out.name)).array.astype(x.dtype)
        rows = x.rearrange((Token.name, axis)).array
        product = jax.lax.ragged_dot(rows, matrices, sizes.array, preferred_element_type=jnp.float32)
        scales = self.scale.rearrange((Group.name, Out.name)).array
        of_row = jnp.repeat(scales, sizes.array, axis=0, total_repeat_length=Token.size)
        return hax.named((product * of_row).astype(x.dtype), (Token, Out))

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        entries = self.q.take(axis, ids).astype(jnp.float32)
        scale = self.scale.take(axis, ids) if any(axis_.name == axis for axis_ in self.scale.axes) else self.scale
        return (entries * scale).rearrange(entries.axes)

    def matrix(self) -> NamedArray:
        """What it stands for, in float32."""
        return (self.q.astype(jnp.float32) * self.scale).rearrange(self.q.axes)


def int8_matrix(weight: NamedArray, In: tuple[str, ...]) -> Int8Matrix:
    """A matrix as integers and scales; traced under jit, with a collective where a contracted axis is sharded.

    A channel that holds a number which is not finite gets an infinite scale and integers of 0, so that its products are
    NaN as they would have been. A channel of zeros, such as padding, has a scale of 0.

    Args:
        weight: `[*Out, *In]`, floating.
        In: names of the contracted axes.
    """
    exact = weight.astype(jnp.float32)
    finite = hax.isfinite(exact)
    # Infinite instead of NaN: what a maximum over devices makes of NaN is up to the platform.
    size = hax.max(hax.where(finite, hax.abs(exact), math.inf), In)
    scale = size * STEP
    scale = hax.where(scale < SMALLEST_SCALE, 0.0, scale)
    usable = (scale > 0) & hax.isfinite(scale)
    # A product with the reciprocal, because compilers make one of a quotient, and not always.
    inverse = hax.where(usable, 1 / hax.where(usable, scale, 1.0), 0.0)
    scaled = hax.where(finite, exact, 0.0) * inverse
    q = hax.clip(hax.round(scaled), -LARGEST, LARGEST).astype(jnp.int8)
    return Int8Matrix(q=q.rearrange(weight.axes), scale=scale)


def projections(model: PyTree) -> Mapping[str, Linear]:
    """All projections of a model by path."""
    flat = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_linear)[0]
    return {path_string(keys): x for keys, x in flat if isinstance(x, Linear)}


def quantizable(model: PyTree) -> Mapping[str, Linear]:
    """The projections of a model that can be int8, by path: those whose weight is an array, but no router."""
    return {
        path: linear
        for path, linear in projections(model).items()
        if isinstance(linear.weight, NamedArray) and path.rsplit(".", 1)[-1] != ROUTER
    }


def _is_linear(x: object) -> bool:
    return isinstance(x, Linear)


def with_int8(model: M, chosen: Callable[[str], bool]) -> M:
    """`model`, whose arrays may be abstract, with int8 matrices in the place of some projections' weights, abstract.

    Args:
        model: with projections of `quantizable`.
        chosen: whether the projection at a path is replaced.
    """
    linears = quantizable(model)

    def visit(keys: KeyPath, x: object) -> object:
        path = path_string(keys)
        if path not in linears or not chosen(path):
            return x
        linear = linears[path]
        return dataclasses.replace(linear, weight=abstract_int8(linear.operand.axes, linear.In))

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=_is_linear)


def contracted_first(model: M) -> M:
    """`model`, abstract, whose projections have their contracted axes before those of their results.

    A product of a few rows on a CPU reads such a matrix as it lies. Where results have several axes, as queries have,
    the other order is laid out anew in every layer of every step.
    """

    def visit(x: object) -> object:
        if not isinstance(x, Linear) or not isinstance(x.weight, NamedArray):
            return x
        axes = _contracted_first(x.weight.axes, x.In)
        return dataclasses.replace(x, weight=_abstract(axes, x.weight.dtype))

    return jax.tree.map(visit, model, is_leaf=_is_linear)


def _contracted_first(axes: tuple[Axis, ...], In: tuple[str, ...]) -> tuple[Axis, ...]:
    """Axes that count copies, then the contracted ones, then those of the result."""
    copies = tuple(axis for axis in axes if axis.name in COPIES and axis.name not in In)
    inner = tuple(axis for axis in axes if axis.name in In)
    return (*copies, *inner, *(axis for axis in axes if axis not in copies and axis not in inner))


def with_untied_head(model: M) -> M:
    """A model whose head is its embedding table, with a head of its own, abstract, of the table's axes and dtype.

    What has no place for one is returned as it is.
    """
    if getattr(model, "lm_head", model) is not None:
        return model
    head: Linear = model.head  # pyright: ignore[reportAttributeAccessIssue]
    axes = head.operand.axes
    weight = _abstract(axes, head.weight.array.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    new_head = Linear(weight=weight, bias=None, In=head.In)
    return eqx.tree_at(lambda m: m.lm_head, model, new_head, is_leaf=lambda x: x is None)


def abstract_int8(axes: tuple[Axis, ...], In: tuple[str, ...]) -> Int8Matrix:
    """An int8 matrix over these axes without memory.

    Where several axes are contracted, they come first, behind those that count copies of the matrix: a product of a few
    rows on a TPU reads integers as they lie if the axes of its result are the innermost, and lays them out anew in each
    layer otherwise (half of an output projection's cycles of a decode step).
    """
    Out = tuple(axis for axis in axes if axis.name not in In)
    if len(In) > 1:
        axes = _contracted_first(axes, In)
    return Int8Matrix(q=_abstract(axes, np.int8), scale=_abstract(Out, np.float32))


def _abstract(axes: tuple[Axis, ...], dtype: DTypeLike) -> NamedArray:
    array = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), np.dtype(dtype))
    return NamedArray(cast(jax.Array, array), axes)
