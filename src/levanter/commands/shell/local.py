"""The devices at hand as a `Target`, JAX's own options, and the id of a run."""

import os
import secrets
from pathlib import Path

import jax

from haliax_ext.loading import hosts_of
from levanter.commands.shell.lifecycle import join_processes
from levanter.io import is_remote, local_path
from levanter.mesh import DeviceSet
from levanter.processes.barrier import agreed
from levanter.run import Check, Target
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


def output_checks(key: str, path: str | Path) -> list[Check]:
    """Whether something can be written at a path, as far as that shows without writing.

    Args:
        key: what the config calls it.
        path: a file or folder that may not exist yet.
    """
    if is_remote(str(path)):
        message = f"{key}: {path}: whether it can be written is known where the run is"
        return [Check(name="output", status="unchecked", message=message)]
    at = Path(local_path(str(path))).absolute()
    there = next(each for each in (at, *at.parents) if each.exists())
    if there != at and not there.is_dir():
        problem = f"{key}: {path}: {there} is a file, not a folder"
    elif not os.access(there, os.W_OK):
        problem = f"{key}: {path}: no permission to write in {there}"
    else:
        return []
    # Another machine may have it: an error where it runs, not where it is planned.
    return [Check(name="output", status="unchecked", message=problem, error=ValueError(problem))]


def run_id(trainer: TrainerConfig) -> str:
    """The run's id: the config's, `$RUN_ID`, or eight random characters, the same on all processes."""
    return agreed("run id", trainer.id or os.environ.get("RUN_ID") or secrets.token_hex(4))


def configure_jax(trainer: TrainerConfig) -> None:
    """Sets JAX's options as `trainer.jax_config` and `trainer.jax_compilation_cache_dir` say, and joins the other
    processes of the run; call it first.

    Raises:
        ValueError: an option that this JAX does not have (defaults of ours that it lacks are left out).
        RollCallError: not all processes of the run came in time.
    """
    problems = set_jax_options(trainer)
    if trainer.jax_compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", trainer.jax_compilation_cache_dir)
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
            problems.append(f"trainer.jax_config.{name}: jax {jax.__version__} has no such option")
    return problems
