"""Evaluation on preference pairs during training: the metrics of the steps, on validation pairs, between two steps.

The Program returns the log-probability of each text under the policy and under the reference. The host averages over
pairs in float64, so that the means do not depend on batches or devices.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import numpy as np

from haliax_ext.mapping import AxisMapping
from haliax_ext.planner import ShardingPlan
from haliax_ext.prefetch import results
from haliax_ext.program import Input, Program
from haliax_ext.pytree import PyTree
from levanter.commands.train.dpo.setup import Preferences
from levanter.commands.train.task import Running, TrainingEvaluation
from levanter.commands.train.trained_run import TrainedRun, under
from levanter.data import PairRows, pair_targets
from levanter.distributed.compile_barrier import jit_together
from levanter.io import Progress
from levanter.trainer.dpo import PairBatch, alone, pair_logprobs, pair_plan, pair_terms
from levanter.trainer.loop import Pause
from levanter.trainer.loss import in_compute_dtype
from levanter.trainer.objective import LOSS
from levanter.trainer.state import StatePlan
from levanter.trainer.train_state import FROZEN, REFERENCE, TrainState

logger = logging.getLogger(__name__)

PROGRAM = "evaluate_pairs"
TRAINED = "trained"
FETCH_BEHIND = 1


class BoundModels(eqx.Module):
    """The parameters of which policy and reference are bound: one input of the Program.

    Attributes:
        trained: the trained parameters.
        frozen: the frozen rest of it; None for nothing.
        reference: a second model; None for none.
    """

    trained: PyTree
    frozen: PyTree
    reference: PyTree

    @property
    def rest(self) -> PyTree:
        """The second argument of a binding: all that is not trained."""
        return self.frozen if self.reference is None else (self.frozen, self.reference)


def evaluation_resident_plan(plan: StatePlan, reference: ShardingPlan | None) -> ShardingPlan:
    """The placement of the leaves of `BoundModels`."""
    parameters = plan.parameters
    trained = [planned for planned in parameters.leaves if planned.leaf.path not in plan.frozen]
    frozen = [planned for planned in parameters.leaves if planned.leaf.path in plan.frozen]
    groups = {TRAINED: trained, FROZEN: frozen, REFERENCE: () if reference is None else reference.leaves}
    leaves = tuple(under(name, planned) for name, planned_leaves in groups.items() for planned in planned_leaves)
    return ShardingPlan(
        mesh=parameters.mesh, mappings=parameters.mappings, leaves=leaves, findings=(), hbm_bytes=parameters.hbm_bytes
    )


def evaluate_pairs_program(run: TrainedRun, pairs: Preferences, rows: int) -> Program:
    """The Program that scores a batch of pairs: (held, tokens, targets) → log-probabilities, `[pairs, 2]` by model.

    The first output is the policy's, the second, if the reference is an input, the reference's.

    Args:
        run: the training run.
        pairs: its reference.
        rows: pairs of a batch.
    """
    plan, precision, chunk = run.state_plan, run.precision, run.head(rows).chunk
    batch = run.objective.abstract_batch(
        hax.Axis(run.resolved.batch_axis, rows), hax.Axis("position", run.config.positions)
    )
    # With stored log-probabilities, or without a reference, only the policy is an input.
    single = pairs.evaluates_alone
    bind = alone if single else pairs.bind
    model_plan = pair_plan(plan.model, None) if single else pairs.model_plan(plan)
    second = None if single else pairs.resident

    def evaluate(bound: BoundModels, tokens: hax.NamedArray, targets: hax.NamedArray) -> tuple[jax.Array, ...]:
        models = in_compute_dtype(bind(bound.trained, bound.rest), precision.compute, model_plan)
        scored = PairBatch(tokens=tokens, targets=targets)
        # Policy first: `_score` stores the outputs in this order.
        scorers = [model for model in (models.policy, models.reference) if model is not None]
        return tuple(pair_logprobs(model, scored, chunk=chunk) for model in scorers)

    value = BoundModels(trained=run.state.model, frozen=run.frozen, reference=None if second is None else second.module)
    return Program(
        name=PROGRAM,
        function=evaluate,
        inputs=(
            Input(
                name="held",
                value=value,
                placement=evaluation_resident_plan(plan, None if second is None else second.plan),
            ),
            Input(name="tokens", value=batch.tokens, placement=run.resolved.mappings.compute),
            Input(name="targets", value=batch.targets, placement=run.resolved.mappings.compute),
        ),
        mappings=run.resolved.mappings,
        # `[pairs, 2]` numbers that every host reads, hence replicated.
        out_placement=AxisMapping(),
        matmul_precision=precision.matmul,
        compiler_options=run.compiler.working["score"],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSet:
    """Pairs to evaluate.

    Attributes:
        name: of the set, in metrics' names.
        rows: of which set they are.
        numbers: indices of its pairs in `rows`.
        reference: float32 `[pairs, 2]`: the reference's stored log-probabilities; None if they are not stored.
    """

    name: str
    rows: PairRows
    numbers: np.ndarray
    reference: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """The result of an evaluation: means over the pairs of each set.

    Attributes:
        sets: set → name of a metric → mean.
        pairs: of each set.
    """

    sets: Mapping[str, Mapping[str, float]]
    pairs: Mapping[str, int]

    def metrics(self) -> dict[str, float]:
        """By upstream's names: `eval/<set>/loss`, `eval/<set>/dpo_accuracy`, …; `eval/loss` is of all pairs."""
        by_set = {f"eval/{name}/{key}": value for name, means in self.sets.items() for key, value in means.items()}
        return {"eval/loss": self.mean(LOSS), **by_set}

    def mean(self, name: str) -> float:
        """The mean of a metric over all pairs."""
        total = sum(self.pairs.values())
        # Weighted by the number of pairs, so that sets of different sizes count by pair.
        return sum(means[name] * self.pairs[set_name] for set_name, means in self.sets.items()) / max(total, 1)

    @property
    def not_finite(self) -> list[str]:
        """The sets whose loss is no number."""
        return [name for name, means in self.sets.items() if not np.isfinite(means[LOSS])]

    @property
    def headline(self) -> str:
        """One line for the user."""
        return str(self)

    def __str__(self) -> str:
        accuracy = self.mean("dpo_accuracy")
        return f"validation loss {self.mean(LOSS):.4f}, {accuracy:.1%} of {sum(self.pairs.values()):,} pairs preferred"


