"""The loss of a policy by closed forms: sums over every id of a small vocabulary, in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.trainer.objective import LOSS
from levanter.trainer.policy_loss import (
    CLIP_HIGH,
    CLIP_LOW,
    GAP,
    KL,
    TIS_CAPPED,
    TIS_MEAN,
    ClipConfig,
    KlConfig,
    PolicyLossConfig,
    TisConfig,
    TokenData,
    policy_terms,
    token_weights,
)

PLAIN = PolicyLossConfig()
LOGITS = np.random.default_rng(1).standard_normal(5)
REFERENCE = np.random.default_rng(2).standard_normal(5)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def rows(x):
    return jnp.asarray(x, jnp.float64)[None]


def data(advantage, sampler, **more):
    counted = more.pop("counted", np.ones(np.shape(sampler), bool))
    return TokenData(
        counted=jnp.asarray(counted)[None],
        advantage=rows(np.broadcast_to(np.asarray(advantage, float), np.shape(sampler))),
        sampler=rows(sampler),
        answer_sums=lambda x: jnp.broadcast_to(x.sum(axis=-1, keepdims=True), x.shape),
        **{name: rows(value) for name, value in more.items()},
    )


def expected_gradient(loss, weights, *, advantage=0.0):
    """The gradient of Σ_id p(id) f(id) in the logits, where `p` (the sampling) is not differentiated."""
    p = jax.nn.softmax(jnp.asarray(LOGITS))

    def mean(logits):
        now = jax.nn.log_softmax(logits)
        tokens = data(advantage, jax.nn.log_softmax(jnp.asarray(LOGITS)), reference=jax.nn.log_softmax(REFERENCE))
        return jnp.sum(weights * policy_terms(loss, now[None], tokens)[LOSS][0] * p)

    return np.asarray(jax.grad(mean)(jnp.asarray(LOGITS)))


def kl_gradient():
    """Of KL(p_θ ‖ reference), summed exactly."""

    def kl(logits):
        now = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(now) * (now - jax.nn.log_softmax(jnp.asarray(REFERENCE))))

    return np.asarray(jax.grad(kl)(jnp.asarray(LOGITS)))


@pytest.mark.parametrize(("estimator", "right"), [("k2", True), ("k3_corrected", True), ("k3", False)])
def test_on_policy_gradients_of_the_kl_estimators(estimator, right):
    """k2 and r · k3 have the gradient of the divergence; k3 alone has that of the other one, KL(reference ‖ p)."""
    loss = PolicyLossConfig(kl=KlConfig(beta=1.0, estimator=estimator), tis=None)
    gradient = expected_gradient(loss, 1.0)
    if right:
        np.testing.assert_allclose(gradient, kl_gradient(), rtol=1e-12)
    else:
        p, reference = jax.nn.softmax(jnp.asarray(LOGITS)), jax.nn.softmax(jnp.asarray(REFERENCE))
        np.testing.assert_allclose(gradient, p - reference, rtol=1e-12)
        assert np.abs(gradient - kl_gradient()).max() > 0.05


def test_the_value_of_k3_is_the_divergence():
    p = np.exp(LOGITS) / np.exp(LOGITS).sum()
    reference = np.exp(REFERENCE) / np.exp(REFERENCE).sum()
    tokens = data(0.0, np.log(p), reference=np.log(reference))
    for estimator in ("k3", "k3_corrected"):
        terms = policy_terms(PolicyLossConfig(kl=KlConfig(beta=0.5, estimator=estimator)), rows(np.log(p)), tokens)
        np.testing.assert_allclose(float((terms[KL][0] * p).sum()), (p * np.log(p / reference)).sum(), rtol=1e-12)


@pytest.mark.parametrize("ratio", ["token", "sequence", "cispo", "sequence_cispo"])
def test_the_on_policy_gradient_is_that_of_the_log_probability(ratio):
    """−A ∇ log p, whatever the ratio; of a `sequence`, each of its tokens has the mean of them."""
    now = np.array([-0.5, -1.5, -0.1])

    def total(logprobs):
        return policy_terms(replace(PLAIN, ratio=ratio), logprobs, data(0.7, now))[LOSS].sum()

    np.testing.assert_allclose(jax.grad(total)(rows(now))[0], -0.7, rtol=1e-12)


@pytest.mark.parametrize("old", ["current", "sampler", "score"])
def test_the_sampler_is_corrected_for_once(old):
    """The gradient is −A (p_θ / p_sampler) ∇ log p: not without the ratio, and not with its square."""
    now, sampler = np.array([-1.0]), np.array([-1.1])
    loss = PolicyLossConfig(old=old, clip=ClipConfig(low=0.5, high=0.5), tis=TisConfig(cap=2.0))

    def total(logprobs):
        return policy_terms(loss, logprobs, data(0.7, sampler, old=now))[LOSS].sum()

    np.testing.assert_allclose(jax.grad(total)(rows(now))[0], [-0.7 * np.exp(0.1)], rtol=1e-12)


def test_clipped_tokens_have_no_gradient_and_are_counted():
    now, old = np.log([0.5, 0.5, 0.5, 0.5]), np.log([0.3, 0.3, 0.9, 0.9])
    advantage = np.array([1.0, -1.0, 1.0, -1.0])
    tokens = data(advantage, old, old=old)
    loss = PolicyLossConfig(old="score", tis=None)

    def total(logprobs):
        return policy_terms(loss, logprobs, tokens)[LOSS].sum()

    gradient = jax.grad(total)(rows(now))[0]
    terms = policy_terms(loss, rows(now), tokens)
    # Ratios 5/3 and 5/9: the first is bounded where it would be rewarded, the second where it would be punished.
    np.testing.assert_allclose(gradient, [0, 5 / 3, -5 / 9, 0], rtol=1e-12)
    np.testing.assert_array_equal(terms[CLIP_HIGH][0], [1, 0, 0, 0])
    np.testing.assert_array_equal(terms[CLIP_LOW][0], [0, 0, 0, 1])


@pytest.mark.parametrize(("level", "beyond"), [("token", "truncate"), ("token", "mask"), ("sequence", "mask")])
def test_ratios_above_the_cap(level, beyond):
    now, sampler = np.array([-1.0, -1.0]), np.array([-2.0, -1.0])
    loss = PolicyLossConfig(tis=TisConfig(cap=2.0, level=level, beyond=beyond))
    terms = policy_terms(loss, rows(now), data(1.0, sampler))
    capped = [1, 1] if level == "sequence" else [1, 0]
    np.testing.assert_array_equal(terms[TIS_CAPPED][0], capped)
    np.testing.assert_allclose(terms[TIS_MEAN][0], [np.e, np.e if level == "sequence" else 1])
    limit = 2.0 if beyond == "truncate" else 0.0
    np.testing.assert_allclose(terms[LOSS][0], [-limit, -limit if level == "sequence" else -1])
    np.testing.assert_allclose(terms[GAP][0], [1, 0])


def test_tokens_that_do_not_count_have_no_effect_whatever_they_hold():
    """NaN and infinite log-probabilities at prompts and padding: neither in the loss nor in its gradient."""
    now, sampler = np.array([-1.0, np.nan, -np.inf, -2.0]), np.array([-1.2, np.nan, 0.0, -1.8])
    counted = np.array([True, False, False, True])
    loss = PolicyLossConfig(ratio="sequence", old="score", kl=KlConfig(beta=0.1), tis=TisConfig(level="sequence"))
    tokens = data(np.array([0.5, 0, 0, 0.5]), sampler, counted=counted, old=sampler, reference=sampler)

    def total(logprobs):
        terms = policy_terms(loss, logprobs, tokens)
        assert all(np.isfinite(value).all() for value in map(jax.lax.stop_gradient, terms.values()))
        return terms[LOSS].sum()

    gradient = np.asarray(jax.jacrev(total)(rows(now))[0])
    assert np.isfinite(gradient).all()
    assert (gradient[~counted] == 0).all()
    assert (gradient[counted] != 0).all()


def test_an_advantage_of_zero_has_a_gradient_of_zero_however_far_the_policies_are():
    """Infinite ratios times 0 would be NaN."""
    now, old = np.array([-1.0, -500.0]), np.array([-900.0, -1.0])

    def total(logprobs):
        return policy_terms(PolicyLossConfig(old="score"), logprobs, data(0.0, old, old=old))[LOSS].sum()

    value, gradient = jax.value_and_grad(total)(rows(now))
    assert float(value) == 0
    assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
def test_weights_are_those_of_the_papers_over_the_number_of_tokens(normalize):
    """Answers that are not learned from leave the weights and the normalizer; twice the batch has the same loss."""
    rng, most = np.random.default_rng(5), 9
    lengths, learned = rng.integers(1, most + 1, 12), rng.random(12) > 0.3
    losses = rng.standard_normal(12)
    count = np.count_nonzero(learned)
    divisors = {"token": lengths[learned].sum(), "sequence": count * lengths, "constant": count * most}[normalize]
    expected = (losses * lengths * learned / divisors).sum()

    def mean(copies):
        tiled = [np.tile(x, copies) for x in (lengths, learned, losses)]
        weights = token_weights(normalize, *tiled[:2], max_tokens=most)
        return (weights * tiled[2] * tiled[0]).sum() / tiled[0][tiled[1]].sum()

    np.testing.assert_allclose([mean(1), mean(2)], expected, rtol=1e-13)


def test_weights_of_a_batch_that_is_not_learned_from_are_zero():
    weights = token_weights("sequence", np.array([3, 4]), np.zeros(2, bool), max_tokens=8)
    np.testing.assert_array_equal(weights, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClipConfig(low=0.0), "low"),
        (lambda: ClipConfig(low=1.5), "low"),
        (lambda: ClipConfig(high=-0.1), "high"),
        (lambda: TisConfig(cap=0.5), "cap"),
        (lambda: KlConfig(beta=-1.0), "beta"),
    ],
)
def test_values_out_of_range_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
