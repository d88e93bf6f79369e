"""Evaluates a model on lm_eval's tasks: multiple choice, log-likelihood of texts, and generated text.

    python -m levanter.main.eval_harness --config_path config/harness/demo.yaml --tasks hellaswag,boolq

The steps: process 0 loads the tasks with their documents; the run is described (model, mesh, rows, Programs) and
checked; the weights are streamed into their final shards; lm_eval passes all requests of a kind at once, which become
a table that every process executes; lm_eval computes metrics from the answers.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from haliax_ext.pytree import PyTree
from levanter.commands.cli.outputs import write_all
from levanter.commands.cli.runner import run_config
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.harness.plan import NAME, HarnessWork, describe
from levanter.commands.model.pretrained import load_pretrained
from levanter.commands.model.scoring_common import result_output
from levanter.commands.model.text_generator import ProcessEngine, TextGenerator, process_engine
from levanter.config import ExplicitKeys
from levanter.distributed.agreement import is_process_0
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.harness import results
from levanter.eval.harness.broadcast import follow_process_0, lead_processes
from levanter.eval.harness.driver import run_tasks, select_samples
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.page import harness_page
from levanter.eval.harness.results import Sample, parse_samples, read_run
from levanter.eval.harness.scoring import Scorer
from levanter.eval.harness.significance import Difference, compare, differences_table
from levanter.inference.engine import DeviceRunner, make_schedule
from levanter.io import Output, join
from levanter.runplan import OK, EntryPoint, RunPlan, Session


@dataclass(frozen=True, kw_only=True)
class HarnessResult:
    """The result of a run.

    Attributes:
        results: lm_eval's dictionary with a block `levanter`, on process 0; empty on other processes.
        samples: of each task.
        loading: the report of loading.
        seconds: of everything after loading.
    """

    results: Mapping[str, Any] = field(default_factory=dict[str, Any])
    samples: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loading: LoadReport | None = None
    seconds: float = 0.0


def execute(plan: RunPlan[HarnessWork], mesh: Mesh | None, session: Session | None = None) -> HarnessResult:
    """Loads the model and evaluates it; only Programs of `plan` are executed."""
    assert mesh is not None, "models run on devices"
    work, show = plan.work, session is not None and session.show
    # All processes load, each its own shards.
    loaded = load_pretrained(work.pretrained, mesh, show=show)
    model = with_arrays(work.pretrained.abstract, loaded.arrays)
    scorer = Scorer(programs=work.scoring.programs, mesh=mesh, model=model, cost=work.scoring.cost)
    texts = None if work.texts is None else _text_generator(work.texts, mesh, model, show=show)
    began = time.perf_counter()
    if not is_process_0():
        follow_process_0(scorer, _nothing if texts is None else texts.follow)
        return HarnessResult(loading=loaded.report, seconds=time.perf_counter() - began)
    # Releases the other processes at the end, and passes them an error.
    with lead_processes():
        results, samples = _run_lm_eval(plan, scorer, texts, show=show)
    return HarnessResult(results=results, samples=samples, loading=loaded.report, seconds=time.perf_counter() - began)


def _text_generator(work: GenerateWork, mesh: Mesh, model: PyTree, *, show: bool) -> TextGenerator:
    def engine() -> AbstractContextManager[ProcessEngine]:
        rows = DeviceRunner(work.programs, mesh, model, jit=jit_together)
        return process_engine(rows, make_schedule(work.programs, share_prefixes=work.config.inference.share_prefixes))

    return TextGenerator(engine=engine, tokenizer=work.pretrained.tokenizer, seed=work.config.trainer.seed, show=show)


def _nothing() -> None:
    raise AssertionError("a plan without texts must not write any")


def _run_lm_eval(
    plan: RunPlan[HarnessWork], scorer: Scorer, texts: TextGenerator | None, *, show: bool
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Runs lm_eval on process 0."""
    work, scoring = plan.work, plan.work.scoring
    assert scoring.encoder is not None and scoring.tasks.loaded is not None, "RunPlan.check() comes before a run"
    results, samples = run_tasks(
        scoring.tasks.loaded,
        work.config.harness,
        encoder=scoring.encoder,
        scorer=scorer,
        texts=texts,
        template=scoring.template,
        name=work.pretrained.checkpoint.description,
        show=show,
    )
    facts = {"mesh": str(plan.mesh), "precision": str(work.pretrained.precision), "devices": plan.target.devices}
    results["levanter"] = {"plan": facts, **results["levanter"]}
    return results, samples


