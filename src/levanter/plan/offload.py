"""Activations that gradient checkpointing offloads to host memory: their bytes, and seconds on the host link.

Each named activation that is offloaded crosses a chip's link to its host twice a microbatch, out in the forward pass
and back in the backward pass, and is in host memory in between. Bytes follow from the plan's activations and
layers, so they are known without a compiler, which takes half an hour over such a Program. The link works in both
directions at once, so a step takes at least the time of one of them.
"""

from dataclasses import dataclass

from haliax_ext.errors import gib
from levanter.hardware import Accelerator
from levanter.models.activations import EMBEDDED, RESIDUAL, kept_by_name
from levanter.models.stack import checkpoint_policy
from levanter.plan.layout_memory import LayoutSubject, model_config
from levanter.runplan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """The activations that one Program offloads to host memory.

    Attributes:
        program: the Program's name.
        names: of the activations.
        device_bytes: of a device, in one microbatch: the bytes in host memory at one time.
        microbatches: of a step.
        host_bytes: of all devices of a host.
        seconds: of a step, for one direction; None where the link's bandwidth is not known.
        host_limit: bytes of memory that a host of this kind has; None where that is not known.
    """

    program: str
    names: tuple[str, ...]
    device_bytes: int
    microbatches: int
    host_bytes: int
    seconds: float | None
    host_limit: int | None

    @property
    def fits(self) -> bool:
        """Whether a host has as much memory; True where that is not known."""
        return self.host_limit is None or self.host_bytes <= self.host_limit

    def __str__(self) -> str:
        limit_text = "" if self.host_limit is None else f" of {gib(self.host_limit)}"
        times = "" if self.microbatches == 1 else f", {self.microbatches} times a step"
        return (
            f"{self.program} sends {gib(self.device_bytes)} a device to host memory and back{times} "
            f"({', '.join(self.names)}): {gib(self.host_bytes)}{limit_text} on a host"
        )


def offloaded_activations(plan: RunPlan, program: str, *, pod: Accelerator) -> Offloaded | None:
    """The activations that a Program of a plan offloads; None where it offloads nothing.

    Args:
        plan: the run.
        program: its Program's name.
        pod: the target.
    """
    subject = LayoutSubject(plan=plan, program=plan.program(program), hbm_bytes=pod.hbm_bytes)
    model = model_config(subject)
    # A schedule of batch sizes has one train step for each of them; activations are those of the first.
    first = next((work for work in plan.workloads), None)
    if not subject.training or model is None or first is None or program != first.program:
        return None
    policy = checkpoint_policy(getattr(model, "gradient_checkpointing", True))
    named = policy.offload_block_internals
    policy_names = tuple(named) if isinstance(named, list | tuple) else ()
    stream = next(
        (activation.bytes_per_device for activation in plan.activations.leaves if activation.leaf.path == RESIDUAL), 0
    )
    total, names = 0, []
    if policy.save_carries == "offload":
        total, names = stream * len(model.layers), [RESIDUAL]
    for activation in plan.activations.leaves:
        inner = {name: size for name, size in activation.leaf.axes if name not in (subject.batch_axis, "position")}
        layer_counts = {} if activation.leaf.path == RESIDUAL else kept_by_name(model, inner, policy_names)
        # Planned activations with the same feature axes match the same names: each name counts once.
        if layer_counts and not set(names) & set(layer_counts):
            # Embedded tokens become the residual stream, so they are sharded like it.
            nbytes = stream if activation.leaf.path == EMBEDDED else activation.bytes_per_device
            total += nbytes * sum(layer_counts.values())
            names += layer_counts
    if not names:
        return None
    # Tokens of a step over tokens of a microbatch.
    microbatches = max(1, first.tokens // (subject.rows * subject.positions))
    link, chips = pod.generation.host_link_bandwidth, pod.chips_per_host
    devices = chips * pod.generation.devices_per_chip
    host_limit = pod.generation.host_bytes
    return Offloaded(
        program=program,
        names=tuple(names),
        device_bytes=total,
        microbatches=microbatches,
        host_bytes=total * devices,
        # A chip's link carries the bytes of all of its devices.
        seconds=None if link is None else total * microbatches * pod.generation.devices_per_chip / link,
        host_limit=None if host_limit is None else host_limit * chips // pod.generation.chips_per_host,
    )
