"""What of a block is kept for the backward pass, by the names in `layers.saved`."""

import functools

import haliax as hax
import jax
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from levanter.models.llama.config import LlamaConfig
from levanter.models.stack import checkpoint_policy

Batch, Pos, Vocab = hax.Axis("batch", 2), hax.Axis("position", 16), hax.Axis("vocab", 64)
SHAPES = {
    "query": "2,2,2,16,8",
    "key": "2,2,16,8",
    "value": "2,2,16,8",
    "attention": "2,2,2,16,8",
    "attention_output": "2,16,32",
    "gate": "2,16,48",
    "up": "2,16,48",
}
"""Sizes of each named activation below, in any order."""


def config(policy) -> LlamaConfig:
    return LlamaConfig(
        max_seq_len=16,
        hidden_dim=32,
        intermediate_dim=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=64,
        gradient_checkpointing=policy,
        attn_backend="reference",
    )


@functools.cache
def weights() -> list[jax.Array]:
    return jax.tree.leaves(jax.jit(lambda: config(True).build(Vocab, key=jax.random.PRNGKey(0)))())


def model_with(policy):
    model = jax.eval_shape(lambda: config(policy).build(Vocab, key=jax.random.PRNGKey(0)))
    return jax.tree.unflatten(jax.tree.structure(model), weights())


def loss(model):
    ids = hax.named(np.arange(32, dtype=np.int32).reshape(2, 16) * 7 % Vocab.size, (Batch, Pos))
    return hax.sum(hax.square(model(ids).activations)).scalar()


def residuals(policy, capsys) -> list[str]:
    """Shapes, stacked over layers, of what the forward pass hands to the backward pass."""
    capsys.readouterr()
    print_saved_residuals(loss, model_with(policy))
    return [line.split(" ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("f32[3,")]


@pytest.mark.parametrize("name", LlamaConfig().saved_names)
def test_a_named_activation_is_kept_and_nothing_else(name, capsys):
    def sizes(shapes: list[str]) -> list[tuple[int, ...]]:
        return sorted(tuple(sorted(map(int, shape[4:-1].split(",")[1:]))) for shape in shapes)

    plain = sizes(residuals({"save_carries": True}, capsys))
    kept = sizes(residuals({"save_carries": True, "save_block_internals": [name]}, capsys))
    wanted = tuple(sorted(map(int, SHAPES[name].split(","))))
    for each in plain:
        kept.remove(each)
    assert kept == [wanted]


def test_what_is_kept_does_not_change_the_gradient():
    policies = (True, {"save_carries": True, "save_block_internals": ["query", "attention_output", "up"]})
    whole, partly = (jax.tree.leaves(jax.jit(jax.grad(loss))(model_with(policy))) for policy in policies)
    for a, b in zip(whole, partly, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(a).max()


def test_names_that_nothing_has_are_refused():
    with pytest.raises(
        ValueError, match=r"save_block_internals: no activation of a block is named \['querry'\].*query"
    ):
        LlamaConfig(gradient_checkpointing={"save_block_internals": ["querry"]})
    with pytest.raises(ValueError, match=r"offload_block_internals: no activation of a block is named \['mlp_up'\]"):
        LlamaConfig(gradient_checkpointing={"offload_block_internals": ["query", "mlp_up"]})
    with pytest.raises(ValueError, match=r"no such fields: \['save_carry'\].*save_carries"):
        checkpoint_policy({"save_carry": True})
