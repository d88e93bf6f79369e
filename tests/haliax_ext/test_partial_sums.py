"""Axes opened by their shards: the same numbers, summed in two steps."""

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.mapping import AxisMapping, Mappings, compute_mapping_in_scope, mappings_in_scope, shard_like_parameter
from haliax_ext.meshspec import MeshSpec
from haliax_ext.partial_sums import ShardAxis

pytestmark = pytest.mark.quick

Batch, Pos, Embed = hax.make_axes(batch=12, position=6, embed=4)
MAPPINGS = Mappings(
    params=AxisMapping({"embed": "data", "position": ("data", "context")}),
    compute=AxisMapping({"batch": "data", "position": "context"}),
)
VALUES = np.arange(12 * 6 * 4, dtype=np.float32).reshape(12, 6, 4)


def test_what_the_mesh_cuts_is_opened_and_closed(devices):
    with jax.set_mesh(MeshSpec.of(data=4, context=2).build(devices)), mappings_in_scope(MAPPINGS):
        opened = ShardAxis.of((Batch, Pos, Embed))
        assert opened.shards == (Axis("batch_shards", 4), Axis("position_shards", 2))
        x = opened.open(hax.named(VALUES, (Batch, Pos, Embed)))
        assert {a.name: a.size for a in x.axes} == {
            "batch_shards": 4, "batch": 3, "position_shards": 2, "position": 3, "embed": 4
        }  # fmt: skip
        # A shard of an axis is a run of it, as devices hold it.
        np.testing.assert_array_equal(x["batch_shards", 1, "position_shards", 1].array, VALUES[3:6, 3:6])
        np.testing.assert_array_equal(opened.close(x).array, VALUES)
        with opened.mapped():
            assert compute_mapping_in_scope().mesh_axes("batch_shards") == ("data",)
            assert compute_mapping_in_scope().mesh_axes("batch") == ()
        assert compute_mapping_in_scope() == MAPPINGS.compute


def test_nothing_is_opened_off_a_mesh_or_where_it_does_not_divide(devices):
    with mappings_in_scope(MAPPINGS):
        assert ShardAxis.of((Batch, Pos)).pairs == ()
    with jax.set_mesh(MeshSpec.of(data=8).build(devices)), mappings_in_scope(MAPPINGS):
        assert ShardAxis.of((Batch, Pos)).pairs == ()


def test_like_a_parameter(devices):
    """A mesh axis that two axes want goes to the first."""
    mesh = MeshSpec.of(data=4, context=2).build(devices)
    with jax.set_mesh(mesh), mappings_in_scope(MAPPINGS):
        placed = jax.jit(shard_like_parameter)(hax.named(VALUES, (Batch, Pos, Embed)).rearrange((Embed, Pos, Batch)))
        assert placed.array.sharding.spec == jax.P("data", "context")
    x = hax.named(VALUES, (Batch, Pos, Embed))
    assert shard_like_parameter(x) is x


def test_sums_of_shards_are_the_sum(devices):
    Rows, Keys, Vocab = hax.make_axes(batch=6, position=4, vocab=8)
    values = np.random.default_rng(0).integers(-9, 9, (6, 4, 8)).astype(np.float32)
    compute = AxisMapping({"batch": "data", "position": "context", "vocab": "model"})
    mappings = Mappings(params=AxisMapping({"vocab": ("model", "data")}), compute=compute)

    @jax.jit
    def total(x):
        opened = ShardAxis.of((Rows, Keys))
        with opened.mapped():
            partial = hax.auto_sharded(hax.sum(opened.open(x), ("batch", "position")))
        return shard_like_parameter(hax.sum(partial, opened.shards))

    with jax.set_mesh(MeshSpec.of(data=2, context=2, model=2).build(devices)), mappings_in_scope(mappings):
        found = total(hax.named(values, (Rows, Keys, Vocab)))
    np.testing.assert_array_equal(found.array, values.sum((0, 1)))
    assert found.array.sharding.spec == jax.P(("model", "data"))
