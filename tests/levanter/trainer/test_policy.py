"""The policy objective on a tiny Llama: packed, padded and accumulated batches have one loss; torch's is the same."""

from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import VOCAB, random_arrays, tiny_config

from haliax_ext.abstract import abstract, leaves, with_arrays
from levanter.trainer.objective import LOSS, AtStep
from levanter.trainer.policy import PolicyBatch, PolicyObjective, SampledAnswer, answer_rows, pack_answers
from levanter.trainer.policy_loss import GAP, KlConfig, PolicyLossConfig, TisConfig, token_weights

START = AtStep(step=jnp.int32(0))
POSITIONS = 32
CONFIG = tiny_config()
EVERYTHING = PolicyLossConfig(
    normalize="sequence",
    ratio="sequence",
    old="score",
    tis=TisConfig(level="sequence"),
    kl=KlConfig(beta=0.1),
)
LOSSES = {"default": PolicyLossConfig(), "everything": EVERYTHING}


def drawn_answers(count=12):
    rng = np.random.default_rng(6)
    answers = []
    for n in range(count):
        prompt, ids = (rng.integers(0, VOCAB, rng.integers(1, most)).astype(np.int32) for most in (6, 10))
        logprobs = (-3 * rng.random(len(ids))).astype(np.float32)
        answers.append(SampledAnswer(prompt=prompt, ids=ids, sampler_logprobs=logprobs, advantage=float(rng.normal()),
                                     learned=n % 5 != 3))  # fmt: skip
    return answers


ANSWERS = drawn_answers()


@pytest.fixture(scope="module")
def model():
    template = abstract(lambda: CONFIG.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0)))
    return with_arrays(template, {k: jnp.asarray(v) for k, v in random_arrays(CONFIG).items()})


def arrays_of(answers, loss, most=None):
    """The arrays of a batch, with log-probabilities of an old policy and of a reference."""
    packing = pack_answers(answers, positions=POSITIONS, most=most)
    learned = np.array([answer.learned for answer in answers])
    weights = token_weights(loss.normalize, np.array([len(a.ids) for a in answers]), learned, max_tokens=10)
    arrays = dict(answer_rows(answers, weights, packing, positions=POSITIONS))
    # Functions of the token alone, so that they move with it when it is packed otherwise.
    noise = np.sin(arrays["targets"] * 1.7).astype(np.float32)
    arrays["old_logprob"] = arrays["sampler_logprob"] + np.float32(0.1) * noise
    arrays["reference_logprob"] = arrays["sampler_logprob"] - np.float32(0.2) * noise
    return arrays, max(len(packing.row(n)) for n in range(len(packing)))


def batch_of(arrays, rows=slice(None)):
    cut = {name: jnp.asarray(array[rows]) for name, array in arrays.items()}
    axes = Axis("batch", len(cut["tokens"])), Axis("position", POSITIONS)
    return PolicyBatch(**{name: hax.named(array, axes) for name, array in cut.items()})


def loss_and_gradient(model, loss, batches, answers, temperature=1.0):
    """Summed over parts of the global batch, all divided by its normalizer."""
    objective = PolicyObjective(loss=loss, answers=answers, temperature=temperature, chunk=8)
    tokens = sum(objective.normalizer(batch) for batch in batches)

    def total(model, batch):
        return objective.total(model, batch, START, 1 / tokens)

    step = jax.jit(jax.value_and_grad(total, has_aux=True))
    results = [step(model, batch) for batch in batches]
    values = {name: sum(float(sums[name]) for (_, sums), _ in results) for name in results[0][0][1]}
    gradient = jax.tree.map(lambda *parts: sum(np.asarray(part) for part in parts), *[g for _, g in results])
    return values, {leaf.path: array for leaf, array in zip(leaves(gradient), jax.tree.leaves(gradient), strict=True)}


