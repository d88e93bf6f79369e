"""Weights as 8-bit integers with a scale per output channel: `Int8Matrix`, and models with such projections.

Symmetric, per output channel: with the contracted axes `In`, `scale = max |w| / 127` over *all* of them, and
`q = round(w / scale)` in [−127, 127]. The maximum is over the entire axis, however it is sharded, so the integers are
the same on every mesh. `y = (x · q) · scale`: the scale is applied after the reduction, sums are float32, and the
integers are converted inside the product. An element is off by at most half a scale, so |Δy| ≤ ½ · scale · ‖x‖₁.

Every `Linear` except routers is quantized, each expert separately, and so is the output head. Embeddings, norms and
biases are not.
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
"""The largest integer; the range is symmetric, so −128 is not used."""
STEP = np.float32(1 / LARGEST)
SMALLEST_SCALE = np.finfo(np.float32).tiny
"""Smaller scales are set to 0: they are subnormal, and platforms differ in whether they flush subnormals to zero."""
EXPERT = "expert"
COPIES = ("layers", EXPERT)
"""Axes of stacked matrices."""
ROUTER = "router"
"""Attribute name of the projection that chooses among experts. It is not quantized: it is small, and its result is a
discrete choice."""


class Int8Matrix(Operand):
    """Integers times a scale per output channel.

    Attributes:
        q: int8, `[*Out, *In]`.
        scale: float32, `[*Out]`; axes of stacked matrices (`layers`, `expert`) are among `Out`.
    """

    q: NamedArray
    scale: NamedArray

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.q.axes

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        scale_axes = {axis_.name for axis_ in self.scale.axes}
        # A contracted axis that the scale has (`expert`) cannot be summed before the scale is applied: its sum follows.
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
        # The scales of each row's group. `total_repeat_length` makes the shape static; rows behind the last group get
        # the last scales, and their results are undefined anyway.
        of_row = jnp.repeat(scales, sizes.array, axis=0, total_repeat_length=Token.size)
        return hax.named((product * of_row).astype(x.dtype), (Token, Out))

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        entries = self.q.take(axis, ids).astype(jnp.float32)
        scale = self.scale.take(axis, ids) if any(axis_.name == axis for axis_ in self.scale.axes) else self.scale
        # Float32: a looked-up row is dequantized, and the caller casts it.
        return (entries * scale).rearrange(entries.axes)

    def matrix(self) -> NamedArray:
        """The matrix that it represents, in float32."""
        return (self.q.astype(jnp.float32) * self.scale).rearrange(self.q.axes)


def int8_matrix(weight: NamedArray, In: tuple[str, ...]) -> Int8Matrix:
    """Quantizes a matrix; traced under jit, with a collective if a contracted axis is sharded.

    A channel with a value that is not finite gets an infinite scale and integers of 0, so that its products are NaN as
    those of the original would be. A channel of zeros, such as padding, has the scale 0.

    Args:
        weight: `[*Out, *In]`, floating.
        In: names of the contracted axes.
    """
    exact = weight.astype(jnp.float32)
    finite = hax.isfinite(exact)
    # Infinity instead of NaN: the maximum of NaNs over devices depends on the platform.
    size = hax.max(hax.where(finite, hax.abs(exact), math.inf), In)
    scale = size * STEP
    scale = hax.where(scale < SMALLEST_SCALE, 0.0, scale)
    usable = (scale > 0) & hax.isfinite(scale)
    # Multiply by the reciprocal explicitly: compilers rewrite some divisions that way, so results would differ.
    inverse = hax.where(usable, 1 / hax.where(usable, scale, 1.0), 0.0)
    scaled = hax.where(finite, exact, 0.0) * inverse
    # The largest element is 127 up to float32 rounding; the clip guards the cast to int8.
    q = hax.clip(hax.round(scaled), -LARGEST, LARGEST).astype(jnp.int8)
    return Int8Matrix(q=q.rearrange(weight.axes), scale=scale)


def projections(model: PyTree) -> Mapping[str, Linear]:
    """All projections of a model, by path."""
    flat = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_linear)[0]
    return {path_string(keys): x for keys, x in flat if isinstance(x, Linear)}


def quantizable(model: PyTree) -> Mapping[str, Linear]:
    """The projections of a model that can be int8, by path: those whose weight is an array, except routers."""
    return {
        path: linear
        for path, linear in projections(model).items()
        if isinstance(linear.weight, NamedArray) and path.rsplit(".", 1)[-1] != ROUTER
    }


def _is_linear(x: object) -> bool:
    return isinstance(x, Linear)


def with_int8(model: M, chosen: Callable[[str], bool]) -> M:
    """Replaces the weights of some projections by abstract int8 matrices.

    Args:
        model: its arrays may be abstract.
        chosen: whether to replace the weight of the projection at a path; only `quantizable` ones are replaced.
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
    """An abstract model whose projections have their contracted axes before the axes of their results.

    On a CPU, products with few rows read such a matrix in place. In the other order, if the result has several axes, as
    queries have, the matrix is transposed in every layer of every step.
    """

    def visit(x: object) -> object:
        if not isinstance(x, Linear) or not isinstance(x.weight, NamedArray):
            return x
        axes = _contracted_first(x.weight.axes, x.In)
        return dataclasses.replace(x, weight=_abstract(axes, x.weight.dtype))

    return jax.tree.map(visit, model, is_leaf=_is_linear)


def _contracted_first(axes: tuple[Axis, ...], In: tuple[str, ...]) -> tuple[Axis, ...]:
    """Axes of stacked matrices, then the contracted axes, then those of the result."""
    copies = tuple(axis for axis in axes if axis.name in COPIES and axis.name not in In)
    inner = tuple(axis for axis in axes if axis.name in In)
    return (*copies, *inner, *(axis for axis in axes if axis not in copies and axis not in inner))


def with_untied_head(model: M) -> M:
    """Adds a separate abstract head, with the axes and dtype of the embedding table, to a model with tied weights.

    A model that has a head, or no attribute `lm_head`, is returned unchanged.
    """
    # `model` as the default is not None, so a missing attribute counts as a head.
    if getattr(model, "lm_head", model) is not None:
        return model
    head: Linear = model.head  # pyright: ignore[reportAttributeAccessIssue]
    axes = head.operand.axes
    weight = _abstract(axes, head.weight.array.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    new_head = Linear(weight=weight, bias=None, In=head.In)
    return eqx.tree_at(lambda m: m.lm_head, model, new_head, is_leaf=lambda x: x is None)


def abstract_int8(axes: tuple[Axis, ...], In: tuple[str, ...]) -> Int8Matrix:
    """An abstract int8 matrix over these axes.

    If several axes are contracted, they come first, after axes of stacked matrices: on a TPU, products with few rows
    read the integers in place if the axes of the result are innermost, and otherwise transpose them in each layer (half
    of an output projection's cycles in a decode step).
    """
    Out = tuple(axis for axis in axes if axis.name not in In)
    if len(In) > 1:
        axes = _contracted_first(axes, In)
    return Int8Matrix(q=_abstract(axes, np.int8), scale=_abstract(Out, np.float32))


def _abstract(axes: tuple[Axis, ...], dtype: DTypeLike) -> NamedArray:
    array = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), np.dtype(dtype))
    return NamedArray(cast(jax.Array, array), axes)
