"""A ring of devices: by JAX's kernel, emulated, beside the formula; what it refuses; what it compiles to."""

import dataclasses
import inspect
import itertools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.long_context import config, mappings_of, mesh_of, program
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as pallas

from haliax_ext.errors import ShardingError
from haliax_ext.mapping import AxisMapping, Mappings, inside_attention, mappings_in_scope
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention import AttentionMask, BackendChoice, attend, ring_splash
from levanter.layers.attention.lse_merge import merged, no_keys, with_sinks
from levanter.layers.attention.reference import reference_attention
from levanter.layers.attention.ring import VisibleKeys, queries_are_fewer, ring_attention
from levanter.layers.attention.ring_reference import ReferenceRingStep
from levanter.layers.attention.ring_splash import SplashRingStep, run_blocks
from levanter.layers.attention.splash_blocks import SplashBlocks
from levanter.layers.attention.splash_tables import tables_at
from levanter.layers.attention.zigzag import natural, zigzag

RING = Mappings(
    compute=AxisMapping({"position": "context", "batch": "data"}), attention=AxisMapping({"key_position": "context"})
)
KV, GROUP = Axis("kv_head", 1), Axis("q_heads_per_group", 2)


def arrays(rows: int, length: int, size: int, *, group: Axis = GROUP):
    """Queries, keys, values, the gradient of the result, sinks; and documents of unequal lengths."""
    rng = np.random.default_rng(0)
    Batch, Pos, KeyPos, Size = (
        Axis(name, n)
        for name, n in (("batch", rows), ("position", length), ("key_position", length), ("head_size", size))
    )

    def normal(*axes: Axis) -> hax.NamedArray:
        return hax.named(rng.standard_normal([axis.size for axis in axes]).astype(np.float32), axes)

    queries, keys = (Batch, Pos, KV, group, Size), (Batch, KeyPos, KV, Size)
    ids = np.sort(rng.integers(0, 5, (rows, length)), axis=-1).astype(np.int32)
    return (
        normal(*queries),
        normal(*keys),
        normal(*keys),
        normal(*queries),
        normal(KV, group),
        hax.named(ids, (Batch, Pos)),
    )


def compare(devices, ring_step, given, mask: AttentionMask, parts: int, *, sinks: bool, soft_cap: float | None, n: int):
    """The ring's result and every gradient beside the formula's on one device."""
    q, k, v, of_out, own, _ = given
    scale = q.resolve_axis("head_size").size ** -0.5
    args = (q, k, v, own if sinks else None)
    plain = dataclasses.replace(mask, zigzag=1)
    want, pull = jax.vjp(
        lambda q, k, v, s: reference_attention(q, k, v, plain, softmax_scale=scale, soft_cap=soft_cap, sinks=s), *args
    )
    ids = mask.query_segments
    laid = dataclasses.replace(plain, query_segments=None if ids is None else zigzag(ids, parts)).in_zigzag(parts)

    def around(q, k, v, s):
        k, v = (zigzag(x, parts, "key_position") for x in (k, v))
        with inside_attention():
            out = ring_attention(zigzag(q, parts), k, v, laid, softmax_scale=scale, ring_step=ring_step, sinks=s)
        return natural(out, parts)

    def both(of_out, *args):
        out, pull = jax.vjp(around, *args)
        return out, *pull(of_out)

    mesh = MeshSpec.of(data=1, context=n).build(devices[:n])
    with mappings_in_scope(RING), jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        got = jax.jit(both)(of_out, *args)
    for n, (mine, right) in enumerate(zip(got, (want, *pull(of_out)), strict=True)):
        if right is not None:
            wanted = right.rearrange(mine.axes).array
            bound = 1e-5 if n == 4 else 2e-6  # A sink's gradient is a sum over all positions.
            assert float(jnp.abs(mine.array - wanted).max()) <= bound * float(jnp.abs(wanted).max())


