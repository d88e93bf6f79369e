"""The embedding tables: of tokens, of positions in models without rotary embeddings, and of values in attention.

A *value embedding* adds a row of a table, by token id and through a gate, to the values of a layer's attention
(karpathy/nanochat; the idea is that of value residuals, Zhou et al., arXiv:2410.17897). The gate reads the leading
features of what attention reads, and has one number for each key/value head. The table multiplies nothing, so it adds
parameters without operations. Its rows have an axis of their own, `table_row`: it is as long as the vocabulary, but
`vocab` and the heads of one table could not both be sharded over the axis of tensor parallelism.
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter.layers.context import ForwardContext
from levanter.layers.linear import Linear, Operand, as_operand
from levanter.layers.param_roles import role

ROW = "table_row"
GATE_SCALE = 3.0
"""The gate of a head is between 0 and this."""


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


@dataclass(frozen=True, kw_only=True)
class ValueEmbeddingSpec:
    """The configuration of a value embedding.

    Attributes:
        rows: of the table: as many as there are token ids.
        gate_channels: leading features that the gate reads.
        scale: initial standard deviation of the table.
    """

    rows: int
    gate_channels: int = 12
    scale: float = 0.02

    @property
    def Row(self) -> Axis:
        """The axis of token ids in the table."""
        return Axis(ROW, self.rows)

    @property
    def Channel(self) -> Axis:
        """The axis of what the gate reads."""
        return Axis("gate_channel", self.gate_channels)

    def init(self, KVHead: Axis, HeadSize: Axis, *, key: jax.Array) -> "ValueEmbedding":
        """A table of normal rows, and a gate of zeros, which adds one and a half rows to each value."""
        return ValueEmbedding(
            table=hax.random.normal(key, (self.Row, KVHead, HeadSize), dtype=jnp.float32) * self.scale,
            gate=Linear(
                weight=hax.zeros((KVHead, self.Channel), dtype=jnp.float32), bias=None, In=(self.Channel.name,)
            ),
        )


class ValueEmbedding(eqx.Module):
    """Adds `3·σ(gate(x[:channels]))·table[id]` to values.

    Attributes:
        table: `[table_row, kv_head, head_size]`.
        gate: from `gate_channel` to `kv_head`.
    """

    table: NamedArray | Operand = eqx.field(metadata=role("embedding"))
    gate: Linear

    def __call__(self, values: NamedArray, x: NamedArray, context: ForwardContext) -> NamedArray:
        """The values with the rows of their tokens.

        Args:
            values: `[…, position, kv_head, head_size]`.
            x: what attention reads, `[…, position, embed]`.
            context: the token ids.
        """
        ids = context.token_ids
        assert ids is not None, "a value embedding reads token ids, and `reads_token_ids` of its config is false"
        Channel = self.gate.operand.axes[-1]
        with jax.named_scope("value_embedding"):
            # Rows and gates are split by heads like the values, so nothing is exchanged where heads are sharded.
            rows = hax.auto_sharded(as_operand(self.table).rows(ids, ROW))
            # Renamed: `embed` has another size in all other weights, and a mapping could not shard these few channels.
            leading = x["embed", 0 : Channel.size].rename({"embed": Channel.name})
            gate = GATE_SCALE * hax.nn.sigmoid(self.gate(leading))
            return values + (gate * rows).rearrange(values.axes)
