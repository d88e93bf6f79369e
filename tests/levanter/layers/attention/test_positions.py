"""Queries and keys at any positions: every backend gives the values and the gradients of the formula in NumPy.

The cases cover every pair of: mask, segments, positions, lengths, what a head has beside it, backend.
"""

import functools
import itertools
import logging
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.mapping import AxisMapping, Mappings, mappings_in_scope
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention import AttentionMask, BackendChoice, attend, splash, splash_blocks
from levanter.layers.attention.splash import splash_attention
from levanter.layers.attention.splash_blocks import MAX_MARKED_KEYS, SplashBlocks, splash_mask_obstacle
from levanter.layers.attention.splash_tables import LimitRule, Rule, query_marks, rule_by_marks, tables_at

SCALE, CAP = 0.6, 1.5
Batch, KVHead, Group, Size = Axis("batch", 2), Axis("kv_head", 2), Axis("q_heads_per_group", 2), Axis("head_size", 8)
FACTORS = {
    "mask": ("all", "causal", "window", "ahead"),
    "segments": ("none", "shared", "of both", "trunks"),
    "positions": ("index", "offset", "before", "first", "firsts", "permuted", "gaps"),
    "lengths": ((140, 140), (50, 280), (280, 50)),
    "beside": ("nothing", "sinks", "cap", "both"),
    "backend": ("reference", "blockwise", "splash", "jax_native"),
}
CHOICES = {
    "reference": BackendChoice(name="reference", reason=""),
    "blockwise": BackendChoice(name="blockwise", reason="", block_size=33),
    "splash": BackendChoice(name="splash", reason="", block_size=128),
    "jax_native": BackendChoice(name="jax_native", reason=""),
}


@dataclass(frozen=True)
class Case:
    """One value of each factor."""

    mask: str
    segments: str
    positions: str
    lengths: tuple[int, int]
    beside: str
    backend: str

    @property
    def is_legal(self) -> bool:
        """Segments are shared by index; JAX's own function has neither sinks nor caps."""
        shared = self.segments != "shared" or self.lengths[0] == self.lengths[1]
        return shared and (self.backend != "jax_native" or self.beside == "nothing")

    @property
    def pairs(self) -> set[tuple]:
        """Every two of its values, by the names of their factors."""
        return set(itertools.combinations([(name, getattr(self, name)) for name in FACTORS], 2))

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)).replace(" ", "") for name in FACTORS)


@functools.cache
def covering() -> list[Case]:
    """Cases that have every pair of values that a legal case has, found greedily."""
    legal = [case for values in itertools.product(*FACTORS.values()) if (case := Case(*values)).is_legal]
    pairs = [case.pairs for case in legal]
    missing = set().union(*pairs)
    random, chosen = np.random.default_rng(0), []
    while missing:
        tried = [*random.integers(0, len(legal), 100), next(n for n, has in enumerate(pairs) if has & missing)]
        best = max(tried, key=lambda n: len(pairs[n] & missing))
        chosen.append(legal[best])
        missing -= pairs[best]
    return chosen


def arrays_of(case: Case) -> dict[str, np.ndarray]:
    """Queries, keys, values, sinks, and whatever of positions and segments the case has."""
    random = np.random.default_rng(abs(hash(case.lengths)) % 1000)
    queries, keys = case.lengths
    found = {
        "q": random.standard_normal((2, queries, 2, 2, 8)),
        "k": random.standard_normal((2, keys, 2, 8)),
        "v": random.standard_normal((2, keys, 2, 8)),
        "sinks": random.standard_normal((2, 2)) * 2,
    }
    found = {name: x.astype(np.float32) for name, x in found.items()}
    longest = max(case.lengths)
    if case.segments != "none":
        found["query_segments"] = np.sort(random.integers(0, 3, (2, queries)), axis=1).astype(np.int32)
    if case.segments == "trunks":
        found["query_trunks"] = random.integers(0, 3, (2, queries)).astype(np.int32)
    if case.segments in ("of both", "trunks"):
        found["key_segments"] = random.integers(0, 3, (2, keys)).astype(np.int32)
    if case.positions in ("first", "firsts"):
        found["query_positions"] = np.array([7, 90], np.int32)
    if case.positions == "firsts":
        found["key_positions"] = np.array([-20, 60], np.int32)
    if case.positions == "permuted":
        for name, count in (("query_positions", queries), ("key_positions", keys)):
            found[name] = np.stack([random.permutation(longest)[:count] for _ in range(2)]).astype(np.int32)
    if case.positions == "gaps":
        # As in a cache that holds some positions twice and others not at all.
        found["query_positions"] = random.integers(-9, 3 * longest, (2, queries)).astype(np.int32)
        found["key_positions"] = np.sort(random.integers(0, 2 * longest, (2, keys)), axis=1).astype(np.int32)
    return found


