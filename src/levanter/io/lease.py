"""Leases: only one process at a time writes into a folder.

A process holds the *lease* of a *place* (a folder or URL) from before it reads the existing files until it has written
its last file. The files are in `<place>/.lease/` (see `lease_files`): numbered *claims*, of which the highest
is valid, and a *beat* that the holder renews every few seconds in a thread. No process writes the files of another, and
a claim is created only if no claim has its number; so at most one process is the creator of the highest claim.

A second process is refused. It takes the lease over, and logs that it does, where the holder

- was a process of this machine that has ended: at once (a restart after `kill -9`), or
- has not renewed its beat for `stale` seconds, by the clock of the storage, or by observation where the storage reports
  no times. The clocks of two machines are never compared.

A process that lost its lease (it was suspended or disconnected, and then continued) sees a higher claim and stops
before its next write: `check`. Writes that it had passed to the storage before may still arrive; the writers guard
against that with file names that no other process uses.
"""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from levanter.io.lease_files import Claim, LeaseFiles, lease_files
from levanter.io.lease_holder import Holder
from levanter.io.paths import is_remote, join

logger = logging.getLogger(__name__)

LEASE = ".lease"
"""The folder of a lease, below its place."""


class LeaseError(OSError, ValueError):
    """The lease of a folder prevents writing: another process holds it, took it over, or it cannot be written."""


class LeaseTakenError(LeaseError):
    """Another process writes there."""


class LeaseLostError(LeaseError):
    """Another process has taken the folder over."""


@dataclass(frozen=True, kw_only=True)
class LeaseTimes:
    """The seconds between two renewals of a lease, and the seconds without one after which it is stale."""

    beat: float = 10.0
    stale: float = 60.0


TIMES = LeaseTimes()
"""The default times of a lease."""


