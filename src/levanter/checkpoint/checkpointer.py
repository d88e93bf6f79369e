"""`Checkpointer`: decides when a run is saved, saves it in the background, and deletes expired checkpoints.

`save` copies the arrays off the devices and returns; a thread waits for the files, then makes the checkpoint complete
(`metadata.json`), then applies retention. A failure on the way is raised by the next `save`, `wait` or `close`. Old
checkpoints are deleted only after a newer one is complete.
"""

import contextlib
import errno
import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np

from levanter.checkpoint.checksums import ArrayDigests, encode_digests, merge_digests
from levanter.checkpoint.discovery import delete, find_checkpoints, latest, list_entries, sweep, write_ref
from levanter.checkpoint.errors import CheckpointPeerError, CheckpointSaveError
from levanter.checkpoint.file_digests import digest_files
from levanter.checkpoint.metadata import format_document
from levanter.checkpoint.refs import ARRAYS_PREFIX, CheckpointRef, Kind, now, step_path
from levanter.checkpoint.restore_specs import saved_leaf
from levanter.checkpoint.save_monitor import SaveWatch
from levanter.distributed.peers import PeerLostError
from levanter.distributed.process_group import process_group
from levanter.io.atomic import atomic_write
from levanter.io.lease import Lease, LeaseError
from levanter.io.paths import check_writable, filesystem, is_remote, join, open_read
from levanter.io.write_errors import advice

log = logging.getLogger(__name__)
CHUNK_BYTES = 64 << 20
"""Bytes of one stored chunk: small enough for a small part of a large array to be read alone."""
_instances = itertools.count()
Interval = tuple[int, int | None]
"""`(every, until)`: up to and including step `until`, every `every`-th step is kept for ever; None for no end. Of
several intervals the first that contains a step decides; after the last one nothing is kept by step."""


