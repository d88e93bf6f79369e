"""The generations of accelerators: speeds, memory and topology of one chip of each.

Sources. Peak FLOP/s, HBM and ICI bandwidth, NIC speeds, pod sizes, topologies and chips per host: Google's
Cloud TPU documentation, one page a generation ("System architecture" and "Configurations"). ICI is stated there a chip
and both ways (v6e 800 GB/s over 4 ports, v5p and tpu7x 1,200 over 6, v5e 400 over 4; v4 is 50 GB/s a link each way in
"TPU v4: An Optically Reconfigurable Supercomputer", ISCA 2023); what a collective reaches is about nine tenths of it,
which is also the figure the "How to Scale Your Model" book works with, and the one kept here. Wrap-around: a 3D slice
whose sides are all multiples of 4 is a torus; a 2D axis wraps only when it is 16 long. Usable HBM: what the TPU
compiler itself states when a program asks for too much (libtpu 0.0.42.1). Clocks: peak FLOP/s over (MXUs × 128 × 128 ×
2) for v4, v5e and v5p; v6e's MXU is 256 × 256 and reaches its peak at an effective 1.75 GHz in the compiler's cycle
counts (524,288 FLOPs a cycle); tpu7x's is not published and is taken from the same FLOPs a cycle for each of its two
cores, which the compiler's counts of large products agree with (448,000 at the most, v6e 471,000). Memory of a host:
the same pages, of machines with four chips. A chip's link to its host: PCIe, about 15 GB/s each way in "How to Scale
Your Model"; of GPUs sixteen lanes of PCIe 4 or 5, less their overhead. GPU figures: NVIDIA's data sheets, dense
(without sparsity). Cores, clocks, caches and memory of a GPU: the descriptions that openxla/xla ships for compiling
without one (`xla/backends/gpu/target_config/specs`); of L4, which has none there, NVIDIA's data sheet and its *Ada GPU
Architecture* paper, and the memory that NVIDIA's tools report. Networks between hosts of GPUs: one 400 Gbit/s NIC a
GPU (H100, H200, B200 in the vendors' reference designs), 200 Gbit/s for A100, 800 for B300, and what PCIe servers
commonly have for the others.
"""

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
GB = 10**9
TERA = 10**12

Precision = Literal["bf16", "high", "f32"]
# A matmul of f32 operands on an MXU is done in bf16 passes: one for "default", three for "high", six for "highest".
BF16_PASSES: dict[str, int] = {"bf16": 1, "high": 3, "f32": 6}


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


