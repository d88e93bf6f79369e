"""The compilers of accelerators that are not attached: whether one is installed, and how a worker starts it.

A `TargetCompiler` is libtpu, or XLA's GPU compiler in JAX's CUDA plugin. Both run on a machine with CPUs only, and only
inside the compile worker. The caller checks that the compiler is installed, and sets the worker's environment; the
worker asks for devices of a topology that does not exist.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from levanter.hardware import Accelerator

CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""Distributions that bring JAX's CUDA plugin; each depends on a second one (`…-pjrt`) with the compiler."""
GPU_EXTRA = "pip install 'levanter-fork[plan-gpu]'"


class CompilerMissing(ValueError):
    """The compiler of a target is not installed, or it is one of another JAX."""


class TargetCompiler(Protocol):
    """A compiler for devices that are absent."""

    def require(self, target: str) -> None:
        """Checks that it is installed.

        Raises:
            CompilerMissing: it is not; the message is one line with what installs it.
        """
        ...

    def environment(self, pod: Accelerator) -> dict[str, str]:
        """Environment variables that a worker needs before Python starts."""
        ...

    def options(self) -> dict[str, str]:
        """Options of XLA without which it would need a device; a Program has them only where it is planned."""
        ...

    def devices(self, pod: Accelerator) -> list[Any]:
        """Devices of a pod without the pod: they can be placed on a mesh and compiled for, and nothing else."""
        ...

    def identity(self) -> dict[str, Any]:
        """What tells this compiler from another one in the cache: versions, and the size of its library."""
        ...


def compiler_for(pod: Accelerator) -> TargetCompiler:
    """The compiler of a target."""
    return GpuCompiler() if pod.generation.platform == "gpu" else TpuCompiler()


def has_compiler(pod: Accelerator) -> bool:
    """Whether Programs can be compiled here for a target."""
    if not pod.can_compile:
        return False
    try:
        compiler_for(pod).require(pod.name)
    except CompilerMissing:
        return False
    return True


class TpuCompiler:
    """libtpu."""

    def require(self, target: str) -> None:
        """See `TargetCompiler`."""
        if importlib.util.find_spec("libtpu") is None:
            raise CompilerMissing(
                f"compiling for {target} needs the TPU compiler, which is not installed here: "
                "pip install 'levanter-fork[plan]' (a CPU machine is enough; without it, plan with --no-compile)"
            )

    def environment(self, pod: Accelerator) -> dict[str, str]:
        """See `TargetCompiler`; libtpu reads these when it is loaded."""
        return {
            # Outside Google Cloud the query of the metadata server would wait for its timeout.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": pod.libtpu_accelerator_type,
            "TPU_WORKER_HOSTNAMES": "localhost",
            # Several workers load libtpu at once, without its lock file.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_LOG_DIR": "disabled",
            "TPU_MIN_LOG_LEVEL": "3",
            "TPU_STDERR_LOG_LEVEL": "3",
        }

    def options(self) -> dict[str, str]:
        """See `TargetCompiler`."""
        return {}

    def devices(self, pod: Accelerator) -> list[Any]:
        """See `TargetCompiler`."""
        from jax.experimental import topologies

        arguments: dict[str, Any] = {"chips_per_host_bounds": pod.chips_per_host_bounds}
        if pod.generation.chip_config_name:
            arguments["chip_config_name"] = pod.generation.chip_config_name
        if pod.slices > 1:
            arguments["num_slices"] = pod.slices
        topology = topologies.get_topology_desc(platform="tpu", topology_name=pod.topology_name, **arguments)
        return list(topology.devices)

    def identity(self) -> dict[str, Any]:
        """See `TargetCompiler`."""
        spec = importlib.util.find_spec("libtpu")
        folders = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
        # A nightly build may replace the library under the same version; its size tells the two apart
        # without reading hundreds of MB for a digest.
        sizes = [path.stat().st_size for folder in folders for path in sorted(folder.glob("*.so"))]
        return {**_versions("jax", "jaxlib", "libtpu"), "library_bytes": sizes}


