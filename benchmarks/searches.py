"""Searches held against brute force: of ten layouts that were compiled, does `--search` find the fastest? No TPU.

    python benchmarks/searches.py [small_dense_v6e-8 …] [--compile] [--most 10]

Each case is a run on a pod. Its candidates are ranked by arithmetic as `--search` ranks them; the `--most` best
distinct layouts that fit by arithmetic, the best of each kind among them, are compiled by the real TPU compiler, and
what came of each is kept in `tests/golden/searches/`, one file a case, written after each compilation: begun again, the
benchmark goes on where it was. Without `--compile` only what is kept is printed. The search is then replayed with the
kept answers (`tests/levanter/plan/search/test_searches.py` does the same in `make test`).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from haliax_ext.hlo import MemoryFigures, OutOfMemory
from haliax_ext.meshspec import MeshSpec
from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.evaluate.eval_lm import describe as describe_evaluation
from levanter.commands.train.lm.train_lm import TrainLmConfig
from levanter.commands.train.lm.train_lm import describe as describe_training
from levanter.config import Loaded, load_written
from levanter.hardware import Accelerator, parse_accelerator
from levanter.plan.aot import Compiled, Refused
from levanter.plan.compile_cache import CompileCache
from levanter.plan.preflight.state import Question
from levanter.plan.search import Candidate, SearchResult, SearchSubject, candidates, estimate, search, search_subject
from levanter.plan.search.space import LayoutCompiler
from levanter.plan.step_time_model import StepTime
from levanter.plan.target_from_name import pod_target
from levanter.plan.verdict import ProgramVerdict
from levanter.runplan import RunPlan, Target, Workload

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "tests" / "golden" / "searches"
GIB = 1 << 30
UNTUNED = "--trainer.compiler=default"
"""What is kept was compiled when nothing was tuned by default; tuned, FSDP alone is faster on v6e, and beside tensor
parallelism on v5p."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is laid out.

    Attributes:
        name: of the file with what was compiled.
        entry_point: `train_lm` or `eval_lm`.
        argv: its command line, paths below the repository.
        target: the pod.
    """

    name: str
    entry_point: str
    argv: tuple[str, ...]
    target: str

    @property
    def pod(self) -> Accelerator:
        """The pod."""
        return parse_accelerator(self.target)

    @property
    def words(self) -> list[str]:
        """The command line with whole paths."""
        return [str(ROOT / word) if word.startswith("config/") else word for word in self.argv]

    @cached_property
    def loaded(self) -> Loaded[Any]:
        """The run's configuration, and which of its keys are written."""
        which: type = TrainLmConfig if self.entry_point == "train_lm" else EvalLmConfig
        return load_written(which, self.words)

    @property
    def config(self) -> Any:
        """The run's configuration."""
        return self.loaded.config

    def describe(self, config: Any, target: Target) -> RunPlan:
        """The run on a target."""
        describe = describe_training if self.entry_point == "train_lm" else describe_evaluation
        return describe(config, target, written=self.loaded.written)

    @cached_property
    def plan(self) -> RunPlan:
        """The run as it is configured."""
        return self.describe(self.config, pod_target(self.pod))

    @cached_property
    def subject(self) -> SearchSubject:
        """What is laid out."""
        return search_subject(self.plan)


