"""What a forward pass gives: activations, and named sums that its layers made on the way.

`Sums` are float32 scalars by name. The names are static, so sums can be carried through a scan over layers, added up
over microbatches, and returned from a jitted function. A forward pass is asked for some names and starts with
`Sums.zeros(names)`; a layer that makes sums returns them beside its activations as `Outputs`, a layer that makes none
returns its activations alone, and whoever calls the layer adds up those that were asked for:

    made = Outputs.of(self.mlp(x))                       # an array, or Outputs
    Outputs(x + made.activations, asked.plus(made.auxiliary))

So a model may have layers of several kinds, each with sums of its own, and sums that nobody asked for are dead code.
"""

from collections.abc import Iterable, Iterator, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.tree_util import DictKey, register_pytree_with_keys_class


@register_pytree_with_keys_class
class Sums(Mapping[str, jax.Array]):
    """Float32 scalars by name, in the order in which they were named: a frozen mapping, and a pytree.

    Args:
        values: name → scalar.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, jax.Array] | None = None):
        self._values = dict(values or {})

    @staticmethod
    def zeros(names: Iterable[str] = ()) -> "Sums":
        """Sums of nothing, under some names."""
        return Sums({name: jnp.float32(0) for name in names})

    def plus(self, other: "Sums") -> "Sums":
        """These sums with what of `other` has a name among them; the rest of `other` is dropped."""
        return Sums({name: value + other[name] if name in other else value for name, value in self._values.items()})

    def __add__(self, other: "Sums") -> "Sums":
        """Name by name; both have the same names."""
        assert self._values.keys() == other._values.keys(), (tuple(self), tuple(other))
        return self.plus(other)

    def __mul__(self, factor: jax.Array | float) -> "Sums":
        """Each of them times a scalar."""
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
        """Values by key, and the names, for JAX."""
        return tuple((DictKey(name), value) for name, value in self._values.items()), tuple(self._values)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[jax.Array]) -> "Sums":
        """Sums of these names, for JAX."""
        return cls(dict(zip(names, values, strict=True)))


class Outputs(eqx.Module):
    """What a model, or a part of one, gives for an input.

    Attributes:
        activations: `[…, embed]`.
        auxiliary: sums over layers. What a single layer adds is a mean over the tokens of the call, so that it does
            not grow with the batch; whoever adds it to a loss that is a sum over tokens multiplies it by their number.
    """

    activations: NamedArray
    auxiliary: Sums = eqx.field(default_factory=Sums)

    @staticmethod
    def of(result: "NamedArray | Outputs") -> "Outputs":
        """What a part of a layer returned: `Outputs`, or activations alone where it makes no sums."""
        return result if isinstance(result, Outputs) else Outputs(activations=result)
