"""The metrics of every step, under upstream's names.

`train/loss`, `throughput/tokens_per_second`, `optim/learning_rate`, `grad/norm/total` and so on, with the step's number
from 0. A rate is that of one step; the first step's time is mostly compilation, so no rate is logged for it.

*MFU* is the model FLOP/s of a step as a percentage of the peak of the devices. It counts the operations of the
mathematics (`levanter.models.flops`), not those of recomputation. It is logged twice, because the counts differ by
attention's share: `throughput/mfu` counts every pair of positions, as upstream does, and `throughput/mfu_causal` the
pairs that a causal mask shows. Without a known peak (CPUs) there is no MFU.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from levanter.hardware import Precision, find_generation
from levanter.hardware.generations import BF16_PASSES
from levanter.runplan import Recorder
from levanter.trainer.report import StepReport
from levanter.trainer.watch import tracker_metrics

WINDOW = 500
"""Steps over which percentiles are computed."""
RATE_WINDOW = 20
"""Steps whose mean duration is used to estimate the remaining time."""
PERCENTILES = (50, 90, 99)


class HasMemory(Protocol):
    """The part of a JAX device that this module uses."""

    def memory_stats(self) -> dict[str, int] | None:
        """Its memory statistics in bytes, by JAX's names; None if it reports none."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The amount of work of a step.

    Attributes:
        rows: sequences.
        tokens: tokens.
        flops: model FLOPs over all devices, attention over every pair of positions.
        flops_causal: the same, attention over the causal half of the pairs.
    """

    rows: int
    tokens: int
    flops: float
    flops_causal: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak FLOP/s of the devices.

    Attributes:
        kind: the vendor's name of a device.
        devices: number of devices.
        flops_per_device: peak matmul FLOP/s of a device in the compute dtype; None if unknown.
    """

    kind: str
    devices: int
    flops_per_device: float | None

    @property
    def flops(self) -> float | None:
        """Peak FLOP/s of all devices."""
        return None if self.flops_per_device is None else self.flops_per_device * self.devices

    @property
    def summary(self) -> dict[str, Any]:
        """Single values for trackers."""
        metrics: dict[str, Any] = {"throughput/device_kind": self.kind, "num_devices": self.devices}
        if self.flops is not None:
            metrics["throughput/theoretical_flops_per_device"] = self.flops_per_device
            metrics["throughput/theoretical_flops"] = self.flops
        return metrics

    def __str__(self) -> str:
        if self.flops_per_device is None:
            return f"the peak FLOP/s of {self.kind!r} is unknown, so there is no MFU"
        return f"{self.devices} × {self.flops_per_device / 1e12:.0f} TFLOP/s ({self.kind})"


def peak_flops(kind: str, precision: Precision) -> float | None:
    """Peak matmul FLOP/s of a device, from the table in `levanter.hardware`; None if it is not in the table."""
    generation = find_generation(kind)
    if generation is None:
        return None
    if precision == "f32" and generation.peak_f32_native is not None:
        return generation.peak_f32_native
    # Without native float32, a float32 product is several bfloat16 passes; a chip may be several JAX devices (tpu7x).
    return generation.peak_bf16 / BF16_PASSES[precision] / generation.devices_per_chip


@dataclass(kw_only=True)
class Throughput:
    """Tokens and steps since the listener started, without the first step, which compiles.

    Attributes:
        tokens, seconds, steps: totals.
        times: seconds of the last steps.
    """

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a step."""
        self.tokens, self.seconds, self.steps = self.tokens + tokens, self.seconds + seconds, self.steps + 1
        self.times.append(seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """The average; None before the second step."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def percentiles(self) -> dict[int, float]:
        """Percentiles of the seconds of the last steps, by percentage."""
        if not self.times:
            return {}
        return dict(zip(PERCENTILES, np.percentile(list(self.times), PERCENTILES).tolist(), strict=True))

    def seconds_left(self, steps: int) -> float | None:
        """The estimated time of `steps` more steps, at the rate of the last ones."""
        # The mean of a few steps, not the median: slow steps cost time as well.
        last = list(self.times)[-RATE_WINDOW:]
        return steps * sum(last) / len(last) if last else None


