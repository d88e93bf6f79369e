"""The loss of a policy against trl's `GRPOTrainer._compute_loss` on the same tensors (extra `judges`)."""

import types
from collections import defaultdict
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.trainer.advantage import AdvantageConfig, StdScale, advantages
from levanter.trainer.objective import LOSS
from levanter.trainer.policy_loss import (
    ClipConfig,
    KlConfig,
    PolicyLossConfig,
    TisConfig,
    TokenData,
    policy_terms,
    token_weights,
)

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")

LONGEST = 8


@dataclass(frozen=True)
class Tensors:
    """Answers of unequal lengths with log-probabilities under four policies, float64."""

    mask: np.ndarray
    now: np.ndarray
    old: np.ndarray
    sampler: np.ndarray
    reference: np.ndarray
    advantage: np.ndarray

    @staticmethod
    def drawn(rng, rows=6, spread=0.3):
        lengths = np.append(rng.integers(1, LONGEST + 1, rows - 1), LONGEST)
        shape = rows, LONGEST
        now = -3 * rng.random(shape)
        old, sampler, reference = (now + spread * rng.standard_normal(shape) for _ in range(3))
        mask = np.arange(LONGEST) < lengths[:, None]
        return Tensors(mask, now, old, sampler, reference, rng.standard_normal(rows))


class OneProcess:
    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction=None):
        return x


def correction(loss, t):
    """trl's importance sampling ratio, as `_generate_and_score_completions` computes it from `old` and the sampler."""
    old = t.now if loss.old == "current" else t.old
    difference = np.where(t.mask, old - t.sampler, 0.0)
    if loss.tis.level == "sequence":
        difference = difference.sum(axis=-1, keepdims=True)
    rho = np.exp(difference)
    return np.minimum(rho, loss.tis.cap) if loss.tis.beyond == "truncate" else np.where(rho > loss.tis.cap, 0.0, rho)


def judged(loss, t):
    """The loss and its gradient by trl: an instance without `__init__`, whose model is the given log-probabilities."""
    logprobs = torch.tensor(t.now, requires_grad=True)
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    trainer.args = types.SimpleNamespace(
        delta=None, use_bias_correction_kl=loss.kl.estimator == "k3_corrected", steps_per_generation=1
    )
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.importance_sampling_level = "sequence" if loss.ratio.startswith("sequence") else "token"
    types_of_loss = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
    is_cispo = loss.ratio.endswith("cispo")
    trainer.loss_type = "cispo" if is_cispo else types_of_loss[loss.normalize]
    trainer.beta, trainer.epsilon_low = loss.kl.beta, loss.clip.low
    # trl bounds the ratio of CISPO by `epsilon_high` itself.
    trainer.epsilon_high = loss.clip.high + 1 if is_cispo else loss.clip.high
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = loss.tis is not None
    trainer.model = types.SimpleNamespace(training=True)
    trainer.current_gradient_accumulation_steps, trainer.max_completion_length = 1, LONGEST
    trainer.accelerator = OneProcess()
    trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = False
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    rows = len(t.mask)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(rows, LONGEST, dtype=torch.long),
        "completion_mask": torch.tensor(t.mask, dtype=torch.float64),
        "advantages": torch.tensor(t.advantage),
        "num_items_in_batch": torch.tensor(float(t.mask.sum())),
        "ref_per_token_logps": torch.tensor(t.reference),
    }
    if loss.old == "score":
        inputs["old_per_token_logps"] = torch.tensor(t.old)
    if loss.tis is not None:
        inputs["importance_sampling_ratio"] = torch.tensor(correction(loss, t))
    value = trainer._compute_loss(None, inputs)
    value.backward()
    return value.item(), logprobs.grad.numpy()


