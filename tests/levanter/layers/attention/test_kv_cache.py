"""Attention to a cache means the formula over a row's whole history, written in NumPy, however the history came in.

Four rows are given to the cache in three calls of unequal numbers of tokens, among them none at all. Of a cache of
integers the formula is over what NumPy's integers and scales stand for.
"""

import functools

import haliax as hax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.abstract import abstract
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.layers.attention import AttentionMask, kv_cache_shard
from levanter.layers.attention.kv_cache import NewPositions, attend_cached, kv_leaves
from levanter.layers.decode_state import LayerState, StateSizes

ROWS, HEADS, GROUP, SIZE, LAYERS, LAYER = 4, 2, 2, 8, 3, 1
PAGES, SLOTS, OF_ROW = 14, 4, 3
"""Of a paged cache: pages, positions in one, pages of a row. A fixed cache has a page of 12 positions for each row;
with tables, which calls for prompts have, it is *own pages*."""
COUNTS = np.array([[5, 0, 3, 7], [1, 6, 0, 2], [4, 1, 1, 3]], np.int32)
CALL = 7
Batch, Pos = Axis("batch", ROWS), Axis("position", CALL)
KVHead, Queries, Size = Axis("kv_head", HEADS), Axis("q_heads_per_group", GROUP), Axis("head_size", SIZE)
RULES = {
    "all": {},
    "window": {"window": 3},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "everything": {"window": 5, "soft_cap": 2.0, "sinks": True},
}
MESHES = {
    "one": (MeshSpec.of(data=1), {}),
    "data 2, model 2, group 2": (
        MeshSpec.of(data=2, model=2, group=2),
        {"batch": "data", "kv_head": "model", "q_heads_per_group": "group"},
    ),
    "heads on two axes, rows whole": (
        MeshSpec.of(data=2, model=2),
        {"kv_head": "data", "q_heads_per_group": "model"},
    ),
}


@functools.cache
def histories():
    """For each row queries, keys and values of all its positions."""
    rng = np.random.default_rng(0)
    lengths = COUNTS.sum(0)
    return [
        tuple(rng.standard_normal((n, HEADS, *more, SIZE)).astype(np.float32) for more in ((GROUP,), (), ()))
        for n in lengths
    ]


SINKS = np.random.default_rng(1).standard_normal((HEADS, GROUP)).astype(np.float32)


