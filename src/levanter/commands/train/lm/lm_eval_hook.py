"""Evaluation on lm-evaluation-harness tasks during training: `eval_harness:` of a training run.

Every `eval_harness_steps` steps, and after the last one, the tasks are evaluated with the current parameters, adapters
bound, by Programs of the same form as those of `eval_harness`. Results go to the trackers under lm_eval's names, and
into a folder of the run. Process 0 runs lm_eval; the other processes execute the tables of rows that it broadcasts.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from jax.sharding import Mesh

from haliax_ext.program import Program
from levanter.commands.model.eval_prompts import TaskScoring, context_length, describe_task_scoring
from levanter.commands.model.live_generation import LiveEngine, LiveGeneration
from levanter.commands.model.text_generator import TextGenerator
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.task import Running
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import Tokenizer
from levanter.distributed.agreement import is_process_0
from levanter.eval.harness.broadcast import follow_process_0, lead_processes
from levanter.eval.harness.config import listed
from levanter.eval.harness.driver import run_tasks, select_samples
from levanter.eval.harness.results import date_id, result_files, results_table, tracker_metrics
from levanter.eval.harness.scoring import Scorer
from levanter.eval.harness.task_discovery import discover_tasks
from levanter.io import OutputError, atomic_write, join
from levanter.models.base import LmHeadModel
from levanter.runplan import Check, Recorder, Workload
from levanter.trainer.batch_plan import BatchPlan
from levanter.trainer.loss import in_compute_dtype
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import bind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingHarness:
    """The harness tasks of a training run and the Programs that score them.

    Attributes:
        scoring: the tasks, and the Programs that score their requests.
        run: the training run.
        checks: lines of the plan.
        length: positions of the longest request.
        generation: the engine; None if no task generates text.
    """

    scoring: TaskScoring
    run: TrainedRun
    checks: tuple[Check, ...]
    length: int
    generation: LiveGeneration | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The Programs of an evaluation."""
        return tuple(self.scoring.programs.values())

    @property
    def coresident(self) -> Mapping[str, int]:
        """Scoring keeps nothing on the devices beside its inputs."""
        return {}

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The work of all evaluations."""
        config: TrainLmConfig = self.run.config
        # Rounded up: the last step is evaluated too, whether or not the interval divides the run.
        times = -(-config.trainer.num_train_steps // config.eval_harness_steps)
        return self.scoring.workloads(times, reason="the tasks' documents are not available here")

    def start(self, running: Running) -> "HarnessEvaluation":
        """See `BetweenSteps.start`."""
        config: TrainLmConfig = self.run.config
        return HarnessEvaluation(
            harness=self,
            frozen=running.frozen,
            mesh=running.mesh,
            tracker=running.session.tracker,
            folder=join(str(config.trainer.log_dir), running.session.run_id, "harness"),
            name=running.session.run_id,
            every=config.eval_harness_steps,
            last=running.stop,
            show=running.session.show,
            engine=None if self.generation is None else LiveEngine(self.generation, running.mesh),
        )


def find_harness(run: TrainedRun, tokenizer: Tokenizer | None, largest: BatchPlan) -> TrainingHarness | None:
    """The harness of a run; None without one.

    Args:
        run: the training run.
        tokenizer: of the data; None if it is not available here.
        largest: the batch whose microbatch rows are used, unless the configuration sets those of evaluation.
    """
    config = run.config.eval_harness
    if config is None or not config.task_spec:
        return None
    tasks = discover_tasks(config, listed(config.include_path))
    length, length_checks = context_length(config.max_length, run.model, run.config.positions)
    per_device = run.config.trainer.per_device_eval_parallelism

    # As in `evaluate`: parameters are cast to the compute dtype inside the Program.
    def usable(model: LmHeadModel) -> LmHeadModel:
        return in_compute_dtype(model, run.precision.compute, run.state_plan.model)

    scoring = describe_task_scoring(
        tasks,
        config,
        bind(run.state.model, run.frozen),
        model=run.model,
        Vocab=run.Vocab,
        tokenizer=tokenizer,
        resolved=run.resolved,
        platform=run.platform,
        placement=run.state_plan.model,
        precision=run.precision,
        compiler_options=run.compiler.working["score"],
        length=length,
        tokens=length * (largest.per_device if per_device == -1 else per_device),
        fixed_rows=per_device != -1,
        usable=usable,
    )
    every = f"every {run.config.eval_harness_steps:,} steps and after the last one"
    requests = "" if scoring.requests is None else f", {scoring.requests.requests:,} requests"
    message = f"{every}{requests}, in rows of {length:,} tokens at most"
    checks = (tasks.check, *length_checks, *scoring.checks, Check(name="harness", status="ok", message=message))
    return TrainingHarness(scoring=scoring, run=run, checks=checks, length=length)


@dataclass(kw_only=True)
class HarnessEvaluation:
    """Evaluates the tasks between two steps, and logs the results under the last step's number.

    Attributes:
        harness: the tasks and their Programs.
        frozen: the part of the model that is not in the state; None for nothing.
        mesh: the devices.
        tracker: where the numbers go.
        folder: of the results, each in a folder of its step.
        name: of the run, for the results.
        every: steps between two evaluations.
        last: the run's last step, which is always evaluated.
        show: whether this process prints.
        engine: over the weights of the run; None if no task generates text.
    """

    harness: TrainingHarness
    frozen: LmHeadModel | None
    mesh: Mesh
    tracker: Recorder
    folder: str
    name: str
    every: int
    last: int
    show: bool
    engine: LiveEngine | None = None

    def due(self, taken: int) -> bool:
        """Whether the tasks are due."""
        return taken % self.every == 0 or taken == self.last

    def __call__(self, taken: int, state: TrainState) -> None:
        """Evaluates all tasks."""
        scoring = self.harness.scoring
        model = bind(state.eval_params, self.frozen)
        scorer = Scorer(programs=scoring.programs, mesh=self.mesh, model=model, cost=scoring.cost)
        texts = self._text_generator(model)
        # lm_eval runs in process 0 only. The others execute the same Programs in the same order until it ends or fails.
        if not is_process_0():
            follow_process_0(scorer, _no_texts if texts is None else texts.follow)
            return
        assert scoring.encoder is not None and scoring.tasks.loaded is not None, "RunPlan.check() comes before a run"
        # Releases the other processes at the end, and passes them an error instead of leaving them in a collective.
        with lead_processes():
            task_results, samples = run_tasks(
                scoring.tasks.loaded,
                scoring.config,
                encoder=scoring.encoder,
                scorer=scorer,
                texts=texts,
                template=scoring.template,
                name=f"{self.name}, step {taken}",
                show=self.show,
            )
        # Numbered from 0, as in `Evaluate`.
        self.tracker.log(tracker_metrics(task_results), step=max(taken - 1, 0))
        logger.info("step %d:\n%s", taken, results_table(task_results))
        where = join(self.folder, f"step-{taken}")
        logged = select_samples(scoring.config, samples)
        try:
            for path, content in result_files(where, task_results, logged, date_id(datetime.now())).items():
                with atomic_write(path) as file:
                    file.write(content)
        except OutputError as error:
            # The numbers are with the trackers, and the run has more to do than to write them twice.
            logger.error("step %d: the harness's results cannot be written in %s: %s", taken, where, error)

    def _text_generator(self, model: LmHeadModel) -> TextGenerator | None:
        """Generates text with the current weights; they are handed over when a task requests text."""
        engine = self.engine
        if engine is None:
            return None
        encoder = self.harness.scoring.encoder
        assert encoder is not None, "RunPlan.check() comes before a run"
        return TextGenerator(
            engine=lambda: engine.over(model),
            tokenizer=encoder.tokenizer,
            seed=self.harness.run.config.trainer.seed,
            show=self.show,
        )


# Without an engine no task generates text, so no list of prompts can arrive here.
def _no_texts() -> None:
    raise AssertionError("a plan without texts must not write any")
