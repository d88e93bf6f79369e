"""A third kind of training: a student learns to count, and to agree with a frozen teacher.

It has rows of its own (computed, not read), an objective with two terms, a second model, an evaluation with its own
Program, a number that it records with every step, and facts that it records in checkpoints and compares at resume.

As a script, it trains the configuration of a JSON file and kills its process at a step:

    python -m helpers.toy_distillation CONFIG.json STEP
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.mapping import AxisMapping
from haliax_ext.prefetch import place
from haliax_ext.program import Input, Program
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.config_diff import ChangedRunError, ResumeKeys
from levanter.commands.train.describe import training_entry_point
from levanter.commands.train.dpo.reference_logprobs import digest_of_source
from levanter.commands.train.reference_model import find_reference_model
from levanter.commands.train.task import PlannedEvaluation, Running, TaskRun, TrainingEvaluation, TrainingTask
from levanter.commands.train.trained_run import TaskModels, TaskRows
from levanter.config import parse
from levanter.data import next_tokens
from levanter.data.train_dataset import BatchSchedule
from levanter.layers.outputs import Sums
from levanter.models.scoring import has_target, token_logprobs
from levanter.runplan import Check, Session, Target
from levanter.tracker import NoopTracker
from levanter.trainer.device_batches import rows_here
from levanter.trainer.dpo import PairModels, pair_plan, with_other
from levanter.trainer.loss import LmBatch, LmObjective, in_compute_dtype
from levanter.trainer.objective import LOSS, Objective, Term

LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=8)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainLmConfig):
    """Train a student that agrees with a teacher.

    Attributes:
        teacher: Hugging Face files.
        agreement: weight of the squared difference of log-probabilities.
        count_seed: seed of the rows.
        shown: rows that the log shows.
    """

    teacher: str = ""
    agreement: float = 0.5
    count_seed: int = 0
    shown: int = 1


@dataclass(frozen=True, kw_only=True)
class CountingRows:
    """Rows that count up by a random stride: a function of seed and step alone."""

    schedule: BatchSchedule
    seed: int
    vocab: int
    positions: int
    shown: int
    steps: None = None

    @cached_property
    def fingerprint(self) -> str:
        """See `TrainingRows`."""
        facts = (self.seed, self.vocab, self.positions, self.schedule)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def steps_of_epochs(self, epochs: int) -> int:
        """Computed rows have no epochs."""
        raise ValueError(f"epoch: {epochs}, and counting has no end; leave it out")

    def report(self, steps: int) -> list[str]:
        """See `TrainingRows`."""
        return [f"counting rows for {steps} steps", *map(str, self.take(0)[: self.shown].tolist())]

    def take(self, step: int) -> np.ndarray:
        """The rows of a step, int32 `[rows, positions]`."""
        rng = np.random.default_rng((self.seed, step))
        start, stride = rng.integers(0, self.vocab, (2, self.schedule.rows(step), 1))
        return ((start + (1 + stride % 3) * np.arange(self.positions)) % self.vocab).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class DistillObjective(Objective[PairModels, LmBatch]):
    """−log p of the next token, and the squared distance to the teacher's log p."""

    agreement: float

    @property
    def terms(self) -> tuple[Term, ...]:
        """Both are minimized."""
        return (Term(name=LOSS), Term(name="disagreement", weight=self.agreement))

    def abstract_batch(self, Batch: hax.Axis, Pos: hax.Axis) -> LmBatch:
        """That of text without weights or segments."""
        return LmObjective(weights=False, segments=False).abstract_batch(Batch, Pos)

    def rows(self, batch: LmBatch) -> hax.Axis:
        """The first axis."""
        return batch.tokens.axes[0]

    def normalizer(self, batch: LmBatch) -> jax.Array:
        """The number of targets."""
        return hax.sum(batch.counts()).scalar()

    def sums(self, model: PairModels, batch: LmBatch, at) -> Sums:
        """See `Objective.sums`."""
        del at
        student, teacher = logprobs(model, batch)
        counts = batch.counts()
        return Sums(
            {
                LOSS: -hax.sum(student * counts).scalar(),
                "disagreement": hax.sum((student - teacher) ** 2 * counts).scalar(),
            }
        )