@dataclass(eq=False)
class Lease:
    """A lease that this process holds; see `leased`.

    Attributes:
        place: the folder or URL that it protects.
    """

    place: str
    _files: LeaseFiles = field(repr=False)
    _number: int
    _holder: Holder
    _times: LeaseTimes
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _confirmed: float = 0.0
    _beats: int = 0
    _lost: LeaseLostError | None = None
    _released: bool = False

    def check(self) -> None:
        """Returns if this process still holds the lease; call it before every write.

        Raises:
            LeaseLostError: another process has taken the lease over, or may have, because the storage has not answered
                for too long.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            assert not self._released, f"{self.place}: written after its lease was released"
            # No process takes over a lease that was renewed within two beats, so a remote storage need not be read. A
            # local disk answers in microseconds and is always read.
            if is_remote(self.place) and _clock() - self._confirmed < 2 * self._times.beat:
                return
            self._confirm()

    def beat(self) -> None:
        """Renews the lease; the keeper thread calls it for every lease of the process."""
        # The error is for the writer, whose next `check` raises it; here it would end the keeper thread.
        with self._lock, contextlib.suppress(LeaseLostError):
            if not self._released and self._lost is None:
                self._confirm()

    def release(self) -> None:
        """Releases the place, unless another process has taken it over."""
        with self._lock:
            if self._released:
                return
            # Set it before the files are removed: a `beat` that waits for the lock must not write them again
            # afterwards.
            self._released = True
            _keeper.forget(self)
            with contextlib.suppress(OSError):
                claim = self._files.newest()
                # Removing the claim of a process that took over would leave the place without an owner.
                if claim is not None and self._is_mine(claim):
                    self._files.remove(self._number, self._holder.id)

    def _is_mine(self, claim: Claim) -> bool:
        return claim.number == self._number and claim.content == self._holder.content()

    def _confirm(self) -> None:
        try:
            claim = self._files.newest()
            if claim is not None and claim.number == self._number and Holder.read(claim.content) is None:
                # A process that takes over creates a new claim and never modifies this one: the storage damaged it.
                logger.warning("%s: the files of its lease are damaged; rewriting them", self.place)
                # The claim is created again below under the same number; a process that took over meanwhile has a
                # higher one.
                self._files.remove(self._number, self._holder.id)
                claim = None
            elif claim is None and _clock() - self._confirmed < self._times.stale:
                logger.warning("%s: the files of its lease were deleted; rewriting them", self.place)
            elif claim is None:
                # No claim for longer than `stale`: another process may have taken over, released and ended since.
                self._lost = self._taken_over(None)
                raise self._lost
            if claim is None:
                # Create the claim again; if another process was faster, `newest` returns its claim.
                self._files.create(self._number, self._holder.content())
                claim = self._files.newest()
            if claim is None or not self._is_mine(claim):
                self._lost = self._taken_over(claim)
                raise self._lost
            # The count is the content of the beat on remote storage, so that it changes with every renewal.
            self._beats += 1
            # The beat comes last: written before the checks, it could renew a claim that another process has replaced.
            self._files.touch(self._number, self._holder.id, self._beats)
        except LeaseError:
            raise
        except OSError as error:
            # Others take over after `stale` seconds at the earliest, so half of that is a safe time to tolerate errors.
            if _clock() - self._confirmed < self._times.stale / 2:
                return
            raise LeaseLostError(
                f"{self.place}: it is unknown whether this process may still write there "
                f"({error.strerror or error}); the last answer is {_clock() - self._confirmed:.0f} s old"
            ) from error
        # By the clock of this process only: the limits above compare its own times.
        self._confirmed = _clock()

    def _taken_over(self, claim: Claim | None) -> LeaseLostError:
        holder = None if claim is None else Holder.read(claim.content)
        who = f"by {holder}" if holder is not None else "by a process that has ended since, or its lease was deleted"
        return LeaseLostError(
            f"{self.place}: was taken over {who}; this process writes nothing more there. Two runs shared the folder, "
            f"or this one did not renew its lease for {self._times.stale:g} s (suspended or disconnected)"
        )


class _Keeper:
    """Renews all leases of this process in one thread, which runs while there are leases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[Lease] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self._at_exit = False

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._leases.append(lease)
            if not self._at_exit:
                # Without it, a run that is restarted at once on another machine would wait `stale` seconds.
                atexit.register(release_all)
                self._at_exit = True
            if self._thread is None:
                # A daemon thread: it must not keep a process alive whose main thread has ended.
                self._thread = threading.Thread(target=self._run, daemon=True, name="leases")
                self._thread.start()
        self._changed.set()

    def forget(self, lease: Lease) -> None:
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)
        self._changed.set()

    def active(self) -> list[Lease]:
        with self._lock:
            return list(self._leases)

    def _run(self) -> None:
        while True:
            # Clear the event before reading the list: a lease that is added after the clear ends the wait below.
            self._changed.clear()
            with self._lock:
                if not self._leases:
                    # Under the lock: `add` sees that no thread runs and starts another one.
                    self._thread = None
                    return
                # One thread renews all leases, so it follows the shortest interval.
                pause = min(lease._times.beat for lease in self._leases)
            if self._changed.wait(pause):
                continue
            # A copy of the list: `beat` talks to the storage, and `add` and `forget` must not wait for that.
            for lease in self.active():
                lease.beat()


_keeper = _Keeper()


def release_all() -> None:
    """Releases every lease of this process, which is about to end; callable from any thread."""
    for lease in _keeper.active():
        lease.release()


@contextlib.contextmanager
def leased(
    place: str,
    *,
    what: str,
    advice: str,
    folder: str | None = None,
    wait: bool = False,
    times: LeaseTimes | None = None,
) -> Iterator[Lease]:
    """Holds the lease of a place while the block runs.

    Args:
        place: the folder or URL to write; it is created where needed.
        what: the activity, for the message to a process that is refused (`training run 5f0c19be`).
        advice: what its user may do instead of waiting (`give trainer.id another name`).
        folder: where the lease's files lie; None for `.lease` in the place.
        wait: whether to wait until another process releases the lease, instead of raising.
        times: how often it is renewed; None for `TIMES`.

    Raises:
        LeaseTakenError: another process holds the lease, and `wait` is false.
        LeaseError: the lease cannot be written there.
    """
    # A body that is killed runs no `finally`; its claim stays, and the next process recognizes it as stale.
    lease = take_lease(place, what=what, advice=advice, folder=folder, wait=wait, times=times)
    try:
        yield lease
    finally:
        lease.release()