@dataclass(kw_only=True)
class EvaluatePairs(TrainingEvaluation):
    """Evaluates between two steps, and logs the results under the last step's number.

    Attributes:
        program: `evaluate_pairs`.
        running: the run.
        pairs: its reference.
        sets: the pairs.
        text_evaluation: evaluates text at the same steps; None for none.
        result: of the last evaluation.
    """

    program: Program
    running: Running
    pairs: Preferences
    sets: Sequence[PairSet]
    text_evaluation: Pause | None = None
    result: PairResult | None = None

    def due(self, taken: int) -> bool:
        """Whether an evaluation is due; the run's last step is always evaluated."""
        steps = self.pairs.config.scheduled_eval_steps
        on_time = taken % self.pairs.config.trainer.steps_per_eval == 0 if steps is None else taken in steps
        return on_time or taken == self.running.stop

    def __call__(self, taken: int, state: TrainState) -> None:
        """Scores all sets."""
        if self.sets:
            self._score(taken, state)
        if self.text_evaluation is not None:
            self.text_evaluation(taken, state)

    def _score(self, taken: int, state: TrainState) -> None:
        running, max_batches = self.running, self.pairs.config.trainer.max_eval_batches
        rows = self.program.inputs[1].value.axes[0].size
        # The limit counts batches of each set.
        most = None if max_batches is None else max_batches * rows
        # With stored log-probabilities the Program has no input for a reference.
        reference = None if self.pairs.evaluates_alone else running.reference
        models = BoundModels(trained=state.eval_params, frozen=running.frozen, reference=reference)
        chosen = [pair_set.numbers[:most] for pair_set in self.sets]
        batches = list(_batches(self.sets, chosen, rows))
        # Axes: policy or reference, pair, chosen or rejected.
        scores = [np.zeros((2, len(numbers), 2), np.float64) for numbers in chosen]
        # Tokens of each text that count, for losses that normalize by length.
        counts = [np.zeros((len(numbers), 2), np.float64) for numbers in chosen]
        with Progress("evaluating", total=len(batches), unit="batches", show=running.session.show) as progress:
            inputs = (((n, start), pair_inputs(self.sets[n], indices, rows)) for n, start, indices in batches)
            for (n, start), logprobs in results(
                self.program, running.mesh, models, inputs, behind=FETCH_BEHIND, jit=jit_together
            ):
                # The last batch of a set is padded with pairs that are cut off here.
                stop = min(start + rows, len(chosen[n]))
                for which, sums in enumerate(logprobs):
                    scores[n][which, start:stop] = sums[: stop - start]
                progress.advance(1)
        for n, (pair_set, numbers) in enumerate(zip(self.sets, chosen, strict=True)):
            # Token counts come from the targets, which the host has anyway; the Program need not return them.
            for start in range(0, len(numbers), rows):
                _, targets = pair_targets(pair_set.rows.take(numbers[start : start + rows]))
                counts[n][start : start + rows] = (targets >= 0).sum(axis=-1)
            # Stored log-probabilities take the place of outputs that the Program did not compute.
            if pair_set.reference is not None:
                scores[n][1] = pair_set.reference[: len(numbers)]
        self.result = PairResult(
            sets={pair_set.name: self._means(scores[n], counts[n]) for n, pair_set in enumerate(self.sets)},
            pairs={pair_set.name: len(numbers) for pair_set, numbers in zip(self.sets, chosen, strict=True)},
        )
        running.session.tracker.log(self.result.metrics(), step=max(taken - 1, 0))
        logger.info("step %d: %s", taken, self.result.headline)

    def _means(self, scores: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        # A loss without a reference ignores `scores[1]`, which is then all zeros.
        config = self.pairs.config
        reference = scores[1] if config.loss.has_reference else None
        terms = pair_terms(config.loss, config.beta, scores[0], counts, reference, xp=np)
        return {name: float(np.mean(values)) for name, values in terms.items()}


def _batches(sets: Sequence[PairSet], chosen: Sequence[np.ndarray], rows: int) -> Iterator[tuple[int, int, np.ndarray]]:
    for n in range(len(sets)):
        # Batches never mix sets, since metrics are by set.
        for start in range(0, len(chosen[n]), rows):
            yield n, start, chosen[n][start : start + rows]


def pair_inputs(pair_set: PairSet, numbers: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of a batch, `[rows, 2, positions]`; missing pairs are padding that does not count."""
    tokens, targets = pair_targets(pair_set.rows.take(numbers))
    # A target of -1 counts in no sum.
    missing = [(0, rows - len(numbers)), (0, 0), (0, 0)]
    return np.pad(tokens, missing), np.pad(targets, missing, constant_values=-1)
