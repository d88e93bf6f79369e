"""Upstream's losses of logits, or of activations and a head's matrix.

    loss = maybe_fused_next_token_loss(Pos, Embed, Vocab, activations, head, tokens, loss_mask=mask, block_size=1024)

Those of activations go through `levanter.models.lm_head`, which never materializes `[batch, position, vocab]`.
`compute_next_token_loss(model, example)` is the loss of a whole model (`levanter.upstream.facades.models`).
"""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax.typing import DTypeLike

from levanter.layers.attention.reference import soft_capped
from levanter.layers.linear import Linear
from levanter.models.lm_head.chunks import HeadScoring
from levanter.models.lm_head.scores import target_scores

Reduction = Callable[..., Any]
AxisName = Axis | str


def cross_entropy_loss_and_log_normalizers(
    pred_y: NamedArray, Label: AxisName, target_y: NamedArray
) -> tuple[NamedArray, NamedArray]:
    """The cross-entropy of target distributions, and the log-normalizers of the predicted ones.

    Args:
        pred_y: logits, `[…, Label]`.
        Label: the axis of labels.
        target_y: probabilities over the same axes; one-hot for targets that are known.
    """
    normalizers = hax.nn.logsumexp(pred_y, Label)
    return normalizers - hax.dot(pred_y, target_y, axis=Label), normalizers


def blockwise_cross_entropy_loss(
    pred: tuple[NamedArray, NamedArray],
    Contract: AxisName,
    Label: AxisName,
    labels_y: NamedArray,
    block_size: int | None,
    dtype: DTypeLike | None = None,
    logit_soft_cap: float | None = None,
) -> tuple[NamedArray, NamedArray]:
    """The same of activations and a head's matrix, for integer labels; float32 unless `dtype` is given.

    Args:
        pred: activations `[…, Contract]`, and the matrix over `Contract` and `Label`.
        Contract: the axis that is contracted.
        Label: the axis of labels.
        labels_y: ids over the axes of the activations.
        block_size: accepted for compatibility; blocks are of positions here, not of labels.
        logit_soft_cap: bound of the logits.
        dtype: of the results.
    """
    activations, matrix = pred
    del block_size
    contract, label = _name(Contract), _name(Label)
    # Our head has fixed axis names, and works along one axis of positions; the last axis of the labels serves as that.
    axes = labels_y.axes
    along: dict[AxisSelector, AxisSelector] = {} if axes[-1].name == "position" else {axes[-1].name: "position"}
    weight = matrix.rename({contract: "embed", label: "vocab"}).astype(activations.dtype)
    head = Linear(weight=weight, bias=None, In=("embed",))
    how = HeadScoring(vocab_size=head.Out[0].size, soft_cap=logit_soft_cap, normalizers=True, likeliest=False)
    logprobs, normalizers = target_scores(
        activations.rename({contract: "embed", **along}), head, labels_y.rename(along), chunk=axes[-1].size, how=how
    )
    back: dict[AxisSelector, AxisSelector] = {new: old for old, new in along.items()}
    loss, normalizers = (x.rename(back).rearrange(axes) for x in (-logprobs, normalizers))
    return (loss, normalizers) if dtype is None else (loss.astype(dtype), normalizers.astype(dtype))


