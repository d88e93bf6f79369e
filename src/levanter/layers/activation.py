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


_silu = _elementwise(jax.nn.silu)
_gelu_tanh = _elementwise(functools.partial(jax.nn.gelu, approximate=True))

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": _silu,
        "swish": _silu,
        "gelu": _elementwise(functools.partial(jax.nn.gelu, approximate=False)),
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "quick_gelu": _elementwise(_quick_gelu),
        "relu": _elementwise(jax.nn.relu),
        "tanh": _elementwise(jnp.tanh),
    }
)
"""Hugging Face's (and upstream's) names → functions."""
