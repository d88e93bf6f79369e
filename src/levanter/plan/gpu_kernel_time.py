"""Seconds of one kernel on a GPU, from its work: the compiler states none.

A kernel takes the longer of its products at a share of the card's peak and its bytes at a share of the memory's
bandwidth, and the time of a launch. The shares are of architectures, and of kinds of kernels. A product's share falls
where its result has fewer tiles than the card has cores, or fills the last wave of tiles badly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from haliax_ext.hlo.kernel_work import KernelWork, kernel_work, unstated_workspace
from haliax_ext.hlo.parser import Computation, Instruction, Module
from levanter.hardware import Accelerator

TICKS = 1e9
"""Ticks a second in which estimates are counted, in the place of a TPU compiler's cycles."""
LAUNCH_SECONDS = 2e-6
"""Between the ends of two kernels in a graph of launches, when the second waits for the first."""
TILE = (128, 256)
"""Rows and columns of the result that a core computes at a time in the large matmul kernels of cuBLAS."""


@dataclass(frozen=True, kw_only=True)
class KernelShares:
    """What kernels reach of a card.

    Attributes:
        matmul: share of peak FLOP/s of large products in 16 bits.
        attention: the same of cuDNN's attention kernels.
        memory: share of the memory's bandwidth.
        links: share of the bandwidth of links and networks that collectives reach.
    """

    matmul: float
    attention: float
    memory: float = 0.85
    links: float = 0.8


SHARES: Mapping[int, KernelShares] = {
    8: KernelShares(matmul=0.72, attention=0.60),
    9: KernelShares(matmul=0.62, attention=0.50),
    10: KernelShares(matmul=0.60, attention=0.50),
    12: KernelShares(matmul=0.60, attention=0.50),
}
"""By major compute capability. Of matmuls on Hopper and Ampere: what the steps of published runs imply that calibrate
the model (docs/performance.md, *published GPU speeds*), compiled for the same cards. The others are assumptions. On
Hopper MaxText's steps reach 0.64 to 0.82, those of PyTorch under FSDP 0.5 to 0.58; 0.62 is between them."""


def kernel_shares(pod: Accelerator) -> KernelShares:
    """The shares of a GPU."""
    description = pod.generation.gpu
    assert description is not None, f"{pod} is no GPU"
    return SHARES[description.capability[0]]


@dataclass(frozen=True, kw_only=True)
class GpuKernels:
    """Estimates the kernels of a program that is compiled for GPUs, in `TICKS`.

    Attributes:
        pod: the GPUs.
    """

    pod: Accelerator

    def cycles(self, module: Module, computation: Computation, instruction: Instruction) -> tuple[int, int]:
        """Ticks of one execution of an instruction, and the bytes that it moves; 0 for a marker."""
        work = kernel_work(module, computation, instruction)
        # Markers and views of arrays neither compute nor move anything.
        if not work.nbytes and not work.flops:
            return 0, 0
        return math.ceil(kernel_seconds(work, self.pod) * TICKS), work.nbytes

    def workspace(self, module: Module) -> int:
        """Bytes of cuDNN's workspace that no text states."""
        return unstated_workspace(module)


def kernel_estimate(pod: Accelerator | None) -> GpuKernels | None:
    """The estimates of a target's kernels; None for targets whose compiler states cycles."""
    return None if pod is None or pod.generation.gpu is None else GpuKernels(pod=pod)


def kernel_seconds(work: KernelWork, pod: Accelerator) -> float:
    """Seconds of one execution of a kernel.

    Args:
        work: of the kernel.
        pod: its GPUs.
    """
    shares = kernel_shares(pod)
    moving = work.nbytes / (pod.hbm_bandwidth * shares.memory)
    if work.kind == "attention":
        computing = work.flops / (pod.peak_flops() * shares.attention)
    elif work.kind == "matmul":
        computing = work.flops / (_matmul_peak(work, pod) * shares.matmul * _filled(work, pod))
    else:
        computing = 0.0
    return max(moving, computing) + LAUNCH_SECONDS


def _matmul_peak(work: KernelWork, pod: Accelerator) -> float:
    # Products of float32 operands run in TF32 at half of the rate of 16 bits; of 8 bits at twice that rate.
    return pod.peak_flops() * {1: 2.0, 4: 0.5}.get(work.itemsize, 1.0)


def _filled(work: KernelWork, pod: Accelerator) -> float:
    """The share of the cores that have a tile, on average over the waves of tiles."""
    description = pod.generation.gpu
    assert description is not None
    small, large = sorted((work.rows, work.columns))
    tiles = work.batch * math.ceil(small / TILE[0]) * math.ceil(large / TILE[1])
    # Few tiles of a deep product are cut along its depth, which keeps cores busy at the cost of a sum.
    tiles *= max(1, min(8, work.depth // 1024)) if tiles < description.cores else 1
    waves = math.ceil(tiles / description.cores)
    return max(tiles / (waves * description.cores), 0.1)
