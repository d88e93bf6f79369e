"""Value embeddings: a layer adds a row of a table, by token id and through a gate, to the values of its attention.

The gate reads the leading features of what attention reads, and has one number for each key/value head
(karpathy/nanochat; the idea is that of value residuals, Zhou et al., arXiv:2410.17897). The table multiplies nothing,
so it adds parameters without operations. Its rows have an axis of their own, `table_row`: it is as long as the
vocabulary, but `vocab` and the heads of one table could not both be sharded over the axis of tensor parallelism.
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
            rows = hax.auto_sharded(as_operand(self.table).rows(ids, ROW))
            leading = x["embed", 0 : Channel.size].rename({"embed": Channel.name})
            gate = GATE_SCALE * hax.nn.sigmoid(self.gate(leading))
            return values + (gate * rows).rearrange(values.axes)
