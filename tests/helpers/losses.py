"""Losses and log-probabilities in one call each, for tests that differentiate or compare them."""

from collections.abc import Iterable
from dataclasses import dataclass

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from levanter.layers.linear import Linear
from levanter.models.base import LmHeadModel
from levanter.models.lm_head.chunks import HeadScoring
from levanter.models.lm_head.scores import target_scores
from levanter.models.scoring import has_target, token_logprobs


def mean_loss(
    model: LmHeadModel,
    tokens: NamedArray,
    targets: NamedArray,
    *,
    weights: NamedArray | None = None,
    segment_ids: NamedArray | None = None,
    chunk: int | None = None,
) -> NamedArray:
    """The mean of −log p over the targets that count, a float32 scalar to differentiate.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[…, position]`.
        targets: see `token_logprobs`.
        weights: float32 weight of predicting *from* each position, `[…, position]`; default 1.
        segment_ids: see `token_logprobs`.
        chunk: see `token_logprobs`.
    """
    logprobs = token_logprobs(model, tokens, targets, segment_ids=segment_ids, chunk=chunk)
    counts = has_target(targets).astype(jnp.float32)
    if weights is not None:
        counts = counts * weights
    return -hax.sum(logprobs * counts) / hax.maximum(hax.sum(counts), 1e-9)


def sequence_sums(logprobs: NamedArray, weights: NamedArray) -> tuple[NamedArray, NamedArray]:
    """Per sequence, the weighted sum of log-probabilities and the sum of weights, over `position`, float32.

    A sequence's sums do not depend on the batch it is in; `LossMean` adds them up on the host in float64.
    """
    exact = weights.astype(jnp.float32)
    # A position that does not count must not spoil the sum, whatever its value is.
    counted = hax.where(exact != 0, logprobs, 0.0)
    return hax.sum(counted * exact, "position"), hax.sum(exact, "position")


@dataclass(frozen=True, kw_only=True)
class LossMean:
    """A mean of −log p under way: float64 sums on the host.

    Attributes:
        total: sum of −log p, in nats.
        count: sum of weights (tokens).
    """

    total: float = 0.0
    count: float = 0.0

    @classmethod
    def of(cls, logprob_sums: Iterable[float] | np.ndarray, counts: Iterable[float] | np.ndarray) -> "LossMean":
        """From per-sequence sums, as `sequence_sums` gives them."""
        return cls(
            total=-float(np.sum(np.asarray(logprob_sums), dtype=np.float64)),
            count=float(np.sum(np.asarray(counts), dtype=np.float64)),
        )

    def __add__(self, other: "LossMean") -> "LossMean":
        return LossMean(total=self.total + other.total, count=self.count + other.count)

    @property
    def loss(self) -> float:
        """Nats a token; NaN if nothing was counted."""
        return self.total / self.count if self.count else float("nan")


def target_logprobs(
    activations: NamedArray,
    head: Linear,
    targets: NamedArray,
    *,
    chunk: int,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
) -> NamedArray:
    """Log-probability of `targets` under the head's distribution at each activation, float32.

    Args:
        activations: `[…, position, embed]`.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids, `[…, position]`; what is found where one is negative means nothing.
        chunk: positions at a time.
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
    """
    how = HeadScoring(vocab_size=vocab_size, soft_cap=soft_cap, normalizers=False)
    return target_scores(activations, head, targets, chunk=chunk, how=how)[0]
