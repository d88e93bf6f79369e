"""What a train step sends to host memory and back: activations that gradient checkpointing offloads.

Each named activation that is offloaded crosses a chip's link to its host twice a microbatch, out in the forward pass
and back in the backward pass, and lies in the host's memory in between. Bytes follow from the plan's activations and
layers, so they are known without a compiler, which takes half an hour over such a Program. The link works in both
directions at once, so a step takes at least the time of one of them.
"""

from dataclasses import dataclass

from haliax_ext.errors import gib
from levanter.hardware import Accelerator
from levanter.models.activations import EMBEDDED, RESIDUAL, kept_by_name
from levanter.models.stack import checkpoint_policy
from levanter.plan.layout_memory import LayoutSubject, model_of
from levanter.runplan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """What goes to host memory.

    Attributes:
        program: of which Program.
        names: of the activations.
        device_bytes: of a device, in one microbatch: what is in host memory at one time.
        microbatches: of a step.
        host_bytes: of all devices of a host.
        seconds: of a step, for one direction; None where the link's bandwidth is not known.
        room: bytes of memory that a host of this kind has; None where that is not known.
    """

    program: str
    names: tuple[str, ...]
    device_bytes: int
    microbatches: int
    host_bytes: int
    seconds: float | None
    room: int | None

    @property
    def fits(self) -> bool:
        """Whether a host has as much memory; True where that is not known."""
        return self.room is None or self.host_bytes <= self.room

    def __str__(self) -> str:
        room = "" if self.room is None else f" of {gib(self.room)}"
        times = "" if self.microbatches == 1 else f", {self.microbatches} times a step"
        return (
            f"{self.program} sends {gib(self.device_bytes)} a device to host memory and back{times} "
            f"({', '.join(self.names)}): {gib(self.host_bytes)}{room} on a host"
        )


def offloaded(plan: RunPlan, program: str, *, pod: Accelerator) -> Offloaded | None:
    """What a Program of a plan offloads; None where it offloads nothing.

    Args:
        plan: the run.
        program: its Program's name.
        pod: what it is for.
    """
    subject = LayoutSubject(plan=plan, program=plan.program(program), hbm_bytes=pod.hbm_bytes)
    model = model_of(subject)
    # A schedule of batch sizes has one train step for each of them; activations are those of the first.
    first = next((work for work in plan.workloads), None)
    if not subject.training or model is None or first is None or program != first.program:
        return None
    policy = checkpoint_policy(getattr(model, "gradient_checkpointing", True))
    named = policy.offload_block_internals
    wanted = tuple(named) if isinstance(named, list | tuple) else ()
    stream = next((each.bytes_per_device for each in plan.activations.leaves if each.leaf.path == RESIDUAL), 0)
    total, names = 0, []
    if policy.save_carries == "offload":
        total, names = stream * len(model.layers), [RESIDUAL]
    for each in plan.activations.leaves:
        inner = {name: size for name, size in each.leaf.axes if name not in (subject.batch_axis, "position")}
        kept = {} if each.leaf.path == RESIDUAL else kept_by_name(model, inner, wanted)
        if kept and not set(names) & set(kept):
            # What is added to the residual stream lies as that does.
            nbytes = stream if each.leaf.path == EMBEDDED else each.bytes_per_device
            total += nbytes * sum(kept.values())
            names += kept
    if not names:
        return None
    microbatches = max(1, first.tokens // (subject.rows * subject.positions))
    link, chips = pod.generation.host_link_bandwidth, pod.chips_per_host
    devices = chips * pod.generation.devices_per_chip
    room = pod.generation.host_bytes
    return Offloaded(
        program=program,
        names=tuple(names),
        device_bytes=total,
        microbatches=microbatches,
        host_bytes=total * devices,
        seconds=None if link is None else total * microbatches * pod.generation.devices_per_chip / link,
        room=None if room is None else room * chips // pod.generation.chips_per_host,
    )
