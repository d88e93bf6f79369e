"""Scores against NumPy in float64, whatever the chunk, the segments and the vocabulary's padding."""

import functools
import math
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import VOCAB, abstract_model, mappings_for, program_for, random_arrays, run_on, tiny_config
from helpers.losses import LossMean, mean_loss, target_logprobs

from haliax_ext.abstract import with_arrays
from haliax_ext.hlo import read_figures
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from levanter.layers.linear import Linear
from levanter.models.lm_head import plan
from levanter.models.lm_head.chunks import HeadScoring, chunking
from levanter.models.lm_head.plan import planned_chunk
from levanter.models.lm_head.scores import target_scores
from levanter.models.precision import Precision
from levanter.models.scoring import has_target, loss_sums, next_tokens, token_hits, token_logprobs

Batch, Pos, Embed, Vocab = Axis("batch", 3), Axis("position", 17), Axis("embed", 12), Axis("vocab", 40)
RNG = np.random.default_rng(0)


def head_of(w):
    return Linear(weight=hax.named(w, (Vocab, Embed)), bias=None, In=("embed",))


ACTIVATIONS = (3 * RNG.standard_normal((3, 17, 12))).astype(np.float32)
HEAD = RNG.standard_normal((40, 12)).astype(np.float32)
TARGETS = RNG.integers(0, 40, (3, 17)).astype(np.int32)
TARGETS_IN_30 = TARGETS % 30


def score(chunk, vocab_size=None, activations=ACTIVATIONS, head=HEAD, targets=TARGETS):
    @jax.jit
    def run(a, w, t):
        a, w, t = hax.named(a, (Batch, Pos, Embed)), head_of(w), hax.named(t, (Batch, Pos))
        found = target_logprobs(a, w, t, chunk=chunk, vocab_size=vocab_size)
        assert found.axes == t.axes and found.dtype == jnp.float32
        return found.array

    return np.asarray(run(activations, head, targets))


def by_numpy(vocab_size=40, targets=TARGETS):
    logits = ACTIVATIONS.astype(np.float64) @ HEAD[:vocab_size].astype(np.float64).T
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(logprobs, targets[..., None], -1)[..., 0]


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 100])
def test_every_chunk_size_gives_the_same(chunk):
    np.testing.assert_allclose(score(chunk), by_numpy(), atol=2e-5)


@pytest.mark.parametrize("size", [40, 30])
def test_of_equally_likely_entries_the_lowest_id_is_the_likeliest(size):
    """Entries 20 and 3 are one; so are 35, which does not count among 30, and 7. NumPy's argmax takes the lowest."""
    w = HEAD.copy()
    w[20], w[35] = w[3], w[7]
    expected = (ACTIVATIONS @ w[:size].T).argmax(-1)
    targets = np.where(RNG.random((3, 17)) < 0.5, expected, TARGETS_IN_30).astype(np.int32)
    targets[0, :2], targets[1, :2] = 20, 35
    how = HeadScoring(vocab_size=size, soft_cap=None, normalizers=False, likeliest=True)

    @jax.jit
    def run(a, w, t):
        return target_scores(
            hax.named(a, (Batch, Pos, Embed)), head_of(w), hax.named(t, (Batch, Pos)), chunk=5, how=how
        )

    logprobs, hits = run(ACTIVATIONS, w, targets)
    assert hits.array.dtype == jnp.float32 and not np.asarray(hits.array)[:2, :2].any()
    np.testing.assert_array_equal(np.asarray(hits.array) == 1, targets == expected)
    assert 10 < (targets == expected).sum() < targets.size - 10
    logits = ACTIVATIONS.astype(np.float64) @ w[:size].astype(np.float64).T
    shares = np.take_along_axis(logits, np.minimum(targets, size - 1)[..., None], -1)[..., 0]
    there = targets < size
    np.testing.assert_allclose(
        np.asarray(logprobs.array)[there], (shares - np.log(np.exp(logits).sum(-1)))[there], atol=2e-5
    )


def test_added_vocabulary_entries_have_no_probability():
    found = score(6, vocab_size=30, targets=TARGETS_IN_30)
    np.testing.assert_allclose(found, by_numpy(30, TARGETS_IN_30), atol=2e-5)
    assert np.abs(found - score(6, targets=TARGETS_IN_30)).max() > 1e-3


