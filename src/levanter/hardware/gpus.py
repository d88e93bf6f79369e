"""GPUs as XLA's compiler describes them, and the share of their memory that JAX's allocator takes.

Sources. Cores, clocks, caches, registers and memory of a card: the descriptions that openxla/xla ships for its own
compile-only tests (`xla/backends/gpu/target_config/specs`); of L4, which has none there, NVIDIA's data sheet and its
*Ada GPU Architecture* paper, and the memory that NVIDIA's tools report. The allocator's share: JAX's *GPU memory
allocation* page. What a CUDA context and NCCL's communicators keep outside the allocator is an allowance of ours.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_FRACTION = 0.75
"""The share of a GPU's memory that JAX's allocator takes unless `XLA_CLIENT_MEM_FRACTION` names another."""
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
OUTSIDE_BYTES = 1 << 30
"""Bytes that the driver's context and libraries keep outside the allocator: an allowance. It matters only where the
fraction is set so high that the allocator would leave less."""


class GpuMemoryError(ValueError):
    """A variable of JAX's allocator that JAX would refuse."""


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """The properties of a card from which XLA's compiler chooses kernels, tiles and memory.

    Attributes:
        capability: CUDA compute capability, major and minor.
        accelerated: whether the compiler may use instructions of this architecture alone (`sm_90a`).
        cores: streaming multiprocessors.
        clock_ghz: their highest clock.
        l2_bytes: of the second-level cache.
        shared_bytes: shared memory of a core.
        block_shared_bytes: of it, what one block can have.
        core_threads: the most threads of a core.
        core_fpus: FP32 units of a core.
        nvlinks: links to other cards; 0 for cards on PCIe.
    """

    capability: tuple[int, int]
    accelerated: bool = False
    cores: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int = 233472
    block_shared_bytes: int = 232448
    core_threads: int = 2048
    core_fpus: int = 128
    nvlinks: int = 0

    def target_config(
        self, *, name: str, memory_bytes: int, bandwidth: float, cudnn: tuple[int, int, int], cuda: tuple[int, int, int]
    ) -> str:
        """The text of XLA's `GpuTargetConfigProto`, from which the compiler makes a topology without a device.

        Args:
            name: the vendor's name of the card.
            memory_bytes: of the card.
            bandwidth: of its memory, bytes/s.
            cudnn: version of cuDNN that the run will have.
            cuda: version of the CUDA runtime.
        """
        major, minor = self.capability
        feature = " feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        # Limits of a block are the same on every architecture that is planned here.
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_bytes,
            "shared_memory_per_block_optin": self.block_shared_bytes,
            "threads_per_core_limit": self.core_threads,
            "core_count": self.cores,
            "fpus_per_core": self.core_fpus,
            "block_dim_limit_x": 2147483647,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "memory_bandwidth": int(bandwidth),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": memory_bytes,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        facts = "\n".join(f"  {key}: {value}" for key, value in numbers.items())
        links = f"\n  device_interconnect_info {{ active_links: {self.nvlinks} }}" if self.nvlinks else ""
        return (
            f"gpu_device_info {{\n{facts}\n"
            f"  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}{links}\n}}\n"
            f'platform_name: "CUDA"\n'
            f"dnn_version_info {{ {_version(cudnn)} }}\nruntime_version {{ {_version(cuda)} }}\n"
            f'device_description_str: "{name}"\n'
        )


def _version(parts: tuple[int, int, int]) -> str:
    return "major: {} minor: {} patch: {}".format(*parts)


def memory_fraction(environment: Mapping[str, str] | None = None) -> float:
    """The share of a GPU's memory that JAX's allocator takes, as its environment variables set it.

    Args:
        environment: of the run; by default that of this process.

    Raises:
        GpuMemoryError: a variable is no number above 0, or both of them are set.
    """
    variables = os.environ if environment is None else environment
    texts = {name: text for name in FRACTION_VARIABLES if (text := variables.get(name, ""))}
    if len(texts) > 1:
        raise GpuMemoryError(f"{' and '.join(texts)} are both set; JAX takes one of them, the second is deprecated")
    for name, text in texts.items():
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if not 0.0 < fraction <= 1.0:
            raise GpuMemoryError(f"{name}={text}: expected a share of a GPU's memory above 0 and at most 1, like 0.9")
        return fraction
    return DEFAULT_FRACTION


def allocator_bytes(memory_bytes: int, *, fraction: float) -> int:
    """Bytes that programs of a run may use of a GPU.

    Args:
        memory_bytes: of the card.
        fraction: that JAX's allocator takes.
    """
    # Near 1 the allocator cannot have its share: the context and libraries come out of the same memory.
    return min(int(memory_bytes * fraction), memory_bytes - OUTSIDE_BYTES)


A100 = GpuDescription(
    capability=(8, 0),
    cores=108,
    clock_ghz=1.41,
    l2_bytes=41943040,
    shared_bytes=167936,
    block_shared_bytes=166912,
    core_fpus=64,
    nvlinks=12,
)
H100 = GpuDescription(
    capability=(9, 0), accelerated=True, cores=132, clock_ghz=1.98, l2_bytes=52428800, nvlinks=18
)  # fmt: skip
H100_PCIE = GpuDescription(capability=(9, 0), accelerated=True, cores=114, clock_ghz=1.755, l2_bytes=52428800)
B200 = GpuDescription(
    capability=(10, 0), accelerated=True, cores=148, clock_ghz=1.965, l2_bytes=132644864, nvlinks=18
)  # fmt: skip
GB200 = GpuDescription(
    capability=(10, 0), accelerated=True, cores=152, clock_ghz=2.062, l2_bytes=135528448, nvlinks=18
)  # fmt: skip
B300 = GpuDescription(capability=(10, 3), cores=158, clock_ghz=1.965, l2_bytes=135528448, nvlinks=18)
RTX6000PRO = GpuDescription(
    capability=(12, 0),
    cores=188,
    clock_ghz=2.6,
    l2_bytes=134217728,
    shared_bytes=131072,
    block_shared_bytes=101376,
    core_threads=1536,
)
L4 = GpuDescription(
    capability=(8, 9),
    cores=58,
    clock_ghz=2.04,
    l2_bytes=50331648,
    shared_bytes=102400,
    block_shared_bytes=101376,
    core_threads=1536,
)
