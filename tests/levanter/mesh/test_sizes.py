"""Mesh axis sizes: upstream's examples, what a slice is, and each error with its whole message."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haliax_ext.errors import ManyShardingErrors, MeshError
from levanter.mesh import MeshConfig, resolve_sizes

pytestmark = pytest.mark.quick


def sizes(axes=None, dcn_axes=None, *, devices, granules=1, granule="slice"):
    config = MeshConfig(axes=axes or {}, dcn_axes=dcn_axes or {}, granule=granule)
    return resolve_sizes(config, devices=devices, granules=granules).shape


class TestUpstreamsExamples:
    def test_model_16_on_128(self):
        assert sizes({"model": 16}, devices=128) == {"data": 8, "replica": 1, "model": 16, "replica_dcn": 1}

    def test_another_absorber_makes_data_1(self):
        assert sizes({"model": -1}, devices=128) == {"data": 1, "replica": 1, "model": 128, "replica_dcn": 1}

    def test_a_new_axis(self):
        found = sizes({"context": 2}, devices=8)
        assert found == {"data": 4, "replica": 1, "model": 1, "context": 2, "replica_dcn": 1}
        assert list(found) == ["data", "replica", "model", "context", "replica_dcn"]

    def test_another_dcn_absorber_makes_replica_dcn_1(self):
        found = sizes(dcn_axes={"data_dcn": -1}, devices=32, granules=4)
        assert found == {"data": 8, "replica": 1, "model": 1, "replica_dcn": 1, "data_dcn": 4}

    def test_naming_data_keeps_it(self):
        assert sizes({"data": 4, "model": -1}, devices=8)["model"] == 2


class TestSlices:
    """A slice is an ICI domain of many hosts. v5p-32 is 16 chips on 4 hosts, v6e-128 is 128 on 32: one slice each."""

    @pytest.mark.parametrize(("chips", "data"), [(16, 16), (128, 128)], ids=["v5p-32", "v6e-128"])
    def test_a_pod_slice_is_one_slice(self, chips, data):
        assert sizes(devices=chips) == {"data": data, "replica": 1, "model": 1, "replica_dcn": 1}

    @pytest.mark.parametrize(("slices", "chips"), [(4, 16), (32, 128)])
    def test_the_often_quoted_table_is_of_separate_4_chip_slices(self, slices, chips):
        found = sizes(devices=chips, granules=slices)
        assert (found["data"], found["replica_dcn"]) == (4, slices)

    @pytest.mark.parametrize(("chips", "hosts"), [(16, 4), (128, 32)])
    def test_two_levels_inside_one_slice(self, chips, hosts):
        assert sizes({"data": 4, "host": -1}, devices=chips) == {
            "data": 4,
            "replica": 1,
            "model": 1,
            "host": hosts,
            "replica_dcn": 1,
        }

    def test_processes_where_there_are_no_slices(self):
        spec = resolve_sizes(MeshConfig(granule="process"), devices=16, granules=2)
        assert spec.shape["replica_dcn"] == 2
        assert spec.granule == "process"
        assert spec.dcn == ("replica_dcn",)


ERRORS = [
    (
        dict(axes={"model": 3}, devices=16),
        "trainer.mesh.axes: data -1 × replica 1 × model 3: the fixed sizes multiply to 3, which does not divide "
        "16 devices in one slice\n  → nearest products that divide 16: 2 or 4",
    ),
    (
        dict(axes={"data": 4, "model": 2}, devices=16),
        "trainer.mesh.axes: data 4 × replica 1 × model 2 = 8, but there are 16 devices in one slice\n"
        "  → set one of them to -1 to absorb the remaining devices",
    ),
    (
        dict(axes={"data": -1, "model": -1}, devices=16),
        "trainer.mesh.axes: only one mesh axis may be -1, got data, model",
    ),
    (
        dict(dcn_axes={"replica_dcn": 4}, devices=16),
        "trainer.mesh.dcn_axes: replica_dcn 4 = 4, but there is 1 slice\n"
        "  → a slice may hold many hosts, and these devices form one; for a mesh axis across its hosts, name one in "
        "axes, e.g. axes: {data: 4, host: -1}",
    ),
    (
        dict(dcn_axes={"replica_dcn": 3}, devices=16, granules=2, granule="process"),
        "trainer.mesh.dcn_axes: replica_dcn 3 = 3, but there are 2 processes\n"
        "  → set one of them to -1 to absorb the remaining devices",
    ),
    (
        dict(dcn_axes={"data": 2}, devices=16, granules=2),
        "trainer.mesh: mesh axis data is in both axes (inside a slice) and dcn_axes (across slices)\n"
        "  → give one of them another name, e.g. dcn_axes: {data_dcn: -1}, and map logical axes to [data_dcn, data]",
    ),
    (dict(devices=10, granules=4), "10 devices do not form 4 slices of equal size"),
]


@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_errors(given, message):
    with pytest.raises(MeshError) as caught:
        sizes(**given)
    assert str(caught.value) == message


def test_both_groups_are_reported_together():
    with pytest.raises(ManyShardingErrors) as caught:
        sizes({"data": 4}, {"replica_dcn": 4}, devices=16)
    assert [e.problem for e in caught.value.errors] == [
        "trainer.mesh.axes: data 4 × replica 1 × model 1 = 4, but there are 16 devices in one slice",
        "trainer.mesh.dcn_axes: replica_dcn 4 = 4, but there is 1 slice",
    ]


@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_sizes_always_multiply_to_the_devices(model, replica, rest, granules):
    devices = model * replica * rest * granules
    spec = resolve_sizes(MeshConfig(axes={"model": model, "replica": replica}), devices=devices, granules=granules)
    assert spec.size == math.prod(spec.shape.values()) == devices
    assert spec.num_granules == granules
    assert spec.shape["data"] == rest
