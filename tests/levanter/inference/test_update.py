"""`Engine.update`: other weights forget pages and prefixes, which belong to the weights that made them."""

import jax
import jax.numpy as jnp
import pytest
from helpers.llama_on_mesh import mappings_for, place, random_arrays, tiny_config
from helpers.tiny_engine import TinyEngine, observed

from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Flat
from levanter.inference.requests import Request, SamplingParams

ENGINE = TinyEngine(allocation="paged", page_size=4, share_prefixes=True, rows=2, prefill=((1, 8),), max_seq_len=48)
PROMPT = tuple((7 * n) % 250 + 3 for n in range(21))


def request(name: str) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return Request(id=name, tokens=PROMPT, params=params, seed=0, stop_ids=())


def other_weights():
    spec = MeshSpec.of(**dict(ENGINE.axes))
    config = tiny_config(num_heads=16, num_kv_heads=8, max_seq_len=48, gradient_checkpointing=False)
    arrays = {path: each.astype(jnp.float32) for path, each in random_arrays(config, seed=11).items()}
    return place(config, arrays, mappings_for(config, spec, heads=ENGINE.heads), spec.build(jax.devices()[:1]))


def text_of(engine, name: str) -> tuple[list[int], int]:
    seen = observed(engine, [request(name)])
    assert not seen.failed
    ((_, text),) = seen.texts.items()
    return text, seen.hits


def test_update_forgets_pages_and_prefixes():
    """A prefix of the last weights would give another text: it does where only the weights are replaced."""
    model = other_weights()
    fresh = ENGINE.engine()
    before, _ = text_of(fresh, "before")
    fresh.update(model)
    expected, hits = text_of(fresh, "after")
    assert hits == 0 and expected != before

    stale = ENGINE.engine()
    text_of(stale, "before")
    # The weights alone, without the pages: what an engine that forgets nothing would do.
    stale.device._flat_model = Flat.of(model)
    wrong, hits = text_of(stale, "after")
    assert hits == 1 and wrong != expected
    # From there on, an update gives the text of an engine that never had other weights.
    stale.update(model)
    assert text_of(stale, "again") == (expected, 0)
    # Prefixes are found again, now of these weights.
    assert text_of(stale, "once more") == (expected, 1)


def test_update_needs_an_idle_engine():
    engine = ENGINE.engine()
    engine.offer(request("running"))
    with pytest.raises(AssertionError, match="between texts"):
        engine.update(other_weights())
