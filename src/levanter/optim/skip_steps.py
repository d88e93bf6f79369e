"""Skipping of outlier steps, `skip_bad_steps`: steps whose loss or gradient norm is far above that of recent steps.

A step is an *outlier* if its loss or its gradient norm is more than some standard deviations above the mean of recent
steps. The recent numbers (`Recent`) are the last element of the optimizer's state, so that they are saved and restored
with it, and the paths of all other elements do not depend on it. The optimizer itself only carries them. The train step
decides, because a skipped step leaves the whole state unchanged, not only that of the optimizer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.config.validators import PositiveFloat, PositiveInt, Ranged
from levanter.optim.transforms import global_norm

LEAST_DEVIATION = 1e-6


@dataclass(frozen=True, kw_only=True)
class UsualRange(Ranged):
    """The usual range of a number: up to the mean of recent steps plus some standard deviations.

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
        """The number of recorded steps before any value counts as unusual."""
        return max(2, self.rolling_interval_length // 2)


@dataclass(frozen=True, kw_only=True)
class SkipStepConfig(UsualRange):
    """When a step is an outlier and is skipped, by its loss and its gradient norm, with upstream's keys."""


class Recent(NamedTuple):
    """Numbers of recent steps, in a ring buffer.

    Attributes:
        losses: float32, one per step.
        grad_norms: float32, one per step.
        seen: int32, number of recorded steps.
    """

    losses: jax.Array
    grad_norms: jax.Array
    seen: jax.Array


def carry_recent(length: int) -> optax.GradientTransformation:
    """The identity transformation whose state holds the numbers of `length` steps."""

    def init(_: PyTree) -> Recent:
        return Recent(
            losses=jnp.zeros((length,), jnp.float32),
            grad_norms=jnp.zeros((length,), jnp.float32),
            seen=jnp.zeros((), jnp.int32),
        )

    def update(updates: PyTree, state: Recent, params: PyTree = None) -> tuple[PyTree, Recent]:
        del params
        # Unchanged: the loss is known to the train step only, which replaces this state (`with_recent`).
        return updates, state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def recent_statistics(optimizer_state: tuple[PyTree, ...]) -> Recent:
    """The last element of an optimizer's state, which is that of `carry_recent`."""
    last = optimizer_state[-1]
    assert isinstance(last, Recent), type(last)
    return last


def with_recent(optimizer_state: tuple[PyTree, ...], recent: Recent) -> tuple[PyTree, ...]:
    """The optimizer's state with new recent numbers."""
    return (*optimizer_state[:-1], recent)


def is_outlier(rule: SkipStepConfig, recent: Recent, loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """Whether a step is an outlier; a non-finite one always is, once enough steps are recorded.

    >>> rule = SkipStepConfig(rolling_interval_length=4, sigma_factor=6.0)
    >>> recent = Recent(losses=jnp.array([2.0, 2.1, 1.9, 0.0]), grad_norms=jnp.ones(4), seen=jnp.int32(3))
    >>> check = jax.jit(lambda loss: is_outlier(rule, recent, loss, jnp.float32(1.0)))
    >>> bool(check(2.2)), bool(check(20.0))
    (False, True)
    """
    length = recent.losses.shape[0]
    # Until the ring buffer is full, only the first `seen` entries are numbers.
    known = jnp.arange(length) < recent.seen
    # With few numbers the deviation is too small, and every step would be an outlier.
    enough = recent.seen >= rule.least_history

    def fits(values: jax.Array, now: jax.Array) -> jax.Array:
        # NaN compares as false, so a non-finite number does not fit.
        mean = jnp.mean(values, where=known)
        deviation = jnp.maximum(jnp.std(values, where=known), LEAST_DEVIATION)
        return now <= mean + rule.sigma_factor * deviation

    return enough & ~(fits(recent.losses, loss) & fits(recent.grad_norms, grad_norm))


def remembered(recent: Recent, loss: jax.Array, grad_norm: jax.Array) -> Recent:
    """Records the numbers of one more step, unless they are not finite."""
    # The oldest entry of the ring buffer is overwritten.
    place = recent.seen % recent.losses.shape[0]
    new = Recent(
        losses=recent.losses.at[place].set(loss),
        grad_norms=recent.grad_norms.at[place].set(grad_norm),
        seen=recent.seen + 1,
    )
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    return jax.tree.map(lambda old, now: jnp.where(finite, now, old), recent, new)


class SkipStepState(NamedTuple):
    """The state of a wrapped optimizer.

    Attributes:
        inner_opt_state: of the optimizer itself.
        losses, grad_norms: float32, numbers of recent steps.
        seen: the number of recorded steps.
    """

    inner_opt_state: PyTree
    losses: jax.Array
    grad_norms: jax.Array
    seen: jax.Array

    @property
    def current_idx(self) -> jax.Array:
        """Where the next step is recorded."""
        return self.seen % self.losses.shape[0]

    @property
    def count(self) -> jax.Array:
        """The number of recorded steps that are still there."""
        return jnp.minimum(self.seen, self.losses.shape[0])


def skip_outliers(
    config: SkipStepConfig, optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that leaves outliers out by itself; its `update` needs `loss=`. A run's train step does it instead.

    Raises (by `update`):
        ValueError: there is no loss.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> SkipStepState:
        numbers = jnp.zeros((config.rolling_interval_length,), jnp.float32)
        return SkipStepState(inner.init(params), numbers, numbers, jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: SkipStepState, params: PyTree = None, *, loss: PyTree = None, **more: PyTree
    ) -> tuple[PyTree, SkipStepState]:
        if loss is None:
            raise ValueError("Loss must be provided: update(gradients, state, parameters, loss=loss)")
        norm, loss = global_norm(updates), jnp.asarray(loss, jnp.float32)
        recent = Recent(losses=state.losses, grad_norms=state.grad_norms, seen=state.seen)
        skipped = is_outlier(config, recent, loss, norm)
        new, inner_state = inner.update(updates, state.inner_opt_state, params, loss=loss, **more)
        kept = jax.tree.map(lambda old, now: jnp.where(skipped, old, now), state.inner_opt_state, inner_state)
        new = jax.tree.map(lambda update: jnp.where(skipped, jnp.zeros_like(update), update), new)
        after = remembered(recent, loss, norm)
        return new, SkipStepState(kept, after.losses, after.grad_norms, after.seen)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
