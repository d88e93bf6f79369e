"""Products whose matrix comes first, of layers each by itself: NumPy's numbers."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.cpu_matvec import FEW_ROWS, MatrixFirst
from levanter.layers.linear import Linear
from levanter.layers.unstacked import LayerMatrices, numbered

Embed, Mlp, KVHead, Size = Axis("embed", 40), Axis("mlp", 24), Axis("kv_head", 3), Axis("head_size", 5)
Batch = Axis("batch", 2)


def numbers(*axes: Axis, seed: int = 0) -> hax.NamedArray:
    values = np.random.default_rng(seed).standard_normal([axis.size for axis in axes], np.float32)
    return hax.named(values, axes)


@pytest.mark.parametrize("rows", [1, FEW_ROWS // 2, FEW_ROWS // 2 + 1, 50])
@pytest.mark.parametrize(("Out", "In"), [((Mlp,), (Embed,)), ((KVHead, Size), (Embed,)), ((Embed,), (KVHead, Size))])
def test_products_are_numpys_for_few_rows_and_for_many(rows, Out, In):
    Pos = Axis("position", rows)
    for leading in ((Batch, Pos), (Pos,), (Pos.resize(1),)):
        x, matrix = numbers(*leading, *In), numbers(*Out, *In, seed=1)
        linear = Linear(MatrixFirst(matrix), None, tuple(axis.name for axis in In))
        found = jax.jit(lambda linear, x: linear(x))(linear, x)
        width = int(np.prod([axis.size for axis in In]))
        expected = np.asarray(x.array).reshape(-1, width) @ np.asarray(matrix.array).reshape(-1, width).T
        assert found.axes == (*leading, *Out)
        np.testing.assert_allclose(found.array.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_the_order_of_axes_does_not_matter_and_the_dtype_is_the_asked_one():
    x, matrix = numbers(Embed, Batch).astype(jnp.bfloat16), numbers(Embed, Mlp, seed=1).astype(jnp.bfloat16)
    found = MatrixFirst(matrix).dot(x, ("embed",), dtype=jnp.float32)
    assert found.axes == (Batch, Mlp) and found.dtype == np.float32
    exact = np.asarray(x.array, np.float32).T @ np.asarray(matrix.array, np.float32)
    np.testing.assert_allclose(found.array, exact, rtol=1e-5, atol=1e-4)
    assert MatrixFirst(matrix).dot(x, ("embed",)).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, 50])
def test_sums_of_16_bits_are_of_32(rows):
    """Rounded once; a sum in bfloat16 would lose all but some bits of 4,000 terms."""
    Pos, In = Axis("position", rows), Axis("embed", 4096)
    x, matrix = numbers(Pos, In).astype(jnp.bfloat16), numbers(Mlp, In, seed=1).astype(jnp.bfloat16)
    found = jax.jit(lambda x, matrix: MatrixFirst(matrix).dot(x, ("embed",)))(x, matrix)
    exact = np.asarray(x.array, np.float64) @ np.asarray(matrix.array, np.float64).T
    assert found.axes == (Pos, Mlp) and found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found.array, np.float64), exact, rtol=2**-8, atol=1e-3)


def test_rows_are_looked_up():
    table = numbers(Axis("vocab", 7), Embed)
    ids = hax.named(np.array([3, 0, 3], np.int32), Axis("position", 3))
    found = MatrixFirst(table).rows(ids, "vocab")
    np.testing.assert_array_equal(found.array, np.asarray(table.array)[[3, 0, 3]])


@pytest.mark.parametrize("rows", [1, 5, 50])
def test_a_loop_over_layers_multiplies_by_each_layers_own_matrix(rows):
    Layers, Pos = Axis("layers", 4), Axis("position", rows)
    stacked = [numbers(Embed, Embed.alias("other"), seed=n) * 0.1 for n in range(Layers.size)]
    own = LayerMatrices(tuple(MatrixFirst(each) for each in stacked))
    assert own.axes == (Layers, Embed, Embed.alias("other"))
    x = numbers(Pos, Embed.alias("other"))

    def layer(x: hax.NamedArray, matrix: LayerMatrices) -> hax.NamedArray:
        assert matrix.axes == (Embed, Embed.alias("other"))
        return Linear(matrix, None, ("other",))(x).rename({"embed": "other"}) + x

    found = jax.jit(lambda x, own: hax.fold(layer, Layers)(x, numbered(own)))(x, own)
    expected = np.asarray(x.array)
    for each in stacked:
        expected = expected @ np.asarray(each.array).T + expected
    np.testing.assert_allclose(found.array, expected, rtol=1e-5, atol=1e-5)
