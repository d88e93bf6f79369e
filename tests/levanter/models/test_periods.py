"""Layers that differ, scanned in periods: the same numbers and gradients as one after the other, and as little kept."""

import functools

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from helpers.losses import mean_loss
from jax.ad_checkpoint import print_saved_residuals

from haliax_ext.abstract import abstract, leaves, with_arrays
from levanter.models import Gemma3Config
from levanter.models.scoring import next_tokens
from levanter.trainer.loss import in_compute_dtype

Vocab, Batch, Pos = Axis("vocab", 64), Axis("batch", 2), Axis("position", 16)


def config(**changes) -> Gemma3Config:
    """7 layers: 3 periods of 2, and one more."""
    base = dict(
        max_seq_len=16,
        hidden_dim=32,
        intermediate_dim=48,
        num_layers=7,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=64,
        sliding_window=5,
        sliding_window_pattern=2,
        initializer_range=0.2,
        attn_backend="reference",
    )
    return Gemma3Config(**(base | changes))


@functools.cache
def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = sum(map(ord, name)) * 1000 + sum(int(part) for part in name.split(".") if part.isdigit())
    return 0.2 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model_of(config):
    """A model whose layers are the same, however they are stacked."""
    module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    table = config.weight_rules(Vocab).by_target()
    arrays = {}
    for leaf in leaves(module):
        names = table[leaf.path].source_names(leaf)
        inner = tuple(size for name, size in leaf.axes if name != "layers")
        each = [tensor(name, inner) for name in names]
        arrays[leaf.path] = jax.numpy.asarray(np.stack(each) if "layers" in leaf.names else each[0])
    return with_arrays(module, arrays)


IDS = np.random.default_rng(0).integers(0, 64, (2, 16)).astype(np.int32)


def loss(model):
    ids = hax.named(IDS, (Batch, Pos))
    return mean_loss(model, ids, next_tokens(ids), chunk=16).scalar()


def gradients_by_tensor(config, wrap=lambda model: model):
    """The loss, and its gradient for each tensor of a checkpoint."""
    value, grads = jax.jit(jax.value_and_grad(lambda model: loss(wrap(model))))(model_of(config))
    table = config.weight_rules(Vocab).by_target()
    found = {}
    for leaf, array in zip(leaves(grads), jax.tree.leaves(grads), strict=True):
        names = table[leaf.path].source_names(leaf)
        each = np.asarray(array) if "layers" in leaf.names else np.asarray(array)[None]
        found |= dict(zip(names, each, strict=True))
    return float(value), found


@functools.cache
def one_by_one():
    return gradients_by_tensor(config(num_layers=5, scan_layers=False))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [True, "nested"])
def test_loss_and_gradients_equal_those_of_layers_one_by_one(policy):
    expected, by_layer = one_by_one()
    value, found = gradients_by_tensor(config(num_layers=5, gradient_checkpointing=policy))
    assert value == pytest.approx(expected, rel=1e-6) and found.keys() == by_layer.keys()
    for name, gradient in by_layer.items():
        np.testing.assert_allclose(found[name], gradient, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_weights_that_are_cast_where_they_are_used_give_the_same():
    expected, by_layer = one_by_one()
    value, found = gradients_by_tensor(
        config(num_layers=5), lambda model: in_compute_dtype(model, np.dtype(np.float32), None)
    )
    assert value == pytest.approx(expected, rel=1e-6)
    for name, gradient in by_layer.items():
        np.testing.assert_allclose(found[name], gradient, atol=2e-5, err_msg=name)


def kept(capsys, model) -> list[str]:
    """Shapes of activations, stacked over the periods, that the backward pass is handed."""
    capsys.readouterr()
    print_saved_residuals(lambda model: loss(model), model)
    lines = capsys.readouterr().out.splitlines()
    shapes = [line.split(" ")[0] for line in lines if "from the argument" not in line]
    return sorted(shape for shape in shapes if "[3," in shape and f",{Pos.size}," in shape)


def test_what_is_kept_is_the_stream_between_layers(capsys):
    stream = f"[3,{Batch.size},{Pos.size},32]"
    assert kept(capsys, model_of(config())) == [f"f32{stream}"] * 2
    # In 16 bits too: neither the narrow weights of a period nor anything else is kept for it.
    narrow = in_compute_dtype(model_of(config()), np.dtype(jax.numpy.bfloat16), None)
    assert kept(capsys, narrow) == [f"bf16{stream}"] * 2
