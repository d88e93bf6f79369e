"""The norm of a tree, against NumPy; that what is summed in two ways is not written out."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter.optim.transforms import global_norm, global_norm_by_layer

RNG = np.random.default_rng(0)
LAYERS, EMBED, MLP = hax.make_axes(layers=3, embed=512, mlp=256)


def random(*axes: hax.Axis, dtype: str = "float32") -> hax.NamedArray:
    return hax.named(jnp.asarray(RNG.standard_normal([axis.size for axis in axes]), dtype), axes)


@pytest.mark.parametrize("norm", [global_norm, global_norm_by_layer])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_numpy(norm, dtype):
    tree = {
        "stacked": random(EMBED, LAYERS, MLP, dtype=dtype),
        "vectors": random(LAYERS, EMBED, dtype=dtype),
        "flat": random(EMBED, dtype=dtype),
        "bare": jnp.asarray(RNG.standard_normal((3, 4)), dtype),
        "scalar": jnp.asarray(2.0, dtype),
    }
    found = norm(tree)
    exact = np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))
    assert found.dtype == jnp.float32 and found.shape == ()
    np.testing.assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_shows(wrong):
    tree = {"a": hax.named(jnp.ones((3, 4)).at[1, 2].set(wrong), (LAYERS, EMBED.resize(4)))}
    found = global_norm_by_layer(tree)
    assert np.isnan(found) if np.isnan(wrong) else np.isinf(found)


def test_squares_of_layers_are_not_written_out():
    """Norms of all and of each layer, compiled here, as a step has both."""

    def both(x: hax.NamedArray) -> tuple[jax.Array, jax.Array]:
        return global_norm_by_layer(x), jnp.sqrt(jnp.sum(jnp.square(x.array), axis=(1, 2)))

    given = hax.NamedArray(jax.ShapeDtypeStruct((3, 512, 256), jnp.float32), (LAYERS, EMBED, MLP))  # pyright: ignore
    entry = jax.jit(both).lower(given).compile().as_text().split("\nENTRY ")[1]
    whole = [line for line in entry.splitlines() if "= f32[3,512,256]" in line and "parameter(" not in line]
    assert not whole, "\n".join(whole)
