"""Suffix scores against NumPy in float64 on whole distributions, on every mesh, and what the compiled code moves."""

import math
import re

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import VOCAB, mappings_for, place, program_for, random_arrays, run_on, tiny_config

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.layers.linear import Linear
from levanter.models.suffix_scores import largest, score_targets, suffix_scores

Batch, Suffix, Embed, Vocab = Axis("batch", 3), Axis("suffix", 11), Axis("embed", 12), Axis("vocab", 90)
RNG = np.random.default_rng(0)
ACTIVATIONS = RNG.standard_normal((3, 11, 12)).astype(np.float32)
HEAD = RNG.standard_normal((90, 12)).astype(np.float32)
TARGETS = RNG.integers(0, 90, (3, 11)).astype(np.int32)
LAWS = ((40, 1.0), (None, 0.7), (5, 2.0), (60, 1.0), (200, 1.0))


def lse(x):
    top = x.max(-1, keepdims=True)
    return np.log(np.exp(x - top).sum(-1)) + top[..., 0]


def by_numpy(logits, targets, laws):
    """(log p, ranks, normalizers) from all logits."""
    logits = logits.astype(np.float64)
    logp = logits - lse(logits)[..., None]
    chosen = np.take_along_axis(logp, targets[..., None], -1)
    ids = np.arange(logits.shape[-1])
    ranks = ((logp > chosen) | ((logp == chosen) & (ids < targets[..., None]))).sum(-1)
    ordered = -np.sort(-logp, axis=-1)
    return chosen[..., 0], ranks, [lse(ordered[..., :k] / temperature) for k, temperature in laws]


def score(chunk=None, vocab_size=None, activations=ACTIVATIONS, head=HEAD, targets=TARGETS, laws=LAWS, soft_cap=None):
    @jax.jit
    def run(a, w, t):
        a = hax.named(a, (Batch, Suffix, Embed))
        w = Linear(weight=hax.named(w, (Vocab, Embed)), bias=None, In=("embed",))
        options = dict(laws=laws, chunk=chunk, vocab_size=vocab_size, soft_cap=soft_cap)
        found = score_targets(a, w, hax.named(t, (Batch, Suffix)), **options)
        return found.logprobs.array, found.ranks.array, [x.array for x in found.normalizers]

    logprobs, ranks, normalizers = run(activations, head, targets)
    assert logprobs.dtype == np.float32 and ranks.dtype == np.int32
    return np.asarray(logprobs), np.asarray(ranks), [np.asarray(x) for x in normalizers]


def assert_equal(found, expected, atol=3e-5):
    np.testing.assert_allclose(found[0], expected[0], atol=atol, rtol=0)
    np.testing.assert_array_equal(found[1], expected[1])
    for one, other in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["one block holds all", "spread", "ties", "ascending", "fewer than k are finite"])
def test_the_largest_of_a_large_vocabulary(kind):
    vocab = 50_257  # no multiple of a block
    x = np.random.default_rng(1).standard_normal((3, 2, vocab)).astype(np.float32)
    if kind == "one block holds all":
        x[..., 640:700] += 100
    elif kind == "ties":
        x = np.round(x)
    elif kind == "ascending":
        x = np.sort(x, axis=-1)
    elif kind == "fewer than k are finite":
        x[..., 5:] = -np.inf
    np.testing.assert_array_equal(jax.jit(largest, static_argnums=1)(x, 40), -np.sort(-x, axis=-1)[..., :40])


@pytest.mark.parametrize("chunk", [None, 1, 4, 11, 100])
def test_every_chunk_size_gives_the_definition(chunk):
    assert_equal(score(chunk), by_numpy(ACTIVATIONS @ HEAD.T, TARGETS, LAWS))


def test_added_vocabulary_entries_do_not_count():
    targets = TARGETS % 70
    expected = by_numpy((ACTIVATIONS @ HEAD.T)[..., :70], targets, LAWS)
    assert_equal(score(vocab_size=70, targets=targets), expected)


def test_bounded_logits():
    expected = by_numpy(4.0 * np.tanh((ACTIVATIONS @ HEAD.T) / 4.0), TARGETS, LAWS)
    assert_equal(score(chunk=4, soft_cap=4.0), expected)


def test_large_logits_do_not_overflow():
    logprobs, ranks, normalizers = score(activations=1000 * ACTIVATIONS)
    assert np.isfinite(logprobs).all() and all(np.isfinite(x).all() for x in normalizers)
    np.testing.assert_array_equal(ranks, by_numpy(ACTIVATIONS @ HEAD.T, TARGETS, ())[1])


def test_equal_logits_rank_by_id():
    head = np.repeat(HEAD[:30], 3, axis=0)  # every entry three times
    logprobs, ranks, _ = score(head=head)
    _, expected, _ = by_numpy(ACTIVATIONS @ head.T, TARGETS, ())
    np.testing.assert_array_equal(ranks, expected)
    assert len(np.unique(ranks % 3)) == 3 and np.isfinite(logprobs).all()


