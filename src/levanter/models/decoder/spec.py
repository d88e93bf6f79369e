"""What a decoder block is, as a value, and how a model's blocks are laid out for scanning.

A `BlockSpec` names the parts of one block. Layers of one model may differ in it, but only in what costs no weights: how
far back a query sees, which rotary table turns it. Kernels need that to be static, so layers that differ are compiled
apart, and a scan goes over *periods*: a period is a few consecutive layers, each a *place* with a spec of its own.

A model is a sequence of *runs*. Gemma 3 27B has 62 layers, every sixth one global: a run of 10 periods of 6 places,
then a run of 2 periods of one place. A checkpoint's layer is `start + places · period + place`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax

from levanter.layers.attention.grouped import AttentionSpec
from levanter.layers.norm import NormSpec

NormPlace = Literal["input_layernorm", "post_attention_layernorm", "post_attn_layernorm", "post_mlp_layernorm"]
"""Where a block may have norms: before attention, before the MLP, on attention's output, on the MLP's output. The names
are Llama's (and this project's attribute names); checkpoints of other families call them otherwise."""

PRE_NORMS: tuple[NormPlace, ...] = ("input_layernorm", "post_attention_layernorm")
POST_NORMS: tuple[NormPlace, ...] = ("post_attn_layernorm", "post_mlp_layernorm")

LONGEST_PERIOD = 8
"""Places that are looked for in a period: each is compiled by itself."""


class FeedForward(Protocol):
    """The spec of a feed-forward part: `MlpSpec`, or a mixture of experts."""

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token."""
        ...

    def init(self, *, key: jax.Array) -> Any:
        """The module: `[…, embed]` to `[…, embed]`, as an array, or as `Outputs` where it makes sums too."""
        ...


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One decoder block.

    Attributes:
        attention: its attention, window and rotary table included.
        mlp: its feed-forward part.
        norm: what kind its norms are.
        norms: where it has norms.
        parallel: whether attention and MLP both read the block's input (GPT-NeoX), instead of one after the other.
    """

    attention: AttentionSpec
    mlp: FeedForward
    norm: NormSpec
    norms: tuple[NormPlace, ...] = PRE_NORMS
    parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive layers that are scanned together.

    Attributes:
        start: the first layer.
        places: the specs within a period.
        periods: how often they repeat.
    """

    start: int
    places: tuple[BlockSpec, ...]
    periods: int

    @property
    def layers(self) -> int:
        """How many layers the run has."""
        return self.periods * len(self.places)

    def template(self, place: int) -> str:
        """The layers at a place of the period, as `WeightRule.source` numbers them along `layers`."""
        step, first = len(self.places), self.start + place
        return "{layers}" if (step, first) == (1, 0) else f"{{{step}*layers+{first}}}"


def runs_of(blocks: Sequence[BlockSpec]) -> tuple[Run, ...]:
    """Cuts layers into runs: each time the period whose repetitions reach farthest, the shortest such."""
    runs: list[Run] = []
    start = 0
    while start < len(blocks):
        best = (1, 1)
        for size in range(1, min(LONGEST_PERIOD, len(blocks) - start) + 1):
            period = tuple(blocks[start : start + size])
            count = 1
            while tuple(blocks[start + count * size : start + (count + 1) * size]) == period:
                count += 1
            # A period that does not repeat is no period: those layers are better off one by one.
            reached = (count * size, count) if count > 1 or size == 1 else (0, 0)
            if reached[0] > best[0] * best[1]:
                best = (size, count)
        size, count = best
        runs.append(Run(start=start, places=tuple(blocks[start : start + size]), periods=count))
        start += size * count
    return tuple(runs)
