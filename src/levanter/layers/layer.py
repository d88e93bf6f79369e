"""`LayerSpec`, the configuration of a kind of layer: mixer, feed-forward part, and how they join the residual stream.

Layers of one model may differ in all of these, weights included; `models.decoder.scan_layout` explains how such layers
are scanned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from haliax import Axis

from levanter.layers.norm import NormSpec
from levanter.layers.protocols import FeedForward, Mixer, Part, Shapes, merged_axes
from levanter.layers.residual import MIXER_NORMS, NormPlace, ResidualSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A kind of layer.

    Attributes:
        mixer: the part in which positions see each other, with the window and the rotary table of attention.
        feed_forward: the part after it, or parallel to it; None for a layer without.
        residual: how both join the residual stream.
    """

    mixer: Mixer
    feed_forward: FeedForward | None
    residual: ResidualSpec

    @property
    def parts(self) -> tuple[Part, ...]:
        """The mixer, and the feed-forward part if there is one."""
        # In the order of computation, which plans and reports keep.
        return (self.mixer,) if self.feed_forward is None else (self.mixer, self.feed_forward)

    @property
    def norm(self) -> NormSpec:
        """The configuration of its norms."""
        return self.residual.norm

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        """The positions of its norms; without a feed-forward part, those of the mixer only."""
        return tuple(place for place in self.residual.norms if self.feed_forward is not None or place in MIXER_NORMS)

    @property
    def Embed(self) -> Axis:
        """The axis of what its parts read from the residual stream."""
        return self.mixer.Embed

    @property
    def stream_axes(self) -> tuple[Axis, ...]:
        """The axes of the residual stream other than batch and position."""
        return self.residual.stream_axes(self.Embed)

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The axes of its weights, by name."""
        # Parts may have an axis of one name in different sizes, of which a mapping must divide every one.
        return merged_axes((*(axis for part in self.parts for axis in part.axes), *self.residual.axes))

    @property
    def tensor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes that tensor parallelism shards; see `Part`."""
        # A dict instead of a set: unique, and in the order of the parts on every process.
        return tuple(dict.fromkeys(cut for part in self.parts for cut in part.tensor_axes))

    @property
    def activations(self) -> Shapes:
        """The activations that its parts constrain by the compute mapping."""
        return {name: axes for part in self.parts for name, axes in part.activations.items()}

    @property
    def saved(self) -> Shapes:
        """The activations that its parts name for gradient checkpointing."""
        return {name: axes for part in self.parts for name, axes in part.saved.items()}

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token."""
        return sum(part.matmul_parameters for part in self.parts) + self.residual.matmul_parameters

    def sequence_flops(self, length: int, *, attention: Literal["causal", "full"]) -> int:
        """FLOPs of a forward pass over one sequence beyond the products with weights; see `Part`."""
        return sum(part.sequence_flops(length, attention=attention) for part in self.parts)
