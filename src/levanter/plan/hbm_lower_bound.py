"""Lower bound of the HBM that a Program needs, by arithmetic, without a compiler.

*Known* bytes are alive at one time whatever a compiler does:

    inputs        what the Program takes, to the byte
    gradients     of a train step: float32, in the shards of the parameters
    kept          of a train step: what the backward pass is handed of each layer (block inputs, and what gradient
                  checkpointing keeps by name; all that a block names where nothing is recomputed)
    at work       the largest live set of a layer or the head besides them

A chip that has less refuses the Program. One that has more may still refuse it: weights gathered for a layer, what a
kernel or an optimizer makes on the way, a collective's buffers and the compiler's own padding have no name here. So a
sum of known bytes is called *at least*, and only a compiler says that something fits.
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
"""What no sum of known bytes has."""
UNNAMED_KEPT = "what a backward pass keeps without a name, "
"""And what it lacks besides where blocks are not recomputed."""


@dataclass(frozen=True, kw_only=True)
class HbmLowerBound:
    """Bytes on a chip that a Program needs at the least.

    Attributes:
        inputs: what it takes.
        gradients: that it makes.
        kept: of the forward pass, for the backward pass.
        at_work: the largest live set besides that.
        block: of a train step, all that has a name in one layer, and its input where that is gathered: most of it is
            there while its backward pass works.
        recomputed: whether a backward pass recomputes its blocks, so that what it keeps has names.
    """

    inputs: int
    gradients: int
    kept: int
    at_work: int
    block: int = 0
    recomputed: bool = True

    @property
    def total(self) -> int:
        """All of it: gradients come when what is at work in the forward pass has gone."""
        return self.inputs + self.kept + max(self.gradients, self.at_work)

    @property
    def likely(self) -> int:
        """With all of one layer beside the gradients: no bound, but nearer to what the compiler needs for many rows."""
        return max(self.total, self.inputs + self.kept + self.gradients + self.block)

    @property
    def lacking(self) -> str:
        """What the sum does not have."""
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
        figures: what it comes to.
    """
    if not _takes_batch(subject):
        # What makes a state, or moves one, has no activations.
        return HbmLowerBound(inputs=figures.arguments, gradients=0, kept=0, at_work=0)
    scale = layout.rows * subject.ways(layout) / subject.ways(subject.now)
    activations = layout_activations(subject, layout, scale).leaves
    kept = sum(activation.bytes_per_device * times for activation, times in _kept(subject, layout, activations))
    largest = max((a.bytes_per_device for a in activations if a.leaf.path not in (RESIDUAL, EMBEDDED)), default=0)
    # A block's input is there while anything in the block is: it is added to what comes of it.
    residual = sum(a.bytes_per_device for a in activations if a.leaf.path == RESIDUAL)
    return HbmLowerBound(
        inputs=figures.arguments,
        gradients=figures.gradients,
        kept=kept,
        at_work=largest if kept else residual + largest,
        block=_block(subject, activations) + _gathered(subject, layout, scale, residual),
        recomputed=not saves_everything(subject, layout),
    )


def _takes_batch(subject: LayoutSubject) -> bool:
    """Whether the Program is given rows."""
    inputs = (leaf for argument in subject.program.inputs for leaf in leaves(argument.value))
    return any(subject.batch_axis in leaf.names for leaf in inputs)


def _kept(subject: LayoutSubject, layout: Layout, activations: tuple[LeafPlan, ...]) -> Iterator[tuple[LeafPlan, int]]:
    """What a backward pass is handed, and of how many layers."""
    model = model_config(subject)
    if not subject.training or model is None:
        return
    policy = checkpoint_policy(layout.recompute or getattr(model, "gradient_checkpointing", True))
    everything = saves_everything(subject, layout)
    carries = (everything or policy.save_carries is True) and not policy.nested
    for activation in activations:
        name = activation.leaf.path
        if name == RESIDUAL:
            if carries:
                yield activation, len(model.layers)
        elif everything:
            yield activation, sum(name in layer.activations for layer in model.layers)
        else:
            yield activation, sum(saved_names(subject, activation).values())


def _block(subject: LayoutSubject, activations: tuple[LeafPlan, ...]) -> int:
    """Bytes of all that has a name in the layer that names most."""
    model = model_config(subject)
    if not subject.training or model is None:
        return 0
    sizes = {activation.leaf.path: activation.bytes_per_device for activation in activations}
    return max((sum(sizes.get(name, 0) for name in set(layer.activations)) for layer in model.layers), default=0)


def _gathered(subject: LayoutSubject, layout: Layout, scale: float, residual: int) -> int:
    """Bytes of a layer's input and of the sum that is its output, where both are whole only inside of the layer."""
    if not subject.training or not layout.mappings.residual:
        return 0
    inside = replace(layout, mappings=replace(layout.mappings, residual=AxisMapping({})))
    activations = layout_activations(subject, inside, scale).leaves
    whole = sum(activation.bytes_per_device for activation in activations if activation.leaf.path == RESIDUAL)
    return 2 * whole if whole > residual else 0
