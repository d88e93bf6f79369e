"""Muon (Jordan et al., 2024): orthogonalized momentum of matrices, on named axes.

The update of a matrix is its momentum with all singular values moved near 1 by a few Newton–Schulz steps, which consist
of matrix products only. This makes sense for matrices between hidden layers; AdamW updates embeddings, the output head,
norms and biases. A projection over several heads is one matrix, output axes × input axes, and every layer of a stack is
a separate matrix.
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
    # Steep at 0, so that small singular values grow fast; the final ones are between about 0.7 and 1.2.
    "quintic": (3.4445, -4.7750, 2.0315),
    # The classical iteration: slower, but converges to 1.
    "simple": (2.0, -1.5, 0.5),
}


class MuonState(NamedTuple):
    """The momentum of every matrix."""

    momentum: PyTree


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether Muon updates a parameter: the matrix of a projection that is not the output head."""
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
    """Replaces gradients of matrices by their orthogonalized and scaled momentum.

    Args:
        momentum: decay rate of the momentum.
        nesterov: whether the gradient is added once more before the orthogonalization.
        steps: number of iterations.
        epsilon: added to the norm that divides a matrix.
        coefficients: of the iteration's polynomial.
        kimi: whether the result is scaled by `0.2·√max(rows, columns)` (Moonshot AI, arXiv:2502.16982: about the size
            of AdamW's updates) instead of `√max(1, rows / columns)`.
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
            # Nesterov: the momentum one step ahead.
            ahead = kept * momentum + grad.astype(jnp.float32) if nesterov else kept
            factors = parameter.factors
            assert factors is not None, f"{parameter.path} is not a matrix"
            # Stack axes first, then the axes of rows and of columns: a batch of matrices `[stack, rows, columns]`.
            rows, columns = (math.prod(ahead.axis_size(name) for name in names) for names in factors)
            order = tuple(ahead.resolve_axis(name) for name in (*parameter.stack, *factors[0], *factors[1]))
            ordered = ahead.rearrange(order)
            matrices = ordered.array.reshape(-1, rows, columns)
            # An orthogonal matrix has root mean square 1/√max(rows, columns), so Moonshot's factor gives updates of
            # about 0.2 per element, as AdamW's are.
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
    # X Xᵀ has the size of the first axis, so a tall matrix is transposed: the products are those of the smaller side.
    upright = matrices.shape[1] > matrices.shape[2]
    x = matrices.swapaxes(1, 2) if upright else matrices
    # The Frobenius norm bounds the largest singular value, which must be at most 1 for the iteration to converge.
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + epsilon)
    for _ in range(steps):
        # On the singular values this is s ← a·s + b·s³ + c·s⁵; the singular vectors do not change.
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.swapaxes(1, 2) if upright else x
