"""What would bind loading from an object store on a host of a pod: the network, processors, the way to the chips.

Each is a ceiling in gigabytes a second of one host, and the lowest binds. The store's rate is assumed. Processor
seconds a gigabyte were counted by `benchmarks/loading_remote.py --unlimited --tls --drop` on two cores of a busy
virtual machine (TLS, bf16 in its place); a host's cores are others, so what follows from them is modelled. A part of
those seconds is the interpreter's own, of which there is one a process, however many cores there are. Processors of
hosts: the machine types in Cloud TPU's documentation; PCIe: the "How to Scale Your Model" book.
"""

from dataclasses import dataclass

from levanter.hardware import Accelerator

STORE_RATE = 2.0
"""Gigabytes a second that a store is assumed to give one host."""
CPU_SECONDS = 1.9
"""Of all threads, for a gigabyte."""
INTERPRETER_SECONDS = 0.5
"""Of those, with the interpreter's lock."""
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
"""Virtual processors of a host, by generation and chips."""
PCIE_RATE = {"v4": 16.0, "v5litepod": 16.0, "v5p": 16.0, "v6e": 32.0}
"""Gigabytes a second to one chip, by generation."""


@dataclass(frozen=True, kw_only=True)
class LoadCeiling:
    """How fast a host could load if only this bound it.

    Attributes:
        name: of the resource.
        gigabytes_per_second: its ceiling.
    """

    name: str
    gigabytes_per_second: float


def load_ceilings(pod: Accelerator) -> tuple[LoadCeiling, ...]:
    """The ceilings of one host of a pod, the lowest first; none where its hosts are not known."""
    generation = pod.generation
    processors = PROCESSORS.get((generation.name, pod.chips_per_host))
    if processors is None:
        return ()
    found = {
        "assumed store": STORE_RATE,
        "interpreter": 1 / INTERPRETER_SECONDS,
        "processors": processors / CPU_SECONDS,
        "PCIe": PCIE_RATE[generation.name] * pod.chips_per_host,
    }
    if generation.dcn_host_bandwidth is not None:
        found["network"] = generation.dcn_host_bandwidth / 1e9
    made = [LoadCeiling(name=name, gigabytes_per_second=rate) for name, rate in found.items()]
    return tuple(sorted(made, key=lambda each: each.gigabytes_per_second))