WINDOW = {"window": 45, "ahead": 45}
OFFSET = {"offset": 40, "before": -30}


def mask_of(case: Case, arrays) -> AttentionMask:
    Pos, KeyPos = (Axis(name, size) for name, size in zip(("position", "key_position"), case.lengths, strict=True))

    def named(name: str, Along: Axis) -> hax.NamedArray | None:
        x = arrays.get(name)
        return None if x is None else hax.named(x, (Batch, Along)[: x.ndim])

    causal, window = case.mask in ("causal", "window"), WINDOW.get(case.mask)
    rule = AttentionMask(is_causal=causal, sliding_window=window, offset=OFFSET.get(case.positions, 0))
    rule = rule.with_positions(named("query_positions", Pos), named("key_positions", KeyPos))
    segments = named("query_segments", Pos)
    if segments is None:
        return rule
    rule, trunks = rule.with_segment_ids(segments, named("key_segments", KeyPos)), named("query_trunks", Pos)
    return rule if trunks is None else rule.with_trunks(trunks)


def shown(case: Case, arrays) -> np.ndarray:
    """`[batch, query, key]`, element by element."""
    queries, keys = case.lengths
    positions = []
    for name, count in (("query_positions", queries), ("key_positions", keys)):
        given = arrays.get(name, np.full(2, OFFSET.get(case.positions, 0) if name == "query_positions" else 0))
        positions.append(given if given.ndim == 2 else given[:, None] + np.arange(count))
    found = np.ones((2, queries, keys), bool)
    for row, i, j in np.ndindex(*found.shape):
        distance = int(positions[0][row, i]) - int(positions[1][row, j])
        seen = case.mask in ("all", "ahead") or distance >= 0
        seen &= case.mask not in WINDOW or distance < WINDOW[case.mask]
        if case.segments != "none":
            theirs = arrays["query_segments"] if case.segments == "shared" else arrays["key_segments"]
            mine = {int(arrays[name][row, i]) for name in ("query_segments", "query_trunks") if name in arrays}
            seen &= int(theirs[row, j]) in mine
        found[row, i, j] = seen
    return found


