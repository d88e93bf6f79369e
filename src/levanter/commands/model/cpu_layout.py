"""The matrices of a model that generates text on one CPU: each layer by itself, and first in its products.

Each is read where the checkpoint has it, so nothing is held twice. What stays as it was, with its contracted axes
first: projections whose layers are one tensor of the checkpoint, as in checkpoints of training; what is not an array of
weights (integers, adapters); experts and their routers.
"""

import dataclasses
from typing import cast

import jax
from haliax import Axis, NamedArray

from haliax_ext.pytree import KeyPath, PyTree, path_string
from haliax_ext.rules import WeightRule, WeightRules
from levanter.layers.cpu_matvec import MatrixFirst
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.quantized import EXPERT
from levanter.layers.unstacked import LAYERS, LayerMatrices


def matrices_first(module: PyTree, rules: WeightRules) -> tuple[PyTree, WeightRules]:
    """A model with such matrices, and where they come from.

    Args:
        module: the model, abstract.
        rules: where its leaves come from.
    """
    table, made = rules.by_target(), dict[str, tuple[WeightRule, ...]]()

    def visit(keys: KeyPath, x: object) -> object:
        if not isinstance(x, Linear | Embedding) or not isinstance(x.weight, NamedArray):
            return x
        target, weight = f"{path_string(keys)}.weight", x.weight
        rule = table.get(target)
        if rule is None or EXPERT in (axis.name for axis in weight.axes):
            return x
        Layers = next((axis for axis in weight.axes if axis.name == LAYERS), None)
        if Layers is None:
            made[target] = (dataclasses.replace(rule, target=f"{target}.array"),)
            return dataclasses.replace(x, weight=MatrixFirst(weight))
        if LAYERS not in rule.stacked:
            return x
        made[target] = tuple(_of_layer(rule, n) for n in range(Layers.size))
        own = _abstract(tuple(axis for axis in weight.axes if axis != Layers), weight)
        return dataclasses.replace(x, weight=LayerMatrices((MatrixFirst(own),) * Layers.size))

    found = jax.tree_util.tree_map_with_path(visit, module, is_leaf=lambda x: isinstance(x, Linear | Embedding))
    read = tuple(each for rule in rules.rules for each in made.get(rule.target, (rule,)))
    return found, dataclasses.replace(rules, rules=read)


def _of_layer(rule: WeightRule, layer: int) -> WeightRule:
    """Where the matrix of one layer comes from."""
    target = f"{rule.target}.matrices.{layer}.array"
    return dataclasses.replace(rule, target=target, source=rule.source_at(LAYERS, layer))


def _abstract(axes: tuple[Axis, ...], like: NamedArray) -> NamedArray:
    array = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), like.dtype)
    return NamedArray(cast(jax.Array, array), axes)
