"""The local devices as a `Target`, and JAX's own options."""

import logging
from pathlib import Path

import jax

from haliax_ext.loading import device_hosts
from levanter.commands.cli.lifecycle import join_processes
from levanter.hardware.memory import host_memory
from levanter.mesh import DeviceSet
from levanter.runplan import Target
from levanter.trainer.config import JAX_CONFIG, TrainerConfig


def local_target(devices: DeviceSet) -> Target:
    """Describes the local devices."""
    return Target(
        name="local",
        platform=devices.platform,
        kind=devices.kind,
        devices=len(devices.devices),
        granules=devices.granules,
        hosts=devices.hosts,
        hbm_bytes=devices.hbm_bytes,
        # Host memory is the devices' memory only on CPUs.
        host_bytes=host_memory() if devices.platform == "cpu" else None,
        hosts_on=lambda spec: device_hosts(spec.build(devices.devices)),
    )


def configure_jax(trainer: TrainerConfig) -> None:
    """Sets JAX's options from `trainer.jax_config` and joins the other processes of the run; must be called first.

    Raises:
        ValueError: JAX has no option of that name (our own defaults that this JAX lacks are skipped).
        RendezvousError: not all processes of the run joined in time.
    """
    quiet_absent_gpus()
    problems = set_jax_options(trainer)
    if problems:
        raise ValueError("\n".join(problems))
    join_processes(trainer.distributed)


def set_jax_options(trainer: TrainerConfig) -> list[str]:
    """Sets the options of `trainer.jax_config` and returns the problems.

    Our own defaults that this JAX lacks are skipped.
    """
    problems = []
    for name, value in trainer.jax_config.items():
        if hasattr(jax.config, name):
            jax.config.update(name, value)
        elif name not in JAX_CONFIG:
            problems.append(f"trainer.jax_config.{name}: JAX {jax.__version__} has no such option")
    return problems


GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")
"""Files of which a machine with an NVIDIA GPU and its driver has one."""


def quiet_absent_gpus() -> None:
    """Where there is no GPU, drops JAX's traceback about its CUDA plugin, which is then installed to compile plans."""
    logger = logging.getLogger("jax._src.xla_bridge")
    if any(Path(path).exists() for path in GPU_DEVICES) or any(isinstance(f, _AbsentGpu) for f in logger.filters):
        return
    logger.addFilter(_AbsentGpu())


class _AbsentGpu(logging.Filter):
    """Passes every record but the one about a CUDA plugin that found no CUDA."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not ("plugin configuration error" in message and "xla_cuda" in message)
