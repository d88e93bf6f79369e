"""Estimates of the curvature of what is minimized, for optimizers whose steps depend on it.

The diagonal of a Hessian H is the mean of u ⊙ H u over random u of mean 0 and covariance 1 (Hutchinson, 1989). One
product H u costs about as much as two gradients, and H is never made. An optimizer that wants estimates says how often
(`Hutchinson`, by `OptimizerConfig.curvature`) and holds them in its state as a `HessianEma`; the train step makes them,
because it alone has what is minimized, and puts them there before the optimizer's own update.
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
    """How often the diagonal is estimated, and by which random numbers.

    Attributes:
        interval: steps between two estimates; the first step has one.
        decay: the part of the average of estimates that is kept.
        seed: of the random directions, which follow from it and the step alone.
    """

    interval: int
    decay: float
    seed: int


class HessianEma(NamedTuple):
    """A running mean of the diagonal, float32, of the parameters' structure."""

    diagonal: PyTree


def no_curvature(params: PyTree) -> HessianEma:
    """What is known before the first estimate: nothing."""
    return HessianEma(diagonal=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))


def direction(rule: Hutchinson, params: PyTree, step: jax.Array) -> PyTree:
    """A random direction of a step: standard normal, float32, of the parameters' structure.

    Args:
        rule: its seed.
        params: for structure and shapes.
        step: steps taken before it.
    """
    key = jax.random.fold_in(jax.random.PRNGKey(rule.seed), step)
    named, tree = jax.tree.flatten(params, is_leaf=is_named)

    def one(n: int, x: hax.NamedArray | jax.Array) -> PyTree:
        leaf_key = jax.random.fold_in(key, n)
        if isinstance(x, hax.NamedArray):
            return hax.auto_sharded(hax.random.normal(leaf_key, x.axes, dtype=jnp.float32))
        return jax.random.normal(leaf_key, x.shape, jnp.float32)

    return jax.tree.unflatten(tree, [one(n, x) for n, x in enumerate(named)])


def product(gradient: Callable[[PyTree], PyTree], params: PyTree, along: PyTree) -> PyTree:
    """H u: how the gradient changes along a direction, by differentiating it forward.

    Args:
        gradient: parameters → gradient, of their structure.
        params: where.
        along: the direction u.

    >>> gradient = jax.grad(lambda x: jnp.sum(x**3))  # the Hessian is diagonal: 6x
    >>> product(gradient, jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0])).tolist()
    [6.0, 12.0]
    """
    tangent = jax.tree.map(lambda p, u: u.astype(p.dtype), params, along)
    return jax.jvp(gradient, (params,), (tangent,))[1]


def remembered(rule: Hutchinson, optimizer_state: PyTree, estimate: PyTree) -> PyTree:
    """An optimizer's state whose running mean has taken one more estimate of the diagonal."""

    def mixed(node: PyTree) -> PyTree:
        if not isinstance(node, HessianEma):
            return node
        keep = rule.decay
        return HessianEma(diagonal=jax.tree.map(lambda h, e: keep * h + (1 - keep) * e, node.diagonal, estimate))

    return jax.tree.map(mixed, optimizer_state, is_leaf=lambda node: isinstance(node, HessianEma))
