"""Upstream's mixture of a script's data sets, and its permutations, as adapters onto `levanter.data`.

    rows = MixtureDataset({"web": web, "code": code}, {"web": 3, "code": 1}, 2048, key=jax.random.key(0))

Which example comes from which set is `levanter.data.mixture`'s rule, the one of `data.train_weights`: shares are exact
over 1,024 blocks, where upstream's are whole numbers in every block. So the order differs from upstream's.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from haliax_ext.pytree import PyTree
from levanter.data.mixture import MixtureStage, plan_mixture
from levanter.data.shuffle import Affine, Feistel
from levanter.upstream.facades.datasets import AsyncDataset, key_to_seed
from levanter.upstream.facades.schedules import OldBatchSchedule

T = TypeVar("T")
Weights = Mapping[str, float]
Stages = Sequence[tuple[int, Weights]]


class StopStrategy:
    """When a mixture ends: at the first set that is used up, when each has been read once, or never."""

    FIRST_STOP_STRATEGY = "first_exhausted"
    ALL_STOP_STRATEGY = "all_exhausted"
    RESTART_STRATEGY = "restart"


class MixtureDataset(AsyncDataset[T]):
    """Examples of several data sets in proportion to weights.

    Args:
        datasets: the sets by name.
        weights: a weight for each set, or stages (first example, weights); a set without one has weight 0.
        block_size: examples within which the proportions hold, up to rounding; stages begin at multiples of it.
        randomize_blocks: whether the examples of a block come in random order; otherwise set by set.
        key: determines the order within blocks: a key of JAX or a number.
        stop_strategy: one of `StopStrategy`; sets of `restart` begin again when they end.

    Raises:
        ValueError: there are no sets, a weight is negative or of no set, the stages are not ascending multiples of
            the block from 0, or the strategy is unknown.
    """

    def __init__(
        self,
        datasets: Mapping[str, AsyncDataset[T]],
        weights: Weights | Stages,
        block_size: int,
        *,
        randomize_blocks: bool = True,
        key: PyTree,
        stop_strategy: str = StopStrategy.RESTART_STRATEGY,
    ):
        stages = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        _check_mixture(datasets, stages, block_size, stop_strategy)
        used = [name for name in datasets if any(stage.get(name, 0) > 0 for _, stage in stages)]
        self.datasets = {name: datasets[name] for name in used}
        self.weight_stages, self.block_size, self.stop_strategy, self.key = stages, block_size, stop_strategy, key
        self.randomize_blocks = randomize_blocks
        # A mixture without random order needs no key; scripts then pass anything.
        seed = 0 if not randomize_blocks else key if isinstance(key, int) else key_to_seed(key)
        mixture = plan_mixture(stages, used, block=block_size, seed=seed)
        if not randomize_blocks:
            ordered = [_OrderedStage(**_fields(stage)) for stage in mixture.stages]
            mixture = dataclasses.replace(mixture, stages=tuple(ordered))
        self._mixture = mixture

    async def async_len(self) -> int:
        """The number of examples.

        Raises:
            ValueError: the mixture never ends.
        """
        if not self.is_finite():
            raise ValueError("a mixture with stop_strategy restart is endless and has no length")
        sizes = [await dataset.async_len() for dataset in self.datasets.values()]
        end = self._mixture.end(sizes, self.stop_strategy)  # pyright: ignore[reportArgumentType]
        if end is None:
            raise ValueError("this mixture never ends: its last stage draws from no set that decides its end")
        return end

    def is_finite(self) -> bool:
        """Whether the number of examples is finite."""
        return self.stop_strategy != StopStrategy.RESTART_STRATEGY

    async def get_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """The examples with these indices, in this order."""
        sets, turns = self._mixture.at(np.asarray(indices, np.int64))
        batch: list[Any] = [None] * len(indices)
        for number, dataset in enumerate(self.datasets.values()):
            positions = np.flatnonzero(sets == number)
            if len(positions):
                items = await dataset.get_batch(await self._remap_indices(dataset, turns[positions].tolist()))
                for position, item in zip(positions, items, strict=True):
                    batch[position] = item
        return batch

    async def _get_block(self, number: int) -> np.ndarray:
        """int32 `[block_size]`: the set of each example of a block, by its place in `datasets`."""
        start = number * self.block_size
        return self._mixture.at(np.arange(start, start + self.block_size))[0]

    async def _remap_indices(self, dataset: AsyncDataset[T], indices: Sequence[int]) -> list[int]:
        """Indices within the set: a finite one begins again at its end."""
        if not dataset.is_finite():
            return list(indices)
        size = await dataset.wait_until_len_at_least(max(indices) + 1)
        return [index % size for index in indices]


class _OrderedStage(MixtureStage):
    """A stage whose blocks list their sets one after the other."""

    def block_sets(self, number: int) -> np.ndarray:
        return np.sort(super().block_sets(number))


def _fields(stage: MixtureStage) -> dict[str, Any]:
    return {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)}


def _check_mixture(datasets: Mapping[str, object], stages: Stages, block_size: int, stop_strategy: str) -> None:
    problems = []
    if not datasets:
        problems.append("datasets: there are none")
    starts = [start for start, _ in stages]
    if starts[:1] != [0] or starts != sorted(set(starts)) or any(start % block_size for start in starts):
        problems.append(f"weights: stages must start at ascending multiples of {block_size} from 0, got {starts}")
    unknown = sorted({name for _, weights in stages for name in weights} - datasets.keys())
    if unknown:
        problems.append(f"weights: no data set {', '.join(unknown)}; known: {', '.join(sorted(datasets))}")
    strategies = ("restart", "first_exhausted", "all_exhausted")
    if stop_strategy not in strategies:
        problems.append(f"stop_strategy: {stop_strategy!r}; expected {', '.join(strategies)}")
    if problems:
        raise ValueError("MixtureDataset: " + "; ".join(problems))


def rescale_mixture_schedule_for_batch_schedule(
    mixture_schedule: Stages, batch_schedule: OldBatchSchedule
) -> list[tuple[int, Weights]]:
    """Stages that begin at steps, as stages that begin at examples."""
    return [(batch_schedule.global_data_offset_by_step(step), weights) for step, weights in mixture_schedule]


# --- permutations ---


class _Permutation:
    """A computed order of `length` items: of one index, or of an array of them.

    Raises:
        IndexError: an index is outside.
    """

    def __init__(self, order: Affine | Feistel):
        self.length, self._order = order.size, order

    def __call__(self, indices: PyTree) -> PyTree:
        positions = np.asarray(indices)
        outside = positions[(positions < 0) | (positions >= self.length)]
        if outside.size:
            raise IndexError(f"index {outside.flat[0]} of a permutation of {self.length}")
        items = self._order(np.atleast_1d(positions).astype(np.int64))
        return items if positions.ndim else int(items[0])


class FeistelPermutation(_Permutation):
    """`levanter.data.shuffle.Feistel`, by a key of JAX."""

    def __init__(self, length: int, prng_key: jax.Array):
        super().__init__(Feistel(length, key_to_seed(prng_key)))


class LcgPermutation(_Permutation):
    """`levanter.data.shuffle.Affine`, by a key of JAX: item `a·i + b` modulo the length."""

    def __init__(self, length: int, prng_key: jax.Array):
        order = Affine(length, key_to_seed(prng_key))
        super().__init__(order)
        self.a, self.b = order.factors
