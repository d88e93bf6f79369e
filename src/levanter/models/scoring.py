"""Scoring: log-probabilities of given tokens. Evaluation, memorization and training all use this.

The logits of a whole sequence never exist: `lm_head.chunks` computes them for a chunk of positions at a time. Where
devices share the positions of a sequence in zigzag order, it is scored in that order (`models.zigzag`); results are
returned in natural order.
"""

import math

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

from haliax_ext.mapping import ways_in_scope
from levanter.layers.attention.mask import AttentionMask
from levanter.layers.attention.zigzag import natural, zigzag
from levanter.models.base import LmHeadModel
from levanter.models.lm_head.chunks import HeadScoring
from levanter.models.lm_head.loss import LossSums, weighted_loss
from levanter.models.lm_head.plan import default_chunk
from levanter.models.lm_head.scores import target_scores
from levanter.models.zigzag import zigzag_outputs, zigzag_shards


def token_logprobs(
    model: LmHeadModel,
    tokens: NamedArray,
    targets: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    attn_mask: AttentionMask | None = None,
    positions: NamedArray | None = None,
    chunk: int | None = None,
    activations: NamedArray | None = None,
    temperature: float = 1.0,
) -> NamedArray:
    """Log-probability of each target.

    Where the vocabulary axis is longer than the config's `vocab_size`, the added entries are left out of the
    distribution. Matrix products are in the dtype of the weights; the head's result and everything after it is float32.

    Args:
        model: its weights in the compute dtype.
        tokens: ids, `[…, position]`.
        targets: the id that each position predicts, over the axes of `tokens`; negative where it predicts none. A
            batch brings them (`levanter.data.next_tokens`); `next_tokens` makes them of named arrays.
        segment_ids: `[…, position]`; tokens see their own segment only.
        attn_mask: causal by default.
        positions: the position of each token, where it is not its index.
        chunk: positions scored at a time; default the config's `cross_entropy_block_size`, else `default_chunk`.
        activations: the model's for these tokens, if already computed; in the order of the targets.
        temperature: the divisor of the logits, after a soft cap: the distribution that samples at this temperature
            are from.

    Returns:
        Float32 with the axes of `targets`; entry t is log p(targets[t] | tokens[..t]), 0 where nothing is predicted.
    """
    # 1 is natural order. A caller's mask or positions describe natural order, so zigzag is used without them only.
    num_shards = 1
    if activations is None and attn_mask is None and positions is None:
        num_shards = zigzag_shards(model)
        activations = zigzag_outputs(model, tokens, segment_ids=segment_ids, num_shards=num_shards).activations
    elif activations is None:
        activations = model(tokens, segment_ids=segment_ids, attn_mask=attn_mask, positions=positions).activations
    (logprobs,) = _scores(model, activations, zigzag(targets, num_shards), chunk, temperature=temperature)
    # Targets went into the zigzag order of the activations; the scores come back out of it.
    return natural(logprobs, num_shards)


