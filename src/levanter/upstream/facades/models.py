"""Examples, losses and model members with the interfaces of earlier generations.

    example = LmExample.causal(tokens, eos_id=2)          # tokens: NamedArray [position]
    loss = compute_next_token_loss(model, example)        # a number

Upstream's models returned logits when called. Here they return activations, and `model.logits(activations)` returns
logits. `compute_next_token_loss` is the same in both.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jax.typing import DTypeLike

from haliax_ext.abstract import abstract, leaves
from haliax_ext.pytree import PyTree
from levanter.compat.hf.converter import HFCheckpointConverter
from levanter.layers.attention import AttentionMask
from levanter.layers.linear import Dense
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
from levanter.models.scoring import has_target, loss_sums, next_tokens, token_logprobs
from levanter.upstream.facades.saved import new_checkpointer as new_checkpointer
from levanter.upstream.imports import warn_once


class LmExample(eqx.Module):
    """A sequence with the weight of each position and the attention mask.

    Attributes:
        tokens: ids, `[…, position]`.
        loss_weight: float32, of the shape of `tokens`; entry t weighs the prediction of token t + 1.
        attn_mask: causal by default.
    """

    tokens: NamedArray
    loss_weight: NamedArray
    attn_mask: AttentionMask = AttentionMask.causal()

    def __init__(
        self,
        tokens: NamedArray,
        loss_weight: NamedArray | None = None,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        loss_mask: NamedArray | None = None,
    ):
        weight = loss_weight if loss_weight is not None else loss_mask
        if weight is None or (loss_weight is not None and loss_mask is not None):
            raise ValueError("LmExample: pass either loss_weight or loss_mask, its 2025 name")
        self.tokens, self.loss_weight = tokens, weight
        self.attn_mask = as_mask(attn_mask) or AttentionMask.causal()

    @property
    def loss_mask(self) -> NamedArray:
        """`loss_weight` under its name of 2025."""
        return self.loss_weight

    @staticmethod
    def causal(
        tokens: NamedArray,
        *,
        loss_weight: NamedArray | None = None,
        loss_mask: NamedArray | None = None,
        ignore_id: int | None = None,
        eos_id: int | None = None,
        segment_ids: NamedArray | None = None,
        sliding_window: int | None = None,
        block_cross_document_attention: bool = True,
    ) -> "LmExample":
        """A sequence in which every token but the first is predicted.

        Args:
            tokens: ids, `[position]`.
            loss_weight, loss_mask: further weights, under either generation's name.
            ignore_id: predictions of this token do not count.
            eos_id: the token that ends a document; attention does not cross it.
            segment_ids: the document of each token, if known.
            sliding_window: number of keys that a query attends to.
            block_cross_document_attention: whether attention stays within a document.

        Raises:
            ValueError: more than one axis, both names of the weights, or ids that are not integers.
        """
        if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers with one axis, got {tokens.dtype} {tokens.axes}")
        if loss_weight is not None and loss_mask is not None:
            raise ValueError("loss_weight and loss_mask are the same argument; pass only one")
        (Pos,) = tokens.axes
        weight = LmExample.causal_loss_mask(Pos)
        weights = loss_weight if loss_weight is not None else loss_mask
        if weights is not None:
            weight = weight * weights.astype(jnp.float32)
        if ignore_id is not None:
            weight = weight * _is_not_next(tokens, Pos, ignore_id)
        mask = AttentionMask.causal(sliding_window=sliding_window)
        if block_cross_document_attention:
            if segment_ids is None and eos_id is not None:
                # A document begins after each EOS; roll wraps the last token to position 0, which begins nothing new.
                begins = (hax.roll(tokens, 1, Pos).array == eos_id).at[0].set(False)
                # The running count of beginnings numbers the documents 0, 1, 2, …
                segment_ids = hax.named(jnp.cumsum(begins.astype(jnp.int32)), Pos)
            if segment_ids is not None:
                mask = mask.with_segment_ids(segment_ids)
        return LmExample(tokens=tokens, loss_weight=weight, attn_mask=mask)

    @staticmethod
    def from_prompt_and_completion(
        Pos: Axis, tokens: NamedArray, prompt_length: int, *, ignore_id: int | None = None, all_causal: bool = True
    ) -> "LmExample":
        """A sequence in which only the completion after the prompt is predicted."""
        if not all_causal:
            raise ValueError("all_causal=False: bidirectional attention within the prompt is not supported")
        weight = LmExample.causal_loss_mask(Pos, prompt_length=prompt_length)
        if ignore_id is not None:
            weight = weight * _is_not_next(tokens, Pos, ignore_id)
        return LmExample(tokens=tokens, loss_weight=weight, attn_mask=AttentionMask.causal())

    @staticmethod
    def causal_loss_mask(Pos: Axis, prompt_length: int | None = None) -> NamedArray:
        """1 at each position whose next token counts, else 0."""
        index = hax.arange(Pos)
        # The last position has no next token.
        counts = index < Pos.size - 1
        if prompt_length is not None:
            # Position prompt_length − 1 predicts the first token of the completion.
            counts = counts & (index >= prompt_length - 1)
        return counts.astype(jnp.float32)


def _is_not_next(tokens: NamedArray, Pos: Axis, token: int) -> NamedArray:
    """1 where the next token is not `token`, else 0."""
    # roll wraps the first token to the last position, whose weight is 0 anyway.
    return hax.named((hax.roll(tokens, -1, Pos).array != token).astype(jnp.float32), Pos)


def compute_next_token_loss(
    model: LmHeadModel,
    example: LmExample,
    *,
    key: object = None,
    reduction: Callable[..., Any] | None = hax.mean,
    reduction_axis: hax.AxisSelection | None = None,
    logsumexp_weight: float | None = None,
    loss_dtype: DTypeLike | None = None,
) -> NamedArray | jax.Array:
    """The cross-entropy of each next token, weighted by `example.loss_weight`.

    Args:
        model: its weights in the compute dtype.
        example: the sequence, its weights and mask.
        key: accepted for compatibility; nothing is random.
        reduction: `hax.mean` is the mean by weight; another function is applied to the weighted losses; None returns
            them, `[…, position]`.
        reduction_axis: the axes to reduce; None for all.
        logsumexp_weight: refused unless 0: it is `train_lm`'s `z_loss_weight`.
        loss_dtype: dtype of the result; float32 by default.
    """
    del key
    if logsumexp_weight:
        raise ValueError("logsumexp_weight: not supported here; use train_lm's z_loss_weight")
    weight = example.loss_weight
    targets = next_tokens(example.tokens)
    if reduction is hax.mean and reduction_axis is None:
        # The usual loss of a training script: its gradient costs
        # one product of the logits' size less than that of scores.
        activations = model(example.tokens, attn_mask=example.attn_mask).activations
        # Positions without a target must have weight 0 in `loss_sums`.
        counts = hax.where(has_target(targets), weight.broadcast_to(targets.axes), 0.0)
        total = loss_sums(model, targets, counts, activations=activations).minimized
        # By the sum of all weights, as upstream: a position without a target counts in the denominator.
        mean = total / hax.sum(weight.broadcast_to(targets.axes)).scalar()
        return mean if loss_dtype is None else mean.astype(loss_dtype)
    # Any other reduction needs each token's score.
    losses = -token_logprobs(model, example.tokens, targets, attn_mask=example.attn_mask) * weight
    if reduction is hax.mean:
        total = hax.sum(losses, axis=reduction_axis)
        result = total / hax.sum(weight.broadcast_to(losses.axes), axis=reduction_axis)
    else:
        result = losses if reduction is None else reduction(losses, axis=reduction_axis)
    if loss_dtype is not None:
        result = result.astype(loss_dtype)
    return result.scalar() if isinstance(result, NamedArray) and not result.axes else result


def Pos(config: LmConfig) -> Axis:
    """`config.Pos`: the axis of positions at full length."""
    return config.max_Pos


def seq_len(config: LmConfig) -> int:
    """`config.seq_len`: the longest sequence."""
    return config.max_seq_len


def KeyPos(config: LmConfig) -> Axis:
    """`config.KeyPos`: the axis of key positions."""
    return config.max_Pos.alias("key_position")


def model_type(config: LmConfig) -> type[LmHeadModel]:
    """`config.model_type`: the base class of every model; `load_pretrained` accepts it and follows the config."""
    del config
    return LmHeadModel


def flops_per_token(config: LmConfig) -> Callable[..., float]:
    """`config.flops_per_token(vocab_size, context_length)`, for a forward pass."""

    def of_sizes(vocab_size: int, context_length: int | None = None) -> float:
        length = config.max_seq_len if context_length is None else context_length
        # Upstream's convention counts every pair of positions, also those that a causal mask hides.
        return config.flops(vocab_size=vocab_size, context_length=length, attention="full").scoring

    return of_sizes


def total_trainable_params(config: LmConfig) -> Callable[[int], int]:
    """`config.total_trainable_params(vocab_size)`: the number of parameters."""

    def of_size(vocab_size: int) -> int:
        # Abstract: counting needs shapes only.
        model = abstract(lambda: config.build(Axis("vocab", vocab_size), key=jax.random.PRNGKey(0)))
        return sum(math.prod(leaf.shape) for leaf in leaves(model))

    return of_size


def position_axis(model: LmHeadModel) -> Axis:
    """`model.Pos`: the axis of positions at full length."""
    return model.config.max_Pos


def vocab_size(model: LmHeadModel) -> int:
    """`model.vocab_size`: the number of rows of the head, padding included."""
    return model.Vocab.size


def hf_checkpoint_converter(config: LmConfig) -> Callable[..., HFCheckpointConverter]:
    """`config.hf_checkpoint_converter(ref_checkpoint=None)`: a converter for the config's family."""

    def of_reference(ref_checkpoint: PyTree = None, *, ref: PyTree = None) -> HFCheckpointConverter:
        return HFCheckpointConverter.of(config, ref if ref_checkpoint is None else ref_checkpoint)

    return of_reference


