"""What was saved comes back bit for bit on any mesh, and what does not fit is listed before anything is read."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.checkpoint import (
    Checkpointer,
    CheckpointMismatchError,
    MissingCheckpointError,
    RestoreTarget,
    UnreadableCheckpointError,
    checkpoint_at,
    latest,
    planned_targets,
    restore,
)


def values() -> dict[str, np.ndarray]:
    """Every bit pattern class: NaNs with payloads, infinities, denormals, and each dtype a run holds."""
    random = np.random.default_rng(7)
    odd = random.integers(0, 2**32, (16, 8), dtype=np.uint32).view(np.float32)
    odd[0, :4] = [np.nan, np.inf, -0.0, 1e-45]
    return {
        "model.transformer.layers.stacked.mlp.up_proj.weight": odd,
        "model.lm_head.weight": random.normal(size=(8, 24)).astype(ml_dtypes.bfloat16),
        "optimizer.1.mu.transformer.norm.weight": random.normal(size=(8,)).astype(np.float32),
        "optimizer.0.count": np.int32(41),
        "key": np.asarray([1, 2**32 - 1], np.uint32),
        "flags": random.integers(0, 2, (8,)).astype(bool),
    }


def specs(rows: str | None, columns: str | None) -> dict[str, P]:
    return {
        "model.transformer.layers.stacked.mlp.up_proj.weight": P(rows, columns),
        "model.lm_head.weight": P(columns, rows),
        "optimizer.1.mu.transformer.norm.weight": P(columns),
        "optimizer.0.count": P(),
        "key": P(),
        "flags": P(rows),
    }


def shardings(devices: list[jax.Device], where: str) -> dict[str, NamedSharding]:
    if where == "8":
        mesh, layout = Mesh(np.asarray(devices), ("data",)), specs("data", None)
    elif where == "2x4":
        mesh, layout = Mesh(np.asarray(devices).reshape(2, 4), ("data", "model")), specs("data", "model")
    elif where == "4x2, turned":
        mesh, layout = Mesh(np.asarray(devices)[::-1].reshape(4, 2), ("data", "model")), specs("model", "data")
    elif where == "replicated":
        mesh, layout = Mesh(np.asarray(devices), ("data",)), specs(None, None)
    else:
        mesh, layout = Mesh(np.asarray(devices[3:4]), ("data",)), specs("data", None)
    return {path: NamedSharding(mesh, spec) for path, spec in layout.items()}


def on_devices(wanted: dict[str, np.ndarray], placed: dict[str, NamedSharding]) -> dict[str, jax.Array]:
    return {path: jax.device_put(value, placed[path]) for path, value in wanted.items()}


def targets(placed: dict[str, NamedSharding]) -> dict[str, RestoreTarget]:
    return {
        path: RestoreTarget(shape=value.shape, dtype=value.dtype, sharding=placed[path])
        for path, value in values().items()
    }


def write(base: Path, arrays: dict[str, jax.Array], step: int = 5) -> None:
    with Checkpointer(str(base), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        checkpointer.save(step, arrays, {"tokens": 12345})


def check_bits(found: dict[str, jax.Array], placed: dict[str, NamedSharding]) -> None:
    wanted = values()
    assert found.keys() == wanted.keys()
    for path, array in found.items():
        assert array.dtype == wanted[path].dtype and array.shape == wanted[path].shape, path
        assert array.sharding.is_equivalent_to(placed[path], array.ndim), path
        assert np.asarray(array).tobytes() == wanted[path].tobytes(), path


@pytest.mark.parametrize(
    ("saved_on", "restored_on"),
    [("8", "2x4"), ("8", "1"), ("1", "2x4"), ("2x4", "4x2, turned"), ("replicated", "8"), ("2x4", "replicated")],
)
def test_bits_survive_another_mesh(devices, tmp_path, saved_on, restored_on):
    write(tmp_path, on_devices(values(), shardings(devices, saved_on)))
    placed = shardings(devices, restored_on)
    ref = latest(str(tmp_path))
    assert ref is not None and (ref.step, ref.kind, ref.metadata) == (5, "kept", {"tokens": 12345})
    check_bits(restore(ref, targets(placed)), placed)


def test_restored_arrays_can_be_donated(devices, tmp_path):
    placed = shardings(devices, "2x4")
    write(tmp_path, on_devices(values(), placed))
    found = restore(checkpoint_at(str(tmp_path)), targets(placed))
    name = "optimizer.1.mu.transformer.norm.weight"
    moved = jax.jit(lambda x: x + np.float32(1), donate_argnums=0)(found[name])
    np.testing.assert_array_equal(np.asarray(moved), values()[name] + np.float32(1))


def test_names_that_contain_or_resemble_one_another(devices, tmp_path):
    names = ["a", "a.b", "a.b.c.0", "a/b", "c/0", "layers.[1].x", "p q", "ü.weight", ".lead", "zarr.json", "x" * 180]
    one = jax.sharding.SingleDeviceSharding(devices[0])
    wanted = {name: np.full((4,), i, ml_dtypes.float8_e4m3fn) for i, name in enumerate(names)}
    write(tmp_path, {name: jax.device_put(value, one) for name, value in wanted.items()})
    found = restore(
        checkpoint_at(str(tmp_path)),
        {name: RestoreTarget(shape=(4,), dtype=value.dtype, sharding=one) for name, value in wanted.items()},
    )
    assert {name: np.asarray(array).tobytes() for name, array in found.items()} == {
        name: value.tobytes() for name, value in wanted.items()
    }


def test_targets_of_a_plan(devices, tmp_path):
    spec = MeshSpec(axes=(("data", 2), ("model", 4)))
    leaves = [
        Leaf("model.weight", (("mlp", 8), ("embed", 4)), np.dtype(np.float32)),
        Leaf("step", (), np.dtype(np.int32)),
    ]
    plan = plan_sharding(leaves, Mappings(params=AxisMapping({"mlp": "model", "embed": "data"})), spec)
    mesh = spec.build(devices)
    weight = np.arange(32, dtype=np.float32).reshape(8, 4)
    write(tmp_path, {"model.weight": jax.device_put(weight), "step": jax.device_put(np.int32(5))})
    found = restore(checkpoint_at(str(tmp_path)), planned_targets(plan, mesh))
    assert found["model.weight"].sharding.spec == P("model", "data")
    np.testing.assert_array_equal(np.asarray(found["model.weight"]), weight)
    assert int(found["step"]) == 5


def test_every_difference_is_listed_before_anything_is_read(devices, tmp_path):
    placed = shardings(devices, "8")
    write(tmp_path, on_devices(values(), placed))
    ref = checkpoint_at(str(tmp_path / "step-5"))
    one = placed["key"]
    wanted = targets(placed)
    wanted["model.lm_head.wieght"] = wanted.pop("model.lm_head.weight")
    wanted["flags"] = RestoreTarget(shape=(4, 2), dtype=np.dtype(bool), sharding=one)
    wanted["key"] = RestoreTarget(shape=(2,), dtype=np.dtype(np.int32), sharding=one)
    for path in Path(ref.arrays_path).rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(CheckpointMismatchError) as caught:
        restore(ref, wanted)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"{ref.path}: this checkpoint does not match what is to be restored: 4 differences, 3 of 6 leaves agree:"
    )
    assert [line.strip() for line in lines[1:]] == [
        "missing     model.lm_head.wieght bfloat16[8, 24]: the checkpoint has no such leaf; "
        "nearest in the checkpoint: model.lm_head.weight",
        "unexpected  model.lm_head.weight bfloat16[8, 24]: the checkpoint's leaf is not wanted",
        "shape       flags: wanted [4, 2], the checkpoint has [8]",
        "dtype       key: wanted int32, the checkpoint has uint32",
    ]


def test_a_part_of_a_checkpoint(devices, tmp_path):
    placed = shardings(devices, "8")
    write(tmp_path, on_devices(values(), placed))
    model = {path: target for path, target in targets(placed).items() if path.startswith("model.")}
    with pytest.raises(CheckpointMismatchError, match="4 differences"):
        restore(checkpoint_at(str(tmp_path)), model)
    found = restore(checkpoint_at(str(tmp_path)), model, unexpected="skip")
    assert found.keys() == model.keys()
    for path, array in found.items():
        assert np.asarray(array).tobytes() == values()[path].tobytes()


def test_missing_files_of_arrays(devices, tmp_path):
    """One array on one device: Orbax leaves all but the first failure to a closed event loop."""
    one = jax.sharding.SingleDeviceSharding(devices[0])
    write(tmp_path, {"weight": jax.device_put(np.arange(1 << 16, dtype=np.float32), one)})
    ref = checkpoint_at(str(tmp_path))
    for path in Path(ref.arrays_path).rglob("d/*"):
        path.unlink()
    target = RestoreTarget(shape=(1 << 16,), dtype=np.dtype(np.float32), sharding=one)
    with pytest.raises(UnreadableCheckpointError, match=r"step-5/arrays-.*: weight cannot be read: "):
        restore(ref, {"weight": target})


def test_a_path_without_a_checkpoint_says_what_is_there(tmp_path):
    with pytest.raises(MissingCheckpointError, match=r"nowhere: no such folder"):
        checkpoint_at(str(tmp_path / "nowhere"))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(MissingCheckpointError, match=r"no complete checkpoint in this folder, which has notes.txt"):
        checkpoint_at(str(tmp_path))
    half = tmp_path / "step-7" / "arrays-12345678.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    with pytest.raises(MissingCheckpointError, match=r"has only incomplete ones \(step-7\)"):
        checkpoint_at(str(tmp_path))
    with pytest.raises(MissingCheckpointError, match=r"an incomplete checkpoint; it has no metadata.json"):
        checkpoint_at(str(tmp_path / "step-7"))


def test_damaged_and_foreign_metadata_are_errors_not_silence(tmp_path):
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"format": "levanter-che')
    with pytest.raises(UnreadableCheckpointError, match=r"step-7/metadata.json: damaged"):
        latest(str(tmp_path))
    (folder / "metadata.json").write_text('{"step": 7, "timestamp": "2024-01-01", "is_temporary": false}')
    with pytest.raises(UnreadableCheckpointError, match=r"step-7: a checkpoint of upstream Levanter \(TensorStore\)"):
        latest(str(tmp_path))
    (folder / "metadata.json").write_text('{"step": 7}')
    with pytest.raises(UnreadableCheckpointError, match=r"not one of our checkpoints \(format None"):
        latest(str(tmp_path))
    (folder / "metadata.json").write_text(json.dumps({"format": "levanter-checkpoint", "version": 99}))
    with pytest.raises(UnreadableCheckpointError, match=r"version 99, but this program reads 1"):
        latest(str(tmp_path))
    (folder / "metadata.json").write_text(json.dumps({"format": "levanter-checkpoint", "version": 1, "step": 7}))
    with pytest.raises(UnreadableCheckpointError, match=r"damaged: no kind; no saved_at; no arrays"):
        latest(str(tmp_path))
