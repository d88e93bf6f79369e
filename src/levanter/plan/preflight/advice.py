"""Advice on a run that does not fit: layouts, recipes and pods that hold it, compiled before they are called to fit.

The advice is tried in this order: layouts (`levanter.plan.suggestions`), other recipes (`RECIPES`), larger pods of the
same kind. At most `MOST_COMPILED` of them are compiled; the first that fits, with room, is the advice. Without a
compiler the first that fits by arithmetic is named, as one that *may* fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from haliax_ext.errors import gib
from levanter.hardware import Accelerator, AcceleratorError, default_topologies, parse_accelerator
from levanter.plan.aot import CompileCrash, Compiled, CompilerMissing, Refused, WorkerBadInput, compile_programs
from levanter.plan.compile_selection import coresident_bytes
from levanter.plan.compilers import has_compiler
from levanter.plan.hbm_lower_bound import program_lower_bound
from levanter.plan.layout_memory import LayoutChange, LayoutSubject
from levanter.plan.offload import offloaded_activations
from levanter.plan.oom_report import nothing_fits, too_few_chips
from levanter.plan.preflight.state import Inquiry, Question
from levanter.plan.suggestions import HEADROOM, Suggestion, bound_factor, suggest_layouts
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan

MOST_COMPILED = 3
RECIPES: tuple[tuple[LayoutChange, ...], ...] = (
    (LayoutChange(section="optimizer", entries=(("type", "adafactor"),)),),
    (LayoutChange(section="trainer", entries=(("mp", "p=bf16,c=bf16"),)),),
)
"""Recipes that need less memory, with other numerics: factored second moments, parameters and moments in 16 bits."""
LARGER = 8
"""How many times more chips a suggested pod may have."""


@dataclass
class Advisor:
    """Looks for what would hold one Program of a run.

    Attributes:
        inquiry: of the run; its question can vary the run.
        pod: the target.
        program: the Program's name.
        scale: bytes that compiled suggestions needed over their estimates, at most.
        compiled: how many suggestions were compiled.
        lines: suggestions that the compiler refused, or failed on.
    """

    inquiry: Inquiry
    pod: Accelerator
    program: str
    scale: float = 1.0
    compiled: int = 0
    lines: list[str] = field(default_factory=list)

    def __call__(self, subject: LayoutSubject) -> tuple[str, ...]:
        """The lines of advice; the last one is the suggestion, or the reason why there is none."""
        reason, offloading = too_few_chips(subject), None
        for suggestion in self._changes(subject, reason):
            # A refusal of an earlier suggestion may have shown that later ones need more as well.
            if suggestion.expected * self.scale > (1 - HEADROOM) * subject.hbm_bytes:
                continue
            # Half an hour of compilation: only named, and only where nothing else fits.
            if suggestion.offloads:
                offloading = offloading or suggestion
            elif self._question(suggestion.words) is None:
                return (*self.lines, str(suggestion))
            elif self.compiled >= MOST_COMPILED:
                break
            else:
                line = self._tried(suggestion.words, suggestion.yaml, suggestion.expected, self.pod)
                if line is not None:
                    return (*self.lines, line)
        if offloading is not None:
            return (*self.lines, str(offloading))
        larger = self._larger_pod(subject)
        first = reason or (nothing_fits(subject) if not self.lines else "no further change fits by arithmetic")
        return (*self.lines, first, *([] if larger is None else [larger]))

    def _changes(self, subject: LayoutSubject, reason: str | None) -> Iterator[Suggestion]:
        """Changes of the layout, then recipes, alone and with changes of the layout."""
        if reason is None:
            yield from suggest_layouts(subject)
        if not subject.training:
            return
        factor = bound_factor(subject)
        now = program_lower_bound(subject.plan, self.program, hbm_bytes=subject.hbm_bytes)
        # The state of another optimizer is known once the run is described with it.
        for recipe in RECIPES:
            plan = self._described(recipe)
            if plan is None or plan.errors:
                continue
            changed = LayoutSubject(plan=plan, program=plan.program(self.program), hbm_bytes=subject.hbm_bytes)
            known = program_lower_bound(plan, self.program, hbm_bytes=subject.hbm_bytes)
            if known.total < now.total and known.recomputed:
                yield Suggestion(changes=recipe, known=known, expected=round(known.total * factor), unit=self.pod.unit)
                further = suggest_layouts(changed, factor=factor)
                yield from (replace(layout, changes=(*recipe, *layout.changes)) for layout in further)

    def _described(self, changes: tuple[LayoutChange, ...]) -> RunPlan | None:
        """The run with changes of its recipe; None where it cannot be described so."""
        words = tuple(f"--{change.section}.{key}={value}" for change in changes for key, value in change.entries)
        question = self._varied(words)
        return None if question is None else _description(question, self.pod, self.program)

    def _varied(self, words: tuple[str, ...]) -> Question | None:
        """The question of the run with more words on its command line; None where the words are wrong."""
        question = self.inquiry.question
        if question.varied is None:
            return None
        try:
            return replace(question.varied(words), target=self.pod.name, keep_text=None, require_inputs=False)
        except ValueError:
            return None

    def _question(self, words: tuple[str, ...]) -> Question | None:
        """The question to compile; None where nothing can be compiled."""
        question = self.inquiry.question
        if not question.compile or not has_compiler(self.pod):
            return None
        return self._varied(words)

    def _tried(self, words: tuple[str, ...], name: str, expected: int, pod: Accelerator) -> str | None:
        """Compiles the run with changes; the line of a suggestion that fits, None for one that does not."""
        question = self._question(words)
        plan = None if question is None else _description(question, pod, self.program)
        if question is None or plan is None or plan.errors:
            return None
        self.compiled += 1
        self.inquiry.progress(f"compiling {self.program} for {pod}, suggestion {self.compiled}: {name}")
        try:
            needed, limit = compiled_bytes(question, plan, pod, self.program), plan.target.limit_bytes
        except (CompilerMissing, WorkerBadInput, CompileCrash) as error:
            # Without this line the reader would take the next suggestion for the first.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.lines.append(f"unknown: {name}  # the compiler failed: {reason}")
            return None
        if limit is None:
            return None
        size = f"{needed / (1 << 30):.2f} of {limit / (1 << 30):.2f} GiB a {pod.unit}"
        if needed <= (1 - HEADROOM) * limit:
            return f"would fit: {name}  # {size}, compiled"
        # The bound was further off than estimated; layouts of the same step will be, too.
        self.scale = max(self.scale, needed / max(expected, 1))
        self.lines.append(f"does not fit: {name}  # {size}, compiled" + ("" if needed > limit else ": no room"))
        return None

    def _larger_pod(self, subject: LayoutSubject) -> str | None:
        """The smallest larger pod of the same kind that holds the run as configured, compiled if possible."""
        factor, question = bound_factor(subject), self.inquiry.question
        for pod in larger_pods(self.pod):
            plan = _description(replace(question, target=pod.name), pod, self.program)
            limit = None if plan is None else plan.target.limit_bytes
            if plan is None or limit is None or plan.errors:
                continue
            known = program_lower_bound(plan, self.program, hbm_bytes=limit)
            expected = round(known.total * factor)
            if expected * self.scale > (1 - HEADROOM) * limit:
                continue
            if self._question(()) is None:
                return f"may fit: as configured on {pod}  # at least {gib(known.total)} of {gib(limit)} a {pod.unit}"
            line = self._tried((), f"as configured on {pod}", expected, pod)
            # One pod beyond the limit may be compiled: without it there would be no advice at all.
            if line is not None or self.compiled > MOST_COMPILED:
                return line
        return None


def larger_pods(pod: Accelerator) -> Iterator[Accelerator]:
    """Pods of the same generation, with more chips in as many slices, up to `LARGER` times as many."""
    generation = pod.generation
    if generation.platform == "gpu":
        # Twice as many hosts, and so on.
        names = [f"{generation.name}x{pod.chips << n}" for n in range(1, LARGER.bit_length())]
    else:
        chips, slices = pod.chips // pod.slices, f"{pod.slices}x" if pod.slices > 1 else ""
        sizes = [size for size in default_topologies(generation) if chips < size <= LARGER * chips]
        names = [f"{slices}{generation.name}-{size * generation.cores_per_chip}" for size in sizes]
    for name in names:
        try:
            yield parse_accelerator(name)
        except AcceleratorError:
            continue


def compiled_bytes(question: Question, plan: RunPlan, pod: Accelerator, program: str) -> int:
    """The bytes that a compiled Program needs on a chip.

    Args:
        question: of the run.
        plan: the run on the pod.
        pod: the target.
        program: the Program's name.

    Raises:
        CompilerMissing: there is none for the pod.
        WorkerBadInput: the run's configuration cannot be read by the compile worker.
        CompileCrash: the compiler ended without an answer.
    """
    (outcome,) = compile_programs(
        question.provider, question.payload, target=pod, programs=(program,), kept=question.kept, plan=plan
    )
    if isinstance(outcome, Refused):
        return outcome.refusal.needed
    assert isinstance(outcome, Compiled)
    return outcome.peak_bytes + coresident_bytes(plan).get(program, 0)


def _description(question: Question, pod: Accelerator, program: str) -> RunPlan | None:
    """The run of a question on a pod; None where it cannot be described, or would be refused for another reason."""
    try:
        plan = question.describe(pod_target(pod))
    except ValueError:
        return None
    # A run of another shape may have no Program of this name.
    if program not in {known.name for known in plan.programs}:
        return None
    offloaded = None if plan.errors else offloaded_activations(plan, program, pod=pod)
    return None if offloaded is not None and not offloaded.fits else plan
