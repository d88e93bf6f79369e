"""What is logged of a step, against sums by hand."""

import numpy as np
import pytest

from levanter.trainer.metrics import Peak, StepSize, Throughput, Track, host_bytes, memory, peak_flops
from levanter.trainer.report import StepReport

pytestmark = pytest.mark.quick


class Tracker:
    def __init__(self):
        self.logged = {}

    def log(self, metrics, *, step):
        self.logged[step] = dict(metrics)


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def report(step, seconds=2.0, **changed):
    numbers = {
        "loss": 3.0,
        "weight": 1.0,
        "grad_norm": 0.25,
        "update_norm": 0.5,
        "parameter_norm": 7.0,
        "learning_rate": 0.1,
    }
    return StepReport(step=step, seconds=seconds, waited=0.5, paused=1.5, **{**numbers, **changed})


SIZE = StepSize(rows=8, tokens=128, flops=6e9, flops_causal=4e9)


def track(**more):
    return Track(tracker=Tracker(), size_of=lambda step: SIZE, steps=10, tokens=256, **more)


def test_of_a_plain_step():
    found = track()
    for step in (2, 3):
        found(report(step))
    first, second = (dict(found.tracker.logged[step]) for step in (2, 3))
    # Compilation is in the first step's time, so it has no rate.
    assert not any(name.endswith("_per_second") or "mfu" in name for name in first)
    assert second.pop("memory/host_rss_bytes") > 10_000_000
    assert second == {
        "train/loss": 3.0,
        "optim/learning_rate": 0.1,
        "grad/norm/total": 0.25,
        "params/norm/total": 7.0,
        "updates/norm/total": 0.5,
        "global_step": 3,
        "run_progress": 0.4,
        "throughput/duration": 2.0,
        "throughput/loading_time": 0.5,
        "throughput/hook_time": 1.5,
        "throughput/total_tokens": 512,
        "throughput/total_gflops": 12.0,
        "throughput/examples_per_second": 4.0,
        "throughput/tokens_per_second": 64.0,
        "throughput/gflops_per_second": 3.0,
        "throughput/p50_duration": 2.0,
        "throughput/p90_duration": 2.0,
        "throughput/p99_duration": 2.0,
        "throughput/seconds_left": 12.0,
    }
    assert found.throughput.tokens_per_second == 64.0 and found.summary == {}


def test_mfu_by_both_counts_where_the_peak_is_known():
    found = track(peak=Peak(kind="TPU of tests", devices=4, flops_per_device=1e9))
    for step, seconds in enumerate([9.0, 2.0, 3.0, 2.0]):
        found(report(step, seconds))
    last = found.tracker.logged[3]
    assert last["throughput/mfu"] == pytest.approx(100 * 6e9 / 2.0 / 4e9)
    assert last["throughput/mfu_causal"] == pytest.approx(100 * 4e9 / 2.0 / 4e9)
    assert found.summary["throughput/p50_mfu"] == pytest.approx(75.0)
    assert found.summary["throughput/theoretical_flops"] == 4e9
    assert found.summary["throughput/device_kind"] == "TPU of tests"
    unknown = track(peak=Peak(kind="cpu", devices=8, flops_per_device=None))
    for step in range(3):
        unknown(report(step))
    assert not any("mfu" in name for name in unknown.tracker.logged[2])
    assert unknown.summary == {"throughput/device_kind": "cpu", "num_devices": 8}
    assert "no MFU" in str(unknown.peak)


@pytest.mark.parametrize(
    ("kind", "precision", "expected"),
    [
        ("TPU v4", "bf16", 275e12),
        ("TPU v4", "f32", 275e12 / 6),
        ("TPU v5", "bf16", 459e12),
        ("TPU v5 lite", "bf16", 197e12),
        ("TPU v6 lite", "bf16", 918e12),
        ("TPU7x", "bf16", 2307e12 / 2),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H200", "f32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("cpu", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
    ],
)
def test_peaks_of_one_device(kind, precision, expected):
    assert peak_flops(kind, precision) == (None if expected is None else pytest.approx(expected))


def test_percentiles_are_of_the_last_steps():
    rng = np.random.default_rng(0)
    times = rng.gamma(3.0, 0.1, 900)
    found = Throughput()
    for seconds in times:
        found.add(1, float(seconds))
    window = np.sort(times[-500:])
    for percent, seconds in found.percentiles().items():
        at_most = np.mean(window <= seconds + 1e-12)
        assert at_most >= percent / 100 - 0.002 and np.mean(window < seconds - 1e-12) <= percent / 100
    assert found.seconds_left(7) == pytest.approx(7 * times[-20:].mean())
    assert found.steps == 900 and found.tokens_per_second == pytest.approx(900 / times.sum())
    assert Throughput().percentiles() == {} and Throughput().seconds_left(3) is None


def test_memory_of_the_fullest_device():
    told = [
        Device({"bytes_in_use": 5, "peak_bytes_in_use": 20}),
        Device({"bytes_in_use": 9, "peak_bytes_in_use": 11}),
        Device(None),
    ]
    found = memory(told)
    assert found["memory/device_bytes_in_use"] == 9 and found["memory/device_peak_bytes"] == 20
    assert memory([Device(None)]).keys() == {"memory/host_rss_bytes"}
    before = host_bytes()
    held = np.ones(40_000_000)
    after = host_bytes()
    assert before is not None and after is not None
    assert 0.8 * held.nbytes < after - before < 1.3 * held.nbytes


def test_what_is_left_out_is_counted():
    found = track(skipped=0)
    for step in range(4):
        found(report(step, skipped=step in (1, 2), terms={"z_loss": 0.125}))
    logged = found.tracker.logged
    assert [logged[step]["optim/skipped_step"] for step in range(4)] == [0, 1, 1, 0]
    assert [logged[step]["optim/skipped_steps"] for step in range(4)] == [0, 1, 2, 2]
    assert logged[3]["train/z_loss"] == 0.125
    assert found.summary["optim/skipped_steps"] == 2