class Checkpointer:
    """Saves one run; every process of the run has one and calls it at the same steps.

    Args:
        base: the folder or URL of this run's checkpoints; no other run may write there.
        keep: intervals `(every, until)` of steps whose checkpoints stay for ever.
        save_interval_seconds: time between two temporary checkpoints; None for none.
        keep_last_temporary: how many temporary checkpoints stay.
        temporary_base: where temporary checkpoints go; None for `base`.
        delete_old_temporary: whether temporary checkpoints of earlier attempts at this run are deleted as well.
        used: the shapes without padding of arrays that may be padded, by path.
        timeout_seconds: how long a save may take, waiting for other processes included.
        chunk_bytes: the most bytes of one stored piece of an array's part on a device.
        watch: reports about each save while it runs; None for none.
        leases: of the folders, held by process 0; a run that has lost one stops writing.
        clock: a monotonic clock in seconds; only process 0's is used.

    Raises:
        CheckpointSaveError: nothing can be written to a base.
        ValueError: `keep`, the interval or the number is not valid.
    """

    def __init__(
        self,
        base: str,
        *,
        keep: Sequence[Interval],
        save_interval_seconds: float | None,
        keep_last_temporary: int = 1,
        temporary_base: str | None = None,
        delete_old_temporary: bool = True,
        used: Mapping[str, tuple[int, ...]] | None = None,
        timeout_seconds: float = 1200.0,
        chunk_bytes: int = CHUNK_BYTES,
        watch: SaveWatch | None = None,
        leases: Sequence[Lease] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        if save_interval_seconds is not None and save_interval_seconds <= 0:
            raise ValueError(f"save_interval_seconds: must be positive or None, got {save_interval_seconds}")
        if keep_last_temporary < 0:
            raise ValueError(f"keep_last_temporary: must not be negative, got {keep_last_temporary}")
        # Orbax takes half a second to import; a plan of a run does without.
        from levanter.checkpoint.orbax_io import ArrayWriter

        self._keep = check_intervals(keep)
        self._interval = save_interval_seconds
        self._keep_last = keep_last_temporary
        self._delete_old = delete_old_temporary
        self._base = {"kept": base, "temporary": temporary_base or base}
        self._clock = clock
        # Processes construct their checkpointers in the same order, so the count gives one object the same name in all
        # of them.
        self._agreement = Consensus(f"checkpoints/{next(_instances)}", timeout_seconds=timeout_seconds)
        # Only process 0 tests: many processes writing and deleting one test file would disturb each other.
        if self._agreement.decides:
            for base_path in self._bases:
                _check_writable(base_path)
        self._writer = ArrayWriter(timeout_seconds=timeout_seconds, chunk_bytes=chunk_bytes)
        self._used, self._watch, self._leases = dict(used or {}), watch, tuple(leases)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: tuple[CheckpointRef, Future[CheckpointRef]] | None = None
        self._saved_paths: set[str] = set()
        self._newest: CheckpointRef | None = None
        self._last_time = clock()
        self._swept = False

    @property
    def newest(self) -> CheckpointRef | None:
        """The checkpoint that this object made complete last."""
        return self._newest

    @property
    def _bases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._base.values()))

    def due(self, step: int) -> bool:
        """Whether the run is to be saved after `step` steps: by step, or because enough time has passed.

        With several processes and a time interval they exchange a message: all must call this.
        """
        # Steps that are kept by number need no exchange: every process computes the same answer.
        if is_kept(step, self._keep):
            return True
        if self._interval is None:
            return False
        passed = self._interval
        # Clocks differ between processes, so process 0's decides for all.
        return self._agreement.on("due", lambda: str(int(self._clock() - self._last_time >= passed))) == "1"

    def has(self, step: int, *, force: bool = False) -> bool:
        """Whether the checkpoint that this object made complete last is the one that `save` would make."""
        done = self._newest
        if done is None or done.step != step:
            return False
        # A kept checkpoint also serves a request for a temporary one of the same step, but not the other way round.
        return done.kind == "kept" or self._kind(step, force=force) == "temporary"

    def _kind(self, step: int, *, force: bool) -> Kind:
        return "kept" if force or is_kept(step, self._keep) else "temporary"

    def save(
        self, step: int, arrays: Mapping[str, jax.Array], metadata: Mapping[str, Any], *, force: bool = False
    ) -> None:
        """Saves a run's state; returns as soon as the arrays may be donated or deleted.

        It first waits for the save before, if that one is still under way. A step that this object has saved already
        is not saved again, unless it was temporary and is now to be kept.

        Args:
            step: steps taken.
            arrays: every array, by path.
            metadata: what JSON can hold.
            force: the checkpoint is kept, whatever the step; without it, `keep` decides.

        Raises:
            CheckpointSaveError: this save cannot begin, or the one before failed; complete checkpoints are intact.
            LeaseLostError: another process writes there now.
            ValueError: `arrays` or `metadata` cannot be saved; the message lists why.
        """
        # One save at a time, and a failure of the one before is raised here.
        self.wait()
        if self.has(step, force=force):
            return
        kind = self._kind(step, force=force)
        ref = CheckpointRef(
            path=step_path(self._base[kind], step),
            step=step,
            kind=kind,
            metadata=MappingProxyType(dict(metadata)),
            leaves=MappingProxyType(_checked_leaves(arrays, self._used)),
            arrays="",
            saved_at=now(),
        )
        # Checked before processes exchange anything: an error here is raised on all of them and leaves no peer waiting.
        _check_metadata(ref)
        # Process 0 chooses the name after it has deleted old remains, so no process can write before that is done.
        with self._translate_errors(ref):
            name = self._agreement.on(f"save {step}", lambda: self._prepare(ref))
        ref = replace(ref, arrays=name)
        ended = _nothing if self._watch is None else self._watch.begin(f"saving step {step}")
        try:
            with self._translate_errors(ref):
                self._writer.start(ref.arrays_path, arrays)
        except CheckpointSaveError:
            self._clean(ref)
            ended()
            raise
        # Only now: a save that could not begin stays due.
        self._last_time = self._clock()
        # Everything that takes long happens in this one background thread, one save after another.
        future = self._pool.submit(self._complete, ref)
        future.add_done_callback(lambda _: ended())
        self._running = (ref, future)

    def wait(self) -> None:
        """Waits until the save that is under way is complete.

        Raises:
            CheckpointSaveError: it failed; complete checkpoints are intact. It is raised once.
        """
        if self._running is None:
            return
        # Cleared before the result is taken, so that an error is raised once and the next save can begin.
        (ref, future), self._running = self._running, None
        with self._translate_errors(ref):
            self._newest = future.result()

    def close(self) -> None:
        """Waits like `wait`, raises what it raises, and frees threads; nothing can be saved afterwards."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prepare(self, ref: CheckpointRef) -> str:
        """Deletes old remains and chooses the name of the new arrays; on process 0 only."""
        # First the lease: a run that has lost its folder must delete nothing in it.
        self._check_leases()
        if not self._swept:
            for base in self._bases:
                for path in sweep(base):
                    log.info("deleted the remains of an interrupted save: %s", path)
            self._swept = True
        # Object stores have no folders to create.
        if not is_remote(ref.path):
            os.makedirs(filesystem(ref.path)[1], exist_ok=True)
        # A new name for every attempt: files of an earlier one of the same step are never mixed with these.
        return ARRAYS_PREFIX + secrets.token_hex(4)

    def _complete(self, ref: CheckpointRef) -> CheckpointRef:
        """Waits for the arrays, makes the checkpoint complete, and deletes expired ones; in the background."""
        # The order makes a checkpoint crash-safe: arrays, then their digests, then metadata.json (from here on it
        # exists), and only then is anything older deleted.
        try:
            digests = self._writer.wait()
            if jax.process_count() > 1:
                digests = self._merge_digests(ref, digests)
            ref = replace(ref, digests=MappingProxyType(digests))
            if self._agreement.decides:
                # Writing may have taken minutes, in which another process may have taken the folder over.
                self._check_leases()
                write_ref(replace(ref, files=MappingProxyType(digest_files(ref.arrays_path))))
        except BaseException:
            self._clean(ref)
            raise
        if self._agreement.decides:
            self._saved_paths.add(ref.path)
            self._retire(ref)
        # No process reports a save as complete before process 0 has written metadata.json; if it fails, the others time
        # out.
        self._agreement.meet(f"complete {ref.arrays}")
        return ref

    def _merge_digests(self, ref: CheckpointRef, digests: dict[str, ArrayDigests]) -> dict[str, ArrayDigests]:
        """The digests of what all processes wrote, on the process that decides; its own on every other.

        They are exchanged through files beside the arrays, on storage that all processes see. `sweep` deletes those of
        a killed process together with its arrays.
        """
        files = [join(ref.path, f"{ref.arrays}.digests.{n}") for n in range(jax.process_count())]
        if not self._agreement.decides:
            with atomic_write(files[jax.process_index()]) as file:
                file.write(encode_digests(digests))
        # All digests are on storage before process 0 reads them; it deletes them once they are part of its own.
        self._agreement.meet(f"digests {ref.arrays}")
        if not self._agreement.decides:
            return digests
        for n, path in enumerate(files):
            if n != jax.process_index():
                with open_read(path) as file:
                    digests = merge_digests(digests, file.read())
                fs, name = filesystem(path)
                fs.rm_file(name)
        return digests

    def _check_leases(self) -> None:
        """Raises where another process has taken over a folder of this run."""
        for lease in self._leases:
            lease.check()

    def _retire(self, newest: CheckpointRef) -> None:
        """Deletes temporary checkpoints that have expired; a failure is only logged."""
        try:
            checkpoints = [
                ref for ref in find_checkpoints(*self._bases) if self._delete_old or ref.path in self._saved_paths
            ]
            # Only after the new checkpoint is complete: at every moment there is one that can be resumed from.
            for ref in expired_checkpoints(checkpoints, newest=newest, keep_last=self._keep_last):
                delete(ref.path)
            _delete_replaced(newest)
        except (OSError, ValueError) as error:
            log.warning("old checkpoints could not be deleted: %s", error)
            # What could not be deleted is tried again before the next save.
            self._swept = False

    def _clean(self, ref: CheckpointRef) -> None:
        """Frees the space of a save that failed; what cannot be deleted now is swept up before the next save."""
        self._swept = False
        if self._agreement.decides:
            with contextlib.suppress(OSError, ValueError):
                # The folder may belong to another run by now.
                self._check_leases()
                sweep(self._base[ref.kind])

    @contextlib.contextmanager
    def _translate_errors(self, ref: CheckpointRef):
        """Turns errors of libraries into one that names the lost checkpoint and the last complete one."""
        try:
            yield
        except (CheckpointPeerError, LeaseError):
            raise
        except (OSError, ValueError, RuntimeError) as error:
            try:
                last = latest(*self._bases)
                intact = (
                    f"the last complete one is of step {last.step} ({last.path})" if last else "there is none before it"
                )
            except (OSError, ValueError) as second:
                intact = f"earlier ones cannot be listed ({second})"
            # Orbax reports processes that do not come as a timeout.
            kind = CheckpointPeerError if isinstance(error, TimeoutError) else CheckpointSaveError
            reason, code = _reason(error)
            do = "" if code is None else advice(ref.path, OSError(code, reason), _stored_bytes(ref))
            raise kind(
                f"{ref.path}: the checkpoint of step {ref.step} was not written: {reason}; {intact}{do}"
            ) from error


def _nothing() -> None:
    pass


def _reason(error: BaseException) -> tuple[str, int | None]:
    """The library's message of an error; for a full disk and the like, the system's message and code."""
    text = " ".join(str(error).split())
    # Libraries wrap system errors and lose their number; the system's text is still in the message.
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        if getattr(error, "errno", None) == code or os.strerror(code) in text:
            return os.strerror(code), code
    return f"{type(error).__name__}: " + (text if len(text) <= 300 else text[:300] + " …"), None


def _stored_bytes(ref: CheckpointRef) -> int:
    """Bytes of a checkpoint's arrays, which are written as they are."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in ref.leaves.values())


