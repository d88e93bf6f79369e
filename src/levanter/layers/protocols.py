"""What a layer is made of, as values: mixers, which let positions see each other, and feed-forward parts, which do not.

The *spec* of a part makes its module, and answers what others ask before any array exists: which axes its weights have,
which of them tensor parallelism shards, which activations it pins to the mesh, which it names for gradient
checkpointing, how much it computes, what it carries from call to call while text is generated. Whoever plans, searches
or counts asks the specs, and knows no kind of layer by name.

An activation is given by its axes beside those of the batch and of the position.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import equinox as eqx
import jax
from haliax import Axis

Shapes = Mapping[str, tuple[Axis, ...]]
"""Name of an activation → its axes beside batch and position."""


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Layers whose queries see equally far.

    Attributes:
        features: of all query heads of these layers: `layers · heads · head_size`.
        window: how many keys a query sees, itself included; None for all before it.
    """

    features: int
    window: int | None


class Part(Protocol):
    """The spec of a part of a layer."""

    @property
    def Embed(self) -> Axis:
        """The axis of the residual stream."""
        ...

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of its weights."""
        ...

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """What tensor parallelism shards: axes by name, and together (major first) those that share the devices."""
        ...

    @property
    def activations(self) -> Shapes:
        """What it constrains by the compute mapping."""
        ...

    @property
    def saved(self) -> Shapes:
        """What it names for gradient checkpointing (`layers.saved`)."""
        ...

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token."""
        ...

    def init(self, *, key: jax.Array) -> eqx.Module:
        """The module, freshly initialized."""
        ...


class FeedForward(Part, Protocol):
    """The spec of a feed-forward part: `MlpSpec`, `ExpertsSpec`.

    Its module maps `[…, embed]` to itself: to an array, or to `Outputs` where it makes sums too. Where it has an
    `advance`, that is called in its place for tokens that continue what a cache holds: the same, as suits few tokens.
    """


class Mixer(Part, Protocol):
    """The spec of a mixer, in which positions see each other: `AttentionSpec`.

    Its module is called as `mixer(x, context, state)` and returns `[…, position, embed]` and its new state; see
    `layers.attention.MixerContext`.
    """

    @property
    def attribute(self) -> str:
        """The layer's attribute that the module becomes, which is in the paths of its leaves: `self_attn`, `mixer`."""
        ...

    @property
    def attention_groups(self) -> tuple[AttentionGroup, ...]:
        """The query features whose products with keys cost operations; empty where there are none."""
        ...

    @property
    def rope(self) -> str | None:
        """Name of the rotary table that it reads; None for none."""
        ...

    @property
    def state_axes(self) -> Mapping[str, tuple[str, ...]]:
        """What it carries from call to call while text is generated: names of axes beside the batch's.

        An array with `key_position` grows with the text; one without it does not.
        """
        ...


def merged_axes(axes: Iterable[Axis]) -> dict[str, Axis]:
    """The axes by name.

    An axis that parts have in several sizes gets their greatest common divisor: what divides that divides each.
    """
    merged: dict[str, Axis] = {}
    for axis in axes:
        known = merged.setdefault(axis.name, axis)
        merged[axis.name] = axis.resize(math.gcd(known.size, axis.size))
    return merged
