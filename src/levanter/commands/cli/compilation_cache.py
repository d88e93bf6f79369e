"""Compiled Programs that are kept between runs: where JAX's persistent compilation cache is.

A second start of the same run then reads what the first one compiled. JAX's key is of the Program's text, the options,
the versions of JAX and the compiler, and the kind and layout of the devices; whatever differs is compiled anew. If an
entry cannot be read, JAX warns and compiles.
"""

import logging
import os

import jax

from levanter.io.cache import cache_folder
from levanter.io.paths import is_remote
from levanter.trainer.config import TrainerConfig

log = logging.getLogger(__name__)

LARGEST_CACHE = 16 << 30
"""Bytes of the default folder; beyond them, what has not been used for longest is deleted."""


def keep_compiled(trainer: TrainerConfig, *, platform: str) -> str | None:
    """Chooses the folder of JAX's compilation cache; call it before anything is compiled.

    A folder that JAX has been given already, by `JAX_COMPILATION_CACHE_DIR` or `trainer.jax_config`, stays unless the
    config names another. Of several processes, JAX lets the first write, so those on other hosts gain only by a folder
    that all of them see.

    Args:
        trainer: its `jax_compilation_cache_dir` is a folder or URL, true for the default folder, false for none, or
            null for the default folder on accelerators and none on CPUs, which compile in seconds, and whose code might
            not run on another machine that shares the folder.
        platform: of the devices.

    Returns:
        The folder; None where nothing is kept.
    """
    asked = trainer.jax_compilation_cache_dir
    if asked is False:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if isinstance(asked, str):
        folder = asked
    elif given := jax.config.values["jax_compilation_cache_dir"]:
        return str(given)
    elif asked is None and platform == "cpu":
        return None
    else:
        folder = str(cache_folder() / "compiled")
        # JAX needs `filelock` for this, which huggingface_hub brings.
        jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)
    if not is_remote(folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            if isinstance(asked, str):
                raise ValueError(
                    f"trainer.jax_compilation_cache_dir: {folder} cannot be made ({error.strerror}); name another "
                    "folder, or false to keep nothing"
                ) from error
            log.info("compiled programs are not kept: %s cannot be made (%s)", folder, error.strerror)
            return None
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder
