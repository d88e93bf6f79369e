"""Sampling against sorting in NumPy: which tokens may be drawn, how often they are, and that meshes do not matter."""

import functools
import math
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers import sampling_oracle as oracle

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.prefetch import place
from haliax_ext.program import Input, Program
from levanter.inference import sampling
from levanter.inference.requests import SamplingParams
from levanter.inference.sampling import (
    GENERATED,
    IN_PROMPT,
    SlotParams,
    SlotSampling,
    Word,
    allowed_tokens,
    gumbel_noise,
    host_params,
    noise_keys,
    sample,
)
from levanter.layers.attention.reference import HIDDEN

VOCAB = 50
RNG = np.random.default_rng(1)


def rows_of(params, *, seed=None, prompt=3, stop_ids=(), choices=False):
    """The host's arrays, a row for each of `params`."""
    return host_params(
        [
            SlotSampling(
                params=one,
                seed=one.seed if one.seed is not None else seed if seed is not None else n,
                choice=n if choices else 0,
                prompt_tokens=prompt,
                stop_ids=stop_ids,
            )
            for n, one in enumerate(params)
        ]
    )


def test_only_rows_that_are_others_are_gone_through_again():
    one, other, biased = (
        SlotSampling(params=params, seed=n << 33, choice=n, prompt_tokens=n, stop_ids=tuple(range(n)))
        for n, params in enumerate(
            (SamplingParams(), SamplingParams(temperature=0.5, top_k=3), SamplingParams(logit_bias={4: 2.0, 5: -1.0}))
        )
    )
    before = None
    for rows in (
        [one, None, biased, None],
        [one, other, biased, None],
        [one, other, None, biased],
        [other, other, None, one],
        [None] * 4,
    ):
        found, kept = host_params(rows, before=before), {} if before is None else before[1]
        held = {name: array.copy() for name, array in kept.items()}
        for name, expected in host_params(rows).items():
            np.testing.assert_array_equal(found[name], expected)
            assert found[name].dtype == expected.dtype
            # A call may still read what there was before.
            assert not kept or (found[name] is not kept[name] and np.array_equal(kept[name], held[name]))
        before = rows, found


@functools.cache
def _jitted(masked):
    @jax.jit
    def run(logits, arrays, position, counts, mask):
        Batch, Vocab = Axis("batch", logits.shape[0]), Axis("vocab", logits.shape[1])
        params = SlotParams.of_arrays(arrays, Batch)
        noise = noise_keys(params.seed, params.choice)
        found = sample(
            hax.named(logits, (Batch, Vocab)),
            params,
            noise,
            hax.named(position, Batch),
            counts=hax.named(counts, (Batch, Vocab)),
            mask=hax.named(mask, (Batch, Vocab)) if masked else None,
        )
        return found.tokens.array, found.logprobs.array, found.top_ids.array, found.top_logprobs.array, found.ok.array

    return run


def run(logits, arrays, *, position=None, counts=None, mask=None):
    """`sample` of the rows, as NumPy arrays."""
    rows, vocab = logits.shape
    position = np.full(rows, 7, np.int32) if position is None else position
    counts = np.zeros((rows, vocab), np.int32) if counts is None else counts
    allowed = np.ones((rows, vocab), np.bool_) if mask is None else mask
    found = _jitted(mask is not None)(logits.astype(np.float32), arrays, position, counts, allowed)
    return [np.asarray(each) for each in found]


def grid_logits(rows, vocab=VOCAB):
    """Logits on a coarse grid: ties, and quotients by powers of two that are exact."""
    return (RNG.integers(-24, 25, (rows, vocab)) / 4).astype(np.float32)


def test_what_may_be_drawn_is_what_sorting_says():
    """Top-k, top-p, min-p and all together, with ties at every threshold."""
    rows = 400
    logits = grid_logits(rows)
    params = [
        SamplingParams(
            temperature=float(RNG.choice([0.5, 1.0, 2.0, 4.0])),
            top_k=int(RNG.choice([-1, 0, 1, 2, 7, 49, 50, 51, 10_000])),
            top_p=float(RNG.choice([1e-12, 0.1, 0.5, 0.9, 0.999, 1.0])),
            min_p=float(RNG.choice([0.0, 0.0, 0.01, 0.3, 1.0])),
        )
        for _ in range(rows)
    ]
    Batch, Vocab = Axis("batch", rows), Axis("vocab", VOCAB)

    @jax.jit
    def allowed(x, arrays):
        return allowed_tokens(hax.named(x, (Batch, Vocab)), SlotParams.of_arrays(arrays, Batch)).array

    temperatures = np.array([one.temperature for one in params], np.float32)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / temperatures
    found = np.asarray(allowed(scaled, rows_of(params)))
    for n, one in enumerate(params):
        np.testing.assert_array_equal(found[n], oracle.probabilities(logits[n], one) > 0, err_msg=str(one))


