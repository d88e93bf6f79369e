"""Loss and gradients are the same numbers under every mapping: TP = 1 equals TP = k."""

from functools import cache

import equinox as eqx
import jax
import numpy as np
import pytest
from helpers.llama_on_mesh import (
    VOCAB,
    abstract_model,
    leaf_from_source,
    llama_2d,
    mappings_for,
    named_arrays,
    random_arrays,
    run_on,
    tiny_config,
)
from helpers.losses import mean_loss

from haliax_ext.abstract import leaves
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.models.scoring import next_tokens

CONFIG = tiny_config()
TOKENS = np.random.default_rng(7).integers(0, VOCAB, (8, 32)).astype(np.int32)
BOTH = ("model", "group")


def loss_and_gradients(model, tokens):
    """The loss, and the gradient of every leaf by path."""
    loss, gradients = eqx.filter_value_and_grad(lambda m: mean_loss(m, tokens, next_tokens(tokens), chunk=12).array)(
        model
    )
    return loss, gradients


def run(config, arrays, spec: MeshSpec, mappings: Mappings, devices):
    loss, gradients = run_on(loss_and_gradients, config, arrays, TOKENS, spec, mappings, devices)
    flat = jax.tree_util.tree_leaves(gradients)
    paths = [leaf.path for leaf in leaves(abstract_model(config))]
    return loss, dict(zip(paths, flat, strict=True))


@cache
def on_one_device(devices: tuple):
    spec = MeshSpec.of(data=1, model=1)
    return run(CONFIG, random_arrays(CONFIG), spec, mappings_for(CONFIG, spec), devices)


CASES: dict[str, tuple[MeshSpec, Mappings]] = {
    "8x1": (spec := MeshSpec.of(data=8, model=1), mappings_for(CONFIG, spec)),
    "4x2": (spec := MeshSpec.of(data=4, model=2), mappings_for(CONFIG, spec)),
    "2x4": (spec := MeshSpec.of(data=2, model=4), mappings_for(CONFIG, spec)),
    "model2_group4": (spec := MeshSpec.of(data=1, model=2, group=4), mappings_for(CONFIG, spec, heads=BOTH)),
    "2d": (spec := MeshSpec.of(data=4, model=2), llama_2d(CONFIG)),
    "position_over_model": (
        spec := MeshSpec.of(data=2, model=4),
        mappings_for(CONFIG, spec, residual={"position": "model"}),
    ),
    "context_parallel": (
        spec := MeshSpec.of(data=2, context=2, model=2),
        mappings_for(CONFIG, spec, compute={"position": "context"}),
    ),
    "params_only": (
        spec := MeshSpec.of(data=2, model=4),
        Mappings(params=mappings_for(CONFIG, spec).params),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_one_device(case, devices):
    spec, mappings = CASES[case]
    plan_sharding(leaves(abstract_model(CONFIG)), mappings, spec).check()
    loss, gradients = run(CONFIG, random_arrays(CONFIG), spec, mappings, devices)
    expected_loss, expected = on_one_device(tuple(devices))
    assert abs(loss - expected_loss) < 1e-5
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[path], atol=1e-5, rtol=1e-4, err_msg=path)
        assert np.abs(gradient).max() > 1e-4, f"{path} has no gradient to compare"


def test_gradients_equal_torch_autograd(devices):
    """The anchor of the tests above: on one device the numbers are those of another implementation."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import LlamaForCausalLM

    config = tiny_config(tie_word_embeddings=True, attention_bias=True)
    model = LlamaForCausalLM(
        HfLlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attention_bias=True,
            attn_implementation="eager",
        )
    ).float()
    rng = np.random.default_rng(3)
    for key, parameter in model.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        parameter.data = 1 + 0.1 * noise if key.endswith("norm.weight") else 0.15 * noise
    tokens = torch.from_numpy(TOKENS).long()
    logits = model(tokens).logits[:, :-1].reshape(-1, VOCAB)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
    loss.backward()
    weights = {key: p.detach().numpy() for key, p in model.named_parameters()}
    torch_gradients = {key: p.grad.numpy() for key, p in model.named_parameters()}

    spec = MeshSpec.of(data=4, model=2)
    found_loss, found = run(config, named_arrays(config, weights), spec, mappings_for(config, spec), devices)
    assert abs(found_loss - loss.item()) < 1e-5
    for leaf in leaves(abstract_model(config)):
        expected = leaf_from_source(leaf, config.weight_rules(), torch_gradients)
        np.testing.assert_allclose(found[leaf.path], expected, atol=1e-5, rtol=1e-3, err_msg=leaf.path)
