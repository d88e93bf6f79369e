"""Estimates for GPUs against published training speeds of somebody else's code, and against hand arithmetic."""

import pytest
from helpers.published_gpu import HELD_OUT, ROWS, SIZES, Published, planned, published_seconds

from levanter.hardware import parse_accelerator
from levanter.plan.roofline import FLOPS, HBM, LINKS, SPREAD, estimated_time
from levanter.plan.step_time_model import StepTime
from levanter.runplan import RunPlan


def timed(row: Published) -> tuple[RunPlan, StepTime]:
    plan = planned(row)
    assert not plan.errors
    found = estimated_time(plan, plan.workloads[0], parse_accelerator(row.target))
    assert found is not None
    return plan, found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.size}-{row.target}-{row.seq}")
def test_published_speeds_are_in_the_range(row):
    plan, found = timed(row)
    published = published_seconds(row, plan)
    assert found.low < published < found.high
    assert found.expected == pytest.approx(published, rel=0.25)
    assert found.calibration.estimate and "an estimate by arithmetic" in found.calibration.reason


@pytest.mark.parametrize("row", HELD_OUT, ids=lambda row: f"{row.size}-{row.target}-{row.seq}")
def test_speeds_of_code_that_no_share_was_read_off(row):
    plan, found = timed(row)
    published = published_seconds(row, plan)
    assert found.low < published < found.high
    assert found.expected == pytest.approx(published, rel=0.3)


def test_an_estimate_by_hand():
    """7 B parameters on 8 H100: compute at 55 % of peak, weights gathered and gradients reduced over NVLink."""
    row = ROWS[1]
    plan, found = timed(row)
    devices, tokens = 8, row.rows * row.seq
    width, layers, _ = SIZES[row.size]
    matmuls = 12 * layers * width**2 + 50432 * width
    flops = tokens * (6 * matmuls + 6 * layers * width * row.seq)  # causal half of 12·L·D·S
    assert plan.workloads[0].flops_causal == pytest.approx(flops, rel=0.01)
    at_peak = flops * 4 / 3 / (devices * 989e12)
    assert found.kernels_at_peak == pytest.approx(at_peak, rel=0.01)
    microbatches = row.rows // (row.microbatch * devices)
    share = (devices - 1) / devices / 450e9
    # Once forward and once backward for each microbatch, in 2 bytes; gradients in 4, scattered to their shards.
    gathered = microbatches * 2 * 2 * row.parameters * share
    reduced = microbatches * 4 * row.parameters * share
    busy = {link.over: link.busy for link in found.links}
    assert busy["parameters"] == pytest.approx(gathered, rel=0.03)
    assert busy["gradients"] == pytest.approx(reduced, rel=0.03)
    assert found.low == pytest.approx(max(at_peak, found.memory, gathered, reduced), rel=0.01)
    compute, memory, links = at_peak / FLOPS["h100"], found.memory / HBM, (gathered + reduced) / LINKS
    assert compute > memory and compute > links
    assert found.expected == pytest.approx(compute + 0.3 * (memory + links), rel=0.02)
    assert found.high == pytest.approx(SPREAD * found.expected)


def test_hbm_traffic_by_hand():
    """Weights four times a microbatch in two bytes, f32 parameters and two moments read and written, activations."""
    row = ROWS[1]
    _, found = timed(row)
    width, layers, _ = SIZES[row.size]
    microbatches = row.rows // (row.microbatch * 8)
    weights = 4 * 2 * row.parameters
    tokens = row.microbatch * row.seq
    # A layer's block input, its keys, queries and values, the attended values and the wide part of its MLP.
    each = tokens * 2 * (width + 3 * width + width + 4 * width)
    state = 2 * 12 * row.parameters / 8
    by_hand = microbatches * (weights + 4 * 2 * layers * each) + state
    assert found.memory * 3350e9 == pytest.approx(by_hand, rel=0.3)
