"""Reports of loading while it runs and at the end: `LoadProgress`, `LoadReport`, and the peak of host memory."""

import threading
from dataclasses import dataclass
from pathlib import Path

from haliax_ext.errors import gib
from haliax_ext.nonfinite import NotFinite

SAMPLE_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class LoadProgress:
    """This host's progress (all hosts load in step).

    Attributes:
        bytes_done: bytes this host has read.
        bytes_total: bytes it has to read.
        job_bytes: bytes all hosts have to read.
        seconds: time since the beginning.
        path: the leaf that was read last.
        layer: its index along the (first) stacked axis.
        network: the state of requests, where the source is on another machine.
    """

    bytes_done: int
    bytes_total: int
    job_bytes: int
    seconds: float
    path: str
    layer: int | None
    network: str = ""

    @property
    def fraction(self) -> float:
        """The part of this host's bytes that has been read, from 0 to 1."""
        return self.bytes_done / self.bytes_total if self.bytes_total else 1.0

    @property
    def gb_per_s(self) -> float:
        """This host's rate in 10⁹ bytes per second."""
        return self.bytes_done / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds left at the rate so far; None before anything was read."""
        if not self.bytes_done:
            return None
        return self.seconds * (self.bytes_total - self.bytes_done) / self.bytes_done

    def __str__(self) -> str:
        eta = "?" if self.eta_seconds is None else f"{self.eta_seconds:.0f} s"
        layer = "" if self.layer is None else f" {self.layer}"
        network = f" ({self.network})" if self.network else ""
        return (
            f"{gib(self.bytes_done)} of {gib(self.bytes_total)} ({self.fraction:.0%}), {self.gb_per_s:.2f} GB/s, "
            f"{eta} left: {self.path}{layer}{network}"
        )


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The figures of a finished load.

    Attributes:
        bytes_read: bytes this host read.
        seconds: how long it took, exchanges included.
        peak_rss_bytes: peak resident memory of this process above what it was before; None where unknown.
        bytes_per_device: bytes of the arrays on each device.
        seconds_by_host: how long each host took.
        not_finite: weights that this host read and that are NaN or infinite, in the order of the plan.
        network: the figures of requests, where the source is on another machine.
    """

    bytes_read: int
    seconds: float
    peak_rss_bytes: int | None
    bytes_per_device: int
    seconds_by_host: tuple[float, ...]
    not_finite: tuple[NotFinite, ...] = ()
    network: str = ""

    @property
    def gb_per_s(self) -> float:
        """This host's rate in 10⁹ bytes per second."""
        return self.bytes_read / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def slowest_host(self) -> int:
        """The number of the host that took longest."""
        return max(range(len(self.seconds_by_host)), key=self.seconds_by_host.__getitem__)

    def __str__(self) -> str:
        peak = "unknown" if self.peak_rss_bytes is None else gib(self.peak_rss_bytes)
        network = f"; {self.network}" if self.network else ""
        slowest = ""
        if len(self.seconds_by_host) > 1:
            slowest = f", slowest host {self.slowest_host} with {self.seconds_by_host[self.slowest_host]:.2f} s"
        return (
            f"read {gib(self.bytes_read)} in {self.seconds:.2f} s ({self.gb_per_s:.2f} GB/s), peak host memory "
            f"{peak} above the starting level, {gib(self.bytes_per_device)} on each device{slowest}{network}"
        )


def resident_bytes() -> int | None:
    """Resident memory of this process, pages of mapped files included; None where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmRSS:"):
            # The kernel states kB, which are KiB.
            return int(line.split()[1]) * 1024
    return None


class MemoryWatch:
    """Samples resident memory while it is open.

    Attributes:
        peak_bytes: the most seen above the beginning; None where the system does not tell.
    """

    peak_bytes: int | None

    def __init__(self):
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="load-memory", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._start = resident_bytes()
        self.peak_bytes = None if self._start is None else 0
        if self._start is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        # One more sample at the end: a load shorter than the interval would otherwise have none.
        if self._thread.is_alive():
            self._thread.join()
        self._look()

    def _look(self) -> None:
        now = resident_bytes()
        if now is not None and self._start is not None and self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, now - self._start)

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._look()