def test_bounded_logits_and_their_derivative():
    """`cap · tanh(logit / cap)` before anything else; added entries stay hidden."""
    cap, size = 2.5, 30

    def mine(a, w):
        named = hax.named(a, (Batch, Pos, Embed)), head_of(w)
        targets = hax.named(TARGETS_IN_30, (Batch, Pos))
        return hax.sum(target_logprobs(*named, targets, chunk=6, vocab_size=size, soft_cap=cap)).scalar()

    value, (of_a, of_w) = jax.jit(jax.value_and_grad(mine, argnums=(0, 1)))(ACTIVATIONS, HEAD)
    a, w = ACTIVATIONS.astype(np.float64), HEAD.astype(np.float64)
    bounded = np.tanh(a @ w[:size].T / cap)
    weights = np.exp(cap * bounded)
    weights /= weights.sum(-1, keepdims=True)
    hit = np.eye(size)[TARGETS_IN_30]
    assert float(value) == pytest.approx((hit * np.log(weights)).sum(), rel=1e-5)
    of_logits = (hit - weights) * (1 - bounded**2)
    np.testing.assert_allclose(of_a, of_logits @ w[:size], atol=2e-5)
    np.testing.assert_allclose(of_w[:size], np.einsum("bpv,bpe->ve", of_logits, a), atol=5e-5)
    assert not np.asarray(of_w)[size:].any()


def test_large_logits_do_not_overflow():
    found = score(4, activations=ACTIVATIONS * 1000)
    assert np.isfinite(found).all() and found.max() <= 0


def test_bfloat16_products_come_out_in_float32():
    found = score(4, activations=ACTIVATIONS.astype(jnp.bfloat16), head=HEAD.astype(jnp.bfloat16))
    exact_inputs = ACTIVATIONS.astype(jnp.bfloat16).astype(np.float64) @ HEAD.astype(jnp.bfloat16).astype(np.float64).T
    logprobs = exact_inputs - np.log(np.exp(exact_inputs).sum(-1, keepdims=True))
    # The products of bfloat16 numbers are exact in float32: only the order of summation is left.
    np.testing.assert_allclose(found, np.take_along_axis(logprobs, TARGETS[..., None], -1)[..., 0], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 6])
