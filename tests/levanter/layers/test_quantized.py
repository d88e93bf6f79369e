"""Weights as int8: NumPy's numbers, the promised bounds, and what is done with numbers that cannot be had."""

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from haliax_ext.meshspec import MeshSpec
from levanter.layers.linear import Linear
from levanter.layers.quantized import Int8Matrix, int8_matrix, quantizable, with_int8

Out, Embed = Axis("mlp", 24), Axis("embed", 40)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
TINY = np.finfo(np.float32).tiny


def by_numpy(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of the rows of a matrix, by the definition."""
    exact = values.astype(np.float32)
    finite = np.isfinite(exact)
    scale = np.where(finite, np.abs(exact), np.inf).max(1) * np.float32(1 / 127)
    scale = np.where(scale < TINY, 0, scale).astype(np.float32)
    q = np.zeros(exact.shape, np.int8)
    for row in np.flatnonzero((scale > 0) & np.isfinite(scale)):
        q[row] = np.rint(exact[row] * (np.float32(1) / scale[row]))
    return q, scale


def hard_rows(dtype) -> np.ndarray:
    """A row for each thing that may be wrong with one."""
    rows = np.random.default_rng(0).normal(size=(Out.size, Embed.size))
    rows[0] = 0
    rows[1, 7] = np.nan
    rows[2, 3], rows[2, 4] = np.inf, np.nan
    rows[3, 0] = -np.inf
    rows[4] *= 1e-42  # not normal, and neither is its scale
    rows[5] = 0.0
    rows[5, 9] = 126 * TINY  # normal itself, its scale is not
    rows[6, 11] = 3e4  # an outlier, beside which all others are 0
    rows[7] = -1.0
    rows[8] = 2.5 / 127 * np.arange(Embed.size) % 1  # ties
    rows[9] = 3e38 if np.dtype(dtype).itemsize > 2 or dtype == ml_dtypes.bfloat16 else 6e4
    with np.errstate(over="ignore"):
        return rows.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [(), ("embed",), ("mlp", "embed")])
def test_numpys_numbers_however_it_is_sharded(dtype, cut, devices):
    values = hard_rows(dtype)
    mesh = MeshSpec.of(data=2, model=4).build(devices)
    spec = {
        (): PartitionSpec(),
        ("embed",): PartitionSpec(None, "model"),
        ("mlp", "embed"): PartitionSpec("data", "model"),
    }
    placed = jax.device_put(jnp.asarray(values), NamedSharding(mesh, spec[cut]))
    found = jax.jit(lambda w: int8_matrix(w, ("embed",)))(hax.named(placed, (Out, Embed)))
    q, scale = by_numpy(values)
    np.testing.assert_array_equal(np.asarray(found.q.array), q)
    np.testing.assert_array_equal(np.asarray(found.scale.array), scale)
    assert found.q.dtype == np.int8 and found.scale.dtype == np.float32
    assert scale[0] == scale[4] == scale[5] == 0 and np.isinf(scale[1:4]).all() and (np.abs(q) <= 127).all()
    assert sorted(set(np.flatnonzero(q[6]))) == [11] and q[6, 11] == 127 and (q[7] == -127).all()


def test_channels_that_are_not_finite_stay_so_and_no_others():
    values = hard_rows(np.float32)
    weight = int8_matrix(hax.named(jnp.asarray(values), (Out, Embed)), ("embed",))
    x = hax.named(jnp.ones(Embed.size), (Embed,))
    y = np.asarray(Linear(weight=weight, bias=None, In=("embed",))(x).array)[:9]  # the last one overflows in float32
    assert np.flatnonzero(~np.isfinite(y)).tolist() == [1, 2, 3]
    assert y[0] == 0


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_errors_are_within_the_bounds(seed, exponent, dtype, spread):
    """|w − ŵ| ≤ scale / 2, and |Δy| ≤ ½ · scale · ‖x‖₁ beside what float32 sums are off by."""
    rng = np.random.default_rng(seed)
    size = 2.0 ** (exponent if dtype != np.float16 else exponent / 4)
    values = rng.normal(size=(Out.size, Embed.size)) * size * np.exp(spread * rng.normal(size=(1, Embed.size)))
    with np.errstate(over="ignore"):
        values = np.clip(values, -6e4, 6e4).astype(dtype) if dtype == np.float16 else values.astype(dtype)
    x = rng.normal(size=Embed.size).astype(np.float32)
    found = int8_matrix(hax.named(jnp.asarray(values), (Out, Embed)), ("embed",))
    exact, q, scale = values.astype(np.float64), np.asarray(found.q.array), np.asarray(found.scale.array, np.float64)
    # Two roundings of a quotient of at most 127.
    slack = 1 + 127 * 2 * np.finfo(np.float32).eps * 2
    assert (np.abs(exact - q * scale[:, None]) <= scale[:, None] / 2 * slack).all()
    y = np.asarray(found.dot(hax.named(jnp.asarray(x), (Embed,)), ("embed",)).array, np.float64)
    rounding = 4 * Embed.size * np.finfo(np.float32).eps * (np.abs(q) * scale[:, None]) @ np.abs(x)
    assert (np.abs(y - exact @ x) <= scale / 2 * np.abs(x).sum() * slack + rounding).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_are_float32_and_the_result_is_of_the_asked_dtype(dtype):
    """127 · 4,096 is beyond float16, and one more than 2,048 is lost in bfloat16 and float16."""
    Wide = Axis("embed", 4096)
    q = jnp.full((Out.size, Wide.size), 127, jnp.int8)
    weight = Int8Matrix(q=hax.named(q, (Out, Wide)), scale=hax.named(jnp.full(Out.size, 2.0**-9), (Out,)))
    x = hax.named(jnp.ones(Wide.size, dtype), (Wide,))
    assert weight.dot(x, ("embed",)).dtype == dtype
    assert np.asarray(weight.dot(x, ("embed",)).array, np.float32).tolist() == [1016.0] * Out.size
    found = weight.dot(x, ("embed",), dtype=jnp.float32)
    assert found.dtype == jnp.float32 and float(found.array[0]) == 127 * 4096 / 512


def test_every_expert_by_itself():
    """Scales are per expert and channel, in products by groups of rows and in those that sum over experts."""
    Expert, Token = Axis("expert", 3), Axis("token", 10)
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3, Out.size, Embed.size)).astype(np.float32) * np.float32([1, 30, 0.01])[:, None, None]
    weight = int8_matrix(hax.named(jnp.asarray(values), (Expert, Out, Embed)), ("embed",))
    q, scale = (np.asarray(a.array, np.float64) for a in (weight.q, weight.scale))
    stood_for = q * scale[..., None]
    x = rng.normal(size=(10, Embed.size)).astype(np.float32)
    sizes = hax.named(jnp.asarray([4, 0, 5], jnp.int32), (Expert,))
    found = weight.ragged_dot(hax.named(jnp.asarray(x), (Token, Embed)), "embed", sizes).array
    expected = np.concatenate([x[:4] @ stood_for[0].T, x[4:9] @ stood_for[2].T])
    np.testing.assert_allclose(np.asarray(found)[:9], expected, rtol=1e-5, atol=1e-5)
    shares = rng.normal(size=(10, 3, Embed.size)).astype(np.float32)
    summed = weight.dot(hax.named(jnp.asarray(shares), (Token, Expert, Embed)), ("expert", "embed"))
    np.testing.assert_allclose(
        np.asarray(summed.rearrange((Token, Out)).array),
        np.einsum("tei,eoi->to", shares, stood_for),
        rtol=1e-4,
        atol=1e-4,
    )


def test_what_is_quantized():
    def linear(*Out: Axis) -> Linear:
        return Linear.init((Embed,), Out, scale=1.0, use_bias=True, key=jax.random.key(0))

    model = {
        "router": linear(Axis("expert", 4)),
        "q_proj": linear(Axis("kv_head", 2), Axis("head_size", 3)),
        "norm": 1.0,
    }
    assert list(quantizable(model)) == ["q_proj"]
    found = with_int8(model, lambda _: True)
    weight = found["q_proj"].weight
    assert isinstance(weight, Int8Matrix) and isinstance(found["router"].weight, hax.NamedArray)
    assert [(a.dtype.name, a.shape) for a in (weight.q.array, weight.scale.array)] == [
        ("int8", (2, 3, 40)),
        ("float32", (2, 3)),
    ]
    assert found["q_proj"].bias is model["q_proj"].bias
    assert [axis.name for axis in found["q_proj"].Out] == ["kv_head", "head_size"]
    # What is quantized already is not quantized again.
    assert quantizable(found) == {}