def take_lease(
    place: str,
    *,
    what: str,
    advice: str,
    folder: str | None = None,
    wait: bool = False,
    times: LeaseTimes | None = None,
) -> Lease:
    """Takes the lease of a place, to be released by the caller; see `leased`."""
    times = TIMES if times is None else times
    files = lease_files(join(place, LEASE) if folder is None else folder)
    try:
        return _Taking(place, files, what=what, advice=advice, wait=wait, times=times).run()
    except LeaseError:
        raise
    except OSError as error:
        raise LeaseError(f"{place}: nothing can be written there ({error.strerror or error})") from error


class _Taking:
    """Acquires a lease: reads the newest claim, decides whether it is stale, and creates the next claim."""

    def __init__(self, place: str, files: LeaseFiles, *, what: str, advice: str, wait: bool, times: LeaseTimes):
        self._place, self._files, self._advice, self._wait, self._times = place, files, advice, wait, times
        self._holder = Holder.here(what)
        self._seen: Claim | None = None
        self._since = 0.0
        self._announced = False

    def run(self) -> Lease:
        while True:
            claim = self._files.newest()
            # An empty reason: nobody holds the lease. None: it may still be held, so read again after a pause.
            why = "" if claim is None else self._why_stale(claim)
            if why is None:
                time.sleep(min(1.0, self._times.beat / 4))
                continue
            # Numbers only grow, so that a process which was suspended for hours finds a higher claim than its own.
            number = 1 if claim is None else claim.number + 1
            if not self._files.create(number, self._holder.content()):
                continue  # another process created this claim first; judge that claim in the next round
            if claim is not None:
                before = Holder.read(claim.content)
                owner = "a damaged lease" if before is None else f"the lease of {before}"
                logger.warning("%s: took over %s (%s)", self._place, owner, why)
            # Files of lower numbers are obsolete. Another process that tries to create this number now fails.
            self._files.keep_only(number)
            lease = Lease(self._place, self._files, number, self._holder, self._times)
            self._files.touch(number, self._holder.id, 0)
            lease._confirmed = _clock()
            # From here on the keeper renews the lease, and the process releases it when it exits.
            _keeper.add(lease)
            return lease

    def _why_stale(self, claim: Claim) -> str | None:
        """The reason why a claim is stale; None where it must be read again in a moment.

        Raises:
            LeaseTakenError: its holder is alive, and `wait` is false.
        """
        holder = Holder.read(claim.content)
        # The kernel knows whether a process of this machine runs, so neither waiting nor a clock is needed.
        if holder is not None and holder.gone():
            return "that process is gone"
        alive = holder is not None and holder.surely_alive()
        if self._seen is not None and (claim.number, claim.content) == (self._seen.number, self._seen.content):
            # The beat changed between two reads: the holder is alive, whatever the clocks say.
            if claim.beat != self._seen.beat:
                alive, self._seen, self._since = True, claim, _clock()
        else:
            self._seen, self._since = claim, _clock()
            # The first sight of this claim. The age by the storage clock saves the observation of `stale` seconds.
            age = None if alive else self._files.age(claim, None if holder is None else holder.id)
            if age is not None and age >= self._times.stale:
                return f"its lease was not renewed for {age:,.0f} s"
        if alive and not self._wait:
            raise LeaseTakenError(self._refusal(holder))
        # Observed by our own clock: the claim and its beat did not change for `stale` seconds.
        if not alive and _clock() - self._since >= self._times.stale:
            return f"its lease was not renewed for {self._times.stale:g} s"
        self._tell(holder, alive=alive)
        return None

    def _tell(self, holder: Holder | None, *, alive: bool) -> None:
        if self._announced:
            return
        self._announced = True
        owner = "a damaged lease" if holder is None else str(holder)
        if alive:
            logger.info("%s: waiting for %s", self._place, owner)
        else:
            logger.warning(
                "%s: found a lease: %s; waiting up to %g s for a renewal", self._place, owner, self._times.stale
            )

    def _refusal(self, holder: Holder | None) -> str:
        return (
            f"{self._place}: another process is writing here: {holder}\n"
            f"  wait until it ends, or stop it; or {self._advice}. (If it cannot be alive: delete {self._files.folder})"
        )


def _clock() -> float:
    """Monotonic seconds that include suspension: `time.monotonic` stops while the machine sleeps, a lease must not."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