@dataclass(kw_only=True)
class Track:
    """Logs every step to the run's tracker.

    Attributes:
        tracker: the tracker.
        size_of: step number → amount of work.
        steps: number of steps of the whole run.
        tokens: tokens of all previous steps.
        peak: of the devices; None for no MFU.
        devices: devices whose memory is logged.
        names: names of the watched numbers; see `Watch.names`.
        throughput: totals so far.
        skipped: steps skipped so far; None if the run never skips.
        more: step number → further metrics.
    """

    tracker: Recorder
    size_of: Callable[[int], StepSize]
    steps: int
    tokens: int = 0
    peak: Peak | None = None
    devices: Iterable[HasMemory] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=Throughput)
    skipped: int | None = None
    more: Callable[[int], Mapping[str, float]] = lambda _: {}
    mfu: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _flops: float = 0.0
    _first: bool = True

    def __call__(self, report: StepReport) -> None:
        """Logs one step."""
        size = self.size_of(report.step)
        self.tokens += size.tokens
        self._flops += size.flops
        metrics = {
            **self._numbers(report),
            **self._rates(report, size),
            **memory(self.devices),
            **self.more(report.step),
        }
        if report.watched is not None:
            metrics |= tracker_metrics(report.watched, self.names)
        self.tracker.log(metrics, step=report.step)

    def _numbers(self, report: StepReport) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "train/loss": report.loss,
            "optim/learning_rate": report.learning_rate,
            "grad/norm/total": report.grad_norm,
            "params/norm/total": report.parameter_norm,
            "updates/norm/total": report.update_norm,
            # Upstream logs the number of the step, from 0, and the progress after it.
            "global_step": report.step,
            "run_progress": report.taken / self.steps,
        }
        metrics |= {f"train/{name}": value for name, value in report.terms.items()}
        if self.skipped is not None:
            # A bool counts as 0 or 1; the total is that of this process, not of a resumed run.
            self.skipped += report.skipped
            metrics |= {"optim/skipped_step": float(report.skipped), "optim/skipped_steps": self.skipped}
        return metrics

    def _rates(self, report: StepReport, size: StepSize) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "throughput/duration": report.seconds,
            "throughput/loading_time": report.waited,
            "throughput/hook_time": report.paused,
            "throughput/total_tokens": self.tokens,
            "throughput/total_gflops": self._flops / 1e9,
        }
        # The first step of a process includes compilation, after a resume as well.
        first, self._first = self._first, False
        if first or report.seconds <= 0:
            return metrics
        self.throughput.add(size.tokens, report.seconds)
        metrics["throughput/examples_per_second"] = size.rows / report.seconds
        metrics["throughput/tokens_per_second"] = size.tokens / report.seconds
        metrics["throughput/gflops_per_second"] = size.flops / report.seconds / 1e9
        for percent, seconds in self.throughput.percentiles().items():
            metrics[f"throughput/p{percent}_duration"] = seconds
        metrics["throughput/seconds_left"] = self.throughput.seconds_left(self.steps - report.taken)
        if self.peak is not None and self.peak.flops is not None:
            metrics["throughput/mfu"] = 100 * size.flops / report.seconds / self.peak.flops
            metrics["throughput/mfu_causal"] = 100 * size.flops_causal / report.seconds / self.peak.flops
            self.mfu.append(metrics["throughput/mfu"])
        return metrics

    @property
    def summary(self) -> dict[str, Any]:
        """Summary values for trackers at the end of the run."""
        metrics: dict[str, Any] = {} if self.peak is None else self.peak.summary
        if self.mfu:
            # Over the last `WINDOW` steps only, so that a slow start does not count for ever.
            low, middle, high = np.percentile(list(self.mfu), [10, 50, 90]).tolist()
            metrics |= {"throughput/p10_mfu": low, "throughput/p50_mfu": middle, "throughput/p90_mfu": high}
            metrics["throughput/mean_mfu"] = float(np.mean(self.mfu))
        if self.skipped is not None:
            metrics["optim/skipped_steps"] = self.skipped
        return metrics


def memory(devices: Iterable[HasMemory]) -> dict[str, int]:
    """Bytes in use by this process and by its fullest device; values that are not reported are left out."""
    metrics = {}
    resident = host_bytes()
    if resident is not None:
        metrics["memory/host_rss_bytes"] = resident
    # CPUs report None.
    all_stats = [stats for device in devices if (stats := device.memory_stats())]
    for name, key in (("device_bytes_in_use", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
        values = [stats[key] for stats in all_stats if key in stats]
        if values:
            # The fullest device is the one that runs out of memory first.
            metrics[f"memory/{name}"] = max(values)
    return metrics


def host_bytes() -> int | None:
    """Resident memory of this process in bytes; None if the system does not report it."""
    try:
        # The second number of statm is the resident set, in pages.
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
