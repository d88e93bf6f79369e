"""Lower bound of the HBM that a Program needs, by arithmetic, without a compiler.

*Known* bytes are alive at one time whatever a compiler does. Of a train step they are counted in three phases, and the
largest one counts:

    layer         the backward pass of one layer: weights gathered over the mesh axes that shard parameters only, or
                  their gradients before they are reduced, activations and their gradients
    head          the head, gathered, its float32 gradient, which is whole on each device, and a chunk of logits
    update        gradients of all parameters

All phases have the inputs. Layer and head also have

    weights       of the stacked layers, cast to the compute dtype in the shards of the parameters: the cast does not
                  depend on the layer, so compilers move it out of the loops over layers and microbatches
    accumulated   float32 gradients of earlier microbatches
    kept          activations of each layer that the backward pass needs (block inputs, and those that gradient
                  checkpointing saves by name; all named ones where nothing is recomputed)

Of all this a TPU's compiler may keep up to 128 MiB in the chip's own memory, which is not HBM.

A Program does not fit a chip that has less. A chip that has more may still be too small: temporaries of kernels and of
the optimizer, buffers of collectives and the compiler's padding are not counted. So a sum of known bytes is called *at
least*, and only a compiler decides that a Program fits.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from haliax_ext.abstract import leaves
from haliax_ext.errors import gib
from haliax_ext.mapping import AxisMapping
from haliax_ext.placement import LeafPlan
from levanter.models.activations import EMBEDDED, RESIDUAL
from levanter.models.param_groups import EMBEDDING, HEAD, parameter_group
from levanter.models.stack import checkpoint_policy
from levanter.plan.layout_memory import (
    Layout,
    LayoutMemory,
    LayoutSubject,
    layout_activations,
    layout_memory,
    microbatches,
    model_config,
    saved_names,
    saves_everything,
)
from levanter.runplan import RunPlan
from levanter.trainer.train_state import GRADIENT_BYTES

UNNAMED = "kernels' and collectives' buffers and the compiler's padding"
"""Bytes that no sum of known bytes includes."""
UNNAMED_KEPT = "what a backward pass keeps without a name, "
"""Prefix of `UNNAMED` where blocks are not recomputed."""
LAYERS, QUERIES = "layers", "queries"
TPU_ON_CHIP = 128 << 20
"""Bytes of CMEM of a v4 chip, and of VMEM of v5e and v6e chips; those of the others are fewer."""
CERTAIN = 0.95
"""Of a train step's sum beside the inputs, the share that counts.

