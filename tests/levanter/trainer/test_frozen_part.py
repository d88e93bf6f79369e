"""What a step with frozen weights computes, against arithmetic by hand."""

import haliax as hax
import jax
import numpy as np
import optax
import pytest

from haliax_ext.abstract import abstract
from levanter.models.llama.config import LlamaConfig
from levanter.models.mixtral.config import MixtralConfig
from levanter.models.precision import Precision
from levanter.trainer.frozen_part import spared_flops
from levanter.trainer.state import abstract_frozen, abstract_state
from levanter.trainer.trainable import Partition

VOCAB, CONTEXT = 61, 8
SIZES = dict(hidden_dim=16, intermediate_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=VOCAB)
# q and o: 16 × 16; k and v: 16 × 8; three matrices of the MLP: 16 × 24. Two operations for each weight.
LAYERS = 2 * 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24)
HEAD = 2 * VOCAB * 16
# Scores and mix of values over 8 keys: 2 operations each for 16 features of 2 layers.
ATTENTION = 2 * 2 * 2 * 16 * CONTEXT
FORWARD = LAYERS + HEAD + ATTENTION


def step(config, patterns) -> float:
    """Operations a token of a step that trains what the patterns say."""
    policy = Precision.parse("f32")

    def example():
        return config.build(hax.Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))

    partition = Partition.of(patterns, abstract(example))
    trained = abstract_state(example, optax.sgd(1.0), policy, partition).model
    spared = spared_flops(config, trained, abstract_frozen(example, policy, partition), vocab=VOCAB)
    flops = config.flops(vocab_size=VOCAB, context_length=CONTEXT, attention="full")
    return flops.training - spared(flops)


@pytest.mark.parametrize(
    ("patterns", "backward"),
    [
        (None, 2 * FORWARD),
        # No matrix has a gradient; each is multiplied by the gradients that pass through it.
        (["norm"], LAYERS + HEAD + 2 * ATTENTION),
        (["embeddings"], LAYERS + HEAD + 2 * ATTENTION),
        (["**.q_proj"], LAYERS + HEAD + 2 * ATTENTION + 2 * 2 * 16 * 16),
        # Nothing passes below the head.
        (["lm_head"], HEAD),
    ],
    ids=["all", "norms", "embeddings", "queries", "head"],
)
def test_gradients_of_frozen_weights_are_not_counted(patterns, backward):
    assert step(LlamaConfig(**SIZES), patterns) == pytest.approx(FORWARD + backward)


def test_a_tied_head_is_frozen_with_its_table():
    tied = LlamaConfig(**SIZES, tie_word_embeddings=True)
    assert step(tied, ["**.q_proj"]) == pytest.approx(2 * FORWARD + ATTENTION + 2 * 2 * 16 * 16)


def test_a_token_is_multiplied_by_the_experts_that_it_chooses():
    """Four experts of which two are chosen, and a router of 16 × 4; only the router is trained."""
    moe = MixtralConfig(**SIZES, n_routed_experts=4, num_experts_per_tok=2)
    router = 2 * 2 * 16 * 4
    forward = 2 * 2 * (2 * 16 * 16 + 2 * 16 * 8 + 2 * 3 * 16 * 24) + router + HEAD + ATTENTION
    assert step(moe, None) == pytest.approx(3 * forward)
    assert step(moe, ["**.router"]) == pytest.approx(2 * forward + ATTENTION + router)


def test_the_count_of_the_compiler_agrees():
    """XLA counts three products of a net of two whose last matrix alone is trained: two forward, one gradient."""
    x, w, head = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 32), (32, 32), (32, 32)))

    def loss(trained, x, w):
        return (((x @ w) @ trained) ** 2).sum()

    def count(fn, *args):
        return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]

    only_head = count(jax.grad(loss), head, x, w)
    product = 2 * 64 * 32 * 32
    assert only_head == pytest.approx(3 * product, rel=0.1)
