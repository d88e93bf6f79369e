"""The runner: every window once, in order, whatever the batch, the fetch, and where a run goes on."""

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, mappings_for, place, random_arrays, run_on, tiny_config

from haliax_ext.meshspec import MeshSpec
from levanter.memorization import score_windows
from levanter.memorization.partial_results import PartStore
from levanter.memorization.results import Scheme, Scores
from levanter.memorization.runner import (
    BatchShape,
    TokenRows,
    sampling_laws,
    score_and_store,
    score_batches,
    score_program,
)

CONFIG = tiny_config()
ARRAYS = random_arrays(CONFIG)
SPEC = MeshSpec.of(data=4, model=2)
MAPPINGS = mappings_for(CONFIG, SPEC)
WINDOWS = np.random.default_rng(0).integers(0, VOCAB, (43, 15)).astype(np.int32)
PREFIX = 9
SHAPE = BatchShape(rows=8, positions=15, suffix=6)


@pytest.fixture(scope="module")
def at_hand(devices):
    mesh = SPEC.build(devices)
    model = place(CONFIG, ARRAYS, MAPPINGS, mesh)
    return score_program(model, SHAPE, mappings=MAPPINGS), model, mesh


@pytest.fixture(scope="module")
def logprobs(devices):
    """log p of every token of every suffix, from all logits."""
    spec = MeshSpec.of(data=1, model=1)
    logits = run_on(
        lambda model, ids: model.logits(model(ids).activations),
        CONFIG,
        ARRAYS,
        WINDOWS,
        spec,
        mappings_for(CONFIG, spec),
        devices,
    ).array.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logp[:, PREFIX - 1 : -1], WINDOWS[:, PREFIX:, None], -1)[..., 0]


@pytest.mark.parametrize("behind", [0, 1, 4, 100])
def test_every_window_comes_once_and_in_order(at_hand, logprobs, behind):
    batches = list(score_batches(*at_hand, TokenRows(tokens=WINDOWS), SHAPE, fetch_behind=behind))
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8, 3], "the rows that fill the last batch are dropped"
    np.testing.assert_allclose(Scores.joined(batches).logprobs, logprobs, atol=3e-5, rtol=0)


def test_a_run_that_goes_on_gives_the_same_bits(at_hand):
    source = TokenRows(tokens=WINDOWS)
    whole = Scores.joined(list(score_batches(*at_hand, source, SHAPE)))
    rest = Scores.joined(list(score_batches(*at_hand, source, SHAPE, first=16)))
    for name, array in rest.arrays.items():
        assert array.tobytes() == whole.arrays[name][16:].tobytes()
    assert list(score_batches(*at_hand, TokenRows(tokens=WINDOWS[:40]), SHAPE, first=40)) == []


def test_a_run_goes_on_at_the_beginning_of_a_batch_only(at_hand):
    with pytest.raises(AssertionError, match="window 5 does not begin a batch of 8"):
        next(score_batches(*at_hand, TokenRows(tokens=WINDOWS), SHAPE, first=5))


def some_scores(n):
    rng = np.random.default_rng(n)
    numbers = rng.random((n, 6)).astype(np.float32)
    return Scores(logprobs=-numbers, ranks=(9 * numbers).astype(np.int32), top_lse=-numbers / 2)


@pytest.mark.parametrize("save_seconds", [0.0, 1e9])
@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_what_is_stored_is_not_scored_again(tmp_path, save_seconds, killed_after):
    everything = some_scores(43)

    def batches(first):
        asked.append(first)
        for begin in range(first, 43, 8):
            yield Scores.of_arrays({name: array[begin : begin + 8] for name, array in everything.arrays.items()})

    def failing(first):
        for count, scores in enumerate(batches(first)):
            if count == killed_after:
                raise KeyboardInterrupt
            yield scores

    store = PartStore(folder=str(tmp_path), identity={"a": 1}, windows=43, suffix_tokens=6)
    asked: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        score_and_store(failing, store, save_seconds=save_seconds)
    seen: list[int] = []
    found = score_and_store(batches, store, save_seconds=save_seconds, on_windows=seen.append)
    stored = 8 * killed_after if save_seconds == 0 else 0
    assert asked == [0, stored] and seen[0] == stored and seen[-1] == 43
    assert found is not None
    for name, array in everything.arrays.items():
        assert found.arrays[name].tobytes() == array.tobytes()
    # A third time nothing is left to score.
    asked.clear()
    again = score_and_store(batches, store, save_seconds=save_seconds)
    assert asked == [43] and again is not None and again.logprobs.tobytes() == everything.logprobs.tobytes()


def test_an_error_while_storing_ends_the_run(tmp_path):
    store = PartStore(folder=str(tmp_path / "book"), identity={}, windows=43, suffix_tokens=6)

    def batches(first):
        for begin in range(first, 43, 8):
            (tmp_path / "book" / "parts").rename(tmp_path / f"away{begin}")
            (tmp_path / "book" / "parts").write_text("in the way")
            yield some_scores(min(8, 43 - begin))
            break

    with pytest.raises((OSError, AssertionError)):
        score_and_store(batches, store, save_seconds=0)


def test_the_library_function(devices, logprobs):
    spec = MeshSpec.of(data=1, model=1)
    mesh, mappings = spec.build(devices[:1]), mappings_for(CONFIG, spec)
    extra = Scheme(top_k=10, temperature=0.7)
    model = place(CONFIG, ARRAYS, mappings, mesh)
    found = score_windows(model, WINDOWS, prefix_tokens=PREFIX, mesh=mesh, batch_size=20, schemes=[extra])
    np.testing.assert_allclose(found.logprobs, logprobs, atol=3e-5, rtol=0)
    assert list(found.normalizers) == ["k10_t0.7"] and found.ranks.shape == (43, 6)
    assert len(score_windows(model, WINDOWS[:0], prefix_tokens=PREFIX, mesh=mesh)) == 0
    for bad, prefix in ((WINDOWS[0], 3), (WINDOWS, 0), (WINDOWS, 15)):
        with pytest.raises(ValueError, match="a prefix and a suffix"):
            score_windows(model, bad, prefix_tokens=prefix, mesh=mesh)


def test_only_laws_that_are_not_stored_anyway_need_a_normalizer():
    schemes = [Scheme(), Scheme(top_k=40), Scheme(top_k=1, temperature=3.0), Scheme(top_k=7), Scheme(top_k=7)]
    assert sampling_laws([*schemes, Scheme(top_k=40, suffix_tokens=3), Scheme(temperature=2.0)]) == (
        Scheme(top_k=7),
        Scheme(temperature=2.0),
    )
