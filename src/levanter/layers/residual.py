"""The residual stream: how the branches of a layer read it and are added to it.

A layer has one or two *branches*: its mixer, and its feed-forward part if there is one. Each branch has a *rule*, a
module with two methods:

    x = rule.read(stream, context)                    what the branch reads, […, position, embed]
    stream = rule.write(stream, branch, context)      the stream after the branch's output is added

A rule may have weights. Everything else around a branch (norms on its input and output, resharding, remat names) is the
layer's, and the same for all rules. The *ends* of the stream are a module, too: `enter` maps the embedded tokens to the
stream, `leave` maps the stream to the activations that the final norm reads.

`ResidualSpec` is the configuration, and the rule of most models: `stream + branch`. With norms on the branches' outputs
(`POST_NORMS`) it is the "sandwich" of Gemma 2. `ParallelResidual` lets both branches read the layer's input. Other
specs are subclasses that override `init`, `init_ends` and, for a stream of other axes, `stream_axes`.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import equinox as eqx
import jax
from haliax import Axis, NamedArray

from haliax_ext.mapping import shard_residual
from levanter.layers.context import ForwardContext
from levanter.layers.norm import NormSpec

NormPlace = Literal["input_layernorm", "post_attention_layernorm", "post_attn_layernorm", "post_mlp_layernorm"]
"""Positions of norms in a layer: before the mixer, before the feed-forward part, on the mixer's output, on the
feed-forward part's output. The names are Llama's and are this project's attribute names; checkpoints of other families
use other names."""

PRE_NORMS: tuple[NormPlace, ...] = ("input_layernorm", "post_attention_layernorm")
POST_NORMS: tuple[NormPlace, ...] = ("post_attn_layernorm", "post_mlp_layernorm")
MIXER_NORMS: tuple[NormPlace, ...] = ("input_layernorm", "post_attn_layernorm")


Stream = Any
"""The residual stream. Between the branches of a layer it may be any tree. Before the first and after the last branch
it is an array over `[…, position]` and `ResidualSpec.stream_axes`, because layers are scanned."""


class ResidualRule(Protocol):
    """How one branch of a layer reads the stream and is added to it."""

    def read(self, stream: Stream, context: ForwardContext) -> NamedArray:
        """The activations that the branch reads, `[…, position, embed]`."""
        ...

    def write(self, stream: Stream, branch: NamedArray, context: ForwardContext) -> Stream:
        """The stream with the branch's output, whose axes are those of what it read."""
        ...


class StreamEnds(Protocol):
    """How the stream begins and ends."""

    def enter(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        """The stream that the first layer reads, of the embedded tokens `[…, position, embed]`."""
        ...

    def leave(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        """The activations `[…, position, embed]` that the final norm reads."""
        ...


class PlainRule(eqx.Module):
    """`stream + branch`."""

    def read(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        """The stream itself."""
        del context
        return stream

    def write(self, stream: NamedArray, branch: NamedArray, context: ForwardContext) -> NamedArray:
        """The sum, in the shards of the residual mapping."""
        del context
        return shard_residual(stream + branch)


class PlainEnds(eqx.Module):
    """A stream that is the embedded tokens plus the branches."""

    def enter(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        """The embedded tokens themselves."""
        del context
        return x

    def leave(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        """The stream itself."""
        del context
        return stream


@dataclass(frozen=True, kw_only=True)
class ResidualSpec:
    """How the parts of a layer join the residual stream: one after the other, each added to it.

    Attributes:
        norm: the configuration of the layer's norms.
        norms: their positions in the layer.
    """

    norm: NormSpec
    norms: tuple[NormPlace, ...] = PRE_NORMS

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the rules' weights other than `embed`."""
        return ()

    @property
    def ends_axes(self) -> tuple[Axis, ...]:
        """The axes of the ends' weights other than `embed`."""
        return ()

    @property
    def matmul_parameters(self) -> int:
        """Weights of a layer's rules that multiply each token."""
        return 0

    @property
    def any_order(self) -> bool:
        """Whether positions may lie in any order: whether neither rules nor ends look at neighbors."""
        return True

    def stream_axes(self, Embed: Axis) -> tuple[Axis, ...]:
        """The axes of the stream other than batch and position."""
        return (Embed,)

    def init(self, Embed: Axis, branches: int, *, key: jax.Array) -> tuple[ResidualRule, ...]:
        """The rules of a layer's branches.

        Args:
            Embed: the axis of what a branch reads.
            branches: how many there are: 1 or 2.
            key: the layer's key. Its parts use the two keys that `jax.random.split` makes of it; rules with random
                weights use `jax.random.fold_in`.
        """
        # A rule without weights draws nothing: the initialization of
        # existing models is the same program as without rules.
        del Embed, key
        return (PlainRule(),) * branches

    def init_ends(self, Embed: Axis, *, key: jax.Array) -> StreamEnds:
        """The ends of the stream; see `init` for the key, here the one of all layers."""
        del Embed, key
        return PlainEnds()


class _Sum(eqx.Module):
    """A stream, and a branch that is to be added to it."""

    stream: NamedArray
    branch: NamedArray


class _FirstOfParallel(eqx.Module):
    """The mixer's rule in a layer whose feed-forward part reads what the mixer read."""

    def read(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        del context
        return stream

    def write(self, stream: NamedArray, branch: NamedArray, context: ForwardContext) -> _Sum:
        del context
        # Nothing is added yet: the second branch reads the stream as it is.
        return _Sum(stream=stream, branch=branch)


class _SecondOfParallel(eqx.Module):
    """The feed-forward part's rule in such a layer."""

    def read(self, stream: _Sum, context: ForwardContext) -> NamedArray:
        del context
        return stream.stream

    def write(self, stream: _Sum, branch: NamedArray, context: ForwardContext) -> NamedArray:
        del context
        # One step for both branches, so the stream is resharded once per layer.
        return shard_residual(stream.stream + stream.branch + branch)


@dataclass(frozen=True, kw_only=True)
class ParallelResidual(ResidualSpec):
    """Both parts read the layer's input (GPT-NeoX), and their outputs are added to it in one step."""

    def init(self, Embed: Axis, branches: int, *, key: jax.Array) -> tuple[ResidualRule, ...]:
        if branches == 1:
            return super().init(Embed, branches, key=key)
        return (_FirstOfParallel(), _SecondOfParallel())
