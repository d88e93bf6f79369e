"""The Programs of exchanges: what each device does with its slabs, one leaf, several leaves or a piece at a time.

`haliax_ext.reshard` says which moves there are and what they hold; here they become collectives under `shard_map`.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import haliax as hax
import jax
import numpy as np
from jax.sharding import PartitionSpec

from haliax_ext.leaf_layout import Span
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Placement, Program
from haliax_ext.reshard import Cuts, Exchange, abstract_array

ByPath = Mapping[str, hax.NamedArray]
"""What an exchange's Program returns: leaves by path."""


def _exchange_local(exchange: Exchange, piece: Span, x: jax.Array) -> jax.Array:
    """The moves, as one device sees them."""
    for move in exchange.moves:
        if move.kind == "all_to_all":
            x = jax.lax.all_to_all(x, move.mesh_axes, split_axis=move.to, concat_axis=move.axis, tiled=True)
        elif move.kind == "all_gather":
            x = all_gather(x, move.mesh_axes, axis=move.axis, tiled=True)
        elif move.kind == "trim":
            size = piece[1] - piece[0] if move.axis == exchange.cut else exchange.leaf.shape[move.axis]
            x = jax.lax.slice_in_dim(x, 0, size, axis=move.axis)
        else:
            size = x.shape[move.axis] // exchange.mesh.ways(move.mesh_axes)
            start = jax.lax.axis_index(move.mesh_axes) * np.int32(size)
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=move.axis)
    return x


all_gather = cast("Callable[..., jax.Array]", jax.lax.all_gather)
psum = cast("Callable[..., jax.Array]", jax.lax.psum)


def _spec(cuts: Cuts) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in cuts))


def exchanged(exchange: Exchange, piece: Span, slab: hax.NamedArray) -> hax.NamedArray:
    """A piece's slabs → the piece, cut as the leaf is in the end; call it inside `jit`, under the mesh."""

    def local(x: jax.Array) -> jax.Array:
        return _exchange_local(exchange, piece, x)

    out = jax.shard_map(local, in_specs=_spec(exchange.read), out_specs=_spec(exchange.final), check_vma=False)(
        slab.array
    )
    return hax.NamedArray(out, tuple(hax.Axis(a.name, n) for a, n in zip(slab.axes, out.shape, strict=True)))


def whole_program(name: str, exchanges: Sequence[Exchange], placement: Placement) -> Program:
    """The Program that exchanges several leaves at once: one input of slabs for each, a dictionary by path out."""

    def run(*slabs: hax.NamedArray) -> ByPath:
        def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(_exchange_local(e, (0, 0), x) for e, x in zip(exchanges, arrays, strict=True))

        out = jax.shard_map(
            local,
            in_specs=tuple(_spec(e.read) for e in exchanges),
            out_specs=tuple(_spec(e.final) for e in exchanges),
            check_vma=False,
        )(*(slab.array for slab in slabs))
        return {e.leaf.path: hax.NamedArray(x, e.final_value.axes) for e, x in zip(exchanges, out, strict=True)}

    inputs = [Input(name=e.leaf.path, value=e.slab_value((0, 0)), placement=e.read_mapping) for e in exchanges]
    return Program(name=name, function=run, inputs=tuple(inputs), out_placement=placement)


def begin_program(name: str, exchange: Exchange, placement: Placement) -> Program:
    """The Program that makes room for a leaf that arrives in pieces."""

    def run() -> ByPath:
        return {exchange.leaf.path: hax.zeros(exchange.final_value.axes, dtype=exchange.leaf.dtype)}

    return Program(name=name, function=run, inputs=(), out_placement=placement)


def piece_program(name: str, exchange: Exchange, piece: Span, placement: Placement) -> Program:
    """The Program that exchanges one piece and puts it into the leaf, in place.

    Its inputs: the leaf so far, the piece's slabs, and where the piece begins.
    """
    cut = exchange.cut
    assert cut is not None

    def run(so_far: Mapping[str, hax.NamedArray], slab: hax.NamedArray, start: jax.Array) -> ByPath:
        def local(whole: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(whole, _exchange_local(exchange, piece, x), at, axis=cut)

        leaf = so_far[exchange.leaf.path]
        out = jax.shard_map(
            local,
            in_specs=(_spec(exchange.final), _spec(exchange.read), PartitionSpec()),
            out_specs=_spec(exchange.final),
            check_vma=False,
        )(leaf.array, slab.array, start)
        return {exchange.leaf.path: hax.NamedArray(out, leaf.axes)}

    return Program(
        name=name,
        function=run,
        inputs=(
            Input(name="leaf", value={exchange.leaf.path: exchange.final_value}, placement=placement),
            Input(name="slab", value=exchange.slab_value(piece), placement=exchange.read_mapping),
            Input(name="start", value=jax.ShapeDtypeStruct((), np.int32), placement=AxisMapping()),
        ),
        out_placement=placement,
        donate=("leaf",),
    )


def _as_they_are(seconds: hax.NamedArray) -> hax.NamedArray:
    return seconds


@functools.lru_cache(maxsize=64)
def seconds_program(mesh: MeshSpec) -> Program:
    """The Program that tells every host how long each took: one number for each device in, all of them out."""
    axis = hax.Axis("device", mesh.size)
    value = abstract_array((axis,), np.dtype(np.float32))
    return Program(
        name="load.seconds",
        function=_as_they_are,
        inputs=(Input(name="seconds", value=value, placement=AxisMapping({"device": mesh.names})),),
        out_placement=AxisMapping(),
    )
