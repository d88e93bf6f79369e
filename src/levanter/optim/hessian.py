"""Estimates of the Hessian's diagonal, for optimizers that use the curvature of the loss.

The diagonal of a Hessian H is the expectation of u ⊙ H u over random u with mean 0 and covariance I (Hutchinson, 1989).
A product H u costs about as much as two gradients, and H itself is never computed. An optimizer declares how often it
needs an estimate (`Hutchinson`, by `OptimizerConfig.curvature`) and keeps a running mean in its state (`HessianEma`).
The train step computes the estimates, because only it has the minimized function, and updates the running mean before
the optimizer's own update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp

from haliax_ext.pytree import PyTree, is_named


@dataclass(frozen=True, kw_only=True)
class Hutchinson:
    """When the diagonal is estimated, and with which random directions.

    Attributes:
        interval: steps between two estimates, starting with the first step.
        decay: decay rate of the running mean of the estimates.
        seed: of the random directions, which depend on the seed and the step only.
    """

    interval: int
    decay: float
    seed: int


class HessianEma(NamedTuple):
    """A running mean of the diagonal, float32, with the structure of the parameters."""

    diagonal: PyTree


def no_curvature(params: PyTree) -> HessianEma:
    """The state before the first estimate: zeros."""
    return HessianEma(diagonal=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))


def direction(rule: Hutchinson, params: PyTree, step: jax.Array) -> PyTree:
    """The random direction of a step: standard normal, float32, with the structure of the parameters.

    Args:
        rule: has the seed.
        params: for structure and shapes.
        step: steps taken before this one.
    """
    # A function of seed and step, not of the state's key: a resumed run draws the same directions, and estimates do not
    # change the random numbers of anything else.
    key = jax.random.fold_in(jax.random.PRNGKey(rule.seed), step)
    named, tree = jax.tree.flatten(params, is_leaf=is_named)

    def one(n: int, x: hax.NamedArray | jax.Array) -> PyTree:
        leaf_key = jax.random.fold_in(key, n)
        # Constrained like the parameter: each device draws only its shard (threefry is partitionable).
        if isinstance(x, hax.NamedArray):
            return hax.auto_sharded(hax.random.normal(leaf_key, x.axes, dtype=jnp.float32))
        return jax.random.normal(leaf_key, x.shape, jnp.float32)

    return jax.tree.unflatten(tree, [one(n, x) for n, x in enumerate(named)])


def product(gradient: Callable[[PyTree], PyTree], params: PyTree, along: PyTree) -> PyTree:
    """H u, the directional derivative of the gradient, by forward over reverse differentiation.

    Args:
        gradient: parameters → gradient, with their structure.
        params: the point at which to differentiate.
        along: the direction u.

    >>> gradient = jax.grad(lambda x: jnp.sum(x**3))  # the Hessian is diagonal: 6x
    >>> product(gradient, jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0])).tolist()
    [6.0, 12.0]
    """
    # A tangent must have the dtype of its primal.
    tangent = jax.tree.map(lambda p, u: u.astype(p.dtype), params, along)
    return jax.jvp(gradient, (params,), (tangent,))[1]


def remembered(rule: Hutchinson, optimizer_state: PyTree, estimate: PyTree) -> PyTree:
    """An optimizer's state with one more estimate in its running mean of the diagonal."""

    def mixed(node: PyTree) -> PyTree:
        if not isinstance(node, HessianEma):
            return node
        keep = rule.decay
        return HessianEma(diagonal=jax.tree.map(lambda h, e: keep * h + (1 - keep) * e, node.diagonal, estimate))

    # The `HessianEma` is found by its type, wherever a chain of transformations has put it.
    return jax.tree.map(mixed, optimizer_state, is_leaf=lambda node: isinstance(node, HessianEma))
