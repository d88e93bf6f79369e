"""A module through `jax.shard_map` and back, cut by its axes' names."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from haliax_ext.shard_map_args import ShardMapArgs

pytestmark = pytest.mark.quick

Mlp, Embed, Rank = Axis("mlp", 8), Axis("embed", 4), Axis("rank", 2)


class Pair(eqx.Module):
    """Two arrays with names, one without, one that is not there."""

    up: NamedArray
    down: NamedArray
    scale: jax.Array
    none: NamedArray | None = None


def test_named_axes_are_cut_and_the_module_is_whole_again(devices):
    pair = Pair(
        up=hax.named(jnp.arange(16.0).reshape(8, 2), (Mlp, Rank)),
        down=hax.named(jnp.arange(8.0).reshape(2, 4), (Rank, Embed)),
        scale=jnp.float32(3),
    )
    # `rank` is mapped, but not to be cut.
    parts = ShardMapArgs.of(pair, AxisMapping({"mlp": "model", "embed": "data", "rank": "data"}), ("mlp", "embed"))
    assert parts.specs == (jax.P("model", None), jax.P(None, "data"), jax.P())

    def product(arrays):
        own = parts.join(arrays)
        assert own.none is None
        assert own.up.axes == (Axis("mlp", 2), Rank) and own.down.axes == (Rank, Axis("embed", 2))
        return hax.dot(own.up, own.down, axis="rank").rearrange(("mlp", "embed")).array * own.scale

    mesh = MeshSpec.of(data=2, model=4).build(devices)
    with jax.set_mesh(mesh):
        found = jax.shard_map(product, in_specs=(parts.specs,), out_specs=jax.P("model", "data"))(parts.arrays)
    up, down = np.arange(16.0).reshape(8, 2), np.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(found, 3 * up @ down)
