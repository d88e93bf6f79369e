"""Weighted sums of scores and their gradient against NumPy in float64; how many products they take."""

import math
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.linear import Linear
from levanter.models.lm_head.loss import weighted_loss

Batch, Pos, Embed, Vocab = Axis("batch", 3), Axis("position", 17), Axis("embed", 12), Axis("vocab", 40)
RNG = np.random.default_rng(0)
ACTIVATIONS = (2 * RNG.standard_normal((3, 17, 12))).astype(np.float32)
HEAD = RNG.standard_normal((40, 12)).astype(np.float32)
BIAS = RNG.standard_normal(40).astype(np.float32)
TARGETS = RNG.integers(0, 30, (3, 17)).astype(np.int32)
WEIGHTS = (RNG.random((3, 17)) * (RNG.random((3, 17)) > 0.3)).astype(np.float32)
TARGETS[WEIGHTS == 0] = -1
FACTOR = 0.37


def sums(a, w, bias=None, *, chunk, **how):
    Features = Embed.resize(a.shape[-1])
    head = Linear(
        weight=hax.named(w, (Vocab, Features)), bias=None if bias is None else hax.named(bias, Vocab), In=("embed",)
    )
    targets, weights = hax.named(TARGETS, (Batch, Pos)), hax.named(WEIGHTS, (Batch, Pos))
    return weighted_loss(hax.named(a, (Batch, Pos, Features)), head, targets, weights, chunk=chunk, **how)


def minimized(*arrays, **how):
    return FACTOR * sums(*arrays, **how).minimized


def by_numpy(a, w, bias=None, *, vocab_size=40, soft_cap=None, z_weight=0.0):
    """Loss, squared normalizers, and the gradients of activations, head and bias, for a cotangent of `FACTOR`."""
    a, w = a.astype(np.float64), w.astype(np.float64)
    logits = a @ w.T + (0 if bias is None else bias)
    slope = np.ones_like(logits)
    if soft_cap is not None:
        bounded = np.tanh(logits / soft_cap)
        logits, slope = soft_cap * bounded, 1 - bounded**2
    logits[..., vocab_size:] = -np.inf
    top = logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
    hit, shares = np.eye(40)[np.maximum(TARGETS, 0)], np.exp(logits - normalizer)
    weights = WEIGHTS.astype(np.float64)[..., None]
    loss = -(weights * (hit * np.where(hit, logits, 0) - hit * normalizer)).sum()
    squared = (weights * normalizer**2).sum()
    of_logits = FACTOR * weights * (shares - hit + 2 * z_weight * normalizer * shares) * slope
    return loss, squared, of_logits @ w, np.einsum("bpv,bpe->ve", of_logits, a), of_logits.sum((0, 1)), of_logits


CASES = {
    "plain": {},
    "added entries": {"vocab_size": 30},
    "normalizers": {"z_weight": 0.05},
    "soft cap": {"vocab_size": 30, "soft_cap": 2.5, "z_weight": 0.05},
}


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
@pytest.mark.parametrize("chunk", [1, 6, 100])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["matrix", "with bias"])
def test_sums_and_gradients_are_those_of_whole_logits(how, chunk, bias):
    """A head that is a matrix goes by hand, any other by JAX's derivative of a chunk."""
    arrays = (ACTIVATIONS, HEAD) if bias is None else (ACTIVATIONS, HEAD, bias)
    loss, squared, *expected, _ = by_numpy(*arrays, **how)
    found = jax.jit(lambda *arrays: sums(*arrays, chunk=chunk, **how))(*arrays)
    assert float(found.loss) == pytest.approx(loss, rel=1e-5)
    z_weight = how.get("z_weight", 0.0)
    assert float(found.minimized) == pytest.approx(loss + z_weight * squared, rel=1e-5)
    assert found.squared_normalizers is None or float(found.squared_normalizers) == pytest.approx(squared, rel=1e-5)
    assert (found.squared_normalizers is None) == (z_weight == 0)
    both = jax.jit(jax.value_and_grad(lambda *a: minimized(*a, chunk=chunk, **how), argnums=tuple(range(len(arrays)))))
    value, gradients = both(*arrays)
    assert float(value) == pytest.approx(FACTOR * float(found.minimized), rel=1e-6)
    for mine, exact in zip(gradients, expected, strict=False):
        np.testing.assert_allclose(mine, exact, atol=3e-5)


@pytest.mark.parametrize("chunk", [1, 6])
def test_half_precision_gradients_are_those_of_their_own_inputs(chunk):
    """What is added up over chunks stays in float32: later chunks count as much as the first."""
    a, w = ACTIVATIONS.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    of_a, of_w = jax.jit(jax.grad(lambda a, w: minimized(a, w, chunk=chunk), argnums=(0, 1)))(a, w)
    assert of_a.dtype == of_w.dtype == jnp.bfloat16
    a, w = a.astype(np.float64), w.astype(np.float64)
    *_, of_logits = by_numpy(a, w)
    # Three roundings of a relative 2^-9 each: of the terms, of their sum, of the sum times the cotangent.
    for mine, exact, terms in (
        (of_a, of_logits @ w, np.abs(of_logits) @ np.abs(w)),
        (of_w, np.einsum("bpv,bpe->ve", of_logits, a), np.einsum("bpv,bpe->ve", np.abs(of_logits), np.abs(a))),
    ):
        assert (np.abs(np.asarray(mine.astype(jnp.float32)) - exact) <= 2**-7 * terms).all()


