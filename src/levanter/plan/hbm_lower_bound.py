"""Lower bound of the HBM that a Program needs, by arithmetic, without a compiler.

*Known* bytes are alive at one time whatever a compiler does:

    inputs        what the Program takes, to the byte
    gradients     of a train step: float32, in the shards of the parameters
    kept          of a train step: the activations of each layer that the backward pass needs (block inputs, and those
                  that gradient checkpointing saves by name; all named ones where nothing is recomputed)
    at work       the largest live set of a layer or the head besides them

A Program does not fit a chip that has less. A chip that has more may still be too small: weights gathered for a layer,
temporaries of kernels and of the optimizer, buffers of collectives and the compiler's padding are not counted. So a sum
of known bytes is called *at least*, and only a compiler decides that a Program fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from haliax_ext.abstract import leaves
from haliax_ext.errors import gib
from haliax_ext.mapping import AxisMapping
from haliax_ext.placement import LeafPlan
from levanter.models.activations import EMBEDDED, RESIDUAL
from levanter.models.stack import checkpoint_policy
from levanter.plan.layout_memory import (
    Layout,
    LayoutMemory,
    LayoutSubject,
    layout_activations,
    layout_memory,
    model_config,
    saved_names,
    saves_everything,
)
from levanter.runplan import RunPlan

UNNAMED = "gathered weights, kernels' and collectives' buffers and the compiler's padding"
"""Bytes that no sum of known bytes includes."""
UNNAMED_KEPT = "what a backward pass keeps without a name, "
"""Prefix of `UNNAMED` where blocks are not recomputed."""


@dataclass(frozen=True, kw_only=True)
class HbmLowerBound:
    """Bytes on a chip that a Program needs at the least.

    Attributes:
        inputs: of the Program.
        gradients: that it computes.
        kept: activations of the forward pass that are saved for the backward pass.
        at_work: the largest live set besides those.
        block: of a train step, all named activations of one layer, and its input where that is gathered: most of them
            are alive during the layer's backward pass.
        recomputed: whether a backward pass recomputes its blocks, so that everything it saves is named.
    """

    inputs: int
    gradients: int
    kept: int
    at_work: int
    block: int = 0
    recomputed: bool = True

    @property
    def total(self) -> int:
        """The bound: gradients are allocated after the live set of the forward pass is freed, so the larger counts."""
        return self.inputs + self.kept + max(self.gradients, self.at_work)

    @property
    def likely(self) -> int:
        """With one layer in addition to the gradients: not a bound, but nearer to compiled figures for many rows."""
        return max(self.total, self.inputs + self.kept + self.gradients + self.block)

    @property
    def lacking(self) -> str:
        """The bytes that the sum leaves out, in words."""
        return UNNAMED if self.recomputed else UNNAMED_KEPT + UNNAMED

    def __str__(self) -> str:
        terms = {"inputs": self.inputs, "gradients": self.gradients, "kept activations": self.kept}
        if self.at_work > self.gradients:
            terms = {"inputs": self.inputs, "kept activations": self.kept, "the largest activation": self.at_work}
        return " + ".join(f"{gib(nbytes)} of {name}" for name, nbytes in terms.items() if nbytes)


def program_lower_bound(plan: RunPlan, program: str, *, hbm_bytes: int) -> HbmLowerBound:
    """The known bytes of one Program of a plan.

    Args:
        plan: the run.
        program: its Program's name.
        hbm_bytes: of a chip.
    """
    subject = LayoutSubject(plan=plan, program=plan.program(program), hbm_bytes=hbm_bytes)
    return layout_lower_bound(subject, subject.now, layout_memory(subject, subject.now))


def layout_lower_bound(subject: LayoutSubject, layout: Layout, figures: LayoutMemory) -> HbmLowerBound:
    """The known bytes of a Program under a layout.

    Args:
        subject: the Program.
        layout: the layout.
        figures: its memory.
    """
    if not _takes_batch(subject):
        # Programs that initialize or move a state have no activations.
        return HbmLowerBound(inputs=figures.arguments, gradients=0, kept=0, at_work=0)
    # `rows` are per device, activations of the plan are over all devices: more
    # shards of the batch mean more rows in all.
    scale = layout.rows * subject.ways(layout) / subject.ways(subject.now)
    activations = layout_activations(subject, layout, scale).leaves
    saved_bytes = sum(activation.bytes_per_device * times for activation, times in _kept(subject, layout, activations))
    largest = max((a.bytes_per_device for a in activations if a.leaf.path not in (RESIDUAL, EMBEDDED)), default=0)
    # The block's input is alive during the whole block, because the residual connection adds it to the output.
    residual = sum(a.bytes_per_device for a in activations if a.leaf.path == RESIDUAL)
    return HbmLowerBound(
        inputs=figures.arguments,
        gradients=figures.gradients,
        kept=saved_bytes,
        at_work=largest if saved_bytes else residual + largest,
        block=_block(subject, activations) + _gathered(subject, layout, scale, residual),
        recomputed=not saves_everything(subject, layout),
    )


def _takes_batch(subject: LayoutSubject) -> bool:
    """Whether an input of the Program has the batch axis."""
    inputs = (leaf for argument in subject.program.inputs for leaf in leaves(argument.value))
    return any(subject.batch_axis in leaf.names for leaf in inputs)


def _kept(subject: LayoutSubject, layout: Layout, activations: tuple[LeafPlan, ...]) -> Iterator[tuple[LeafPlan, int]]:
    """The activations saved for the backward pass, and in how many layers each."""
    model = model_config(subject)
    if not subject.training or model is None:
        return
    policy = checkpoint_policy(layout.recompute or getattr(model, "gradient_checkpointing", True))
    everything = saves_everything(subject, layout)
    # With nested checkpointing only the inputs of groups of blocks stay, fewer
    # than one a layer: no lower bound.
    carries = (everything or policy.save_carries is True) and not policy.nested
    for activation in activations:
        name = activation.leaf.path
        if name == RESIDUAL:
            if carries:
                yield activation, len(model.layers)
        elif everything:
            yield activation, sum(name in layer.activations for layer in model.layers)
        else:
            yield activation, sum(saved_names(subject, activation, layout).values())


def _block(subject: LayoutSubject, activations: tuple[LeafPlan, ...]) -> int:
    """Bytes of all named activations of the layer that has most."""
    model = model_config(subject)
    if not subject.training or model is None:
        return 0
    sizes = {activation.leaf.path: activation.bytes_per_device for activation in activations}
    return max((sum(sizes.get(name, 0) for name in set(layer.activations)) for layer in model.layers), default=0)


def _gathered(subject: LayoutSubject, layout: Layout, scale: float, residual: int) -> int:
    """Bytes of a layer's input and output inside the layer, where the residual stream between layers is sharded."""
    if not subject.training or not layout.mappings.residual:
        return 0
    inside = replace(layout, mappings=replace(layout.mappings, residual=AxisMapping({})))
    activations = layout_activations(subject, inside, scale).leaves
    whole = sum(activation.bytes_per_device for activation in activations if activation.leaf.path == RESIDUAL)
    return 2 * whole if whole > residual else 0