@pytest.mark.parametrize("name", LOSSES)
def test_packed_padded_and_accumulated_batches_have_one_loss(model, name):
    loss = LOSSES[name]
    padded, _ = arrays_of(ANSWERS, loss, most=1)
    packed, most = arrays_of(ANSWERS, loss)
    assert len(padded["tokens"]) == 12 > 2 * len(packed["tokens"])
    assert padded["count"].sum() == sum(len(a.ids) for a in ANSWERS if a.learned)
    whole, of_whole = loss_and_gradient(model, loss, [batch_of(padded)], 1)
    others = {
        "packed": loss_and_gradient(model, loss, [batch_of(packed)], most),
        "accumulated": loss_and_gradient(model, loss, [batch_of(padded, slice(n, None, 4)) for n in range(4)], 1),
    }
    for kind, (values, gradient) in others.items():
        for metric, value in values.items():
            np.testing.assert_allclose(value, whole[metric], rtol=2e-5, atol=1e-6, err_msg=f"{kind} {metric}")
        for path, expected in of_whole.items():
            np.testing.assert_allclose(gradient[path], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_twice_the_batch_has_the_same_loss(model):
    loss = PolicyLossConfig(normalize="constant")
    once, _ = loss_and_gradient(model, loss, [batch_of(arrays_of(ANSWERS, loss, most=1)[0])], 1)
    twice, _ = loss_and_gradient(model, loss, [batch_of(arrays_of(ANSWERS * 2, loss, most=1)[0])], 1)
    np.testing.assert_allclose(twice[LOSS], once[LOSS], rtol=1e-5)


def test_equal_rewards_leave_the_gradient_at_exactly_zero(model):
    answers = [replace(answer, advantage=0.0) for answer in ANSWERS]
    arrays, most = arrays_of(answers, PolicyLossConfig())
    values, gradient = loss_and_gradient(model, PolicyLossConfig(), [batch_of(arrays)], most)
    assert values[LOSS] == 0
    assert all((array == 0).all() for array in gradient.values())


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.slow), 1.5])
def test_the_gap_is_zero_for_the_log_probabilities_of_the_scorer_itself(model, temperature):
    """And the scorer's are those of NumPy's softmax of the logits divided by the temperature."""
    arrays, most = arrays_of(ANSWERS, PolicyLossConfig())
    objective = PolicyObjective(loss=PolicyLossConfig(), answers=most, temperature=temperature, chunk=8)
    batch = batch_of(arrays)
    logprobs = np.asarray(jax.jit(objective.logprobs)(model, batch).array)
    outputs = model(batch.tokens, segment_ids=batch.segment_ids).activations
    logits = np.asarray(model.head(outputs).rearrange((..., "vocab")).array, np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    predicts = arrays["targets"] >= 0
    expected = np.take_along_axis(logits, np.maximum(arrays["targets"], 0)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs[predicts], expected[predicts], rtol=0, atol=2e-5)
    assert (logprobs[~predicts] == 0).all()
    values, _ = loss_and_gradient(
        model, PolicyLossConfig(), [batch_of(arrays | {"sampler_logprob": logprobs})], most, temperature
    )
    assert values[GAP] < 1e-6


def test_rows_written_by_hand():
    """The last token of a prompt predicts the first of the answer; an end of text in a prompt has no effect."""
    answers = [
        SampledAnswer(
            prompt=np.array([5, 0, 6]), ids=np.array([7, 0]), sampler_logprobs=np.float32([-1, -2]), advantage=0.5
        ),
        SampledAnswer(
            prompt=np.array([9]), ids=np.array([8]), sampler_logprobs=np.float32([-3]), advantage=-1.0, learned=False
        ),
    ]
    packing = pack_answers(answers, positions=8)
    rows = answer_rows(answers, np.array([2.0, 4.0]), packing, positions=8)
    assert {name: array.tolist() for name, array in rows.items()} == {
        "tokens": [[5, 0, 6, 7, 0, 9, 8, 0]],
        "targets": [[-1, -1, 7, 0, -1, 8, -1, -1]],
        "segment_ids": [[0, 0, 0, 0, 0, 1, 1, -1]],
        "count": [[0, 0, 1, 1, 0, 0, 0, 0]],
        "weight": [[0, 0, 2, 2, 0, 0, 0, 0]],
        "advantage": [[0, 0, 0.5, 0.5, 0, 0, 0, 0]],
        "sampler_logprob": [[0, 0, -1, -2, 0, -3, 0, 0]],
    }


def test_answers_that_do_not_fit_are_all_named():
    bad = [
        replace(ANSWERS[0], prompt=np.zeros(POSITIONS, np.int32)),
        replace(ANSWERS[1], ids=np.zeros(0, np.int32)),
        replace(ANSWERS[2], sampler_logprobs=np.zeros(1, np.float32)),
    ]
    with pytest.raises(ValueError, match=r"(?s)answer 0: .*answer 1: .*answer 1: .*answer 2: "):
        pack_answers(bad, positions=POSITIONS)
