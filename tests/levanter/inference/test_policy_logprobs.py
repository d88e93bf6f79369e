"""`policy_logprob` of the engine is what the scorer gives for the same tokens at the same temperature."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import abstract_model, random_arrays, tiny_config
from helpers.tiny_engine import TinyEngine

from haliax_ext.abstract import with_arrays
from levanter.inference.requests import Request, SamplingParams, Token
from levanter.models.scoring import token_logprobs

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9])
TEMPERATURES = (0.6, 1.0, 1.5)
ENGINES = {
    "fixed": TinyEngine(rows=4, steps=3, policy_logprobs=True),
    "paged": TinyEngine(rows=4, allocation="paged", pages=40, policy_logprobs=True),
}


@pytest.fixture(scope="module")
def model():
    config = tiny_config(num_heads=16, num_kv_heads=8, max_seq_len=96, gradient_checkpointing=False)
    return with_arrays(abstract_model(config), {k: jnp.asarray(v) for k, v in random_arrays(config, seed=5).items()})


def scored(model, sequences, temperature):
    """By one forward pass over prompts and answers, all padded to one length."""
    Batch, Pos = Axis("batch", 6), Axis("position", 24)
    tokens, targets = np.zeros((6, 24), np.int32), np.full((6, 24), -1, np.int32)
    for row, (prompt, ids) in enumerate(sequences):
        tokens[row, : len(prompt) + len(ids)] = [*prompt, *ids]
        targets[row, len(prompt) - 1 : len(prompt) - 1 + len(ids)] = ids

    @jax.jit
    def logprobs(model, tokens, targets):
        return token_logprobs(model, tokens, targets, temperature=temperature)

    named = [hax.named(jnp.asarray(x), (Batch, Pos)) for x in (tokens, targets)]
    values = np.asarray(logprobs(model, *named).array)
    return [values[row, len(p) - 1 : len(p) - 1 + len(ids)] for row, (p, ids) in enumerate(sequences)]


@pytest.mark.parametrize("name", ENGINES)
def test_policy_logprobs_are_those_of_the_scorer(model, name):
    """At three temperatures in one batch, and of a greedy row at temperature 1, whatever else was requested."""
    params = [
        SamplingParams(temperature=t, max_tokens=8, seed=n, logprobs=None if n % 2 else 0)
        for n, t in enumerate((*TEMPERATURES, 0.0))
    ]
    requests = {
        f"{n}-{m}": Request(id=f"{n}-{m}", tokens=tuple(prompt), params=one, seed=10 * n + m)
        for n, prompt in enumerate(PROMPTS)
        for m, one in enumerate(params)
    }
    answers: dict[str, list[Token]] = {}
    for event in ENGINES[name].engine().run(list(requests.values())):
        if isinstance(event, Token):
            answers.setdefault(event.of.request, []).append(event)
    assert answers.keys() == requests.keys()
    for temperature in TEMPERATURES:
        # Greedy rows are compared at temperature 1.
        wanted = (temperature, 0.0) if temperature == 1.0 else (temperature,)
        chosen = [id_ for id_ in answers if requests[id_].params.temperature in wanted]
        sequences = [(requests[id_].tokens, [token.id for token in answers[id_]]) for id_ in chosen]
        for id_, expected in zip(chosen, scored(model, sequences, temperature), strict=True):
            tokens = answers[id_]
            np.testing.assert_allclose([token.policy_logprob for token in tokens], expected, rtol=0, atol=1e-4)
            if requests[id_].params.logprobs is not None and temperature == 1.0:
                # In the model's own distribution both are the same number.
                np.testing.assert_allclose([token.logprob for token in tokens], expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_programs_without_them_give_none():
    engine = TinyEngine(rows=4, steps=3).engine()
    request = Request(id="a", tokens=(1, 2), params=SamplingParams(temperature=0.7, max_tokens=2, logprobs=0), seed=1)
    assert all(token.policy_logprob is None for token in engine.run([request]) if isinstance(token, Token))
