"""Chooses how many positions a head scores at a time, and says what that takes and why.

Logits exist for one *chunk* of positions at a time (`lm_head.chunks`). Each chunk reads the head once, and while
training reads and writes its gradient once, so few large chunks are fast where memory is far from the compute units. On
CPUs, logits that stay in the cache save more than that, down to a few hundred tokens a chunk, below which most traffic
is the head.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from haliax_ext.errors import gib
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from levanter.models.lm_head.chunks import chunking
from levanter.models.registry import LmConfig

LOGITS_BYTES = 256 << 20
"""How many bytes of logits may exist on a device at a time."""

CPU_LOGITS_BYTES = 32 << 20
"""Bytes of logits that a CPU device computes at a time while training, unless that is less than `CPU_TOKENS`."""

CPU_TOKENS = 512
"""Tokens that a CPU device scores at a time while training, if `LOGITS_BYTES` allow it."""


def default_chunk(*, rows: int, vocab: int, sequence_shards: int = 1) -> int:
    """The default number of positions scored at a time: as many as `LOGITS_BYTES` of logits hold.

    Each chunk reads the whole head, and in the backward pass reads and writes its whole gradient. With few tokens a
    chunk, this traffic takes longer than the products: Llama 3.1 8B on v6e-128 has one sequence a device, and spent 27
    % of its step on chunks of 128 tokens.

    Args:
        rows: sequences on a device.
        vocab: entries of the head on a device.
        sequence_shards: shards of the positions of a sequence.
    """
    # 4 bytes a logit (float32). `rows` and `vocab` are per device;
    # the result counts positions over all shards of a sequence.
    return max(1, LOGITS_BYTES // (4 * rows * vocab)) * sequence_shards


def planned_chunk(config: LmConfig, *, batch: tuple[str, int], vocab: int, mapping: AxisMapping, mesh: MeshSpec) -> int:
    """The chunk that `token_logprobs` chooses by default under a given compute mapping and mesh (not those in scope).

    Args:
        config: the model's.
        batch: the batch axis, name and size.
        vocab: entries of the head.
        mapping: of activations.
        mesh: what it maps to.
    """
    if config.cross_entropy_block_size is not None:
        return config.cross_entropy_block_size

    def ways(name: str) -> int:
        return mesh.ways(mapping.mesh_axes(name))

    # Ceilings: where the mapping does not divide, the largest shard counts.
    rows, entries = -(-batch[1] // ways(batch[0])), -(-vocab // ways("vocab"))
    return default_chunk(rows=rows, vocab=entries, sequence_shards=ways("position"))


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """How a train step applies its head: chunk sizes, bytes and products.

    Attributes:
        chunk: positions at a time, at most.
        chunks: how many chunks there are.
        positions: how many positions each of them holds, over all shards.
        logits_bytes: a chunk's float32 logits on a device.
        all_bytes: those of all positions.
        products: matrix products of the logits' size, forward and backward.
        kept_bytes: bytes on a device of gradients kept until the backward pass: of activations and head.
        in_loop: whether the gradients are computed with the logits; otherwise the logits are recomputed for them.
        why: the reason for this chunk.
    """

    chunk: int
    chunks: int
    positions: int
    logits_bytes: int
    all_bytes: int
    products: int
    kept_bytes: int
    in_loop: bool
    why: str

    def __str__(self) -> str:
        if self.chunks == 1:
            chunks_text = f"all {self.positions:,} positions at once"
        else:
            chunks_text = f"{self.chunks:,} chunks of {self.positions:,} positions"
        text = f"{chunks_text}, {gib(self.logits_bytes)} of float32 logits on a device at a time: {self.why}"
        if not self.in_loop:
            return (
                f"{text}; {self.products} products of the logits' size: this objective's gradient is known only "
                "after all scores, so the logits are recomputed for it"
            )
        spared = f" ({gib(self.all_bytes)} for all positions, which would spare no product)" if self.chunks > 1 else ""
        return (
            f"{text}; {self.products} products of the logits' size, and no logits are kept for the backward "
            f"pass{spared}, only gradients: {gib(self.kept_bytes)}"
        )


def plan_head(
    config: LmConfig,
    *,
    batch: tuple[str, int],
    positions: int,
    vocab: int,
    mapping: AxisMapping,
    mesh: MeshSpec,
    dtype: np.dtype,
    platform: str,
    requested_chunk: int | None = None,
    in_loop: bool = True,
    learned: Collection[str] = ("head", "activations"),
) -> HeadPlan:
    """Chooses the chunk of a train step.

    Args:
        config: the model's; its `cross_entropy_block_size` decides if it is set.
        batch: the batch axis, name and size of a microbatch.
        positions: tokens in a sequence.
        vocab: entries of the head.
        mapping: of activations.
        mesh: what it maps to.
        dtype: of activations.
        platform: `cpu`, `gpu` or `tpu`.
        requested_chunk: the chunk that an objective requires; it takes precedence over all others.
        in_loop: whether the objective's gradient is computed with the logits; see `lm_head.loss`.
        learned: what is differentiated: `head`, `activations`.
    """

    def on_device(name: str, size: int) -> int:
        return -(-size // mesh.ways(mapping.mesh_axes(name)))

    sequence_shards = mesh.ways(mapping.mesh_axes("position"))
    rows, entries, embed = on_device(*batch), on_device("vocab", vocab), on_device("embed", config.Embed.size)
    chunk = requested_chunk or planned_chunk(config, batch=batch, vocab=vocab, mapping=mapping, mesh=mesh)
    is_free = requested_chunk is None and config.cross_entropy_block_size is None
    if is_free and platform == "cpu":
        # The cache bound applies only to a chunk that nobody set,
        # and only shrinks it: `LOGITS_BYTES` stays the ceiling.
        tokens = max(CPU_TOKENS, CPU_LOGITS_BYTES // (4 * entries))
        chunk = min(chunk, max(1, -(-tokens // rows)) * sequence_shards)
    chunks, size = chunking(positions, chunk)
    if requested_chunk is not None:
        reason = f"the objective asks for {requested_chunk:,}"
    elif config.cross_entropy_block_size is not None:
        reason = f"model.cross_entropy_block_size is {chunk:,}"
    elif chunks == 1:
        reason = "they are few enough"
    elif platform == "cpu" and chunk < planned_chunk(config, batch=batch, vocab=vocab, mapping=mapping, mesh=mesh):
        reason = (
            f"on CPUs {gib(CPU_LOGITS_BYTES)} or {CPU_TOKENS} tokens, whichever is more, since logits that stay in the "
            "cache are faster"
        )
    else:
        reason = (
            f"as many as {gib(LOGITS_BYTES)} hold, since each chunk reads the head and reads and writes its "
            f"gradient ({gib(4 * entries * embed)})"
        )
    # Activations' gradients are kept in the compute dtype; the head's sums are float32 (4 bytes) and full-size per
    # device under the compute mapping.
    of_x = rows * -(-positions // sequence_shards) * embed * dtype.itemsize if "activations" in learned else 0
    of_head = 4 * entries * embed if "head" in learned else 0
    return HeadPlan(
        chunk=chunk,
        chunks=chunks,
        positions=size,
        logits_bytes=4 * rows * -(-size // sequence_shards) * entries,
        all_bytes=4 * rows * -(-positions // sequence_shards) * entries,
        # One product for the logits (two if recomputed), and one for each of the two factors that has a gradient.
        products=(1 if in_loop else 2) + len(set(learned)),
        kept_bytes=of_x + of_head,
        in_loop=in_loop,
        why=reason,
    )
