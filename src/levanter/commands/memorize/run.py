"""Execution shared by the memorization entry points: from a described run to results, with one load for all jobs.

Finished jobs are unchanged, unfinished ones resume. A job's results are written once all its windows are scored, and
its marker last, so the same command resumes a run that was killed at any moment.
"""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pyarrow
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from levanter.commands.memorize.plan import BookJob, MemorizationWork, OpenJob
from levanter.commands.memorize.resume import open_store, write_results
from levanter.commands.model.pretrained import PretrainedModel, load_pretrained
from levanter.config import plain
from levanter.distributed.agreement import barrier, require_same
from levanter.io import Output, Progress, is_remote, join
from levanter.memorization.books import flat, weights_digest
from levanter.memorization.outputs import CURVES, DEFAULT_NAMES, SUMMARY
from levanter.memorization.partial_results import PartStore
from levanter.memorization.results import BookResult, Scores
from levanter.memorization.runner import BatchShape, agreed, score_and_store, score_batches
from levanter.runplan import OK, Recorder, RunPlan, Session

_NOT_IN_MANIFEST = ("output_base_path", "if_exists", "save_seconds", "load_memory_gib", "plan")
_NOT_OF_TRAINER = ("tracker", "id", "log_dir", "jax_compilation_cache_dir")


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """A finished job.

    Attributes:
        title: of the book.
        folder: of its results.
        windows: windows scored in this run; 0 if the job was finished before.
        summary: its numbers, as in `summary.json`, on process 0; None if the job was finished before.
    """

    title: str
    folder: str
    windows: int
    summary: Mapping[str, Any] | None = None


def execute_jobs(
    plan: RunPlan[MemorizationWork], mesh: Mesh | None, session: Session | None = None
) -> tuple[FinishedJob, ...]:
    """Scores the jobs that are not done yet; nothing runs that is not in `plan`."""
    assert mesh is not None, "models run on devices"
    with ExitStack() as leases:
        return _execute(plan, mesh, Session() if session is None else session, leases)


def _execute(
    plan: RunPlan[MemorizationWork], mesh: Mesh, session: Session, leases: ExitStack
) -> tuple[FinishedJob, ...]:
    work, tracker = plan.work, session.tracker
    # Process 0 holds the results, whether or not it prints.
    show = jax.process_index() == 0
    model_facts = _model_identity(plan)
    stores = [_store(work, job, shape, model_facts) for job, shape, _ in work.jobs]
    done = [FinishedJob(title=job.title, folder=job.folder, windows=0) for job, _, _ in work.jobs]
    # Every process refuses the folder of another run; process 0 decides which jobs of this run are finished.
    if show:
        opened_stores = [
            open_store(work, job, store, leases) for (job, _, _), store in zip(work.jobs, stores, strict=True)
        ]
        stores = [store for store, _ in opened_stores]
        finished = agreed([is_done for _, is_done in opened_stores])
    else:
        # Arguments of other processes are not used; the call itself raises for another run's folder.
        finished = agreed([work.config.if_exists != "replace" and store.is_done() for store in stores])
    for job_result, store, is_done in zip(done, stores, finished, strict=True):
        if show and is_done:
            # A run that was killed right after its marker left partial files.
            store.clean()
            print(f"{job_result.title}: nothing to do; its results are in {job_result.folder}")
    remaining = [int(n) for n in np.flatnonzero(~finished)]
    if not remaining:
        return tuple(done)
    tokenizer = work.pretrained.tokenizer
    # Hosts with different texts would score different windows in one batch.
    digest = hashlib.sha256(repr([(job.title, job.identity) for job, _, _ in work.jobs]).encode()).hexdigest()
    advice = "the same files must be on all hosts"
    require_same("what is scored", f"{len(work.jobs)} sets of windows, sha256 {digest[:16]}…", advice=advice)
    # All books and folders are checked before weights are read, so that problems are reported early.
    for n in remaining:
        work.jobs[n][0].check(tokenizer)
        if show:
            stores[n].begin()
    # The windows of a book are built while the weights are read, or while the previous book is scored.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="windows") as opener:
        upcoming = opener.submit(work.jobs[remaining[0]][0].open, tokenizer)
        loaded = load_pretrained(work.pretrained, mesh, show=show)
        model = with_arrays(work.pretrained.abstract, loaded.arrays)
        before = 0
        for n, following in zip(remaining, (*remaining[1:], None), strict=True):
            opened = upcoming.result()
            if following is not None:
                upcoming = opener.submit(work.jobs[following][0].open, tokenizer)
            done[n] = _score(plan, n, opened, stores[n], model, mesh, tracker, before=before)
            # Tracker steps continue from one book to the next.
            before += len(opened.source)
    return tuple(done)


