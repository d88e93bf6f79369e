"""Clipping of updates: after the optimizer and weight decay, before the learning rate.

Gradient clipping bounds the input of an optimizer; these transformations bound its output. `clip_rms` limits the root
mean square of each matrix. `clip_by_recent_norms` limits the global norm to the mean of recent norms plus some standard
deviations. It records norms before clipping, so that the limit follows a norm that stays high, instead of shrinking
with every clipped update.
"""

from dataclasses import dataclass
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.optim.parameters import Parameter, map_parameters
from levanter.optim.skip_steps import UsualRange

LEAST_DEVIATION = 1e-6
LEAST_NORM = 1e-6


@dataclass(frozen=True, kw_only=True)
class ClipUpdateNormConfig(UsualRange):
    """The limit of an update's norm relative to recent norms, with upstream's keys.

    Attributes:
        sigma_factor: largest accepted norm, in standard deviations above the mean.
    """

    sigma_factor: float = 3.0


class RecentNorms(NamedTuple):
    """Norms of recent updates, in a ring buffer.

    Attributes:
        norms: float32, one per step, before clipping.
        seen: int32, number of recorded norms.
    """

    norms: jax.Array
    seen: jax.Array


def clip_by_recent_norms(rule: ClipUpdateNormConfig) -> optax.GradientTransformation:
    """Scales updates down if their norm exceeds the mean of recent norms plus some standard deviations.

    Args:
        rule: the number of recent norms, and the factor of the standard deviation.
    """
    length = rule.rolling_interval_length

    def init(_: PyTree) -> RecentNorms:
        return RecentNorms(norms=jnp.zeros((length,), jnp.float32), seen=jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: RecentNorms, params: PyTree = None) -> tuple[PyTree, RecentNorms]:
        del params
        norm = jnp.asarray(optax.tree.norm(updates), jnp.float32)
        # Until the ring buffer is full, only the first `seen` entries are norms.
        known = jnp.arange(length) < state.seen
        deviation = jnp.maximum(jnp.std(state.norms, where=known), LEAST_DEVIATION)
        most = jnp.mean(state.norms, where=known) + rule.sigma_factor * deviation
        clips = (state.seen >= max(2, length // 2)) & (norm > most)
        factor = jnp.where(clips, most / jnp.maximum(norm, LEAST_NORM), 1.0)
        # The norm before clipping; the oldest entry is overwritten.
        remembered = RecentNorms(norms=state.norms.at[state.seen % length].set(norm), seen=state.seen + 1)
        # A NaN or infinity would stay in the statistics for `length` steps.
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), remembered, state)
        return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates), kept

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def clip_rms(threshold: float) -> optax.GradientTransformation:
    """Scales each parameter's update down to a root mean square of `threshold`; each layer of a stack separately.

    Args:
        threshold: the largest root mean square.

    >>> clip, update = clip_rms(1.0), {"weight": hax.named(jnp.array([2.0, 2.0]), "embed")}
    >>> clip.update(update, clip.init(update))[0]["weight"].array.tolist()
    [1.0, 1.0]
    """

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        del params

        def one(_: Parameter, u: hax.NamedArray) -> hax.NamedArray:
            # As in upstream: the experts of a layer are one array and are clipped together.
            inner = tuple(axis.name for axis in u.axes if axis.name != "layers")
            wide = u.astype(jnp.float32)
            # Root mean square over the threshold, per layer; below 1 nothing is scaled.
            excess = hax.sqrt(hax.mean(wide * wide, inner)) / threshold
            return (wide / hax.maximum(excess, 1.0)).rearrange(u.axes).astype(u.dtype)

        return map_parameters(one, updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]
