"""The embedding tables: of tokens, and of positions in models without rotary embeddings."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.linear import Linear, Operand, as_operand
from levanter.layers.param_roles import role


class Embedding(eqx.Module):
    """A row per token.

    Attributes:
        weight: `[vocab, embed]`, or another representation of such a matrix.
    """

    weight: NamedArray | Operand = eqx.field(metadata=role("embedding"))

    @staticmethod
    def init(Vocab: Axis, Embed: Axis, *, scale: float, key: jax.Array) -> "Embedding":
        """Normal rows of standard deviation `scale`."""
        return Embedding(weight=hax.random.normal(key, (Vocab, Embed), dtype=jnp.float32) * scale)

    def __call__(self, ids: NamedArray) -> NamedArray:
        """The rows of `ids`: `[*ids.axes, embed]`. Constraint point: the result.

        With `vocab` sharded, XLA's partitioner turns the gather into a local masked gather and an all-reduce of the
        rows (a test reads the compiled program): the table itself is never moved.
        """
        return hax.auto_sharded(as_operand(self.weight).rows(ids, "vocab"))

    def as_linear(self) -> Linear:
        """The same table as a projection from `embed` to `vocab`, for a model with tied weights."""
        return Linear(weight=self.weight, bias=None, In=("embed",))


class PositionEmbedding(eqx.Module):
    """A row per position.

    Attributes:
        weight: `[position, embed]`.
    """

    weight: NamedArray = eqx.field(metadata=role("embedding"))

    @staticmethod
    def init(Pos: Axis, Embed: Axis, *, scale: float, key: jax.Array) -> "PositionEmbedding":
        """Normal rows of standard deviation `scale`."""
        return PositionEmbedding(weight=hax.random.normal(key, (Pos, Embed), dtype=jnp.float32) * scale)

    def __call__(self, positions: NamedArray, *, in_branches: bool = False) -> NamedArray:
        """The rows of `positions`: `[*positions.axes, embed]`.

        Args:
            positions: of tokens, `[…, position]`.
            in_branches: whether a sequence holds several texts that branch from trunks. It may then be longer than the
                table; the caller that placed the branches has checked that no text is.

        Raises:
            ValueError: a sequence is longer than the table.
        """
        # Renamed, because the ids have an axis `position` too, of another size.
        table = self.weight.rename({"position": "row"})
        Row, Pos = table.resolve_axis("row"), positions.resolve_axis("position")
        if Pos.size > Row.size and not in_branches:
            raise ValueError(
                f"sequences of {Pos.size} tokens: this model has learned {Row.size} positions (model.max_seq_len) and "
                "no others"
            )
        return hax.auto_sharded(table.take(Row, positions))


def positions_in_segments(segment_ids: NamedArray) -> NamedArray:
    """The number of tokens before each token in its segment, `[…, position]`, int32; segments are contiguous."""
    ids = segment_ids.rearrange((..., "position"))
    index = jnp.broadcast_to(jnp.arange(ids.array.shape[-1], dtype=jnp.int32), ids.array.shape)
    # True at the first token of each segment; the first position always begins one.
    begins = jnp.concatenate(
        [jnp.ones_like(ids.array[..., :1], dtype=bool), ids.array[..., 1:] != ids.array[..., :-1]], axis=-1
    )
    # The running maximum of the segments' first indices is the first index of the segment that a token is in.
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=index.ndim - 1)
    return hax.named(index - start, ids.axes)