def _delete_replaced(ref: CheckpointRef) -> None:
    """Deletes arrays that an earlier checkpoint of the same step had in the same folder."""
    fs, name = filesystem(ref.path)
    for entry, is_folder in list_entries(ref.path):
        if is_folder and entry.startswith(ARRAYS_PREFIX) and entry != ref.arrays:
            fs.rm(f"{name}/{entry}", recursive=True)


def _checked_leaves(arrays: Mapping[str, jax.Array], used: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    problems, leaves = [], {}
    for path, array in arrays.items():
        if not isinstance(array, jax.Array):
            problems.append(f"{path}: expected a jax.Array, got {type(array).__name__}")
        elif jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            problems.append(f"{path}: {array.dtype} cannot be saved; pass its jax.random.key_data")
        elif array.size == 0:
            problems.append(f"{path}: {array.dtype.name}{list(array.shape)} has no elements; leave it out")
        elif array.is_deleted():
            problems.append(f"{path}: was donated or deleted before it could be saved")
        else:
            leaves[path] = saved_leaf(array.shape, array.dtype, used=used.get(path))
    if not arrays:
        problems.append("there are no arrays to save")
    if problems:
        raise ValueError("a checkpoint cannot contain these:\n  " + "\n  ".join(problems))
    return leaves


def _check_metadata(ref: CheckpointRef) -> None:
    try:
        format_document(ref)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata of the checkpoint of step {ref.step}: {error}") from error


def _check_writable(base: str) -> None:
    """Refuses a base that cannot be written, before the first step."""
    try:
        check_writable(base)
    except OSError as error:
        raise CheckpointSaveError(f"{base}: checkpoints cannot be written here ({error.strerror or error})") from error


class Consensus:
    """Decisions of process 0 that all processes of a run follow, since clocks and random names differ between them.

    Args:
        name: a name that no other group of this run has.
        timeout_seconds: how long a process waits for the others.
    """

    def __init__(self, name: str, *, timeout_seconds: float):
        self._name = name
        self._timeout = timeout_seconds

    @property
    def decides(self) -> bool:
        """Whether this is the process that decides."""
        return process_group().decides

    def on(self, question: str, decide: Callable[[], str]) -> str:
        """Returns the result of process 0's `decide` on every process; only process 0 calls it.

        Raises:
            CheckpointPeerError: process 0 does not answer in time.
        """
        with _as_checkpoint_error():
            return process_group().follow(f"{self._name}: {question}", decide, seconds=self._timeout)

    def meet(self, point: str) -> None:
        """Waits until every process is here; `point` must be new each time. May be called from any thread.

        Raises:
            CheckpointPeerError: a process does not come in time.
        """
        with _as_checkpoint_error():
            process_group().wait(f"{self._name}: {point}", seconds=self._timeout)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Turns lost peers into checkpoint errors, the only kind that callers handle; `decide`'s own errors pass."""
    try:
        yield
    except PeerLostError as error:
        raise CheckpointPeerError(str(error)) from error


def check_intervals(keep: Sequence[Interval]) -> tuple[Interval, ...]:
    """The intervals as they are, if they make sense.

    Raises:
        ValueError: lists everything that is wrong with them.
    """
    problems, previous = [], 0
    for i, (every, until) in enumerate(keep):
        if every < 1:
            problems.append(f"keep[{i}]: `every` must be at least 1, got {every}")
        if until is None and i + 1 < len(keep):
            problems.append(f"keep[{i}]: has no `until`, so the intervals after it never begin")
        if until is not None and until <= previous:
            problems.append(f"keep[{i}]: `until` must be greater than {previous}, got {until}")
        previous = until if until is not None else previous
    if problems:
        raise ValueError("\n".join(problems))
    return tuple((every, until) for every, until in keep)


def is_kept(step: int, keep: Sequence[Interval]) -> bool:
    """Whether the checkpoint of a step stays for ever. Step 0, before any training, does not."""
    for every, until in keep:
        if until is None or step <= until:
            return step > 0 and step % every == 0
    return False


def count_kept(steps: int, keep: Sequence[Interval]) -> int:
    """How many of the checkpoints of steps 1 to `steps` stay for ever, the last one included, which always does.

    >>> count_kept(10_500, [(500, 1_000), (2_000, None)])
    8
    """
    count = previous = 0
    for every, until in keep:
        end = steps if until is None else min(until, steps)
        # An interval begins behind the last one, at multiples of its own number.
        count += max(end // every - previous // every, 0)
        previous = max(previous, end)
    return count if steps < 1 or is_kept(steps, keep) else count + 1


def expired_checkpoints(
    checkpoints: Sequence[CheckpointRef], *, newest: CheckpointRef, keep_last: int
) -> list[CheckpointRef]:
    """The temporary checkpoints that have expired, oldest first.

    The `keep_last` temporary ones that were saved last stay, and so does `newest`, whatever its kind.
    """
    temporary = sorted((ref for ref in checkpoints if ref.kind == "temporary"), key=lambda ref: ref.saved_at)
    # Not `temporary[-keep_last:]`, which would be all of them for 0.
    staying = temporary[len(temporary) - min(keep_last, len(temporary)) :]
    return [ref for ref in temporary if ref not in staying and ref.path != newest.path]
