"""Step times and model FLOPs, against published figures and hand sums."""

from dataclasses import replace

import numpy as np
import pytest

from haliax_ext.hlo import AxisSpan, Collective, CompiledFigures, Kernel, Scope, Shape
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import parse_accelerator
from levanter.layers.attention.splash_blocks import SplashBlocks
from levanter.layers.attention.splash_tables import Rule, Settings, static_kernel
from levanter.plan.calibration import KERNEL_EFFICIENCY, kernel_efficiency
from levanter.plan.comms import Network
from levanter.plan.report.timing import suspicions
from levanter.plan.step_time_model import (
    CYCLE_SCALE,
    kernel_flops,
    mfu,
    step_time,
)

MESH = MeshSpec.of(data=16, model=8)
POD = parse_accelerator("v4-256")
NETWORK = Network.of(MESH, POD)
SCALE = CYCLE_SCALE["v4"]


def figures(**changes: object) -> CompiledFigures:
    values: dict = {
        "cycles": {Scope("layers.mlp"): 1_050_000_000},
        "has_cycles": True,
        "hbm_bytes": 0,
        "collectives": (),
        "kernels": (),
        "unestimated": {},
        "unknown": (),
    }
    return CompiledFigures(**(values | changes))


def gather(nbytes: int, *, times: int = 1, hidden: int = 0, axis: str = "model", size: int = 8) -> Collective:
    return Collective(
        "all-gather", nbytes, times, size, (AxisSpan(axis, size, size),), "ici", Scope("layers"), hidden, f"ag.{axis}"
    )


def test_published_mfu_of_llama2_70b_on_v5p():
    """692 tokens/s/chip at sequence 4096 is published as 65.4 % MFU on 512 chips (matmuls and half of attention)."""
    pod = parse_accelerator("v5p-1024")
    # Forward and backward of one token: 6·N for the matmuls and 12·L·H·head_size·S for attention to every position.
    matmul, attention = 6.0 * 68_713_185_280, 12.0 * 80 * 64 * 128 * 4096
    tokens = 1024 * 4096
    step = tokens / (692 * pod.chips)
    assert mfu((matmul + attention / 2) * tokens, accelerator=pod, seconds=step) == pytest.approx(0.654, abs=0.01)
    assert mfu((matmul + attention) * tokens, accelerator=pod, seconds=step) > 0.654


def test_cycles_over_the_clock():
    step = step_time(figures(), NETWORK)
    # The calibration makes v4's cycles shorter than the compiler states them, which bound the high end.
    assert (step.low, step.expected, step.high, step.exposed) == (SCALE, SCALE, 1.0, 0.0)
    assert step.bound_by == "compute"


def test_cycles_of_a_generation_that_is_not_calibrated_are_taken_as_stated():
    pod = parse_accelerator("v5e-16")
    assert pod.generation.name not in CYCLE_SCALE
    step = step_time(figures(), Network.of(MeshSpec.of(data=16), pod))
    assert step.expected == pytest.approx(1.05 / 1.5)
    # And the range is as wide as what is known of other generations.
    assert (step.low, step.high) == pytest.approx((0.7 * step.expected, 1.3 * step.expected))
    assert step.calibration.reason.startswith("not calibrated: no published run on v5litepod")


def test_a_time_that_is_not_calibrated_is_never_above_peak():
    pod = parse_accelerator("v5e-16")
    flops = 0.65 * 16 * pod.peak_flops()
    step = step_time(figures(), Network.of(MeshSpec.of(data=16), pod), model_flops=flops)
    assert step.low == pytest.approx(0.65)


def test_the_expected_time_is_never_below_what_peak_allows():
    flops = 1.5 * 128 * 275e12
    step = step_time(figures(), NETWORK, model_flops=flops)
    assert step.expected == step.low == step.high == pytest.approx(1.5)


def test_a_synchronous_collective_is_exposed_and_an_overlapped_one_is_not():
    nbytes = 9_000_000_000  # 0.0875 s over an 8-ring of 45 GB/s links, both ways
    alone = step_time(figures(collectives=(gather(nbytes, times=10),)), NETWORK)
    assert alone.exposed == pytest.approx(0.875, rel=1e-3)
    assert (alone.low, alone.high) == (SCALE, pytest.approx(1.875, rel=1e-3))
    assert alone.expected == pytest.approx(SCALE + 0.875, rel=1e-3)
    half = step_time(figures(collectives=(gather(nbytes, times=10, hidden=int(0.05 * 1.05e9)),)), NETWORK)
    assert half.exposed == pytest.approx(0.375, rel=1e-3)
    whole = step_time(figures(collectives=(gather(nbytes, times=10, hidden=10**9),)), NETWORK)
    assert (whole.exposed, whole.high) == (0.0, 1.0)


