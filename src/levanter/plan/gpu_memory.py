"""What a GPU holds beside the buffers of a compiled Program, and what limits them.

The compiler's figure of a Program (inputs, results that are not donated, temporaries with the workspaces of cuBLAS) is
what JAX's allocator must have room for. The allocator takes a share of the card when a process starts; outside of it
are the driver's context and NCCL's buffers.
"""

from haliax_ext.errors import gib
from levanter.hardware import Accelerator
from levanter.hardware.memory import FRACTION_VARIABLES, OUTSIDE_BYTES, allocator_bytes, memory_fraction

HIGH_FRACTION = 0.92
"""A share that runs of others on cards of 80 GB set, and that leaves 6 GiB of them outside the allocator."""


def gpu_memory_note(pod: Accelerator | None, *, needed: int | None = None) -> str | None:
    """The sentence on the memory limit of a GPU; None for other targets.

    Args:
        pod: the target.
        needed: bytes that the run needs on a GPU; None where they are not known.
    """
    if pod is None or pod.generation.platform != "gpu":
        return None
    memory, fraction = pod.generation.hbm_bytes, memory_fraction()
    note = (
        f"memory of a GPU: {gib(pod.hbm_bytes)}, {fraction:.0%} of {gib(memory)}: what JAX's allocator takes; the "
        f"context of the driver and NCCL's buffers are outside of it"
    )
    higher = allocator_bytes(memory, fraction=HIGH_FRACTION)
    if higher <= pod.hbm_bytes or memory - higher < OUTSIDE_BYTES:
        return note
    # The variable is read by the plan and by the run: set for one alone, the plan would be about another run.
    enough = ", where this run fits" if needed is not None and pod.hbm_bytes < needed <= higher else ""
    return f"{note}. {FRACTION_VARIABLES[0]}={HIGH_FRACTION:g}, set for plan and run, makes it {gib(higher)}{enough}"