@pytest.mark.parametrize(
    "x",
    [
        [0.0, -0.0, -1e-37, -1.0],
        [0.0, -3e38, -math.inf, HIDDEN],
        [0.0, -1.0, float(np.nextafter(np.float32(-1.0), np.float32(0))), -1.0],
    ],
)
def test_thresholds_among_strange_numbers(x):
    """Signed zeros are equal, infinities and neighbouring numbers are ordered."""
    x = np.array([x], np.float32)
    Batch, Vocab = Axis("batch", 1), Axis("vocab", 4)
    for k in range(1, 5):
        arrays = rows_of([SamplingParams(top_k=k)])
        found = allowed_tokens(hax.named(x, (Batch, Vocab)), SlotParams.of_arrays(arrays, Batch)).array
        np.testing.assert_array_equal(np.asarray(found)[0], x[0] >= np.sort(x[0])[::-1][k - 1])


def test_temperature_0_takes_the_likeliest_lowest_id_first():
    logits = grid_logits(64)
    found = run(logits, rows_of([SamplingParams(temperature=0)] * 64))[0]
    np.testing.assert_array_equal(found, logits.argmax(-1))
    assert (logits == logits.max(-1, keepdims=True)).sum() > 70, "no ties, so this would show nothing"


def test_log_probabilities_are_the_model_s_own():
    """Of the token and of the likeliest ones, whatever temperature, biases and penalties do to the choice."""
    logits = (4 * RNG.standard_normal((6, VOCAB))).astype(np.float32)
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, logprobs=20),
        SamplingParams(temperature=0.3, logprobs=20, logit_bias={3: 100.0}),
        SamplingParams(temperature=2.0, logprobs=5, top_k=1, repetition_penalty=2.0, frequency_penalty=2.0),
        SamplingParams(logprobs=None),
        SamplingParams(logprobs=1, top_p=0.1),
    ]
    counts = np.full((6, VOCAB), GENERATED + IN_PROMPT, np.int32)
    tokens, logprobs, top_ids, top_logprobs, ok = run(logits, rows_of(params), counts=counts)
    x = logits.astype(np.float64)
    expected = x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
    assert ok.all() and tokens[2] == 3
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, tokens[:, None], 1)[:, 0], atol=2e-5)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :20]
    for n in (1, 2, 3, 5):
        np.testing.assert_array_equal(top_ids[n], order[n])
        np.testing.assert_allclose(top_logprobs[n], expected[n][order[n]], atol=2e-5)
    for n in (0, 4):
        assert not top_logprobs[n].any()
    # lm-eval compares these two for equality to decide whether a token was greedy.
    assert tokens[1] == top_ids[1][0] and logprobs[1] == top_logprobs[1][0]


def test_the_likeliest_of_a_large_vocabulary_with_ties():
    logits = (RNG.integers(0, 40, (5, 5000)) / 4).astype(np.float32)
    _, _, top_ids, _, _ = run(logits, rows_of([SamplingParams(logprobs=20)] * 5))
    np.testing.assert_array_equal(top_ids, np.argsort(-logits, axis=-1, kind="stable")[:, :20])


def test_a_small_vocabulary_has_fewer_likeliest_tokens():
    _, _, top_ids, top_logprobs, _ = run(np.arange(6, dtype=np.float32)[None], rows_of([SamplingParams(logprobs=20)]))
    assert top_ids[0, :6].tolist() == [5, 4, 3, 2, 1, 0]
    assert np.isneginf(top_logprobs[0, 6:]).all()


GENERATED_BEFORE, PROMPT = (1, 1, 1, 4, 7, 7), (4, 9, 9, 12)


def counts_of(rows, vocab=VOCAB):
    counts = np.zeros((rows, vocab), np.int32)
    counts[:, list(set(PROMPT))] = IN_PROMPT
    for i in GENERATED_BEFORE:
        counts[:, i] += GENERATED
    return counts


def test_biases_and_penalties_change_what_is_likeliest():
    """Greedy rows under random biases and penalties, against the formulas."""
    rows = 200
    logits = (2 * RNG.standard_normal((rows, VOCAB))).astype(np.float32)
    params = [
        SamplingParams(
            temperature=0,
            logit_bias={int(i): float(RNG.uniform(-3, 3)) for i in RNG.integers(0, VOCAB, RNG.integers(0, 12))},
            presence_penalty=float(RNG.uniform(-2, 2)),
            frequency_penalty=float(RNG.uniform(-2, 2)),
            repetition_penalty=float(RNG.uniform(0.5, 2)),
        )
        for _ in range(rows)
    ]
    found = run(logits, rows_of(params), counts=counts_of(rows))[0]
    expected = [
        oracle.changed(logits[n], one, generated=GENERATED_BEFORE, prompt=PROMPT) for n, one in enumerate(params)
    ]
    np.testing.assert_array_equal(found, np.argmax(expected, axis=-1))
    assert (found != logits.argmax(-1)).mean() > 0.3


