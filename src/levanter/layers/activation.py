"""Activation functions by the names that model configs use.

Each computes in float32 and rounds once, as torch's kernels do for 16-bit inputs.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

Activation = Callable[[NamedArray], NamedArray]


def _elementwise(fn: Callable[[jax.Array], jax.Array]) -> Activation:
    def activation(x: NamedArray) -> NamedArray:
        return hax.NamedArray(fn(x.array.astype(jnp.float32)).astype(x.dtype), x.axes)

    return functools.update_wrapper(activation, fn)


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


def _gelu_10(x: jax.Array) -> jax.Array:
    # Hugging Face's `ClippedGELUActivation(-10, 10)`.
    return jnp.clip(jax.nn.gelu(x, approximate=False), -10, 10)


def _relu_squared(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


@jax.custom_jvp
def _silu_with_division(x: jax.Array) -> jax.Array:
    """`x · sigmoid(x)`, with a derivative that ends in a division.

    Two products read the gradient of a gate: that for the weights and that for the input. XLA for CPUs recomputes cheap
    operations for each reader, in the reader's order: for the product of the weights that is column by column, and
    reading four arrays across their rows took a fifth of a small model's whole step. A division is expensive enough
    that XLA computes it once.
    """
    return x / (1 + jnp.exp(-x))


@_silu_with_division.defjvp
def _silu_slope(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    # With d = 1 + e⁻ˣ, sigmoid(x) = 1/d and the slope is 1/d · (1 + x · (1 − 1/d)).
    below = 1 + jnp.exp(-x)
    return x / below, tangent / below * (1 + x * (1 - 1 / below))


_silu = _elementwise(_silu_with_division)
_gelu = _elementwise(functools.partial(jax.nn.gelu, approximate=False))
_gelu_tanh = _elementwise(functools.partial(jax.nn.gelu, approximate=True))

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": _silu,
        "swish": _silu,
        "gelu": _gelu,
        "gelu_python": _gelu,
        "gelu_10": _elementwise(_gelu_10),
        # One function under the names of several implementations in Hugging Face.
        "gelu_new": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_accurate": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "gelu_python_tanh": _gelu_tanh,
        "quick_gelu": _elementwise(_quick_gelu),
        "relu": _elementwise(jax.nn.relu),
        "relu2": _elementwise(_relu_squared),
        "tanh": _elementwise(jnp.tanh),
    }
)
"""Hugging Face's (and upstream's) names → functions."""
