"""Needle-in-a-haystack evaluation: which hidden values a model finds in long texts, by task, length and depth.

    python -m levanter.main.eval_needles --hf_checkpoint DIR --lengths '[4096, 8192]' --samples 10

The steps: the run is described (model, mesh, a Program for each length) and checked; the texts are built from a seed,
with lengths in the model's own tokens; the weights are streamed into their final shards; the questions are scored, and
each batch of answers is stored at once, so that the same command resumes a run that was killed. Nothing is generated: a
value counts as found if each of its tokens is the most likely one.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from haliax_ext.prefetch import results
from haliax_ext.pytree import PyTree
from levanter.commands.cli.outputs import write_all
from levanter.commands.cli.runner import run_config
from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.evaluate.needles.plan import NAME, NeedleWork, describe
from levanter.commands.model.pretrained import load_pretrained
from levanter.config import ExplicitKeys
from levanter.distributed.agreement import agreed, is_process_0, require_same
from levanter.distributed.compile_barrier import jit_together
from levanter.eval.needles.page import needle_page
from levanter.eval.needles.program import program_name
from levanter.eval.needles.prompts import NeedleBatch, NeedlePrompt, batches, build_prompts, digest
from levanter.eval.needles.results import (
    RESULTS,
    Answered,
    NeedleAnswer,
    NeedleIdentity,
    NeedleStore,
    needles_table,
    sample_lines,
    summarize_needles,
    tracker_metrics,
)
from levanter.io import Output, Progress, join, leased
from levanter.memorization.books import weights_digest
from levanter.runplan import OK, EntryPoint, NonFiniteResultError, RunPlan, Session

FETCH_BEHIND = 1
"""Batches in flight before a result is fetched: rows are long, so each batch that is lost by a kill is expensive."""
SAMPLES, PAGE = "samples.jsonl", "page.html"


@dataclass(frozen=True, kw_only=True, eq=False)
class NeedlesResult:
    """The result of a run.

    Attributes:
        answered: the questions with their answers, by length, task and number; empty if the folder has a finished run.
        identity: everything that the answers depend on.
        loading: report of the loading; None if nothing was loaded.
        seconds: duration of scoring, compilation included.
        kept: questions that an earlier run had scored.
    """

    answered: Answered
    identity: NeedleIdentity
    loading: LoadReport | None
    seconds: float
    kept: int


def execute(plan: RunPlan[NeedleWork], mesh: Mesh | None, session: Session | None = None) -> NeedlesResult:
    """Builds the questions, loads the model, scores; nothing runs that is not in `plan`."""
    assert mesh is not None, "models run on devices"
    show = session is not None and session.show
    work = plan.work
    with ExitStack() as leases:
        # Texts first: problems with them are reported before a weight is read.
        prompts = _prompts(work, show=show)
        require_same("the questions", digest(prompts)[:16], advice="the tokenizer must be the same on all hosts")
        identity = _identity(plan, prompts)
        store = NeedleStore(folder=work.folder, identity=identity)
        resumed = _resume(work, store, leases)
        if resumed is None:
            return NeedlesResult(answered=(), identity=identity, loading=None, seconds=0.0, kept=0)
        store, answers = resumed
        numbered = list(enumerate(_batches(prompts, work.rows)))
        # A store of the same identity has the same batches; numbers beyond them would be of no use.
        answered_batches = {n for n in answers if n < len(numbered)}
        answered_batches = set(
            # Scoring is a collective, so all processes must skip the same batches.
            json.loads(agreed("needles that are found already", json.dumps(sorted(answered_batches))))
        )
        remaining = [(n, length, batch) for n, (length, batch) in numbered if n not in answered_batches]
        kept = sum(len(batch.prompts) for n, (_, batch) in numbered if n in answered_batches)
        loading, began = None, time.perf_counter()
        if remaining:
            loaded = load_pretrained(work.pretrained, mesh, show=show)
            model = with_arrays(work.pretrained.abstract, loaded.arrays)
            loading, began = loaded.report, time.perf_counter()
            _score_batches(plan, mesh, model, remaining, store, answers, show=show)
        seconds = time.perf_counter() - began
        # Process 0 alone reads the stored answers, so it alone can put all of them together.
        if not is_process_0():
            return NeedlesResult(answered=(), identity=identity, loading=loading, seconds=seconds, kept=kept)
        answered = [pair for n, (_, batch) in numbered for pair in zip(batch.prompts, answers[n], strict=True)]
        return NeedlesResult(answered=answered, identity=identity, loading=loading, seconds=seconds, kept=kept)


def _prompts(work: NeedleWork, *, show: bool) -> dict[int, list[NeedlePrompt]]:
    spec, tokenizer = work.config.spec, work.pretrained.tokenizer
    total = spec.count * len(spec.lengths)
    with Progress("making texts", total=total, unit="texts", show=show, lazy=True) as progress:
        return build_prompts(spec, tokenizer.encode_with_offsets, bos=work.bos, on_prompt=progress.advance_to)


def _batches(prompts: Mapping[int, Sequence[NeedlePrompt]], rows: int) -> list[tuple[int, NeedleBatch]]:
    # Batches of one length only: each length has a Program of its own.
    return [
        (length, batch) for length, length_prompts in prompts.items() for batch in batches(length_prompts, rows, length)
    ]


def _resume(
    work: NeedleWork, store: NeedleStore, leases: ExitStack
) -> tuple[NeedleStore, dict[int, tuple[NeedleAnswer, ...]]] | None:
    """The store and its answers; None if the run has finished. Every process refuses the folder of another run."""
    replaces = work.config.if_exists == "replace"
    done, answers = False, {}
    if is_process_0():
        # The lease keeps a second run from writing into the same store.
        lease = leased(store.folder, what="a search for needles", advice="give another output_path")
        store = replace(store, lease=leases.enter_context(lease))
        if replaces:
            store.start_over()
        done = store.is_done()
        if not done:
            store.begin()
            answers = store.read()
    elif not replaces:
        # Reading the identity file refuses a folder of another run on every process, not on process 0 alone.
        store.is_done()
    finished = json.loads(agreed("whether all needles are found already", json.dumps(done)))
    return None if finished else (store, answers)


def _score_batches(
    plan: RunPlan[NeedleWork],
    mesh: Mesh,
    model: PyTree,
    remaining: Sequence[tuple[int, int, NeedleBatch]],
    store: NeedleStore,
    answers_by_batch: dict[int, tuple[NeedleAnswer, ...]],
    *,
    show: bool,
) -> None:
    """Scores the remaining batches and stores the answers of each."""
    total = sum(len(batch.prompts) * length for _, length, batch in remaining)
    with Progress("looking for needles", total=total, unit="tokens", show=show) as progress:
        # All batches of one length in a row, so that its Program is compiled once and stays loaded.
        for length in dict.fromkeys(length for _, length, _ in remaining):
            batches = (((n, batch), batch.inputs) for n, at, batch in remaining if at == length)
            # `jit_together`: all processes compile, then meet, before the first call.
            program = plan.program(program_name(length))
            for (n, batch), outputs in results(program, mesh, model, batches, behind=FETCH_BEHIND, jit=jit_together):
                logprobs, ranks = (prompt.array for prompt in outputs)
                answers = tuple(_answer(prompt, logprobs[row], ranks[row]) for row, prompt in enumerate(batch.prompts))
                for prompt, answer in zip(batch.prompts, answers, strict=True):
                    if not answer.is_finite:
                        where = f"{prompt.task}, {prompt.length} tokens, question {prompt.number + 1}"
                        raise NonFiniteResultError(f"log-probabilities are not finite: {where}")
                # Nothing that is not finite may be stored: a resumed run would take it for an answer.
                answers_by_batch[n] = answers
                if is_process_0():
                    store.write(n, answers)
                progress.advance(len(batch.prompts) * length)


def _answer(prompt: NeedlePrompt, logprobs: np.ndarray, ranks: np.ndarray) -> NeedleAnswer:
    # Rows are padded to the longest answer; only the tokens of this one count.
    count = len(prompt.targets)
    return NeedleAnswer(logprobs=tuple(logprobs[:count].tolist()), ranks=tuple(ranks[:count].tolist()))


def _identity(plan: RunPlan[NeedleWork], prompts: dict[int, list[NeedlePrompt]]) -> NeedleIdentity:
    """Everything that the answers depend on."""
    pretrained, config = plan.work.pretrained, plan.work.config
    choice = pretrained.choice
    return {
        "tasks": list(config.spec.tasks),
        "lengths": list(config.spec.lengths),
        "samples": config.samples,
        "depths": config.depths,
        "seed": config.seed,
        "questions": digest(prompts),
        "model": choice.saved or choice.reference,
        # A digest of the weights: a folder may be replaced under the same name.
        "weights": weights_digest(pretrained.source),
        "architecture": repr(pretrained.config),
        "precision": str(pretrained.precision),
        "quantize": choice.quantize,
        "adapter": None if pretrained.adapter is None else str(pretrained.adapter.config),
        "mesh": str(plan.mesh),
        "rows": plan.work.rows,
    }


def finish(plan: RunPlan[NeedleWork], done: NeedlesResult, session: Session) -> int:
    """Prints the table, writes the files, and logs metrics to trackers."""
    if not is_process_0():
        return OK
    folder = plan.work.folder
    if not done.answered:
        print(f"nothing to do; the results are in {folder}", flush=True)
        return OK
    summary = summarize_needles(done.answered, depths=plan.work.config.depths)
    if session.show:
        again = f", {done.kept:,} of them by an earlier run" if done.kept else ""
        print(needles_table(summary))
        print(f"{summary['questions']:,} questions{again}; {done.seconds:.1f} s, compilation included", flush=True)
    try:
        title = f"Needles: {plan.work.pretrained.checkpoint.description.split(' (')[0]}"
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in sample_lines(done.answered))
        written = {"identity": dict(done.identity), "facts": _facts(plan, done), **summary}
        paths = write_all(
            {
                join(folder, SAMPLES): lines.encode(errors="backslashreplace"),
                join(folder, PAGE): needle_page(summary, done.answered, title=title, facts=_facts(plan, done)).encode(),
                # Last: a folder with the results file counts as finished.
                join(folder, RESULTS): json.dumps(written, indent=2, ensure_ascii=False).encode(
                    errors="backslashreplace"
                ),
            }
        )
        # The partial answers are in the results now.
        NeedleStore(folder=folder, identity=done.identity).clean()
        if session.show:
            print("\n".join(paths), flush=True)
    finally:
        session.tracker.log(tracker_metrics(summary), step=0)
        session.tracker.log_summary(tracker_metrics(summary))
    return OK


def _facts(plan: RunPlan[NeedleWork], done: NeedlesResult) -> dict[str, str]:
    """The facts of the run on its page."""
    pretrained, config = plan.work.pretrained, plan.work.config
    return {
        "model": pretrained.checkpoint.description,
        "tokenizer": pretrained.tokenizer.name,
        "trained on": f"{pretrained.config.max_seq_len:,} tokens at once",
        "questions": f"{config.samples} of each task and length, seed {config.seed}",
        "precision": str(pretrained.precision),
        "mesh": f"{plan.mesh} of {plan.target.devices} {plan.target.kind}",
        "asked in": f"{done.seconds:.1f} s",
        "jax": jax.__version__,
    }


def outputs(plan: RunPlan[NeedleWork], session: Session) -> tuple[Output, ...]:
    """The folder of the files."""
    del session
    return (plan.work.output,)


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=EvalNeedlesConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
)


def main(config: EvalNeedlesConfig, *, written: ExplicitKeys | None = None) -> int:
    """Looks for needles on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
