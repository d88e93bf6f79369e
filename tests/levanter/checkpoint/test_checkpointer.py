"""A run's checkpoints over its life: when it is saved, what stays, and failures: heard of, and nothing lost."""

import json
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from levanter.checkpoint import (
    Checkpointer,
    CheckpointSaveError,
    RestoreTarget,
    checkpoint_at,
    find_checkpoints,
    latest,
    restore,
)
from levanter.checkpoint.checksums import ArrayDigests


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def state(devices: list[jax.Device], number: int) -> dict[str, jax.Array]:
    mesh = Mesh(np.asarray(devices), ("data",))
    weight = np.full((16, 4), number, np.float32) + np.arange(4, dtype=np.float32)
    return {
        "weight": jax.device_put(weight, NamedSharding(mesh, P("data"))),
        "step": jax.device_put(np.int32(number), NamedSharding(mesh, P())),
    }


def check(path: str, devices: list[jax.Device], number: int) -> None:
    wanted = state(devices, number)
    found = restore(
        checkpoint_at(path),
        {name: RestoreTarget(shape=a.shape, dtype=a.dtype, sharding=a.sharding) for name, a in wanted.items()},
    )
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(array), err_msg=name)


def listed(base: Path) -> list[tuple[int, str]]:
    return [(ref.step, ref.kind) for ref in find_checkpoints(str(base))]


def test_a_run_saves_by_step_and_by_time_and_keeps_what_it_should(devices, tmp_path):
    """One step takes a second; a temporary checkpoint every 3 seconds, kept ones every 5 steps up to 10, then 8."""
    clock = Clock()
    saved = []
    with Checkpointer(
        str(tmp_path), keep=[(5, 10), (8, None)], save_interval_seconds=3.0, keep_last_temporary=2, clock=clock
    ) as checkpointer:
        for step in range(1, 25):
            clock.seconds += 1.0
            if checkpointer.due(step):
                checkpointer.save(step, state(devices, step), {"step": step})
                saved.append(step)
    # 3 s after each save, and 5, 10, 16, 24 by step: 3, 5 (by step), 8, 10 (by step), 13, 16 (by step), 19, 22, 24
    assert saved == [3, 5, 8, 10, 13, 16, 19, 22, 24]
    assert listed(tmp_path) == [
        (5, "kept"), (10, "kept"), (16, "kept"), (19, "temporary"), (22, "temporary"), (24, "kept"),
    ]  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step}" for step, _ in listed(tmp_path)}
    for step, _ in listed(tmp_path):
        check(str(tmp_path / f"step-{step}"), devices, step)


def test_the_arrays_may_be_donated_as_soon_as_save_returns(devices, tmp_path):
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        now = state(devices, 1)
        for step in range(1, 6):
            checkpointer.save(step, now, {})
            for _ in range(3):
                now = bump(now)
    for ref in find_checkpoints(str(tmp_path)):
        check(ref.path, devices, 1 + 3 * (ref.step - 1))


def test_donation_while_a_large_array_is_being_written(devices, tmp_path):
    """16 MiB of noise on one device take longer to write than a step takes to overwrite them."""
    noise = np.random.default_rng(3).normal(size=1 << 22).astype(np.float32)
    negate = jax.jit(lambda x: -x, donate_argnums=0)
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        array = negate(jax.device_put(-noise, devices[2]))
        checkpointer.save(1, {"noise": array}, {})
        for _ in range(3):
            array = negate(array)
        array.block_until_ready()
    one = jax.sharding.SingleDeviceSharding(devices[5])
    target = RestoreTarget(shape=noise.shape, dtype=noise.dtype, sharding=one)
    found = restore(checkpoint_at(str(tmp_path)), {"noise": target})
    assert np.asarray(found["noise"]).tobytes() == noise.tobytes()


def test_a_step_is_saved_once_unless_it_is_then_to_be_kept(devices, tmp_path):
    with Checkpointer(str(tmp_path), keep=[], save_interval_seconds=None) as checkpointer:
        checkpointer.save(4, state(devices, 4), {"try": 1})
        checkpointer.save(4, state(devices, 4), {"try": 2})
        checkpointer.wait()
        assert checkpointer.newest is not None
        assert (checkpointer.newest.kind, checkpointer.newest.metadata) == ("temporary", {"try": 1})
        checkpointer.save(4, state(devices, 4), {"try": 3}, force=True)
        checkpointer.save(4, state(devices, 4), {"try": 4}, force=True)
    (ref,) = find_checkpoints(str(tmp_path))
    assert (ref.kind, ref.metadata) == ("kept", {"try": 3})
    assert sorted(path.name for path in (tmp_path / "step-4").iterdir()) == [ref.arrays, "metadata.json"]
    check(ref.path, devices, 4)


def test_a_later_attempt_writes_a_step_anew_and_sweeps_up(devices, tmp_path):
    for attempt in (1, 2):
        half = tmp_path / "step-9" / f"arrays-0000000{attempt}.orbax-checkpoint-tmp"
        half.mkdir(parents=True)
        (half / "data").write_bytes(b"half")
        unnamed = tmp_path / "step-8"
        unnamed.mkdir(exist_ok=True)
        (unnamed / "somebody's.txt").write_text("stays")
        with Checkpointer(str(tmp_path), keep=[(2, None)], save_interval_seconds=None) as checkpointer:
            checkpointer.save(2, state(devices, 10 * attempt), {"attempt": attempt})
            checkpointer.save(3, state(devices, 30 * attempt), {})
    assert listed(tmp_path) == [(2, "kept"), (3, "temporary")]
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-3", "step-8"}
    assert len(list((tmp_path / "step-2").iterdir())) == 2
    assert checkpoint_at(str(tmp_path / "step-2")).metadata == {"attempt": 2}
    check(str(tmp_path / "step-2"), devices, 20)


