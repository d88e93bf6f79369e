"""Zigzag order: which runs a device has, the way back, true positions, and that it is made without gathers."""

from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.long_context import MASKS, config, mappings_of, mesh_of, program, run
from helpers.two_kinds import ConvolutionSpec

from haliax_ext.errors import IndivisibleError, ShardingError
from haliax_ext.mapping import mappings_in_scope
from levanter.layers.attention import AttentionMask
from levanter.layers.attention.zigzag import natural, positions, zigzag
from levanter.models.zigzag import zigzag_shards


@pytest.mark.parametrize(("parts", "place"), [(1, 0), (3, 1), (8, 2)])
def test_a_device_has_an_early_and_a_late_run(parts, place):
    size = 2 * parts * 5
    axes = [Axis("a", 3), Axis("b", 2)]
    axes.insert(place, Axis("position", size))
    index = np.moveaxis(np.broadcast_to(np.arange(size), (3, 2, size)), -1, place)
    found = zigzag(hax.named(jnp.asarray(index), axes), parts)
    wanted = [p for i in range(parts) for r in (i, 2 * parts - 1 - i) for p in range(5 * r, 5 * r + 5)]
    if parts == 1:
        wanted = list(range(size))
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(found.array), place, -1), np.broadcast_to(wanted, (3, 2, size))
    )
    np.testing.assert_array_equal(natural(found, parts).array, index)
    np.testing.assert_array_equal(positions(Axis("position", size), parts).array, wanted)


def test_every_device_has_the_same_work():
    n, size = 8, 128
    of_parts = np.asarray(positions(Axis("position", size), n).array).reshape(n, -1)
    work = (of_parts + 1).sum(axis=1)
    assert len(set(work)) == 1
    in_order = (np.arange(size) + 1).reshape(n, -1).sum(axis=1)
    assert in_order.max() / in_order.mean() > 1.86


def test_a_length_that_does_not_divide():
    with pytest.raises(IndivisibleError, match="position 20 is not 16 runs of equal length\n  → make it 16 or 32"):
        zigzag(hax.arange(Axis("position", 20)), 8)


def test_a_mask_in_zigzag_order_is_the_mask_permuted():
    Pos, KeyPos = Axis("position", 12), Axis("key_position", 12)
    ids = hax.named(np.sort(np.arange(12) % 3), Pos)
    rule = AttentionMask.causal(sliding_window=5)
    whole = (rule.with_segment_ids(ids)).materialize(Pos, KeyPos)
    laid = rule.with_segment_ids(zigzag(ids, 3)).in_zigzag(3).materialize(Pos, KeyPos)
    assert whole is not None and laid is not None
    wanted = zigzag(zigzag(whole, 3), 3, "key_position")
    np.testing.assert_array_equal(laid.array, wanted.rearrange(laid.axes).array)
    with pytest.raises(ValueError, match="zigzag order is a rule by index"):
        AttentionMask.of_array(whole).in_zigzag(3)


def test_layers_that_need_positions_in_order_refuse_another():
    """A convolution over positions would be of positions that are not neighbours."""
    mixer = ConvolutionSpec(Embed=Axis("embed", 4), Channel=Axis("channel", 4), Tap=Axis("tap", 2), init_std=0.1)
    attending = SimpleNamespace(config=config())
    layer = SimpleNamespace(mixer=mixer, residual=attending.config.layers[0].residual)
    convolved = SimpleNamespace(config=SimpleNamespace(layers=[layer]))
    with jax.sharding.use_abstract_mesh(mesh_of(1, 4, 1, "gather").abstract()):
        with mappings_in_scope(mappings_of("gather", "natural")):
            assert zigzag_shards(convolved) == zigzag_shards(attending) == 1
        with mappings_in_scope(mappings_of("gather", "zigzag")):
            assert zigzag_shards(attending) == 4
            with pytest.raises(ShardingError, match="layers by ConvolutionSpec"):
                zigzag_shards(convolved)


def test_order_changes_nothing(devices):
    model = config(**MASKS["packed"], attn_backend="reference")
    got = [
        run(model, "packed", mesh_of(1, 4, 1, "ring"), mappings_of("ring", order), devices)
        for order in ("natural", "zigzag")
    ]
    assert abs(got[0][0] - got[1][0]) <= 1e-6 * abs(got[0][0])
    np.testing.assert_allclose(got[0][1], got[1][1], atol=1e-5, rtol=0)


def test_the_order_is_made_without_gathers(devices):
    """What is laid out is integers, by slices: compiled, no loop and no gather has an array of theirs as its result."""
    model = config(num_layers=1)
    one = program(model, "causal", mappings_of("gather", "zigzag"))
    text = one.lower(mesh_of(1, 4, 1, "gather").build(devices[:4])).as_text()
    head = [
        line for line in text.splitlines() if "stablehlo.gather" in line and "tensor<2x64xi32>" in line.split("->")[-1]
    ]
    assert "stablehlo.reverse" in text
    assert head == []
    floats = [line for line in text.splitlines() if "stablehlo.reverse" in line and "xf32>" in line]
    # Log-probabilities on their way back, and nothing of the size of an activation.
    assert all("x32x" not in line.split("->")[-1] for line in floats)