def formula(case: Case, arrays) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The result in float64, and the gradients of the sum of its squares by the chain rule."""
    q, k, v, sinks = (arrays[name].astype(np.float64) for name in ("q", "k", "v", "sinks"))
    seen = shown(case, arrays)[:, None, None]
    scores = np.einsum("bqhgd,bkhd->bhgqk", q, k) * SCALE
    slope = np.ones_like(scores)
    if case.beside in ("cap", "both"):
        slope, scores = 1 - np.tanh(scores / CAP) ** 2, CAP * np.tanh(scores / CAP)
    exponentials = np.exp(scores) * seen
    total = exponentials.sum(-1, keepdims=True)
    of_sink = np.exp(sinks)[None, :, :, None, None] if case.beside in ("sinks", "both") else np.zeros(1)
    weights = np.divide(exponentials, total + of_sink, out=np.zeros_like(exponentials), where=total > 0)
    out = np.einsum("bhgqk,bkhd->bqhgd", weights, v)
    of_out = 2 * out
    of_weights = np.einsum("bqhgd,bkhd->bhgqk", of_out, v)
    mixed = (weights * of_weights).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - mixed) * slope * SCALE
    gradients = {
        "q": np.einsum("bhgqk,bkhd->bqhgd", of_scores, k),
        "k": np.einsum("bhgqk,bqhgd->bkhd", of_scores, q),
        "v": np.einsum("bhgqk,bqhgd->bkhd", weights, of_out),
    }
    if case.beside in ("sinks", "both"):
        gradients["sinks"] = -(of_sink / (total + of_sink) * mixed).sum((0, 3, 4))
    return out, gradients


def computed(case: Case, arrays) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    Pos, KeyPos = (Axis(name, size) for name, size in zip(("position", "key_position"), case.lengths, strict=True))
    names = ("q", "k", "v", "sinks") if case.beside in ("sinks", "both") else ("q", "k", "v")
    rest = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "sinks")}

    def loss(given, rest):
        q = hax.named(given["q"], (Batch, Pos, KVHead, Group, Size))
        k, v = (hax.named(given[name], (Batch, KeyPos, KVHead, Size)) for name in ("k", "v"))
        out = attend(
            q, k, v, mask_of(case, rest), softmax_scale=SCALE, choice=CHOICES[case.backend],
            soft_cap=CAP if case.beside in ("cap", "both") else None,
            sinks=hax.named(given["sinks"], (KVHead, Group)) if "sinks" in given else None,
        )  # fmt: skip
        assert out.axes == q.axes and out.dtype == q.dtype
        return jnp.sum(jnp.square(out.array)), out.array

    given = {name: arrays[name] for name in names}
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given, rest)
    return np.asarray(out), {name: np.asarray(x) for name, x in gradients.items()}


def assert_formula(case: Case) -> None:
    arrays = arrays_of(case)
    out, gradients = computed(case, arrays)
    expected_out, expected = formula(case, arrays)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, x in gradients.items():
        np.testing.assert_allclose(x, expected[name], atol=4e-5, rtol=1e-6, err_msg=name)


@pytest.fixture(autouse=True)
def emulated_kernel(monkeypatch):
    monkeypatch.setattr(splash, "splash_attention", functools.partial(splash_attention, interpret=True))


@pytest.mark.parametrize("case", covering(), ids=str)
def test_every_pair_of_what_attention_can_be(case, caplog):
    with caplog.at_level(logging.WARNING):
        assert_formula(case)
    assert "blockwise and not" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "blockwise", "splash"])
@pytest.mark.parametrize("case", covering(), ids=str)
def test_every_case_on_every_backend(case, backend):
    assert_formula(Case(**{**vars(case), "backend": backend}))


MESHES = {
    "data 2 × model 2 × group 2": (
        MeshSpec.of(data=2, model=2, group=2),
        {"batch": "data", "kv_head": "model", "q_heads_per_group": "group"},
    ),
    "data 2 × context 2": (MeshSpec.of(data=2, context=2), {"batch": "data", "position": "context"}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("positions", ["permuted", "before", "first"])
def test_the_kernel_on_meshes(positions, mesh, devices):
    """Each device makes the tables of its own rows and queries; with `before`, some queries see nothing."""
    spec, mapping = MESHES[mesh]
    lengths = (50, 280) if positions == "first" else (140, 140)
    case = Case("causal", "none" if positions == "first" else "shared", positions, lengths, "sinks", "splash")
    mappings = Mappings(compute=AxisMapping(mapping))
    with jax.set_mesh(spec.build(devices[: spec.size])), mappings_in_scope(mappings):
        assert_formula(case)


def test_a_part_that_sees_nothing_at_all(devices, monkeypatch):
    """All queries of the first device come before every key, which the kernel's own tables could not say."""
    monkeypatch.setitem(OFFSET, "before", -130)
    case = Case("causal", "none", "before", (140, 140), "nothing", "splash")
    mappings = Mappings(compute=AxisMapping({"position": "context"}))
    with jax.set_mesh(MeshSpec.of(context=2).build(devices[:2])), mappings_in_scope(mappings):
        assert_formula(case)