@pytest.mark.parametrize("old_go", [True, False])
def test_temporary_checkpoints_have_a_place_of_their_own(devices, tmp_path, old_go):
    kept, temporary = str(tmp_path / "kept"), str(tmp_path / "temporary")

    def attempt(steps: list[int]) -> None:
        with Checkpointer(
            kept,
            keep=[(10, None)],
            save_interval_seconds=60.0,
            temporary_base=temporary,
            delete_old_temporary=old_go,
        ) as checkpointer:
            for step in steps:
                checkpointer.save(step, state(devices, step), {})

    attempt([10, 13])
    attempt([15, 17])
    assert [ref.step for ref in find_checkpoints(kept)] == [10]
    assert [ref.step for ref in find_checkpoints(temporary)] == ([17] if old_go else [13, 17])
    newest = latest(kept, temporary)
    assert newest is not None and newest.step == 17


def test_due_asks_for_nothing_without_steps_and_time(tmp_path):
    clock = Clock()
    with Checkpointer(str(tmp_path), keep=[], save_interval_seconds=None, clock=clock) as checkpointer:
        clock.seconds += 1e9
        assert not any(checkpointer.due(step) for step in range(100))


def test_what_cannot_be_saved_is_listed_and_nothing_is_written(devices, tmp_path):
    gone = jnp.ones((3,))
    gone.delete()
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        with pytest.raises(ValueError) as caught:
            checkpointer.save(
                1,
                {"a": np.ones(3), "b": jax.random.key(0), "c": jnp.zeros((0, 4)), "d": gone, "e": jnp.ones(2)},  # type: ignore[dict-item]
                {},
            )
        assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
            "a: expected a jax.Array, got ndarray",
            "b: key<fry> cannot be saved; pass its jax.random.key_data",
            "c: float32[0, 4] has no elements; leave it out",
            "d: was donated or deleted before it could be saved",
        ]
        with pytest.raises(ValueError, match=r"metadata of the checkpoint of step 1: .*set"):
            checkpointer.save(1, state(devices, 1), {"seen": {1, 2}})
        with pytest.raises(ValueError, match=r"metadata of the checkpoint of step 1: .*nan"):
            checkpointer.save(1, state(devices, 1), {"loss": float("nan")})
        assert list(tmp_path.iterdir()) == []
        checkpointer.save(1, state(devices, 1), {"loss": 2.5})
    assert json.loads((tmp_path / "step-1" / "metadata.json").read_text())["metadata"] == {"loss": 2.5}


def test_an_unwritable_place_is_known_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointSaveError, match=r"file/run: checkpoints cannot be written here \(Not a directory\)"):
        Checkpointer(str(tmp_path / "file" / "run"), keep=[], save_interval_seconds=None)


def test_a_place_that_becomes_unwritable_during_the_run(devices, tmp_path):
    """The folder turns into a file: the save fails by name, and once the place is back the run goes on saving."""
    base, aside = tmp_path / "run", tmp_path / "aside"
    with Checkpointer(str(base), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        checkpointer.save(1, state(devices, 1), {})
        checkpointer.wait()
        base.rename(aside)
        base.write_text("in the way")
        with pytest.raises(CheckpointSaveError, match=r"step-2: the checkpoint of step 2 was not written: \w+Error"):
            checkpointer.save(2, state(devices, 2), {})
        base.unlink()
        aside.rename(base)
        assert listed(base) == [(1, "kept")]
        checkpointer.save(3, state(devices, 3), {})
    assert listed(base) == [(1, "kept"), (3, "kept")]
    check(str(base / "step-1"), devices, 1)
    check(str(base / "step-3"), devices, 3)


def test_a_failure_in_the_background_is_raised_once_by_the_next_call(devices, tmp_path, monkeypatch):
    """The folder of the checkpoint is taken away between the arrays and `metadata.json`."""
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        checkpointer.save(1, state(devices, 1), {})
        checkpointer.wait()
        written, wait = threading.Event(), checkpointer._writer.wait

        def wait_then_lose_the_folder() -> dict[str, ArrayDigests]:
            found = wait()
            shutil.rmtree(tmp_path / "step-2")
            (tmp_path / "step-2").write_text("in the way")
            written.set()
            return found

        monkeypatch.setattr(checkpointer._writer, "wait", wait_then_lose_the_folder)
        checkpointer.save(2, state(devices, 2), {})
        assert written.wait(60)
        monkeypatch.undo()
        with pytest.raises(CheckpointSaveError) as caught:
            checkpointer.save(3, state(devices, 3), {})
        message = str(caught.value)
        assert f"{tmp_path}/step-2: the checkpoint of step 2 was not written: " in message
        assert message.endswith(f"the last complete one is of step 1 ({tmp_path}/step-1)")
        (tmp_path / "step-2").unlink()
        checkpointer.save(3, state(devices, 3), {})
    assert listed(tmp_path) == [(1, "kept"), (3, "kept")]


def test_senseless_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="save_interval_seconds: must be positive or None, got 0"):
        Checkpointer(str(tmp_path), keep=[], save_interval_seconds=0.0)
    with pytest.raises(ValueError, match="keep_last_temporary: must not be negative, got -1"):
        Checkpointer(str(tmp_path), keep=[], save_interval_seconds=None, keep_last_temporary=-1)
    with pytest.raises(ValueError, match=r"keep\[0\]: `every` must be at least 1"):
        Checkpointer(str(tmp_path), keep=[(0, None)], save_interval_seconds=None)
