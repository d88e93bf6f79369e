"""State of a preflight: the question, and the stages and findings so far.

Words. *Question*: which run, which target, how far to go. *Finding*: one thing that is wrong, in a sentence.
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
from levanter.runplan import BAD_INPUT, COMPILER_CRASH, DOES_NOT_FIT, NOT_DECIDED, OK, RunPlan, Target

Progress = Callable[[str], None]
Scope = Literal["timed", "run", "all"]
LOCAL = "local"
LIBRARIES = ("jax", "jaxlib", "haliax", "equinox", "optax", "numpy")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        target: an accelerator's name, or `local`.
        describe: the run on a target. Raises a `ValueError` where it cannot be described at all.
        provider: the same for the compile worker, `package.module:function` of (payload, target).
        payload: its first argument, plain JSON values.
        local: the devices here; needed for the target `local` only.
        compile: whether the compiler is asked.
        scope: which Programs the verdict is over: those that make up the job's time (`timed`), everything that runs,
            what draws values by arithmetic (`run`), or everything compiled (`all`).
        require_inputs: whether a missing input is refused.
        keep_text: a folder in which the compiler's text stays.
        kept: where answers of compilers are kept and looked for; None for asking anew.
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


@dataclass
class Inquiry:
    """What has been found so far."""

    question: Question
    progress: Progress
    stages: list[Stage] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    known: tuple[str, HbmLowerBound] | None = None
    """Where no compiler is asked: the Program that needs most, and what is known of its bytes."""

    def begin(self, doing: str | None = None) -> None:
        """Starts a stage; says what it does where that takes long."""
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
        """Notes a stage; its status follows from the exit code unless it is said."""
        if status is None:
            status = "ok" if code == OK else "crashed" if code == COMPILER_CRASH else "refused"
        self.codes.add(code)
        seconds = time.monotonic() - self.began
        self.stages.append(Stage(name=name, status=status, seconds=seconds, message=message, findings=tuple(findings)))
        self.progress(f"{name}: {message} ({seconds:.1f} s)")

    @property
    def exit_code(self) -> int:
        """3 wins over a crash, that over bad input, and that over nothing decided."""
        return next((code for code in (DOES_NOT_FIT, COMPILER_CRASH, BAD_INPUT, NOT_DECIDED) if code in self.codes), OK)


def format_of_limit(nbytes: int, limit: int | None) -> str:
    """Bytes on a device, and of how many."""
    if limit is None:
        return f"{gib(nbytes)} a device"
    if nbytes < 0.01 * limit:
        return f"{gib(nbytes)} of {gib(limit)} a chip"
    return f"{nbytes / (1 << 30):.2f} of {limit / (1 << 30):.2f} GiB a chip"


def first_line(texts: Sequence[str]) -> str:
    """The first line of the first text; empty for none."""
    return texts[0].splitlines()[0] if texts else ""


def raised_in_library(error: BaseException) -> bool:
    """Whether a library below this package raised `error`: then it is a bug, not bad input, and needs its traceback."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    module = at.tb_frame.f_globals.get("__name__", "") if at is not None else ""
    return module.split(".")[0] in LIBRARIES
