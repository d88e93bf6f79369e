"""The loss of a policy that learns from rewards (GRPO and its relatives), token by token.

A prompt is answered several times, each answer gets a reward, and the *advantage* A of an answer is what its reward has
over that of the other answers to the same prompt (`trainer.advantage`). All tokens of an answer share its advantage.
The loss of a token depends on its log-probability under up to four policies, each the softmax of logits divided by the
temperature at which the answer was sampled:

- θ, the model that is trained;
- *old*: the model whose answers the ratio r = p_θ / p_old is relative to;
- μ, the *sampler*: the model as the engine computed it, perhaps in int8;
- the *reference* that a KL term keeps θ close to.

With sg for "no gradient through this":

    f = −min(r A, clip(r, 1 − low, 1 + high) A) · sg(correction(p_old / p_μ)) + β · k
    L = Σ w f / N

- `ratio: token` is r of the token (PPO, GRPO: arXiv:2402.03300); `sequence` the geometric mean of the ratios of the
  answer's tokens (GSPO, arXiv:2507.18071); `cispo` replaces the minimum by sg(min(r, 1 + high)) · A · log p_θ
  (arXiv:2506.13585), and `sequence_cispo` does so with the ratio of the answer.
- `tis` corrects what differs between the sampler and the trainer (truncated importance sampling), once: where `old` is
  the sampler itself, r already contains it.
- `kl` with x = log p_reference − log p_θ: `k3` is eˣ − x − 1, whose mean is the divergence, but whose gradient is not
  that of it; `k3_corrected` is r · k3, which has both; `k2` is x²/2, whose gradient is right on-policy. −x alone has
  no gradient on average, so it is not offered (Schulman, "Approximating KL divergence", 2020).
- `normalize` decides w and N: every token counts the same (`token`, DAPO: arXiv:2503.14476), or every answer
  (`sequence`, the GRPO paper), or every token by a constant (`constant`, Dr. GRPO: arXiv:2503.20783).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from levanter.config.validators import NonNegativeFloat, PositiveFloat, Range, Ranged
from levanter.trainer.objective import LOSS

LARGEST_LOG = 20.0
"""Bound of the logarithm of every ratio: e²⁰ is finite in float32, and so is its product with an advantage of 0."""

LowerClip: TypeAlias = Annotated[float, Range(0, 1, above=True)]
CapOfRatio: TypeAlias = Annotated[float, Range(1, 1e6)]

RATIO, CLIP_LOW, CLIP_HIGH = "policy/ratio_mean", "policy/clip_low", "policy/clip_high"
TIS_MEAN, TIS_CAPPED = "policy/tis_mean", "policy/tis_capped"
KL, GAP = "policy/kl", "logprob_gap/mean"


@dataclass(frozen=True, kw_only=True)
class ClipConfig(Ranged):
    """The range of ratios that are learned from.

    Attributes:
        low: a ratio below 1 − low does not become smaller.
        high: a ratio above 1 + high does not become larger. trl's `epsilon_high` of CISPO is 1 + high.
    """

    low: LowerClip = 0.2
    high: PositiveFloat = 0.28


@dataclass(frozen=True, kw_only=True)
class TisConfig(Ranged):
    """The correction for differences between sampler and trainer: ρ = p_old / p_sampler.

    Attributes:
        cap: the largest ρ that counts in full.
        level: ρ of a `token`, or the product over the answer's tokens (`sequence`).
        beyond: what becomes of a larger ρ: it counts as `cap` (`truncate`), or its tokens do not count (`mask`).
    """

    cap: CapOfRatio = 2.0
    level: Literal["token", "sequence"] = "token"
    beyond: Literal["truncate", "mask"] = "truncate"


@dataclass(frozen=True, kw_only=True)
class KlConfig(Ranged):
    """The term that keeps the policy close to the reference.

    Attributes:
        beta: its weight β; 0 for none, and no reference.
        estimator: its value at a token; see `levanter.trainer.policy_loss`.
    """

    beta: NonNegativeFloat = 0.0
    estimator: Literal["k3_corrected", "k3", "k2"] = "k3_corrected"


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Ranged):
    """The loss of a step.

    Attributes:
        normalize: what counts the same: every `token`, every answer (`sequence`), or every token by a `constant`.
        ratio: of what, and how it enters; see `levanter.trainer.policy_loss`.
        clip: the range of ratios that are learned from.
        old: the policy that ratios are relative to: the model at this step (`current`: every ratio is 1, and only its
            gradient counts), the `sampler`, or log-probabilities that were computed before the first of several
            updates (`score`).
        tis: the correction for the sampler; null for none.
        kl: the term that keeps the policy close to the reference.
    """

    normalize: Literal["token", "sequence", "constant"] = "token"
    ratio: Literal["token", "sequence", "cispo", "sequence_cispo"] = "token"
    clip: ClipConfig = field(default_factory=ClipConfig)
    old: Literal["current", "sampler", "score"] = "current"
    tis: TisConfig | None = field(default_factory=TisConfig)
    kl: KlConfig = field(default_factory=KlConfig)

    @property
    def corrects(self) -> bool:
        """Whether the loss has a factor ρ: not where the ratio is relative to the sampler already."""
        return self.tis is not None and self.old != "sampler"

    @property
    def has_reference(self) -> bool:
        """Whether the loss depends on a reference."""
        return self.kl.beta > 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the means over tokens that are logged beside the loss."""
        tis = (TIS_MEAN, TIS_CAPPED) if self.corrects else ()
        return (RATIO, CLIP_LOW, CLIP_HIGH, *tis, *((KL,) if self.has_reference else ()), GAP)