def test_the_busiest_links_bound_the_low_end():
    both = (gather(9_000_000_000, times=20), gather(9_000_000_000, times=2, axis="data", size=16))
    step = step_time(figures(collectives=both), NETWORK)
    assert [link.over for link in step.links] == ["model", "data"]
    assert step.bound_by == "links"
    assert step.low == pytest.approx(1.75, rel=1e-3)


def test_memory_and_peak_bound_the_low_end():
    assert step_time(figures(hbm_bytes=2_400_000_000_000), NETWORK).low == pytest.approx(2.0)
    # 3 s of all chips at peak: a time below it would claim more than 100 % MFU.
    flops = 3 * 128 * 275e12
    step = step_time(figures(), NETWORK, model_flops=flops)
    assert (step.low, step.bound_by) == (pytest.approx(3.0), "peak")
    assert mfu(flops, accelerator=POD, seconds=step.low) <= 1.0


def kernel(name: str, *, seq: int = 8192, block: int = 512) -> Kernel:
    blocks = seq // block
    query, key = Shape("bf16", (2, 32, seq, 128)), Shape("bf16", (2, 8, seq, 128))
    grid = Shape("s8", (1, blocks, blocks))
    return Kernel(name, 32, (grid, grid, query, key, key), (query,), Scope("self_attn"))


@pytest.mark.parametrize(
    ("name", "matmuls"),
    [
        ("splash_mha_fwd_residuals", 2),
        ("splash_mha_dq_no_residuals", 3),
        ("splash_mha_dkv_no_residuals", 4),
        ("splash_mqa_fwd_no_residuals", 2),
    ],
)
def test_attention_kernels_by_counting_blocks(name, matmuls):
    blocks = 8192 // 512
    visited = sum(1 for q in range(blocks) for k in range(blocks) if k <= q)
    by_hand = 2 * matmuls * 2 * 32 * visited * 512 * 512 * 128
    assert kernel_flops(kernel(name), causal=True) == by_hand
    assert kernel_flops(kernel(name), causal=False) == 2 * matmuls * 2 * 32 * 8192 * 8192 * 128


