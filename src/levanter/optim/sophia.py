"""Sophia-H (Liu et al., arXiv:2305.14342, algorithm 3 with Hutchinson's estimator): momentum over clipped curvature.

    m ← β₁ m + (1 − β₁) g
    h ← β₂ h + (1 − β₂) u ⊙ (H u)          every k-th step, u standard normal; otherwise h is unchanged
    θ ← θ − η λ θ − η clip(m / max(γ h, ε), ρ)

Where the curvature is small or negative, a parameter moves by ρ times the learning rate in the direction of its
momentum; where it is large, it moves less. Learning rates are near Lion's, below Adam's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.config.validators import Count, Decay, Epsilon, NonNegativeFloat, PositiveFloat, PositiveInt
from levanter.optim.config import OptimizerConfig
from levanter.optim.hessian import HessianEma, Hutchinson, no_curvature


class SophiaState(NamedTuple):
    """Running means.

    Attributes:
        momentum: of the gradient, float32.
        curvature: of the Hessian's diagonal, float32.
    """

    momentum: PyTree
    curvature: HessianEma


def scale_by_sophia(
    *, beta1: float, gamma: float, epsilon: float, clip_threshold: float | None
) -> optax.GradientTransformation:
    """Replaces gradients by clipped momentum over curvature.

    Args:
        beta1: decay rate of the momentum.
        gamma: factor of the curvature.
        epsilon: lower limit of the divisor.
        clip_threshold: upper limit of a component's absolute value; None for none.
    """

    def init(params: PyTree) -> SophiaState:
        momentum = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        # Curvature 0 until the first estimate, which the train step makes before the first update.
        return SophiaState(momentum=momentum, curvature=no_curvature(params))

    def update(grads: PyTree, state: SophiaState, params: PyTree = None) -> tuple[PyTree, SophiaState]:
        del params
        momentum = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g.astype(jnp.float32), state.momentum, grads)

        def one(m: jax.Array, h: jax.Array, g: jax.Array) -> jax.Array:
            # Negative curvature, where the quotient would point uphill, becomes epsilon: the step is clipped momentum.
            step = m / jnp.maximum(gamma * h, epsilon)
            # The clip bounds the step where the curvature is small, stale or noisy.
            limited = step if clip_threshold is None else jnp.clip(step, -clip_threshold, clip_threshold)
            return limited.astype(g.dtype)

        # The curvature passes through unchanged: the train step has updated it before this call.
        updates = jax.tree.map(one, momentum, state.curvature.diagonal, grads)
        return updates, SophiaState(momentum=momentum, curvature=state.curvature)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


@OptimizerConfig.register_subclass("sophia-h")
@dataclass(frozen=True, kw_only=True)
class SophiaHConfig(OptimizerConfig):
    """Sophia with Hutchinson's estimates of the Hessian's diagonal (arXiv:2305.14342).

    Attributes:
        weight_decay: the fraction of a parameter that is subtracted at each step, times the learning rate.
        beta1: of the momentum.
        beta2: of the mean of the estimates.
        gamma: multiplies the curvature; smaller lets more components be clipped.
        epsilon: the least that the momentum is divided by.
        clip_threshold: the largest size of a component, before the learning rate; null for no limit.
        update_interval: steps between two estimates, each of which costs about two gradients more.
        rng_seed: of the random directions.
    """

    weight_decay: NonNegativeFloat = 0.1
    beta1: Decay = 0.96
    beta2: Decay = 0.99
    gamma: PositiveFloat = 0.01
    epsilon: Epsilon = 1e-12
    clip_threshold: PositiveFloat | None = 1.0
    update_interval: PositiveInt = 10
    rng_seed: Count = 0

    @property
    def curvature(self) -> Hutchinson | None:
        return Hutchinson(interval=self.update_interval, decay=self.beta2, seed=self.rng_seed)

    def scaling(self) -> optax.GradientTransformation:
        return scale_by_sophia(
            beta1=self.beta1, gamma=self.gamma, epsilon=self.epsilon, clip_threshold=self.clip_threshold
        )
