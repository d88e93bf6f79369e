"""Checkpoints as a source of tensors, read by slices; and padding that differs from mesh to mesh."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.abstract import Leaf
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.checkpoint import (
    Checkpointer,
    CheckpointMismatchError,
    CheckpointSource,
    RestoreTarget,
    UnreadableCheckpointError,
    latest,
    restore,
    same_names,
)

pytestmark = pytest.mark.quick

ROWS, MEANT = 12, 11


def values():
    random = np.random.default_rng(3)
    return {
        "model.stack.weight": random.normal(size=(3, 8, 16)).astype(np.float32),
        "model.table.weight": random.normal(size=(ROWS, 16)).astype(np.float32),
        "model.norm.weight": random.normal(size=(16,)).astype(jnp.bfloat16),
        "optimizer.count": np.int32(7),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint whose arrays were written in pieces of at most 128 bytes, from 8 devices."""
    base = tmp_path_factory.mktemp("saved")
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    places = {"model.stack.weight": P(None, "data", "model"), "model.table.weight": P("model", "data")}
    arrays = {
        name: jax.device_put(value, NamedSharding(mesh, places.get(name, P()))) for name, value in values().items()
    }
    with Checkpointer(
        str(base),
        keep=[(1, None)],
        save_interval_seconds=None,
        used={"model.table.weight": (MEANT, 16)},
        chunk_bytes=128,
    ) as checkpointer:
        checkpointer.save(1, arrays, {})
    return base


def test_slices_are_those_of_the_arrays(saved):
    source = CheckpointSource(latest(str(saved)), prefix="model.")
    wanted = {name.removeprefix("model."): value for name, value in values().items() if name.startswith("model.")}
    assert {name: info.shape for name, info in source.tensors.items()} == {
        "norm.weight": (16,),
        "stack.weight": (3, 8, 16),
        # Without the padding.
        "table.weight": (MEANT, 16),
    }
    random = np.random.default_rng(0)
    for name, info in source.tensors.items():
        assert info.dtype == wanted[name].dtype and info.nbytes == np.prod(info.shape) * info.dtype.itemsize
        for _ in range(10):
            ends = [np.sort(random.integers(0, size + 1, 2)) for size in info.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)
            assert source.read(name, index).tobytes() == wanted[name][index].tobytes()
            out = np.empty([b - a for a, b in ends], info.dtype)
            assert source.read(name, index, out) is out
            assert out.tobytes() == wanted[name][index].tobytes()


def test_stacks_are_cut_by_layer_first(saved):
    import tensorstore

    base = f"file://{latest(str(saved)).arrays_path}/"
    store = {"driver": "ocdbt", "base": base, "path": "model.stack.weight/"}
    opened = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
    (layers, *rest) = opened.chunk_layout.read_chunk.shape
    assert layers == 1 and 4 * np.prod(rest) <= 128


@pytest.mark.parametrize("rows", [MEANT, ROWS, 16])
def test_it_loads_like_any_source(saved, devices, rows):
    source = CheckpointSource(latest(str(saved)), prefix="model.")
    leaves = [
        Leaf("stack.weight", (("layers", 3), ("mlp", 8), ("embed", 16)), np.dtype(jnp.bfloat16)),
        Leaf("table.weight", (("vocab", rows), ("embed", 16)), np.dtype(np.float32)),
        Leaf("norm.weight", (("embed", 16),), np.dtype(np.float32)),
    ]
    spec = MeshSpec.of(data=2, model=4)
    plan = plan_sharding(leaves, Mappings(params=AxisMapping({"mlp": "model", "embed": "data"})), spec)
    rules = same_names(leaves, padded=("vocab",) if rows > MEANT else ())
    mesh = spec.build(devices)
    found = load(plan_loading(plan, rules, source), plan, source, mesh)
    own = values()
    assert np.array_equal(np.asarray(found["stack.weight"]), own["model.stack.weight"].astype(jnp.bfloat16))
    assert np.array_equal(np.asarray(found["norm.weight"]), own["model.norm.weight"].astype(np.float32))
    table = np.asarray(found["table.weight"])
    assert np.array_equal(table[:MEANT], own["model.table.weight"][:MEANT]) and not table[MEANT:].any()


@pytest.mark.parametrize("rows", [MEANT, ROWS, 16])
def test_padding_may_differ_where_a_run_goes_on(saved, devices, rows):
    ref = latest(str(saved))
    mesh = Mesh(np.asarray(devices), ("data",))
    sharding = NamedSharding(mesh, P("data" if rows % 8 == 0 else None))
    target = RestoreTarget(shape=(rows, 16), dtype=np.dtype(np.float32), sharding=sharding, used=(MEANT, 16))
    found = np.asarray(restore(ref, {"model.table.weight": target}, unexpected="skip")["model.table.weight"])
    common = min(rows, ROWS)
    assert found[:common].tobytes() == values()["model.table.weight"][:common].tobytes()
    assert not found[common:].any()


def test_another_vocabulary_is_not_padding(saved, devices):
    one = jax.sharding.SingleDeviceSharding(devices[0])
    for rows, used in ((ROWS, (ROWS, 16)), (16, None), (16, (10, 16))):
        target = RestoreTarget(shape=(rows, 16), dtype=np.dtype(np.float32), sharding=one, used=used)
        with pytest.raises(CheckpointMismatchError, match=rf"shape .*the checkpoint has \[{MEANT}, 16\]"):
            restore(latest(str(saved)), {"model.table.weight": target}, unexpected="skip")


def test_a_hole_is_named(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    ref = latest(str(copy))
    for file in (copy / "step-1" / ref.arrays).rglob("d/*"):
        file.unlink()
    source = CheckpointSource(ref, prefix="model.")
    with pytest.raises(UnreadableCheckpointError, match=r"step-1/arrays-.*: model\.stack\.weight cannot be read"):
        source.read("stack.weight", (slice(0, 1), slice(0, 8), slice(0, 16)))