def test_what_does_not_count_spoils_nothing():
    """Whatever stands where nothing is predicted, as long as its logits are finite."""
    wild = np.where(WEIGHTS[..., None] == 0, 1e4, ACTIVATIONS).astype(np.float32)
    run = jax.jit(jax.value_and_grad(lambda a, w: minimized(a, w, chunk=5, z_weight=0.05), argnums=(0, 1)))
    (value, (of_a, of_w)), (expected, gradients) = run(wild, HEAD), run(ACTIVATIONS, HEAD)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(of_a, gradients[0], atol=1e-6)
    np.testing.assert_allclose(of_w, gradients[1], atol=1e-6)


def products(function, *arrays):
    """How many products of the logits' size a compiled program has; none of its arrays is as large as all logits."""
    lowered = jax.jit(function).lower(*arrays)
    text, shapes = lowered.as_text(), re.findall(r"f32\[([\d,]+)\]", lowered.compile().as_text())
    assert max(math.prod(int(n) for n in shape.split(",")) for shape in shapes) < 3 * 17 * 40
    return len(re.findall(r"dot_general.*[<x]40x", text))


def test_three_products_and_no_logits_are_kept():
    def loss(a, w):
        return minimized(a, w, chunk=4)

    assert products(jax.grad(loss, argnums=(0, 1)), ACTIVATIONS, HEAD) == 3
    # A frozen head, a head alone, and no gradient at all.
    assert products(jax.grad(loss), ACTIVATIONS, HEAD) == 2
    assert products(loss, ACTIVATIONS, HEAD) == 1


WIDE = RNG.standard_normal((3, 17, 64)).astype(np.float32), RNG.standard_normal((40, 64)).astype(np.float32)
"""Activations and a head of more features than there are tokens (51)."""


@pytest.mark.parametrize("chunk", [6, 100], ids=["chunks", "at once"])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_a_head_of_more_features_than_tokens(how, chunk):
    loss, squared, of_a, of_w, _, _ = by_numpy(*WIDE, **how)
    run = jax.jit(jax.value_and_grad(lambda *arrays: minimized(*arrays, chunk=chunk, **how), argnums=(0, 1)))
    value, found = run(*WIDE)
    assert float(value) == pytest.approx(FACTOR * (loss + how.get("z_weight", 0.0) * squared), rel=1e-5)
    for mine, exact in zip(found, (of_a, of_w), strict=True):
        np.testing.assert_allclose(mine, exact, atol=1e-4)


def test_the_gradient_of_a_wide_head_is_made_as_the_head_lies():
    """Nothing of the head's size or the logits' is turned around, neither before the product nor after it."""

    def updated(a, w):
        gradient = jax.grad(minimized, argnums=1)(a, w, chunk=100)
        return w - 0.1 * gradient / jnp.sqrt(jnp.sum(gradient**2))

    text = jax.jit(updated).lower(*WIDE).compile().as_text()
    assert "f32[40,64]" in text and "f32[64,40]" not in text
    turned = re.findall(r"f32\[([\d,]+)\]\S* (?:transpose|copy)\(", text)
    assert not [shape for shape in turned if "40" in shape.split(",")], turned


def test_the_logit_of_a_target_is_picked_from_a_wide_head_s():
    """What is written of the logits' size are products, powers and gradient, and no terms of a sum."""
    lowered = jax.jit(jax.value_and_grad(lambda a, w: minimized(a, w, chunk=100), argnums=(0, 1))).lower(*WIDE)
    entry = lowered.compile().as_text().split("\nENTRY ")[1]
    written = [line for line in entry.splitlines() if re.search(r"= f32\[(3,17|51),40\]\S* (fusion|dot)\(", line)]
    assert 0 < len(written) <= 3, "\n".join(written)


def test_each_row_alone_and_under_a_checkpoint():
    """As scripts of earlier generations map their losses over examples."""

    def one(a, w, targets, weights):
        head = Linear(weight=hax.named(w, (Vocab, Embed)), bias=None, In=("embed",))
        rows = hax.named(a, (Pos, Embed)), head, hax.named(targets, Pos), hax.named(weights, Pos)
        return weighted_loss(*rows, chunk=6, z_weight=0.05).minimized

    @jax.checkpoint
    def mapped(a, w):
        return FACTOR * jnp.sum(jax.vmap(one, (0, None, 0, 0))(a, w, TARGETS, WEIGHTS))

    found = jax.jit(jax.grad(mapped, argnums=(0, 1)))(ACTIVATIONS, HEAD)
    for mine, exact in zip(found, by_numpy(ACTIVATIONS, HEAD, z_weight=0.05)[2:4], strict=True):
        np.testing.assert_allclose(mine, exact, atol=3e-5)


def test_a_curvature_product_is_the_derivative_of_the_gradient():
    """Forward over reverse, as Sophia's estimates are made, against JAX's of whole logits."""

    def whole(w):
        logits = jnp.einsum("bpe,ve->bpv", ACTIVATIONS, w)
        normalizer = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, jnp.maximum(TARGETS, 0)[..., None], -1)[..., 0]
        return FACTOR * jnp.sum(WEIGHTS * (normalizer - picked + 0.05 * normalizer**2))

    along = RNG.standard_normal(HEAD.shape).astype(np.float32)

    def turned(function):
        return jax.jit(lambda w, u: jax.jvp(jax.grad(function), (w,), (u,))[1])(HEAD, along)

    mine = turned(lambda w: minimized(ACTIVATIONS, w, chunk=6, z_weight=0.05))
    np.testing.assert_allclose(mine, turned(whole), atol=2e-4, rtol=1e-4)


def test_only_what_is_minimized_can_be_differentiated():
    """The gradient is made for the cotangent of one sum: any other would be wrong without a word."""
    with pytest.raises(AssertionError, match="only `minimized` can be differentiated"):
        jax.jit(jax.grad(lambda a: sums(a, HEAD, chunk=6, z_weight=0.05).loss))(ACTIVATIONS)
