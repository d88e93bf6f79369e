"""JAX's persistent compilation cache, and a check of the compiler options before anything is loaded.

With the cache, a second start of the same run reads the executables of the first. JAX's cache key covers the Program's
text, the options, the versions of JAX and of the compiler, and the kind and layout of the devices; a Program with
another key is compiled. If an entry cannot be read, JAX warns and compiles.
"""

import logging
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from haliax_ext.compiler_options import CompilerOptionError
from haliax_ext.program import Program
from levanter.io.paths import cache_folder, is_remote
from levanter.runplan import RunPlan
from levanter.trainer.config import TrainerConfig

log = logging.getLogger(__name__)

LARGEST_CACHE = 16 << 30
"""Largest size of the default folder in bytes; JAX evicts the least recently used entries beyond it."""

PROGRAM = "compiler_options"
"""Name of the Program that is compiled to check compiler options; it never runs."""


def keep_compiled(trainer: TrainerConfig, *, platform: str) -> str | None:
    """Sets the folder of JAX's compilation cache; must be called before anything is compiled.

    A folder that is already set, by `JAX_COMPILATION_CACHE_DIR` or `trainer.jax_config`, is kept unless the config
    names another. Only process 0 writes the cache, so other hosts benefit only if they share the folder.

    Args:
        trainer: its `jax_compilation_cache_dir` is a folder or URL, true for the default folder, false for none, or
            null for the default folder on accelerators and none on CPUs. CPU Programs compile in seconds, and their
            machine code may not run on another machine that shares the folder.
        platform: platform of the devices.

    Returns:
        The folder; None if there is no cache.
    """
    setting = trainer.jax_compilation_cache_dir
    if setting is False:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if isinstance(setting, str):
        folder = setting
    elif current := jax.config.values["jax_compilation_cache_dir"]:
        # Set by $JAX_COMPILATION_CACHE_DIR or by trainer.jax_config.
        return str(current)
    elif setting is None and platform == "cpu":
        return None
    else:
        folder = str(cache_folder() / "compiled")
        # JAX needs the package filelock for a size limit; it is a dependency of huggingface_hub.
        jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)
    if not is_remote(folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            if isinstance(setting, str):
                raise ValueError(
                    f"trainer.jax_compilation_cache_dir: {folder} cannot be created ({error.strerror}); name another "
                    "folder, or false for no cache"
                ) from error
            log.info("no compilation cache: the folder %s cannot be created (%s)", folder, error.strerror)
            return None
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder


def try_compiler_options(trainer: TrainerConfig, plan: RunPlan, mesh: Mesh) -> None:
    """Compiles a trivial Program with the compiler options of each Program of a run, so that a bad option fails early.

    Args:
        trainer: the user's compiler settings.
        plan: the run's plan.
        mesh: the run's devices.

    Raises:
        CompilerOptionError: the compiler does not know an option, or cannot read its value.
    """
    if trainer.compiler == "default" and not trainer.compiler_options:
        return
    # Each distinct set of options is compiled once, before the weights are read.
    for options in {tuple(program.compiler_options.items()) for program in plan.computing}:
        if options:
            probe = Program(
                name=PROGRAM, function=lambda: {"zero": jnp.zeros(())}, inputs=(), compiler_options=dict(options)
            )
            try:
                probe.prepare(mesh)
            except CompilerOptionError as error:
                if trainer.compiler == "default" or any(
                    name in error.compiler_message for name in trainer.compiler_options
                ):
                    raise
                # The user wrote none of the named options, so a tuned one is the cause.
                remedy = "trainer.compiler: default omits the tuned options"
                message = f"{error.compiler_message} ({remedy})"
                raise CompilerOptionError(PROGRAM, options=dict(options), compiler_message=message) from error
