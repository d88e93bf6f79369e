"""Exchanges: every byte in one slab, values exact after the moves, transients as planned."""

import itertools
import re

import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.reshard import Move, begin_program, even_piece, piece_program, plan_moves, plan_reshard, whole_program

MESH = MeshSpec.of(data=4, model=2)


def leaf_of(dtype=np.float32, **axes):
    return Leaf("w", tuple(axes.items()), np.dtype(dtype))


def planned(leaf, mapping, *, order, stacked=(), limit=1 << 30, mesh=MESH):
    sharding = plan_sharding([leaf], Mappings(params=AxisMapping(mapping)), mesh).check()
    names = list(leaf.names)
    reshard = plan_reshard(
        leaf,
        sharding.leaves[0].mesh_axes,
        mesh,
        order=[names.index(n) for n in order],
        stacked=[names.index(n) for n in stacked],
        limit=limit,
    )
    return sharding, reshard


def slabs_of(reshard, piece, values, mesh):
    """A piece's slabs cut from the true values; padding is filled with a number that must not survive."""
    shape = reshard.slab_shape(piece)
    padded = np.full(shape, -1, values.dtype)
    mine = values if reshard.cut is None else np.take(values, np.arange(*piece), axis=reshard.cut)
    padded[tuple(slice(0, n) for n in mine.shape)] = mine
    sharding = NamedSharding(mesh, reshard.read_mapping.spec(reshard.leaf.names))
    return hax.NamedArray(jax.device_put(padded, sharding), reshard.slab_value(piece).axes)


def run(sharding, reshard, values, mesh):
    """Runs the reshard's Programs; returns the array and the compiled texts."""
    if reshard.cut is None:
        program = whole_program("exchange", [reshard], sharding)
        found = program.jit(mesh)(slabs_of(reshard, (0, 0), values, mesh))
        return found["w"].array, [program.lower(mesh).compile()]
    so_far, compiled = begin_program("begin", reshard, sharding).jit(mesh)(), []
    for piece in reshard.pieces:
        program = piece_program("put", reshard, piece, sharding)
        at = jax.device_put(np.int32(piece[0]), NamedSharding(mesh, jax.sharding.PartitionSpec()))
        so_far = program.jit(mesh)(so_far, slabs_of(reshard, piece, values, mesh), at)
        compiled.append(program.lower(mesh).compile())
    return so_far["w"].array, compiled


CASES = {
    "replicated": (dict(layers=3, embed=16), {}, ["embed"], ["layers"]),
    "replicated, does not divide": (dict(layers=3, embed=9), {}, ["embed"], ["layers"]),
    "smaller than the mesh": (dict(layers=3, kv_head=3), {"kv_head": []}, ["kv_head"], ["layers"]),
    "inner axis": (dict(mlp=16, embed=8), {"embed": "data"}, ["mlp", "embed"], []),
    "inner axis over everything": (dict(mlp=16, embed=8), {"embed": ["data", "model"]}, ["mlp", "embed"], []),
    "inner axis, reversed": (dict(mlp=16, embed=8), {"embed": ["model", "data"]}, ["mlp", "embed"], []),
    "both axes": (dict(mlp=16, embed=8), {"mlp": "model", "embed": "data"}, ["mlp", "embed"], []),
    "transposed": (dict(embed=8, mlp=16), {"mlp": "model", "embed": "data"}, ["mlp", "embed"], []),
    "layers are cut": (dict(layers=4, mlp=16, embed=8), {"layers": "data"}, ["mlp", "embed"], ["layers"]),
    "heads": (
        dict(layers=2, kv_head=4, q_heads_per_group=2, head_size=4, embed=8),
        {"kv_head": "model", "head_size": "data"},
        ["kv_head", "q_heads_per_group", "head_size", "embed"],
        ["layers"],
    ),
    "output of heads": (
        dict(layers=2, embed=8, kv_head=4, q_heads_per_group=2, head_size=4),
        {"q_heads_per_group": "model", "head_size": "data"},
        ["embed", "kv_head", "q_heads_per_group", "head_size"],
        ["layers"],
    ),
    "odd rows": (dict(vocab=13, embed=8), {"embed": "data"}, ["vocab", "embed"], []),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_exact_in_the_final_sharding(name, devices):
    axes, mapping, order, stacked = CASES[name]
    leaf = leaf_of(**axes)
    mesh = MESH.build(devices)
    values = np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32)
    sharding, reshard = planned(leaf, mapping, order=order, stacked=stacked)
    array, _ = run(sharding, reshard, values, mesh)
    np.testing.assert_array_equal(np.asarray(array), values)
    assert array.sharding.is_equivalent_to(sharding.sharding("w", mesh), array.ndim)


@pytest.mark.parametrize("name", CASES)
def test_the_compiler_needs_no_more_than_planned(name, devices):
    axes, mapping, order, stacked = CASES[name]
    last = list(axes)[-1]
    leaf = leaf_of(**{**axes, last: axes[last] * 4096})
    sharding, reshard = planned(leaf, mapping, order=order, stacked=stacked)
    memory = whole_program("big", [reshard], sharding).lower(MESH.build(devices)).compile().memory_analysis()
    slab = memory.argument_size_in_bytes
    assert slab == np.prod(reshard.padded) * 4 // 8
    assert slab + memory.temp_size_in_bytes + memory.output_size_in_bytes <= reshard.transient_device_bytes + 1024