def _version(version: tuple[int, int, int]) -> str:
    return "major: {} minor: {} patch: {}".format(*version)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The properties of one chip, and how chips form a slice.

    Attributes:
        name: the family as users write it before the number.
        aliases: other spellings of `name`.
        platform: `tpu` or `gpu`.
        cores_per_chip: how many the number in the name counts for one chip.
        devices_per_chip: how many devices JAX sees for one chip.
        topology_axes: 3 for a 3D torus, 2 for a 2D one, 0 where chips of a host are joined all to all.
        pod: the largest slice, one size a topology axis, ascending.
        max_chips: the most chips of one slice.
        compiler_name: the family as libtpu's topology strings spell it.
        device_kind: the vendor's name of a device, as JAX reports it.
        chip_config_name: libtpu's chip configuration, where the default is not what runs.
        hbm_bytes: usable bytes of one device. For GPUs: all of its memory, of which the allocator takes a share.
        peak_bf16: FLOP/s of one chip.
        peak_f32_native: FLOP/s of one chip's f32 units where there are such; `None`: f32 is done in bf16 passes.
        hbm_bandwidth: bytes/s of one chip.
        ici_link_bandwidth: bytes/s of one link in one direction, as collectives reach it. For GPUs: bytes/s in one
            direction between one GPU and the others of its host.
        dcn_host_bandwidth: bytes/s of one host's network in one direction; `None`: not published.
        host_link_bandwidth: bytes/s of one chip's link to its host in one direction; `None`: not known.
        host_bytes: memory of a host with `chips_per_host` chips; `None`: not published.
        clock_hz: cycles a second in which the compiler counts; `None`: not known.
        gpu: what the GPU compiler is told of the card; `None` for TPUs.
        nvlink_domain: GPUs that reach each other over NVLink or, of cards without it, over the PCIe of their host.
    """

    name: str
    aliases: tuple[str, ...] = ()
    platform: Literal["tpu", "gpu"] = "tpu"
    cores_per_chip: int = 1
    devices_per_chip: int = 1
    topology_axes: Literal[0, 2, 3]
    pod: tuple[int, ...] = ()
    max_chips: int
    compiler_name: str = ""
    device_kind: str
    chip_config_name: str | None = None
    chips_per_host: int = 4
    hbm_bytes: int
    peak_bf16: float
    peak_f32_native: float | None = None
    hbm_bandwidth: float
    ici_link_bandwidth: float
    dcn_host_bandwidth: float | None
    host_link_bandwidth: float | None = None
    host_bytes: int | None = None
    clock_hz: float | None = None
    gpu: GpuDescription | None = None
    nvlink_domain: int = 8


_A100 = GpuDescription(
    capability=(8, 0),
    cores=108,
    clock_ghz=1.41,
    l2_bytes=41943040,
    shared_bytes=167936,
    block_shared_bytes=166912,
    core_fpus=64,
    nvlinks=12,
)
_H100 = GpuDescription(capability=(9, 0), accelerated=True, cores=132, clock_ghz=1.98, l2_bytes=52428800, nvlinks=18)
_H100_PCIE = GpuDescription(capability=(9, 0), accelerated=True, cores=114, clock_ghz=1.755, l2_bytes=52428800)
_B200 = GpuDescription(capability=(10, 0), accelerated=True, cores=148, clock_ghz=1.965, l2_bytes=132644864, nvlinks=18)
_GB200 = GpuDescription(
    capability=(10, 0), accelerated=True, cores=152, clock_ghz=2.062, l2_bytes=135528448, nvlinks=18
)
_B300 = GpuDescription(capability=(10, 3), cores=158, clock_ghz=1.965, l2_bytes=135528448, nvlinks=18)
_RTX6000PRO = GpuDescription(
    capability=(12, 0),
    cores=188,
    clock_ghz=2.6,
    l2_bytes=134217728,
    shared_bytes=131072,
    block_shared_bytes=101376,
    core_threads=1536,
)
_L4 = GpuDescription(
    capability=(8, 9),
    cores=58,
    clock_ghz=2.04,
    l2_bytes=50331648,
    shared_bytes=102400,
    block_shared_bytes=101376,
    core_threads=1536,
)
_A6000 = GpuDescription(
    capability=(8, 6),
    cores=84,
    clock_ghz=1.8,
    l2_bytes=6291456,
    shared_bytes=102400,
    block_shared_bytes=101376,
    core_threads=1536,
)

GENERATIONS: tuple[Generation, ...] = (
    Generation(
        name="v4",
        cores_per_chip=2,
        topology_axes=3,
        pod=(16, 16, 16),
        max_chips=4096,
        compiler_name="v4",
        device_kind="TPU v4",
        # The two TensorCores of a v4 chip run as one device, which is not libtpu's default configuration.
        chip_config_name="megacore",
        # GiB that a program may use of the chip's 32: the rest is reserved, as the compiler's refusals state.
        hbm_bytes=int(30.75 * GIB),
        peak_bf16=275 * TERA,
        hbm_bandwidth=1200 * GB,
        ici_link_bandwidth=45 * GB,
        dcn_host_bandwidth=None,
        host_link_bandwidth=15 * GB,
        host_bytes=407 * GB,
        clock_hz=1.05e9,
    ),
    Generation(
        name="v5litepod",
        aliases=("v5e",),
        topology_axes=2,
        pod=(16, 16),
        max_chips=256,
        compiler_name="v5e",
        device_kind="TPU v5 lite",
        hbm_bytes=int(15.75 * GIB),
        peak_bf16=197 * TERA,
        hbm_bandwidth=819 * GB,
        ici_link_bandwidth=45 * GB,
        dcn_host_bandwidth=12.5 * GB,
        host_link_bandwidth=15 * GB,
        host_bytes=192 * GB,
        clock_hz=1.5e9,
    ),
    Generation(
        name="v5p",
        cores_per_chip=2,
        topology_axes=3,
        pod=(16, 20, 28),
        max_chips=6144,
        compiler_name="v5p",
        device_kind="TPU v5",
        hbm_bytes=int(95.74 * GIB),
        peak_bf16=459 * TERA,
        hbm_bandwidth=2765 * GB,
        ici_link_bandwidth=90 * GB,
        dcn_host_bandwidth=25 * GB,
        host_link_bandwidth=15 * GB,
        host_bytes=448 * GB,
        clock_hz=1.75e9,
    ),
    Generation(
        name="v6e",
        topology_axes=2,
        pod=(16, 16),
        max_chips=256,
        compiler_name="v6e",
        device_kind="TPU v6 lite",
        hbm_bytes=int(31.25 * GIB),
        peak_bf16=918 * TERA,
        hbm_bandwidth=1638 * GB,
        ici_link_bandwidth=90 * GB,
        dcn_host_bandwidth=50 * GB,
        host_link_bandwidth=15 * GB,
        host_bytes=720 * GB,
        clock_hz=1.75e9,
    ),
    Generation(
        name="tpu7x",
        cores_per_chip=2,
        devices_per_chip=2,
        topology_axes=3,
        pod=(16, 24, 24),
        max_chips=9216,
        compiler_name="tpu7x",
        device_kind="TPU7x",
        hbm_bytes=int(94.75 * GIB),
        peak_bf16=2307 * TERA,
        hbm_bandwidth=7380 * GB,
        ici_link_bandwidth=90 * GB,
        dcn_host_bandwidth=50 * GB,
        host_link_bandwidth=15 * GB,
        host_bytes=960 * GB,
        clock_hz=2.2e9,
    ),
    Generation(
        name="a100-40",
        platform="gpu",
        device_kind="NVIDIA A100-SXM4-40GB",
        topology_axes=0,
        max_chips=4096,
        chips_per_host=8,
        hbm_bytes=42331013120,
        peak_bf16=312 * TERA,
        peak_f32_native=19.5 * TERA,
        hbm_bandwidth=1555 * GB,
        ici_link_bandwidth=300 * GB,
        dcn_host_bandwidth=200 * GB,
        host_link_bandwidth=25 * GB,
        gpu=_A100,
    ),
    Generation(
        name="a100",
        platform="gpu",
        device_kind="NVIDIA A100 80GB",
        topology_axes=0,
        max_chips=4096,
        chips_per_host=8,
        hbm_bytes=85100068864,
        peak_bf16=312 * TERA,
        peak_f32_native=19.5 * TERA,
        hbm_bandwidth=2039 * GB,
        ici_link_bandwidth=300 * GB,
        dcn_host_bandwidth=200 * GB,
        host_link_bandwidth=25 * GB,
        gpu=_A100,
    ),
    Generation(
        name="h100",
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
        topology_axes=0,
        max_chips=16384,
        chips_per_host=8,
        hbm_bytes=84942979072,
        peak_bf16=989 * TERA,
        peak_f32_native=67 * TERA,
        hbm_bandwidth=3350 * GB,
        ici_link_bandwidth=450 * GB,
        dcn_host_bandwidth=400 * GB,
        host_link_bandwidth=50 * GB,
        gpu=_H100,
    ),
    Generation(
        name="h100-pcie",
        platform="gpu",
        device_kind="NVIDIA H100 PCIe",
        topology_axes=0,
        max_chips=4096,
        chips_per_host=8,
        hbm_bytes=84942979072,
        peak_bf16=756 * TERA,
        peak_f32_native=51 * TERA,
        hbm_bandwidth=2039 * GB,
        # Cards of a host reach each other over PCIe; bridges that join pairs of them are not counted on.
        ici_link_bandwidth=50 * GB,
        dcn_host_bandwidth=50 * GB,
        host_link_bandwidth=50 * GB,
        gpu=_H100_PCIE,
    ),
    Generation(
        name="h200",
        platform="gpu",
        device_kind="NVIDIA H200",
        topology_axes=0,
        max_chips=16384,
        chips_per_host=8,
        # Sold as 141 GB; this is the memory that NVIDIA's tools report for the device.
        hbm_bytes=151397597184,
        peak_bf16=989 * TERA,
        peak_f32_native=67 * TERA,
        hbm_bandwidth=4800 * GB,
        ici_link_bandwidth=450 * GB,
        dcn_host_bandwidth=400 * GB,
        host_link_bandwidth=50 * GB,
        gpu=_H100,
    ),
    Generation(
        name="b200",
        platform="gpu",
        device_kind="NVIDIA B200",
        topology_axes=0,
        max_chips=16384,
        chips_per_host=8,
        hbm_bytes=191514411008,
        peak_bf16=2250 * TERA,
        peak_f32_native=75 * TERA,
        hbm_bandwidth=7672 * GB,
        ici_link_bandwidth=900 * GB,
        dcn_host_bandwidth=400 * GB,
        host_link_bandwidth=50 * GB,
        gpu=_B200,
    ),
    Generation(
        name="gb200",
        platform="gpu",
        device_kind="NVIDIA GB200",
        topology_axes=0,
        max_chips=16384,
        # A tray holds four; eighteen trays share one NVLink domain.
        chips_per_host=4,
        nvlink_domain=72,
        hbm_bytes=197897748480,
        peak_bf16=2500 * TERA,
        peak_f32_native=80 * TERA,
        hbm_bandwidth=7928 * GB,
        ici_link_bandwidth=900 * GB,
        dcn_host_bandwidth=200 * GB,
        host_link_bandwidth=450 * GB,
        gpu=_GB200,
    ),
    Generation(
        name="b300",
        platform="gpu",
        device_kind="NVIDIA B300",
        topology_axes=0,
        max_chips=16384,
        chips_per_host=8,
        hbm_bytes=297021865984,
        peak_bf16=2250 * TERA,
        peak_f32_native=75 * TERA,
        hbm_bandwidth=7936 * GB,
        ici_link_bandwidth=900 * GB,
        dcn_host_bandwidth=800 * GB,
        host_link_bandwidth=50 * GB,
        gpu=_B300,
    ),
    Generation(
        name="rtx6000pro",
        platform="gpu",
        device_kind="NVIDIA RTX PRO 6000 Blackwell",
        topology_axes=0,
        max_chips=1024,
        chips_per_host=8,
        hbm_bytes=103079215104,
        # FP4 with sparsity is 4,000 TOPS on the data sheet: an eighth of it is dense bf16.
        peak_bf16=500 * TERA,
        peak_f32_native=125 * TERA,
        hbm_bandwidth=1792 * GB,
        ici_link_bandwidth=50 * GB,
        dcn_host_bandwidth=50 * GB,
        host_link_bandwidth=50 * GB,
        gpu=_RTX6000PRO,
    ),
    Generation(
        name="l4",
        platform="gpu",
        device_kind="NVIDIA L4",
        topology_axes=0,
        max_chips=1024,
        chips_per_host=8,
        # Sold as 24 GB; NVIDIA's tools report 23,034 MiB.
        hbm_bytes=23034 << 20,
        peak_bf16=121 * TERA,
        peak_f32_native=30.3 * TERA,
        hbm_bandwidth=300 * GB,
        ici_link_bandwidth=25 * GB,
        dcn_host_bandwidth=12.5 * GB,
        host_link_bandwidth=25 * GB,
        gpu=_L4,
    ),
    Generation(
        name="a6000",
        platform="gpu",
        device_kind="NVIDIA RTX A6000",
        topology_axes=0,
        max_chips=1024,
        chips_per_host=8,
        hbm_bytes=51041271808,
        peak_bf16=154.8 * TERA,
        peak_f32_native=38.7 * TERA,
        hbm_bandwidth=768 * GB,
        ici_link_bandwidth=25 * GB,
        dcn_host_bandwidth=12.5 * GB,
        host_link_bandwidth=25 * GB,
        gpu=_A6000,
    ),
)