class GpuCompiler:
    """XLA's GPU compiler, in JAX's CUDA plugin. It calls NVIDIA's assembler, and needs no library of kernels."""

    def require(self, target: str) -> None:
        """See `TargetCompiler`."""
        plugin, jaxlib = cuda_plugin(), importlib.metadata.version("jaxlib")
        if plugin is None:
            raise CompilerMissing(
                f"compiling for {target} needs XLA's GPU compiler, which is not installed here: {GPU_EXTRA} "
                "(a CPU machine is enough; without it, plan with --no-compile)"
            )
        name, version = plugin
        # JAX ignores a plugin of another release, and the error that follows does not say so.
        if version != jaxlib:
            raise CompilerMissing(
                f"compiling for {target} needs the GPU compiler of jaxlib {jaxlib}, and {name} is {version}: "
                f"pip install {name}=={jaxlib} (without it, plan with --no-compile)"
            )

    def environment(self, pod: Accelerator) -> dict[str, str]:  # noqa: ARG002 (a TPU's depends on the pod)
        """See `TargetCompiler`."""
        # XLA reports on standard error that there is no device, and every fusion that it does not autotune.
        return {"TF_CPP_MIN_LOG_LEVEL": "2"}

    def options(self) -> dict[str, str]:
        """See `TargetCompiler`."""
        # Autotuning runs kernels on the device. Without it the compiler takes the kernel that its cost model prefers,
        # from the same buffers.
        return {"xla_gpu_autotune_level": "0"}

    def devices(self, pod: Accelerator) -> list[Any]:
        """See `TargetCompiler`."""
        from jax.experimental import topologies

        description = pod.generation.gpu
        assert description is not None, f"{pod}: the GPU compiler has no description of the card"
        cudnn, cuda = _library_versions(description.capability)
        config = description.target_config(
            name=pod.generation.device_kind,
            memory_bytes=pod.generation.hbm_bytes,
            bandwidth=pod.generation.hbm_bandwidth,
            cudnn=cudnn,
            cuda=cuda,
        )
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name=pod.name, target_config=config, topology=pod.topology_name
        )
        return list(topology.devices)

    def identity(self) -> dict[str, Any]:
        """See `TargetCompiler`."""
        plugin = cuda_plugin()
        return {**_versions("jax", "jaxlib"), "cuda": None if plugin is None else list(plugin)}


@functools.cache
def cuda_plugin() -> tuple[str, str] | None:
    """The distribution of JAX's CUDA plugin and its version; None where there is none."""
    for name in CUDA_PLUGINS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _versions(*distributions: str) -> dict[str, Any]:
    return {name: importlib.metadata.version(name) for name in distributions}


def _library_versions(capability: tuple[int, int]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The versions of cuDNN and of the CUDA runtime that this JAX was built against, which its `gpu` extra installs.

    JAX asks the libraries for their version while it lowers cuDNN's attention, and the first device for its compute
    capability. Neither is here, so in this process the answers are those of the target.

    Args:
        capability: compute capability of the target.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention
    from jax._src.lib import cuda_versions

    assert cuda_versions is not None, "JAX's CUDA plugin has no versions"
    number, runtime = int(cuda_versions.cudnn_build_version()), int(cuda_versions.cuda_runtime_build_version())
    answers: tuple[tuple[object, str, object], ...] = (
        (cuda_versions, "cudnn_get_version", lambda: number),
        (attention, "check_compute_capability", lambda text: capability >= _capability(text)),
        (attention, "is_cuda_compute_capability_equal", lambda text: capability == _capability(text)),
    )
    for module, name, answer in answers:
        # A JAX that asks otherwise fails where it lowers cuDNN's attention, and says so; nothing is answered wrongly.
        if hasattr(module, name):
            setattr(module, name, answer)
    # cuDNN counts 91501 for 9.15.1, CUDA 13010 for 13.1.
    return (number // 10000, number // 100 % 100, number % 100), (runtime // 1000, runtime // 10 % 100, 0)


def _capability(text: str) -> tuple[int, int]:
    """`9.0` → (9, 0)."""
    major, minor = text.split(".")
    return int(major), int(minor)


def compiler_identity(pod: Accelerator | None) -> Mapping[str, Any]:
    """What tells the compiler of a target from another one; of the devices of this machine, JAX's versions."""
    return _versions("jax", "jaxlib") if pod is None else compiler_for(pod).identity()
