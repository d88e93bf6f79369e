"""`LmHeadModel`: the interface of every causal language model."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.attention import AttentionMask
from levanter.layers.attention.cache_positions import NewPositions
from levanter.layers.attention.reference import soft_capped
from levanter.layers.decode_state import DecodeState, StateSizes
from levanter.layers.linear import Linear
from levanter.layers.outputs import Outputs
from levanter.models.architecture import Architecture


class ModelOutputs(Outputs):
    """The outputs of a whole model, with the logits on demand.

    Attributes:
        head: the output head.
        soft_cap: bound of the logits, see `soft_capped`; None for none.
    """

    head: Linear = eqx.field(kw_only=True)
    soft_cap: float | None = eqx.field(static=True, kw_only=True)

    @property
    def logits(self) -> NamedArray:
        """Float32 logits, `[…, position, vocab]`, computed at every use; `models.scoring` scores without them."""
        return _logits(self.head, self.activations, self.soft_cap)


def _logits(head: Linear, activations: NamedArray, soft_cap: float | None) -> NamedArray:
    # Float32 and then the soft cap, in the order of `lm_head.chunks`, so that sampled and scored logits agree.
    return soft_capped(hax.auto_sharded(head(activations, dtype=jnp.float32)), soft_cap)


class LmHeadModel(eqx.Module):
    """A causal language model: tokens to activations, and the head that turns activations into logits.

    The two are separate so that the logits of an entire sequence are never materialized (see `models.scoring`).
    """

    config: eqx.AbstractVar[Architecture]

    @abstractmethod
    def __call__(
        self,
        input_ids: NamedArray,
        *,
        segment_ids: NamedArray | None = None,
        attn_mask: AttentionMask | None = None,
        positions: NamedArray | None = None,
        auxiliary: Sequence[str] = (),
    ) -> ModelOutputs:
        """Activations after the final norm, `[…, position, embed]`, and the requested auxiliary sums.

        Args:
            input_ids: token ids, `[…, position]`.
            segment_ids: `[…, position]`; tokens see only their own segment.
            attn_mask: which positions see which; causal by default.
            positions: the position of each token, where it is not its index.
            auxiliary: names of the sums to collect from the layers (`config.auxiliary_weights` lists them); a sum is 0
                if no layer computes it.
        """

    @property
    @abstractmethod
    def head(self) -> Linear:
        """The output head, from `embed` to `vocab`: its own weights, or the embedding table where weights are tied."""

    @property
    def Vocab(self) -> Axis:
        """The axis of the vocabulary."""
        # Unpacking asserts that the head has exactly one output axis.
        (Vocab,) = self.head.Out
        return Vocab

    def logits(self, activations: NamedArray) -> NamedArray:
        """Float32 logits, `[…, vocab]`. Constraint point: the result."""
        return _logits(self.head, activations, self.config.logit_soft_cap)


@runtime_checkable
class Decodes(Protocol):
    """A causal language model that continues texts: all that `inference` knows of a model."""

    @property
    def config(self) -> Architecture:
        """The architecture; its `layers` say what each of them remembers."""
        ...

    @property
    def head(self) -> Linear:
        """See `LmHeadModel`."""
        ...

    @property
    def Vocab(self) -> Axis:
        """See `LmHeadModel`."""
        ...

    def __call__(self, input_ids: NamedArray) -> Outputs:
        """Activations of whole sequences; see `LmHeadModel`."""
        ...

    def start(self, sizes: StateSizes) -> DecodeState:
        """A decode state in which no row has any token; called inside `jit` or `eval_shape`.

        Raises:
            ValueError: a layer cannot continue a text.
        """
        ...

    def advance(
        self, tokens: NamedArray, state: DecodeState, at: NewPositions, *, length: int
    ) -> tuple[NamedArray, DecodeState]:
        """Maps new tokens of each row to activations, and adds what the layers remember of them to the state.

        Args:
            tokens: ids, `[batch, position]`.
            state: of the positions before. The `batch` of its slot leaves and token ids is that of `tokens`.
            at: the positions of the tokens, in their sequences and in the pages.
            length: positions that a row may have. Rotary embeddings of kinds `dynamic` and `longrope` depend on it, so
                all calls for a row must pass the same.

        Returns:
            Activations after the final norm, `[batch, position, embed]`, and the state.
        """
        ...
