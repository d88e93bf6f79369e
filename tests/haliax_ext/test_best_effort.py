"""best_effort_sharding: the regression cases of upstream's function, and properties against brute force."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mesh_devices import HostDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from haliax_ext.best_effort import LARGE_BYTES, best_effort_sharding, explain_best_effort
from haliax_ext.errors import ReplicationError, ShardingError
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick

POD = MeshSpec.of(replica=1, data=8, model=16).abstract()


def on(shape, dtype=np.float32, **sizes):
    return explain_best_effort(shape, mesh=MeshSpec.of(**sizes).abstract(), dtype=dtype)


class TestRegressions:
    """Upstream looked at `data` alone: on a mesh of `model` only, every tensor was whole on each chip."""

    def test_model_and_data_on_the_other_dimension(self):
        assert best_effort_sharding((16384, 16384), mesh=POD).spec == P("data", "model")

    def test_a_mesh_that_is_all_model(self):
        sharding, reason = on((53248, 16384), replica=1, data=1, model=128)
        assert sharding.spec == P(None, "model")
        assert math.prod(sharding.shard_shape((53248, 16384))) * 4 == 26 << 20
        assert reason == (
            "[53248, 16384]: 3.25 GiB, large; dimension 1 (16384) over model 128; 26.00 MiB on each device"
        )

    def test_a_large_prime_is_refused(self):
        with pytest.raises(ReplicationError) as caught:
            best_effort_sharding((268_435_399,), mesh=POD)
        assert str(caught.value) == (
            "best_effort_sharding: float32[268435399] of 1024.00 MiB has no dimension that data 8 or model 16 divides "
            "on mesh replica 1 × data 8 × model 16; each device would hold 1024.00 MiB of it, repeated\n"
            "  → pad dimension 0 from 268435399 to 268435456, give its axes names and a mapping, "
            "or accept the copies with large_bytes=1073741597 (now 33554432)"
        )

    def test_and_the_suggestions_work(self):
        assert best_effort_sharding((268_435_456,), mesh=POD).spec == P(("model", "data"))
        assert best_effort_sharding((268_435_399,), mesh=POD, large_bytes=1_073_741_597).spec == P()


class TestPreferences:
    def test_several_mesh_axes_on_one_dimension(self):
        assert on((50257, 768), data=8, model=16)[0].spec == P(None, ("model", "data"))

    def test_large_arrays_prefer_model_small_ones_data(self):
        """Only one of the two can be used."""
        assert on((1 << 24, 4), data=4, model=4)[0].spec == P("data", "model")
        assert on((4, (1 << 22) + 1), data=4, model=4)[0].spec == P("model")
        assert on((4, 7), data=4, model=4)[0].spec == P("data")

    def test_more_pieces_beat_preference(self):
        assert on((16, (1 << 20) + 1), data=16, model=2)[0].spec == P("data")

    def test_all_mesh_axes_are_considered_for_large_arrays(self):
        sizes = {"data": 2, "context": 2, "model": 2, "group": 2, "replica_dcn": 2}
        sharding, _ = on((4096, 4096), np.float32, **sizes)
        assert math.prod(sharding.shard_shape((4096, 4096))) == 4096 * 4096 // 32
        assert on((64, 64), **sizes)[0].shard_shape((64, 64)) == (32, 16)

    def test_small_arrays_may_stay_whole(self):
        sharding, reason = on((7,), data=4, model=2)
        assert sharding.spec == P()
        assert reason == "[7]: 28 B, small; unsharded; 28 B on each device, replicated over data and model"

    def test_the_dtype_decides_what_is_large(self):
        """32 MiB in float32, 16 in bfloat16; a prime number of elements either way."""
        count = 8_388_617
        with pytest.raises(ReplicationError):
            on((count,), data=8)
        assert on((count,), jnp.bfloat16, data=8)[0].spec == P()

    @pytest.mark.parametrize("shape", [(), (0, 8), (0,)])
    def test_nothing_to_cut(self, shape):
        assert on(shape, data=2, model=2)[0].spec == P()


class TestWhere:
    def test_bare_devices_are_factored(self, devices):
        sharding = best_effort_sharding((6, 20, 10), devices=devices)
        assert sharding.shard_shape((6, 20, 10)) in {(3, 10, 5), (3, 5, 10), (6, 5, 5)}
        placed = jax.device_put(np.zeros((6, 20, 10), np.float32), sharding)
        assert len({s.device for s in placed.addressable_shards}) == 8
        assert math.prod(placed.addressable_shards[0].data.shape) == 6 * 20 * 10 // 8

    def test_two_thousand_devices(self):
        sharding = best_effort_sharding((16384, 53248), devices=[HostDevice(id=n) for n in range(2048)])
        assert sharding.num_devices == 2048
        assert math.prod(sharding.shard_shape((16384, 53248))) == 16384 * 53248 // 2048

    @pytest.mark.filterwarnings("ignore:`with mesh.`:DeprecationWarning")
    @pytest.mark.parametrize("legacy", [False, True])
    def test_the_mesh_in_scope(self, devices, legacy):
        mesh = MeshSpec.of(data=2, model=4).build(devices)
        with mesh if legacy else jax.set_mesh(mesh):
            sharding = best_effort_sharding((4096, 4096))
        assert sharding.mesh == mesh
        assert sharding.spec == P("data", "model")

    def test_no_mesh_at_all(self):
        with pytest.raises(ShardingError) as caught:
            best_effort_sharding((8, 8))
        assert str(caught.value) == (
            "best_effort_sharding: there is no mesh in scope\n"
            "  → pass mesh=…, or devices=…, or call it under `with jax.set_mesh(mesh): …`"
        )

    def test_mesh_and_devices(self, devices):
        mesh = MeshSpec.of(data=8).build(devices)
        assert best_effort_sharding((8, 8), mesh=mesh, devices=devices).mesh == mesh
        with pytest.raises(ShardingError) as caught:
            best_effort_sharding((8, 8), mesh=mesh, devices=devices[:4])
        assert str(caught.value) == (
            "best_effort_sharding: mesh data 8 is not made of the 4 devices given\n  → pass mesh=… alone"
        )


@st.composite
def cases(draw):
    names = draw(st.lists(st.sampled_from(["data", "model", "replica", "group"]), min_size=1, max_size=3, unique=True))
    sizes = {name: draw(st.sampled_from([1, 2, 3, 4, 8])) for name in names}
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 6, 8, 12, 24, 97, 256]), max_size=3)))
    return sizes, shape, draw(st.sampled_from([1, 64, 4096, LARGE_BYTES]))


def most_pieces(sizes, shape):
    """By brute force: over every assignment of mesh axes to dimensions."""
    best = 1
    for assignment in itertools.product([None, *range(len(shape))], repeat=len(sizes)):
        left, pieces = list(shape), 1
        for size, at in zip(sizes.values(), assignment, strict=True):
            if at is None:
                continue
            if left[at] % size:
                break
            left[at] //= size
            pieces *= size
        else:
            best = max(best, pieces)
    return best


@settings(max_examples=200, deadline=None)
@given(cases())
def test_always_divides_is_never_worse_than_brute_force_and_never_silently_whole(case):
    sizes, shape, large_bytes = case
    mesh = MeshSpec.of(**sizes).abstract()
    nbytes = math.prod(shape) * 4
    fewest_bytes = nbytes // most_pieces(sizes, shape)
    whole_somewhere = most_pieces(sizes, shape) < math.prod(sizes.values())
    if shape and nbytes >= large_bytes and fewest_bytes >= large_bytes and whole_somewhere:
        with pytest.raises(ReplicationError):
            best_effort_sharding(shape, mesh=mesh, large_bytes=large_bytes)
        return
    sharding = best_effort_sharding(shape, mesh=mesh, large_bytes=large_bytes)
    share = math.prod(sharding.shard_shape(shape)) * 4  # raises where a dimension does not divide
    if nbytes >= large_bytes:
        assert share == fewest_bytes
