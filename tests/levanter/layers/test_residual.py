"""Residual rules and constants of a forward pass: a train step of each toy against plain `jnp`, and what is saved."""

import dataclasses
import functools
import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import abstract_model, mappings_for, run_on
from helpers.stream_toys import ToyConfig, per_layer, reference_loss, stacked

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention.kv_cache import NewPositions
from levanter.layers.decode_state import StateSizes
from levanter.layers.residual import ParallelResidual, ResidualSpec
from levanter.models.activations import RESIDUAL, transformer_activations
from levanter.models.decoder.scan_layout import scan_runs

VOCAB, RATE = 64, 0.5
IDS = np.random.default_rng(0).integers(0, VOCAB, (4, 12)).astype(np.int32)
BASE = ToyConfig(
    max_seq_len=12,
    hidden_dim=16,
    intermediate_dim=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=VOCAB,
    attn_backend="reference",
)
TOYS = {
    "two lanes": dataclasses.replace(BASE, rule="lanes"),
    "scalars and x0": dataclasses.replace(BASE, rule="scaled"),
    "a middle layer subtracted, ids looked up": dataclasses.replace(BASE, num_layers=4, rule="backout", lookup=2),
}
MESHES = {"1 device": MeshSpec.of(data=1, model=1), "8 devices": MeshSpec.of(data=4, model=2)}


def model_leaves(config):
    return leaves(abstract_model(config, VOCAB))


@functools.cache
def random_layers(toy: str) -> dict[str, np.ndarray]:
    """An array for each layer and name; scales and weights of lanes are around 1."""
    config = dataclasses.replace(TOYS[toy], scan_layers=False)
    arrays = {}
    for leaf in model_leaves(config):
        noise = np.random.default_rng([ord(letter) for letter in leaf.path]).standard_normal(leaf.shape)
        matrix = len(leaf.shape) > 1 and "mixing" not in leaf.path
        array = (0.3 * noise if matrix else 1 + 0.2 * noise).astype(np.float32)
        arrays |= per_layer(config, leaf, array)
    return arrays


@functools.cache
def reference_step(toy: str):
    """The loss, and the arrays after a step of gradient descent."""
    arrays = random_layers(toy)
    step = jax.jit(jax.value_and_grad(functools.partial(reference_loss, config=TOYS[toy], ids=IDS)))
    # The reference broadcasts as NumPy does.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, gradients = step(arrays)
    # Every weight has a gradient, those of the rules included.
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())
    return float(loss), {name: arrays[name] - RATE * np.asarray(gradients[name]) for name in arrays}


def loss_of(model, ids):
    logits = model.head(model(ids).activations).rearrange(("batch", "position", "vocab")).array
    targets = ids.rearrange(("batch", "position")).array[:, 1:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), targets, axis=-1).mean()


def train_step(model, ids):
    loss, gradients = jax.value_and_grad(loss_of)(model, ids)
    return loss, jax.tree.map(lambda weight, gradient: weight - RATE * gradient, model, gradients)


@pytest.mark.parametrize(
    ("mesh", "scan"),
    [
        pytest.param(mesh, scan, marks=pytest.mark.slow if mesh == "8 devices" and not scan else ())
        for mesh in MESHES
        for scan in (True, False)
    ],
)
@pytest.mark.parametrize("toy", TOYS)
def test_a_train_step_is_the_reference(toy, mesh, scan, devices):
    config = dataclasses.replace(TOYS[toy], scan_layers=scan)
    spec = MESHES[mesh]
    mappings = mappings_for(config, spec, residual={"embed": "model"})
    arrays = {leaf.path: stacked(config, leaf, random_layers(toy)) for leaf in model_leaves(config)}
    loss, model = run_on(train_step, config, arrays, IDS, spec, mappings, devices)
    expected_loss, expected = reference_step(toy)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    got = {}
    for leaf, array in zip(leaves(model), jax.tree.leaves(model), strict=True):
        got |= per_layer(config, leaf, array)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("toy", TOYS)
