"""Models as dictionaries of tensors with Hugging Face's names, with the functions of earlier generations.

    tensors = model.to_state_dict()                                     # name → array
    tensors = hax.state_dict.to_torch_compatible_state_dict(model)      # the same: Haliax asks the model

Names, shapes and the order of axes follow the family's weight rules, which also read checkpoints and write exports.
`flatten_linear_layers` and its inverse are for Haliax's own linear layers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from haliax_ext.abstract import leaves, map_arrays
from haliax_ext.pytree import PyTree, path_string
from haliax_ext.saving import gather_tensors
from levanter.compat.hf.export import plan_export
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig

StateDict = dict[str, Any]
SAFE_TENSORS_MODEL = "model.safetensors"
SAFE_TENSORS_INDEX_NAME = "model.safetensors.index.json"


def to_state_dict(model: LmHeadModel) -> Callable[..., StateDict]:
    """`model.to_state_dict(prefix)`: the tensors by Hugging Face's names, in host memory."""

    def tensors(prefix: str | None = None) -> StateDict:
        config = model.config
        assert isinstance(config, LmConfig), f"{type(config).__name__} belongs to no family with weight rules"
        # vocab_size is the padded size: a state dict holds every row, unlike an export.
        plan = plan_export(leaves(model), config, model.Vocab, vocab_size=model.Vocab.size)
        arrays: dict[str, Any] = {}
        map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, model)
        gathered = gather_tensors(plan.tensors, arrays)
        return {_under(prefix, tensor.name): values for tensor, values in gathered}

    return tensors


def to_torch_compatible_state_dict(model: LmHeadModel, *, flatten: bool = True, prefix: str | None = None) -> StateDict:
    """The tensors of one of our models by Hugging Face's names; always flat, as in Hugging Face's files."""
    del flatten
    return to_state_dict(model)(prefix)


def convert_to_jnp(tensor: PyTree) -> jax.Array:
    """Converts a torch tensor to an array; bfloat16, which NumPy lacks, is converted exactly through float32."""
    if str(tensor.dtype) == "torch.bfloat16":
        return jnp.asarray(tensor.detach().cpu().float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.detach().cpu().numpy())


def flatten_linear_layers(prefix: str | None, tree: PyTree, out_dims_first_in_dict: bool | None) -> StateDict:
    """Flattens the linear layers of a tree to matrices and vectors.

    Args:
        prefix: prefix of every name; None for none.
        tree: a tree with layers of `haliax.nn.Linear`.
        out_dims_first_in_dict: whether rows are outputs (as in torch) or inputs; None leaves the layer's order.
    """
    flat: StateDict = {}
    for path, layer in _linear_layers(tree):
        In, Out = _axes(layer)
        first = _out_first(layer) if out_dims_first_in_dict is None else out_dims_first_in_dict
        order = (*Out, *In) if first else (*In, *Out)
        # Axes that are neither inputs nor outputs (layers, experts) stay in front, unflattened.
        stacks = tuple(axis for axis in layer.weight.axes if axis not in order)
        rows, columns = (Out, In) if first else (In, Out)
        matrix = layer.weight.rearrange((*stacks, *order)).array
        under = _under(prefix, path)
        # [stacks…, rows, columns]: all output axes become one, and all input axes.
        flat[_under(under, "weight")] = matrix.reshape(*(s.size for s in stacks), _size(rows), _size(columns))
        if layer.bias is not None:
            bias = layer.bias.rearrange((*stacks, *Out)).array
            flat[_under(under, "bias")] = bias.reshape(*(s.size for s in stacks), _size(Out))
    return flat


def unflatten_linear_layers(
    prefix: str | None,
    statedict: Mapping[str, Any],
    layer: PyTree,
    out_dims_first_in_dict: bool | None,
) -> StateDict:
    """The inverse of `flatten_linear_layers`: arrays with the axes of the layers of a tree, under the same names."""
    restored: StateDict = {}
    for path, linear in _linear_layers(layer):
        In, Out = _axes(linear)
        first = _out_first(linear) if out_dims_first_in_dict is None else out_dims_first_in_dict
        order = (*Out, *In) if first else (*In, *Out)
        stacks = tuple(axis for axis in linear.weight.axes if axis not in order)
        under = _under(prefix, path)
        for name, axes, like in (("weight", order, linear.weight), ("bias", Out, linear.bias)):
            if like is None:
                continue
            # The dictionary holds matrices; the axes come from the layer, in the order of the matrix.
            flat = jnp.asarray(statedict[_under(under, name)])
            whole = hax.named(flat.reshape([axis.size for axis in (*stacks, *axes)]), (*stacks, *axes))
            # Back to the order of axes in which the layer stores its weight.
            restored[_under(under, name)] = whole.rearrange(like.axes).array
    return restored


def tree_from_state_dict(tree: PyTree, state_dict: Mapping[str, Any], prefix: str | None = None) -> PyTree:
    """Replaces the arrays of a tree with those of a dictionary, by their paths."""

    def taken(leaf: PyTree, old: PyTree) -> jax.Array:
        new = np.asarray(state_dict[_under(prefix, leaf.path)])
        if new.shape != tuple(old.shape):
            raise ValueError(
                f"{_under(prefix, leaf.path)}: the tree has {tuple(old.shape)}, the dictionary {new.shape}"
            )
        return jnp.asarray(new)

    return map_arrays(taken, tree)


def tree_to_state_dict(tree: PyTree, prefix: str | None = None) -> StateDict:
    """The arrays of a tree by their paths; those of our models by Hugging Face's names."""
    if isinstance(tree, LmHeadModel):
        return to_state_dict(tree)(prefix)
    state_dict: StateDict = {}
    map_arrays(lambda leaf, x: state_dict.__setitem__(_under(prefix, leaf.path), x) or x, tree)
    return state_dict


def _linear_layers(tree: PyTree) -> list[tuple[str, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, hnn.Linear))[0]
    return [(path_string(keys), layer) for keys, layer in flat if isinstance(layer, hnn.Linear)]


def _axes(layer: PyTree) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The input and output axes of a Haliax linear layer."""
    In, Out = ((axes,) if isinstance(axes, Axis) else tuple(axes) for axes in (layer.In, layer.Out))
    return In, Out


def _out_first(layer: PyTree) -> bool:
    """Whether a layer stores its output axes before its input axes."""
    In, Out = _axes(layer)
    order = [axis for axis in layer.weight.axes if axis in (*In, *Out)]
    return order[: len(Out)] == list(Out)


def _size(axes: tuple[Axis, ...]) -> int:
    return math.prod(axis.size for axis in axes)


def _under(prefix: str | None, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
