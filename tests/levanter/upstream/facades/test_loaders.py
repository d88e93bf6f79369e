"""Loaders: rows on 8 devices, compared with the examples one by one."""

import threading
import time

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import Mesh

from levanter.upstream.facades.datasets import ListAsyncDataset, ShardableDataset
from levanter.upstream.facades.loaders import (
    BackgroundIterable,
    DataLoader,
    ReplicatedBatchLoader,
    ShardedBatchLoader,
    check_sharded_consistency,
    stack_tree,
)
from levanter.upstream.facades.schedules import ScheduleStep

pytestmark = pytest.mark.quick

MAPPING = {"batch": "data", "feature": "model"}
Feature = Axis("feature", 4)


def examples(count: int) -> list[dict]:
    return [{"x": hax.named(np.arange(4, dtype=np.float32) + 10 * n, Feature), "id": np.int32(n)} for n in range(count)]


@pytest.fixture
def mesh(devices) -> Mesh:
    return Mesh(np.array(devices).reshape(4, 2), ("data", "model"))


def test_batches_hold_the_examples_in_order_and_lie_as_the_mapping_says(mesh):
    data = ListAsyncDataset(examples(20))
    loader = DataLoader(data, 8, mesh=mesh, axis_resources=MAPPING)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    ids = np.concatenate([np.asarray(batch["id"]) for batch in batches])
    assert ids.tolist() == [*range(20), 0, 0, 0, 0]
    first = batches[0]["x"]
    assert first.axes == (Axis("batch", 8), Feature) and first.array.sharding.shard_shape((8, 4)) == (2, 2)
    assert (np.asarray(first.array) == np.arange(4) + 10 * np.arange(8)[:, None]).all()
    assert (np.asarray(batches[2]["x"].array)[4:] == 0).all()
    check_sharded_consistency(batches[0], check_disjoint_indices_are_different=True)
    resumed = list(loader.iter_from_step(jax.numpy.int32(2)))
    assert len(resumed) == 1 and np.asarray(resumed[0]["id"]).tolist() == np.asarray(batches[2]["id"]).tolist()
    unpadded = DataLoader(data, 8, mesh=mesh, axis_resources=MAPPING, pad_final_batch=False)
    assert [batch["id"].shape for batch in unpadded] == [(8,), (8,)]


def test_a_schedule_of_batches(mesh):
    data = ListAsyncDataset(examples(32))
    loader = DataLoader(data, [ScheduleStep(0, 4), ScheduleStep(2, 8)], mesh=mesh, axis_resources=MAPPING)
    assert [np.asarray(batch["id"]).tolist() for batch in loader] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [*range(8, 16)], [*range(16, 24)], [*range(24, 32)],
    ]  # fmt: skip


def test_batches_that_do_not_divide(mesh):
    data = ListAsyncDataset(examples(6))
    with pytest.raises(ValueError, match=r"6 rows is not divisible by 4.*4 and 8 are"):
        DataLoader(data, 6, mesh=mesh, axis_resources=MAPPING)
    loader = DataLoader(data, Axis("batch", 6), mesh=mesh, axis_resources=MAPPING, allow_nondivisible_batch_size=True)
    (batch,) = loader
    assert np.asarray(batch["id"]).tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    with pytest.raises(ValueError, match="no examples"):
        DataLoader(ListAsyncDataset([]), 4, mesh=mesh, axis_resources=MAPPING)
    with pytest.raises(ValueError, match="pass it a mesh"):
        DataLoader(data, 4)


class Rows(ShardableDataset[np.ndarray]):
    def __init__(self, numbers):
        self.numbers = list(numbers)

    def shard(self, shard_idx: int, num_shards: int):
        return Rows(self.numbers[shard_idx::num_shards])

    def __iter__(self):
        return (np.full(3, n, np.int32) for n in self.numbers)


def test_loaders_of_2024(mesh):
    with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data"}):
        once = [np.asarray(b)[:, 0].tolist() for b in ReplicatedBatchLoader(Rows(range(10)), mesh, Axis("batch", 4))]
        endless = iter(ShardedBatchLoader(Rows(range(6)), mesh, Axis("batch", 4), max_capacity=-1))
        over = [np.asarray(next(endless))[:, 0].tolist() for _ in range(3)]
    assert once == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert over == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def test_copies_and_shards_are_compared(mesh):
    from jax.sharding import NamedSharding, PartitionSpec

    cut = NamedSharding(mesh, PartitionSpec("data"))
    with pytest.raises(ValueError, match="are equal"):
        check_sharded_consistency(jax.device_put(np.ones(4), cut), check_disjoint_indices_are_different=True)
    whole = NamedSharding(mesh, PartitionSpec())
    different = jax.make_array_from_single_device_arrays(
        (2,), whole, [jax.device_put(np.full(2, float(n)), device) for n, device in enumerate(mesh.devices.flat)]
    )
    with pytest.raises(ValueError, match="differs from another device's"):
        check_sharded_consistency(different)


def test_examples_are_stacked():
    whole = stack_tree("row", examples(3))
    assert whole["x"].axes == (Axis("row", 3), Feature) and whole["id"].tolist() == [0, 1, 2]


def test_a_background_iterable_passes_on_what_fails_and_stops():
    def failing():
        yield 1
        raise OSError("the disk is gone")

    found = iter(BackgroundIterable(failing, 2))
    assert next(found) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)
    endless = BackgroundIterable(lambda: iter(lambda: 0, 1), 2)
    iterator = iter(endless)
    assert next(iterator) == 0
    abandoned = iter(BackgroundIterable(lambda: iter(lambda: 0, 1), 2))
    assert next(abandoned) == 0
    del abandoned
    endless.stop()
    with pytest.raises(StopIteration):
        next(iterator)
    until = time.monotonic() + 100
    while any(thread.name == "make-items" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(thread.name == "make-items" for thread in threading.enumerate())
