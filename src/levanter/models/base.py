"""`LmHeadModel`: the interface of every causal language model."""

from abc import abstractmethod
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.attention import AttentionMask
from levanter.layers.attention.reference import soft_capped
from levanter.layers.linear import Linear
from levanter.layers.outputs import Outputs
from levanter.models.architecture import Architecture


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
    ) -> Outputs:
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
        # Float32 and then the soft cap, in the order of `lm_head.chunks`, so that sampled and scored logits agree.
        return soft_capped(hax.auto_sharded(self.head(activations, dtype=jnp.float32)), self.config.logit_soft_cap)