CASES = (
    Case(
        name="small_dense_v6e-8", entry_point="train_lm", target="v6e-8",
        argv=("--config_path", "config/train/llama_1b_v6e-64.yaml", "--trainer.train_batch_size=64", UNTUNED),
    ),
    Case(
        name="8b_eval_v6e-8", entry_point="eval_lm", target="v6e-8",
        argv=(
            "--configs", "config/eval/llama3.1_405b_v4-256.yaml", "config/model/llama3.1_8b.yaml",
            "--hf_checkpoint=meta-llama/Llama-3.1-8B", "--trainer.mesh.axes.model=1", UNTUNED,
        ),
    ),
    Case(
        name="70b_train_v5p-256", entry_point="train_lm", target="v5p-256",
        argv=(
            "--config_path", "config/train/published/llama2_70b_v5p-1024.yaml", "--trainer.train_batch_size=512",
            "--model.gradient_checkpointing=true", UNTUNED,
        ),
    ),
    Case(
        name="moe_eval_v6e-64", entry_point="eval_lm", target="v6e-64",
        argv=("--config_path", "config/eval/mixtral_8x22b.yaml", UNTUNED),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the compiler said of a layout.

    Attributes:
        peak: bytes on a chip; what was asked for where it was refused.
        fits: whether it was compiled.
        seconds: the time to plan with; None where it was refused.
        tokens: of an execution.
    """

    peak: int
    fits: bool
    seconds: float | None
    tokens: int


def kept(case: Case) -> dict[str, Answer]:
    """What was compiled of a case, by the text of its candidates."""
    path = KEPT / f"{case.name}.json"
    found = json.loads(path.read_text())["compiled"] if path.exists() else {}
    return {text: Answer(**values) for text, values in found.items()}


def every(case: Case) -> list[Candidate]:
    """The layouts of a case that divide."""
    subject, pod = case.subject, case.pod
    return candidates(
        subject.axes.sizes,
        tensor_axes=subject.tensor_axes,
        devices=pod.devices // pod.slices,
        global_batch=subject.global_batch,
        slices=pod.slices,
    )


def chosen(case: Case, most: int) -> list[Candidate]:
    """The layouts that brute force compiles: the best by arithmetic, and the best of each kind among them."""
    priced = [(estimate(candidate, case.subject, case.pod), candidate) for candidate in every(case)]
    fitting = sorted((p for p in priced if p[0].fits(case.pod.hbm_bytes)), key=lambda p: p[0].seconds_per_token)
    layouts: dict[Candidate, Candidate] = {}
    for _, candidate in fitting:
        layouts.setdefault(replace(candidate, rows=1), candidate)
    ranked = list(layouts.values())
    best_of_kinds = list({c.kind: c for c in reversed(ranked)}.values())
    return list(dict.fromkeys([*best_of_kinds, *ranked]))[:most]


def as_verdict(candidate: Candidate, answer: Answer) -> ProgramVerdict:
    """A kept answer as the search takes it."""
    mesh = MeshSpec.of(data=candidate.batch_ways, model=candidate.tensor_ways)
    times = {"lower_seconds": 0.0, "compile_seconds": 0.0}
    if not answer.fits or answer.seconds is None:
        refusal = OutOfMemory(needed=answer.peak, available=0, allocations=(), message="")
        return ProgramVerdict(name="", outcome=Refused(name="", mesh=mesh, refusal=refusal, **times))
    memory = MemoryFigures(argument=0, output=0, alias=0, temp=0, generated_code=0, peak=answer.peak)
    work = Workload(
        program="", tokens=answer.tokens, unit="tokens", items=answer.tokens, flops_full=0.0, flops_causal=0.0,
        executions=1, reason="",
    )  # fmt: skip
    return ProgramVerdict(
        name="",
        outcome=Compiled(
            name="", mesh=mesh, memory=memory, figures=None, text_error=None, coordinates=((0,),), **times
        ),
        time=StepTime(cycles=answer.seconds, kernels_at_peak=0.0, kernels_expected=0.0, memory=0.0, links=()),
        workload=work,
    )


def replayed(case: Case, answers: Mapping[str, Answer]) -> SearchResult:
    """The search with kept answers in the compiler's place.

    Raises:
        KeyError: the search asks for a layout that was not compiled.
    """
    return search(case.subject, case.pod, compile_candidate=lambda c: as_verdict(c, answers[str(c)]))


def winner(case: Case, answers: Mapping[str, Answer]) -> str:
    """What the search comes to with kept answers, in words."""
    try:
        found = replayed(case, answers)
    except KeyError as missing:
        return f"not compiled yet: {missing.args[0]}"
    return str(found.best.candidate) if found.best else "nothing fits"


def answer_of(verdict: ProgramVerdict) -> Answer:
    """What the compiler said, to be kept."""
    if verdict.outcome is None or verdict.peak_bytes is None:
        raise SystemExit("\n".join(verdict.why_not))
    time, work = verdict.time, verdict.workload
    return Answer(
        peak=verdict.peak_bytes,
        fits=bool(verdict.fits),
        seconds=None if time is None else time.expected,
        tokens=0 if work is None else work.tokens,
    )


def compile_all(case: Case, most: int) -> None:
    """Compiles the layouts of a case that are not kept yet, and what its search asks for beside them."""
    answers = kept(case)
    question = Question(
        target=case.target,
        describe=lambda _: case.plan,
        provider="levanter.main.plan:describe",
        payload={"entry_point": case.entry_point, "argv": case.words},
        kept=CompileCache.here(),
    )
    compile_one = LayoutCompiler(
        question=question, config=case.config, describe=case.describe, plan=case.plan, say=print
    )

    def ask(candidate: Candidate) -> ProgramVerdict:
        if str(candidate) not in answers:
            print(f"{case.name}: {candidate}", file=sys.stderr, flush=True)
            answers[str(candidate)] = answer_of(compile_one(candidate))
            write(case, answers)
        return as_verdict(candidate, answers[str(candidate)])

    # What the search asks for comes first: stopped half-way, it can be replayed.
    search(case.subject, case.pod, compile_candidate=ask)
    for candidate in chosen(case, most):
        ask(candidate)


def write(case: Case, answers: Mapping[str, Answer]) -> None:
    """Keeps what was compiled."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{case.name}.json"
    document = {"target": case.target, "argv": list(case.argv), "compiled": {k: vars(v) for k, v in answers.items()}}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def table(answers: Mapping[str, Answer]) -> list[str]:
    """Lines of what was compiled, the fastest first."""

    def speed(answer: Answer) -> float:
        return answer.tokens / answer.seconds if answer.seconds else 0.0

    ordered = sorted(answers.items(), key=lambda item: -speed(item[1]))
    return [
        f"| {text} | {answer.peak / GIB:.2f} | {f'{speed(answer):,.0f}' if answer.fits else 'refused'} |"
        for text, answer in ordered
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="which; all by default")
    parser.add_argument("--compile", action="store_true", help="compile what is not kept")
    parser.add_argument("--most", type=int, default=10, help="layouts of each case")
    asked = parser.parse_args(argv)
    for case in (case for case in CASES if not asked.cases or case.name in asked.cases):
        if asked.compile:
            compile_all(case, asked.most)
        answers = kept(case)
        print(f"\n{case.name}\n\n| layout | GiB a chip | tokens/s |\n|---|---|---|")
        print("\n".join(table(answers)))
        if answers:
            print(f"\nsearch: {winner(case, answers)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
