"""MeshSpec: sizes, and meshes built from stand-in and real devices."""

import jax
import numpy as np
import pytest
from helpers.mesh_devices import HostDevice, SliceDevice, slices
from jax.sharding import AxisType

from haliax_ext.errors import MeshError, UnknownAxisError
from haliax_ext.meshspec import MeshSpec, granules

pytestmark = pytest.mark.quick

TWO_SLICES = MeshSpec(axes=(("data", 4), ("model", 2), ("replica_dcn", 2)), dcn=("replica_dcn",))


def test_sizes():
    assert TWO_SLICES.size == 16
    assert TWO_SLICES.num_granules == 2
    assert TWO_SLICES.names == ("data", "model", "replica_dcn")
    assert TWO_SLICES.ways("data") == 4
    assert TWO_SLICES.ways(("data", "replica_dcn")) == 8
    assert TWO_SLICES.ways(None) == TWO_SLICES.ways(()) == 1
    assert str(TWO_SLICES) == "data 4 × model 2 × replica_dcn 2 (DCN)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshSpec(axes=(("a", 2), ("a", 2))), "mesh a 2 × a 2 names an axis twice"),
        (
            lambda: MeshSpec(axes=(("a", -1),)),
            "mesh axis 'a' has size -1; sizes must be positive (-1 must be resolved beforehand)",
        ),
        (lambda: MeshSpec(axes=(("a", 2),), dcn=("b",)), "dcn names ['b'], which are not axes of mesh a 2"),
    ],
)
def test_wrong_specs(make, message):
    with pytest.raises(MeshError) as caught:
        make()
    assert str(caught.value) == message


def test_unknown_mesh_axis():
    with pytest.raises(UnknownAxisError) as caught:
        MeshSpec.of(data=2, model=4).ways(("modle",))
    assert str(caught.value) == "mesh axis modle is not an axis of mesh data 2 × model 4; did you mean model?"


def test_abstract_and_real_meshes_agree(devices):
    spec = MeshSpec.of(data=4, model=2)
    abstract, real = spec.abstract(), spec.build(devices)
    assert abstract.axis_names == real.axis_names == ("data", "model")
    assert abstract.axis_sizes == real.axis_sizes == (4, 2)
    assert set(real.axis_types) == {AxisType.Auto}
    assert MeshSpec.from_mesh(abstract) == MeshSpec.from_mesh(real) == spec
    assert set(real.devices.flat) == set(devices)


def test_one_device_needs_no_topology():
    mesh = MeshSpec.of(data=1, model=1).build(jax.devices()[:1])
    assert mesh.devices.shape == (1, 1)


def test_too_few_devices():
    with pytest.raises(MeshError) as caught:
        MeshSpec.of(data=4, model=2).build(jax.devices()[:6])
    assert str(caught.value) == "mesh data 4 × model 2 needs 4 × 2 = 8 devices, but 6 were given"


class TestHybrid:
    """Stand-in devices: a real multi-slice machine is not at hand, the order of the array is what matters."""

    def test_each_index_of_a_dcn_axis_is_one_slice(self):
        mesh = TWO_SLICES.build(slices(2, 8))
        assert mesh.devices.shape == (4, 2, 2)
        for index in range(2):
            assert {d.slice_index for d in mesh.devices[..., index].flat} == {index}
        assert sorted(d.id for d in mesh.devices.flat) == list(range(16))

    def test_two_dcn_axes(self):
        spec = MeshSpec(axes=(("data", 2), ("a_dcn", 2), ("b_dcn", 3)), dcn=("a_dcn", "b_dcn"))
        mesh = spec.build(slices(6, 2))
        found = np.vectorize(lambda d: d.slice_index)(mesh.devices)
        np.testing.assert_array_equal(found[0], np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(found[0], found[1])

    def test_processes_as_granules_where_there_are_no_slices(self):
        spec = MeshSpec(axes=(("data", 4), ("replica_dcn", 2)), dcn=("replica_dcn",), granule="process")
        mesh = spec.build([HostDevice(id=n, process_index=n // 4) for n in range(8)])
        assert {d.process_index for d in mesh.devices[:, 1]} == {1}

    def test_one_slice_asked_to_be_two(self):
        with pytest.raises(MeshError) as caught:
            TWO_SLICES.build(slices(1, 16))
        assert str(caught.value) == (
            "mesh data 4 × model 2 × replica_dcn 2 (DCN) spans 2 granules (slice), "
            "but these devices form 1 (of 16 devices)"
        )

    def test_slices_of_different_sizes(self):
        uneven = [SliceDevice(id=n, slice_index=int(n >= 10)) for n in range(16)]
        with pytest.raises(MeshError) as caught:
            TWO_SLICES.build(uneven)
        assert str(caught.value) == (
            "mesh data 4 × model 2 × replica_dcn 2 (DCN): its slice granules differ in size: {0: 10, 1: 6}"
        )

    def test_devices_without_a_slice_index_are_one_slice(self):
        devices = [HostDevice(id=n, process_index=n // 4) for n in range(8)]
        assert granules(devices, "slice") == {0: 8}
        assert granules(devices, "process") == {0: 4, 1: 4}


def test_devices_that_do_not_state_their_slice(devices):
    """Those of a GPU compiler: the caller knows the slices, and the mesh has the devices themselves."""
    spec = MeshSpec(axes=(("data", 4), ("between", 2)), dcn=("between",))
    mesh = spec.build(devices, slices=[number // 4 for number in range(8)])
    assert [[device.id for device in row] for row in mesh.devices] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert all(device in devices for device in mesh.devices.flat)
    with pytest.raises(MeshError, match="2 granules"):
        spec.build(devices)
