"""The frozen part of a training run: the plan's notes on it, and its identity in checkpoints."""

import math
from collections.abc import Callable

import haliax as hax

from haliax_ext.abstract import leaves
from levanter.layers.experts import ExpertsSpec
from levanter.layers.low_rank import RANK
from levanter.models.adapters.lora import PAIRS, Adapters
from levanter.models.adapters.whole import WHOLE
from levanter.models.base import LmHeadModel
from levanter.models.flops import FlopsPerToken
from levanter.models.registry import LmConfig
from levanter.optim.parameters import Parameter, map_parameters
from levanter.runplan import Check
from levanter.trainer.config import TrainerConfig
from levanter.trainer.frozen_identity import FrozenPart
from levanter.trainer.state import StatePlan


def frozen_part(trainer: TrainerConfig, plan: StatePlan, *, begun_from: str | None) -> FrozenPart | None:
    """The identity of the frozen part in a run's checkpoints, without digests; None if everything is trained.

    Args:
        trainer: of the run.
        plan: the placement of its parameters.
        begun_from: the weights that the run begins with; None if they are initialized.
    """
    if not plan.frozen:
        return None
    adapters, whole = None, ()
    if plan.adapters is not None:
        adapters = {path: pair.rank for path, pair in plan.adapters.pairs.items()}
        whole = tuple(leaf.path for leaf in leaves(plan.adapters.whole))
    assert trainer.trainable is not None or adapters is not None
    return FrozenPart(
        patterns=trainer.trainable or (),
        adapters=adapters,
        origin=f"trainer.seed {trainer.seed}" if begun_from is None else begun_from,
        digests=dict.fromkeys(sorted(plan.frozen), ""),
        dtype=_frozen_dtype(plan),
        whole=whole,
    )


def _frozen_dtype(plan: StatePlan) -> str | None:
    """The common dtype of the frozen parameters; None if they have several."""
    leaves = (planned.leaf for planned in plan.parameters.leaves if planned.leaf.path in plan.frozen)
    # The int8 weights of a quantized base and their scales keep their dtypes whatever the run's dtype is.
    dtypes = {leaf.dtype.name for leaf in leaves if not leaf.path.endswith((".weight.q", ".weight.scale"))}
    return dtypes.pop() if len(dtypes) == 1 else None


def spared_flops(
    model: LmConfig, trained: LmHeadModel, frozen: LmHeadModel | None, *, vocab: int
) -> Callable[[FlopsPerToken], float]:
    """FLOPs per token that a backward pass saves because weights are frozen.

    A frozen matrix has no gradient, which would cost as much as its forward product. Gradients of activations are
    still computed, unless only the head is trained: then nothing below it needs them.

    Args:
        model: the architecture.
        trained: the model with its trained leaves, abstract; None in place of frozen ones.
        frozen: likewise the frozen ones; None if everything is trained.
        vocab: ids that the head distinguishes.

    Returns:
        A function from the FLOPs of the forward pass to these.
    """
    if frozen is None:
        return lambda _: 0.0
    # 2 FLOPs for each weight of the [vocab, embed] matrix and token: a multiplication and an addition.
    head = 2.0 * vocab * model.Embed.size
    # Of the experts in a layer a token passes only `chosen`, so only this share of their matrices is multiplied.
    chosen = {part.routing.chosen for layer in model.layers for part in layer.parts if isinstance(part, ExpertsSpec)}

    def product(parameter: Parameter, value: hax.NamedArray) -> None:
        """Counts the forward product with a parameter, if there is one."""
        # A scale multiplies its matrix elementwise, which is not counted.
        if parameter.path.endswith(".weight.scale"):
            return
        names = [axis.name for axis in parameter.axes]
        is_head = parameter.role == "matrix" and "head" in parameter.roles
        # A tied table is multiplied as the head. An untied table is only indexed, which takes no product.
        if is_head or (parameter.role == "embedding" and tied and "vocab" in names):
            products.append(head)
        elif parameter.role == "matrix":
            size = 2.0 * math.prod(axis.size for axis in parameter.axes)
            # The experts' matrices have two feature axes besides `expert`; the router's (embed, expert) has one and
            # sees all tokens.
            routed = "expert" in names and len(set(names) - {"layers"}) > 2
            products.append(size * min(chosen) / value.resolve_axis("expert").size if routed and chosen else size)

    tied = bool(getattr(model, "tie_word_embeddings", False))
    products: list[float] = []
    map_parameters(product, frozen)
    # Each frozen weight saves one of the two backward products. What adapters add to a step counts against that.
    weights = sum(products) - _adapter_flops(trained, chosen)
    if isinstance(trained, Adapters) and trained.whole is not None:
        # A weight that is trained as a whole copy does have a gradient: its product is not spared.
        products.clear()
        map_parameters(product, trained.whole)
        weights -= sum(products)
    roles: list[tuple[str, ...]] = []
    map_parameters(lambda parameter, _: roles.append(parameter.roles), trained)
    # With a trained head alone, the backward pass ends there: of its 2 × forward FLOPs only the head's gradient
    # remains.
    if all("head" in group for group in roles):
        return lambda flops: 2 * flops.scoring - head
    return lambda _: weights