def _score(
    plan: RunPlan[MemorizationWork],
    n: int,
    opened: OpenJob,
    store: PartStore,
    model: Any,
    mesh: Mesh,
    tracker: Recorder,
    *,
    before: int,
) -> FinishedJob:
    """Scores one job and writes its results. `before` windows of other jobs were scored in this run."""
    work: MemorizationWork = plan.work
    job, shape, program = work.jobs[n]
    total = len(opened.source)
    store = replace(store, windows=total)
    # The other processes may arrive while process 0 still writes the previous book's results.
    barrier(f"scoring {job.title}")
    name = _metric_prefix(work, job)
    report = _Report(name=name, shape=shape, total=total, tracker=tracker, before=before)

    def batches(first: int) -> Iterator[Scores]:
        return score_batches(plan.program(program), model, mesh, opened.source, shape, laws=work.laws, first=first)

    with Progress(f"scoring {job.title}", total=total, unit="windows", show=jax.process_index() == 0) as progress:

        def on_windows(count: int) -> None:
            progress.advance_to(count)
            report.windows(count)

        scores = score_and_store(batches, store, save_seconds=work.config.save_seconds, on_windows=on_windows)
    summary = None
    # None on all processes but 0.
    if scores is not None:
        summary = _finish(plan, job, opened, scores, store)
        tracker.log_summary(_numbers(f"{name}memorization", summary))
        _log_pictures(tracker, job)
        # Released early, so that another run may read or replace this book while the next one is scored.
        if store.lease is not None:
            store.lease.release()
    return FinishedJob(title=job.title, folder=job.folder, windows=total, summary=summary)


def _metric_prefix(work: MemorizationWork, job: BookJob) -> str:
    """Empty for a single book; with several the title, as upstream writes it."""
    return "" if len(work.jobs) == 1 else f"{job.title.replace(' ', '_')}/"


@dataclass(kw_only=True)
class _Report:
    """Upstream's progress numbers, to the tracker; steps continue from one book to the next."""

    name: str
    shape: BatchShape
    total: int
    tracker: Recorder
    before: int

    def windows(self, count: int) -> None:
        numbers = {
            "batch_number": self.shape.batches(count),
            "total_batches": self.shape.batches(self.total),
            "windows_processed": count,
            "total_windows": self.total,
            "progress_percent": 100 * count / self.total,
        }
        self.tracker.log({f"{self.name}eval/{key}": n for key, n in numbers.items()}, step=self.before + count)


def _log_pictures(tracker: Recorder, job: BookJob) -> None:
    """Logs the pictures and the summary, which contain no text, but not the report, which may contain some."""
    names = {**DEFAULT_NAMES, **job.output_names}
    for name in (names["plot_path"], names["histogram_path"], CURVES, SUMMARY):
        path = join(job.folder, name)
        # Trackers take local files only.
        if not is_remote(path):
            tracker.log_artifact(path, name=name, type="memorization")


def _store(work: MemorizationWork, job: BookJob, shape: BatchShape, model_facts: Mapping[str, Any]) -> PartStore:
    # The batch shape and the schemes change the stored numbers, so they are part of the identity.
    identity = {**job.identity, **model_facts, "batch": shape.rows, "schemes": [law.name for law in work.laws]}
    return PartStore(folder=job.folder, identity=identity, windows=0, suffix_tokens=job.suffix_tokens)


