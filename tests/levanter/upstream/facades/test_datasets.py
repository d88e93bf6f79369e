"""Data sets in Python: what comes out is counted and compared with lists; no order is taken from the code."""

import asyncio

import jax
import pytest

from levanter.upstream.facades.datasets import (
    AsyncDataset,
    EpochDataset,
    IterableDataset,
    ListAsyncDataset,
    ShardedDataset,
    ShuffleDataset,
    SyncDataset,
    stack_batch_encodings,
    wait_for,
)

pytestmark = pytest.mark.quick


class Counting(AsyncDataset[int]):
    """Squares without end."""

    async def async_len(self) -> int:
        raise ValueError("no end")

    def is_finite(self) -> bool:
        return False

    async def get_batch(self, indices):
        return [i * i for i in indices]


def everything(dataset: AsyncDataset) -> list:
    return list(wait_for(dataset.get_batch(range(wait_for(dataset.async_len())))))


def test_composed_sets_hold_what_lists_would():
    base = ListAsyncDataset([3, 1, 4, 1, 5, 9, 2, 6])
    assert everything(base.map(lambda x, y, z: x * y + z, 10, z=1)) == [31, 11, 41, 11, 51, 91, 21, 61]
    assert everything(base.map_batches(lambda xs: [sum(xs)] * len(xs))) == [31] * 8
    assert everything(base.slice_dataset(2, 5)) == [4, 1, 5] and everything(base.take(3)) == [3, 1, 4]
    assert everything(base.slice_dataset(6).map(str)) == ["2", "6"]
    assert everything(EpochDataset(base, 2)) == [3, 1, 4, 1, 5, 9, 2, 6] * 2
    assert base.as_sync_dataset()[5] == 9 and len(base.as_sync_dataset().as_async_dataset().as_sync_dataset()) == 8
    assert everything(Counting().take(4)) == [0, 1, 4, 9]


def test_a_shuffle_is_a_permutation_that_the_key_decides():
    base = ListAsyncDataset(list(range(101)))
    for kind in ("feistel", "linear"):
        orders = [everything(base.shuffle(jax.random.key(seed), perm_type=kind)) for seed in (0, 0, 1)]
        assert all(sorted(order) == list(range(101)) for order in orders)
        assert orders[0] == orders[1] != orders[2] and orders[0] != list(range(101))
    with pytest.raises(ValueError, match="expected feistel or linear"):
        base.shuffle(jax.random.key(0), perm_type="random")


def test_a_key_among_the_keywords_is_another_one_for_each_example():
    drawn = everything(ListAsyncDataset([0] * 6).map(lambda _, key: int(jax.random.bits(key)), key=jax.random.key(7)))
    assert drawn == [int(jax.random.bits(jax.random.fold_in(jax.random.key(7), n))) for n in range(6)]
    assert len(set(drawn)) == 6


def test_examples_beyond_the_end_are_refused():
    base = ListAsyncDataset([1, 2, 3])
    with pytest.raises(ValueError, match="example 2 of a slice"):
        wait_for(base.take(2).get_batch([2]))
    with pytest.raises(ValueError, match="example 6 of 2 epochs of 3"):
        wait_for(EpochDataset(base, 2).get_batch([6]))
    with pytest.raises(ValueError, match="ends before it begins"):
        base.slice_dataset(3, 1)


def test_asked_inside_of_an_event_loop_too():
    async def inside() -> int:
        return len(ListAsyncDataset([1, 2]).as_sync_dataset())

    assert asyncio.run(inside()) == 2


class Sync(SyncDataset[str]):
    def __len__(self) -> int:
        return 3

    def get_batch(self, indices):
        return ["abc"[i] for i in indices]


class Letters(ShardedDataset[str]):
    @property
    def shard_names(self):
        return ["ab", "cd"]

    def open_shard_at_row(self, shard_name: str, row: int):
        return iter(shard_name[row:])


def test_sync_and_sharded_sets():
    assert everything(Sync().as_async_dataset().map(str.upper)) == ["A", "B", "C"]
    assert list(Letters()) == ["a", "b", "c", "d"] and Letters().num_shards == 2
    assert list(Letters().open_shard_at_row("cd", 1)) == ["d"]


class Numbers(IterableDataset[int]):
    def __iter__(self):
        return iter(range(50))


def test_a_buffer_shuffles_and_loses_nothing():
    orders = [list(ShuffleDataset(Numbers(), jax.random.PRNGKey(seed), 10)) for seed in (0, 0, 2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] == orders[1] != orders[2]
    # An example leaves the buffer no earlier than it came in: place p holds one of the first p + 10.
    assert all(item < place + 10 for place, item in enumerate(orders[0]))


def test_encodings_are_stacked():
    assert stack_batch_encodings({"a": [1, 2]}, {"a": [3]}) == {"a": [[1, 2], [3]]}
    assert stack_batch_encodings({"a": [[1], [2]]}, {"a": []}) == {"a": [[1], [2]]}