@pytest.mark.parametrize("name", ["inner axis", "heads", "replicated", "layers are cut"])
def test_pieces_along_a_whole_axis(name, devices):
    axes, mapping, order, stacked = CASES[name]
    leaf = leaf_of(**{k: v * (3 if k == "layers" else 1) for k, v in axes.items()})
    mesh = MESH.build(devices)
    values = np.random.default_rng(1).normal(size=leaf.shape).astype(np.float32)
    _, whole = planned(leaf, mapping, order=order, stacked=stacked)
    limit = whole.transient_device_bytes // 2
    sharding, reshard = planned(leaf, mapping, order=order, stacked=stacked, limit=limit)
    assert reshard.cut is not None and len(reshard.pieces) > 1
    assert reshard.transient_device_bytes <= limit
    assert mapping.get(leaf.names[reshard.cut]) is None, "a piece lies along an axis that stays whole"
    array, _ = run(sharding, reshard, values, mesh)
    np.testing.assert_array_equal(np.asarray(array), values)


def test_uneven_last_piece(devices):
    leaf = leaf_of(layers=7, mlp=16, embed=8)
    order = ["mlp", "embed"]
    sharding, whole = planned(leaf, {"embed": "data"}, order=order, stacked=["layers"])
    _, reshard = planned(
        leaf, {"embed": "data"}, order=order, stacked=["layers"], limit=whole.transient_device_bytes * 4 // 7
    )
    assert reshard.pieces == ((0, 4), (4, 7))
    values = np.random.default_rng(2).normal(size=leaf.shape).astype(np.float32)
    array, _ = run(sharding, reshard, values, MESH.build(devices))
    np.testing.assert_array_equal(np.asarray(array), values)


def test_an_inner_axis_is_exchanged_without_gathering(devices):
    leaf = leaf_of(mlp=64, embed=32)
    sharding, reshard = planned(leaf, {"mlp": "model", "embed": "data"}, order=["mlp", "embed"])
    assert reshard.read == (("model", "data"), ())
    assert reshard.moves == (Move("all_to_all", ("data",), 0, 1),)
    _, (executable,) = run(sharding, reshard, np.zeros(leaf.shape, np.float32), MESH.build(devices))
    text = executable.as_text()
    assert re.search(r"all-to-all", text) and not re.search(r"all-gather", text)
    # The slab, what is sent, what is received, and the result.
    assert reshard.transient_device_bytes == 4 * leaf.nbytes // 8


def test_several_small_leaves_in_one_program(devices):
    mesh = MESH.build(devices)
    leaves = [Leaf(path, (("layers", 2), ("embed", 8 + n)), np.dtype(np.float32)) for n, path in enumerate("ab")]
    sharding = plan_sharding(leaves, Mappings(), MESH)
    reshards = [
        plan_reshard(leaf, plan.mesh_axes, MESH, order=[1], stacked=[0])
        for leaf, plan in zip(leaves, sharding.leaves, strict=True)
    ]
    values = [np.arange(leaf.shape[0] * leaf.shape[1], dtype=np.float32).reshape(leaf.shape) for leaf in leaves]
    program = whole_program("small", reshards, sharding)
    found = program.jit(mesh)(*[slabs_of(e, (0, 0), v, mesh) for e, v in zip(reshards, values, strict=True)])
    for leaf, value in zip(leaves, values, strict=True):
        np.testing.assert_array_equal(np.asarray(found[leaf.path].array), value)


@pytest.mark.parametrize("final", list(itertools.permutations([("x",), ("y", "z"), ()])))
@pytest.mark.parametrize("read", [(("x", "y", "z"), (), ()), (("z", "y"), ("x",), ()), (("y",), ("z",), ("x",))])
@pytest.mark.parametrize("padded", [(False, False, False), (True, False, False)])
def test_moves_lead_from_read_to_final(read, final, padded):
    """Replays the moves by hand: each takes off the innermost mesh axis, and padding goes while an axis is whole."""
    now = [list(axes) for axes in read]
    trimmed = [not p for p in padded]
    for move in plan_moves(read, final, padded):
        if move.kind in ("all_to_all", "all_gather"):
            for mesh_axis in reversed(move.mesh_axes):
                assert now[move.axis].pop() == mesh_axis
        if move.kind == "all_to_all":
            assert trimmed[move.to]
            now[move.to] += move.mesh_axes
        if move.kind == "trim":
            assert not now[move.axis]
            trimmed[move.axis] = True
        if move.kind == "slice":
            assert trimmed[move.axis] and not any(move.mesh_axes[0] in axes for axes in now)
            now[move.axis] += move.mesh_axes
    assert tuple(tuple(axes) for axes in now) == final
    assert all(trimmed)


def test_pieces_are_even_where_that_costs_little():
    assert even_piece(126, 1, 50) == 42
    assert even_piece(127, 1, 50) == 50
    assert even_piece(64, 8, 3) == 16
