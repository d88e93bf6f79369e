"""Operands of random numbers: models whose every projection and table is no plain array, but of one kind.

`dense_twin` is the same model with the matrices that they stand for.
"""

from collections.abc import Callable, Mapping, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding

from haliax_ext.abstract import leaves, map_arrays
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear, Operand
from levanter.layers.low_rank import LowRank
from levanter.layers.quantized import Int8Matrix

RANK = Axis("low_rank", 3)
STACKS = ("layers", "expert")


def matrix_of(operand) -> NamedArray:
    """The matrix that an operand stands for."""
    if isinstance(operand, LowRank):
        product = hax.dot(operand.b, operand.a, axis=RANK.name).rearrange(operand.base.axes)
        return operand.base + operand.scale * product
    return operand.matrix()


def names(x: NamedArray) -> set[str]:
    """The names of its axes."""
    return {axis.name for axis in x.axes}


def low_rank(weight: NamedArray, inputs: tuple[str, ...], rng: np.random.Generator) -> LowRank:
    """A random operand with the axes of `weight`, and values of its size."""
    stack = tuple(a for a in weight.axes if a.name in STACKS)
    In = tuple(a for a in weight.axes if a.name in inputs)
    Out = tuple(a for a in weight.axes if a not in stack + In)
    size = float(np.std(np.asarray(weight.array)))
    return LowRank(
        base=weight,
        a=normal(rng, (*stack, RANK, *In), size),
        b=normal(rng, (*stack, *Out, RANK), 1.0),
        scale=0.75,
    )


def scaled_integers(weight: NamedArray, inputs: tuple[str, ...], rng: np.random.Generator) -> Int8Matrix:
    """A random operand with the axes of `weight`, and values of its size."""
    Out = tuple(a for a in weight.axes if a.name not in inputs)
    size = float(np.std(np.asarray(weight.array)))
    values = rng.integers(-127, 128, weight.array.shape).astype(np.int8)
    scale = (0.5 + rng.random([a.size for a in Out])) * size / 73  # an integer's own deviation
    return Int8Matrix(
        q=hax.named(jnp.asarray(values), weight.axes), scale=hax.named(jnp.asarray(scale, jnp.float32), Out)
    )


def normal(rng: np.random.Generator, axes: tuple[Axis, ...], size: float) -> NamedArray:
    """Random values on the host."""
    values = size * rng.standard_normal([axis.size for axis in axes])
    return hax.named(jnp.asarray(values, jnp.float32), axes)


KINDS: Mapping[str, Callable[..., Operand]] = {"low rank": low_rank, "integers": scaled_integers}


def is_holder(x) -> bool:
    """Whether `x` holds an operand."""
    return isinstance(x, Linear | Embedding)


def with_operands(model, kind: str, *, seed: int = 0):
    """`model` with an operand of a kind in every projection, and in the table of tokens where the head reads it."""
    rng = np.random.default_rng(seed)

    def replaced(x):
        if isinstance(x, Linear):
            return Linear(weight=KINDS[kind](x.weight, x.In, rng), bias=x.bias, In=x.In)
        if isinstance(x, Embedding) and model.lm_head is None:
            return Embedding(weight=KINDS[kind](x.weight, ("embed",), rng))
        return x

    return jax.tree.map(replaced, model, is_leaf=is_holder)


def dense_twin(model):
    """`model` with the matrices that its operands stand for."""

    def replaced(x):
        if not is_holder(x) or isinstance(x.weight, NamedArray):
            return x
        matrix = matrix_of(x.weight)
        return Embedding(weight=matrix) if isinstance(x, Embedding) else Linear(weight=matrix, bias=x.bias, In=x.In)

    return jax.tree.map(replaced, model, is_leaf=is_holder)


def run_model_on(
    function: Callable, model, tokens: np.ndarray, spec: MeshSpec, mappings: Mappings, devices: Sequence[jax.Device]
):
    """Runs `function(model, tokens)` on the mesh `spec`, the model where `mappings` put it; NumPy arrays."""
    mesh = spec.build(devices[: spec.size])
    template = map_arrays(lambda leaf, x: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model)
    axes = (Axis("batch", tokens.shape[0]), Axis("position", tokens.shape[1]))
    abstract_tokens = NamedArray(jax.ShapeDtypeStruct(tokens.shape, np.dtype(np.int32)), axes)  # pyright: ignore
    program = Program(
        name="under_test",
        function=function,
        inputs=(
            Input(name="model", value=template, placement=mappings),
            Input(name="tokens", value=abstract_tokens, placement=mappings.compute),
        ),
        mappings=mappings,
    )

    def put(leaf, x):
        return jax.device_put(x, NamedSharding(mesh, mappings.params_at(leaf.path).spec(leaf.names)))

    placed = jax.device_put(tokens, NamedSharding(mesh, mappings.compute.spec(("batch", "position"))))
    assert len(leaves(model)) == len(jax.tree.leaves(model))
    return jax.tree.map(np.asarray, program.jit(mesh)(map_arrays(put, model), NamedArray(placed, axes)))
