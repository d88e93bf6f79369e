"""For tests whose programs compile for longer than they run: alike ones once, and without LLVM's optimizations.

JAX forgets what a function compiled to when nobody has the function any more, and each plan of each test has functions
of its own; many tests run the same tiny model on the same mesh. What JAX hands to XLA is compared, not the functions.
Fusion, partitioning and everything else that XLA does with HLO is as always.

`tests/conftest.py` does so for every module that is not marked `optimized`.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import cache_key, compiler


@contextlib.contextmanager
def compile_once() -> Iterator[None]:
    """What is compiled inside of this block, in this process."""
    own, lock = compiler.compile_or_get_cached, threading.Lock()
    kept: dict[tuple[str, tuple[int, ...]], Any] = {}

    def once(backend, computation, devices, compile_options, host_callbacks, *rest, **more):
        ids = tuple(device.id for device in devices.flatten())
        key = cache_key.get(computation, devices, compile_options, backend), ids
        with lock:
            found = None if host_callbacks else kept.get(key)
        if found is None:
            found = own(backend, computation, devices, compile_options, host_callbacks, *rest, **more)
            with lock:
                kept[key] = found
        return found

    compiler.compile_or_get_cached = once
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        compiler.compile_or_get_cached = own