def loss_function(model: LmHeadModel) -> Callable[..., Any]:
    """`model.compute_next_token_loss(example, …)`."""
    return lambda example, **keys: compute_next_token_loss(model, example, **keys)


def lm_head(model: LmHeadModel) -> Callable[[], NamedArray]:
    """`model.get_lm_head()`: the head's matrix, if it is stored as one."""

    def head() -> NamedArray:
        operand = model.head.operand
        if not isinstance(operand, Dense):
            raise TypeError(
                f"the output head is stored as {type(operand).__name__}, not as a matrix: multiply with model.head "
                f"instead"
            )
        return operand.array

    return head


def activations_function(model: LmHeadModel) -> Callable[..., NamedArray]:
    """`model.activations(tokens, attn_mask, …)`."""

    def activations(
        tokens: NamedArray,
        attn_mask: AttentionMask | None = None,
        *,
        key: object = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        del key
        return model(tokens, attn_mask=attn_mask, positions=pos_ids).activations

    return activations


def logits(
    current: Callable[..., Any],
    model: LmHeadModel,
    input_ids: NamedArray,
    attn_mask: AttentionMask | NamedArray | None = None,
    *,
    key: object = None,
    pos_ids: NamedArray | None = None,
    **ours: PyTree,
) -> NamedArray:
    """`model(ids, mask, key=key)`: float32 logits, `[…, position, vocab]`.

    Args:
        current: the model's current `__call__`.
        model: the model.
        input_ids: token ids, `[…, position]`.
        attn_mask: which positions attend to which; causal by default. An array `[…, position, key_position]` is the
            complete rule.
        key: accepted for compatibility; nothing is random.
        pos_ids: the position of each token, if it is not its index.
        ours: further arguments of the current call.

    Raises:
        ValueError: positions are passed twice.
    """
    del key
    warn_once(
        "model(…)", "model(ids, mask, key=…) returns logits; the current call is model(ids).activations", stacklevel=4
    )
    if pos_ids is not None and ours.get("positions") is not None:
        raise ValueError("pos_ids and positions are the same argument; pass only one")
    if pos_ids is not None:
        ours["positions"] = pos_ids
    outputs = current(model, input_ids, attn_mask=as_mask(attn_mask), **ours)
    return model.logits(outputs.activations)


def as_mask(mask: AttentionMask | NamedArray | None) -> AttentionMask | None:
    """Converts an array over `position` and `key_position` to a mask; returns other masks unchanged.

    Raises:
        ValueError: the array has axes of other names.
    """
    if not isinstance(mask, NamedArray):
        return mask
    # Batch and head axes may come on top; attention broadcasts over them.
    names = {axis.name for axis in mask.axes}
    if not {"position", "key_position"} <= names:
        raise ValueError(f"a mask has the axes position and key_position, got {', '.join(sorted(names)) or 'none'}")
    return AttentionMask.of_array(mask.astype(bool))


def materialize(
    current: Callable[..., NamedArray | None],
    mask: AttentionMask,
    Pos: Axis,
    KeyPos: Axis,
    q_slice: PyTree = None,
    k_slice: PyTree = None,
) -> NamedArray | None:
    """`mask.materialize(Pos, KeyPos, q_slice=, k_slice=)`: a part of the full mask, for a slice of each axis."""
    # The slices are Haliax `dslice`s, with `start` and `size`.
    whole = current(mask, Pos, KeyPos)
    if whole is None:
        return None
    for axis, part in ((Pos, q_slice), (KeyPos, k_slice)):
        if part is not None:
            whole = hax.slice(whole, axis.name, start=part.start, length=part.size)
    return whole


# --- members of masks ---


def causal_offset(mask: AttentionMask) -> int | NamedArray:
    """`mask.causal_offset`: the position of the first query."""
    # Explicit positions are the more general form of an offset.
    return mask.offset if mask.query_positions is None else mask.query_positions


def segment_ids(mask: AttentionMask) -> tuple[NamedArray, NamedArray] | None:
    """`mask.segment_ids`: the segments of queries and of keys; None for one segment."""
    if mask.query_segments is None:
        return None
    keys = mask.key_segments
    if keys is None:
        # Keys without segments of their own are the queries' positions, whose axis a script may name otherwise.
        renamed: dict[AxisSelector, AxisSelector] = {
            axis.name: "key_position" for axis in mask.query_segments.axes if axis.name == "position"
        }
        keys = mask.query_segments.rename(renamed)
    return mask.query_segments, keys