def test_nothing_ends_a_row_before_min_tokens():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 5], logits[:, 6], logits[:, 8] = 9, 8, 7
    params = [SamplingParams(temperature=0, min_tokens=m) for m in (0, 4, 5, 5)]
    arrays = rows_of(params, prompt=3, stop_ids=(5, 6))
    position = np.array([7, 7, 7, 8], np.int32)  # the fifth token, and the sixth
    assert run(logits, arrays, position=position)[0].tolist() == [5, 5, 8, 5]


def test_a_mask_forbids():
    rows, vocab = 3, 70
    logits = (RNG.standard_normal((rows, vocab))).astype(np.float32)
    allowed = RNG.random((rows, vocab)) < 0.3
    allowed[2] = False
    tokens, _, _, _, ok = run(logits, rows_of([SamplingParams(temperature=0)] * rows), mask=allowed)
    assert ok.tolist() == [True, True, False]
    expected = np.where(allowed, logits, -np.inf)
    assert tokens[:2].tolist() == expected[:2].argmax(-1).tolist()


def test_numbers_that_are_none_end_their_own_row_only():
    logits = (RNG.standard_normal((5, VOCAB))).astype(np.float32)
    clean = run(logits, rows_of([SamplingParams()] * 5))
    broken = logits.copy()
    broken[1, 7], broken[2, 3], broken[3] = math.nan, math.inf, HIDDEN
    found = run(broken, rows_of([SamplingParams()] * 5))
    assert found[4].tolist() == [True, False, False, False, True]
    for n in (0, 4):
        assert found[0][n] == clean[0][n] and found[1][n] == clean[1][n]
    assert (found[0] < VOCAB).all() and np.isfinite(found[1]).all()


LAWS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=9),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.2),
    "bias": SamplingParams(logit_bias={2: 2.0, 11: -1.5, 30: 1.0, 45: -100.0}),
    "penalties": SamplingParams(presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.4),
    "all": SamplingParams(
        temperature=1.3,
        top_k=30,
        top_p=0.9,
        min_p=0.03,
        logit_bias={2: 2.0, 30: 1.0},
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_chi2(law):
    """20,000 draws have the distribution that the formulas give."""
    rows, positions = 2000, 10
    logits = (1.5 * np.random.default_rng(5).standard_normal(VOCAB)).astype(np.float32)
    given = np.broadcast_to(logits, (rows, VOCAB))
    arrays = rows_of([LAWS[law]] * rows, seed=17, choices=True)
    drawn = np.concatenate(
        [
            run(given, arrays, position=np.full(rows, n, np.int32), counts=counts_of(rows))[0]
            for n in range(10, 10 + positions)
        ]
    )
    assert len(drawn) == 20_000
    x = oracle.changed(logits, LAWS[law], generated=GENERATED_BEFORE, prompt=PROMPT)
    expected = oracle.probabilities(x, LAWS[law])
    assert oracle.p_value(drawn, expected) > 1e-3
    # The judge sees a distribution that is a little off.
    warmer = oracle.probabilities(x / 1.15, LAWS[law])
    if (warmer[expected == 0] == 0).all() and (expected[warmer == 0] == 0).all():
        assert oracle.p_value(drawn, warmer) < 1e-3


def test_noise_is_jax_s_of_seed_choice_and_position():
    """The bits are those of keys that anybody can make; the noise is a quantile of theirs."""
    seeds, choice, position = [3, 2**40 + 3, 2**63 - 1], 2, 9
    Batch = Axis("batch", 3)
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    noise = noise_keys(hax.named(words, (Batch, Word)), hax.full(Batch, choice, dtype=jnp.int32))
    found = gumbel_noise(noise, hax.full(Batch, position, dtype=jnp.int32), Axis("vocab", 37)).array
    for n, seed in enumerate(seeds):
        key = jax.random.wrap_key_data(words[n], impl="threefry2x32")
        if seed < 2**32:
            assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(seed))).all()
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        bits = np.asarray(jax.random.bits(key, (37,), jnp.uint32)).astype(np.float64)
        np.testing.assert_allclose(found[n], -np.log(-np.log1p(-(bits + 0.5) / 2**32)), rtol=2e-5, atol=2e-6)
    assert len({row.tobytes() for row in np.asarray(found)}) == 3


