"""The devices at hand as a `Target`, JAX's own options, and the id of a run."""

import os
import secrets

import jax

from haliax_ext.loading import hosts_of
from levanter.mesh import DeviceSet
from levanter.run import Target
from levanter.trainer.config import JAX_CONFIG, TrainerConfig


def local_target(found: DeviceSet) -> Target:
    """The devices that are here, described."""
    return Target(
        name="local",
        platform=found.platform,
        kind=found.kind,
        devices=len(found.devices),
        granules=found.granules,
        hosts=found.hosts,
        hbm_bytes=found.hbm_bytes,
        hosts_on=lambda spec: hosts_of(spec.build(found.devices)),
    )


def run_id(trainer: TrainerConfig) -> str:
    """The run's id: the config's, `$RUN_ID`, or eight random characters."""
    return trainer.id or os.environ.get("RUN_ID") or secrets.token_hex(4)


def configure_jax(trainer: TrainerConfig) -> None:
    """Sets JAX's options as `trainer.jax_config` and `trainer.jax_compilation_cache_dir` say; call it first.

    Raises:
        ValueError: an option that this JAX does not have (defaults of ours that it lacks are left out).
    """
    problems = []
    for name, value in trainer.jax_config.items():
        if hasattr(jax.config, name):
            jax.config.update(name, value)
        elif name not in JAX_CONFIG:
            problems.append(f"trainer.jax_config.{name}: jax {jax.__version__} has no such option")
    if trainer.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", trainer.jax_compilation_cache_dir)
    if trainer.distributed.coordinator_address is not None:
        problems.append("trainer.distributed: runs of several processes are not supported yet")
    if problems:
        raise ValueError("\n".join(problems))