def next_token_loss(
    Pos: AxisName,
    Vocab: AxisName,
    logits: NamedArray,
    true_ids: NamedArray,
    loss_mask: NamedArray | None = None,
    reduction: Reduction | None = hax.mean,
    reduction_axis: hax.AxisSelection | None = None,
    logsumexp_weight: float | None = None,
    loss_dtype: DTypeLike | None = jnp.float32,
) -> NamedArray:
    """The cross-entropy of each next token, from logits.

    Args:
        Pos, Vocab: the axes of positions and of the vocabulary.
        logits: `[…, Pos, Vocab]`.
        true_ids: the tokens, `[…, Pos]`.
        loss_mask: the weight of the prediction at each position; the last position has none.
        reduction: `hax.mean` is the mean by weight; another function reduces the weighted losses; None for all losses.
        reduction_axis: the axes to reduce; None for all.
        logsumexp_weight: weight of the squared log-normalizer, which is added to each loss.
        loss_dtype: the dtype of the logits in the computation.
    """
    logits = logits if loss_dtype is None else logits.astype(loss_dtype)
    targets = hax.nn.one_hot(_next(true_ids, Pos), logits.resolve_axis(_name(Vocab)), dtype=logits.dtype)
    loss, normalizers = cross_entropy_loss_and_log_normalizers(logits, _name(Vocab), targets)
    return _reduced(loss, normalizers, _weights(true_ids, Pos, loss_mask), reduction, reduction_axis, logsumexp_weight)


def maybe_fused_next_token_loss(
    Pos: AxisName,
    Embed: AxisName,
    Vocab: AxisName,
    pred_embeddings: NamedArray,
    pred_lm_head: NamedArray,
    true_ids: NamedArray,
    loss_mask: NamedArray | None = None,
    reduction: Reduction | None = hax.mean,
    reduction_axis: hax.AxisSelection | None = None,
    logsumexp_weight: float | None = None,
    block_size: int | None = None,
    dtype: DTypeLike | None = jnp.float32,
    logit_soft_cap: float | None = None,
) -> NamedArray:
    """The cross-entropy of each next token, from activations and a head's matrix; see `next_token_loss`.

    Args:
        Pos, Embed, Vocab: the axes of positions, of features and of the vocabulary.
        pred_embeddings: activations, `[…, Pos, Embed]`.
        pred_lm_head: the matrix over `Embed` and `Vocab`.
        true_ids: the tokens, `[…, Pos]`.
        block_size: whether to go without all logits at once: anything but None.
        dtype: of the logits and of the result.
        logit_soft_cap: bound of the logits.
        loss_mask, reduction, reduction_axis, logsumexp_weight: see `next_token_loss`.
    """
    weights = _weights(true_ids, Pos, loss_mask)
    if block_size is None:
        logits = hax.dot(pred_embeddings, pred_lm_head, axis=Embed)
        logits = soft_capped(logits if dtype is None else logits.astype(dtype), logit_soft_cap)
        return next_token_loss(
            Pos, Vocab, logits, true_ids, loss_mask, reduction, reduction_axis, logsumexp_weight, dtype
        )
    pred, targets = (pred_embeddings, pred_lm_head), _next(true_ids, Pos)
    loss, normalizers = blockwise_cross_entropy_loss(pred, Embed, Vocab, targets, block_size, dtype, logit_soft_cap)
    return _reduced(loss, normalizers, weights, reduction, reduction_axis, logsumexp_weight)


def _next(ids: NamedArray, Pos: AxisName) -> NamedArray:
    # The first token wraps to the last position, whose weight is 0.
    return hax.roll(ids, -1, ids.resolve_axis(_name(Pos)))


def _weights(ids: NamedArray, Pos: AxisName, loss_mask: NamedArray | None) -> NamedArray:
    axis = ids.resolve_axis(_name(Pos))
    has_next = (hax.arange(axis) < axis.size - 1).astype(jnp.float32)
    return has_next if loss_mask is None else loss_mask.astype(jnp.float32) * has_next


def _reduced(
    loss: NamedArray,
    normalizers: NamedArray,
    weights: NamedArray,
    reduction: Reduction | None,
    axis: hax.AxisSelection | None,
    logsumexp_weight: float | None,
) -> NamedArray:
    if logsumexp_weight:
        loss = loss + logsumexp_weight * normalizers**2
    weighted = loss * weights
    if reduction is hax.mean:
        return hax.sum(weighted, axis) / hax.sum(weights.broadcast_to(loss.axes), axis)
    return weighted if reduction is None else reduction(weighted, axis=axis)


def _name(axis: AxisName) -> str:
    return axis if isinstance(axis, str) else axis.name
