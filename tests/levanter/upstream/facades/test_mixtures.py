"""Upstream's mixtures, eras, permutations and packing, compared with counts and loops."""

import asyncio
from collections import Counter

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis

from levanter.upstream.facades.datasets import EraShufflingDataset, ListAsyncDataset, wait_for
from levanter.upstream.facades.jagged import JaggedArrayStore
from levanter.upstream.facades.loaders import BackgroundIterable
from levanter.upstream.facades.mixtures import (
    FeistelPermutation,
    LcgPermutation,
    MixtureDataset,
    rescale_mixture_schedule_for_batch_schedule,
)
from levanter.upstream.facades.packing import (
    GreedyPrepackedDataset,
    PromptCompletion,
    SequencePacker,
    greedy_pack_prompt_completions,
    pack_documents,
    pack_prompt_completions,
    per_segment_correct,
    per_segment_loss,
)
from levanter.upstream.facades.schedules import OldBatchSchedule, ScheduleStep

KEY = jax.random.key(3)


def sets(*sizes: int) -> dict[str, ListAsyncDataset]:
    return {f"s{n}": ListAsyncDataset([(n, i) for i in range(size)], is_complete=True) for n, size in enumerate(sizes)}


def drawn(dataset, count: int, start: int = 0) -> list:
    return list(wait_for(dataset.get_batch(range(start, start + count))))


def test_a_mixture_draws_each_set_in_turn_and_by_weight():
    mixture = MixtureDataset(sets(5, 7), {"s0": 3, "s1": 1}, 16, key=KEY)
    items = drawn(mixture, 16 * 1024)
    counts = Counter(n for n, _ in items)
    assert counts == {0: 12 * 1024, 1: 4 * 1024}
    for number, size in ((0, 5), (1, 7)):
        items_of_set = [i for n, i in items if n == number]
        assert items_of_set == [i % size for i in range(len(items_of_set))]
    assert drawn(mixture, 9, 1000) == items[1000:1009]
    with pytest.raises(ValueError, match="endless"):
        wait_for(mixture.async_len())


def test_stages_blocks_in_order_and_ends():
    stages = [(0, {"s0": 1.0}), (20, {"s0": 1.0, "s1": 1.0})]
    mixture = MixtureDataset(sets(100, 100), stages, 10, key=7, randomize_blocks=False)
    assert [n for n, _ in drawn(mixture, 40)] == [0] * 20 + ([0] * 5 + [1] * 5) * 2
    ending = MixtureDataset(sets(20, 100), stages, 10, key=7, stop_strategy="first_exhausted")
    assert wait_for(ending.async_len()) == 20
    schedule = OldBatchSchedule([ScheduleStep(0, 10), ScheduleStep(2, 30)])
    assert rescale_mixture_schedule_for_batch_schedule([(0, {"a": 1}), (3, {"a": 2})], schedule)[1] == (50, {"a": 2})
    with pytest.raises(ValueError, match=r"multiples of 10 from 0.*no data set x; known: s0.*stop_strategy: 'never'"):
        MixtureDataset(sets(1), [(3, {"x": 1})], 10, key=7, stop_strategy="never")