@pytest.mark.parametrize("rule", [Rule(True, None), Rule(True, 60), Rule(False, 60)], ids=str)
@pytest.mark.parametrize("reordered", [False, True])
def test_tables_hold_every_block_that_shows_something(rule, reordered):
    """And, where queries follow each other, no block more."""
    random, keys = np.random.default_rng(0), 512
    queries = np.array([[100], [300]]) + np.arange(256)
    if not reordered:
        where = np.broadcast_to(np.arange(keys), (2, keys))
        marks, _ = jax.vmap(functools.partial(query_marks, rule))(jnp.asarray(queries, jnp.int32), None)
    else:
        where = np.stack([random.permutation(keys) for _ in range(2)])
        marks, order = jax.vmap(functools.partial(query_marks, rule))(
            jnp.asarray(queries, jnp.int32), jnp.asarray(where)
        )
        where = np.take_along_axis(where, np.asarray(order), axis=1)
    distance = queries[:, :, None] - where[:, None, :]
    seen = (distance >= 0) | (not rule.is_causal)
    seen &= distance < (np.inf if rule.window is None else rule.window)
    by_marks = rule_by_marks(rule, reordered=reordered)
    index = jnp.arange(keys, dtype=jnp.int32)[None, None]
    np.testing.assert_array_equal(by_marks(marks[:, :, None], index), seen)
    blocks = SplashBlocks(block=128, compute=128, dq=64, padded=256)
    for table, size, axis in zip(tables_at(by_marks, marks, keys, blocks), (128, 64, 128), (1, 1, 0), strict=True):
        expected = seen.reshape(2, 256 // size, size, keys // size, size).any((0, 2, 4))
        np.testing.assert_array_equal(table.block_mask[0], expected)
        index = np.indices(expected.shape)[axis]
        np.testing.assert_array_equal(table.data_next[0], index * expected)


def test_two_limits_fit_in_a_mark():
    stop = np.array([0, 1, 32767, 32768, MAX_MARKED_KEYS], np.int32)
    for first in (0, 1, 40000, MAX_MARKED_KEYS):
        marks = LimitRule.of(jnp.full_like(stop, first), jnp.asarray(stop))
        np.testing.assert_array_equal(LimitRule.stop(marks), stop)
        np.testing.assert_array_equal(LimitRule.first(marks), first)


def test_more_keys_than_a_mark_can_limit_go_to_another_backend(caplog, monkeypatch):
    positions = hax.zeros((Batch, Axis("key_position", 4)), dtype=jnp.int32)
    mask = AttentionMask.causal(sliding_window=9).with_positions(None, positions)
    assert splash_mask_obstacle(mask, keys=65_535) is None
    assert "takes at most 65535 keys, not 65536" in str(splash_mask_obstacle(mask, keys=65_536))
    assert splash_mask_obstacle(AttentionMask.causal().with_positions(None, positions), keys=65_536) is None
    first = AttentionMask.causal(sliding_window=9).with_positions(None, positions["key_position", 0])
    assert splash_mask_obstacle(first, keys=65_536) is None
    monkeypatch.setattr(splash_blocks, "MAX_MARKED_KEYS", 100)
    with caplog.at_level(logging.WARNING):
        assert_formula(Case("window", "none", "permuted", (140, 140), "nothing", "splash"))
    assert "blockwise instead of splash: with a window" in caplog.text


def test_a_kernel_with_traced_positions_lowers_for_a_tpu():
    """Marks and tables are data: the kernel that TPUs get takes them as they are."""
    Pos, KeyPos = Axis("position", 256), Axis("key_position", 512)

    def function(q, k, v, queries, keys):
        q = hax.named(q, (Batch, Pos, KVHead, Group, Size))
        k, v = (hax.named(x, (Batch, KeyPos, KVHead, Size)) for x in (k, v))
        mask = AttentionMask.causal(sliding_window=40).with_positions(
            hax.named(queries, (Batch, Pos)), hax.named(keys, (Batch, KeyPos))
        )
        return jnp.sum(splash_attention(q, k, v, mask, softmax_scale=SCALE).array)

    shapes = [(2, 256, 2, 2, 8), (2, 512, 2, 8), (2, 512, 2, 8)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arguments += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 256), (2, 512))]
    lowered = jax.jit(jax.grad(function, argnums=(0, 1, 2))).trace(*arguments).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3


def test_what_a_mask_cannot_be():
    ids = hax.zeros(Axis("position", 3), dtype=jnp.int32)
    with pytest.raises(ValueError, match="but not for queries; give both"):
        AttentionMask(key_segments=ids.rename({"position": "key_position"}))
    with pytest.raises(ValueError, match="an offset of 4; add the offset to the positions"):
        AttentionMask(query_positions=ids, offset=4)
    mask = AttentionMask().with_segment_ids(ids)
    with pytest.raises(ValueError, match=r"3 queries to 5 keys.*with_segment_ids"):
        mask.materialize(Axis("position", 3), Axis("key_position", 5))
    with pytest.raises(AssertionError, match="both masks have query positions"):
        AttentionMask.causal(offset=1) & AttentionMask.causal(offset=ids)
