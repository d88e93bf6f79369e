"""`Linear`: a projection between sets of named axes.

Unlike `haliax.nn.Linear` it constrains nothing: where an activation is pinned to the mesh is the model's decision, at
its named constraint points, so a projection whose output joins a differently sharded residual stream ends in a
reduce-scatter and not in an all-reduce.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class Linear(eqx.Module):
    """`y = W x + b`, contracting the axes of `In`.

    Attributes:
        weight: `[*Out, *In]`, the order of Hugging Face's matrices.
        bias: `[*Out]`, or None.
        In: names of the contracted axes.
    """

    weight: NamedArray
    bias: NamedArray | None
    In: tuple[str, ...] = eqx.field(static=True)

    @staticmethod
    def init(In: tuple[Axis, ...], Out: tuple[Axis, ...], *, scale: float, use_bias: bool, key: jax.Array) -> "Linear":
        """Normal weights of standard deviation `scale`, zero bias."""
        return Linear(
            weight=hax.random.normal(key, (*Out, *In), dtype=jnp.float32) * scale,
            bias=hax.zeros(Out, dtype=jnp.float32) if use_bias else None,
            In=tuple(axis.name for axis in In),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `[…, *In]` to `[…, *Out]` in the dtype of `x`, which must be that of the weights."""
        y = hax.dot(x, self.weight, axis=self.In)
        return y if self.bias is None else y + self.bias
