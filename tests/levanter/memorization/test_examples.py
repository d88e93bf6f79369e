"""Prepared rows of different lengths score as each would alone."""

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, mappings_for, place, random_arrays, run_on, tiny_config

from haliax_ext.meshspec import MeshSpec
from levanter.memorization.examples import Examples
from levanter.memorization.results import Scores
from levanter.memorization.runner import BatchShape, score_batches, score_program

RNG = np.random.default_rng(0)
ROWS = [
    (RNG.integers(0, VOCAB, prompt + suffix).astype(np.int32), prompt)
    for prompt, suffix in [(7, 5), (7, 4), (3, 5), (1, 1), (9, 2), (2, 5), (7, 5)]
]
CONFIG, SPEC = tiny_config(), MeshSpec.of(data=2, model=2)
ARRAYS, MAPPINGS = random_arrays(CONFIG), mappings_for(CONFIG, SPEC)


def test_rows_are_aligned_at_their_ends():
    examples = Examples.of(ROWS)
    assert (len(examples), examples.positions, examples.suffix_tokens, examples.padded) == (7, 12, 5, True)
    tokens, padding = examples.take(np.arange(7)), examples.left_padding(np.arange(7))
    for (row, _), placed, left in zip(ROWS, tokens, padding, strict=True):
        np.testing.assert_array_equal(placed[left:], row)
        assert (placed[:left] == 0).all() and left == 12 - len(row)


def test_equal_rows_need_no_padding():
    assert not Examples.of([ROWS[0], ROWS[6]]).padded


def test_each_row_scores_as_it_would_alone(devices):
    examples = Examples.of(ROWS)
    shape = BatchShape(rows=4, positions=examples.positions, suffix=examples.suffix_tokens, padded=True)
    mesh = SPEC.build(devices[:4])
    model = place(CONFIG, ARRAYS, MAPPINGS, mesh)
    program = score_program(model, shape, mappings=MAPPINGS)
    found = examples.aligned(Scores.joined(list(score_batches(program, model, mesh, examples, shape))))
    assert len(found) == len(ROWS)
    for n, (tokens, prompt) in enumerate(ROWS):
        logits = (
            run_on(
                lambda model, ids: model.logits(model(ids).activations),
                CONFIG,
                ARRAYS,
                np.repeat(tokens[None], 2, 0),
                SPEC,
                MAPPINGS,
                devices,
            )
            .array[0]
            .astype(np.float64)
        )
        logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logp -= logits.max(-1, keepdims=True)
        suffix = len(tokens) - prompt
        chosen = np.array([logp[t - 1, tokens[t]] for t in range(prompt, len(tokens))])
        ranks = [(logp[t - 1] > logp[t - 1, tokens[t]]).sum() for t in range(prompt, len(tokens))]
        top = np.log(np.exp(-np.sort(-logp, -1)[:, :40]).sum(-1))[prompt - 1 : -1]
        np.testing.assert_allclose(found.logprobs[n, :suffix], chosen, atol=3e-5, rtol=0)
        np.testing.assert_array_equal(found.ranks[n, :suffix], ranks)
        np.testing.assert_allclose(found.top_lse[n, :suffix], top, atol=3e-5, rtol=0)
        # Beyond its end a row is certain, so nothing is added to its log p_z.
        assert all((array[n, suffix:] == 0).all() for array in found.arrays.values())


def test_a_row_without_prompt_or_continuation_is_named():
    with pytest.raises(ValueError, match=r"2 of 3 lack one \(row 1: 4 tokens, prompt 0, row 2: 4 tokens, prompt 4\)"):
        Examples.of([(np.arange(4), 2), (np.arange(4), 0), (np.arange(4), 4)])
    with pytest.raises(ValueError, match="0 of 0"):
        Examples.of([])