def test_eras_are_permuted_alone_once_they_are_complete():
    base = ListAsyncDataset(list(range(12)))
    eras = EraShufflingDataset(base, 5, key=KEY)

    async def run() -> None:
        assert await eras.current_len() == 10
        first = await eras.get_batch(range(10))
        assert (
            sorted(first[:5]) == [0, 1, 2, 3, 4] and sorted(first[5:]) == [5, 6, 7, 8, 9] and first != list(range(10))
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(eras.get_batch([10]), 0.05)
        base.finalize()
        assert sorted(await eras.get_batch([10, 11])) == [10, 11] and await eras.current_len() == 12
        with pytest.raises(IndexError, match="12 of 12"):
            await eras.get_batch([12])
        with pytest.raises(ValueError, match="complete"):
            base.append(1)

    asyncio.run(run())


@pytest.mark.parametrize("kind", [FeistelPermutation, LcgPermutation])
def test_permutations(kind):
    order = kind(1000, KEY)
    assert sorted(order(np.arange(1000)).tolist()) == list(range(1000)) and order(7) == order(np.arange(10))[7]
    with pytest.raises(IndexError, match="index 1000 of a permutation of 1000"):
        order(np.array([3, 1000]))


@pytest.mark.parametrize("capacity", [-1, None, 2])
def test_asynchronous_producers_run_with_and_without_a_loop(capacity):
    async def producer():
        for n in range(50):
            yield n
            await asyncio.sleep(0)
        raise KeyError("end")

    def consumed() -> list[int]:
        items = []
        with pytest.raises(KeyError):
            items += [items.append(n) or n for n in BackgroundIterable(producer, capacity)]
        return items

    async def inside() -> list[int]:
        return consumed()

    assert consumed() == asyncio.run(inside()) == list(range(50))


# --- packing ---

Pos, Segments = Axis("position", 10), Axis("segment", 4)


def packed(example) -> tuple[list, list, list]:
    return tuple(x.array.tolist() for x in (example.tokens, example.loss_weight, example.attn_mask.query_segments))


def test_a_packer_fills_a_row_and_refuses_what_does_not_fit():
    packer = SequencePacker(Pos, 3, 0)
    packer.add_example([1, 2, 3], [0, 1, 0])
    packer.add_example([], [])
    packer.add_example([4, 5], [1, 0])
    assert packer.can_pack([1] * 5) and not packer.can_pack([1] * 6)
    with pytest.raises(ValueError, match="Too many tokens"):
        packer.add_example([1] * 6, [1] * 6)
    assert packed(packer.pack()) == (
        [1, 2, 3, 4, 5, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, -1, -1, -1, -1, -1],
    )


def test_results_by_segment_are_those_of_a_loop():
    example = next(pack_prompt_completions(Pos, [PromptCompletion([1, 2, 3, 4], 2), PromptCompletion([5, 6, 7], 1)], 0))
    losses = hax.named(np.arange(10, dtype=np.float32), Pos)
    weights, segments = np.array(packed(example)[1]), np.array(packed(example)[2])
    ids, sums = per_segment_loss(example, losses, Segments)
    correct_ids, right = per_segment_correct(example, losses < 5, Segments)
    for n, segment in enumerate(ids.array.tolist()):
        inside = segments == segment
        assert sums.array[n] == (weights * np.arange(10))[inside].sum()
        assert right.array[n] == all(np.arange(10)[inside & (weights > 0)] < 5)
    assert ids.array.tolist() == correct_ids.array.tolist() == [-1, 0, 1, -1]


def greedy(lengths: list[list[int]], limits: list[int], most: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for n in range(len(lengths[0])):
        row = [*rows[-1], n] if rows else [n]
        fits = all(sum(leaf[i] for i in row) <= limit for leaf, limit in zip(lengths, limits, strict=True))
        if rows and fits and len(row) <= most:
            rows[-1] = row
        else:
            rows.append([n])
    return rows


def test_documents_are_packed_as_one_by_one():
    random = np.random.default_rng(0)
    for _ in range(50):
        lengths = random.integers(0, 9, (2, 20))
        tree, limits = {"a": lengths[0], "b": lengths[1]}, {"a": 12, "b": 9}
        rows = pack_documents(tree, limits, int(most := random.integers(1, 6)), slice_too_long_examples=True)
        assert [list(row) for row in rows] == greedy(lengths.tolist(), [12, 9], most)
    with pytest.raises(ValueError, match=r"Document 1 in leaf 'a' has length 13 .* 2 of 3 documents do"):
        pack_documents({"a": np.array([1, 13, 14])}, 12)


def test_prepacked_rows_hold_the_documents(tmp_path):
    documents = [np.arange(n, dtype=np.int32) + 1 for n in (4, 5, 12, 3)]
    store = JaggedArrayStore.open(str(tmp_path), dtype=np.int32)
    store.extend(documents)
    rows = wait_for(GreedyPrepackedDataset({"ids": store}, 10, slice_strategy="right").get_batch([0, 1, 2]))
    values, segments = zip(*[(row["ids"].tolist(), segment["ids"].tolist()) for row, segment in rows], strict=True)
    assert values == ([1, 2, 3, 4, 1, 2, 3, 4, 5, 0], list(range(3, 13)), [1, 2, 3, *[0] * 7])
    assert segments == ([0] * 4 + [1] * 5 + [-1], [2] * 10, [3] * 3 + [-1] * 7)
    long = greedy_pack_prompt_completions(Pos, [PromptCompletion(list(range(12)), 3)], 0)
    assert packed(long[0])[0] == list(range(2, 12)) and packed(long[0])[1] == [1] * 9 + [0]
    with pytest.raises(ValueError, match="a token behind its prompt"):
        PromptCompletion([1, 2], 2)
