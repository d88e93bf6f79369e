"""The result of a forward pass: activations, and named auxiliary sums that layers computed.

`Sums` are float32 scalars by name. The names are static, so sums can be carried through a scan over layers, added up
over microbatches, and returned from a jitted function. The caller of a forward pass requests some names, and the pass
starts with `Sums.zeros(names)`. A layer with auxiliary sums returns them together with its activations as `Outputs`; a
layer without any returns its activations alone. The caller of the layer adds up the requested ones:

    outputs = Outputs.of(self.mlp(x, context))              # an array, or Outputs
    Outputs(x + outputs.activations, requested.plus(outputs.auxiliary))

So a model may have layers of several kinds with different sums, and sums that were not requested are dead code.
"""

from collections.abc import Iterable, Iterator, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.tree_util import DictKey, register_pytree_with_keys_class


@register_pytree_with_keys_class
class Sums(Mapping[str, jax.Array]):
    """Float32 scalars by name, in insertion order: an immutable mapping, and a pytree.

    Args:
        values: name → scalar.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, jax.Array] | None = None):
        self._values = dict(values or {})

    @staticmethod
    def zeros(names: Iterable[str] = ()) -> "Sums":
        """Sums that are zero, with these names."""
        return Sums({name: jnp.float32(0) for name in names})

    def plus(self, other: "Sums") -> "Sums":
        """Adds the sums of `other` that have a name in `self`; the others are dropped."""
        # The names stay those of `self`: a scan's carry must keep its structure whatever a layer returns.
        return Sums({name: value + other[name] if name in other else value for name, value in self._values.items()})

    def __add__(self, other: "Sums") -> "Sums":
        """Adds sums with the same names."""
        assert self._values.keys() == other._values.keys(), (tuple(self), tuple(other))
        return self.plus(other)

    def __mul__(self, factor: jax.Array | float) -> "Sums":
        """Multiplies each sum by a scalar."""
        return Sums({name: value * factor for name, value in self._values.items()})

    def __getitem__(self, name: str) -> jax.Array:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Sums({self._values})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[object, jax.Array], ...], tuple[str, ...]]:
        """For JAX: the values with their keys, and the names as static data."""
        return tuple((DictKey(name), value) for name, value in self._values.items()), tuple(self._values)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[jax.Array]) -> "Sums":
        """For JAX: the inverse of `tree_flatten_with_keys`."""
        # No conversion: JAX also passes placeholders and abstract values here.
        return cls(dict(zip(names, values, strict=True)))


class Outputs(eqx.Module):
    """The result of a model or a sublayer.

    Attributes:
        activations: `[…, embed]`.
        auxiliary: sums over layers. The term of a single layer is a mean over the tokens of the call, so that it does
            not grow with the batch; a loss that is a sum over tokens must multiply it by their number.
    """

    activations: NamedArray
    auxiliary: Sums = eqx.field(default_factory=Sums)

    @staticmethod
    def of(result: "NamedArray | Outputs") -> "Outputs":
        """Wraps the result of a sublayer, which is `Outputs`, or activations alone if it has no auxiliary sums."""
        return result if isinstance(result, Outputs) else Outputs(activations=result)
