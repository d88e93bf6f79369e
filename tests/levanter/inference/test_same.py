"""The same requests have the same texts: alone, among others, in any order, in any parts, on any mesh.

Texts of a run alone on one device are compared with those of all others. Nothing is to be decided by the last bits of a
number, so the two likeliest tokens of a greedy text are further apart than those at every place; of a sampled one the
noise decides, which depends on the request alone.
"""

import functools
import random
import sys

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB
from helpers.tiny_engine import GAP, Seen, TinyEngine, observed, together

from levanter.inference.requests import Request, SamplingParams

NEW = 24
LENGTHS = (1, 40, 5, 17, 60, 33, 16, 8, 29, 3, 52, 12, 21, 48, 7, 32)
SAMPLED = (
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "n": 2},
    {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 1.2, "repetition_penalty": 1.3},
)
COMMON = np.random.default_rng(99).integers(0, VOCAB, 44).tolist()
"""What every third prompt begins with, as far as it reaches."""


@functools.cache
def requests(draw: int = 0) -> tuple[Request, ...]:
    """16 requests: greedy ones, and one of each kind that is sampled; some begin alike.

    Args:
        draw: of the prompts.
    """
    found = []
    for n, length in enumerate(LENGTHS):
        own = np.random.default_rng(n + 100 * draw).integers(0, VOCAB, length).tolist()
        tokens = tuple([*COMMON, *own][:length] if n % 3 == 1 else own)
        how = {"temperature": 0.0, "logprobs": 2} if n % 4 else {**SAMPLED[n // 4], "logprobs": 0}
        params = SamplingParams(**{"max_tokens": NEW, **how})
        found.append(Request(id=str(n), tokens=tokens, params=params, seed=1000 + n))
    return tuple(found)


@functools.cache
def alone() -> Seen:
    """What each request gets where nobody else is."""
    engine = TinyEngine().engine()
    found = together([observed(engine, [request]) for request in requests()])
    assert not found.failed and {len(text) for text in found.texts.values()} == {NEW}
    assert len({tuple(text) for text in found.texts.values()}) == len(found.texts), "texts must differ"
    least = min(min(gaps) for gaps in found.gaps.values())
    assert least > GAP, f"two tokens are {least} apart: other prompts are needed"
    return found


def check(asked: TinyEngine, given=None) -> Seen:
    found, expected = observed(asked.engine(), requests() if given is None else given), alone()
    assert not found.failed
    assert found.texts == expected.texts
    for of, logprobs in found.logprobs.items():
        np.testing.assert_allclose(logprobs, expected.logprobs[of], atol=2e-4, rtol=0)
    return found


def axes(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


PAGED = TinyEngine(allocation="paged", share_prefixes=True)


def test_texts_are_the_same_among_others_on_a_mesh_in_pages_that_are_shared_and_too_few(devices):
    """A representative of everything below."""
    del devices
    found = check(
        TinyEngine(
            axes=axes(data=2, model=2, group=2),
            heads=("model", "group"),
            rows=8,
            allocation="paged",
            pages=2 * 44,
            share_prefixes=True,
            steps=3,
            prefill=((2, 8), (1, 24)),
        )
    )
    assert found.hits > 0 and found.comebacks > 0


def test_prompts_that_begin_alike_are_the_same_and_computed_once(devices):
    """Also behind the end of the first, and by choices of one request; not where a prompt is counted."""
    del devices
    engine = PAGED.engine()
    own = [request for n, request in enumerate(requests()) if n % 3 == 1]
    first = observed(engine, own[1:2])
    again = observed(engine, own)
    expected = alone().texts
    assert first.texts | again.texts == {of: expected[of] for of in (first.texts | again.texts)}
    assert again.hits >= len(own)
    greedy = own[3]
    counted = SamplingParams(temperature=0.0, max_tokens=2, repetition_penalty=1.1)
    found = observed(engine, [Request(id="counted", tokens=greedy.tokens, params=counted, seed=0)])
    assert found.hits == 0 and found.computed == len(greedy.tokens)
    choices = SamplingParams(temperature=0.0, max_tokens=NEW, n=3)
    tokens = (VOCAB - 1, *greedy.tokens)
    found = observed(engine, [Request(id="three", tokens=tokens, params=choices, seed=0)])
    assert len(set(map(tuple, found.texts.values()))) == 1 and len(found.texts) == 3
    full = (len(tokens) - 1) // PAGED.page_size * PAGED.page_size
    assert found.hits == 2 and found.computed == 3 * len(tokens) - 2 * full


@pytest.mark.slow
@pytest.mark.parametrize("allocation", ["fixed", "paged"])
def test_texts_are_the_same_in_any_order(allocation, devices):
    del devices
    asked = TinyEngine(allocation=allocation)
    check(asked)
    check(asked, requests()[::-1])
    for seed in range(3):
        shuffled = list(requests())
        random.Random(seed).shuffle(shuffled)
        check(asked, shuffled)
        check(PAGED, shuffled)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 1, "kv_heads": 16},
        pytest.param({"rows": 3, "cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"rows": 1, "steps": 8, "allocation": "paged"}, marks=pytest.mark.slow),
        pytest.param({"rows": 3, "kv_heads": 16, "steps": 8}, marks=pytest.mark.slow),
        pytest.param({"rows": 2, "kv_heads": 16, "axes": axes(data=2, model=2)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_joins_a_lone_row_or_query_in_a_product_changes_no_text(changes, devices):
    """A head of keys for each query head, a row for each shard, or both: what a TPU's matrix unit is for is made; and
    what is new in a cache is written as Programs for TPUs do, an int8 cache's scales in pieces."""
    del devices
    given = requests()[:4]
    expected = observed(TinyEngine(**changes).engine(), given)
    found = observed(TinyEngine(**changes, matrix_unit=True).engine(), given)
    assert not found.failed and found.texts == expected.texts and len(found.texts) >= 4
    for of, logprobs in found.logprobs.items():
        np.testing.assert_allclose(logprobs, expected.logprobs[of], atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"prefill": ((1, 8),)},
        {"prefill": ((1, 64),)},
        {"prefill": ((4, 4), (1, 20))},
        {"prefill": ((8, 8), (2, 32), (1, 96))},
        {"rows": 4},
        {"rows": 1},
        {"steps": 8},
        {"steps": 8, "rows": 3, "prefill": ((1, 5),)},
        {"behind": 0},
        {"behind": 6},
        {"max_seq_len": 128},
        {"allocation": "paged", "page_size": 1},
        {"allocation": "paged", "page_size": 96},
    ],
    ids=str,
)
def test_texts_are_the_same_in_any_parts_rows_and_steps(changes, devices):
    del devices
    check(TinyEngine(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("pages", [24, 30, 60])
def test_texts_are_the_same_after_giving_way(pages, steps, share_prefixes, devices):
    """Four prompts at a time: one by one, a row of eight tokens a call would end before so many are there that 60 pages
    are too few."""
    del devices
    asked = TinyEngine(allocation="paged", pages=pages, steps=steps, share_prefixes=share_prefixes, prefill=((4, 16),))
    found = check(asked)
    assert found.comebacks > 0
    assert not share_prefixes or found.hits > 0


MESHES = [
    *(dict(axes=axes(data=1, model=ways)) for ways in (2, 4, 8)),
    dict(axes=axes(data=8, model=1)),
    dict(axes=axes(data=2, model=4)),
    dict(axes=axes(data=2, model=2, group=2), heads=("model", "group")),
]
REPEATED = [
    dict(axes=axes(data=1, model=2, group=4), heads=("model", "group"), kv_heads=2),
    dict(axes=axes(data=2, model=2, group=2), heads=("model", "group"), kv_heads=2),
    dict(axes=axes(data=1, model=1, group=8), heads=("group",), kv_heads=1),
]
"""Keys and values that are on several devices."""
DRAW = 5
"""Of prompts that leave a gap at every place, with one head of keys and with two: 0.0033 and 0.0027 at least."""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("allocation", ["fixed", "paged"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_texts_are_the_same_on_every_mesh(mesh, allocation, steps, devices):
    del devices
    check(TinyEngine(**mesh, allocation=allocation, share_prefixes=allocation == "paged", steps=steps))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", REPEATED, ids=str)
def test_texts_are_the_same_where_keys_are_on_several_devices(mesh, devices):
    del devices
    one = observed(TinyEngine(kv_heads=mesh["kv_heads"]).engine(), requests(DRAW))
    least = min(min(gaps) for gaps in one.gaps.values())
    assert least > GAP, f"two tokens are {least} apart: another draw is needed"
    assert TinyEngine(**mesh).cache().repeated > 1
    found = observed(TinyEngine(**mesh, allocation="paged").engine(), requests(DRAW))
    assert found.texts == one.texts and not found.failed
    for of, logprobs in found.logprobs.items():
        np.testing.assert_allclose(logprobs, one.logprobs[of], atol=2e-4, rtol=0)


@pytest.mark.slow
def test_in_bfloat16_log_probabilities_differ_by_little(devices):
    """Texts may part where two tokens are as likely; up to there, how far numbers are apart is printed."""
    del devices
    engine = TinyEngine(dtype="bfloat16").engine()
    one = together([observed(engine, [request]) for request in requests()])
    for asked in (
        TinyEngine(dtype="bfloat16"),
        TinyEngine(dtype="bfloat16", allocation="paged", share_prefixes=True, steps=8, prefill=((2, 8), (1, 24))),
        TinyEngine(dtype="bfloat16", axes=axes(data=2, model=2, group=2), heads=("model", "group")),
    ):
        found, largest, alike = observed(asked.engine(), requests()), 0.0, 0
        for of, text in one.texts.items():
            same = next(
                (n for n, pair in enumerate(zip(text, found.texts[of], strict=True)) if len(set(pair)) > 1), NEW
            )
            apart = np.abs(np.subtract(one.logprobs[of][:same], found.logprobs[of][:same]))
            largest, alike = max(largest, float(apart.max(initial=0))), alike + (same == NEW)
        sys.stdout.write(
            f"{asked.axes}, {asked.allocation}: {alike} of {len(one.texts)} texts alike, {largest:.4f} nats\n"
        )
        assert largest < 0.25