def _model_identity(plan: RunPlan[MemorizationWork]) -> dict[str, Any]:
    """The facts about model and devices that the results depend on."""
    pretrained: PretrainedModel = plan.work.pretrained
    spec, mappings, choice = plan.mesh, pretrained.resolved.mappings, pretrained.choice
    return {
        "tokenizer.hash": pretrained.tokenizer.hash,
        "model.reference": choice.saved or choice.reference,
        "model.weights": weights_digest(pretrained.source),
        **flat("model", plain(pretrained.config)),
        "precision": str(pretrained.precision),
        # Only present where it is set, so that results of earlier runs keep their identity.
        **({} if choice.quantize is None else {"quantize": choice.quantize, "tied_head": choice.tied_head}),
        **({} if pretrained.adapter is None else {"adapter": str(pretrained.adapter.config)}),
        "mesh": str(spec),
        "mapping.params": str(mappings.params),
        "mapping.compute": str(mappings.compute),
        "mapping.residual": str(mappings.residual),
        **({"mapping.attention": str(mappings.attention)} if mappings.attention else {}),
        "devices": f"{plan.target.devices} {plan.target.kind} in {plan.target.hosts} processes",
    }


def _finish(
    plan: RunPlan[MemorizationWork], job: BookJob, opened: OpenJob, scores: Scores, store: PartStore
) -> Mapping[str, Any]:
    """Writes a job's results and reports, and the marker last."""
    # Another process may have taken over an expired lease; then nothing may be written.
    store.check_lease()
    # From padded rows to each row's own suffix; nothing to do for windows.
    scores = opened.aligned(scores)
    result = BookResult(
        title=job.title,
        preset=job.preset,
        scheme=job.scheme,
        manifest=_manifest(plan, job, opened, store),
        text=job.text,
        prefix_tokens=job.positions - job.suffix_tokens,
        suffix_tokens=job.suffix_tokens,
        **opened.spans,
        logprobs=scores.logprobs,
        ranks=scores.ranks,
        top_lse=scores.top_lse,
        normalizers=scores.normalizers,
    )
    result.write(job.folder)
    return write_results(plan.work, job, result, store)


def result_message(done: FinishedJob) -> str:
    """A job's main results and its folder, as text."""
    summary = done.summary
    assert summary is not None
    low, high = summary["coverage_interval"]["low"], summary["coverage_interval"]["high"]
    return (
        f"{done.title} (preset {summary['preset']}, {summary['scheme']}): {summary['coverage']:.2%} of "
        f"{summary['characters']:,} {summary['unit']} covered at p_z ≥ {summary['threshold']:.2%} [{low:.2%}, "
        f"{high:.2%}]; {summary['windows_reached']:,} of {summary['windows']:,} windows\n  {done.folder}"
    )


def _numbers(prefix: str, value: Any) -> dict[str, float]:
    """The numbers of a nested mapping by path; lists are left out."""
    if isinstance(value, Mapping):
        return {name: n for key, item in value.items() for name, n in _numbers(f"{prefix}/{key}", item).items()}
    return {prefix: value} if isinstance(value, (int, float)) else {}


def _manifest(plan: RunPlan[MemorizationWork], job: BookJob, opened: OpenJob, store: PartStore) -> dict[str, Any]:
    """The record of the run and its inputs, without times and paths, so that equal runs have equal manifests."""
    config = {key: value for key, value in plain(plan.work.config).items() if key not in _NOT_IN_MANIFEST}
    # Settings of the machine do not change results.
    config["trainer"] = {key: value for key, value in config["trainer"].items() if key not in _NOT_OF_TRAINER}
    return {
        "title": job.title,
        "entry_point": plan.entry_point,
        "windows": len(opened.source),
        "facts": dict(opened.facts),
        "identity": dict(store.identity),
        "model": plan.work.pretrained.origin.description,
        "config": config,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
            "pyarrow": pyarrow.__version__,
        },
    }


def outputs(plan: RunPlan[MemorizationWork], session: Session) -> tuple[Output, ...]:
    """The folder of each job, and those of its files that a config puts elsewhere."""
    del session
    folders = [Output(key="output_base_path", path=job.folder, kind="folder") for job, _, _ in plan.work.jobs]
    for job, _, _ in plan.work.jobs:
        for key, name in job.output_names.items():
            folders.append(Output(key=key, path=join(job.folder, name), kind="file"))
    return tuple(folders)


def finish(plan: RunPlan[MemorizationWork], done: Sequence[FinishedJob], session: Session) -> int:
    """Prints the main results of the jobs of this run."""
    del plan, session
    for job_result in done:
        if job_result.summary is not None:
            print(result_message(job_result))
    return OK
