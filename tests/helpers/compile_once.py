"""For tests whose programs compile for longer than they run: alike ones once, and without optimizing machine code.

JAX forgets what a function compiled to when nobody has the function any more, and each plan of each test has functions
of its own; many tests run the same tiny model on the same mesh. What JAX hands to XLA is compared, not the functions.

LLVM's optimizations are left out. So is, for large computations, the way through MLIR that XLA's fused loops take on
CPUs: three quarters of the time that is left, for loops that run once. Other loops are fused then, so last bits of sums
can be others than a run's. Small ones compile quickly, and some of them are asked for every bit of a NaN, of which the
older way changes one. Who compiles to look at what was compiled (`lowered.compile()` of tests and plans) has everything
that XLA does with HLO, as always.

`tests/conftest.py` does so for every module that is not marked `optimized`. A compiled program is some tens of mappings
of memory, of which a process has 65,530; without a bound, a module of a hundred tests of eight devices ended in a
segmentation fault.
"""

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import cache_key, compiler
from jax._src.lib.mlir import ir

from haliax_ext.program import Program

OLDER_LOOPS = "xla_cpu_use_fusion_emitters"
"""XLA's option for those loops. The XLA of jax 0.12 has the other ones alone, and no such option."""
LARGE = 300
"""Operations."""
KEPT = 200
"""Compiled programs; the one that was not asked for the longest time makes room."""


def _is_large(computation: ir.Module) -> bool:
    left = LARGE

    def count(_: ir.Operation) -> ir.WalkResult:
        nonlocal left
        left -= 1
        return ir.WalkResult.ADVANCE if left else ir.WalkResult.INTERRUPT

    computation.operation.walk(count)
    return not left


@contextlib.contextmanager
def compile_once() -> Iterator[None]:
    """What is compiled inside of this block, in this process."""
    own, lock = compiler.compile_or_get_cached, threading.Lock()
    kept: OrderedDict[tuple[str, tuple[int, ...], bool], Any] = OrderedDict()
    own_way, looked_at = jax.stages.Lowered.compile, ContextVar("looked_at", default=False)
    has_older_loops = True

    def compile_as_asked(self: jax.stages.Lowered, *args, **more):
        # A Program prepares its runs so.
        before = looked_at.set(sys._getframe(1).f_code is not Program.prepare.__code__)
        try:
            return own_way(self, *args, **more)
        finally:
            looked_at.reset(before)

    def once(backend, computation, devices, compile_options, host_callbacks, *rest, **more):
        nonlocal has_older_loops
        quick = backend.platform == "cpu" and not looked_at.get() and _is_large(computation)
        as_always = list(compile_options.env_option_overrides)
        if quick and has_older_loops:
            compile_options.env_option_overrides = [*as_always, (OLDER_LOOPS, False)]
        ids = tuple(device.id for device in devices.flatten())
        key = cache_key.get(computation, devices, compile_options, backend), ids, quick
        with lock:
            found = None if host_callbacks else kept.get(key)
            if found is not None:
                kept.move_to_end(key)
        if found is None:
            try:
                found = own(backend, computation, devices, compile_options, host_callbacks, *rest, **more)
            except jax.errors.JaxRuntimeError as error:
                if OLDER_LOOPS not in str(error):
                    raise
                has_older_loops, compile_options.env_option_overrides = False, as_always
                found = own(backend, computation, devices, compile_options, host_callbacks, *rest, **more)
            with lock:
                kept[key] = found
                if len(kept) > KEPT:
                    kept.popitem(last=False)
        return found

    compiler.compile_or_get_cached, jax.stages.Lowered.compile = once, compile_as_asked
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        compiler.compile_or_get_cached, jax.stages.Lowered.compile = own, own_way
