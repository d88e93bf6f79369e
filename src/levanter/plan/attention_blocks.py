"""Share of the attention blocks that the busiest device of a sharded sequence computes.

Where positions are sharded and keys travel in a ring, or positions lie in zigzag order, a kernel's table of blocks is
computed on the device, so the compiled text does not have it. This module counts the blocks from the rule: a kernel
visits a block where one of its queries may see one of its keys. A plan does not know the documents of packed rows,
which mask more blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from levanter.layers.attention.ring_splash import run_blocks
from levanter.layers.attention.splash_blocks import splash_blocks
from levanter.mesh.context_parallel import busiest_share
from levanter.runplan import RunPlan, Searchable

Numbers = np.ndarray


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """How the positions of a sequence are sharded over devices.

    Attributes:
        positions: in a sequence.
        shards: the number of devices that the sequence is sharded over.
        zigzag: whether each device has an early and a late run of positions.
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

        In a ring devices wait for each other at every hop, so the busiest device of each hop counts.

        Args:
            window: how many positions back a query sees, its own included; None for all.
        """
        runs = 2 if self.zigzag else 1
        # All counts below are in blocks. In zigzag order rank r has the runs r and 2 · shards − 1 − r, so that
        # each rank has one cheap and one expensive run under a causal mask.
        length = self.positions // (self.shards * runs * self.block)
        ranks = np.arange(self.shards)
        run_starts = [ranks * length, (2 * self.shards - 1 - ranks) * length][:runs]
        # The first query of a block sees window − 1 positions back, which touch ceil((window − 1) / block)
        # earlier blocks; the block's own diagonal is one more.
        reach = None if window is None else (max(window, 1) - 2) // self.block + 2
        visited = np.zeros((self.shards, self.shards), np.int64)  # [hop, rank]
        for hop in range(self.shards):
            # After `hop` steps of the ring rank r works on the keys that began at rank r − hop.
            key_starts = [first[(ranks - hop) % self.shards] for first in run_starts]
            visited[hop] = sum(
                _visited(query_start - other, length, reach) for query_start in run_starts for other in key_starts
            )
        # Over all pairs of blocks of one device, (blocks of the sequence)² / shards.
        busiest = visited.max(axis=1).sum() if self.travels else visited.sum(axis=0).max()
        # Over all pairs of blocks of one device, (blocks of the sequence)² / shards.
        return float(busiest) * self.shards / (self.positions // self.block) ** 2

    def imbalance(self, window: int | None, segments: Numbers | None = None) -> float:
        """The blocks that the busiest device visits over the mean, for rows that are processed one after the other.

        Document boundaries skip blocks in rings only: the other kernels visit the same blocks whatever the rows hold.

        Args:
            window: see `share`.
            segments: document ids, `[rows, position]` in the order of the text; None for one document a row.
        """
        count, runs = self.positions // self.block, 2 * self.shards if self.zigzag else self.shards
        block = np.arange(count)
        run = block * runs // count
        # [block]: which rank has it. In zigzag order runs r and 2 · shards − 1 − r are on rank r.
        rank = np.minimum(run, runs - 1 - run) if self.zigzag else run
        ahead = block[:, None] - block[None]
        seen = (ahead >= 0) & (True if window is None else ahead < (max(window, 1) - 2) // self.block + 2)
        hop = (rank[:, None] - rank[None]) % self.shards if self.travels else np.zeros_like(ahead)
        # [query block, key block]: the (hop, rank) at which this pair is computed, as one index for `bincount`.
        hop_and_rank = hop * self.shards + rank[:, None]
        busiest = total = 0
        for ids in [None] if segments is None or not self.travels else segments:
            shown = seen
            if ids is not None:
                block_ids = ids.reshape(count, -1)
                # Two blocks may share a document where their ranges of ids overlap. It is the
                # test of the ring kernels, so a block that mixes documents counts as visited
                # even if no pair in it is of one document.
                lowest, highest = block_ids.min(-1), block_ids.max(-1)
                shown = seen & (lowest[:, None] <= highest[None]) & (highest[:, None] >= lowest[None])
            visited = np.bincount(hop_and_rank[shown], minlength=self.shards**2).reshape(self.shards, self.shards)
            busiest, total = busiest + int(visited.max(axis=1).sum()), total + int(visited.sum())
        return busiest * self.shards / total


def _visited(ahead: Numbers, length: int, reach: int | None) -> Numbers:
    """Counts the blocks that a run of `length` query blocks visits of a run of keys that begins `ahead` blocks earlier.

    Args:
        ahead: an array with one value for each device.
        length: of both runs, in blocks.
        reach: blocks that a block of queries visits at most, its own included; None for no window.
    """

    def behind(after: Numbers) -> Numbers:
        """Pairs of blocks whose key is at or before the query, where the query run begins `after` blocks later."""

        def up_to(t: Numbers) -> Numbers:
            """The sum of s clipped to [0, length] over s ≤ t."""
            inside = np.clip(t, 0, length)
            return inside * (inside + 1) // 2 + np.maximum(t - length, 0) * length

        # Query block i (0 ≤ i < length) sees clip(after + i + 1, 0, length) key blocks: a sum of consecutive
        # terms, taken as the difference of two prefix sums.
        return up_to(after + length) - up_to(after)

    # A window removes the pairs that lie `reach` or more blocks back: the same count, shifted by the window.
    return behind(ahead) - (0 if reach is None else behind(ahead - reach))


def busiest_block_share(plan: RunPlan) -> float | None:
    """The share of its pairs of blocks that the busiest device visits, over all layers.

    None where the kernels' tables in the compiled text have it: positions that are not sharded, or that lie in the
    order of the text with all keys on each device.
    """
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
    """A function from segments of a batch to the work of the busiest device over the mean, over all layers.

    None where positions are not sharded, or where no block kernel computes attention.
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
    """The devices that share a sequence inside attention, whether in zigzag order, and whether keys travel."""
    mappings, mesh = plan.sharding.mappings, plan.sharding.mesh
    inside = mappings.inside_attention
    # Keys that are sharded inside attention are those of a ring; a gather makes them whole there.
    travels = mesh.ways(inside.mesh_axes("key_position")) > 1
    return mesh.ways(inside.mesh_axes("position")), "position" in mappings.zigzag, travels


def sequence_layout(searchable: Searchable, *, shards: int, zigzag: bool, travels: bool) -> SequenceLayout | None:
    """The layout of a run's positions; None where a run is not a whole number of blocks, which no ring kernel accepts.

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
    """The share over all layers, weighted by the features of their queries.

    Args:
        layout: how positions are sharded.
        windows: how far layers see, and the features of their queries; none for layers that see everything.
    """
    shares = [(layout.share(window), features) for window, features in windows or [(None, 1)]]
    return sum(share * features for share, features in shares) / sum(features for _, features in shares)