Compilers order the end of a layer's backward pass so that some of these bytes are never alive together: of some 35
steps compiled for TPUs, one (Llama 3 70B on two slices of v6e-32) needed 0.968 of the sum beside its inputs, all others
more than the sum.
"""


@dataclass(frozen=True, kw_only=True)
class HbmLowerBound:
    """Bytes on a chip that a Program needs at the least.

    Attributes:
        inputs: of the Program.
        gradients: that it computes.
        kept: activations of the forward pass that are saved for the backward pass.
        at_work: the largest live set besides those, of a Program that does not train.
        weights: of the layers in the compute dtype, where parameters are stored in a wider one.
        accumulated: gradients of earlier microbatches.
        stacked: of the gradients, those that exist in the backward pass of the layers.
        layer: the largest live set in the backward pass of a layer.
        head: the largest live set in the head.
        recomputed: whether a backward pass recomputes its blocks, so that everything it saves is named.
        on_chip: bytes of the chip's own memory, where a compiler may keep temporaries instead of HBM.
    """

    inputs: int
    gradients: int
    kept: int
    at_work: int
    weights: int = 0
    accumulated: int = 0
    stacked: int = 0
    layer: int = 0
    head: int = 0
    recomputed: bool = True
    on_chip: int = 0

    @property
    def total(self) -> int:
        """The bound: the bytes of the largest phase, less those that a compiler may save."""
        return max(sum(terms.values()) for terms in self._phases()) - self.saved

    @property
    def saved(self) -> int:
        """Of the largest phase, the bytes that a compiler may save, or keep in the chip's own memory."""
        rest = max(sum(terms.values()) for terms in self._phases()) - self.inputs
        # What the update needs is certain: the global norm reads every gradient. Programs that do not train are one
        # layer at a time.
        avoided = min(round(rest * (1 - CERTAIN)), rest - self.gradients) if self.layer or self.head else 0
        return max(avoided, min(self.on_chip, rest))

    def _phases(self) -> Iterator[dict[str, int]]:
        """The terms of each phase, by name."""
        # The update: kept activations and gathered weights are freed by then. The global norm reads all gradients
        # before the first parameter is written, so all of them are alive.
        yield {"inputs": self.inputs, "gradients": self.gradients}
        always = {
            "inputs": self.inputs,
            "weights in the compute dtype": self.weights,
            "accumulated gradients": self.accumulated,
            "kept activations": self.kept,
        }
        # The loop over layers has its gradients as a carry, which is allocated whole before the first layer.
        yield {**always, "gradients": self.stacked, "one layer": self.layer}
        # The head comes between the forward and the backward pass: all activations are kept, no gradient exists yet.
        yield {**always, "the head": self.head}
        yield {**always, "the largest activation": self.at_work}

    @property
    def lacking(self) -> str:
        """The bytes that the sum leaves out, in words."""
        return UNNAMED if self.recomputed else UNNAMED_KEPT + UNNAMED

    def __str__(self) -> str:
        terms = max(self._phases(), key=lambda terms: sum(terms.values()))
        # Nothing beside the inputs is certain to be in HBM.
        if 0 < self.saved == sum(terms.values()) - self.inputs:
            return f"{gib(self.inputs)} of inputs"
        known = " + ".join(f"{gib(nbytes)} of {name}" for name, nbytes in terms.items() if nbytes)
        return f"{known} - {gib(self.saved)} that a compiler may save" if self.saved else known


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
    bound = HbmLowerBound(
        inputs=figures.arguments,
        gradients=figures.gradients,
        kept=saved_bytes,
        at_work=largest if saved_bytes else residual + largest,
        recomputed=not saves_everything(subject, layout),
        on_chip=TPU_ON_CHIP if subject.plan.target.platform == "tpu" else 0,
    )
    if not subject.training or model_config(subject) is None:
        return bound
    # The residual stream has the compute dtype; logits are wider.
    compute_bytes = max((a.leaf.dtype.itemsize for a in activations if a.leaf.path == RESIDUAL), default=4)
    stream = _whole_stream(subject, layout, scale)
    step = _StepWeights(subject=subject, layout=layout, figures=figures, compute_bytes=compute_bytes)
    return replace(
        bound,
        weights=step.cast_bytes,
        accumulated=figures.gradients if microbatches(subject, scale) > 1 else 0,
        stacked=step.stacked_gradients,
        layer=step.gathered_bytes + _layer_activations(subject, layout, activations, stream),
        # The final activations, and a chunk of logits.
        head=step.head_bytes + stream + sum(a.bytes_per_device for a in activations if "logits" in a.leaf.path),
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
    by_name: dict[str, tuple[LeafPlan, int]] = {}
    for activation in activations:
        name = activation.leaf.path
        if name == RESIDUAL:
            if carries:
                yield activation, len(model.layers)
        elif everything:
            yield activation, sum(name in layer.activations for layer in model.layers)
        else:
            for saved_name, layers in saved_names(subject, activation, layout).items():
                # Planned activations with the same feature axes match the same names: each name counts once.
                known = by_name.setdefault(saved_name, (activation, layers))
                if activation.bytes_per_device < known[0].bytes_per_device:
                    by_name[saved_name] = activation, layers
    yield from by_name.values()


def _whole_stream(subject: LayoutSubject, layout: Layout, scale: float) -> int:
    """Bytes of a layer's input inside the layer, where it is gathered if the stream between layers is sharded."""
    inside = replace(layout, mappings=replace(layout.mappings, residual=AxisMapping({})))
    activations = layout_activations(subject, inside, scale).leaves
    return sum(activation.bytes_per_device for activation in activations if activation.leaf.path == RESIDUAL)


def _layer_activations(subject: LayoutSubject, layout: Layout, activations: tuple[LeafPlan, ...], stream: int) -> int:
    """Bytes of activations in the backward pass of the layer that has most, without its input that is kept.

    Of a gated MLP: gate, up and the gradient of their product; of attention: queries, its output and the gradients of
    both; and the gradients of the layer's output and of its input. Grouped experts (`levanter.layers.experts`) have a
    row for each choice of a token: at first with their inputs and float32 results in two orders, later with the
    gradients of results and of the product.
    """
    model = model_config(subject)
    assert model is not None
    sizes = {activation.leaf.path: activation.bytes_per_device for activation in activations}
    sets = []
    for layer in dict.fromkeys(model.layers):
        for part in layer.parts:
            inside = max((sizes.get(name, 0) for name in part.activations), default=0)
            rows = getattr(part, "rows_per_token", 1)
            # Each set is of one moment of the backward pass. What is alive just before or after it is not added.
            if QUERIES in part.activations:
                sets.append(4 * inside + 2 * stream)
            elif rows == 1:
                sets.append(3 * inside + 2 * stream)
            else:
                # Where `expert` and the tokens share mesh axes, a device computes the tokens of all of them.
                rows *= _shared_ways(subject, layout)
                sets.append(rows * max(2 * inside + 5 * stream, 3 * inside + 2 * stream))
    return max(sets, default=2 * stream)


def _shared_ways(subject: LayoutSubject, layout: Layout) -> int:
    """The number of devices whose tokens a device's experts compute."""
    compute = layout.mappings.compute
    tokens = {axis for name in (subject.batch_axis, "position") if name for axis in compute.mesh_axes(name)}
    return layout.mesh.ways(tuple(axis for axis in compute.mesh_axes("expert") if axis in tokens))


@dataclass(frozen=True, kw_only=True)
class _StepWeights:
    """The copies of a train step's weights, and their gradients.

    Attributes:
        subject: the train step.
        layout: its layout.
        figures: the memory of the layout.
        compute_bytes: bytes of an element in the compute dtype.
    """

    subject: LayoutSubject
    layout: Layout
    figures: LayoutMemory
    compute_bytes: int

    @property
    def cast_bytes(self) -> int:
        """Of the stacked layers in the compute dtype, in the shards of the parameters."""
        # Unrolled layers (`scan_layers: false`) have no such axis: their casts are where they are used.
        stacked = (plan for plan in self.figures.trained if LAYERS in plan.leaf.names)
        return sum(
            math.prod(plan.shard_shape) * self.compute_bytes
            for plan in stacked
            if plan.leaf.dtype.itemsize > self.compute_bytes
        )

    @property
    def stacked_gradients(self) -> int:
        """Of the layers and the head. Those of the embedding come last, after the layers' backward pass."""
        others = (plan for plan in self.figures.trained if parameter_group(plan.leaf) != EMBEDDING)
        return sum(math.prod(plan.shard_shape) * GRADIENT_BYTES for plan in others)

    @property
    def gathered_bytes(self) -> int:
        """Of the weights of the part of a layer that has most, gathered.

        The gradient of a weight is summed over the devices that gathered it, so it exists whole before that: it takes
        the place of its weight, which is not used any more. Of experts two of three matrices count: with the rows of
        their choices not all three are alive.
        """
        sizes_by_module: dict[str, list[int]] = {}
        experts: set[str] = set()
        for plan in (*self.figures.trained, *self.figures.frozen):
            if LAYERS in plan.leaf.names and self._is_gathered(plan):
                # `…mlp.gate_proj.weight` belongs to the module `…mlp`.
                module = plan.leaf.path.rsplit(".", 2)[0]
                sizes_by_module.setdefault(module, []).append(self._whole(plan) // dict(plan.leaf.axes)[LAYERS])
                experts |= {module} if {"expert", "mlp"} <= set(plan.leaf.names) else set()
        return max(
            (sum(sizes) - max(sizes) * (module in experts) for module, sizes in sizes_by_module.items()), default=0
        )

    @property
    def head_bytes(self) -> int:
        """The gathered head, and its float32 gradient if it is trained."""
        head = self._head(self.figures.trained)
        if head is not None:
            whole = self._whole(head)
            # A matrix that no mesh axis shards needs no copy; its gradient is a second array all the same.
            gathered = whole if self._is_gathered(head) else 0
            return gathered + whole // self.compute_bytes * GRADIENT_BYTES
        head = self._head(self.figures.frozen)
        return 0 if head is None or not self._is_gathered(head) else self._whole(head)

    def _head(self, plans: Iterable[LeafPlan]) -> LeafPlan | None:
        """The matrix that the head multiplies by; the embedding table where they are tied."""
        # A table of positions has other axes, and adapters have a rank.
        tables = [plan for plan in plans if {"vocab", "embed"} == set(plan.leaf.names)]
        return next((plan for plan in tables if parameter_group(plan.leaf) == HEAD), tables[0] if tables else None)

    def _computed_axes(self, plan: LeafPlan) -> frozenset[str]:
        """The mesh axes that shard the computation with an array."""
        compute = self.layout.mappings.compute
        return frozenset(axis for name in plan.leaf.names for axis in compute.mesh_axes(name))

    def _is_gathered(self, plan: LeafPlan) -> bool:
        """Whether mesh axes shard an array that do not shard its computation."""
        # Tensor parallelism shards both, so that nothing is gathered; FSDP shards the parameter alone.
        cut = {axis for axes in plan.mesh_axes for axis in axes if self.layout.mesh.shape[axis] > 1}
        return bool(cut - self._computed_axes(plan))

    def _whole(self, plan: LeafPlan) -> int:
        """Bytes on a device of an array as it is computed with: gathered, in the compute dtype if that is narrower."""
        width = min(plan.leaf.dtype.itemsize, self.compute_bytes)
        return math.prod(plan.leaf.shape) * width // self.layout.mesh.ways(tuple(self._computed_axes(plan)))
