"""State of a preflight: the question, and the stages and findings so far.

A *question* is a run, a target and the extent of the check. A *finding* is one error, as a sentence.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from haliax_ext.errors import gib
from levanter.plan.compile_cache import CompileCache
from levanter.plan.hbm_lower_bound import HbmLowerBound
from levanter.plan.verdict import Stage, StageStatus
from levanter.runplan import (
    BAD_INPUT,
    COMPILER_CRASH,
    DOES_NOT_FIT,
    NOT_DECIDED,
    OK,
    PlanOptions,
    RunPlan,
    Target,
)

Progress = Callable[[str], None]
Scope = Literal["timed", "run", "all"]
LOCAL = "local"
LIBRARIES = ("jax", "jaxlib", "haliax", "equinox", "optax", "numpy")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run, a target and the extent of the check.

    Attributes:
        target: an accelerator's name, or `local`.
        describe: describes the run on a target. Raises a `ValueError` where it cannot be described at all.
        provider: the same for the compile worker, `package.module:function` of (payload, target).
        payload: its first argument, plain JSON values.
        local: counts the devices of this machine; needed for the target `local` only.
        compile: whether Programs are compiled.
        scope: the Programs of the verdict: those with a workload (`timed`); all that the run executes, initialization
            by arithmetic where that decides (`run`); or all of them compiled (`all`).
        require_inputs: whether a missing input is an error.
        keep_text: a folder in which the compiler's text is written and stays.
        kept: the cache of compiler results; None to compile every Program.
        varied: the question of the same run with more words on its command line, for advice on a run that does not
            fit; None where the run has no command line. Raises a `ValueError` for wrong words.
        options: the block `plan:` of the run's configuration.
    """

    target: str
    describe: Callable[[Target], RunPlan]
    provider: str
    payload: Mapping[str, Any]
    local: Callable[[], Target] | None = None
    compile: bool = True
    scope: Scope = "timed"
    require_inputs: bool = False
    keep_text: Path | None = None
    kept: CompileCache | None = None
    varied: "Callable[[tuple[str, ...]], Question] | None" = None
    options: PlanOptions = PlanOptions()


@dataclass
class Inquiry:
    """The stages, exit codes and bounds that preflight has collected so far."""

    question: Question
    progress: Progress
    stages: list[Stage] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    known: tuple[str, HbmLowerBound] | None = None
    """Without a compiler: the Program that needs most memory, and the lower bound of its bytes."""

    def begin(self, doing: str | None = None) -> None:
        """Starts a stage, with a progress message where it takes long."""
        self.began = time.monotonic()
        if doing is not None:
            self.progress(doing)

    def end(
        self,
        name: str,
        message: str,
        *,
        findings: Iterable[str] = (),
        code: int = OK,
        status: StageStatus | None = None,
    ) -> None:
        """Records a stage; its status follows from the exit code unless it is given."""
        if status is None:
            status = "ok" if code == OK else "crashed" if code == COMPILER_CRASH else "refused"
        # Every code is collected: the exit code is decided at the end, by importance and not by order.
        self.codes.add(code)
        seconds = time.monotonic() - self.began
        self.stages.append(Stage(name=name, status=status, seconds=seconds, message=message, findings=tuple(findings)))
        self.progress(f"{name}: {message} ({seconds:.1f} s)")

    @property
    def exit_code(self) -> int:
        """The most important of the collected codes: does not fit, then a crash, then bad input, then undecided."""
        return next((code for code in (DOES_NOT_FIT, COMPILER_CRASH, BAD_INPUT, NOT_DECIDED) if code in self.codes), OK)


def format_of_limit(nbytes: int, limit: int | None, *, unit: str) -> str:
    """Bytes on a device and its limit, as text; `unit` is the word for a device."""
    if limit is None:
        return f"{gib(nbytes)} a {unit}"
    # Two decimals of GiB would show a small number as 0.00.
    if nbytes < 0.01 * limit:
        return f"{gib(nbytes)} of {gib(limit)} a {unit}"
    return f"{nbytes / (1 << 30):.2f} of {limit / (1 << 30):.2f} GiB a {unit}"


def first_line(texts: Sequence[str]) -> str:
    """The first line of the first text; empty for none."""
    return texts[0].splitlines()[0] if texts else ""


def raised_in_library(error: BaseException) -> bool:
    """Whether a third-party library raised `error`: then it is a bug, not bad input, and needs its traceback."""
    at = error.__traceback__
    # The innermost frame of the traceback is where the error was raised.
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    module = at.tb_frame.f_globals.get("__name__", "") if at is not None else ""
    return module.split(".")[0] in LIBRARIES
