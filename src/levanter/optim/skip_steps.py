"""Steps that are left out because their loss or gradient is far from those before: `skip_bad_steps`.

A step is an *outlier* where its loss or its gradient's norm is more than some standard deviations above the mean of the
last steps. The last steps' numbers (`Recent`) are a part of the optimizer's state, its last piece, so that they are
saved and restored with it; the paths of all other pieces do not depend on it. The optimizer itself only carries them:
the train step asks and decides, since a step that is left out leaves everything else as it was.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.config.validators import PositiveFloat, PositiveInt, Ranged

LEAST_DEVIATION = 1e-6


@dataclass(frozen=True, kw_only=True)
class UsualRange(Ranged):
    """What is usual after the last steps: their mean and some standard deviations more.

    Attributes:
        rolling_interval_length: number of recent steps in the statistics; with fewer than half of them nothing is
            clipped or skipped.
        sigma_factor: largest accepted value, in standard deviations above the mean.
    """

    rolling_interval_length: PositiveInt = 128
    sigma_factor: PositiveFloat = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.rolling_interval_length < 2:
            problems.append(f"rolling_interval_length: must be at least 2, got {self.rolling_interval_length}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def least_history(self) -> int:
        """How many steps must be remembered before anything is unusual."""
        return max(2, self.rolling_interval_length // 2)


@dataclass(frozen=True, kw_only=True)
class SkipStepConfig(UsualRange):
    """When a step is an outlier and left out, by its loss and its gradient's norm, in upstream's keys."""


class Recent(NamedTuple):
    """Numbers of the last steps, in a ring.

    Attributes:
        losses: float32, one a step.
        grad_norms: float32, one a step.
        seen: int32, how many steps there were.
    """

    losses: jax.Array
    grad_norms: jax.Array
    seen: jax.Array


def carry_recent(length: int) -> optax.GradientTransformation:
    """A transformation that changes nothing and carries room for the numbers of `length` steps."""

    def init(_: PyTree) -> Recent:
        return Recent(
            losses=jnp.zeros((length,), jnp.float32),
            grad_norms=jnp.zeros((length,), jnp.float32),
            seen=jnp.zeros((), jnp.int32),
        )

    def update(updates: PyTree, state: Recent, params: PyTree = None) -> tuple[PyTree, Recent]:
        del params
        return updates, state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def recent_statistics(optimizer_state: tuple[PyTree, ...]) -> Recent:
    """The last piece of an optimizer's state, which `carry_recent` made."""
    last = optimizer_state[-1]
    assert isinstance(last, Recent), type(last)
    return last


def with_recent(optimizer_state: tuple[PyTree, ...], recent: Recent) -> tuple[PyTree, ...]:
    """The optimizer's state with other numbers."""
    return (*optimizer_state[:-1], recent)


def is_outlier(rule: SkipStepConfig, recent: Recent, loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """Whether a step is far from the steps before it; one that is not finite is, once there are enough of them.

    >>> rule = SkipStepConfig(rolling_interval_length=4, sigma_factor=6.0)
    >>> recent = Recent(losses=jnp.array([2.0, 2.1, 1.9, 0.0]), grad_norms=jnp.ones(4), seen=jnp.int32(3))
    >>> check = jax.jit(lambda loss: is_outlier(rule, recent, loss, jnp.float32(1.0)))
    >>> bool(check(2.2)), bool(check(20.0))
    (False, True)
    """
    length = recent.losses.shape[0]
    known = jnp.arange(length) < recent.seen
    enough = recent.seen >= rule.least_history

    def fits(values: jax.Array, now: jax.Array) -> jax.Array:
        mean = jnp.mean(values, where=known)
        deviation = jnp.maximum(jnp.std(values, where=known), LEAST_DEVIATION)
        return now <= mean + rule.sigma_factor * deviation

    return enough & ~(fits(recent.losses, loss) & fits(recent.grad_norms, grad_norm))


def remembered(recent: Recent, loss: jax.Array, grad_norm: jax.Array) -> Recent:
    """With the numbers of one step more; numbers that are not finite are not remembered."""
    place = recent.seen % recent.losses.shape[0]
    new = Recent(
        losses=recent.losses.at[place].set(loss),
        grad_norms=recent.grad_norms.at[place].set(grad_norm),
        seen=recent.seen + 1,
    )
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    return jax.tree.map(lambda old, now: jnp.where(finite, now, old), recent, new)
