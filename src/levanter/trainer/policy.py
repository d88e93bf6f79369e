"""The policy objective: answers with good rewards become more likely, answers with bad ones less.

The model answers prompts, and a batch holds the answers: rows of one or several segments, each a prompt with its
answer. Tokens of answers have weights, advantages and the log-probabilities under which they were sampled, all computed
on the host or by an earlier Program; the formulas are in `trainer.policy_loss`.

The number of tokens that are learned from is the normalizer, and their `count` comes from the host: so a batch may be
packed, padded, accumulated and sharded, and has one loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.typing import DTypeLike

from levanter.data import NO_TARGET
from levanter.data.packing import Packing, pack
from levanter.data.rows import PADDING_SEGMENT
from levanter.layers.outputs import Sums
from levanter.models.base import LmHeadModel
from levanter.models.scoring import token_logprobs
from levanter.trainer.objective import LOSS, AtStep, Objective, Term
from levanter.trainer.policy_loss import PolicyLossConfig, TokenData, policy_terms


class PolicyBatch(eqx.Module):
    """Answers to learn from; arrays over `[batch, position]`, and all but the first and third about the targets.

    Attributes:
        tokens: int32 ids.
        targets: int32: the id that each position predicts, where that is a token of an answer; else negative.
        segment_ids: int32: numbers the prompts with their answers in a row from 0; negative where padded.
        count: float32: 1 at each token that is learned from; their sum is the normalizer.
        weight: float32: of each token; see `token_weights`.
        advantage: float32: of the token's answer.
        sampler_logprob: float32: log-probability when it was sampled, at the temperature of sampling.
        old_logprob: float32: log-probability before the first of several updates; None without one.
        reference_logprob: float32: log-probability under the reference; None without one.
    """

    tokens: NamedArray
    targets: NamedArray
    segment_ids: NamedArray
    count: NamedArray
    weight: NamedArray
    advantage: NamedArray
    sampler_logprob: NamedArray
    old_logprob: NamedArray | None = None
    reference_logprob: NamedArray | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective[LmHeadModel, PolicyBatch]):
    """The mean of the weighted loss of tokens.

    Attributes:
        loss: the formula.
        temperature: at which the answers were sampled.
        answers: the largest number of answers in a row.
        chunk: positions scored at a time; None for the model's own.
    """

    loss: PolicyLossConfig
    temperature: float = 1.0
    answers: int = 1
    chunk: int | None = None

    def in_chunks(self, chunk: int | None) -> Self:
        """See `Objective.in_chunks`."""
        # The gradient stays out of the scoring loop: the weight of a token depends on its log-probability.
        return replace(self, chunk=chunk)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The loss, and means over tokens that are only logged."""
        return (Term(name=LOSS), *(Term(name=name, weight=None) for name in self.loss.metrics))

    def abstract_batch(self, Batch: hax.Axis, Pos: hax.Axis) -> PolicyBatch:
        """See `Objective.abstract_batch`."""

        def array(dtype: DTypeLike) -> NamedArray:
            value = jax.ShapeDtypeStruct((Batch.size, Pos.size), np.dtype(dtype))
            return NamedArray(value, (Batch, Pos))  # pyright: ignore[reportArgumentType]

        return PolicyBatch(
            tokens=array(np.int32),
            targets=array(np.int32),
            segment_ids=array(np.int32),
            count=array(np.float32),
            weight=array(np.float32),
            advantage=array(np.float32),
            sampler_logprob=array(np.float32),
            old_logprob=array(np.float32) if self.loss.old == "score" else None,
            reference_logprob=array(np.float32) if self.loss.has_reference else None,
        )

    def rows(self, batch: PolicyBatch) -> hax.Axis:
        """The axis of rows."""
        return batch.tokens.axes[0]

    def normalizer(self, batch: PolicyBatch) -> jax.Array:
        """The number of tokens that are learned from."""
        return hax.sum(batch.count).scalar()

    def sums(self, model: LmHeadModel, batch: PolicyBatch, at: AtStep) -> Sums:  # noqa: ARG002
        """See `Objective.sums`."""
        logprobs = self.logprobs(model, batch)
        # `count` selects and `weight` scales: a learned token may have weight 0, and padding has neither.
        counted = batch.count.array != 0
        with jax.named_scope("loss"):
            tokens = TokenData(
                counted=counted,
                advantage=batch.advantage.array,
                sampler=batch.sampler_logprob.array,
                old=None if batch.old_logprob is None else batch.old_logprob.array,
                reference=None if batch.reference_logprob is None else batch.reference_logprob.array,
                answer_sums=lambda values: _answer_sums(values, batch.segment_ids.array, self.answers),
            )
            terms = policy_terms(self.loss, logprobs.array, tokens)
            # The loss has the weights of `normalize`; metrics are plain means over the counted tokens.
            weights = {name: batch.weight if name == LOSS else batch.count for name in terms}
            return Sums({name: jnp.sum(values * weights[name].array) for name, values in terms.items()})

    def logprobs(self, model: LmHeadModel, batch: PolicyBatch) -> NamedArray:
        """Log-probability of each target at the temperature of sampling; 0 where there is none.

        Args:
            model: its weights in the compute dtype: the policy, the policy before several updates, or the reference.
            batch: the answers.
        """
        return token_logprobs(
            model,
            batch.tokens,
            batch.targets,
            segment_ids=batch.segment_ids,
            chunk=self.chunk,
            temperature=self.temperature,
        )


