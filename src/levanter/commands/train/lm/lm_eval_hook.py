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
from levanter.commands.model.eval_prompts import (
    batch_limits,
    context_length,
    conversation_template,
    query_encoder,
    reading_checks,
    rows_flops,
    rows_reach,
    sampling_checks,
)
from levanter.commands.model.text_generator import TextGenerator
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.live_generation import LiveEngine, LiveGeneration
from levanter.commands.train.task import Running
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import Tokenizer
from levanter.data.chat import ChatTemplate
from levanter.distributed.barrier import is_process_0
from levanter.eval.harness.broadcast import follow_process_0, lead_processes
from levanter.eval.harness.config import HarnessConfig, listed
from levanter.eval.harness.driver import run_tasks, select_samples
from levanter.eval.harness.encoding import QueryEncoder
from levanter.eval.harness.packing import RowShape, row_shapes
from levanter.eval.harness.request_table import RequestCount
from levanter.eval.harness.results import date_id, result_files, results_table, tracker_metrics
from levanter.eval.harness.scoring import Scorer, score_programs
from levanter.eval.harness.task_discovery import DiscoveredTasks, count_requests, discover_tasks
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
        config: the block.
        tasks: the selected tasks.
        encoder: encodes the texts; None without a tokenizer.
        template: formats conversations; None for none.
        scoring: the Programs that score rows of tokens, one for each shape.
        run: the training run.
        counted: requests, and executions of each Program, in one evaluation; None if unknown here.
        checks: lines of the plan.
        length: positions of the longest request.
        generation: the engine; None if no task generates text.
    """

    config: HarnessConfig
    tasks: DiscoveredTasks
    encoder: QueryEncoder | None
    template: ChatTemplate | None
    scoring: Mapping[RowShape, Program]
    run: TrainedRun
    counted: RequestCount | None
    checks: tuple[Check, ...]
    length: int
    generation: LiveGeneration | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The Programs of an evaluation."""
        return tuple(self.scoring.values())

    @property
    def coresident(self) -> Mapping[str, int]:
        """Scoring keeps nothing on the devices beside its inputs."""
        return {}

    def cost(self, shape: RowShape) -> float:
        """FLOPs of a batch."""
        return rows_flops(self.run.model, self.run.Vocab.size, shape, "full")

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The work of all evaluations."""
        config: TrainLmConfig = self.run.config
        # Rounded up: the last step is evaluated too, whether or not the interval divides the run.
        times = -(-config.trainer.num_train_steps // config.eval_harness_steps)
        reason = "the tasks' documents are not available here"
        if self.counted is not None:
            reason = f"{self.counted.reason}, {times:,} times"
        return tuple(
            Workload(
                program=shape.name,
                tokens=shape.rows * shape.length,
                unit="tokens",
                items=shape.rows * shape.length,
                flops_full=self.cost(shape),
                flops_causal=rows_flops(self.run.model, self.run.Vocab.size, shape, "causal"),
                executions=None if self.counted is None else times * self.counted.executions.get(shape.name, 0),
                reason=reason,
            )
            for shape in self.scoring
        )

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
    checks = [tasks.check, *sampling_checks(logged=config.sample_logging.logs)]
    length, length_checks = context_length(config.max_length, run.model, run.config.positions)
    checks += length_checks
    per_device = run.config.trainer.per_device_eval_parallelism
    rows = largest.per_device if per_device == -1 else per_device
    # Rows may be longer than the context if their segments are not; `branches`: segments may share a prefix.
    longest, branches = rows_reach(run.model, run.resolved, run.platform, length=length, tokens=rows * length)
    checks += reading_checks(run.model, longest)
    shapes = row_shapes(longest, tokens=rows * length, ways=run.resolved.batch_ways, branches=branches)

    encoder, encoder_checks = query_encoder(tokenizer, length)
    template, template_checks = conversation_template(tokenizer, required=config.apply_chat_template)
    checks += [*encoder_checks, *template_checks]

    def cost(shape: RowShape) -> float:
        return rows_flops(run.model, run.Vocab.size, shape, "full")

    # A configured number of rows is used as it is. Otherwise the batch's shape may follow the requests, within these
    # limits.
    batch_shapes = batch_limits(run.resolved, run.platform) if per_device == -1 else None
    counted, problem = count_requests(tasks, config, encoder, template, shapes, cost, batch_shapes)
    checks += [] if problem is None else [problem]
    shapes = shapes if counted is None else counted.shapes

    # As in `evaluate`: parameters are cast to the compute dtype inside the Program.
    def usable(model: LmHeadModel) -> LmHeadModel:
        return in_compute_dtype(model, run.precision.compute, run.state_plan.model)

    programs = score_programs(
        bind(run.state.model, run.frozen),
        shapes,
        mappings=run.resolved.mappings,
        placement=run.state_plan.model,
        batch_axis=run.resolved.batch_axis,
        matmul_precision=run.precision.matmul,
        compiler_options=run.compiler.working["score"],
        usable=usable,
    )
    every = f"every {run.config.eval_harness_steps:,} steps and after the last one"
    requests = "" if counted is None else f", {counted.requests:,} requests"
    checks.append(
        Check(name="harness", status="ok", message=f"{every}{requests}, in rows of {length:,} tokens at most")
    )
    return TrainingHarness(
        config=config,
        tasks=tasks,
        encoder=encoder,
        template=template,
        scoring=programs,
        run=run,
        counted=counted,
        checks=tuple(checks),
        length=length,
    )


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
        harness = self.harness
        model = bind(state.eval_params, self.frozen)
        scorer = Scorer(programs=harness.scoring, mesh=self.mesh, model=model, cost=harness.cost)
        texts = self._text_generator(model)
        # lm_eval runs in process 0 only. The others execute the same Programs in the same order until it ends or fails.
        if not is_process_0():
            follow_process_0(scorer, _no_texts if texts is None else texts.follow)
            return
        assert harness.encoder is not None and harness.tasks.loaded is not None, "RunPlan.check() comes before a run"
        # Releases the other processes at the end, and passes them an error instead of leaving them in a collective.
        with lead_processes():
            task_results, samples = run_tasks(
                harness.tasks.loaded,
                harness.config,
                encoder=harness.encoder,
                scorer=scorer,
                texts=texts,
                template=harness.template,
                name=f"{self.name}, step {taken}",
                show=self.show,
            )
        # Numbered from 0, as in `Evaluate`.
        self.tracker.log(tracker_metrics(task_results), step=max(taken - 1, 0))
        logger.info("step %d:\n%s", taken, results_table(task_results))
        where = join(self.folder, f"step-{taken}")
        logged = select_samples(harness.config, samples)
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
        assert self.harness.encoder is not None, "RunPlan.check() comes before a run"
        return TextGenerator(
            engine=lambda: engine.over(model),
            tokenizer=self.harness.encoder.tokenizer,
            seed=self.harness.run.config.trainer.seed,
            show=self.show,
        )


# Without an engine no task generates text, so no list of prompts can arrive here.
def _no_texts() -> None:
    raise AssertionError("a plan without texts must not write any")