def test_an_unsharded_vocabulary_needs_no_mapping_in_scope():
    assert_equal(score(laws=()), by_numpy(ACTIVATIONS @ HEAD.T, TARGETS, ()))


CONFIG, ARRAYS = tiny_config(), random_arrays(tiny_config())
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (8, 20)).astype(np.int32)
SUFFIX = 9


def of_model(model, tokens):
    Pos = tokens.resolve_axis("position")
    targets = tokens[Pos.name, Pos.size - SUFFIX :].rename({Pos.name: "suffix"})
    return suffix_scores(model, tokens, targets, laws=LAWS, chunk=4)


def all_logits(model, tokens):
    return model.logits(model(tokens).activations)


def meshes():
    one = MeshSpec.of(data=1, model=1)
    yield "one device", one, mappings_for(CONFIG, one)
    for data, model in ((8, 1), (4, 2)):
        spec = MeshSpec.of(data=data, model=model)
        yield f"{data} x {model}", spec, mappings_for(CONFIG, spec)
    spec = MeshSpec.of(data=1, model=8)
    rules = AxisMapping({"vocab": "model", "mlp": "model"})
    yield "vocabulary in 8, shards below K", spec, Mappings(params=rules, compute=rules)
    spec = MeshSpec.of(data=2, model=2, group=2)
    rules = AxisMapping({"vocab": ("model", "group"), "mlp": "model"})
    compute = rules.merged({"batch": "data", "position": None})
    yield "vocabulary over two mesh axes", spec, Mappings(params=rules.merged({"embed": "data"}), compute=compute)


MESHES = {name: (spec, mappings) for name, spec, mappings in meshes()}


@pytest.fixture(scope="module")
def expected(devices):
    spec, mappings = MESHES["one device"]
    logits = run_on(all_logits, CONFIG, ARRAYS, TOKENS, spec, mappings, devices).array
    return by_numpy(logits[:, 20 - SUFFIX - 1 : 19], TOKENS[:, 20 - SUFFIX :], LAWS)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_definition(mesh, expected, devices):
    spec, mappings = MESHES[mesh]
    found = run_on(of_model, CONFIG, ARRAYS, TOKENS, spec, mappings, devices)
    assert found.logprobs.axes == (Axis("batch", 8), Axis("suffix", SUFFIX))
    assert_equal((found.logprobs.array, found.ranks.array, [x.array for x in found.normalizers]), expected)


def compiled(function, mesh, devices):
    spec, mappings = MESHES[mesh]
    program = program_for(function, CONFIG, VOCAB, TOKENS.shape, mappings)
    return program.lower(spec.build(devices[: spec.size])).compile().as_text()


def arrays_of(text, operation=""):
    """The shapes of the results of an operation (of all, where none is named)."""
    shapes = re.findall(rf"= \(?f32\[([\d,]+)\][^=]* {operation}", text)
    return [tuple(map(int, shape.split(","))) for shape in shapes]


def test_only_suffix_positions_have_logits(devices):
    """No array of the compiled program is as large as the logits of all positions; a chunk's are the largest."""
    text = compiled(of_model, "one device", devices)
    with_vocab = [shape for shape in arrays_of(text) if VOCAB in shape and 8 in shape]
    assert with_vocab and max(map(math.prod, with_vocab)) == 8 * 3 * VOCAB  # chunks of 3 of the 9 positions


@pytest.mark.parametrize("mesh", ["4 x 2", "vocabulary over two mesh axes"])
def test_no_device_is_sent_the_logits_of_others(mesh, devices):
    """What is gathered of a chunk is the best 200 of each shard at most, never its logits over the whole batch."""
    spec, _ = MESHES[mesh]
    sizes = dict(spec.axes)
    batch_here = 8 // sizes["data"]
    gathered = arrays_of(compiled(of_model, mesh, devices), r"all-gather(?:-start)?\(")
    chunk = [shape for shape in gathered if 3 in shape and math.prod(shape) > 8 * 3]
    shards = sizes["model"] * sizes.get("group", 1)
    per_shard = min(200, VOCAB // shards)
    assert all(math.prod(shape) <= batch_here * 3 * shards * per_shard for shape in chunk), chunk


def test_the_same_batch_gives_the_same_bits(devices):
    spec, mappings = MESHES["4 x 2"]
    mesh = spec.build(devices)
    model = place(CONFIG, ARRAYS, mappings, mesh)
    run = program_for(of_model, CONFIG, VOCAB, TOKENS.shape, mappings).jit(mesh)
    tokens = hax.NamedArray(jax.numpy.asarray(TOKENS), (Axis("batch", 8), Axis("position", 20)))
    one, two = (jax.tree.map(np.asarray, run(model, tokens)) for _ in range(2))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))
