"""Muon (Jordan et al., 2024): momentum whose matrices are made orthogonal, on named axes.

The update of a matrix is its momentum with all singular values brought near 1, by a few Newton–Schulz steps: products
of matrices only, no decomposition. That has a meaning for matrices between hidden layers; embeddings, the output head,
norms and biases are AdamW's. A projection over several heads is one matrix, its output axes × its input axes, and every
layer of a stack is a matrix of its own.
"""

import math
from typing import Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.optim.parameters import Parameter, map_parameters

Coefficients = Literal["quintic", "simple"]
COEFFICIENTS: dict[str, tuple[float, float, float]] = {
    # Steep at 0, so that small singular values rise fast; the result's lie between about 0.7 and 1.2.
    "quintic": (3.4445, -4.7750, 2.0315),
    # The classical iteration: slower, and converges to 1.
    "simple": (2.0, -1.5, 0.5),
}


class MuonState(NamedTuple):
    """Momentum of every matrix."""

    momentum: PyTree


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether a parameter is Muon's: the matrix of a projection that is not the output head."""
    projects = parameter.role == "matrix" and bool(parameter.inputs) and "head" not in parameter.roles
    return projects and parameter.factors is not None


def scale_by_muon(
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    epsilon: float = 1e-8,
    coefficients: Coefficients = "quintic",
    kimi: bool = False,
) -> optax.GradientTransformation:
    """Turns gradients of matrices into their momentum, made orthogonal and scaled.

    Args:
        momentum: the part of the momentum that is kept.
        nesterov: whether the gradient is added once more before.
        steps: of the iteration.
        epsilon: added to the norm that a matrix is divided by.
        coefficients: of the iteration's polynomial.
        kimi: whether the result is scaled by `0.2·√max(rows, columns)` (Moonshot AI, arXiv:2502.16982: sizes like
            AdamW's) instead of `√max(1, rows / columns)`.
    """
    polynomial = COEFFICIENTS[coefficients]

    def init(params: PyTree) -> MuonState:
        return MuonState(momentum=map_parameters(lambda _, x: hax.zeros(x.axes, dtype=jnp.float32), params))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params

        def add(_: Parameter, grad: hax.NamedArray, kept: hax.NamedArray) -> hax.NamedArray:
            return kept * momentum + grad.astype(jnp.float32)

        kept = map_parameters(add, grads, state.momentum)

        def one(parameter: Parameter, grad: hax.NamedArray, kept: hax.NamedArray) -> hax.NamedArray:
            ahead = kept * momentum + grad.astype(jnp.float32) if nesterov else kept
            factors = parameter.factors
            assert factors is not None, f"{parameter.path} is not a matrix"
            rows, columns = (math.prod(ahead.axis_size(name) for name in names) for names in factors)
            order = tuple(ahead.resolve_axis(name) for name in (*parameter.stack, *factors[0], *factors[1]))
            ordered = ahead.rearrange(order)
            matrices = ordered.array.reshape(-1, rows, columns)
            scale = 0.2 * math.sqrt(max(rows, columns)) if kimi else math.sqrt(max(1.0, rows / columns))
            updates = orthogonal(matrices, steps=steps, epsilon=epsilon, polynomial=polynomial) * scale
            return hax.named(updates.reshape(ordered.array.shape), order).rearrange(grad.axes).astype(grad.dtype)

        return map_parameters(one, grads, kept), MuonState(momentum=kept)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def orthogonal(matrices: jax.Array, *, steps: int, epsilon: float, polynomial: tuple[float, float, float]) -> jax.Array:
    """The matrices `[stack, rows, columns]` with singular values near 1, by `X ← aX + (bXXᵀ + c(XXᵀ)²)X`.

    >>> stack = jnp.array([[[2.0, 0.0], [0.0, 0.5]]])
    >>> simple = jax.jit(lambda x: orthogonal(x, steps=12, epsilon=1e-8, polynomial=COEFFICIENTS["simple"]))
    >>> [[round(x, 2) for x in row] for row in simple(stack)[0].tolist()]
    [[1.0, 0.0], [0.0, 1.0]]
    """
    a, b, c = polynomial
    upright = matrices.shape[1] > matrices.shape[2]
    x = matrices.swapaxes(1, 2) if upright else matrices
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + epsilon)
    for _ in range(steps):
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.swapaxes(1, 2) if upright else x
