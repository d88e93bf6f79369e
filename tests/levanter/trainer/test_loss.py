"""Weights in the dtype they are used in: what is cast where, and that sums of many gradients keep their digits."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from helpers.llama_on_mesh import VOCAB, random_arrays, tiny_config

from haliax_ext.abstract import abstract, leaves, with_arrays
from levanter.layers.embedding import Embedding
from levanter.layers.outputs import Sums
from levanter.models.scoring import next_tokens
from levanter.trainer.loss import LmBatch, LmObjective, in_compute_dtype
from levanter.trainer.objective import LOSS, AtStep

BF16 = np.dtype(jnp.bfloat16)
START = AtStep(step=jnp.int32(0))


class Lookup(eqx.Module):
    table: Embedding


def test_the_gradient_of_a_frequent_token_is_added_up_in_float32():
    """In 16 bits a running sum of ones stops at 256."""
    Vocab, Embed, Pos = Axis("vocab", 3), Axis("embed", 4), Axis("position", 5000)
    model = Lookup(Embedding(weight=hax.ones((Vocab, Embed), dtype=jnp.float32)))
    ids = hax.named(jnp.zeros(Pos.size, jnp.int32).at[-1].set(2), Pos)

    def total(model):
        rows = in_compute_dtype(model, BF16, None).table(ids)
        assert rows.dtype == BF16
        return hax.sum(rows.astype(jnp.float32)).scalar()

    gradient = jax.jit(jax.grad(total))(model).table.weight
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient.array[:, 0], [4999, 0, 1])


def test_the_gradient_of_the_head_is_added_up_in_float32():
    """Many chunks of one position each give what one chunk gives; with tied weights too."""
    config = tiny_config(tie_word_embeddings=True)
    template = abstract(lambda: config.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0)))
    model = with_arrays(template, {k: jnp.asarray(v) for k, v in random_arrays(config).items()})
    rng = np.random.default_rng(0)
    axes = (Axis("batch", 4), Axis("position", 48))
    tokens = hax.named(jnp.asarray(rng.integers(0, 3, (4, 48)), jnp.int32), axes)

    def gradient(chunk, dtype):
        def loss(model):
            usable = in_compute_dtype(model, np.dtype(dtype), None)
            batch = LmBatch(tokens=tokens, targets=next_tokens(tokens))
            return LmObjective(chunk=chunk).total(usable, batch, START, jnp.float32(1))[0]

        return jax.jit(jax.grad(loss))(model).embeddings.token_embeddings.weight.array

    exact = gradient(48, jnp.float32)
    errors = [float(jnp.linalg.norm(gradient(chunk, BF16) - exact) / jnp.linalg.norm(exact)) for chunk in (48, 1)]
    assert errors[0] < 0.03
    assert errors[1] < 1.05 * errors[0]


class Squared(LmObjective):
    """Sums of its own: squared log-probabilities."""

    def sums(self, model, batch, at):
        return Sums({LOSS: hax.sum(batch.counts() * self.logprobs(model, batch) ** 2).scalar()})


def test_what_is_differentiated_is_a_subclass_s_own_sum():
    """Not the plain loss, whose gradient is made elsewhere: −Σ log p against Σ (log p)², by its chain rule."""
    Vocab, Pos, config = Axis("vocab", VOCAB), Axis("position", 12), tiny_config()
    model = with_arrays(
        abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))),
        {k: jnp.asarray(v) for k, v in random_arrays(config).items()},
    )
    tokens = hax.named(jnp.arange(12, dtype=jnp.int32)[None] % VOCAB, (Axis("batch", 1), Pos))
    # One prediction counts, so that its own log-probability is the factor between both gradients.
    targets = hax.named(next_tokens(tokens).array.at[:, :7].set(-1).at[:, 8:].set(-1), tokens.axes)

    def gradient(objective):
        def loss(model):
            minimized, sums = objective.total(model, LmBatch(tokens=tokens, targets=targets), START, jnp.float32(0.5))
            return minimized, sums[LOSS]

        (minimized, shown), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(model)
        assert float(minimized) == float(shown)
        return float(minimized), found.lm_head.weight.array

    (plain, of_plain), (squared, of_squared) = gradient(LmObjective()), gradient(Squared())
    logprob = -plain / 0.5
    assert logprob < -1 and np.abs(of_plain).max() > 1e-3
    assert abs(squared - 0.5 * logprob**2) < 1e-4 * squared
    np.testing.assert_allclose(of_squared, -2 * logprob * of_plain, rtol=1e-4, atol=1e-5)


def test_every_weight_is_used_in_the_compute_dtype_and_none_is_changed():
    config = tiny_config()
    template = abstract(lambda: config.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0)))

    def used(model):
        block = in_compute_dtype(model, BF16, None)
        return block.head.weight, block.transformer.norm.weight

    for weight in jax.tree.leaves(jax.eval_shape(used, template)):
        assert weight.dtype == BF16
    assert {leaf.dtype for leaf in leaves(template)} == {np.dtype(np.float32)}


def test_counts_leave_out_what_predicts_nothing():
    axes = (Axis("batch", 1), Axis("position", 6))

    def row(values, dtype):
        return hax.named(jnp.asarray([values], dtype), axes)

    batch = LmBatch(
        tokens=row([1, 2, 3, 4, 5, 6], jnp.int32),
        targets=row([2, 3, -1, 5, 0, -1], jnp.int32),
        loss_weights=row([1, 0.5, 1, 1, 0, 1], jnp.float32),
        segment_ids=row([0, 0, 0, 1, 1, 1], jnp.int32),
    )
    np.testing.assert_array_equal(batch.counts().array, [[1, 0.5, 0, 1, 0, 0]])
