"""The preference objective: of two texts after one prompt, the preferred one becomes more likely.

The loss of a pair depends on four numbers: the log-probabilities of the chosen and the rejected text under the
*policy*, which is trained, and under the *reference*, which is not. Chosen and rejected texts go through a model as one
batch of twice the rows. With x = β (Δπ − Δref), where Δ is the difference of a model's two log-probabilities:

- `sigmoid`: −(1−ε) log σ(x) − ε log σ(−x) (Rafailov et al., arXiv:2305.18290; ε > 0 is cDPO)
- `robust`: (−(1−ε) log σ(x) + ε log σ(−x)) / (1 − 2ε) (Chowdhury et al., arXiv:2403.00409)
- `ipo`: (Δπ − Δref − 1/(2β))², log-probabilities per token (Azar et al., arXiv:2310.12036)
- `hinge`: max(0, 1 − x) (Zhao et al., arXiv:2305.10425)
- `simpo`: −log σ(β Δπ − γ), log-probabilities per token, no reference (Meng et al., arXiv:2405.14734)
- `orpo`: −l − β log σ(o), where l is the chosen text's log-probability per token and o the difference of the two texts'
  log-odds, no reference (Hong et al., arXiv:2403.07691)

A step minimizes the mean over its pairs.
"""

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Annotated, Literal, Self, TypeAlias

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import Mesh

from haliax_ext.planner import ShardingPlan
from haliax_ext.prefetch import place
from haliax_ext.program import Input
from haliax_ext.pytree import PyTree
from levanter.config.validators import NonNegativeFloat, Range, Ranged
from levanter.data import NO_TARGET, TrainRows, pair_targets
from levanter.layers.outputs import Sums
from levanter.models.base import LmHeadModel
from levanter.models.scoring import has_target, token_logprobs
from levanter.trainer.device_batches import rows_here
from levanter.trainer.objective import LOSS, AtStep, Objective, Term
from levanter.trainer.trainable import bind

SIDE = "side"
Numbers: TypeAlias = jax.Array | np.ndarray
METRICS = (
    *("dpo_loss", "dpo_margin_policy", "dpo_margin_ref", "dpo_accuracy"),
    *("dpo_chosen_reward", "dpo_rejected_reward"),
)
"""Upstream's names of the metrics of pairs."""

