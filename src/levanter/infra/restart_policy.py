"""Decides from the exit codes of all processes whether an attempt is done, refused, failed, or worth a restart.

When one process of a group ends with an error, the others lose a peer and end too: with exit code 5, with a signal of
the runtime, or with an error of a collective. `judge` looks for the root cause, not for the process that ended first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from levanter.infra.errors import (
    BAD_INPUT,
    COMPILER_CRASH,
    DOES_NOT_FIT,
    INTERNAL_ERROR,
    INTERRUPTED,
    OK,
    PEER_LOST,
    PREEMPTED,
)

MEANINGS = {
    OK: "done",
    INTERNAL_ERROR: "internal error",
    BAD_INPUT: "bad input or configuration",
    DOES_NOT_FIT: "does not fit",
    COMPILER_CRASH: "compiler crash",
    PEER_LOST: "a peer was lost",
    PREEMPTED: "preempted, saved, resumable",
    INTERRUPTED: "interrupted",
}
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV",
            15: "SIGTERM"}  # fmt: skip
_FROM_OUTSIDE = (1, 9, 15)
"""Signals that a process receives when its host is lost or somebody kills it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one process ended.

    Attributes:
        process: its number in the job.
        code: its exit code; a signal as −n or 128 + n; None if its host is gone.
        where: the host, for messages.
    """

    process: int
    code: int | None
    where: str = ""

    @property
    def signal(self) -> int | None:
        """The signal that ended the process."""
        if self.code is None or (self.code >= 0 and not 128 < self.code < 160) or self.code == INTERRUPTED:
            return None
        # `subprocess` reports signal n as −n, a shell as 128 + n; 130 is Ctrl-C and has a code of its own.
        return -self.code if self.code < 0 else self.code - 128

    def __str__(self) -> str:
        where = f" on {self.where}" if self.where else ""
        if self.code is None:
            return f"process {self.process}{where}: the host is gone"
        if self.signal is not None:
            return f"process {self.process}{where}: killed by {_SIGNALS.get(self.signal, f'signal {self.signal}')}"
        meaning = MEANINGS.get(self.code, "failed")
        return f"process {self.process}{where}: exit code {self.code} ({meaning})"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The outcome of an attempt.

    Attributes:
        kind: `done`; `refused` (bad input, does not fit: the same command would be refused again); `failed` (an error
            of the program); `lost` (a host, a process or a peer went away); `preempted` (it saved and can resume);
            `interrupted`.
        exit_code: the launcher's exit code if it stops here.
        cause: the process that is the root cause; None for `done`, and if it was not a process.
        reason: what happened, if the cause was not a process.
    """

    kind: Literal["done", "refused", "failed", "lost", "preempted", "interrupted"]
    exit_code: int
    cause: Outcome | None = None
    reason: str = ""

    @property
    def again(self) -> bool:
        """Whether a restart may end better."""
        return self.kind in ("lost", "preempted")

    def __str__(self) -> str:
        return ": ".join([self.kind, *([str(self.cause)] if self.cause else [self.reason] if self.reason else [])])


def judge(outcomes: Sequence[Outcome]) -> Judgement:
    """Combines the exits of all processes of an attempt.

    In this order: a refusal (2, 3, 4) is never a consequence of something else; a lost host, or a process killed from
    outside, explains errors of the others; then an error of the program; then the exits of a program that misses a
    peer (5), was preempted (75) or was aborted by its runtime.
    """
    bad = [outcome for outcome in outcomes if outcome.code != OK]
    if not bad:
        return Judgement(kind="done", exit_code=OK)

    def first(codes: tuple[int, ...]) -> Outcome | None:
        return next((outcome for code in codes for outcome in bad if outcome.code == code), None)

    if cause := first((BAD_INPUT, DOES_NOT_FIT, COMPILER_CRASH)):
        assert cause.code is not None
        return Judgement(kind="refused", exit_code=cause.code, cause=cause)
    if cause := first((INTERRUPTED,)):
        return Judgement(kind="interrupted", exit_code=INTERRUPTED, cause=cause)
    # A process that exits with 75 has saved a checkpoint, so the run can resume even if a host is gone.
    saved = first((PREEMPTED,))
    lost = next((outcome for outcome in bad if outcome.code is None or outcome.signal in _FROM_OUTSIDE), None)
    if lost is not None:
        return Judgement(kind="lost", exit_code=PREEMPTED if saved else PEER_LOST, cause=lost)
    failed = next(
        # A program that fails by itself exits with a code; peers and the runtime end by 5, 75 or a signal.
        (o for o in bad if o.signal is None and o.code not in (PEER_LOST, PREEMPTED)),
        None,
    )
    if failed is not None:
        assert failed.code is not None
        return Judgement(kind="failed", exit_code=failed.code, cause=failed)
    if saved is not None:
        return Judgement(kind="preempted", exit_code=PREEMPTED, cause=saved)
    # Only exit code 5 and signals of the runtime are left; a signal says more about the cause.
    aborted = next((outcome for outcome in bad if outcome.signal is not None), bad[0])
    return Judgement(kind="lost", exit_code=PEER_LOST, cause=aborted)