def _answer_sums(values: jax.Array, segment_ids: jax.Array, answers: int) -> jax.Array:
    """Sums over the tokens of each answer, at each of its tokens; 0 at padding.

    Two products with the matrix of tokens × answers of a row: they stay sharded where rows or positions are, and a sum
    over shards of positions is one small all-reduce. A scatter would be gathered.
    """
    member = (segment_ids[..., None] == jnp.arange(answers)[None, None]).astype(values.dtype)
    # TPUs would otherwise round the factors of a product to bfloat16.
    exact = jax.lax.Precision.HIGHEST
    sums = jnp.einsum("rp,rpa->ra", values, member, precision=exact)
    return jnp.einsum("ra,rpa->rp", sums, member, precision=exact)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledAnswer:
    """One answer of the engine, as it is learned from.

    Attributes:
        prompt: int32 ids, at least one.
        ids: int32 ids of the answer as they were sampled, the end of the text included if it was sampled.
        sampler_logprobs: float32, of each of `ids`.
        advantage: of the answer.
        learned: whether the answer counts.
    """

    prompt: np.ndarray
    ids: np.ndarray
    sampler_logprobs: np.ndarray
    advantage: float
    learned: bool = True

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)


def pack_answers(answers: Sequence[SampledAnswer], *, positions: int, most: int | None = None) -> Packing:
    """Which answers share a row; each is in one row with its prompt.

    Args:
        answers: of the global batch.
        positions: tokens in a row.
        most: the largest number of answers in a row (`PolicyObjective.answers`); None for as many as fit.

    Raises:
        ValueError: an answer with its prompt is longer than a row, or has no token, no prompt or not one
            log-probability for each token.
    """
    problems = []
    for n, answer in enumerate(answers):
        if not len(answer.prompt) or not len(answer.ids):
            problems.append(f"answer {n}: {len(answer.prompt)} tokens of prompt and {len(answer.ids)} of answer")
        if len(answer) > positions:
            problems.append(f"answer {n}: {len(answer)} tokens with its prompt, and a row has {positions}")
        if len(answer.sampler_logprobs) != len(answer.ids):
            problems.append(f"answer {n}: {len(answer.sampler_logprobs)} log-probabilities of {len(answer.ids)} tokens")
    if problems:
        raise ValueError("\n".join(problems))
    return pack(np.array([len(answer) for answer in answers], np.int64), positions=positions, most=most)


def answer_rows(
    answers: Sequence[SampledAnswer], weights: np.ndarray, packing: Packing, *, positions: int
) -> Mapping[str, np.ndarray]:
    """Answers as the arrays of a `PolicyBatch`, by field, `[rows, positions]`.

    Which tokens belong to an answer follows from counts: never from ids, since a prompt may contain the end of a text,
    and padding may have its id.

    Args:
        answers: of the global batch.
        weights: of each answer's tokens (`token_weights`).
        packing: their rows.
        positions: tokens in a row.
    """
    # Padding: id 0, no target, a segment that only sees itself, and nothing to learn.
    shape = len(packing), positions
    tokens, targets = np.zeros(shape, np.int32), np.full(shape, NO_TARGET, np.int32)
    segment_ids = np.full(shape, PADDING_SEGMENT, np.int32)
    count, weight, advantage, logprob = (np.zeros(shape, np.float32) for _ in range(4))
    for row in range(len(packing)):
        start = 0
        for segment, n in enumerate(packing.row(row)):
            answer = answers[n]
            stop = start + len(answer)
            tokens[row, start:stop] = np.concatenate([answer.prompt, answer.ids])
            segment_ids[row, start:stop] = segment
            # The last token of the prompt predicts the first of the answer; the last of the answer predicts nothing.
            predicts = slice(start + len(answer.prompt) - 1, stop - 1)
            targets[row, predicts] = answer.ids
            logprob[row, predicts] = answer.sampler_logprobs
            # Other answers keep their targets, so that a score Program gives their log-probabilities too.
            if answer.learned:
                count[row, predicts] = 1
                weight[row, predicts] = weights[n]
                advantage[row, predicts] = answer.advantage
            start = stop
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segment_ids,
        "count": count,
        "weight": weight,
        "advantage": advantage,
        "sampler_logprob": logprob,
    }