Smoothing: TypeAlias = Annotated[float, Range(0, 0.5, below=True)]
Kind = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo"]
SMOOTHED = ("sigmoid", "robust")
REFERENCE_FREE = ("simpo", "orpo")
PER_TOKEN = ("ipo", "simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class PreferenceLossConfig(Ranged):
    """The loss of a pair (`train_dpo.loss`).

    Attributes:
        type: the formula; see `levanter.trainer.dpo`.
        label_smoothing: the fraction ε of pairs that are assumed to be mislabelled; for `sigmoid` and `robust`.
        gamma: the margin of `simpo`; null for 0.5.
        length_normalized: whether log-probabilities are means over the counted tokens instead of sums; null for the
            type's own convention: means for `ipo`, `simpo` and `orpo`, sums for the others.
    """

    type: Kind = "sigmoid"
    label_smoothing: Smoothing = 0.0
    gamma: NonNegativeFloat | None = None
    length_normalized: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.label_smoothing and self.type not in SMOOTHED:
            problems.append(
                f"label_smoothing: {self.label_smoothing:g}, but {self.type} has none; {' and '.join(SMOOTHED)} have it"
            )
        if self.gamma is not None and self.type != "simpo":
            problems.append(f"gamma: {self.gamma:g}, but {self.type} has no margin; only simpo has one")
        if self.type in REFERENCE_FREE and self.length_normalized is False:
            problems.append(f"length_normalized: false, but {self.type} is defined by means over tokens; leave it out")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def has_reference(self) -> bool:
        """Whether the loss depends on a reference model."""
        return self.type not in REFERENCE_FREE

    @property
    def per_token(self) -> bool:
        """Whether log-probabilities are means over tokens."""
        return self.type in PER_TOKEN if self.length_normalized is None else self.length_normalized

    def at_start(self, beta: float) -> float | None:
        """The loss if policy and reference are the same model; None if it depends on the data as well."""
        # Then x = 0: −log σ(0) = log 2, also with label smoothing, since (1 − ε) + ε = (1 − 2ε) / (1 − 2ε) = 1.
        return {"sigmoid": math.log(2), "robust": math.log(2), "ipo": 1 / (4 * beta**2), "hinge": 1.0}.get(self.type)


def pair_terms(
    loss: PreferenceLossConfig,
    beta: float,
    policy: Numbers,
    counts: Numbers,
    reference: Numbers | None,
    *,
    xp: ModuleType = jnp,
) -> dict[str, Numbers]:
    """The loss and the metrics of each pair, by name, each `[pairs]`.

    Args:
        loss: the formula.
        beta: β.
        policy: log-probabilities of the chosen and the rejected text, `[pairs, 2]`: sums over the counted tokens.
        counts: number of counted tokens, `[pairs, 2]`.
        reference: the reference's log-probabilities; None without a reference.
        xp: the module of the arrays: `jax.numpy` or NumPy.
    """
    # A row of padding counts no tokens; the caller drops its terms, which must not be NaN before that.
    tokens = xp.maximum(counts, 1)
    sums = policy / tokens if loss.per_token else policy
    delta = sums[:, 0] - sums[:, 1]
    # Without a reference Δref is 0, so the same formulas hold.
    base = xp.zeros_like(policy) if reference is None or not loss.has_reference else reference
    based = base / tokens if loss.per_token else base
    margin = based[:, 0] - based[:, 1]

    def minus_log_sigmoid(x: Numbers) -> Numbers:
        # −log σ(x) = log(1 + e⁻ˣ), without overflow for large negative x.
        return xp.logaddexp(-x, xp.zeros_like(x))

    x, e = beta * (delta - margin), loss.label_smoothing
    # `e` is static: without label smoothing the second term is not computed at all.
    if loss.type == "sigmoid":
        losses = minus_log_sigmoid(x) if e == 0 else (1 - e) * minus_log_sigmoid(x) + e * minus_log_sigmoid(-x)
    elif loss.type == "robust":
        losses = ((1 - e) * minus_log_sigmoid(x) - e * minus_log_sigmoid(-x)) / (1 - 2 * e)
    elif loss.type == "ipo":
        losses = (delta - margin - 1 / (2 * beta)) ** 2
    elif loss.type == "hinge":
        losses = xp.maximum(1 - x, 0)
    elif loss.type == "simpo":
        x = x - (0.5 if loss.gamma is None else loss.gamma)
        losses = minus_log_sigmoid(x)
    else:
        # log(1 − p) = log1p(−exp(log p)). The odds of a text with p = 1 are infinite, hence the bound below 0.
        inverse = xp.log1p(-xp.exp(xp.minimum(sums, -1e-7)))
        losses = -sums[:, 0] + beta * minus_log_sigmoid(delta - (inverse[:, 0] - inverse[:, 1]))
    # Upstream logs margins of sums over tokens, whatever the loss uses; rewards follow the loss.
    margins = (policy[:, 0] - policy[:, 1], base[:, 0] - base[:, 1])
    shown = (losses, *margins, (x > 0).astype(policy.dtype), *(beta * (sums - based)[:, side] for side in (0, 1)))
    return {LOSS: losses, **dict(zip(METRICS, shown, strict=True))}


class PairBatch(eqx.Module):
    """A batch of preference pairs.

    Attributes:
        tokens: int32 ids, `[batch, side, position]`; index 0 of `side` is the chosen text, 1 the rejected one.
        targets: int32, over the same axes: the id that each position predicts; negative if it does not count.
        reference: float32, `[batch, side]`: the reference's log-probabilities if they were computed beforehand.
    """

    tokens: NamedArray
    targets: NamedArray
    reference: NamedArray | None = None


class PairModels(eqx.Module):
    """The models that score a pair.

    Attributes:
        policy: the trained model.
        reference: the reference model; None if its log-probabilities are in the batch, or the loss has no reference.
    """

    policy: LmHeadModel
    reference: LmHeadModel | None = None


def pair_logprobs(model: LmHeadModel, batch: PairBatch, *, chunk: int | None = None) -> jax.Array:
    """The log-probability of the counted tokens of each text, float32 `[batch, 2]`, in one forward pass for both.

    Args:
        model: its weights in the compute dtype.
        batch: the pairs.
        chunk: positions scored at a time.
    """
    Batch, Side, Pos = batch.tokens.axes
    Rows = Batch.resize(Batch.size * Side.size)

    def texts(x: NamedArray) -> NamedArray:
        # `side` is the minor axis of the flattened rows, so both texts of a pair are on the same device.
        return hax.auto_sharded(NamedArray(x.array.reshape(Rows.size, Pos.size), (Rows, Pos)))

    tokens, targets = texts(batch.tokens), texts(batch.targets)
    logprobs = token_logprobs(model, tokens, targets, chunk=chunk)
    with jax.named_scope("pairs"):
        sums = hax.sum(hax.where(has_target(targets), logprobs, 0.0), Pos)
        return sums.array.reshape(Batch.size, Side.size)


def counted(batch: PairBatch) -> jax.Array:
    """The number of counted tokens of each text, float32 `[batch, 2]`."""
    # Negative targets: prompt tokens, the last position, and padding.
    return jnp.sum(batch.targets.array >= 0, axis=-1).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective(Objective[PairModels, PairBatch]):
    """The mean loss of pairs.

    Attributes:
        loss: the formula.
        beta: β.
        stored: whether the reference's log-probabilities are in the batch.
        chunk: positions scored at a time; None for the model's own.
    """

    loss: PreferenceLossConfig
    beta: float
    stored: bool = False
    chunk: int | None = None

    sequences = 2
    """The chosen and the rejected text."""

    def in_chunks(self, chunk: int | None) -> Self:
        """See `Objective.in_chunks`."""
        # The gradient stays out of the scoring loop: a token's weight depends on the log-probabilities of its pair.
        return replace(self, chunk=chunk)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The loss, and upstream's metrics."""
        return (Term(name=LOSS), *(Term(name=name, weight=None) for name in METRICS))

    def abstract_batch(self, Batch: hax.Axis, Pos: hax.Axis) -> PairBatch:
        """See `Objective.abstract_batch`; a row is a pair."""
        Side = hax.Axis(SIDE, 2)

        def of(dtype: type, *axes: hax.Axis) -> NamedArray:
            array = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), np.dtype(dtype))
            return NamedArray(array, axes)  # pyright: ignore[reportArgumentType]

        return PairBatch(
            tokens=of(np.int32, Batch, Side, Pos),
            targets=of(np.int32, Batch, Side, Pos),
            reference=of(np.float32, Batch, Side) if self.stored else None,
        )

    def rows(self, batch: PairBatch) -> hax.Axis:
        """The axis of the pairs."""
        return batch.tokens.axes[0]

    def normalizer(self, batch: PairBatch) -> jax.Array:
        """The number of pairs, without rows of padding."""
        return jnp.sum(_is_pair(counted(batch)).astype(jnp.float32))

    def sums(self, model: PairModels, batch: PairBatch, at: AtStep) -> Sums:  # noqa: ARG002
        """See `Objective.sums`."""
        counts = counted(batch)
        reference = self.reference(model, batch)
        policy = pair_logprobs(model.policy, batch, chunk=self.chunk)
        with jax.named_scope("loss"):
            terms = pair_terms(self.loss, self.beta, policy, counts, reference)
            # Select instead of multiplying by 0: the terms of padding rows may be infinite.
            is_pair = _is_pair(counts)
            return Sums({name: jnp.sum(jnp.where(is_pair, values, 0.0)) for name, values in terms.items()})

    def reference(self, model: PairModels, batch: PairBatch) -> jax.Array | None:
        """The reference's log-probabilities, `[batch, 2]`; None if the loss has no reference."""
        if not self.loss.has_reference:
            return None
        if batch.reference is not None:
            return batch.reference.array
        assert model.reference is not None, "nothing says what the reference is"
        # With adapters the reference is the policy's own base: without stop_gradient it would be differentiated.
        with jax.named_scope("reference"):
            return jax.lax.stop_gradient(pair_logprobs(model.reference, batch, chunk=self.chunk))


