"""The memory that a compiled Program takes, compared with what a device has before it runs.

A CPU's allocator does not refuse: what a Program asks for beyond the machine's memory ends in the kernel, which kills
the process without a word. The executable knows how much it will ask for.
"""

from jax.sharding import Mesh

from haliax_ext.errors import gib
from haliax_ext.program import Program
from levanter.hardware.memory import host_memory
from levanter.runplan import DoesNotFitError


def require_room_for(program: Program, mesh: Mesh) -> None:
    """Looks whether a Program that was prepared for a mesh fits on its devices.

    Raises:
        DoesNotFitError: it takes more than a device has.
    """
    taken, limit = program.memory(mesh), device_memory(mesh)
    if taken is None or limit is None or taken.total <= limit:
        return
    parts = f"{gib(taken.argument)} of inputs, {gib(taken.temp)} for what it makes on the way"
    raise DoesNotFitError(
        f"{program.name} does not fit: it takes {gib(taken.total)} of a device's {gib(limit)}: {parts}, "
        f"{gib(taken.output)} of results\n"
        "fewer rows at once, a shorter row, or more devices need less; `levanter plan` says how much before"
    )


def device_memory(mesh: Mesh) -> int | None:
    """Bytes of a device: its own, or its share of the machine's; None where nobody needs to look."""
    if mesh.devices.flat[0].platform == "tpu":
        return None  # its compiler refuses by itself
    mine = [device for device in mesh.devices.flat if device.process_index == device.client.process_index()]
    if not mine:
        return None
    if mine[0].platform == "cpu":
        memory = host_memory()
        return None if memory is None else memory // len(mine)
    return (mine[0].memory_stats() or {}).get("bytes_limit")