def _adapter_flops(trained: LmHeadModel, chosen: set[int]) -> float:
    """FLOPs per token of adapters in a step: one forward product and two backward ones; 0 without adapters."""
    products: list[float] = []

    def product(parameter: Parameter, value: hax.NamedArray) -> None:
        names = [axis.name for axis in parameter.axes]
        if RANK in names:
            # 6 FLOPs a weight and token: 2 forward, 2 for the factor's gradient, 2 for the gradient of its input.
            size = 6.0 * math.prod(axis.size for axis in parameter.axes)
            routed = "expert" in names and chosen
            products.append(size * min(chosen) / value.resolve_axis("expert").size if routed else size)

    map_parameters(product, trained)
    return sum(products)


def head_gradient_inputs(model: LmConfig, trained: LmHeadModel) -> tuple[str, ...]:
    """Which gradients the head needs: of its weight (`head`), of its input (`activations`), or of both.

    Args:
        model: the architecture.
        trained: the model with its trained leaves, abstract; None in place of frozen ones.
    """
    tied, inputs = bool(getattr(model, "tie_word_embeddings", False)), set[str]()

    def look(parameter: Parameter, value: hax.NamedArray) -> None:
        # A tied embedding table is the head's matrix too. Any trained leaf below the head needs the gradient of its
        # input.
        is_head = "head" in parameter.roles
        if is_head or (tied and parameter.role == "embedding" and "vocab" in [axis.name for axis in value.axes]):
            inputs.add("head")
        if not is_head:
            inputs.add("activations")

    map_parameters(look, trained)
    return tuple(sorted(inputs, reverse=True))


def head_notes(plan: StatePlan) -> list[Check]:
    """A note on the cost of an adapter of the output head, if the run has one."""
    pairs = {} if plan.adapters is None else plan.adapters.pairs
    notes = []
    for group, pair in pairs.items():
        factors = [planned for planned in plan.parameters.leaves if planned.leaf.path.startswith(f"{PAIRS}.{group}.")]
        # A group without a vocabulary axis does not adapt the head.
        if not any("vocab" in planned.leaf.names for planned in factors):
            continue
        size = sum(math.prod(planned.leaf.shape) for planned in factors)
        nbytes = sum(planned.bytes_per_device for planned in factors)
        # Two factors, [embed, rank] and [rank, vocab]: the size over the rank is the feature axis of each.
        inner, outer = (math.prod(planned.leaf.shape) // pair.rank for planned in factors)
        message = (
            # The frozen head has two products, 4 · embed · vocab FLOPs a token (forward, gradient of the input).
            f"rank {pair.rank}: {6 * size:,} FLOPs a token in a step, {3 * size / (2 * inner * outer):.1%} of "
            f"those of the head's own two products; its gradients are summed over the chunks in {nbytes:,} bytes on a "
            "device, and neither W + ΔW nor a gradient of W is materialized"
        )
        notes.append(Check(name="adapter of the head", status="note", message=message))
    return notes


def partition_notes(plan: StatePlan) -> list[Check]:
    """A line with the trained share of the model, if that is not all of it."""
    if not plan.frozen:
        return []
    sizes = {planned.leaf.path: math.prod(planned.leaf.shape) for planned in plan.parameters.leaves}
    trained = {path: size for path, size in sizes.items() if path not in plan.frozen}
    if plan.adapters is not None:
        base = sum(sizes.values()) - sum(trained.values())
        copies = [path for path in trained if path.startswith(f"{WHOLE}.")]
        # Copies are part of what is trained; they are named, since they can be larger than all adapters together.
        whole = ""
        if copies:
            size = sum(trained[path] for path in copies)
            named = ", ".join(path.removeprefix(f"{WHOLE}.") for path in copies[:3]) + (", …" if copies[3:] else "")
            whole = f", {size:,} of them whole copies in float32 ({named}),"
        message = (
            f"{len(plan.adapters.pairs)} adapters are trained, {sum(trained.values()):,} parameters{whole} beside "
            f"{base:,} frozen ones ({sum(trained.values()) / base:.2%}), which have no gradients and no optimizer "
            "state, and are in no checkpoint"
        )
        return [Check(name="adapter", status="ok", message=message)]
    share = sum(trained.values()) / sum(sizes.values())
    message = (
        f"{len(trained)} of {len(sizes)} arrays are trained, {sum(trained.values()):,} of {sum(sizes.values()):,} "
        f"parameters ({share:.2%}); the others have no gradients and no optimizer state, and are in no checkpoint"
    )
    return [Check(name="trainable", status="ok", message=message)]
