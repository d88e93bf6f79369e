"""The search for rows, meshes and caches: what fits, which goal prefers what, and when compilers are asked."""

from dataclasses import replace

import pytest
from helpers.seventy_rows import SEVENTY

from levanter.hardware import parse_accelerator
from levanter.plan.search.decode import (
    TRIED,
    DecodeLayout,
    decode_meshes,
    decode_search_to_json,
    fragment,
    render_decode_search,
    search_decode,
)

pytestmark = pytest.mark.quick

GIB = 1 << 30
V5E, V5E_16, V6E = (parse_accelerator(name) for name in ("v5e-8", "v5e-16", "v6e-8"))
PLAIN = replace(SEVENTY, dtype="bfloat16", temp_bytes=0)


def search(served, pod, goal, compile_layout=None):
    return search_decode(served, pod, goal, limit=pod.hbm_bytes, compile_layout=compile_layout)


def test_a_layout_has_the_bytes_of_its_shards():
    """On four devices a shard: weights twice as large, and a row has two heads of keys and values."""
    four = SEVENTY.laid_out(shards=2, kv_ways=4, group=1)
    assert four.devices == 8 and four.weights.total == pytest.approx(2 * SEVENTY.weights.total, rel=1e-6)
    assert four.bytes_per_row(8192) == 2 * SEVENTY.bytes_per_row(8192)
    wide = SEVENTY.laid_out(shards=1, kv_ways=8, group=2)
    # Half of all, but for the projections to keys and values, which are whole over a group.
    repeated = 2 * 80 * 8192 * 1024 // 8 // 2
    assert wide.devices == 16 and wide.weights.total == pytest.approx(SEVENTY.weights.total / 2 + repeated, rel=1e-6)
    assert wide.bytes_per_row(8192) == SEVENTY.bytes_per_row(8192) and wide.repeated == 2


def test_layouts_divide_the_devices_and_the_heads():
    found = {(each.shards, each.kv_ways, each.repeated) for each in decode_meshes(SEVENTY, devices=16)}
    # Query heads are cut further only where heads of keys and values are cut as far as they go.
    assert found == {(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1), (1, 8, 2)}


def test_most_rows_are_those_of_the_smaller_cache():
    found = search(PLAIN, V5E, "max_rows")
    assert found.best is not None
    assert found.best.rows == found.best.most == 46
    assert found.best.candidate.sizes == "data 1 × model 8"
    neighbours = dict(found.neighbours)
    assert neighbours["data 2 × model 4"].startswith("no row fits: ")
    assert neighbours[f"{found.best.rows + 1} rows"].endswith("too much a chip")
    assert neighbours["rows of 4,096 positions"] == "93 fit"


def test_the_shortest_time_a_token_reads_weights_with_most_chips():
    found = search(replace(SEVENTY, automatic=True), V5E_16, "latency_ms")
    assert found.best is not None
    assert found.best.rows == found.best.served.shards == 1
    assert found.best.candidate.sizes == "data 1 × model 8 × group 2"
    # 4.04 GiB of weights at 80 % of 819 GB/s, and 160 sums over sixteen chips.
    assert found.best.seconds > SEVENTY.weights.integers / 2 / 0.8 / 819e9
    assert found.best.seconds < 1.5 * SEVENTY.weights.integers / 2 / 0.8 / 819e9


def test_rows_that_are_asked_for_are_not_fewer():
    found = search(replace(SEVENTY, rows=40, temp_bytes=0), V5E, "latency_ms")
    assert found.best is not None and found.best.rows == 40
    assert search(replace(SEVENTY, rows=64, temp_bytes=0), V5E, "latency_ms").best is None


def test_most_tokens_in_a_second_weigh_rows_against_their_time():
    found = search(SEVENTY, V6E, "tokens_per_second")
    assert found.best is not None
    every = [each for each in decode_meshes(SEVENTY, devices=8)]
    assert found.considered == len(every)
    for each in every:
        other = search(each, V6E, "max_rows").best
        assert other is None or found.best.rate >= other.rate


def test_compilers_are_asked_until_a_layout_fits():
    asked: list[DecodeLayout] = []

    def second(layout: DecodeLayout) -> tuple[bool, str]:
        asked.append(layout)
        return len(asked) == 2, f"answer {len(asked)}"

    found = search(SEVENTY, V5E_16, "tokens_per_second", second)
    assert len(asked) == 2 and found.best is asked[1]
    assert [said for _, said in found.tried] == ["answer 1", "answer 2"]
    assert asked[0].rate >= asked[1].rate
    never = search(SEVENTY, V5E_16, "tokens_per_second", lambda layout: (False, "too large"))
    assert never.best is None and len(never.tried) <= TRIED
    assert render_decode_search(never, target="v5e-16").endswith("nothing fits")
    assert decode_search_to_json(never, target="v5e-16")["best"] is None


def test_the_answer_is_yaml_to_paste():
    import yaml

    found = search(SEVENTY, V5E_16, "max_rows")
    assert found.best is not None
    document = yaml.safe_load(fragment(found))
    assert document["inference"] == {"max_rows": found.best.rows, "cache_dtype": found.best.served.dtype}
    assert document["trainer"]["mesh"] == found.best.candidate.mesh_options()
    text = render_decode_search(found, target="v5e-16")
    assert text.startswith("search on v5e-16 for max_rows: ") and "why not its neighbours:" in text
    assert decode_search_to_json(found, target="v5e-16")["best"]["trainer.mesh"] == document["trainer"]["mesh"]