def test_half_precision_gradients_are_those_of_their_own_inputs(chunk):
    """The logits' gradient is rounded to 16 bits for the products, once; what is added up stays in float32."""
    a, w = ACTIVATIONS.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    given = RNG.standard_normal((3, 17)).astype(np.float32)

    def mine(a, w):
        named = hax.named(a, (Batch, Pos, Embed)), head_of(w)
        found = target_logprobs(*named, hax.named(TARGETS, (Batch, Pos)), chunk=chunk)
        return hax.sum(found * hax.named(given, (Batch, Pos))).scalar()

    of_a, of_w = jax.jit(jax.grad(mine, argnums=(0, 1)))(a, w)
    assert of_a.dtype == of_w.dtype == jnp.bfloat16
    a, w = a.astype(np.float64), w.astype(np.float64)
    shares = np.exp(a @ w.T - (a @ w.T).max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    of_logits = (np.eye(40)[TARGETS] - shares) * given[..., None]
    # Two roundings of a relative 2^-8 at most, of the terms and of the sum.
    for mine, exact, terms in (
        (of_a, of_logits @ w, np.abs(of_logits) @ np.abs(w)),
        (of_w, np.einsum("bpv,bpe->ve", of_logits, a), np.einsum("bpv,bpe->ve", np.abs(of_logits), np.abs(a))),
    ):
        assert (np.abs(np.asarray(mine.astype(jnp.float32)) - exact) <= 2**-7 * terms).all()


def test_chunks_are_equal_where_that_is_cheap():
    assert chunking(2048, 128) == (16, 128)
    assert chunking(32, 12) == (4, 8)
    assert chunking(100, 128) == (1, 100)
    assert chunking(101, 50) == (3, 34)  # a prime: the last chunk is padded
    for positions in range(1, 80):
        for chunk in range(1, 90):
            count, size = chunking(positions, chunk)
            assert size <= chunk and count * size >= positions and (count - 1) * size < positions + count


@pytest.mark.parametrize(
    ("batch", "vocab", "data", "model", "positions"),
    [
        # One sequence a device and a whole head: 523 tokens of 128,256 float32 logits are 256 MiB.
        (128, 128256, 128, 1, 523),
        (64, 128256, 8, 16, 1046),
        (16, 32000, 16, 1, 2097),
        (4096, 128256, 1, 1, 1),
    ],
)
def test_a_chunk_is_what_a_device_has_room_for(batch, vocab, data, model, positions):
    mapping = AxisMapping({"batch": "data", "vocab": "model"})
    plan = functools.partial(
        planned_chunk, batch=("batch", batch), vocab=vocab, mapping=mapping, mesh=MeshSpec.of(data=data, model=model)
    )
    assert plan(tiny_config()) == positions
    rows, entries = batch // data, vocab // model
    assert positions * rows * entries * 4 <= 256 << 20 < (positions + 1) * rows * entries * 4 or positions == 1
    assert plan(tiny_config(cross_entropy_block_size=7)) == 7


def test_the_chunk_that_is_planned_is_the_chunk_that_is_scored(devices, monkeypatch):
    """Under mapping and mesh in scope the program cuts as `planned_chunk` says without them."""
    monkeypatch.setattr(plan, "LOGITS_BYTES", 4 * 2 * (VOCAB // 2) * 5)  # 5 positions of 2 rows per device
    config, spec = tiny_config(num_kv_heads=8), MeshSpec.of(data=4, model=2)
    mappings = mappings_for(config, spec)
    size = planned_chunk(config, batch=("batch", 8), vocab=VOCAB, mapping=mappings.compute, mesh=spec)
    assert size == 5 and chunking(24, size) == (6, 4)

    def score_in_small_chunks(model, ids):
        return token_logprobs(model, ids, next_tokens(ids))

    program = program_for(score_in_small_chunks, config, VOCAB, (8, 24), mappings)
    assert "8x4x256xf32" in program.lower(spec.abstract()).as_text()


def test_a_chunk_holds_a_position():
    with pytest.raises(ValueError, match="at least one position"):
        score(0)


def test_segments_are_scored_as_if_alone(devices):
    """Two documents packed into one row score like each in its own row; RoPE sees relative positions only."""
    config = tiny_config()
    arrays = random_arrays(config)
    spec = MeshSpec.of(data=1, model=2)
    mappings = mappings_for(config, spec)
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, VOCAB, (1, 10)), rng.integers(0, VOCAB, (1, 14))
    packed = np.concatenate([first, second], 1).astype(np.int32)

    def packed_score(model, ids):
        segments = (hax.arange(ids.resolve_axis("position")) >= 10).astype(jnp.int32)
        targets = next_tokens(ids, segments)
        return token_logprobs(model, ids, targets, segment_ids=segments.broadcast_to(ids.axes))

    def lone_score(model, ids):
        return token_logprobs(model, ids, next_tokens(ids))

    found = run_on(packed_score, config, arrays, packed, spec, mappings, devices).array
    alone = [
        run_on(lone_score, config, arrays, x.astype(np.int32), spec, mappings, devices).array for x in (first, second)
    ]
    np.testing.assert_allclose(found, np.concatenate(alone, 1), atol=2e-5)
    assert found[0, 9] == 0 and found[0, -1] == 0 and (np.delete(found[0], [9, 23]) < 0).all()


def minimized(model, ids, chunk=None):
    """What a train step differentiates, of tokens that all count."""
    targets, activations = next_tokens(ids), model(ids).activations
    counts = has_target(targets).astype(jnp.float32)
    return loss_sums(model, targets, counts, activations=activations, chunk=chunk).minimized


def test_logits_of_a_sequence_never_exist(devices):
    """In the compiled scoring and training programs no array holds `position × vocab` logits."""
    config = tiny_config(vocab_size=None, max_seq_len=128)
    spec, vocab, length = MeshSpec.of(data=2, model=4), 4096, 128
    mappings = mappings_for(config, spec)

    def gradient(model, ids):
        return eqx.filter_grad(lambda m: mean_loss(m, ids, next_tokens(ids), chunk=16).array)(model)

    def training(model, ids):
        return eqx.filter_grad(lambda m: minimized(m, ids, chunk=16))(model)

    def forward(model, ids):
        return token_logprobs(model, ids, next_tokens(ids), chunk=16)

    for function in (forward, gradient, training):
        text = (
            program_for(function, config, vocab, (2, length), mappings).lower(spec.build(devices)).compile().as_text()
        )
        per_device = [math.prod(int(n) for n in shape.split(",")) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
        chunk_logits = 1 * 16 * vocab // 4
        assert chunk_logits in per_device
        whole_logits = 1 * length * vocab // 4
        assert max(per_device) < whole_logits


def test_the_gradient_of_the_head_crosses_the_mesh_once(devices):
    """The loop over chunks adds up each shard's own rows; what is reduced over `data` is reduced behind it."""
    config = tiny_config(num_kv_heads=8, cross_entropy_block_size=8)
    spec = MeshSpec.of(data=4, model=2)

    def gradient(model, ids):
        return eqx.filter_grad(lambda m: minimized(m, ids))(model)

    program = program_for(gradient, config, VOCAB, (8, 32), mappings_for(config, spec))
    figures = read_figures(program.lower(spec.build(devices)).compile().as_text(), spec)
    assert figures.unknown == ()
    in_the_loop = [c for c in figures.collectives if c.scope.module.startswith("lm_head.chunks")]
    assert {c.times for c in in_the_loop} == {4} and {c.over for c in in_the_loop} == {"model"}
    # Behind it, in float32, perhaps together with others: a shard of `vocab` each.
    head = VOCAB * config.hidden_dim * 4 // 2
    assert any(c.times == 1 and c.over == "data" and c.bytes >= head for c in figures.collectives)


def test_the_loss_of_a_half_precision_policy_is_close(devices):
    config = tiny_config(cross_entropy_block_size=16)
    spec = MeshSpec.of(data=2, model=2)
    tokens = np.random.default_rng(5).integers(0, VOCAB, (4, 24)).astype(np.int32)

    def loss(policy):
        def function(model, ids):
            model = Precision.parse(policy).cast_to_compute(model)
            assert model.lm_head.weight.dtype == Precision.parse(policy).compute
            return mean_loss(model, ids, next_tokens(ids))

        return run_on(function, config, random_arrays(config), tokens, spec, mappings_for(config, spec), devices).array

    exact, half = loss("f32"), loss("p=f32,c=bf16")
    assert exact.dtype == half.dtype == np.float32
    assert half == pytest.approx(exact, rel=0.02) and half != exact


def test_targets_end_with_the_segment():
    tokens, segments = (hax.named(np.array(x, np.int32), "position") for x in ([5, 6, 7, 8, 0, 9], [0, 0, 1, 1, 1, 2]))
    assert next_tokens(tokens, segments).array.tolist() == [6, -1, 8, 0, -1, -1]
    assert next_tokens(tokens).array.tolist() == [6, 7, 8, 0, 9, -1]
    rows = hax.named(np.array([[1, 2, 3], [4, 5, 6]], np.int64).astype(np.int32), ("batch", "position"))
    ends = hax.named(np.array([0, 0, 1], np.int32), "position")
    assert next_tokens(rows, ends).array.tolist() == [[2, -1, -1], [5, -1, -1]]


def test_targets_in_any_place_are_scored_where_they_stand():
    """What a position predicts is said by its target, and nothing is asked of the token beside it."""
    config = tiny_config()
    template = abstract_model(config)
    model = with_arrays(template, {k: jnp.asarray(v) for k, v in random_arrays(config).items()})
    axes = (Axis("batch", 2), Axis("position", 12))
    tokens, targets = (RNG.integers(0, VOCAB, (2, 12)).astype(np.int32) for _ in range(2))
    targets[RNG.random((2, 12)) < 0.3] = -1

    @jax.jit
    def both(model, targets):
        ids = hax.named(tokens, axes)
        logits = model.logits(model(ids).activations).rearrange(("batch", "position", "vocab"))
        found = token_logprobs(model, ids, hax.named(targets, axes), chunk=5)
        again, hits = token_hits(model, ids, hax.named(targets, axes), chunk=5)
        return found.array, again.array, hits.array, logits.array

    targets = np.where(RNG.random((2, 12)) < 0.4, np.asarray(both(model, targets)[3]).argmax(-1), targets).astype(
        np.int32
    )
    found, again, hits, logits = (np.asarray(x, np.float64) for x in both(model, targets))
    np.testing.assert_array_equal(found, again)
    np.testing.assert_array_equal(hits, targets == logits.argmax(-1))
    assert 0 < hits.sum() < (targets >= 0).sum()
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(logprobs, np.maximum(targets, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, np.where(targets < 0, 0, expected), atol=2e-5)


def test_host_sums_are_float64():
    mean = LossMean()
    for _ in range(1000):
        mean += LossMean.of(np.full(100, -0.1, np.float32), np.full(100, 1, np.float32))
    assert mean.count == 1e5
    assert mean.loss == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    assert math.isnan(LossMean().loss)


def test_abstract_models_need_no_memory():
    config = tiny_config(hidden_dim=16384, num_heads=128, num_kv_heads=8, num_layers=126, intermediate_dim=53248)
    model = abstract_model(config, 128256)
    assert model.Vocab.size == 128256