def integers_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors along the last axis as integers and bfloat16 scales."""
    scale = (np.abs(x).max(-1) * np.float32(1 / 127)).astype(ml_dtypes.bfloat16)
    q = np.rint(x * (1 / scale.astype(np.float32))[..., None])
    assert np.abs(q).max() <= 127.5
    return np.clip(q, -127, 127).astype(np.int8), scale


def formula(row: int, *, window=None, soft_cap=None, sinks=False, int8=False):
    """`[position, kv_head, q_heads_per_group, head_size]` by float64 loops over positions."""
    q, k, v = (x.astype(np.float64) for x in histories()[row])
    if int8:
        k, v = (n * s.astype(np.float64)[..., None] for n, s in map(integers_of, histories()[row][1:]))
    found = np.zeros_like(q)
    for at in range(len(q)):
        first = 0 if window is None else max(0, at + 1 - window)
        scores = np.einsum("hgd,khd->hgk", q[at], k[first : at + 1]) * 0.4
        if soft_cap is not None:
            scores = np.tanh(scores / soft_cap) * soft_cap
        weights = np.exp(scores)
        total = weights.sum(-1) + (np.exp(SINKS.astype(np.float64)) if sinks else 0)
        found[at] = np.einsum("hgk,khd->hgd", weights / total[..., None], v[first : at + 1])
    return found


def calls():
    """What each of the three calls is given: q, k, v with noise behind the tokens, the first position, how many."""
    noise = np.random.default_rng(2)
    first = np.zeros(ROWS, np.int32)
    for count in COUNTS:
        q, k, v = (
            noise.standard_normal((ROWS, CALL, HEADS, *more, SIZE)).astype(np.float32) for more in ((GROUP,), (), ())
        )
        for row, n in enumerate(count):
            for mine, whole in zip((q, k, v), histories()[row], strict=True):
                mine[row, :n] = whole[first[row] : first[row] + n]
        yield q, k, v, first, count
        first = first + count


def tables(ways: int, allocation: str = "paged") -> np.ndarray:
    """Pages in disorder, each shard's own numbered from 0."""
    pages, of_row = (ROWS, 1) if allocation == "own pages" else (PAGES, OF_ROW)
    order = np.random.default_rng(3).permutation(pages // ways)
    numbers = [order[: ROWS // ways * of_row] for _ in range(ways)]
    return np.concatenate(numbers).reshape(ROWS, of_row).astype(np.int32)


def empty_cache(dtype, *, layers: int = LAYERS, pages: int, slots: int) -> dict[str, hax.NamedArray]:
    """The arrays of a stack of layers."""
    sizes = StateSizes(rows=ROWS, pages=pages, page_size=slots, dtype=np.dtype(dtype))
    return {
        name: hax.zeros((Axis("layers", layers), *leaf.resolved(sizes)), dtype=leaf.dtype)
        for name, leaf in kv_leaves(dtype, KVHead=KVHead, HeadSize=Size).items()
    }


def program(
    allocation: str, mapping, *, reach=None, block=None, window=None, soft_cap=None, sinks=False, int8=False, flat=False
):
    """A call as a Program: q, k, v, the state, first, count, tables, sinks."""
    Table = Axis("table", 1 if allocation == "own pages" else OF_ROW)
    pages, slots = (PAGES, SLOTS) if allocation == "paged" else (ROWS, SLOTS * OF_ROW)

    def function(q, k, v, held, first, count, table, sink):
        own = None if allocation == "fixed" else table
        new = NewPositions.consecutive(first, count, Pos, tables=own, reach=reach, block=block, flat=flat)
        state = LayerState(arrays=held, layer=jnp.int32(LAYER))
        mixed, state = attend_cached(
            q,
            k,
            v,
            state,
            new,
            mask=AttentionMask.causal(sliding_window=window),
            softmax_scale=0.4,
            dtype=jnp.float32,
            soft_cap=soft_cap,
            sinks=sink if sinks else None,
        )
        return mixed, dict(state.arrays), state.layer

    compute = AxisMapping({**mapping, "page": mapping.get("batch")})

    def empty(axes, dtype):
        return abstract(lambda: hax.zeros(axes, dtype=dtype))

    def given(name, axes, dtype):
        return Input(name=name, value=empty(axes, dtype), placement=compute)

    held = abstract(lambda: empty_cache(np.int8 if int8 else np.float32, pages=pages, slots=slots))
    inputs = (
        given("q", (Batch, Pos, KVHead, Queries, Size), np.float32),
        given("k", (Batch, Pos, KVHead, Size), np.float32),
        given("v", (Batch, Pos, KVHead, Size), np.float32),
        Input(name="held", value=held, placement=compute),
        given("first", (Batch,), np.int32),
        given("count", (Batch,), np.int32),
        given("table", (Batch, Table), np.int32),
        given("sink", (KVHead, Queries), np.float32),
    )
    return Program(
        name="attend", function=function, inputs=inputs, mappings=Mappings(compute=compute), donate=("held",)
    )


def run_all(allocation: str, mesh: str, devices, *, fill=0.0, reach=None, block=None, only=None, **rule):
    """What comes of each row's positions, what is held in the end, and the tables; `only`: the other rows are idle."""
    spec, mapping = MESHES[mesh]
    made = program(allocation, mapping, reach=reach, block=block, **rule)
    call = made.jit(spec.build(devices[: spec.size]))
    held = {
        name: hax.named(jnp.full(x.array.shape, fill, x.dtype), x.axes) for name, x in made.input("held").value.items()
    }
    table = tables(spec.ways(made.mappings.compute.mesh_axes("batch")), allocation)
    found: list[list[np.ndarray]] = [[] for _ in range(ROWS)]
    for q, k, v, first, count in calls():
        if only is not None:
            count = np.where(np.arange(ROWS) == only, count, 0).astype(np.int32)
        values = [q, k, v, None, first, count, table, SINKS]
        named = [
            held if x is None else hax.named(jnp.asarray(x), declared.value.axes)
            for declared, x in zip(made.inputs, values, strict=True)
        ]
        mixed, held, layer = call(*named)
        assert int(layer) == LAYER + 1
        for row, n in enumerate(count):
            found[row].append(np.asarray(mixed.array)[row, :n])
    return [np.concatenate(each) for each in found], {n: np.asarray(x.array) for n, x in held.items()}, table


@pytest.mark.parametrize("allocation", ["fixed", "paged"])
@pytest.mark.parametrize(("rule", "mesh"), [("all", "one"), *(("everything", mesh) for mesh in MESHES)])
def test_equals_the_formula_over_the_whole_row(rule, allocation, mesh, devices):
    found, *_ = run_all(allocation, mesh, devices, **RULES[rule])
    for row in range(ROWS):
        np.testing.assert_allclose(found[row], formula(row, **RULES[rule]), atol=2e-6)


@pytest.mark.parametrize("flat", [False, True], ids=["as it lies", "flat"])
@pytest.mark.parametrize(
    ("allocation", "rule", "mesh"),
    [("fixed", "all", "one"), ("paged", "everything", "data 2, model 2, group 2")],
)
def test_a_cache_of_integers_equals_the_formula_over_what_they_stand_for(rule, allocation, mesh, flat, devices):
    """However keys, values and scales are written: `flat` is what Programs for TPUs do."""
    found, *_ = run_all(allocation, mesh, devices, int8=True, flat=flat, **RULES[rule])
    for row in range(ROWS):
        np.testing.assert_allclose(found[row], formula(row, int8=True, **RULES[rule]), atol=4e-6)
        assert np.abs(found[row] - formula(row, **RULES[rule])).max() < 0.05


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("all", "everything")])
def test_every_rule_by_itself(rule, devices):
    found, *_ = run_all("paged", "one", devices, **RULES[rule])
    for row in range(ROWS):
        np.testing.assert_allclose(found[row], formula(row, **RULES[rule]), atol=2e-6)


@pytest.mark.parametrize(
    ("rule", "mesh", "int8"),
    [("all", "one", False), ("everything", "data 2, model 2, group 2", False), ("everything", "one", True)],
)
def test_by_blocks_of_keys_it_is_the_same(rule, mesh, int8, devices, monkeypatch):
    monkeypatch.setattr(kv_cache_shard, "MAX_MATERIALIZED_SCORES", 0)
    monkeypatch.setattr(kv_cache_shard, "DEFAULT_BLOCK", 5)
    found, *_ = run_all("paged", mesh, devices, int8=int8, **RULES[rule])
    for row in range(ROWS):
        np.testing.assert_allclose(found[row], formula(row, int8=int8, **RULES[rule]), atol=4e-6)


@pytest.mark.parametrize(
    ("rule", "mesh", "allocation", "int8", "block"),
    [
        ("all", "one", "fixed", False, 4),
        # Neither 5 nor 8 goes into 12 positions: the last block begins among those of the one before.
        ("everything", "one", "fixed", True, 5),
        ("everything", "data 2, model 2, group 2", "paged", False, 8),
        ("window", "one", "paged", False, 3),
        ("everything", "one", "own pages", True, 5),
        ("all", "data 2, model 2, group 2", "own pages", False, 4),
    ],
)
def test_as_far_as_the_longest_row_goes_it_is_the_same(rule, mesh, allocation, int8, block, devices):
    found, *_ = run_all(allocation, mesh, devices, int8=int8, block=block, **RULES[rule])
    for row in range(ROWS):
        np.testing.assert_allclose(found[row], formula(row, int8=int8, **RULES[rule]), atol=4e-6)


@pytest.mark.parametrize(("allocation", "rule"), [("fixed", "all"), ("paged", "everything"), ("own pages", "all")])
def test_how_long_others_are_changes_no_bit_of_a_row(allocation, rule, devices):
    together, *_ = run_all(allocation, "one", devices, block=4, **RULES[rule])
    for row in range(ROWS):
        alone, *_ = run_all(allocation, "one", devices, block=4, only=row, **RULES[rule])
        np.testing.assert_array_equal(alone[row], together[row])


@pytest.mark.parametrize("mesh", ["one", "data 2, model 2, group 2"])
@pytest.mark.parametrize(("allocation", "int8"), [("fixed", False), ("paged", False), ("paged", True)])
def test_only_what_is_new_is_written_and_to_its_own_place(allocation, int8, mesh, devices):
    _, held, table = run_all(allocation, mesh, devices, fill=7, int8=int8)
    expected = {name: np.full_like(x, 7) for name, x in held.items()}
    ways = 2 if mesh.startswith("data 2") else 1
    for row, (_, k, v) in enumerate(histories()):
        for at in range(len(k)):
            if allocation == "fixed":
                page, slot = row, at
            else:
                # The tables count within a shard; the array has the shards one behind another.
                page, slot = row // (ROWS // ways) * (PAGES // ways) + table[row, at // SLOTS], at % SLOTS
            for kv, x in enumerate((k[at], v[at])):
                whole, *scales = integers_of(x) if int8 else (x,)
                expected["pages"][LAYER, page, :, kv, slot] = whole
                for its in scales:
                    expected["scales"][LAYER, :, kv, page, slot] = its
    assert held.keys() == expected.keys()
    for name, x in expected.items():
        assert held[name].dtype == x.dtype and held[name].tobytes() == x.tobytes(), name


@pytest.mark.parametrize("allocation", ["fixed", "paged"])
def test_a_shorter_reach_reads_less_and_gives_the_same(allocation, devices):
    """All rows end before position 9 but one, which has 12: its last positions miss what they do not read."""
    found, *_ = run_all(allocation, "one", devices, reach=9)
    for row in range(ROWS):
        expected = formula(row)
        np.testing.assert_allclose(found[row][:9], expected[:9], atol=2e-6)
    assert COUNTS.sum(0).tolist() == [10, 7, 4, 12]


@pytest.mark.parametrize("int8", [False, True])
def test_what_is_not_finite_stays_with_its_own_row(int8, devices):
    """A page that a lost row leaves behind must not spoil the next row's sums, where it is multiplied by 0."""
    made = program("fixed", {}, int8=int8)
    call = made.jit(MESHES["one"][0].build(devices[:1]))
    q, k, v, first, count = next(iter(calls()))
    k, v = k.copy(), v.copy()
    v[3, 6], k[3, 5] = np.nan, np.inf
    held = {name: hax.zeros(x.axes, dtype=x.dtype) for name, x in made.input("held").value.items()}
    for new in ((q, k, v, first, count), (*(x for x in next(iter(calls()))[:3]), first, np.minimum(count, 2))):
        values = [*new[:3], None, *new[3:], tables(1), SINKS]
        named = [
            held if x is None else hax.named(jnp.asarray(x), declared.value.axes)
            for declared, x in zip(made.inputs, values, strict=True)
        ]
        mixed, held, _ = call(*named)
    assert all(np.isfinite(np.asarray(x.array, np.float32)).all() for x in held.values())
    np.testing.assert_allclose(np.asarray(mixed.array)[3, :2], formula(3, int8=int8)[:2], atol=4e-6)


def test_what_is_too_large_for_a_cache_of_float16_loses_its_row_and_no_other():
    q, k, v, first, count = next(iter(calls()))
    k, v = k.copy(), v.copy()
    k[3, 5, 0, 0], v[3, 6, 1, 2] = -1e5, 1e6
    given = [hax.named(jnp.asarray(q), (Batch, Pos, KVHead, Queries, Size))]
    given += [hax.named(jnp.asarray(x), (Batch, Pos, KVHead, Size)) for x in (k, v)]
    new = NewPositions.consecutive(hax.named(jnp.asarray(first), Batch), hax.named(jnp.asarray(count), Batch), Pos)
    cache = empty_cache(np.float16, pages=ROWS, slots=SLOTS * OF_ROW)
    state = LayerState(arrays=cache, layer=jnp.int32(LAYER))
    mixed, state = attend_cached(*given, state, new, mask=AttentionMask.causal(), softmax_scale=0.4, dtype=jnp.float32)
    assert np.isfinite(np.asarray(state.arrays["pages"].array, np.float32)).all()
    found = np.asarray(mixed.array)
    assert np.isnan(found[3, 5:7]).all()
    for row in range(ROWS):
        clear = min(int(count[row]), 5 if row == 3 else CALL)
        np.testing.assert_allclose(found[row, :clear], formula(row)[:clear], atol=5e-3)


def test_nothing_is_communicated(devices):
    """Rows, heads and pages are cut alike: each device has all that it needs."""
    spec, mapping = MESHES["data 2, model 2, group 2"]
    for allocation, int8 in (("fixed", True), ("paged", False)):
        text = program(allocation, mapping, int8=int8).lower(spec.build(devices)).compile().as_text() or ""
        assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "permute") if word in text]


def test_a_rule_that_is_not_about_positions_is_our_bug():
    q = hax.zeros((Batch, Pos, KVHead, Queries, Size))
    k = hax.zeros((Batch, Pos, KVHead, Size))
    new = NewPositions.consecutive(hax.zeros(Batch, dtype=jnp.int32), hax.zeros(Batch, dtype=jnp.int32), Pos)
    segments = AttentionMask.causal().with_segment_ids(hax.zeros((Batch, Pos), dtype=jnp.int32))
    state = LayerState.entering(empty_cache(np.float32, layers=1, pages=ROWS, slots=CALL))
    with pytest.raises(AssertionError):
        attend_cached(q, k, k, state, new, mask=segments, softmax_scale=1.0, dtype=jnp.float32)
