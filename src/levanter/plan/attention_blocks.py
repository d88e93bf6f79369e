"""Share of the attention blocks that the busiest device of a sharded sequence computes.

Where positions lie on several devices and keys travel, or in zigzag order, a kernel's table of blocks is made on the
device, and a compiled text does not say what is in it. Here it is counted, from the rule: a block is visited where one
of its queries may see one of its keys. Documents of packed rows are not known to a plan, and hide more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.layers.attention.ring_splash import run_blocks
from levanter.layers.attention.splash import splash_blocks
from levanter.mesh.context_parallel import busiest_share
from levanter.runplan import RunPlan, Searchable

Numbers = np.ndarray


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """How the positions of a sequence lie on devices.

    Attributes:
        positions: in a sequence.
        shards: the number of devices that the sequence is sharded over.
        zigzag: whether each has an early and a late run.
        travels: whether keys travel in a ring; else each device has all of them.
        block: positions in a block; divides a run.
    """

    positions: int
    shards: int
    zigzag: bool
    travels: bool
    block: int

    def share(self, window: int | None) -> float:
        """The share of all pairs of a device's queries with keys that the busiest device visits, under a causal mask.

        In a ring devices wait for each other at every hop, so the busiest of each hop counts.

        Args:
            window: how many positions back a query sees, its own included; None for all.
        """
        runs = 2 if self.zigzag else 1
        length = self.positions // (self.shards * runs * self.block)
        ranks = np.arange(self.shards)
        run_starts = [ranks * length, (2 * self.shards - 1 - ranks) * length][:runs]
        reach = None if window is None else (max(window, 1) - 2) // self.block + 2
        visited = np.zeros((self.shards, self.shards), np.int64)  # [hop, rank]
        for hop in range(self.shards):
            theirs = [first[(ranks - hop) % self.shards] for first in run_starts]
            visited[hop] = sum(_visited(mine - other, length, reach) for mine in run_starts for other in theirs)
        busiest = visited.max(axis=1).sum() if self.travels else visited.sum(axis=0).max()
        return float(busiest) * self.shards / (self.positions // self.block) ** 2

    def imbalance(self, window: int | None, segments: Numbers | None = None) -> float:
        """What the busiest device visits over the mean, for rows that are gone through one after the other.

        Documents hide something in rings only: elsewhere kernels visit blocks whatever is in the rows.

        Args:
            window: see `share`.
            segments: of the rows' documents, `[rows, position]` in their own order; None for one document a row.
        """
        count, runs = self.positions // self.block, 2 * self.shards if self.zigzag else self.shards
        block = np.arange(count)
        run = block * runs // count
        rank = np.minimum(run, runs - 1 - run) if self.zigzag else run
        ahead = block[:, None] - block[None]
        seen = (ahead >= 0) & (True if window is None else ahead < (max(window, 1) - 2) // self.block + 2)
        hop = (rank[:, None] - rank[None]) % self.shards if self.travels else np.zeros_like(ahead)
        where = hop * self.shards + rank[:, None]
        busiest = total = 0
        for ids in [None] if segments is None or not self.travels else segments:
            shown = seen
            if ids is not None:
                of_blocks = ids.reshape(count, -1)
                lowest, highest = of_blocks.min(-1), of_blocks.max(-1)
                shown = seen & (lowest[:, None] <= highest[None]) & (highest[:, None] >= lowest[None])
            visited = np.bincount(where[shown], minlength=self.shards**2).reshape(self.shards, self.shards)
            busiest, total = busiest + int(visited.max(axis=1).sum()), total + int(visited.sum())
        return busiest * self.shards / total


def _visited(ahead: Numbers, length: int, reach: int | None) -> Numbers:
    """How many blocks a run of `length` blocks of queries visits of a run of keys that begins `ahead` blocks before it.

    Args:
        ahead: for each device.
        length: of both runs, in blocks.
        reach: blocks that a block of queries visits at most, its own included; None for no window.
    """

    def behind(after: Numbers) -> Numbers:
        """Pairs of blocks where the key's is not behind the query's, queries `after` blocks further on."""

        def up_to(t: Numbers) -> Numbers:
            """The sum of s clipped to [0, length] over s ≤ t."""
            inside = np.clip(t, 0, length)
            return inside * (inside + 1) // 2 + np.maximum(t - length, 0) * length

        return up_to(after + length) - up_to(after)

    return behind(ahead) - (0 if reach is None else behind(ahead - reach))


def busiest_block_share(plan: RunPlan) -> float | None:
    """What the busiest device visits of the pairs that its kernels are handed, over all layers; None where the kernels'
    own tables say it: positions are whole, or lie in their own order with all keys on each device."""
    shards, zigzag, travels = _cut_in(plan)
    if shards == 1 or not (zigzag or travels):
        return None
    searchable = plan.searchable
    layout = (
        None
        if isinstance(searchable, str)
        else sequence_layout(searchable, shards=shards, zigzag=zigzag, travels=travels)
    )
    if layout is None or isinstance(searchable, str):
        return busiest_share(shards, "zigzag" if zigzag else "natural") / 2
    return mean_share(layout, searchable.windows)


def batch_imbalance(plan: RunPlan) -> Callable[[Numbers | None], float] | None:
    """What of a batch's rows the busiest device visits over the mean of all, over all layers: segments → the figure.

    None where positions are whole, or where kernels are not what computes attention.
    """
    shards, zigzag, travels = _cut_in(plan)
    searchable = plan.searchable
    layout = (
        None
        if isinstance(searchable, str)
        else sequence_layout(searchable, shards=shards, zigzag=zigzag, travels=travels)
    )
    if shards == 1 or layout is None or isinstance(searchable, str):
        return None
    windows = searchable.windows or ((None, 1),)

    def imbalance(segments: Numbers | None) -> float:
        imbalances = [(layout.imbalance(window, segments), features) for window, features in windows]
        return sum(value * features for value, features in imbalances) / sum(features for _, features in imbalances)

    return imbalance


def _cut_in(plan: RunPlan) -> tuple[int, bool, bool]:
    """Over how many devices positions are cut inside of attention, whether in zigzag order, and whether keys travel."""
    mappings, mesh = plan.sharding.mappings, plan.sharding.mesh
    inside = mappings.inside_attention
    travels = mesh.ways(inside.mesh_axes("key_position")) > 1
    return mesh.ways(inside.mesh_axes("position")), "position" in mappings.zigzag, travels


def sequence_layout(searchable: Searchable, *, shards: int, zigzag: bool, travels: bool) -> SequenceLayout | None:
    """How a run's positions lie; None where they are no whole blocks, which no kernel for TPUs takes in a ring.

    Args:
        searchable: the facts of the run.
        shards, zigzag, travels: see `SequenceLayout`.
    """
    positions, size, wide = (
        searchable.sizes["position"],
        searchable.sizes.get("head_size", 128),
        searchable.compute_bytes > 2,
    )
    run = positions // (shards * (2 if zigzag else 1))
    try:
        block = run_blocks(run, None, head_size=size, wide=wide).block
    except ValueError:
        return None
    if not travels:
        # The queries' blocks may straddle the runs of a device; that is not counted.
        block = min(block, splash_blocks(positions // shards, head_size=size).block)
    return SequenceLayout(positions=positions, shards=shards, zigzag=zigzag, travels=travels, block=block)


def mean_share(layout: SequenceLayout, windows: Sequence[tuple[int | None, int]]) -> float:
    """The share over all layers.

    Args:
        layout: how positions lie.
        windows: how far layers see, and the features of their queries; none for layers that see everything.
    """
    shares = [(layout.share(window), features) for window, features in windows or [(None, 1)]]
    return sum(share * features for share, features in shares) / sum(features for _, features in shares)
