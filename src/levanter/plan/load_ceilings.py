"""What would bind loading from an object store on a host of a pod: the network, processors, the way to the chips.

Each is a ceiling in gigabytes a second of one host, and the lowest binds. Where each number is from, and what of it was
checked, is said beside it; what a reader sees says `assumed`, `counted elsewhere` or `not verified` where that is so.
"""

from dataclasses import dataclass
from typing import Literal

from levanter.hardware import Accelerator

STORE_RATE = 2.0
"""Gigabytes a second that a store is assumed to give one host.

Published rates of single hosts lie on both sides: 3.1 GB/s (Run:ai streamer, 15 GB from S3), 8.7 GiB/s (125 GiB to
eight GPUs), 0.16 GB/s (range requests of another loader, v6e).
"""
CPU_SECONDS = 1.9
"""Of all threads, for a gigabyte: `benchmarks/loading_remote.py --unlimited --tls --drop` (bf16 in its place) on two
cores of a busy virtual machine; a host's cores are others."""
INTERPRETER_SECONDS = 0.5
"""Of those, with the interpreter's lock, of which a process has one, however many cores there are; counted there."""
PROCESSORS = {
    ("v4", 4): 240,
    ("v5litepod", 1): 24,
    ("v5litepod", 4): 112,
    ("v5litepod", 8): 224,
    ("v5p", 4): 208,
    ("v6e", 1): 44,
    ("v6e", 4): 180,
    ("v6e", 8): 180,
}
"""Virtual processors of a host, by generation and chips: the machine types in Cloud TPU's documentation, written down
from memory and not verified."""


@dataclass(frozen=True, kw_only=True)
class LoadCeiling:
    """How fast a host could load if only this bound it.

    Attributes:
        name: of the resource.
        gigabytes_per_second: its ceiling.
        basis: how far the number can be trusted; empty for one that is published.
    """

    name: str
    gigabytes_per_second: float
    basis: Literal["", "assumed", "counted elsewhere", "not verified"] = ""

    def __str__(self) -> str:
        return self.name + (f" ({self.basis})" if self.basis else "")


def load_ceilings(pod: Accelerator) -> tuple[LoadCeiling, ...]:
    """The ceilings of one host of a pod, the lowest first; none where its hosts are not known."""
    generation = pod.generation
    processors = PROCESSORS.get((generation.name, pod.chips_per_host))
    if processors is None:
        return ()
    found = [
        LoadCeiling(name="store", gigabytes_per_second=STORE_RATE, basis="assumed"),
        LoadCeiling(name="interpreter", gigabytes_per_second=1 / INTERPRETER_SECONDS, basis="counted elsewhere"),
        LoadCeiling(name="processors", gigabytes_per_second=processors / CPU_SECONDS, basis="not verified"),
    ]
    # Of `hardware.generations`, which names its sources; the network of v6e and v5p (100 and 50 Gb/s a chip) agrees
    # with a second one, the others were not looked up again.
    if generation.host_link_bandwidth is not None:
        rate = generation.host_link_bandwidth / 1e9 * pod.chips_per_host
        found.append(LoadCeiling(name="PCIe", gigabytes_per_second=rate, basis="not verified"))
    if generation.dcn_host_bandwidth is not None:
        checked = generation.name in ("v5p", "v6e")
        rate = generation.dcn_host_bandwidth / 1e9
        found.append(LoadCeiling(name="network", gigabytes_per_second=rate, basis="" if checked else "not verified"))
    return tuple(sorted(found, key=lambda each: each.gigabytes_per_second))
