"""Adafactor (Shazeer & Stern, arXiv:1804.04235) as in Hugging Face and PyTorch, on named axes.

For a matrix, only the means of its squared gradients over rows and over columns are stored; for a vector, all of them.
The decay rate of these averages is `1 − t^−0.8`, the update's root mean square is clipped at 1, and there is no first
moment. A matrix is a projection's output axes × input axes: heads and head size count as one axis, as in frameworks
without named axes, and every layer of a stack is a separate matrix. The statistics have named axes, so the parameter
mapping shards them like the parameter.
"""

from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.optim.parameters import Parameter, map_parameters


class AdafactorState(NamedTuple):
    """Averages of squared gradients.

    Attributes:
        count: steps taken.
        rows: means over columns, of matrices.
        columns: means over rows, of matrices.
        full: of vectors.
    """

    count: jax.Array
    rows: PyTree
    columns: PyTree
    full: PyTree


class _Step(NamedTuple):
    update: hax.NamedArray
    rows: hax.NamedArray | None
    columns: hax.NamedArray | None
    full: hax.NamedArray | None


def scale_by_adafactor(
    *, decay_rate: float = 0.8, clip_threshold: float | None = 1.0, epsilon: float = 1e-30
) -> optax.GradientTransformation:
    """Divides gradients by the root of their factored second moment, and clips the result's root mean square.

    Args:
        decay_rate: the decay rate of the averages at step t (from 1) is `1 − t^−decay_rate`.
        clip_threshold: largest root mean square of one matrix's update; None for no limit.
        epsilon: added to squared gradients.
    """

    def zeros(parameter: Parameter, dropped: tuple[str, ...]) -> hax.NamedArray:
        return hax.zeros(tuple(a for a in parameter.axes if a.name not in dropped), dtype=jnp.float32)

    def init(params: PyTree) -> AdafactorState:
        # 0 for the row statistics (without the column axes), 1 for the column statistics, None for those of vectors.
        def part(which: int | None) -> PyTree:
            def make(parameter: Parameter, _: hax.NamedArray) -> hax.NamedArray | None:
                factors = parameter.factors
                if which is None:
                    return zeros(parameter, ()) if factors is None else None
                return None if factors is None else zeros(parameter, factors[1 - which])

            return map_parameters(make, params)

        return AdafactorState(count=jnp.zeros((), jnp.int32), rows=part(0), columns=part(1), full=part(None))

    def update(grads: PyTree, state: AdafactorState, params: PyTree = None) -> tuple[PyTree, AdafactorState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        # The weight of the newest gradient, 1 at the first step: no bias correction is needed.
        new = count.astype(jnp.float32) ** -decay_rate

        def average(old: hax.NamedArray, now: hax.NamedArray) -> hax.NamedArray:
            now = now.rearrange(old.axes)
            return old + (now - old) * new

        def one(parameter: Parameter, grad: hax.NamedArray, rows: PyTree, columns: PyTree, full: PyTree) -> _Step:
            wide = grad.astype(jnp.float32)
            squared = wide * wide + epsilon
            factors = parameter.factors
            if factors is None:
                full = average(full, squared)
                scaled = wide * hax.rsqrt(full)
            else:
                row_axes, column_axes = factors
                # The rank-1 estimate of the second moment is R Cᵀ / mean(R), R and C being the row and column means.
                rows = average(rows, hax.mean(squared, column_axes))
                columns = average(columns, hax.mean(squared, row_axes))
                relative = rows / hax.mean(rows, row_axes)
                # Scaled by the two factors one after the other: their product R Cᵀ could underflow in float32.
                scaled = (wide * hax.rsqrt(relative)) * hax.rsqrt(columns)
            if clip_threshold is not None:
                # The paper's update clipping: divide by max(1, RMS / threshold).
                excess = rms_per_matrix(scaled, parameter) / clip_threshold
                scaled = scaled / hax.maximum(excess, 1.0)
            return _Step(scaled.rearrange(grad.axes).astype(grad.dtype), rows, columns, full)

        steps = map_parameters(one, grads, state.rows, state.columns, state.full)

        def pick(field: str) -> PyTree:
            return jax.tree.map(lambda s: getattr(s, field), steps, is_leaf=lambda s: isinstance(s, _Step))

        return pick("update"), AdafactorState(
            count=count, rows=pick("rows"), columns=pick("columns"), full=pick("full")
        )

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def scale_by_parameter_rms(*, minimum: float = 1e-3) -> optax.GradientTransformation:
    """Multiplies each matrix's update by the root mean square of its parameter, but at least by `minimum`."""

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        def one(parameter: Parameter, u: hax.NamedArray, value: hax.NamedArray) -> hax.NamedArray:
            size = rms_per_matrix(value.astype(jnp.float32), parameter)
            floored = hax.named(jnp.maximum(size.array, minimum).astype(u.dtype), size.axes)
            return (u * floored).rearrange(u.axes)

        return map_parameters(one, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def rms_per_matrix(x: hax.NamedArray, parameter: Parameter) -> hax.NamedArray:
    """The root mean square of each matrix of a stack, over the stack axes."""
    inner = tuple(axis.name for axis in x.axes if axis.name not in parameter.stack)
    return hax.sqrt(hax.mean(x * x, inner))