def place_pairs(rows: TrainRows, declared: Input, mesh: Mesh, reference: np.ndarray | None = None) -> PairBatch:
    """Pairs as the batch of a train step, filled up with padding rows in which no token counts.

    Args:
        rows: the pairs of the global batch that this process's devices hold, without padding.
        declared: the step's input, abstract.
        mesh: the devices.
        reference: the reference's log-probabilities, float32 `[pairs, 2]`; None if steps compute them.
    """
    first, stop = rows_here(declared, mesh)
    missing = [(0, stop - first - rows.tokens.shape[0]), (0, 0), (0, 0)]
    tokens, targets = pair_targets(rows)
    values = {"tokens": np.pad(tokens, missing), "targets": np.pad(targets, missing, constant_values=NO_TARGET)}
    if reference is not None:
        values["reference"] = np.pad(reference, missing[:2])
    return place(declared, values, mesh, first_row=first)


def _is_pair(counts: jax.Array) -> jax.Array:
    return (counts > 0).all(axis=-1)


def alone(trained: PyTree, frozen: PyTree, *, key: jax.Array | None = None) -> PairModels:
    """The policy without a reference; see `trainer.trainable.bind`."""
    return PairModels(policy=bind(trained, frozen, key=key))


def with_base(trained: PyTree, frozen: PyTree, *, key: jax.Array | None = None) -> PairModels:
    """Adapters bound to their base as the policy, and the base itself as the reference."""
    return PairModels(policy=bind(trained, frozen, key=key), reference=frozen)


def with_other(trained: PyTree, models: tuple[PyTree, PyTree], *, key: jax.Array | None = None) -> PairModels:
    """The policy, and another model as the reference; `models` is (frozen part of the policy, reference)."""
    frozen, reference = models
    return PairModels(policy=bind(trained, frozen, key=key), reference=reference)


def pair_plan(policy: ShardingPlan, reference: ShardingPlan | None) -> ShardingPlan:
    """The placement of the leaves of `PairModels`, by their paths in it."""
    # The paths are those of the fields of `PairModels`, by which the step looks up placements.
    both = {"policy": policy} if reference is None else {"policy": policy, "reference": reference}
    leaves = tuple(
        replace(leaf_plan, leaf=replace(leaf_plan.leaf, path=f"{name}.{leaf_plan.leaf.path}"))
        for name, plan in both.items()
        for leaf_plan in plan.leaves
    )
    return replace(policy, leaves=leaves, findings=())