def logprobs(model: PairModels, batch: LmBatch) -> tuple[hax.NamedArray, hax.NamedArray]:
    """log p of each target under student and teacher; 0 without a target."""
    valid = has_target(batch.targets)
    student = token_logprobs(model.policy, batch.tokens, batch.targets)
    teacher = jax.lax.stop_gradient(token_logprobs(model.reference, batch.tokens, batch.targets))
    return hax.where(valid, student, 0.0), hax.where(valid, teacher, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistillModels(TaskModels):
    """Student and teacher."""

    bind = staticmethod(with_other)

    def model_plan(self, state):
        """The placement of both."""
        return pair_plan(state.model, self.reference.plan)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The result of an evaluation: the mean squared difference of log-probabilities."""

    value: float

    @property
    def not_finite(self) -> list[str]:
        """See `Result`."""
        return [] if np.isfinite(self.value) else ["agreement"]

    @property
    def headline(self) -> str:
        """See `Result`."""
        return f"disagreement {self.value:.4f}"

    def metrics(self) -> dict[str, float]:
        """See `Result`."""
        return {"eval/disagreement": self.value}


@dataclass(kw_only=True)
class EvaluateAgreement(TrainingEvaluation):
    """Scores rows of a seed that training never has."""

    program: Program
    running: Running
    result: Agreement | None = None

    def due(self, taken: int) -> bool:
        """At an interval, and after the last step."""
        return taken % self.running.run.config.trainer.steps_per_eval == 0 or taken == self.running.stop

    def __call__(self, taken: int, state) -> None:
        """Evaluates."""
        running = self.running
        rows = CountingRows(**{**vars_of(running.rows), "seed": 10**6}).take(0)
        declared = running.batch(0)
        batch = place(declared, {"tokens": rows, "targets": next_tokens(rows)}, running.mesh, first_row=0)
        value = running.jit(self.program.name)(state.eval_params, running.reference, batch)
        self.result = Agreement(value=float(value))
        running.session.tracker.log(self.result.metrics(), step=max(taken - 1, 0))


def vars_of(rows: CountingRows) -> dict:
    return {name: getattr(rows, name) for name in ("schedule", "seed", "vocab", "positions", "shown")}


@dataclass(frozen=True, kw_only=True, eq=False)
class DistillTask(TrainingTask):
    """See the module."""

    config: DistillConfig
    kill_at: int | None = None
    resume_keys = ResumeKeys(reported=frozenset({"agreement"}), silent=frozenset({"shown"}))

    def find_rows(self, tokenizer, *, vocab_size: int) -> TaskRows:
        """Nothing is read."""
        del tokenizer
        return TaskRows(checks=(Check(name="rows", status="ok", message=f"counting modulo {vocab_size}"),))

    def objective(self, model) -> DistillObjective:
        """See `TrainingTask`."""
        del model
        return DistillObjective(agreement=self.config.agreement)

    def find_models(self, run, target) -> DistillModels:
        """The teacher."""
        teacher = find_reference_model(run, target, self.config.teacher)
        return DistillModels(reference=teacher, checks=teacher.checks)

    def between_steps(self, run, largest) -> tuple[PlannedEvaluation, ...]:
        """One Program."""
        rows, models = largest.placed_rows, run.models
        batch = run.objective.abstract_batch(
            hax.Axis(run.resolved.batch_axis, rows), hax.Axis("position", run.config.positions)
        )

        def agreement(student, teacher, batch):
            usable = in_compute_dtype(
                with_other(student, (None, teacher)), run.precision.compute, models.model_plan(run.state_plan)
            )
            mine, theirs = logprobs(usable, batch)
            return jnp.sum((mine.array - theirs.array) ** 2) / jnp.sum(batch.counts().array)

        program = Program(
            name="agreement",
            function=agreement,
            inputs=(
                Input(name="student", value=run.state.model, placement=run.state_plan.model),
                Input(name="teacher", value=models.reference.module, placement=models.reference.plan),
                Input(name="batch", value=batch, placement=run.resolved.mappings.compute),
            ),
            mappings=run.resolved.mappings,
            out_placement=AxisMapping(),
        )

        def start(running: Running) -> EvaluateAgreement:
            return EvaluateAgreement(program=program, running=running)

        return (PlannedEvaluation(programs=(program,), start=start),)

    def build_rows(self, run, *, show: bool) -> CountingRows:
        """See the class."""
        del show
        stages = [(stage.start, stage.plan.rows) for stage in run.batches]
        return CountingRows(
            schedule=BatchSchedule.of(stages),
            seed=self.config.count_seed,
            vocab=run.vocab,
            positions=self.config.positions,
            shown=self.config.shown,
        )

    def check_resumed(self, running: Running, recorded) -> None:
        """The teacher is compared by its contents: a folder may be replaced."""
        if recorded != self._facts(running):
            raise ChangedRunError(f"teacher: {self.config.teacher} has other weights than when the run was saved")

    def start(self, running: Running) -> TaskRun:
        """See `TrainingTask`."""
        facts, rows = self._facts(running), running.rows

        def batches(first: int, stop: int) -> Generator:
            for step in range(first, stop):
                declared = running.batch(step)
                begin, end = rows_here(declared, running.mesh)
                tokens = rows.take(step)[begin:end]
                values = {"tokens": tokens, "targets": next_tokens(tokens)}
                yield step, place(declared, values, running.mesh, first_row=begin)

        def kill(report) -> None:
            if report.step == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        return TaskRun(
            batches=batches,
            listeners=(kill,),
            numbers=lambda step: {"rows/mean_id": float(rows.take(step).mean())},
            metadata=lambda taken: facts,
        )

    def _facts(self, running: Running) -> dict[str, str]:
        return {"teacher": digest_of_source(running.run.models.reference.origin.checkpoint.source)}


ENTRY_POINT = training_entry_point("distill", DistillConfig, lambda config: DistillTask(config=config))


class Logged(NoopTracker):
    """Everything that is logged, by step; also written to a file, line by line."""

    def __init__(self, file: Path | None = None):
        self.steps: dict[int, dict[str, float]] = {}
        self._file = file

    def log(self, metrics, *, step, commit=None):
        self.steps.setdefault(step, {}).update(metrics)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(
                    json.dumps({"step": step, **{k: v for k, v in metrics.items() if "/" in k}}, default=str) + "\n"
                )


def train(document: dict, *, kill_at: int | None = None, file: Path | None = None):
    """(plan, how it ended, what it logged)"""
    config = parse(DistillConfig, overrides=document)
    entry_point = training_entry_point("distill", DistillConfig, lambda c: DistillTask(config=c, kill_at=kill_at))
    plan, tracker = entry_point.describe(config, LOCAL).check(), Logged(file)
    mesh = plan.mesh.build(jax.devices()[:8])
    return plan, entry_point.execute(plan, mesh, Session(run_id="run", tracker=tracker)), tracker


if __name__ == "__main__":
    train(
        json.loads(Path(sys.argv[1]).read_text()), kill_at=int(sys.argv[2]), file=Path(sys.argv[1]).with_suffix(".log")
    )