def test_noise_of_an_id_does_not_depend_on_the_rows_that_pad_the_vocabulary():
    Batch = Axis("batch", 2)
    words = hax.named(np.arange(4, dtype=np.uint32).reshape(2, 2), (Batch, Word))
    position = hax.named(np.array([1, 2**30], np.int32), Batch)
    short, long = (np.asarray(gumbel_noise(words, position, Axis("vocab", size)).array) for size in (50, 64))
    np.testing.assert_array_equal(short, long[:, :50])
    with jax.threefry_partitionable(False):
        other = np.asarray(gumbel_noise(words, position, Axis("vocab", 50)).array)
    np.testing.assert_array_equal(short, other)


def test_noise_is_finite_at_both_ends_of_its_bits(monkeypatch):
    bits = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    monkeypatch.setattr(sampling.jax.random, "bits", lambda *_: jnp.asarray(bits))
    Batch = Axis("batch", 1)
    words = hax.named(np.zeros((1, 2), np.uint32), (Batch, Word))
    found = np.asarray(gumbel_noise(words, hax.zeros(Batch, dtype=jnp.int32), Axis("vocab", 5)).array)[0]
    assert np.isfinite(found).all() and (np.diff(found) <= 0).all() and found[0] > 22 and found[-1] < -2.7


MESHES = {
    "1": (MeshSpec.of(data=1, model=1), {"vocab": "model", "batch": "data"}),
    "model 2": (MeshSpec.of(data=1, model=2), {"vocab": "model", "batch": "data"}),
    "data 2 model 2": (MeshSpec.of(data=2, model=2), {"vocab": "model", "batch": "data"}),
}


def program_of(mapping, Batch, Vocab):
    def function(logits, params, position, counts):
        noise = noise_keys(params.seed, params.choice)
        return sample(logits, params, noise, position, counts=counts)

    def named(dtype, *axes):
        return hax.NamedArray(jax.ShapeDtypeStruct(tuple(a.size for a in axes), dtype), axes)

    inputs = {
        "logits": named(jnp.float32, Batch, Vocab),
        "params": SlotParams.abstract(Batch),
        "position": named(jnp.int32, Batch),
        "counts": named(jnp.int32, Batch, Vocab),
    }
    return Program(
        name="sample",
        function=function,
        inputs=tuple(Input(name=name, value=value, placement=AxisMapping(mapping)) for name, value in inputs.items()),
        mappings=Mappings(compute=AxisMapping(mapping)),
    )


def test_every_mesh_draws_the_same(devices):
    """Tokens and likeliest tokens, of all parameters, on one device and on shards of rows and vocabulary."""
    rows, vocab = 8, 4096
    Batch, Vocab = Axis("batch", rows), Axis("vocab", vocab)
    logits = (2 * RNG.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, 4000:] = HIDDEN
    logits[:, 100:4000:100] = logits.max() + 1  # ties between shards, more than may be drawn or are listed
    params = [SamplingParams(temperature=0, logprobs=20), *LAWS.values()]
    params = [SamplingParams(**{**vars(one), "logprobs": 20, "seed": n}) for n, one in enumerate(params)]
    counts = counts_of(rows, vocab)
    found = {}
    for name, (spec, mapping) in MESHES.items():
        mesh = spec.build(devices[: spec.size])
        program = program_of(mapping, Batch, Vocab)
        host = [logits, rows_of(params, prompt=0), np.arange(rows, dtype=np.int32), counts]
        given = [place(one, value, mesh) for one, value in zip(program.inputs, host, strict=True)]
        drawn = program.jit(mesh)(*given)
        found[name] = jax.tree.map(np.asarray, drawn)
        if name == "data 2 model 2":
            text = program.lower(mesh).compile().as_text()
    for name, one in found.items():
        np.testing.assert_array_equal(one.tokens.array, found["1"].tokens.array, err_msg=name)
        np.testing.assert_array_equal(one.top_ids.array, found["1"].top_ids.array, err_msg=name)
        np.testing.assert_allclose(one.logprobs.array, found["1"].logprobs.array, atol=2e-5, err_msg=name)
    assert found["1"].ok.array.all() and (found["1"].tokens.array < 4000).all()
    assert found["1"].tokens.array[0] == 100 and found["1"].top_ids.array[0].tolist() == list(range(100, 2100, 100))
    assert len(set(found["1"].tokens.array.tolist())) > 4
    # No device sees the logits of another: what is gathered is the likeliest of each shard, and the ids of biases and
    # ends (each row has 300 and 64 of them), with the indices of their rows.
    gathered = [
        int(math.prod(map(int, shape.split(",")))) for shape in re.findall(r"\[([\d,]+)\][^=\n]* all-gather", text)
    ]
    assert gathered and max(gathered) <= rows * 300 * 2 < rows * vocab / 4