def ours(loss, t, dtype):
    """The same by `policy_terms`: every row is one answer."""
    rows = len(t.mask)
    weights = token_weights(loss.normalize, t.mask.sum(axis=1), np.ones(rows, bool), max_tokens=LONGEST)

    def value(logprobs):
        tokens = TokenData(
            counted=jnp.asarray(t.mask),
            advantage=jnp.broadcast_to(jnp.asarray(t.advantage, dtype)[:, None], t.mask.shape),
            sampler=jnp.asarray(t.sampler, dtype),
            old=jnp.asarray(t.old, dtype),
            reference=jnp.asarray(t.reference, dtype),
            answer_sums=lambda x: jnp.broadcast_to(x.sum(axis=1, keepdims=True), x.shape),
        )
        terms = policy_terms(loss, logprobs, tokens)
        return (jnp.asarray(weights, dtype)[:, None] * terms[LOSS]).sum() / float(t.mask.sum())

    result, gradient = jax.value_and_grad(value)(jnp.asarray(t.now, dtype))
    return float(result), np.asarray(gradient)


def check(loss, t):
    expected, of_expected = judged(loss, t)
    with jax.enable_x64(True):
        result, gradient = ours(loss, t, jnp.float64)
    assert abs(result - expected) < 1e-12, loss
    np.testing.assert_allclose(gradient, of_expected, rtol=0, atol=1e-12, err_msg=str(loss))
    result, gradient = ours(loss, t, jnp.float32)
    assert abs(result - expected) < 1e-6 * max(1, abs(expected)), loss
    np.testing.assert_allclose(gradient, of_expected, rtol=0, atol=1e-6 * max(1, np.abs(of_expected).max()))


KINDS = (("token", "sequence"), ("token", "token"), ("token", "constant"), ("cispo", "token"))
"""grpo, dapo, dr_grpo and cispo."""


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("ratio", "normalize"), KINDS, ids=["grpo", "dapo", "dr_grpo", "cispo"])
def test_every_kind_of_loss_is_that_of_trl(ratio, normalize, level):
    """With and without a KL term, with and without a correction for the sampler: 32 cases."""
    t = Tensors.drawn(np.random.default_rng(0))
    if level == "sequence":
        ratio = {"token": "sequence", "cispo": "sequence_cispo"}[ratio]
    for beta in (0.0, 0.04):
        for tis in (None, TisConfig(cap=1.2)):
            high = 4.0 if ratio.endswith("cispo") else 0.28
            clip = ClipConfig(low=0.2, high=high)
            check(
                PolicyLossConfig(
                    normalize=normalize, ratio=ratio, clip=clip, old="score", tis=tis, kl=KlConfig(beta=beta)
                ),
                t,
            )


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_drawn_values_of_every_field(seed):
    rng = np.random.default_rng(100 + seed)

    def one(*values):
        return values[rng.integers(len(values))]

    for _ in range(4):
        ratio = one("token", "sequence", "cispo", "sequence_cispo")
        tis = TisConfig(cap=float(1 + rng.random()), level=one("token", "sequence"), beyond=one("truncate", "mask"))
        loss = PolicyLossConfig(
            normalize="token" if ratio.endswith("cispo") else one("token", "sequence", "constant"),
            ratio=ratio,
            clip=ClipConfig(low=float(rng.uniform(0.01, 0.9)), high=float(rng.uniform(0.01, 2))),
            old=one("current", "score"),
            tis=one(None, tis),
            kl=KlConfig(beta=float(one(0.0, rng.random())), estimator=one("k3_corrected", "k3")),
        )
        check(loss, Tensors.drawn(rng, rows=int(rng.integers(2, 9)), spread=float(rng.uniform(0, 1.5))))


@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages_are_those_of_trl(scale):
    """Its formula, with torch's own standard deviation (`scale_rewards`: the group's, or none)."""
    rewards = np.random.default_rng(3).random((5, 8))
    rewards[2] = 0.7
    of_torch = torch.tensor(rewards)
    expected = of_torch - of_torch.mean(1, keepdim=True)
    if scale == "group":
        expected = expected / (of_torch.std(1, keepdim=True) + 1e-4)
    config = AdvantageConfig(scale=StdScale() if scale == "group" else "none")
    values = advantages(rewards, config).values
    np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=1e-12)
    assert (values[2] == 0).all()