def test_tokens_that_continue_a_cache_have_the_same_activations(toy, scan):
    config = dataclasses.replace(TOYS[toy], scan_layers=scan)
    arrays = {leaf.path: jnp.asarray(stacked(config, leaf, random_layers(toy))) for leaf in model_leaves(config)}
    model = with_arrays(abstract_model(config, VOCAB), arrays)

    def in_parts(model, ids):
        """Seven tokens, then the rest."""
        Batch = ids.resolve_axis("batch")
        state = model.start(StateSizes(rows=Batch.size, pages=Batch.size, page_size=12, dtype=np.dtype(np.float32)))
        parts = []
        for first, end in ((0, 7), (7, 12)):
            tokens = ids["position", first:end]
            counts = [hax.full(Batch, number, dtype=jnp.int32) for number in (first, end - first)]
            at = NewPositions.consecutive(*counts, tokens.resolve_axis("position"))
            activations, state = model.advance(tokens, state, at, length=12)
            parts.append(activations.rearrange(("batch", "position", "embed")).array)
        return jnp.concatenate(parts, axis=1)

    ids = hax.named(IDS, ("batch", "position"))
    whole = jax.jit(lambda model, ids: model(ids).activations.array)(model, ids)
    np.testing.assert_allclose(jax.jit(in_parts)(model, ids), whole, rtol=2e-4, atol=2e-5)


def saved_bytes(config) -> int:
    """Bytes that the forward pass keeps for the backward pass, the model's leaves not counted."""
    model = abstract_model(config, VOCAB)
    ids = hax.named(IDS, ("batch", "position"))
    pullback = jax.eval_shape(lambda model: jax.vjp(lambda model: loss_of(model, ids), model)[1], model)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pullback))


STREAM_BYTES = IDS.size * BASE.hidden_dim * 4


@pytest.mark.parametrize("layers", [4, 8])
def test_constants_are_saved_once_and_not_in_the_carry_of_the_scan(layers):
    plain = dataclasses.replace(BASE, num_layers=layers, middle=layers // 2)
    without = saved_bytes(plain)
    # The embedded tokens, and two scalars of each layer.
    assert saved_bytes(dataclasses.replace(plain, rule="scaled")) - without == STREAM_BYTES + 2 * 4 * layers
    # The middle layer's output, and the scalar that multiplies it, broadcast to its shape.
    assert saved_bytes(dataclasses.replace(plain, rule="backout")) - without == 2 * STREAM_BYTES
    # The ids; a table is not needed for its own gradient.
    assert saved_bytes(dataclasses.replace(plain, lookup=2)) - without == IDS.nbytes


def test_runs_end_at_cuts():
    plain, *_ = BASE.layers
    assert [(run.start, run.layers) for run in scan_runs([plain] * 6)] == [(0, 6)]
    assert [(run.start, run.layers) for run in scan_runs([plain] * 6, cuts=(0, 4, 6, 4))] == [(0, 4), (4, 2)]
    other = dataclasses.replace(plain, feed_forward=None)
    cut = scan_runs([plain, other] * 4, cuts=(3,))
    assert [(run.start, len(run.places), run.periods) for run in cut] == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 1),
        (3, 2, 2),
        (7, 1, 1),
    ]
    with pytest.raises(AssertionError, match=r"cuts .* of 2 layers"):
        scan_runs([plain] * 2, cuts=(3,))


def test_the_stream_of_a_plan_has_the_axes_of_the_rule():
    def stream(config):
        of = transformer_activations(
            config, batch=("batch", 4), positions=12, vocab=VOCAB, chunk=12, dtype=np.dtype("f4")
        )
        return next(activation.axes for activation in of if activation.name == RESIDUAL)

    whole = (("batch", 4), ("position", 12))
    assert stream(BASE) == (*whole, ("embed", 16))
    assert stream(TOYS["two lanes"]) == (*whole, ("lane", 2), ("embed", 16))
    assert {"lane", "lane_in"} <= TOYS["two lanes"].axes.keys()
    more = TOYS["two lanes"].matmul_parameters(VOCAB) - BASE.matmul_parameters(VOCAB)
    assert more == 3 * 2 * (2 * 2 + 4)


def test_a_layer_without_a_feed_forward_part_has_one_rule():
    for spec in (ResidualSpec, ParallelResidual):
        (rule,) = spec(norm=BASE.norm).init(BASE.Embed, 1, key=jax.random.key(0))
        x = hax.ones((Axis("position", 2), BASE.Embed))
        assert jnp.all(rule.write(x, x, None).array == 2)
