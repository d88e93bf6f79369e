"""Scores of a suffix: each token's log-probability, its rank, and the log-mass of the likeliest tokens.

A memorization window is a given prefix and a suffix of k tokens to score. One forward pass over the
window gives the activations; the output head is applied at the k positions that predict the suffix and nowhere else,
some positions at a time, so logits of `[batch, position, vocab]` never exist.

Under `vocab → model` each device holds its part of the vocabulary. Log-sum-exp, the target's logit and its rank are
sums over the vocabulary: each device's part, then a small all-reduce. The most likely tokens are found in two steps:
each device's own, then the best of those; no device ever holds the others' logits.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from haliax_ext.mapping import compute_mapping_in_scope, ways_in_scope
from levanter.layers.attention import AttentionMask
from levanter.layers.linear import Linear
from levanter.models.base import LmHeadModel
from levanter.models.lm_head.chunks import chunking, gathered_once, head_logits
from levanter.models.lm_head.plan import default_chunk

DEFAULT_CHUNK = 10
"""Suffix positions scored at a time; their logits take `batch × 10 × vocab × 4` bytes over all devices. Few enough for
a CPU's cache to help (5 % of SmolLM2's time), and enough for rereading the head to cost an accelerator little."""

Law = tuple[int | None, float]
"""A sampling law: how many of the likeliest tokens may be sampled (None for all), and the temperature."""
TOP_40: Law = (40, 1.0)


class SuffixScores(eqx.Module):
    """The scores of each suffix token, over `[batch, suffix]`.

    Attributes:
        logprobs: float32, the token's log-probability under the full vocabulary at temperature 1.
        ranks: int32, how many vocabulary entries are more likely (of equal ones, those with a lower id).
        normalizers: float32 for each law (K, T): the log of Σ exp(log p / T) over the K most likely entries, so that
            the token's log-probability under the law is log p / T minus this, where its rank is below K.
    """

    logprobs: NamedArray
    ranks: NamedArray
    normalizers: tuple[NamedArray, ...]


def suffix_scores(
    model: LmHeadModel,
    tokens: NamedArray,
    targets: NamedArray,
    *,
    laws: tuple[Law, ...] = (TOP_40,),
    segment_ids: NamedArray | None = None,
    positions: NamedArray | None = None,
    chunk: int | None = None,
) -> SuffixScores:
    """Scores the last tokens of each sequence.

    Matrix products are in the dtype of the weights; the head's result and everything after it is float32.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[batch, position]`.
        targets: the ids that are scored, `[batch, suffix]`: the last ones of `tokens`, with at least one before them.
        laws: the laws whose normalizers are wanted.
        segment_ids: `[batch, position]`; tokens see only their own segment.
        positions: the position of each token, where it is not its index.
        chunk: suffix positions scored at a time.
    """
    Pos, Suffix = tokens.resolve_axis("position"), targets.resolve_axis("suffix")
    assert Suffix.size < Pos.size, f"{Suffix.size} of {Pos.size} tokens leave no prefix before the suffix"
    activations = model(tokens, segment_ids=segment_ids, positions=positions).activations
    first = Pos.size - Suffix.size
    # The activation at position i predicts token i + 1: the
    # suffix at [first, end) is predicted by [first − 1, end − 1).
    predicting = activations[Pos.name, first - 1 : Pos.size - 1].rename({Pos.name: Suffix.name})
    return score_targets(
        predicting,
        model.head,
        targets,
        laws=laws,
        chunk=chunk,
        vocab_size=model.config.vocab_size,
        soft_cap=model.config.logit_soft_cap,
    )


def scores_at_positions(
    model: LmHeadModel,
    tokens: NamedArray,
    predicting: NamedArray,
    targets: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    positions: NamedArray | None = None,
    trunks: NamedArray | None = None,
    chunk: int | None = None,
) -> SuffixScores:
    """Scores tokens that are predicted at given positions of a sequence; one position may predict several.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[batch, position]`.
        predicting: the position that predicts each target, `[batch, suffix]`: that of the token before it.
        targets: the ids that are scored, `[batch, suffix]`.
        segment_ids, positions: as in `suffix_scores`.
        trunks: a further segment that tokens see, see `AttentionMask.with_trunks`; both others are needed then.
        chunk: targets scored at a time; by default as many as `lm_head.plan.default_chunk` says.
    """
    Suffix = targets.resolve_axis("suffix")
    (Batch,) = (axis for axis in targets.axes if axis != Suffix)
    mask = None
    if trunks is not None:
        assert segment_ids is not None and positions is not None, "trunks are segments that end at positions"
        # Sliding windows must be measured from `positions`: in the row, a segment does not follow its trunk directly.
        keys = positions.rename({"position": "key_position"})
        mask = AttentionMask.causal().with_segment_ids(segment_ids).with_trunks(trunks).with_positions(positions, keys)
        # The mask now carries them; models take either a mask or segment ids.
        segment_ids = None
    outputs = model(tokens, segment_ids=segment_ids, attn_mask=mask, positions=positions)
    activations = outputs.activations
    Embed = activations.resolve_axis("embed")
    whole = activations.rearrange((Batch, "position", Embed)).array
    # Gathers along `position` (axis 1): [batch, suffix, embed]; the
    # index has a trailing axis of 1 that broadcasts over embed.
    chosen = jnp.take_along_axis(whole, predicting.rearrange((Batch, Suffix)).array[..., None], axis=1)
    if chunk is None:
        rows = -(-Batch.size // ways_in_scope(Batch.name))
        vocab = -(-model.Vocab.size // ways_in_scope("vocab"))
        chunk = default_chunk(rows=rows, vocab=vocab)
    return score_targets(
        hax.auto_sharded(hax.named(chosen, (Batch, Suffix, Embed))),
        model.head,
        targets,
        laws=(),
        chunk=min(chunk, Suffix.size),
        vocab_size=model.config.vocab_size,
        soft_cap=model.config.logit_soft_cap,
    )


def score_targets(
    activations: NamedArray,
    head: Linear,
    targets: NamedArray,
    *,
    laws: tuple[Law, ...] = (TOP_40,),
    chunk: int | None = None,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
) -> SuffixScores:
    """Scores `targets` under the head's distribution at each activation.

    Args:
        activations: `[batch, suffix, embed]`.
        head: from `embed` to `vocab`, in the dtype of the activations.
        targets: ids, `[batch, suffix]`.
        laws: the laws whose normalizers are wanted.
        chunk: suffix positions at a time.
        vocab_size: entries of `vocab` that count; None for all.
        soft_cap: bound of the logits; see `head_logits`.
    """
    Suffix = targets.resolve_axis("suffix")
    # Unlike training, chunks here are runs of neighbouring positions, (Chunks, Chunk): the suffix is not sharded.
    count, size = chunking(Suffix.size, chunk or DEFAULT_CHUNK)
    Chunks, Chunk = Axis("chunks", count), Suffix.resize(size)
    padding = Chunk.size * Chunks.size - Suffix.size
    # No gradient is taken through this, so the head may be replicated once before the loop.
    head = gathered_once(head)

    def cut(x: NamedArray) -> NamedArray:
        return hax.pad(x, {Suffix: (0, padding)}).unflatten_axis(Suffix.name, (Chunks, Chunk))

    def step(_: None, x: NamedArray, target: NamedArray) -> tuple[None, SuffixScores]:
        logits = head_logits(x, head, vocab_size=vocab_size, soft_cap=soft_cap)
        return None, _score_chunk(logits, target, laws)

    with jax.named_scope("lm_head"):
        _, chunk_scores = hax.scan(step, Chunks)(None, cut(activations), cut(targets))

    def joined(x: NamedArray) -> NamedArray:
        others = [axis for axis in targets.axes if axis != Suffix]
        flat = x.rearrange((*others, Chunks, Chunk)).flatten_axes((Chunks, Chunk), Suffix.resize(Suffix.size + padding))
        return hax.auto_sharded(flat[Suffix.name, 0 : Suffix.size].rearrange(targets.axes))

    return jax.tree.map(joined, chunk_scores, is_leaf=lambda x: isinstance(x, NamedArray))


def _score_chunk(logits: NamedArray, target: NamedArray, laws: tuple[Law, ...]) -> SuffixScores:
    Vocab = logits.resolve_axis("vocab")
    entries = hax.arange(Vocab)
    ids = target.broadcast_axis(Vocab).rearrange(logits.axes)
    entries = entries.astype(target.dtype).broadcast_to(logits.axes)
    top = hax.max(logits, Vocab)
    shifted = logits - top
    normalizer = hax.log(hax.sum(hax.exp(shifted), Vocab))
    # A masked sum instead of a gather, so that each shard of the vocabulary contributes its part.
    of_target = hax.sum(hax.where(ids == entries, shifted, 0.0), Vocab)
    # Ties are broken by id, as in `top_k`, so that a rank is unique and reproducible.
    likelier = (shifted > of_target) | ((shifted == of_target) & (entries < ids))
    ranks = hax.sum(likelier.astype(jnp.int32), Vocab).astype(jnp.int32)
    # The sums below run over `shifted`, not log p: the two differ by the constant `normalizer` at each position.
    # One top-k for the largest K of all laws; smaller K take a prefix of it.
    largest_k = max((k for k, _ in laws if k is not None), default=0)
    likeliest = _likeliest(shifted, Vocab, min(largest_k, Vocab.size)) if largest_k else None
    normalizers = []
    for k, temperature in laws:
        values = shifted if k is None else _first(likeliest, k)
        name = "vocab" if k is None else "likeliest"
        raw = hax.log(hax.sum(hax.exp(values / np.float32(temperature)), name))
        # log Σ exp(log p / T) with log p = shifted − normalizer,
        # so the sum over shifted is corrected by −normalizer / T.
        normalizers.append((raw - normalizer / np.float32(temperature)).rearrange(target.axes))
    return SuffixScores(
        logprobs=(of_target - normalizer).rearrange(target.axes),
        ranks=ranks.rearrange(target.axes),
        normalizers=tuple(normalizers),
    )


def _first(likeliest: NamedArray | None, k: int) -> NamedArray:
    assert likeliest is not None
    return likeliest["likeliest", 0 : min(k, likeliest.axis_size("likeliest"))]


BLOCK = 64
"""Entries of the vocabulary in a block of `largest`. From 32 to 256 the time on a CPU is the same within a fifth."""


def largest(x: jax.Array, k: int) -> jax.Array:
    """The k largest values of the last axis, descending.

    The k largest lie in the k blocks with the largest maxima, so only these blocks are sorted: less than half the time
    of sorting all of 49,152 entries on a CPU.
    """
    count = -(-x.shape[-1] // BLOCK)
    # With fewer than 2k blocks, the chosen k would be over half of them and the two-step search saves nothing.
    if count < 2 * k:
        return jax.lax.top_k(x, k)[0]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * BLOCK - x.shape[-1])]
    # Padding with −inf, so that the last block's filler never is among the k largest.
    blocks = jnp.pad(x, padding, constant_values=-np.inf).reshape(*x.shape[:-1], count, BLOCK)
    # Correct with ties, too: a value that is among the k largest lies in a block whose maximum is at least as large.
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
    return jax.lax.top_k(candidates.reshape(*x.shape[:-1], k * BLOCK), k)[0]


def _likeliest(logits: NamedArray, Vocab: Axis, k: int) -> NamedArray:
    """The k largest entries, descending, over the axis `likeliest`.

    Each shard of the vocabulary finds its own k largest; only those are gathered and compared. This is written per
    device, because the partitioner gathers the whole operand of a top-k over batch and vocabulary alike.
    """
    others = tuple(axis for axis in logits.axes if axis != Vocab)
    logits = logits.rearrange((*others, Vocab))
    # Without a mesh there is no mapping to split by, and `shard_map` would fail.
    if jax.sharding.get_abstract_mesh().empty:
        return hax.named(largest(logits.array, k), (*others, Axis("likeliest", k)))
    mapping = compute_mapping_in_scope()
    spec = mapping.spec(axis.name for axis in logits.axes)
    over = mapping.mesh_axes("vocab")

    def of_shard(part: jax.Array) -> jax.Array:
        best = largest(part, min(k, part.shape[-1]))
        if not over:
            return best
        # k values from each shard suffice: the global k largest are among the k largest of each shard. The gather
        # moves k · shards values, not the vocabulary.
        return jax.lax.top_k(jax.lax.all_gather(best, over, axis=part.ndim - 1, tiled=True), k)[0]

    # After the gather the result is equal on all devices of `over`, which the replication checker cannot prove.
    run = jax.shard_map(of_shard, in_specs=spec, out_specs=PartitionSpec(*spec[:-1], None), check_vma=False)
    return hax.named(run(logits.array), (*others, Axis("likeliest", k)))
