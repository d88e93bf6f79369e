"""Checks the results of finished jobs, and restores files that are missing or changed.

The scores are in `windows.parquet` and `manifest.json`; without one of them the windows are scored again. Everything
else is derived from these two and is rewritten within a second.
"""

from contextlib import ExitStack
from dataclasses import replace

from levanter.commands.memorize.plan import BookJob, MemorizationWork
from levanter.io import leased
from levanter.memorization.outputs import write_outputs
from levanter.memorization.partial_results import PartStore
from levanter.memorization.results import MANIFEST, WINDOWS, BookResult


def open_store(work: MemorizationWork, job: BookJob, store: PartStore, leases: ExitStack) -> tuple[PartStore, bool]:
    """A job's store, with the lease of its folder if that is to be written, and whether its results are complete.

    Args:
        work: of the run.
        job: the job.
        store: its store.
        leases: holds the lease until the run ends.

    Raises:
        OtherRunError: the folder holds results of another run.
        LeaseTakenError: another process writes there.
    """
    replaces = work.config.if_exists == "replace"
    # None: not finished (or to be replaced). Empty: finished and intact, which needs no lease.
    changed = store.missing_or_changed() if not replaces and store.is_done() else None
    if changed is not None and not changed:
        return store, True
    lease = leased(store.folder, what="a memorization run", advice="give another output_base_path")
    store = replace(store, lease=leases.enter_context(lease))
    if replaces:
        store.start_over()
        return store, False
    if changed is None:
        # Another process may have finished the job while this one waited for the lease.
        return store, store.is_done()
    details = "".join(f"\n  {name}: {what}" for name, what in changed.items())
    if changed.keys() & {WINDOWS, MANIFEST}:
        print(f"{job.title}: results in {job.folder} are missing or changed; its windows are scored again{details}")
        store.start_over()
        return store, False
    print(f"{job.title}: files in {job.folder} are missing or changed; they are rewritten from its scores{details}")
    # The text is not in the scores; it is the one just read.
    result = replace(BookResult.read(job.folder), text=job.text)
    result.write(job.folder)
    write_results(work, job, result, store)
    return store, True


def write_results(work: MemorizationWork, job: BookJob, result: BookResult, store: PartStore) -> dict[str, object]:
    """Writes a job's reports, then the marker; returns the content of `summary.json`."""
    written: list[str] = []
    summary = write_outputs(
        job.folder,
        result,
        threshold=work.config.coverage_threshold,
        cover=work.config.cover,
        names=job.output_names,
        with_text=work.config.keep_text,
        on_file=written.append,
    )
    # Last: only with the marker does the folder count as finished.
    store.finish([*result.files, *written])
    return summary
