"""Counts the floating-point operations of a token.

Counting as Kaplan et al. (arXiv:2001.08361) and PaLM (arXiv:2204.02311, appendix B) do: a weight that multiplies a
token costs 2 operations forward and 4 backward; attention over `context` keys costs
`4 · layers · heads · head_size · context` forward (scores, and the mix of values) and twice that backward. Norms,
softmax and embedding lookups are left out.
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
        attention: in products of queries with keys and of weights with values.
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
        attention=sum(
            # 2 operations each for q · k and for weight · v, over
            # every query feature (heads × head_size) and visible key.
            4.0 * group.features * mean_keys(context_length, window=group.window, attention=attention)
            for group in config.attention_groups
        ),
    )


def mean_keys(context_length: int, *, window: int | None, attention: Literal["causal", "full"]) -> float:
    """The mean number of keys that a token attends to in a sequence of `context_length`.

    Args:
        context_length: tokens in a sequence.
        window: keys that a query sees at most, itself included.
        attention: `full` counts `context_length` keys (at most the window); `causal` those that the mask shows.
    """
    seen = context_length if window is None else min(window, context_length)
    if attention == "full":
        return float(seen)
    # With s = `seen` and n tokens: the first s tokens see 1, 2, …, s keys, the other n − s see s each. The sum is s
    # (s + 1) / 2 + (n − s) s = s (2n − s + 1) / 2.
    return seen * (2 * context_length - seen + 1) / (2 * context_length)
