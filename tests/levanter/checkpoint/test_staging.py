"""Copies for saving: what they hold, where they lie, and what they leave alone."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from levanter.checkpoint.staging import StagingBuffers

pytestmark = pytest.mark.quick


@pytest.fixture(name="staging")
def staging_fixture():
    staging = StagingBuffers()
    yield staging
    staging.close()


def _placed(devices, value, *spec):
    mesh = jax.sharding.Mesh(np.asarray(devices[:8]).reshape(4, 2), ("data", "model"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def _addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32", "bool"])
@pytest.mark.parametrize("spec", [("data", "model"), ("model", None), (None, None)], ids=str)
def test_copies_hold_what_the_arrays_hold(devices, staging, dtype, spec):
    value = np.random.default_rng(0).integers(0, 2, size=(8, 6)).astype(jax.numpy.dtype(dtype))
    array = _placed(devices, value, *spec)
    copy = staging.copy({"a": array})["a"]
    assert copy.sharding == array.sharding and copy.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(copy), value)
    assert not set(_addresses(copy)) & set(_addresses(array))


def test_parts_that_devices_share_are_copied_once(devices, staging):
    copy = staging.copy({"a": _placed(devices, np.arange(1024.0, dtype=np.float32), "model")})["a"]
    assert len(set(_addresses(copy))) == 2


def test_the_same_memory_is_used_again(devices, staging):
    """And for other shapes, other memory."""
    first = _placed(devices, np.zeros((512, 64), np.float32), "data")
    before = _addresses(staging.copy({"a": first})["a"])
    second = _placed(devices, np.ones((512, 64), np.float32), "data")
    copy = staging.copy({"a": second})["a"]
    assert _addresses(copy) == before
    np.testing.assert_array_equal(np.asarray(copy), 1.0)
    np.testing.assert_array_equal(np.asarray(staging.copy({"a": first[:256]})["a"]), 0.0)


def test_a_step_may_take_the_buffers_while_they_are_written(devices, staging):
    """A donated buffer that nobody views is used again, so the step's result lies where its input lay."""
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    array = jax.device_put(np.zeros(1 << 16, np.float32), devices[0])
    array = step(array)
    before = _addresses(array)
    copy = staging.copy({"a": array})["a"]
    after = step(array)
    assert _addresses(after) == before
    np.testing.assert_array_equal(np.asarray(copy), 1.0)
    np.testing.assert_array_equal(np.asarray(after), 2.0)
