"""Counts the floating-point operations of a token.

Counting as Kaplan et al. (arXiv:2001.08361) and PaLM (arXiv:2204.02311, appendix B) do: a weight that multiplies a
token costs 2 operations forward and 4 backward; attention over `context` keys costs
`4 · layers · heads · head_size · context` forward (scores, and the mix of values) and twice that backward. Norms,
softmax and embedding lookups are left out. Each part of a layer says itself what a sequence costs beyond its weights
(`sequence_flops` in `layers.protocols`), so a recurrence counts the updates of its state.
Recomputation for gradient checkpointing is not counted: these are the model's operations, as in MFU.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from levanter.models.architecture import Architecture

D = TypeVar("D", bound=Architecture, contravariant=True)


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Operations a token, forward.

    Attributes:
        weights: in products with weights, the output head included.
        attention: beyond the weights, on average over a sequence: in products of queries with keys and of weights with
            values, and in what mixers of other kinds compute (`sequence_flops`).
    """

    weights: float
    attention: float

    @property
    def scoring(self) -> float:
        """Operations of a forward pass."""
        return self.weights + self.attention

    @property
    def training(self) -> float:
        """Operations of a forward and a backward pass."""
        # The backward pass has two products for each one of the forward pass: for the inputs and for the weights.
        return 3 * self.scoring


class FlopsFn(Protocol[D]):
    """A function that counts a family's operations."""

    def __call__(
        self, config: D, /, *, vocab_size: int, context_length: int, attention: Literal["causal", "full"]
    ) -> FlopsPerToken:
        """Operations a token; see `flops_per_token`."""
        ...


def flops_per_token(
    config: Architecture, *, vocab_size: int, context_length: int, attention: Literal["causal", "full"]
) -> FlopsPerToken:
    """Operations a token in sequences of `context_length`.

    Args:
        config: the architecture.
        vocab_size: entries of the output head.
        context_length: tokens in a sequence.
        attention: `full` counts every pair of positions (the usual 12·L·H·Q·S convention of MFU); `causal` counts the
            pairs that a causal mask shows, `(context_length + 1) / 2` keys a token.
    """
    return FlopsPerToken(
        # One multiplication and one addition for each weight.
        weights=2.0 * config.matmul_parameters(vocab_size),
        # Integers up to here, so the one rounding is that of the division.
        attention=config.sequence_flops(context_length, attention=attention) / context_length,
    )
