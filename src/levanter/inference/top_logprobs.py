"""The likeliest tokens of each row and their ids, where the vocabulary may be sharded.

Each shard of the vocabulary finds its own; only those are gathered and compared. This is written per device, because
the partitioner gathers the whole operand of a top-k over batch and vocabulary alike. Of equal logits the lowest ids
come first, on every mesh.
"""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from haliax_ext.mapping import compute_mapping_in_scope
from levanter.models.suffix_scores import BLOCK


def likeliest(logits: NamedArray, Top: Axis) -> tuple[NamedArray, NamedArray]:
    """The largest logits, descending, and their ids: float32 and int32, `[batch, Top]`.

    Args:
        logits: `[batch, vocab]`.
        Top: how many; at most the size of `vocab`.
    """
    Vocab = logits.resolve_axis("vocab")
    (Batch,) = (axis for axis in logits.axes if axis != Vocab)
    array = logits.rearrange((Batch, Vocab)).array
    if jax.sharding.get_abstract_mesh().empty:
        values, ids = _largest(array, Top.size)
    else:
        values, ids = _sharded(array, Top.size)
    return hax.named(values, (Batch, Top)), hax.named(ids, (Batch, Top))


def _sharded(array: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    mapping = compute_mapping_in_scope()
    spec = mapping.spec(("batch", "vocab"))
    over = mapping.mesh_axes("vocab")

    def of_shard(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = _largest(part, min(k, part.shape[-1]))
        if not over:
            return values, ids
        ids = ids + jax.lax.axis_index(over).astype(jnp.int32) * np.int32(part.shape[-1])
        values, ids = (jax.lax.all_gather(each, over, axis=1, tiled=True) for each in (values, ids))
        best, places = jax.lax.top_k(values, k)
        return best, jnp.take_along_axis(ids, places, axis=1)

    out = PartitionSpec(spec[0], None)
    # What is the same on every device of `over` after the gather, the checker cannot see.
    return jax.shard_map(of_shard, in_specs=spec, out_specs=(out, out), check_vma=False)(array)


def _largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis and their indices; of equal ones the first.

    They lie in the k blocks with the largest maxima (see `suffix_scores.largest`). The blocks are taken in the order of
    their indices, so that equal values keep that order.
    """
    count = -(-x.shape[-1] // BLOCK)
    if count < 2 * k:
        return jax.lax.top_k(x, k)
    padded = jnp.pad(x, [(0, 0), (0, count * BLOCK - x.shape[-1])], constant_values=-np.inf)
    blocks = padded.reshape(x.shape[0], count, BLOCK)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=1).reshape(x.shape[0], k * BLOCK)
    values, places = jax.lax.top_k(candidates, k)
    block = jnp.take_along_axis(chosen, places // BLOCK, axis=1)
    return values, (block * BLOCK + places % BLOCK).astype(jnp.int32)
