"""`Linear`: a projection between sets of named axes, by a matrix in any representation.

An *operand* is the matrix of a projection over named axes. It supports products (`dot`), products of groups of rows
(`ragged_dot`) and lookups (`rows`). The usual operand is a plain array of weights (`Dense`); others are a matrix plus a
product of two low-rank factors, and integers with a scale per channel. `Linear` and `Embedding` only call the methods
of their operand, and no other code reads their weights. A new representation is a subclass of `Operand` that replaces
the array.

Unlike `haliax.nn.Linear`, `Linear` applies no sharding constraint. The model constrains activations at its named
constraint points, so a projection whose output joins a differently sharded residual stream ends in a reduce-scatter
instead of an all-reduce.
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
    """A matrix over named axes, or a stack of matrices, in some representation.

    Its arrays are `NamedArray`s, so mappings shard them by their axes. Inside `jax.shard_map` an operand consists of
    the device's shards of these arrays, and its products must be the device's shard of the result; products over a
    contracted axis that is sharded are partial sums, which the caller adds up over the devices.
    """

    @property
    @abstractmethod
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the matrix that the operand represents."""

    @abstractmethod
    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        """The product with `x`, contracting `axis`; other axes that both have are batch axes.

        Args:
            x: an array with all of `axis`.
            axis: the contracted axes: those of the projection, and possibly axes of stacked matrices (`expert`).
            dtype: of the sums and the result; that of `x` by default.
        """

    @abstractmethod
    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        """The product of each group of rows with the group's matrix.

        Args:
            x: `[token, axis]`, group by group.
            axis: the contracted axis.
            sizes: number of rows of each group, int32, over the axis of the stacked matrices.

        Returns:
            `[token, out]`. The contents of rows behind the last group are undefined.
        """

    @abstractmethod
    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        """The entries `ids` of `axis`; in the result, the axes of `ids` replace it."""


class Dense(Operand):
    """A matrix as a plain array.

    Attributes:
        array: the weights.
    """

    array: NamedArray

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.array.axes

    def dot(self, x: NamedArray, axis: tuple[str, ...], *, dtype: DTypeLike | None = None) -> NamedArray:
        # `dtype` is that of the sums too: 16-bit operands with float32 requested are not rounded in between.
        return hax.dot(x, self.array, axis=axis, preferred_element_type=dtype)

    def ragged_dot(self, x: NamedArray, axis: str, sizes: NamedArray) -> NamedArray:
        # The axis of `sizes` says which axis of the matrix counts the groups.
        (Group,) = sizes.axes
        (Token,) = (a for a in x.axes if a.name != axis)
        (Out,) = (a for a in self.axes if a.name not in (axis, Group.name))
        # `jax.lax.ragged_dot` takes `[rows, in]`, `[groups, in, out]` and the group sizes.
        matrices = self.array.rearrange((Group.name, axis, Out.name)).array
        product = jax.lax.ragged_dot(x.rearrange((Token.name, axis)).array, matrices, sizes.array)
        return hax.named(product, (Token, Out))

    def rows(self, ids: NamedArray, axis: str) -> NamedArray:
        return self.array.take(self.array.resolve_axis(axis), ids)


def as_operand(weight: NamedArray | Operand) -> Operand:
    """A weight as an operand: an array becomes `Dense`."""
    return weight if isinstance(weight, Operand) else Dense(weight)


class Linear(eqx.Module):
    """`y = W x + b`, contracting the axes of `In`.

    Attributes:
        weight: `[*Out, *In]`, the order of Hugging Face's matrices; or an `Operand` that represents such a matrix.
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
        """The weight as an operand."""
        return as_operand(self.weight)

    @property
    def Out(self) -> tuple[Axis, ...]:
        """The axes of the matrix that are not contracted, including those of stacked matrices."""
        # From the operand, not stored: inside a scan or `shard_map` the axes of the weight are fewer or smaller.
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
        # JAX runs with strict dtype promotion: a bias in the weights' dtype cannot be added to float32 sums.
        return y + (self.bias if dtype is None else self.bias.astype(dtype))
