"""What a run that generates text holds and moves, against arithmetic by hand: Llama 3.1 70B on eight chips of v5e."""

from dataclasses import replace

import pytest
from helpers.seventy_rows import ATTENTION, EMBED, HEAD, HEADS, LAYERS, PROJECTIONS, SCALES, SEVENTY

from levanter.hardware import parse_accelerator
from levanter.inference.capacity import WeightBytes
from levanter.inference.scheduler import Schedule

pytestmark = pytest.mark.quick

GIB = 1 << 30
V5E = parse_accelerator("v5e-8")
CHIP = {"bandwidth": V5E.hbm_bandwidth, "peak": V5E.peak_flops()}


def test_weights_of_70b():
    assert pytest.approx(69.5, abs=0.05) == PROJECTIONS / 1e9
    # 69.5 GB of integers and 2.1 GB of a bfloat16 table over eight chips.
    assert SEVENTY.weights.total / GIB == pytest.approx(8.34, abs=0.01)


def test_a_row_of_8192_positions():
    assert SEVENTY.bytes_per_row(8192, "bfloat16") == 0.3125 * GIB
    assert SEVENTY.bytes_per_row(8192, "int8") == 0.15625 * GIB * (1 + 1 / 64)
    assert SEVENTY.bytes_per_row(8192) * 46 == SEVENTY.cache_bytes
    assert SEVENTY.bytes_per_row(1, "float32") == LAYERS * 2 * 128 * 4


