"""Operands of random numbers: models whose every projection and table is no plain array, but of one kind.

`LowRankSum` is made up, nothing in `src` knows of it. `dense_twin` is the same model with the matrices that they stand
for.
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
from levanter.layers.quantized import Int8Matrix

RANK = Axis("low_rank", 3)
STACKS = ("layers", "expert")


class LowRankSum(Operand):
    """`base + up · down`.

    Attributes:
        base: the matrix `[*stack, *Out, *In]`.
        down: `[*stack, low_rank, *In]`.
        up: `[*stack, *Out, low_rank]`.
    """

    base: NamedArray
    down: NamedArray
    up: NamedArray

    @property
    def axes(self):
        return self.base.axes

    def dot(self, x, axis, *, dtype=None):
        of_base = hax.dot(x, self.base, axis=axis, preferred_element_type=dtype)
        copies = tuple(name for name in axis if name in names(self.up))
        inner = tuple(name for name in axis if name not in copies)
        thin = hax.dot(x, self.down, axis=inner, preferred_element_type=dtype)
        added = hax.dot(thin, self.up.astype(thin.dtype), axis=(RANK.name, *copies))
        return of_base + added.rearrange(of_base.axes)

    def ragged_dot(self, x, axis, sizes):
        (Token,) = (a for a in x.axes if a.name != axis)
        (Group,) = sizes.axes
        (Out,) = (a for a in self.up.axes if a.name not in (Group.name, RANK.name))

        def product(rows, matrices, *order):
            return jax.lax.ragged_dot(rows, matrices.rearrange((Group.name, *order)).array, sizes.array)

        rows = x.rearrange((Token.name, axis)).array
        thin = product(rows, self.down, axis, RANK.name)
        # What lies behind the last group is not defined, and must not come into a product.
        thin = jnp.where((jnp.arange(Token.size) < sizes.array.sum())[:, None], thin, jnp.zeros((), thin.dtype))
        found = product(rows, self.base, axis, Out.name) + product(thin, self.up, RANK.name, Out.name)
        return hax.named(found, (Token, Out))

    def rows(self, ids, axis):
        found = self.base.take(axis, ids)
        return found + hax.dot(self.up.take(axis, ids), self.down, axis=RANK.name).rearrange(found.axes)

    def matrix(self) -> NamedArray:
        """What it stands for."""
        return self.base + hax.dot(self.up, self.down, axis=RANK.name).rearrange(self.base.axes)


def names(x: NamedArray) -> set[str]:
    """The names of its axes."""
    return {axis.name for axis in x.axes}


def low_rank(weight: NamedArray, inputs: tuple[str, ...], rng: np.random.Generator) -> LowRankSum:
    """A random operand with the axes of `weight`, and values of its size."""
    stack = tuple(a for a in weight.axes if a.name in STACKS)
    In = tuple(a for a in weight.axes if a.name in inputs)
    Out = tuple(a for a in weight.axes if a not in stack + In)
    size = float(np.std(np.asarray(weight.array)))
    return LowRankSum(
        base=weight,
        down=normal(rng, (*stack, RANK, *In), size),
        up=normal(rng, (*stack, *Out, RANK), 1.0),
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
        matrix = x.weight.matrix()
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
