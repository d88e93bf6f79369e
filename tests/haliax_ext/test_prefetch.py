"""Host arrays onto devices and results back: against NumPy, and against what was asked of which process's rows."""

import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from haliax_ext.prefetch import place, results, shardings
from haliax_ext.program import Input, Program

pytestmark = pytest.mark.quick

MAPPING = AxisMapping({"batch": "data", "embed": "model"})
SIZES = {"batch": 8, "position": 6, "embed": 4}


def declared(*names):
    axes = tuple(hax.Axis(name, SIZES[name]) for name in names)
    return hax.NamedArray(jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), np.int32), axes)


def values(*names, seed=0):
    return np.random.default_rng(seed).integers(0, 100, [SIZES[name] for name in names], dtype=np.int32)


@pytest.fixture
def mesh(devices):
    return MeshSpec(axes=(("data", 4), ("model", 2))).build(devices)


def test_an_array_is_placed_as_its_input_declares(mesh):
    array = values("batch", "position", "embed")
    placed = place(Input(name="x", value=declared("batch", "position", "embed"), placement=MAPPING), array, mesh)
    assert placed.array.sharding.spec == PartitionSpec("data", None, "model")
    assert [axis.name for axis in placed.axes] == ["batch", "position", "embed"]
    np.testing.assert_array_equal(np.asarray(placed.array), array)


def test_a_tree_is_placed_by_path_and_keeps_what_is_absent(mesh):
    tree = {"tokens": declared("batch", "position"), "segments": None, "mask": declared("batch", "embed")}
    given = Input(name="x", value=tree, placement=MAPPING)
    arrays = {"tokens": values("batch", "position"), "mask": values("batch", "embed", seed=1)}
    placed = place(given, arrays, mesh)
    assert placed["segments"] is None and set(shardings(given, mesh)) == {"tokens", "mask"}
    assert placed["mask"].array.sharding.spec == PartitionSpec("data", "model")
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(placed[name].array), array)


def test_what_a_process_holds_may_begin_at_another_row(mesh):
    """One process's devices hold all rows, so what it has can begin before the first only."""
    array = values("batch", "position")
    earlier = np.full((2, SIZES["position"]), -1, np.int32)
    whole = np.concatenate([earlier, array])
    placed = place(Input(name="x", value=declared("batch", "position"), placement=MAPPING), whole, mesh, first_row=-2)
    np.testing.assert_array_equal(np.asarray(placed.array), array)


@pytest.mark.parametrize("behind", [0, 1, 3, 10])
def test_results_come_in_order_and_no_more_than_asked_are_in_flight(mesh, behind):
    program = Program(
        name="scaled",
        function=lambda scale, x: {"twice": x * scale, "sum": x.sum("position")},
        inputs=(
            Input(name="scale", value=jax.ShapeDtypeStruct((), np.int32), placement=AxisMapping()),
            Input(name="x", value=declared("batch", "position"), placement=MAPPING),
        ),
        out_placement=AxisMapping(),
    )
    arrays = [values("batch", "position", seed=seed) for seed in range(5)]
    begun = []

    def batches():
        for n, array in enumerate(arrays):
            begun.append(n)
            yield f"batch {n}", (array,)

    found = results(program, mesh, np.int32(2), batches(), behind=behind)
    for n, (array, (name, result)) in enumerate(zip(arrays, found, strict=True)):
        assert name == f"batch {n}" and len(begun) == min(n + behind + 1, len(arrays))
        assert isinstance(result["twice"].array, np.ndarray)
        np.testing.assert_array_equal(result["twice"].array, 2 * array)
        np.testing.assert_array_equal(result["sum"].array, array.sum(1))


def test_no_batches_run_nothing(mesh):
    program = Program(name="never", function=lambda x: x, inputs=(Input(name="x", value=None, placement=None),))
    assert list(results(program, mesh, None, [], behind=2)) == []
