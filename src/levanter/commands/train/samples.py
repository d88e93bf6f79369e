"""Samples of fixed prompts between training steps: `sample_prompts` and `sample_every`.

Every `sample_every` steps, and after the last one, the current parameters continue the prompts. The texts are a
function of the weights alone: requests, seeds and Programs are those of `generate` with a file of the same prompts, so
`generate` over the checkpoint of a step gives the samples of that step. They go to the trackers as a table, and into a
file of the run.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from haliax_ext.program import Program
from levanter.base.bounded_json import Json
from levanter.commands.model.live_generation import TASK_ROWS, LiveEngine, LiveGeneration, describe_live_generation
from levanter.commands.model.text_generator import GeneratedText, generate_texts
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.task import Running
from levanter.commands.train.trained_run import TrainedRun
from levanter.data import Tokenizer
from levanter.distributed.agreement import agreed
from levanter.inference.prompts import PromptReader, PromptRequest, PromptRules
from levanter.inference.requests import Request
from levanter.inference.scheduler import RefusedError
from levanter.io import OutputError, atomic_write, exists, join
from levanter.models.base import LmHeadModel
from levanter.runplan import Check, Recorder, Target, Workload
from levanter.tracker import MetricsTable
from levanter.trainer.train_state import TrainState
from levanter.trainer.trainable import bind

logger = logging.getLogger(__name__)

METRIC = "samples"
"""The name of the table in trackers, and of the folder of the files."""
KEY = "sample_prompts"
SHOWN = 4
"""Samples that are logged; all are in the file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveTexts:
    """The texts that a run generates between its steps: samples, and answers to tasks of the harness.

    Attributes:
        config: of the run.
        generation: the engine; None if it cannot be described, which is among the checks.
        tokenizer: of the run; None if it is not available here.
        requests: one for each of `sample_prompts`.
        checks: lines of the plan.
    """

    config: TrainLmConfig
    generation: LiveGeneration | None
    tokenizer: Tokenizer | None
    requests: tuple[Request, ...]
    checks: tuple[Check, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The Programs of the engine, which the harness runs too."""
        return () if self.generation is None else self.generation.programs

    @property
    def coresident(self) -> Mapping[str, int]:
        """Bytes of the copied weights."""
        return {} if self.generation is None else self.generation.coresident

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The work of the engine's Programs."""
        return () if self.generation is None else self.generation.workloads

    def start(self, running: Running) -> "SamplesBetweenSteps | None":
        """The pause that generates the samples; None if only the harness generates texts."""
        if self.config.sample_every is None:
            return None
        assert self.generation is not None and self.tokenizer is not None, "RunPlan.check() comes before a run"
        pause = SamplesBetweenSteps(
            texts=self,
            engine=LiveEngine(self.generation, running.mesh),
            frozen=running.frozen,
            tracker=running.session.tracker,
            folder=join(str(self.config.trainer.log_dir), running.session.run_id, METRIC),
            every=self.config.sample_every,
            last=running.stop,
            show=running.session.show,
        )
        # An attempt that was killed between its checkpoint and its samples is made up for.
        first = running.first
        if first and pause.due(first) and agreed("its samples", str(pause.missing(first))) == "True":
            assert running.state is not None
            pause(first, running.state)
        return pause


def find_live_texts(
    run: TrainedRun, tokenizer: Tokenizer | None, target: Target, *, task_length: int | None
) -> LiveTexts | None:
    """The texts that a run generates between its steps; None if it generates none.

    Args:
        run: the training run.
        tokenizer: of the data; None if it is not available here.
        target: the devices.
        task_length: positions of the longest request of the harness that generates text; None if no task does.
    """
    config, prompts = run.config, run.config.sample_prompts or []
    if task_length is None and not prompts:
        return None
    generation, checks, requests = None, [], ()
    # All samples run at once, if there are rows for them.
    texts = max(len(prompts) * config.generation.sampling.n, 0 if task_length is None else TASK_ROWS)
    # Rows are no longer than what was trained, unless a task has longer requests.
    length = max(config.positions, task_length or 0)
    # A placement with errors has no shards to describe an engine on; those errors are in the plan already.
    if run.state_plan.parameters.errors:
        return None
    try:
        generation = describe_live_generation(run.live_model, config.generation, target, texts=texts, length=length)
    except ValueError as problem:
        key = KEY if prompts else "eval_harness.task_spec"
        error = ValueError(f"{key}: text is generated with the keys of `generation:`\n{problem}")
        checks.append(Check(name="generation", status="error", message=str(error), error=error))
    if generation is not None:
        checks += generation.checks
        if task_length is not None and (context := generation.schedule.context) < task_length:
            error = ValueError(
                f"generation.max_seq_len: {context:,} positions, and requests of eval_harness have up to "
                f"{task_length:,} (eval_harness.max_length)"
            )
            checks.append(Check(name="generation", status="error", message=str(error), error=error))
        if prompts:
            requests, prompt_checks = _read_prompts(config, generation, tokenizer, vocab_size=run.model.vocab_size)
            checks += prompt_checks
    return LiveTexts(config=config, generation=generation, tokenizer=tokenizer, requests=requests, checks=tuple(checks))


def _read_prompts(
    config: TrainLmConfig, generation: LiveGeneration, tokenizer: Tokenizer | None, *, vocab_size: int | None
) -> tuple[tuple[Request, ...], list[Check]]:
    """The requests of the prompts, and what is wrong with them."""
    sampling = generation.config.sampling
    if tokenizer is None:
        error = ValueError(f"{KEY}: prompts are texts, and the run's tokenizer is not available (data.tokenizer)")
        return (), [Check(name=METRIC, status="unchecked", message=str(error), error=error)]
    # The rules of `generate` with its defaults, so that ids and seeds are the same.
    assert vocab_size is not None
    rules = PromptRules(
        vocab_size=vocab_size,
        seed=config.trainer.seed,
        sampling=sampling,
        penalties=generation.config.penalties,
    )
    reader = PromptReader(tokenizer, generation.schedule, rules)
    requests, checks = [], []
    for n, prompt in enumerate(config.sample_prompts or []):
        try:
            # The ids are the numbers of lines, from which a seed is derived as for a file of these prompts.
            requests.append(reader.request(PromptRequest(line=n + 1, id=str(n + 1), prompt=prompt, params=sampling)))
        except ValueError as problem:
            # Only a request that no row can hold depends on the size of the rows.
            advice = "\n  → shorten it or generation.sampling.max_tokens, or raise generation.max_seq_len"
            error = ValueError(f"{KEY}[{n}]: {problem}{advice if isinstance(problem, RefusedError) else ''}")
            checks.append(Check(name=METRIC, status="error", message=str(error), error=error))
    if not checks:
        message = (
            f"{len(requests):,} prompts every {config.sample_every:,} steps and after the last one, at most "
            f"{sampling.max_tokens or generation.schedule.context:,} tokens each, "
            f"{generation.engine.cache.rows} rows at a time"
        )
        checks.append(Check(name=METRIC, status="ok", message=message))
    return tuple(requests), checks


def _record(taken: int, prompt: str, text: GeneratedText) -> dict[str, Json]:
    """A sample as an object of the file."""
    record: dict[str, Json] = {
        "step": taken,
        "prompt": prompt,
        "choice": text.choice,
        "text": text.text,
        "tokens": [*text.tokens],
        "finish_reason": text.reason,
    }
    return record if text.error is None else {**record, "error": text.error}


@dataclass(kw_only=True)
class SamplesBetweenSteps:
    """Generates the samples between two steps.

    Attributes:
        texts: their description.
        engine: over the weights of the run.
        frozen: the part of the model that is not in the state; None for nothing.
        tracker: receives the table.
        folder: of the files.
        every: steps between two lists of samples.
        last: the run's last step, which always has samples.
        show: whether this process prints.
    """

    texts: LiveTexts
    engine: LiveEngine
    frozen: LmHeadModel | None
    tracker: Recorder
    folder: str
    every: int
    last: int
    show: bool

    def due(self, taken: int) -> bool:
        """Whether samples are due."""
        return taken % self.every == 0 or taken == self.last

    def missing(self, taken: int) -> bool:
        """Whether the file of a step is not there."""
        return not exists(self._path(taken))

    def _path(self, taken: int) -> str:
        return join(self.folder, f"step-{taken}.jsonl")

    def __call__(self, taken: int, state: TrainState) -> None:
        """Generates, logs and stores the samples of a step."""
        config, tokenizer = self.texts.config, self.texts.tokenizer
        assert tokenizer is not None
        with self.engine.over(bind(state.eval_params, self.frozen)) as started:
            # The other processes have executed the same calls.
            if started.engine is None:
                return
            texts = generate_texts(started.engine, self.texts.requests, tokenizer)
        prompts = config.sample_prompts or []
        # Requests are numbered from 1, like the lines of a file.
        records = [_record(taken, prompts[int(text.request) - 1], text) for text in texts]
        for text in texts:
            if text.error is not None:
                logger.error("step %d: the sample of prompt %s: %s", taken, text.request, text.error)
        if self.show:
            shown = "\n".join(f"{prompts[int(text.request) - 1]!r} → {text.text!r}" for text in texts[:SHOWN])
            logger.info("step %d: samples\n%s", taken, shown)
        columns = ("step", "prompt", "choice", "text", "finish_reason")
        rows = tuple(
            (taken, prompts[int(text.request) - 1], text.choice, text.text, text.reason or text.error) for text in texts
        )
        # Numbered from 0, as the metrics of steps and of evaluations are.
        self.tracker.log({METRIC: MetricsTable(columns=columns, rows=rows)}, step=max(taken - 1, 0))
        path = self._path(taken)
        try:
            with atomic_write(path) as file:
                lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                file.write(lines.encode(errors="backslashreplace"))
        except OutputError as error:
            # The trackers have them, and the run has more to do than to write them twice.
            logger.error("step %d: samples cannot be written in %s: %s", taken, path, error)
