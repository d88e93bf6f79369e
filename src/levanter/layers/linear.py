"""`Linear`: a projection between sets of named axes, by a matrix in whatever representation it comes.

An *operand* is what a projection multiplies by: a matrix over named axes that can be multiplied (`dot`), multiplied by
groups of rows (`ragged_dot`) and looked up in (`rows`). A plain array of weights is the usual one (`Dense`); a product
of two thin matrices, or integers with a scale a channel, are others. `Linear` and `Embedding` ask their operand and
never look at the numbers themselves, and nobody looks at them past `Linear` and `Embedding`: whoever brings another
representation writes an `Operand` and puts it in the place of the array.

Unlike `haliax.nn.Linear`, `Linear` constrains nothing: where an activation is pinned to the mesh is the model's
decision, at its named constraint points, so a projection whose output joins a differently sharded residual stream ends
in a reduce-scatter and not in an all-reduce.
"""

from abc import abstractmethod

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from levanter.layers.param_roles import role


class Operand(eqx.Module):
    """A matrix over named axes, or a stack of them, in a representation of its own.

    Its arrays are `NamedArray`s, so that mappings place them by their axes. Where one carries an axis of the matrix, it
    is sharded along with it, and what a part of the arrays gives must be that part of the result: inside
    `jax.shard_map` an operand is made of a device's own parts, and the products over a contracted axis that is sharded
    are added up.
    """

    @property
    @abstractmethod
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the matrix that this stands for."""

    @abstractmethod
    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        """The product with `x`, contracting `axis`; other axes that both have are gone through together.

        Args:
            x: what is multiplied; it has all of `axis`.
            axis: the contracted axes. Beside the projection's own these may be axes that count its copies (`expert`).
            dtype: of the sums and the result; that of `x` by default.
        """

    @abstractmethod
    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        """The product of each group of rows with a matrix of its own.

        Args:
            x: `[token, axis]`, the rows of one group after those of another.
            axis: the contracted axis.
            sizes: how many rows each group has, int32, over the axis that counts the matrices.

        Returns:
            `[token, out]`. What it holds in rows behind the last group is not defined.
        """

    @abstractmethod
    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        """The entries `ids` of `axis`: the axes of `ids` in the place of it."""


class Dense(Operand):
    """The matrix as it is.

    Attributes:
        array: its values.
    """

    array: NamedArray

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.array.axes

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        return hax.dot(x, self.array, axis=axis, preferred_element_type=dtype)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        (Group,) = sizes.axes
        (Token,) = (a for a in x.axes if a.name != axis)
        (Out,) = (a for a in self.axes if a.name not in (axis, Group.name))
        matrices = self.array.rearrange((Group.name, axis, Out.name)).array
        product = jax.lax.ragged_dot(x.rearrange((Token.name, axis)).array, matrices, sizes.array)
        return hax.named(product, (Token, Out))

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        return self.array.take(self.array.resolve_axis(axis), ids)


def as_operand(weight: NamedArray | Operand) -> Operand:
    """A weight as an operand: an array stands for itself."""
    return weight if isinstance(weight, Operand) else Dense(weight)


class Linear(eqx.Module):
    """`y = W x + b`, contracting the axes of `In`.

    Attributes:
        weight: `[*Out, *In]`, the order of Hugging Face's matrices; or another representation of such a matrix.
        bias: `[*Out]`, or None.
        In: names of the contracted axes.
    """

    weight: NamedArray | Operand = eqx.field(metadata=role("matrix"))
    bias: NamedArray | None = eqx.field(metadata=role("bias"))
    In: tuple[str, ...] = eqx.field(static=True)

    @staticmethod
    def init(In: tuple[Axis, ...], Out: tuple[Axis, ...], *, scale: float, use_bias: bool, key: jax.Array) -> "Linear":
        """Normal weights of standard deviation `scale`, zero bias."""
        return Linear(
            weight=hax.random.normal(key, (*Out, *In), dtype=jnp.float32) * scale,
            bias=hax.zeros(Out, dtype=jnp.float32) if use_bias else None,
            In=tuple(axis.name for axis in In),
        )

    @property
    def operand(self) -> Operand:
        """What is multiplied by."""
        return as_operand(self.weight)

    @property
    def Out(self) -> tuple[Axis, ...]:
        """The axes of the matrix that are not contracted, those that count its copies included."""
        return tuple(axis for axis in self.operand.axes if axis.name not in self.In)

    def __call__(self, x: NamedArray, *, dtype: DTypeLike | None = None) -> NamedArray:
        """Maps `[…, *In]` to `[…, *Out]`.

        Args:
            x: in the dtype of the weights.
            dtype: of the sums and the result; that of `x` by default.
        """
        y = self.operand.dot(x, self.In, dtype=dtype)
        if self.bias is None:
            return y
        return y + (self.bias if dtype is None else self.bias.astype(dtype))
