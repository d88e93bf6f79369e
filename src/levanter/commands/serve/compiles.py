"""How many computations JAX compiles: once a server is ready there should be none."""

from collections.abc import Callable

import jax.monitoring

EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX reports each time, whether it compiles or finds it in a folder of compiled programs."""


class _Count:
    """What was compiled since this process began to listen."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, event: str, duration_secs: float, **more: str | int) -> None:
        """JAX has done something."""
        del duration_secs, more
        self.value += event == EVENT


_LISTENING: list[_Count] = []


def compiled_from_now() -> Callable[[], int]:
    """Counts what this process compiles from now on.

    Returns:
        What gives the number so far.
    """
    if not _LISTENING:
        # JAX keeps its listeners: one is enough for a process.
        _LISTENING.append(_Count())
        jax.monitoring.register_event_duration_secs_listener(_LISTENING[0])
    count = _LISTENING[0]
    before = count.value
    return lambda: count.value - before