@pytest.mark.parametrize("group", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_queries_travel_backward_where_they_are_fewer(devices, group):
    """One query head a key head: queries, the result's gradients and theirs are 12 bytes a feature, keys' four 16."""
    given = arrays(2, 64, 8, group=GROUP.resize(group))
    fewer = queries_are_fewer(*(jnp.asarray(x.array) for x in given[:2]))
    assert fewer == (group == 1)
    mask = AttentionMask.causal(sliding_window=20).with_segment_ids(given[-1])
    compare(devices, ReferenceRingStep(soft_cap=5.0), given, mask, 4, sinks=True, soft_cap=5.0, n=4)


def test_splash_in_a_ring_is_the_formula(devices):
    """Window, sinks, bound, packed segments at once, in zigzag order; runs of a block of 128; queries travel."""
    given = arrays(1, 512, 128, group=GROUP.resize(1))
    mask = AttentionMask.causal(sliding_window=200).with_segment_ids(given[-1])
    ring_step = SplashRingStep(soft_cap=5.0, interpret=True)
    compare(devices, ring_step, given, mask, 2, sinks=True, soft_cap=5.0, n=2)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("case", ["causal", "window", "long window", "sinks and cap", "packed", "everything"])
def test_splash_in_a_ring_of_four(devices, parts, case):
    # Keys travel backward in natural order, queries in zigzag order.
    given = arrays(1, 2048, 128, group=GROUP.resize(1 if parts > 1 else 2))
    packed, capped = case in ("packed", "everything"), case in ("sinks and cap", "everything")
    window = {"window": 96, "long window": 1027, "everything": 700}.get(case)
    mask = AttentionMask.causal(sliding_window=window)
    mask = mask.with_segment_ids(given[-1]) if packed else mask
    soft_cap = 5.0 if capped else None
    # Both backward passes: one kernel for all gradients in zigzag order, and two in natural order.
    ring_step = SplashRingStep(soft_cap=soft_cap, block_size=128, interpret=True, fused=parts > 1)
    compare(devices, ring_step, given, mask, parts, sinks=capped, soft_cap=soft_cap, n=4)


@pytest.mark.parametrize("window", [None, 1, 5, 8, 13, 40])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_mark_says_which_of_the_arrived_keys_a_query_sees(runs, window):
    """Every pair of ranks, beside positions written out; and a table has every block with something to see."""
    size, length, blocks = 3, 8, SplashBlocks(block=4, compute=4, dq=2, padded=8)
    run = length // runs
    starts = [[r * run, (2 * size - 1 - r) * run][:runs] for r in range(size)]
    places = [np.concatenate([np.arange(first, first + run) for first in own]) for own in starts]
    visible_keys = VisibleKeys(runs=runs, is_causal=True, window=window)
    for mine, theirs in itertools.product(range(size), repeat=2):
        begins = tuple(jnp.asarray(starts[rank], jnp.int32) for rank in (mine, theirs))
        rule, marks = ring_splash.marks_by_index(visible_keys, length, begins)
        distance = places[mine][:, None] - places[theirs][None]
        want = (distance >= 0) & (True if window is None else distance < window)
        np.testing.assert_array_equal(rule(marks[:, None], jnp.arange(length, dtype=jnp.int32)[None]), want)
        ids = tuple(jnp.asarray(places[rank][None] // 7, jnp.int32) for rank in (mine, theirs))
        for segments in (None, ids):
            shown = want if segments is None else want & (ids[0][0][:, None] == ids[1][0][None])
            for table, cut in zip(
                tables_at(rule, marks[None], length, blocks, segments=segments), (4, 2, 4), strict=True
            ):
                some = shown.reshape(length // cut, cut, length // cut, cut).any((1, 3))
                visited = np.asarray(table.block_mask)[0] > 0
                assert not (some & ~visited).any()
                # Only where a block's queries differ in what they see may more be visited than shows something.
                assert window is not None or segments is not None or (some == visited).all()


def test_a_window_over_more_keys_than_a_mark_can_tell_apart():
    visible_keys, begins = VisibleKeys(runs=2, is_causal=True, window=5), (jnp.zeros(2, jnp.int32),) * 2
    with pytest.raises(
        ValueError, match="at most 65535 positions, not 65536; use position_order: natural, or more dev"
    ):
        ring_splash.marks_by_index(visible_keys, 65536, begins)


def test_the_installed_kernel_has_the_parameters_that_a_ring_passes():
    """By name, and the arrays by position; that `di` means the same is what the gradients above compare."""
    assert ring_splash.obstacle() is None
    for name, takes in ring_splash.BACKWARD.items():
        first = list(inspect.signature(getattr(pallas, name)).parameters)[:8]
        assert first == takes.split()[:8] == ["q", "k", "v", "segment_ids", "sinks", "logsumexp", "do", "di"]


def test_a_jax_without_it_has_no_splash_in_a_ring(monkeypatch):
    monkeypatch.delattr(pallas, ring_splash.OF_KEYS)
    with pytest.raises(ValueError, match=r"has no .*_splash_attention_bwd_dkv.*use attention_mapping: gather or heads"):
        ring_splash.splash_ring_step(soft_cap=None, block_size=None)
    monkeypatch.setattr(pallas, ring_splash.OF_KEYS, lambda q, k: None, raising=False)
    assert "has another" in str(ring_splash.obstacle())


@pytest.mark.parametrize(
    ("run", "requested", "head_size", "wide", "block"),
    [
        (4096, None, 128, False, 1024),
        (4096, 512, 128, False, 512),
        (640, None, 128, False, 128),
        (1024, None, 256, True, 512),
    ],
)
def test_blocks_divide_a_run(run, requested, head_size, wide, block):
    assert run_blocks(run, requested, head_size=head_size, wide=wide).block == block


def test_a_run_that_no_block_divides():
    with pytest.raises(
        ValueError, match="runs of 96 consecutive positions are not a multiple of 128; use longer sequences"
    ):
        run_blocks(96, None, head_size=128, wide=False)


REFUSED = {
    "an array": (
        AttentionMask.of_array(hax.ones((Axis("position", 16), Axis("key_position", 16)), dtype=bool)),
        "arrays",
    ),
    "an offset": (AttentionMask.causal(offset=3), "explicit positions or key segments"),
    "another zigzag": (AttentionMask.causal().in_zigzag(2), "zigzag order over 2 shards, and the ring has 4 devices"),
    "a window ahead": (AttentionMask(sliding_window=5), "a window without causality"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mask_that_a_ring_cannot_have_is_refused(devices, case):
    mask, text = REFUSED[case]
    q, k, v, *_ = arrays(1, 16, 4)
    with mappings_in_scope(RING), jax.set_mesh(MeshSpec.of(data=1, context=4).build(devices[:4])), inside_attention():
        refused = pytest.raises(ShardingError, match=text)
        with refused:
            attend(q, k, v, mask, softmax_scale=1.0, choice=BackendChoice(name="reference", reason=""))


def test_jax_s_own_function_is_refused_in_a_ring(devices):
    q, k, v, *_ = arrays(1, 16, 4)
    choice = BackendChoice(name="jax_native", reason="")
    with mappings_in_scope(RING), jax.set_mesh(MeshSpec.of(data=1, context=4).build(devices[:4])), inside_attention():
        refused = pytest.raises(ValueError, match="attention by jax_native in a ring")
        with refused:
            attend(q, k, v, AttentionMask.causal(), softmax_scale=1.0, choice=choice)


def test_merging_is_one_softmax():
    rng = np.random.default_rng(1)
    scores, values = rng.standard_normal((5, 12)) * 4, rng.standard_normal((12, 3))

    def of(part: slice) -> tuple[jax.Array, jax.Array]:
        weights = np.exp(scores[:, part])
        mean = weights @ values[part] / weights.sum(-1, keepdims=True)
        return jnp.asarray(mean, jnp.float32), jnp.asarray(np.log(weights.sum(-1)), jnp.float32)

    seen = no_keys((5, 3))
    for part in (slice(0, 4), slice(4, 5), slice(5, 12)):
        seen = merged(seen, of(part))
    seen = with_sinks(seen, jnp.asarray(0.7))
    weights = np.exp(scores)
    total = weights.sum(-1) + np.exp(0.7)
    np.testing.assert_allclose(seen[0], weights @ values / total[:, None], rtol=1e-5)
    np.testing.assert_allclose(seen[1], np.log(total), rtol=1e-5)


def test_hops_are_a_loop_with_few_permutations(devices):
    """Unrolled, a compiler would start every permutation first. Keys and values are never whole."""
    given = arrays(1, 64, 8)
    q, k, v, of_out, *_ = given

    def both(q, k, v, of_out):
        def around(q, k, v):
            with inside_attention():
                return ring_attention(q, k, v, AttentionMask.causal(), softmax_scale=0.3, ring_step=ReferenceRingStep())

        out, pull = jax.vjp(around, q, k, v)
        return out, *pull(of_out)

    mesh = MeshSpec.of(data=1, context=4).build(devices[:4])
    with mappings_in_scope(RING), jax.set_mesh(mesh):
        text = jax.jit(both).lower(q, k, v, of_out).as_text()
    # Keys and values, forward; backward these, their gradients, and the gradients home.
    assert text.count("stablehlo.collective_permute") == 8
    assert "all_gather" not in text and "all_to_all" not in text
    assert "64x64x" not in text and "1x1x2x64x64" not in text
    assert text.count("stablehlo.while") >= 2


def test_what_long_keeps_is_not_computed_again(devices):
    """The forward pass goes around the ring once: keys and values travel in one loop less than with all recomputed."""
    mesh = mesh_of(1, 4, 1, "ring").build(devices[:4])

    def permutations(policy: bool | str) -> int:
        model = config(gradient_checkpointing=policy, attn_backend="reference")
        return (
            program(model, "causal", mappings_of("ring", "natural")).lower(mesh).as_text().count("collective_permute")
        )

    assert permutations(True) - permutations("long") == 2
