"""The token embedding table."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class Embedding(eqx.Module):
    """A row per token.

    Attributes:
        weight: `[vocab, embed]`.
    """

    weight: NamedArray

    @staticmethod
    def init(Vocab: Axis, Embed: Axis, *, scale: float, key: jax.Array) -> "Embedding":
        """Normal rows of standard deviation `scale`."""
        return Embedding(weight=hax.random.normal(key, (Vocab, Embed), dtype=jnp.float32) * scale)

    def __call__(self, ids: NamedArray) -> NamedArray:
        """The rows of `ids`: `[*ids.axes, embed]`. Constraint point: the result.

        With `vocab` sharded, XLA's partitioner turns the gather into a local, masked one and an all-reduce of the rows
        it found (a test reads the compiled program): the table itself never moves.
        """
        Vocab = self.weight.resolve_axis("vocab")
        return hax.auto_sharded(self.weight.take(Vocab, ids))