def token_scores(
    model: LmHeadModel,
    tokens: NamedArray,
    targets: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    chunk: int | None = None,
    activations: NamedArray | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Log-probability of each target, and the log-normalizer of the distribution it is from.

    The log-normalizer is the log-sum-exp of the logits, which z-loss keeps near 0; float32.

    Args:
        model, tokens, targets, segment_ids, chunk, activations: see `token_logprobs`.

    Returns:
        Both as `token_logprobs` returns the first: float32, 0 where nothing is predicted.
    """
    num_shards = 1
    if activations is None:
        num_shards = zigzag_shards(model)
        activations = zigzag_outputs(model, tokens, segment_ids=segment_ids, num_shards=num_shards).activations
    logprobs, normalizers = _scores(model, activations, zigzag(targets, num_shards), chunk, normalizers=True)
    return natural(logprobs, num_shards), natural(normalizers, num_shards)


def token_hits(
    model: LmHeadModel,
    tokens: NamedArray,
    targets: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    chunk: int | None = None,
    activations: NamedArray | None = None,
) -> tuple[NamedArray, NamedArray]:
    """Log-probability of each target, and whether it was the likeliest token: both from one product with the head.

    Args:
        model, tokens, targets, segment_ids, chunk, activations: see `token_logprobs`.

    Returns:
        The first as `token_logprobs` returns it. The second is bool over the same axes, and false where nothing is
        predicted; of equally likely tokens the one with the lowest id is the likeliest.
    """
    # As in `token_logprobs`: the model may have run in zigzag order, so targets go into it and scores out of it.
    num_shards = 1
    if activations is None:
        num_shards = zigzag_shards(model)
        activations = zigzag_outputs(model, tokens, segment_ids=segment_ids, num_shards=num_shards).activations
    logprobs, hits = _scores(model, activations, zigzag(targets, num_shards), chunk, likeliest=True)
    # Hits are float32 in `target_scores` (scores of one loop share a dtype); `> 0` makes them bool.
    return natural(logprobs, num_shards), natural(hits, num_shards) > 0


def _scores(
    model: LmHeadModel,
    activations: NamedArray,
    targets: NamedArray,
    chunk: int | None,
    *,
    normalizers: bool = False,
    likeliest: bool = False,
    temperature: float = 1.0,
) -> tuple[NamedArray, ...]:
    scores = target_scores(
        activations,
        model.head,
        targets,
        chunk=_chunk(model, targets, chunk),
        how=HeadScoring(
            vocab_size=model.config.vocab_size,
            soft_cap=model.config.logit_soft_cap,
            normalizers=normalizers,
            likeliest=likeliest,
            temperature=temperature,
        ),
    )
    # At a target of −1 the masked sum is 0, so the loop's value there is −log-normalizer: finite, but no score.
    predicts = has_target(targets)
    return tuple(hax.where(predicts, x, 0.0) for x in scores)


def loss_sums(
    model: LmHeadModel,
    targets: NamedArray,
    weights: NamedArray,
    *,
    activations: NamedArray,
    z_weight: float = 0.0,
    chunk: int | None = None,
) -> LossSums:
    """Weighted sums of −log p and, if `z_weight` is not 0, of the squared log-normalizer: what training minimizes.

    The numbers are those of `token_scores`; the gradient costs one product of the logits' size less.

    Args:
        model, targets, chunk: see `token_logprobs`.
        weights: float32, of each target; 0 where nothing is predicted.
        activations: the model's.
        z_weight: of the squared log-normalizers; 0 for none.
    """
    return weighted_loss(
        activations,
        model.head,
        targets,
        weights,
        chunk=_chunk(model, targets, chunk),
        vocab_size=model.config.vocab_size,
        soft_cap=model.config.logit_soft_cap,
        z_weight=z_weight,
    )


def _chunk(model: LmHeadModel, targets: NamedArray, chunk: int | None) -> int:
    """The positions scored at a time, under the mapping and the mesh in scope."""
    chunk = chunk or model.config.cross_entropy_block_size
    if chunk is not None:
        return chunk
    # Sequences on one device: the product of all other axes after sharding (ceilings).
    others = [-(-axis.size // ways_in_scope(axis.name)) for axis in targets.axes if axis.name != "position"]
    vocab = -(-model.Vocab.size // ways_in_scope("vocab"))
    return default_chunk(rows=math.prod(others), vocab=vocab, sequence_shards=ways_in_scope("position"))


def next_tokens(tokens: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
    """The targets of next-token prediction for named arrays without a batch; int32, axes of `tokens`.

    A batch already holds its targets: `levanter.data.next_tokens` computes the same on the host. The last position of a
        sequence, and of each segment, predicts nothing: −1.

    Args:
        tokens: ids, `[…, position]`.
        segment_ids: segments, over axes of `tokens`; None for one.
    """
    Pos = tokens.resolve_axis("position")

    def following(x: NamedArray, end: int) -> NamedArray:
        # Shifts left by one along `position`; the last entry becomes `end`.
        return hax.pad(x[Pos.name, 1:], {Pos.name: (0, 1)}, constant_values=end).rearrange(x.axes)

    targets = following(tokens.astype(jnp.int32), -1)
    if segment_ids is None:
        return targets
    # A target counts only if it is in the segment of the token before it: the first token of a packed document is not
    # predicted from the previous document.
    same = hax.named(segment_ids.array == following(segment_ids, 0).array, segment_ids.axes)
    return hax.where(same.broadcast_to(targets.axes).rearrange(targets.axes), targets, -1)


def has_target(targets: NamedArray) -> NamedArray:
    """Whether a position predicts anything, boolean over the axes of `targets`."""
    return hax.named(targets.array >= 0, targets.axes)
