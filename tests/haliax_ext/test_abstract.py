"""A module as named leaves, without memory."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_ext.abstract import abstract, cast, leaves, map_arrays, with_arrays

Embed, Mlp = hax.make_axes(embed=6, mlp=8)


class Block(eqx.Module):
    up: hax.nn.Linear
    scales: list[hax.NamedArray]
    table: dict[str, jax.Array]
    steps: jax.Array
    label: str = eqx.field(static=True)

    @staticmethod
    def init(*, key):
        return Block(
            hax.nn.Linear.init(Embed, Mlp, key=key),
            [hax.ones(Embed), hax.named(0.5, ())],
            {"raw": jnp.zeros((3, 4), jnp.bfloat16)},
            jnp.int32(0),
            "block",
        )


EXPECTED = [
    ("up.weight", (("mlp", 8), ("embed", 6)), "float32"),
    ("up.bias", (("mlp", 8),), "float32"),
    ("scales.0", (("embed", 6),), "float32"),
    ("scales.1", (), "float32"),
    ("table.raw", (("_0", 3), ("_1", 4)), "bfloat16"),
    ("steps", (), "int32"),
]


@pytest.mark.parametrize("make", [abstract, lambda init, **kw: init(**kw)], ids=["abstract", "concrete"])
def test_paths_axes_and_dtypes(make):
    found = leaves(make(Block.init, key=jax.random.PRNGKey(0)))
    assert sorted((x.path, x.axes, x.dtype.name) for x in found) == sorted(EXPECTED)


def test_abstract_allocates_nothing_however_large():
    module = abstract(hax.nn.Linear.init, hax.Axis("embed", 1 << 20), hax.Axis("mlp", 1 << 20), key=jax.random.key(0))
    weight = leaves(module)[0]
    assert weight.nbytes == 4 << 40
    assert isinstance(module.weight.array, jax.ShapeDtypeStruct)


def test_bytes_are_those_of_the_arrays():
    module = Block.init(key=jax.random.PRNGKey(0))
    by_path = {leaf.path: leaf for leaf in leaves(module)}
    assert by_path["up.weight"].nbytes == module.up.weight.array.nbytes
    assert by_path["table.raw"].nbytes == module.table["raw"].nbytes
    assert by_path["up.weight"].axis_size("mlp") == 8
    assert str(by_path["up.weight"]) == "up.weight float32[mlp 8, embed 6]"


def test_with_arrays_puts_each_array_at_its_path():
    template = abstract(Block.init, key=jax.random.PRNGKey(0))
    arrays = {leaf.path: np.full(leaf.shape, n, np.float32) for n, leaf in enumerate(leaves(template))}
    filled = with_arrays(template, arrays)
    assert filled.up.weight.axes == (Mlp, Embed)
    assert filled.label == "block"
    for n, leaf in enumerate(leaves(filled)):
        assert float(arrays[leaf.path].flat[0]) == n
    np.testing.assert_array_equal(filled.up.weight.array, arrays["up.weight"])


def test_with_arrays_wants_all_of_them():
    with pytest.raises(KeyError, match=r"up\.weight"):
        with_arrays(abstract(Block.init, key=jax.random.PRNGKey(0)), {})


def test_cast_changes_floating_leaves_only():
    found = leaves(cast(abstract(Block.init, key=jax.random.PRNGKey(0)), jnp.bfloat16))
    assert {leaf.path: leaf.dtype.name for leaf in found} == {
        path: "int32" if path == "steps" else "bfloat16" for path, _, _ in EXPECTED
    }


def test_map_arrays_keeps_names():
    doubled = map_arrays(lambda leaf, x: x + x, Block.init(key=jax.random.PRNGKey(0)))
    assert doubled.scales[0].axes == (Embed,)
    np.testing.assert_array_equal(np.asarray(doubled.scales[0].array), np.full(6, 2.0, np.float32))