def test_rows_that_fit_eight_chips_of_v5e():
    """Before anything that Programs make: 23 rows in bfloat16, 46 in int8."""
    limit = V5E.hbm_bytes
    assert (limit - SEVENTY.weights.total) / (0.3125 * GIB) == pytest.approx(23.7, abs=0.1)
    assert SEVENTY.fitting(limit, 8192, "bfloat16") == 23
    assert SEVENTY.fitting(limit, 8192, "int8") == 46
    assert SEVENTY.fitting(limit, 2048, "int8") == 46 * 4 + 2
    assert SEVENTY.fitting(limit, 131_072, "int8") == 2
    assert SEVENTY.fitting(8 * GIB, 2048) == 0
    # A quarter of a GiB for Programs is a row and a half.
    assert SEVENTY.fitting(limit, 8192, "int8", temp_bytes=GIB // 4) == 45
    # Two shards of the rows hold half of them each.
    assert replace(SEVENTY, shards=2).fitting(limit, 8192) == 92


def test_what_a_row_keeps_beside_its_cache_counts():
    counting = replace(SEVENTY, state_bytes=SEVENTY.bytes_per_row(8192))
    assert counting.fitting(V5E.hbm_bytes, 8192) == 23


def test_the_floor_of_a_step_of_32_rows():
    """8.08 GiB of weights that multiply, and 32 rows of 162.5 MiB, at 819 GB/s: 17.2 ms of reading."""
    floor = SEVENTY.decode_floor(32, 8192, **CHIP)
    assert floor.seconds == pytest.approx(17.2e-3, abs=0.1e-3)
    assert floor.weights == pytest.approx((69.5e9 / 8 + 4 * SCALES / 8 + 2 * 161 * EMBED) / 819e9, rel=1e-3)
    assert floor.cache == pytest.approx(32 * 0.15869 * GIB / 819e9, rel=1e-4)
    assert floor.binds == "weights"
    assert SEVENTY.decode_floor(46, 32_768, **CHIP).binds == "cache"
    assert replace(SEVENTY, weight_flops=1e14).decode_floor(32, 8192, **CHIP).binds == "FLOPs"
    assert SEVENTY.decode_floor(32, 8192, **CHIP, links=0.1).binds == "links"
    # Of two shards, each reads its own rows, and the fuller one is waited for.
    halves = replace(SEVENTY, shards=2)
    assert halves.decode_floor(3, 8192, **CHIP).cache == SEVENTY.decode_floor(2, 8192, **CHIP).cache


@pytest.mark.parametrize(("name", "rows"), [("v5e-8", 120), ("v6e-8", 280), ("v4-16", 115)])
def test_rows_from_which_products_take_longer_than_weights(name, rows):
    pod = parse_accelerator(name)
    found = replace(SEVENTY, devices=pod.devices).compute_bound_rows(bandwidth=pod.hbm_bandwidth, peak=pod.peak_flops())
    assert found == pytest.approx(rows, rel=0.015)


def test_a_prompt_of_8192_tokens_takes_three_quarters_of_a_second_at_peak():
    floor = SEVENTY.prefill_floor(1, 8192, **CHIP)
    by_hand = 8192 * (2 * 69.5e9 + 4 * LAYERS * HEADS * HEAD * 8193 / 2) / (8 * 197e12)
    assert floor.seconds == pytest.approx(by_hand, rel=1e-3) and floor.binds == "FLOPs"
    assert floor.seconds == pytest.approx(0.77, abs=0.02)
    assert SEVENTY.prefill_floor(1, 64, **CHIP).binds == "weights"


def test_the_calls_of_a_prompt():
    assert SEVENTY.calls_of_prompt(512) == ("prefill_1x512",)
    assert SEVENTY.calls_of_prompt(1100) == ("prefill_1x512", "prefill_1x512", "prefill_4x128")
    assert SEVENTY.calls_of_prompt(129) == ("prefill_4x128", "prefill_4x128")
    assert SEVENTY.calls_of_prompt(257) == ("prefill_1x512",)
    assert SEVENTY.calls_of_prompt(1) == ("prefill_4x128",)


def test_layers_with_a_window_keep_all_positions_and_read_few():

    def flops(length: int) -> int:
        """4 FLOPs a pair: 60 query features with a window of 1,024 positions, and 20 without."""
        return 4 * sum(60 * min(n, 1024) + 20 * n for n in range(1, length + 1))

    mixers = ((replace(ATTENTION, window=1024), 60), (ATTENTION, 20))
    windowed = replace(SEVENTY, mixers=mixers, sequence_flops=flops)
    assert windowed.bytes_per_row(8192) == SEVENTY.bytes_per_row(8192)
    assert windowed.bytes_per_row(8192, seen=True) == 260 * (60 * 1024 + 20 * 8192)
    floor = replace(windowed, weight_flops=0.0, devices=1).decode_floor(1, 8192, bandwidth=1.0, peak=1.0)
    assert floor.flops == 4 * (60 * 1024 + 20 * 8192)
    assert floor.cache == 260 * (60 * 1024 + 20 * 8192)


def test_of_experts_those_are_read_that_tokens_go_to():
    mixture = replace(SEVENTY, weights=WeightBytes(others=800, experts=640), expert_count=(8, 2))
    assert mixture.decode_floor(1, 0, bandwidth=1.0, peak=1e30).weights == 800 - 640 * 3 / 4
    assert mixture.decode_floor(2, 0, bandwidth=1.0, peak=1e30).weights == 800 - 640 * (3 / 4) ** 2


def test_fewer_rows_run_in_the_smallest_program_that_has_room():
    several = replace(SEVENTY, decode={1: "decode_1", 8: "decode_8", 46: "decode_46"})
    assert [several.decoding(rows) for rows in (1, 2, 8, 9, 46)] == [
        *("decode_1", "decode_8", "decode_8", "decode_46", "decode_46")
    ]


def test_a_prompt_is_cut_as_the_schedule_cuts_it():
    buckets = {"prefill_8x32": (8, 32), "prefill_4x128": (4, 128), "prefill_1x512": (1, 512)}
    served, names = replace(SEVENTY, prefill=buckets), {bucket: name for name, bucket in buckets.items()}
    schedule = Schedule(rows=8, pages=64, page_size=128, context=1024, buckets=tuple(names))
    for tokens in range(1, 1025):
        calls, left = [], tokens
        while left > 0:
            bucket = schedule.bucket_for(left)
            calls.append(names[bucket])
            left -= bucket[1]
        assert served.calls_of_prompt(tokens) == tuple(calls)
