"""The available devices as a `Target`, and JAX's own options."""

import jax

from haliax_ext.loading import device_hosts
from levanter.commands.cli.lifecycle import join_processes
from levanter.hardware.memory import host_memory
from levanter.mesh import DeviceSet
from levanter.runplan import Target
from levanter.trainer.config import JAX_CONFIG, TrainerConfig


def local_target(found: DeviceSet) -> Target:
    """The available devices, described."""
    return Target(
        name="local",
        platform=found.platform,
        kind=found.kind,
        devices=len(found.devices),
        granules=found.granules,
        hosts=found.hosts,
        hbm_bytes=found.hbm_bytes,
        host_bytes=host_memory() if found.platform == "cpu" else None,
        hosts_on=lambda spec: device_hosts(spec.build(found.devices)),
    )


def configure_jax(trainer: TrainerConfig) -> None:
    """Sets JAX's options from `trainer.jax_config`, and joins the other processes of the run; call it first.

    Raises:
        ValueError: an option that this JAX does not have (defaults of ours that it lacks are left out).
        RollCallError: not all processes of the run joined in time.
    """
    problems = set_jax_options(trainer)
    if problems:
        raise ValueError("\n".join(problems))
    join_processes(trainer.distributed)


def set_jax_options(trainer: TrainerConfig) -> list[str]:
    """Sets the options of `trainer.jax_config`; returns what is wrong with them.

    Defaults of ours that this JAX lacks are left out.
    """
    problems = []
    for name, value in trainer.jax_config.items():
        if hasattr(jax.config, name):
            jax.config.update(name, value)
        elif name not in JAX_CONFIG:
            problems.append(f"trainer.jax_config.{name}: JAX {jax.__version__} has no such option")
    return problems
