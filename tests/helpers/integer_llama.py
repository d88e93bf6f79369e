"""A tiny Llama whose projections are integers with scales, computed from the tensors of a plain checkpoint."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules

from haliax_ext.abstract import Leaf
from haliax_ext.load_transforms import LoadTransformRule
from haliax_ext.rules import WeightRules

INPUTS = {
    "q_proj": ("embed",),
    "k_proj": ("embed",),
    "o_proj": ("kv_head", "q_heads_per_group", "head_size"),
    "gate_proj": ("embed",),
    "down_proj": ("mlp",),
}
FACTOR = np.float32(1 / 127)


def integers(path: str, inputs: tuple[str, ...]) -> LoadTransformRule:
    """Symmetric, with one scale for each output channel, over all contracted axes."""

    def derive(x: hax.NamedArray):
        exact = x.astype(jnp.float32)
        scale = hax.max(hax.abs(exact), inputs) * FACTOR
        # A channel of zeros, such as padding, has integers 0. A product, because compilers make one of a quotient.
        inverse = hax.where(scale > 0, 1 / scale, 0.0)
        return {f"{path}.values": hax.round(exact * inverse).astype(jnp.int8), f"{path}.scale": scale}

    targets = (f"{path}.values", f"{path}.scale")
    return LoadTransformRule(path=path, targets=targets, like=targets[0], derive=derive)


def by_numpy(values: np.ndarray, leaf: Leaf, inputs: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    exact = values.astype(np.float32)
    axes = tuple(leaf.names.index(name) for name in inputs)
    scale = np.abs(exact).max(axes, keepdims=True) * FACTOR
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    return np.rint(exact * inverse).astype(np.int8), scale.squeeze(axes)


def inputs_of(leaf: Leaf) -> tuple[str, ...] | None:
    return next((inputs for name, inputs in INPUTS.items() if name in leaf.path), None)


def split(leaf: Leaf) -> list[Leaf]:
    """What the model holds in the place of a projection's weight."""
    inputs = inputs_of(leaf)
    if inputs is None:
        return [leaf]
    kept = tuple((name, size) for name, size in leaf.axes if name not in inputs)
    return [
        Leaf(f"{leaf.path}.values", leaf.axes, np.dtype(np.int8)),
        Leaf(f"{leaf.path}.scale", kept, np.dtype(np.float32)),
    ]


LEAVES = [each for leaf in tiny_leaves() for each in split(leaf)]
RULES = WeightRules(
    rules=tiny_rules().rules,
    ignored=tiny_rules().ignored,
    derived=tuple(integers(leaf.path, inputs) for leaf in tiny_leaves() if (inputs := inputs_of(leaf)) is not None),
)


def expected(tensors) -> dict[str, np.ndarray]:
    found = {}
    for leaf, values in zip(tiny_leaves(), assembled(tensors).values(), strict=True):
        inputs = inputs_of(leaf)
        if inputs is None:
            found[leaf.path] = values
        else:
            found[f"{leaf.path}.values"], found[f"{leaf.path}.scale"] = by_numpy(values, leaf, inputs)
    return found