AnswerSums: TypeAlias = Callable[[jax.Array], jax.Array]
"""Values of tokens → at every token, their sum over the tokens of its answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenData:
    """What the loss of tokens depends on beside θ; arrays of one shape.

    Attributes:
        counted: bool: the tokens of answers that are learned from. Values at others have no meaning, and no effect.
        advantage: of the token's answer.
        sampler, old, reference: log-probabilities under these policies; None where the loss needs none.
        answer_sums: sums over the tokens of an answer.
    """

    counted: jax.Array
    advantage: jax.Array
    sampler: jax.Array
    old: jax.Array | None = None
    reference: jax.Array | None = None
    answer_sums: AnswerSums


def policy_terms(loss: PolicyLossConfig, logprobs: jax.Array, tokens: TokenData) -> dict[str, jax.Array]:
    """The loss f and the metrics of every token, by name; 0 at tokens that do not count.

    Args:
        loss: the formula.
        logprobs: log p_θ, which is differentiated.
        tokens: everything else.
    """
    now = jax.lax.stop_gradient(logprobs)
    old = {"current": now, "sampler": tokens.sampler, "score": tokens.old}[loss.old]
    assert old is not None, "no log-probabilities of the old policy"

    def log_ratio(p: jax.Array, q: jax.Array) -> jax.Array:
        # Selected before any exponential: prompts and padding have no log-probabilities, and inf · 0 is NaN.
        return jnp.where(tokens.counted, p - q, 0.0)

    # With `old: current` this is 0 with the gradient of log p_θ: every ratio is 1, and none is clipped.
    exponent = log_ratio(logprobs, old)
    if loss.ratio.startswith("sequence"):
        lengths = tokens.answer_sums(tokens.counted.astype(exponent.dtype))
        # The mean, not the sum: long answers would otherwise leave the clip's range at once. Padding has no tokens.
        exponent = tokens.answer_sums(exponent) / jnp.maximum(lengths, 1)
    ratio, advantage, clip = jnp.exp(_bounded(exponent)), tokens.advantage, loss.clip
    high = ratio > 1 + clip.high
    if loss.ratio.endswith("cispo"):
        # A bounded weight of the plain policy gradient: tokens beyond the bound keep a gradient, unlike below.
        value = jax.lax.stop_gradient(jnp.minimum(ratio, 1 + clip.high)) * advantage * logprobs
        clipped_low = jnp.zeros_like(high)
    else:
        value = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip.low, 1 + clip.high) * advantage)
        # Only where the minimum is the clipped value does the clip act.
        high, clipped_low = high & (advantage > 0), (ratio < 1 - clip.low) & (advantage < 0)
    # Fractions as 0 and 1 at every token: their means are those that the log shows.
    terms = {RATIO: ratio, CLIP_LOW: clipped_low, CLIP_HIGH: high}
    if loss.corrects:
        assert loss.tis is not None
        exponent = log_ratio(jax.lax.stop_gradient(old), tokens.sampler)
        rho = jnp.exp(_bounded(tokens.answer_sums(exponent) if loss.tis.level == "sequence" else exponent))
        capped = rho > loss.tis.cap
        # `rho` has no gradient: neither has `old` here, nor the sampler's numbers, which come from the host.
        value = value * jnp.where(capped, loss.tis.cap if loss.tis.beyond == "truncate" else 0.0, rho)
        terms |= {TIS_MEAN: rho, TIS_CAPPED: capped}
    losses = -value
    if loss.has_reference:
        assert tokens.reference is not None, "no log-probabilities of the reference"
        kl = _kl(loss.kl, _bounded(log_ratio(tokens.reference, logprobs)), ratio)
        losses, terms = losses + loss.kl.beta * kl, terms | {KL: kl}
    terms = {LOSS: losses, **terms, GAP: jnp.abs(log_ratio(now, tokens.sampler))}
    return {name: jnp.where(tokens.counted, value.astype(logprobs.dtype), 0.0) for name, value in terms.items()}


def _kl(kl: KlConfig, x: jax.Array, ratio: jax.Array) -> jax.Array:
    if kl.estimator == "k2":
        return x * x / 2
    # expm1(x) − x: near x = 0, where most tokens are, exp(x) − 1 would lose the digits that count.
    k3 = jnp.expm1(x) - x
    return k3 if kl.estimator == "k3" else ratio * k3


def _bounded(exponent: jax.Array) -> jax.Array:
    return jnp.clip(exponent, -LARGEST_LOG, LARGEST_LOG)


def token_weights(
    normalize: Literal["token", "sequence", "constant"], lengths: np.ndarray, learned: np.ndarray, *, max_tokens: int
) -> np.ndarray:
    """The weight of each token of each answer, float64 `[answers]`, for a mean over all tokens that are learned from.

    Σ w f / N with w and N of the papers is the same number as Σ w' f / T with w' = w T / N, where T is the number of
    tokens: so the normalizer counts tokens whatever `normalize` is, and metrics are means over tokens. Answers that are
    not learned from leave N, too.

    Args:
        normalize: what counts the same.
        lengths: tokens of each answer of the global batch.
        learned: whether each answer is learned from.
        max_tokens: the largest number of tokens that an answer may have, for `constant`.
    """
    # Float64 on the host: every process computes the same weights, whatever its devices.
    lengths = np.where(learned, lengths, 0).astype(np.float64)
    answers, tokens = np.count_nonzero(learned), lengths.sum()
    if normalize == "token" or answers == 0:
        return np.where(learned, 1.0, 0.0)
    # T / N of the papers is tokens / (answers · |o|) or tokens / (answers · L); an answer without tokens has no weight.
    divisors = np.maximum(lengths, 1) if normalize == "sequence" else np.full_like(lengths, max_tokens)
    return np.where(learned, tokens / (answers * divisors), 0.0)
