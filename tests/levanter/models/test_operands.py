"""Weights in other representations: models whose projections, experts, table and head multiply by made-up operands.

The judge is the same model with the matrices that the operands stand for, on one device; its gradients with respect to
the operands' arrays come through those matrices.
"""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, abstract_model, mappings_for, random_arrays, tiny_config
from helpers.losses import mean_loss
from helpers.operands import dense_twin, run_model_on, with_operands

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.models import MixtralConfig
from levanter.models.scoring import next_tokens
from levanter.models.suffix_scores import suffix_scores
from levanter.trainer.loss import in_compute_dtype

TOKENS = np.random.default_rng(3).integers(0, VOCAB, (8, 24)).astype(np.int32)


def mixtral(dispatch):
    return MixtralConfig(
        hidden_dim=64,
        intermediate_dim=96,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        n_routed_experts=4,
        max_seq_len=48,
        sliding_window=None,
        expert_dispatch=dispatch,
        initializer_range=0.15,
        vocab_size=VOCAB,
    )


CONFIGS = {
    "own head": tiny_config(num_kv_heads=8, attention_bias=True),
    "tied": tiny_config(num_kv_heads=8, tie_word_embeddings=True),
    "grouped experts": mixtral("grouped"),
    "dense experts": mixtral("dense"),
}


def forward(model, tokens):
    """Everything that reads a head or an operand on the way to it."""
    activations = model(tokens).activations
    scores = suffix_scores(model, tokens, tokens["position", 17:].rename({"position": "suffix"}), chunk=3)
    return [
        model.logits(activations).rearrange(("batch", "position", "vocab")).array,
        scores.logprobs.array,
        scores.normalizers[0].array,
    ]


def loss_and_gradients(model, tokens):
    """As a train step has them: weights cast inside the layers, the head's derivative over chunks."""
    floating, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(floating):
        used = in_compute_dtype(eqx.combine(floating, rest), np.dtype(np.float32), None)
        return mean_loss(used, tokens, next_tokens(tokens), chunk=7)

    return jax.tree.leaves(jax.value_and_grad(lambda m: loss(m).scalar())(floating))


def everything(model, tokens):
    return forward(model, tokens), loss_and_gradients(model, tokens)


def by_matrices(model, tokens):
    """The judge. Its loss is differentiated through the matrices."""
    floating, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(floating):
        return mean_loss(dense_twin(eqx.combine(floating, rest)), tokens, next_tokens(tokens), chunk=24).scalar()

    return forward(dense_twin(model), tokens), jax.tree.leaves(jax.value_and_grad(loss)(floating))


@cache
def model_of(name, kind):
    config = CONFIGS[name]
    arrays = {path: jnp.asarray(x) for path, x in random_arrays(config).items()}
    return with_operands(with_arrays(abstract_model(config), arrays), kind)


@cache
def expected(name, kind, devices):
    one = MeshSpec.of(data=1, model=1)
    return run_model_on(by_matrices, model_of(name, kind), TOKENS, one, mappings_for(CONFIGS[name], one), devices)


def llama_on(data, model):
    spec = MeshSpec.of(data=data, model=model)
    return spec, mappings_for(CONFIGS["own head"], spec)


def experts_on(rules, **axes):
    compute = AxisMapping({"batch": "data", **rules})
    stored = rules if "data" in rules.values() else {"embed": "data", **rules}
    return MeshSpec.of(**axes), Mappings(params=AxisMapping(stored), compute=compute)


EXPERTS = {"expert": "model", "mlp": "group", "vocab": "model"}
CASES = {
    "own head, 1 device": ("own head", llama_on(1, 1)),
    "own head, 2x4": ("own head", llama_on(2, 4)),
    "own head, 8x1": ("own head", llama_on(8, 1)),
    "tied, 2x4": ("tied", llama_on(2, 4)),
    "grouped experts, 1 device": ("grouped experts", experts_on({}, data=1)),
    "grouped experts, both cut": ("grouped experts", experts_on(EXPERTS, data=2, model=2, group=2)),
    "grouped experts over tokens": ("grouped experts", experts_on({"expert": "data", "mlp": "model"}, data=4, model=2)),
    "grouped experts, embed cut": ("grouped experts", experts_on({"embed": "model"}, data=2, model=2)),
    "dense experts, both cut": ("dense experts", experts_on(EXPERTS, data=2, model=2, group=2)),
}
QUICK = {
    ("own head, 2x4", "low rank"),
    ("tied, 2x4", "integers"),
    ("grouped experts, both cut", "integers"),
    ("dense experts, both cut", "low rank"),
}
"""Each representation, each kind of model: the others are a sweep."""
ALL = [(case, kind) for case in CASES for kind in ("low rank", "integers")]


@pytest.mark.parametrize(
    ("case", "kind"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in ALL],
    ids=[f"{case}-{kind}" for case, kind in ALL],
)
def test_a_model_of_operands_equals_the_model_of_their_matrices(case, kind, devices):
    name, (spec, mappings) = CASES[case]
    model = model_of(name, kind)
    found, found_gradients = run_model_on(everything, model, TOKENS, spec, mappings, devices)
    values, value_gradients = expected(name, kind, tuple(devices))
    for mine, exact in zip(found, values, strict=True):
        np.testing.assert_allclose(mine, exact, atol=5e-5 * np.abs(exact).max(), rtol=1e-4)
    assert found_gradients[0] == pytest.approx(value_gradients[0], rel=1e-5)
    paths = [leaf.path for leaf in leaves(model) if np.issubdtype(leaf.dtype, np.floating)]
    for path, mine, exact in zip(paths, found_gradients[1:], value_gradients[1:], strict=True):
        size = np.abs(exact).max()
        np.testing.assert_allclose(mine, exact, atol=1e-4 * size + 1e-7, rtol=1e-3, err_msg=path)
        assert size > 1e-5, f"{path} has no gradient to compare"


def test_every_projection_is_an_operand():
    """That the models above are what they are said to be: no projection has a plain array."""
    for name in CONFIGS:
        paths = [leaf.path for leaf in leaves(model_of(name, "integers"))]
        plain = [p for p in paths if p.endswith((".weight", ".bias")) and "norm" not in p and not p.endswith("bias")]
        assert plain == ([] if name == "tied" else ["embeddings.token_embeddings.weight"])
