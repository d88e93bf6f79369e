"""The share of pairs that the busiest device visits, beside blocks that are counted one by one."""

import itertools

import numpy as np
import pytest

from levanter.mesh.context_parallel import busiest_share
from levanter.plan.attention_blocks import SequenceLayout, mean_share


def counted(lying: SequenceLayout, window: int | None) -> float:
    """By the mask, written out."""
    runs = 2 * lying.shards if lying.zigzag else lying.shards
    run = lying.positions // runs
    of = [[r, 2 * lying.shards - 1 - r] if lying.zigzag else [r] for r in range(lying.shards)]
    places = [np.concatenate([np.arange(i * run, (i + 1) * run) for i in each]) for each in of]
    blocks = len(places[0]) // lying.block
    visited = np.zeros((lying.shards, lying.shards))
    for rank, hop in itertools.product(range(lying.shards), repeat=2):
        distance = places[rank][:, None] - places[(rank - hop) % lying.shards][None]
        seen = (distance >= 0) & (True if window is None else distance < window)
        visited[hop, rank] = seen.reshape(blocks, lying.block, blocks, lying.block).any((1, 3)).sum()
    busiest = visited.max(1).sum() if lying.travels else visited.sum(0).max()
    return busiest / (blocks * blocks * lying.shards)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 9, 16, 40, 200])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize(("positions", "parts", "block"), [(96, 4, 4), (96, 3, 2), (64, 8, 1)])
def test_blocks_are_those_of_the_mask(positions, parts, block, travels, zigzag, window):
    lying = SequenceLayout(positions=positions, shards=parts, zigzag=zigzag, travels=travels, block=block)
    assert lying.share(window) == pytest.approx(counted(lying, window), rel=1e-12)


@pytest.mark.parametrize("order", ["natural", "zigzag"])
def test_small_blocks_come_to_the_busiest_share_of_a_causal_mask(order):
    lying = SequenceLayout(positions=1 << 16, shards=8, zigzag=order == "zigzag", travels=False, block=16)
    assert lying.share(None) == pytest.approx(busiest_share(8, order) / 2, rel=1e-3)


def test_a_window_is_as_much_for_all_in_either_order_and_layers_are_averaged():
    natural, zigzag = (
        SequenceLayout(positions=1 << 17, shards=8, zigzag=order, travels=True, block=1024) for order in (False, True)
    )
    assert natural.share(4096) == pytest.approx(5 * 1024 / (1 << 17), rel=0.05)
    # A late run meets the run before it at another hop than an early one, and hops are waited for.
    assert zigzag.share(4096) > natural.share(4096)
    mixed = mean_share(zigzag, [(4096, 5), (None, 1)])
    assert mixed == pytest.approx((5 * zigzag.share(4096) + zigzag.share(None)) / 6)
    assert mean_share(zigzag, []) == zigzag.share(None)


def counted_rows(lying: SequenceLayout, window: int | None, segments: np.ndarray) -> float:
    """Busiest over mean by the mask written out, block by block; documents hide something in rings."""
    count, runs = lying.positions // lying.block, 2 * lying.shards if lying.zigzag else lying.shards
    blocks_of_run = count // runs
    ranks = [r if r < lying.shards else runs - 1 - r for r in range(runs)]
    busiest = total = 0
    for ids in segments:
        visited = np.zeros((lying.shards, lying.shards))
        for q, k in itertools.product(range(count), repeat=2):
            mine, theirs = (np.arange(b * lying.block, (b + 1) * lying.block) for b in (q, k))
            distance = mine[:, None] - theirs[None]
            seen = (distance >= 0) & (True if window is None else distance < window)
            meets = ids[mine].min() <= ids[theirs].max() and ids[mine].max() >= ids[theirs].min()
            rank, other = ranks[q // blocks_of_run], ranks[k // blocks_of_run]
            hop = (rank - other) % lying.shards if lying.travels else 0
            visited[hop, rank] += seen.any() and (meets or not lying.travels)
        busiest, total = busiest + visited.max(1).sum(), total + visited.sum()
    return busiest * lying.shards / total


@pytest.mark.parametrize("window", [None, 1, 5, 9, 40])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("travels", [False, True])
def test_real_rows_are_counted_by_their_documents(travels, zigzag, window):
    """The documents of two rows, one of them a long one and padding (−1) behind it."""
    lying = SequenceLayout(positions=96, shards=4, zigzag=zigzag, travels=travels, block=4)
    rows = np.stack([np.repeat([0, 1, 2], [10, 51, 35]), np.repeat([0, -1], [70, 26])])
    assert lying.imbalance(window, rows) == pytest.approx(counted_rows(lying, window, rows), rel=1e-12)
    # Rows without documents are a row of one.
    one = lying.imbalance(window, np.zeros((1, 96), np.int32))
    assert lying.imbalance(window) == one == pytest.approx(lying.share(window) / mean_of(lying, window), rel=1e-12)


def mean_of(lying: SequenceLayout, window: int | None) -> float:
    """The share of all blocks that devices visit in the mean."""
    whole = SequenceLayout(positions=lying.positions, shards=1, zigzag=False, travels=False, block=lying.block)
    return whole.share(window)
