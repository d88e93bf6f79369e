"""Bounded scores (soft caps), alone and with windows and segments, in every backend that claims them."""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.attention import AttentionMask, BackendChoice, attend, splash
from levanter.layers.attention.splash import splash_attention

LENGTH, CAP, SCALE, WINDOW = 150, 3.0, 0.6, 40
Batch, Pos, KeyPos = Axis("batch", 2), Axis("position", LENGTH), Axis("key_position", LENGTH)
KVHead, Group, Size = Axis("kv_head", 2), Axis("q_heads_per_group", 2), Axis("head_size", 16)
Q_AXES, K_AXES = (Batch, Pos, KVHead, Group, Size), (Batch, KeyPos, KVHead, Size)
RNG = np.random.default_rng(3)
Q = RNG.standard_normal([a.size for a in Q_AXES]).astype(np.float32)
K, V = (RNG.standard_normal([a.size for a in K_AXES]).astype(np.float32) for _ in range(2))
SEGMENTS = np.sort(RNG.integers(0, 2, (2, LENGTH)), axis=-1).astype(np.int32)


def formula(window: int | None) -> tuple[np.ndarray, list[np.ndarray]]:
    """The result in float64, and the gradients of the sum of its squares by the chain rule."""
    q, k, v = (x.astype(np.float64) for x in (Q, K, V))
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    shown = (distance >= 0) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    if window is not None:
        shown &= distance < window
    bounded = np.tanh(np.einsum("bqhgd,bkhd->bhgqk", q, k) * SCALE / CAP)
    weights = np.exp(CAP * bounded) * shown[:, None, None]
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhgqk,bkhd->bqhgd", weights, v)
    of_weights = np.einsum("bqhgd,bkhd->bhgqk", 2 * out, v)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * (1 - bounded**2) * SCALE
    of_q = np.einsum("bhgqk,bkhd->bqhgd", of_scores, k)
    of_k = np.einsum("bhgqk,bqhgd->bkhd", of_scores, q)
    return out, [of_q, of_k, np.einsum("bhgqk,bqhgd->bkhd", weights, 2 * out)]


WINDOWS = [pytest.param(None, marks=pytest.mark.slow, id="whole"), pytest.param(WINDOW, id="window")]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", ["reference", "blockwise", "splash"])
def test_equals_the_formula_and_its_derivative(backend, window, monkeypatch):
    monkeypatch.setattr(splash, "splash_attention", functools.partial(splash_attention, interpret=True))
    choice = BackendChoice(name=backend, reason="", block_size=128 if backend == "splash" else 64)

    def loss(q, k, v, segments):
        q, k, v = hax.named(q, Q_AXES), hax.named(k, K_AXES), hax.named(v, K_AXES)
        mask = AttentionMask.causal(sliding_window=window).with_segment_ids(hax.named(segments, (Batch, Pos)))
        out = attend(q, k, v, mask, softmax_scale=SCALE, choice=choice, soft_cap=CAP)
        return jnp.sum(jnp.square(out.array)), out.array

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(Q, K, V, SEGMENTS)
    expected_out, expected = formula(window)
    np.testing.assert_allclose(out, expected_out, atol=5e-6)
    for mine, theirs in zip(grads, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_a_backend_without_a_bound_refuses_it():
    q, k, v = hax.named(Q, Q_AXES), hax.named(K, K_AXES), hax.named(V, K_AXES)
    for name in ("jax_native", "cudnn"):
        choice = BackendChoice(name=name, reason="")
        with pytest.raises(ValueError, match=f"attention by {name}: the model soft-caps its attention scores"):
            attend(q, k, v, AttentionMask.causal(), softmax_scale=SCALE, choice=choice, soft_cap=CAP)