@pytest.mark.parametrize("block", [512, 1024])
@pytest.mark.parametrize("window", [None, 700, 2048])
@pytest.mark.parametrize(("name", "matmuls"), [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_flops_follow_from_the_tables_that_our_kernels_are_given(block, window, name, matmuls):
    """Against the mask itself, block by block: a block with one visible pair costs as much as a full one."""
    seq, blocks = 8192, SplashBlocks(block=block, compute=512, dq=block, padded=8192)
    made = static_kernel(
        Rule(is_causal=True, window=window),
        queries=seq,
        keys=seq,
        offset=0,
        num_shards=1,
        settings=Settings(blocks=blocks),
    )
    info = {"fwd": made.fwd_mask_info, "dq": made.dq_mask_info, "dkv": made.dkv_mask_info}[name]
    table = Shape(info.data_next.dtype.name.replace("int", "s"), info.data_next.shape)
    query, key = Shape("bf16", (3, 8, seq, 64)), Shape("bf16", (3, 2, seq, 64))
    found = Kernel(f"splash_mha_{name}_no_residuals", 1, (table, table, query, key, key), (query,), Scope("x"))
    distance = np.arange(seq)[:, None] - np.arange(seq)[None, :]
    seen = (distance >= 0) & (distance < (window or seq))
    visited = seen.reshape(seq // block, block, seq // block, block).any(axis=(1, 3)).sum()
    assert kernel_flops(found, causal=True) == pytest.approx(2 * matmuls * 3 * 8 * visited * block**2 * 64)


def test_the_last_part_of_a_sequence_visits_most():
    """Queries cut in four over the mesh, keys whole: the others wait for the last quarter."""
    seq, block = 4096, 512
    table = Shape("s8", (1, 2, 8))
    query, key = Shape("bf16", (4, seq // 4, 128)), Shape("bf16", (4, seq, 128))
    part = Kernel("splash_mha_fwd_residuals", 1, (table, table, query, key, key), (query,), Scope("x"))
    visited = sum(1 for q in (6, 7) for k in range(8) if k <= q)
    assert kernel_flops(part, causal=True) == 2 * 2 * 4 * visited * block**2 * 128


def test_one_kernel_for_all_gradients_is_told_by_what_it_makes():
    name, shape = "splash_mha_dkv_no_residuals", kernel("x").results[0]
    pieces = Shape("bf16", (2, 16, *shape.sizes[1:]))
    scratch = Shape("f32", (2, 512, 128))  # Of each row: the kernel's sums on their way are among its results.
    both = replace(kernel(name), results=(scratch, scratch, shape, shape))
    fused = replace(kernel(name), results=(scratch, scratch, scratch, pieces, shape, shape))
    assert kernel_flops(fused, causal=True) == 5 / 4 * kernel_flops(both, causal=True)


def test_a_kernel_hides_keys_that_travel_and_each_second_of_it_once():
    attends = replace(kernel("splash_mha_fwd_residuals"), times=1)
    seconds = kernel_flops(attends, causal=True, attended=0.5) / 275e12 / KERNEL_EFFICIENCY
    on_its_way = NETWORK.collective_seconds(gather(1 << 30))

    def exposed(attended, *hidden_by):
        each = [
            replace(gather(1 << 30, times=3), hidden_by=tuple((name, attends) for name in names)) for names in hidden_by
        ]
        return step_time(figures(collectives=tuple(each)), NETWORK, attended=attended).exposed

    assert 0 < seconds < on_its_way
    assert exposed(None, ["a"]) == pytest.approx(3 * on_its_way)
    assert exposed(0.5, ["a"]) == pytest.approx(3 * (on_its_way - seconds))
    assert exposed(0.5, ["a"], ["a"]) == pytest.approx(3 * (2 * on_its_way - seconds))
    assert exposed(0.5, ["a"], ["b"]) == pytest.approx(3 * 2 * (on_its_way - seconds))
    assert exposed(0.5, list("abcdefghijklmnopqrstuvwxyz")) == pytest.approx(max(0.0, 3 * (on_its_way - 26 * seconds)))


def test_kernels_widen_the_range_and_unknown_ones_are_named():
    known = kernel("splash_mha_fwd_residuals")
    stranger = Kernel("my_kernel", 3, (), (), Scope("x"))
    step = step_time(figures(kernels=(known, stranger), unestimated={"fft": 2}), NETWORK)
    at_peak = 32 * kernel_flops(known, causal=True) / 275e12
    assert step.low == pytest.approx(SCALE + at_peak)
    assert step.expected == pytest.approx(SCALE + at_peak / KERNEL_EFFICIENCY)
    assert step.high == pytest.approx(1.0 + at_peak / KERNEL_EFFICIENCY)
    assert any("my_kernel (3 executions)" in sentence for sentence in step.unknown)
    assert any("2 executions of fft" in sentence for sentence in step.unknown)


def test_wide_heads_keep_the_matrix_units_busier():
    narrow = kernel("splash_mha_fwd_residuals")
    wide = replace(
        narrow,
        operands=tuple(replace(s, sizes=(*s.sizes[:-1], 256)) if s.dtype == "bf16" else s for s in narrow.operands),
    )
    for each, share in ((narrow, KERNEL_EFFICIENCY), (wide, 0.80)):
        step = step_time(figures(kernels=(each,)), NETWORK)
        assert step.kernels_at_peak == pytest.approx(each.times * kernel_flops(each, causal=True) / 275e12)
        assert step.kernels_expected == pytest.approx(step.kernels_at_peak / share)


PUBLISHED_ON_V5P_128 = {
    # Positions: sequences a step, seconds. Llama 3.1 8B with 16 heads of 256 features (MaxText, 64 chips).
    65_536: (32, 10.25),
    262_144: (8, 26.31),
    1_048_576: (2, 90.3),
    2_097_152: (2, 357.7),
    4_194_304: (2, 1373.7),
}


def test_the_share_of_peak_of_wide_heads_is_what_published_runs_of_64k_and_256k_give():
    """Two runs set it, the longer ones test it: within 3 %, the rest of a step in proportion to its tokens."""

    def attention(positions: int) -> float:
        """Seven products over the causal half of the pairs."""
        rows, _ = PUBLISHED_ON_V5P_128[positions]
        products = 7 * 2 * rows * positions**2 / 2 * 16 * 256 * 32
        return products / (64 * 459e12)

    at_peak, seconds = (
        longer - shorter
        for shorter, longer in (
            (attention(65_536), attention(262_144)),
            (PUBLISHED_ON_V5P_128[65_536][1], PUBLISHED_ON_V5P_128[262_144][1]),
        )
    )
    assert at_peak / seconds == pytest.approx(kernel_efficiency(256), rel=0.01)
    # Nine products would have needed more than the peak.
    assert 9 / 7 * at_peak > seconds
    rest = PUBLISHED_ON_V5P_128[65_536][1] - attention(65_536) / kernel_efficiency(256)
    for positions, (rows, published) in PUBLISHED_ON_V5P_128.items():
        modelled = rest * rows * positions / 2_097_152 + attention(positions) / kernel_efficiency(256)
        assert modelled == pytest.approx(published, rel=0.03), positions


def test_large_copies_without_an_estimate_take_as_long_as_their_bytes():
    """A reshape of all scales of a cache, in each of 80 layers: the schedule has no cycles for it, the memory has."""
    before, step = step_time(figures(), NETWORK), step_time(figures(copied_bytes=2 * POD.hbm_bandwidth), NETWORK)
    assert before is not None and step is not None
    assert step.copies == pytest.approx(2.0) and step.compute == pytest.approx(before.compute + 2.0)
    assert step.expected == pytest.approx(before.expected + 2.0) and step.high == pytest.approx(before.high + 2.0)


def test_grouped_products_and_sorts_are_in_the_time():
    rows, embed, mlp = 8192, 6144, 16384
    shapes = (Shape("bf16", (rows, embed)), Shape("bf16", (2, embed, mlp)), Shape("s32", (2,)))
    grouped = Kernel("ragged-dot", 56, shapes, (Shape("bf16", (rows, mlp)),), Scope("mlp"))
    pair = (Shape("s32", (rows,)), Shape("s32", (rows,)))
    step = step_time(figures(kernels=(grouped, Kernel("sort", 56, pair, pair, Scope("mlp")))), NETWORK, experts=8)
    # A quarter of the experts are this device's, and so are a quarter of the rows.
    at_peak = 56 * 2 * rows / 4 * embed * mlp / 275e12
    assert step.kernels_at_peak == pytest.approx(at_peak, rel=0.01)
    assert at_peak / 0.75 < step.kernels_expected < at_peak / 0.6
    assert not step.unknown


def test_without_cycles_or_a_clock_there_is_no_time():
    assert step_time(figures(has_cycles=False, cycles={}), NETWORK) is None
    clockless = replace(POD, generation=replace(POD.generation, clock_hz=None))
    assert step_time(figures(), Network.of(MESH, clockless)) is None


def test_tpu7x_counts_cycles_of_a_core():
    """A cycle of each of its 256 devices does as many FLOPs as one of v6e."""
    ironwood, trillium = parse_accelerator("tpu7x-256"), parse_accelerator("v6e-256")
    a_cycle = [pod.peak_flops() / (pod.generation.clock_hz or 0) for pod in (ironwood, trillium)]
    assert a_cycle[0] == pytest.approx(a_cycle[1], rel=0.005) == pytest.approx(2 * 4 * 256**2, rel=0.005)
    step = step_time(figures(), Network.of(MeshSpec.of(data=256), ironwood))
    assert step is not None and step.expected == pytest.approx(1.05 / 2.2)
    assert "not calibrated: no published run on tpu7x" in step.calibration.reason


def test_links_without_a_bandwidth_are_said():
    mesh = MeshSpec(axes=(("slices", 2), ("data", 64)), dcn=("slices",))
    crossing = Collective("all-reduce", 1 << 30, 4, 2, (AxisSpan("slices", 2, 2),), "dcn", Scope("optimizer"), 0, "ar")
    step = step_time(figures(collectives=(crossing,)), Network.of(mesh, parse_accelerator("2xv4-128")))
    assert step.unknown == ("all-reduce over slices (dcn): its bandwidth is unknown",)
    assert step.links[0].total_bytes == 4 << 30


def test_a_bound_beyond_the_schedule_that_contains_it_is_suspect():
    second = int(POD.hbm_bandwidth)
    plausible = step_time(figures(hbm_bytes=2 * second), NETWORK)
    assert plausible is not None and plausible.low == 2.0 and not plausible.suspect
    invented = step_time(figures(hbm_bytes=20 * second), NETWORK)
    assert invented is not None and invented.suspect == {"memory": 20.0}
    (sentence,) = suspicions(invented)
    assert "bound by memory, 20.0 s" in sentence and "20.0 times" in sentence