def finish(plan: RunPlan[HarnessWork], done: HarnessResult, session: Session) -> int:
    """Prints the results, writes their files, and logs metrics to trackers."""
    # Only process 0 has results.
    if not done.results:
        return OK
    (output,) = outputs(plan, session)
    config = plan.work.config
    metrics = results.tracker_metrics(done.results)
    samples = {task: parse_samples(lines) for task, lines in done.samples.items()}
    try:
        if session.show:
            log = done.results["levanter"]
            print(results.results_table(done.results))
            for task, reason in log["no_bits_per_byte"].items():
                print(f"no bits_per_byte and byte_perplexity for {task}: {reason}")
            count = sum(log["requests"].values())
            print(
                f"{count:,} requests, {log['tokens']:,} tokens in {log['seconds']:.1f} s, compilation included; "
                f"{log['tokens_asked_alone']:,} tokens were each asked alone",
                flush=True,
            )
        date = results.date_id(datetime.now())
        logged = select_samples(config.harness, done.samples)
        # Compared after the results exist; a failed comparison must not lose them.
        differences, problem = _differences(config.against, samples)
        page = harness_page(
            done.results,
            {task: parse_samples(lines) for task, lines in logged.items()},
            title=f"{plan.work.pretrained.checkpoint.description.split(' (')[0]} on {', '.join(done.samples)}",
            facts=_facts(plan, done),
            differences=differences,
            against=f"this run beside {config.against}",
        )
        files = {join(output.path, f"page_{date}.html"): page.encode()}
        paths = write_all({**files, **results.result_files(output.path, done.results, logged, date)})
        if session.show:
            if differences:
                print(f"\nbeside {config.against}:\n{differences_table(differences)}")
            print(f"results in {paths[-1]}\npage in {paths[0]}")
        # Raised last, after everything is written.
        if problem is not None:
            raise problem
    # Metrics go to trackers even if a file cannot be written.
    finally:
        session.tracker.log(metrics, step=0)
        session.tracker.log_summary(metrics)
    return OK


def _differences(
    against: str | None, samples: Mapping[str, Sequence[Sample]]
) -> tuple[list[Difference], HarnessError | None]:
    """The comparison with another run, or the error that prevents it: results are written in any case."""
    try:
        return ([] if against is None else compare(samples, read_run(against)[1])), None
    except HarnessError as error:
        return [], error


def _facts(plan: RunPlan[HarnessWork], done: HarnessResult) -> dict[str, str]:
    """The facts of the run on its page."""
    work, log = plan.work, done.results["levanter"]
    config = work.config.harness
    return {
        "model": work.pretrained.checkpoint.description,
        "precision": str(work.pretrained.precision),
        "mesh": f"{plan.mesh} of {plan.target.devices} {plan.target.kind}",
        "requests": ", ".join(f"{count:,} {kind}" for kind, count in log["requests"].items()),
        "request digest": log["request_digest"][:16],
        "documents": "all" if config.max_examples is None else f"{config.max_examples:,} of each task at most",
        "conversations": "yes" if config.apply_chat_template else "no",
        "lm_eval": str(done.results.get("lm_eval_version")),
    }


def outputs(plan: RunPlan[HarnessWork], session: Session) -> tuple[Output, ...]:
    """The folder of the results."""
    return (result_output(plan.work.config, session.run_id, "harness", kind="folder"),)


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=EvalHarnessConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
)


def main(config: EvalHarnessConfig, *, written: ExplicitKeys | None = None) -> int:
    """Evaluates a model on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
