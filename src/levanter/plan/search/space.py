"""Applies the layouts of `plan --search` to a run's configuration, and compiles the run in them.

A searched layout replaces all of `trainer.mesh`, and sets the number of rows that a device handles at a time; for a
training run also `gradient_checkpointing`. Everything else stays as the user wrote it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levanter.hardware import Accelerator, parse_accelerator
from levanter.html.format import seconds_text
from levanter.mesh import MeshConfig
from levanter.mesh.config import DEFAULT_AXES
from levanter.plan.aot import CompileRequest, compile_ahead
from levanter.plan.compile_cache import CompileCache
from levanter.plan.compile_pool import scratch_folder
from levanter.plan.compilers import has_compiler
from levanter.plan.decode_roofline import DecodeLoad, serving_report
from levanter.plan.oom_report import decode_cost
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.search.candidates import Candidate
from levanter.plan.search.decode import DecodeLayout, decode_search_to_json, render_decode_search, search_decode
from levanter.plan.search.estimate import NothingToSearch, search_subject
from levanter.plan.search.render import render, search_to_json
from levanter.plan.search.search import SearchResult, search
from levanter.plan.target_from_name import pod_target
from levanter.plan.verdict import ProgramVerdict, Verdict
from levanter.runplan import OK, RunPlan, Searchable, Target


def layout_keys(plan: RunPlan[Any], candidate: Candidate) -> dict[str, Any]:
    """The keys besides `trainer.mesh` that a layout sets, by dotted name."""
    searchable = plan.searchable
    assert isinstance(searchable, Searchable), searchable
    keys: dict[str, Any] = dict(searchable.keys(candidate.rows, candidate.batch_ways))
    if searchable.remat_key is not None:
        keys[searchable.remat_key] = candidate.remat
    return keys


def with_layout(config: Any, candidate: Candidate, keys: Mapping[str, Any]) -> Any:
    """The configuration with the layout of a candidate, and the keys from `layout_keys`."""
    mesh: MeshConfig = config.trainer.mesh
    options = candidate.mesh_options(mesh.overrides)
    removed = mesh.axes.keys() - options["axes"].keys() - DEFAULT_AXES.keys()
    # The mappings are the candidate's alone, so that no mesh axis of it is idle; only properties of the pod and of
    # checks carry over from the run.
    laid_out = MeshConfig(
        batch_axis_name=mesh.batch_axis_name,
        dcn_axes=mesh.dcn_axes,
        granule=mesh.granule,
        allow_dcn=mesh.allow_dcn,
        # Mesh axes of the run that a layout does not have are named by nothing any more.
        allow_replicated=[entry for entry in mesh.allow_replicated if entry not in removed],
        hbm_gib=mesh.hbm_gib,
        **options,
    )
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, mesh=laid_out))
    for dotted, value in keys.items():
        config = _with(config, dotted.split("."), value)
    return config


def _with(config: Any, path: list[str], value: Any) -> Any:
    head, *rest = path
    return dataclasses.replace(config, **{head: _with(getattr(config, head), rest, value) if rest else value})


@dataclass(frozen=True, kw_only=True)
class LayoutCompiler:
    """Compiles a run's main Program in other layouts.

    Attributes:
        question: of the run as configured.
        config: of the run.
        describe: of the entry point.
        plan: the run as configured.
        say: receives progress messages.
    """

    question: Question
    config: Any
    describe: Callable[[Any, Target], RunPlan]
    plan: RunPlan
    say: Callable[[str], None]

    @property
    def program(self) -> str:
        """The Program's name."""
        return self.plan.workloads[0].program

    def __call__(self, candidate: Candidate) -> ProgramVerdict:
        """Runs preflight on a layout and returns the verdict of the main Program."""
        verdict = preflight(self.question_for(candidate), progress=self._heard)
        program = next((p for p in verdict.programs if p.name == self.program), None)
        # A layout that cannot be described has no Programs; its headline is the reason.
        return program or ProgramVerdict(name=self.program, outcome=None, why_not=(verdict.headline,))

    def ahead(self, candidates: Sequence[Candidate]) -> None:
        """Compiles the next layouts in parallel, if results are cached; the search then reads them from the cache."""
        pod = parse_accelerator(self.question.target)
        if self.question.kept is None or len(candidates) < 2:
            return
        runs = []
        for question in map(self.question_for, candidates):
            try:
                plan = question.describe(pod_target(pod))
            except ValueError:
                # `__call__` describes the layout again, and reports the error.
                continue
            if not plan.errors:
                runs.append(CompileRequest(payload=question.payload, plan=plan))
        compile_ahead(
            self.question.provider,
            runs,
            target=pod,
            programs=(self.program,),
            kept=self.question.kept,
            on_event=lambda event: self._heard(f"{event['event']} {event.get('program')} for {pod}"),
        )

    def question_for(self, candidate: Candidate) -> Question:
        """The question for a layout."""
        keys = layout_keys(self.plan, candidate)
        varied = with_layout(self.config, candidate, keys)
        # The worker process describes the same layout from the payload
        # (`with_candidate`), so it must have all of it.
        candidate_payload = {"candidate": dataclasses.asdict(candidate), "candidate_keys": keys}
        return dataclasses.replace(
            self.question,
            describe=lambda target: self.describe(varied, target),
            payload={**self.question.payload, **candidate_payload},
            require_inputs=False,
            scope="timed",
        )

    def _heard(self, text: str) -> None:
        # Only compiling is slow enough to report; the other stages of a layout's preflight would flood the terminal.
        if text.startswith("compil"):
            self.say(f"  {text}")


def search_layouts(
    question: Question,
    *,
    config: Any,
    describe: Callable[[Any, Target], RunPlan],
    plan: RunPlan,
    pod: Accelerator,
    configured: ProgramVerdict | None = None,
    say: Callable[[str], None],
) -> SearchResult:
    """Searches the layouts of a run on a pod, with the run's own Programs.

    Args:
        question: of the run as configured.
        config: of the run.
        describe: of the entry point.
        plan: the run as configured.
        pod: the target.
        configured: the verdict of the run's main Program in the configured layout, where it was compiled.
        say: receives progress messages.
    """
    subject = search_subject(plan)
    with scratch_folder() as scratch:
        # Parallel workers hand their results over through a cache; without one of the user's, a temporary one serves.
        cache = question.kept or CompileCache(folder=scratch)
        with_cache = dataclasses.replace(question, kept=cache)
        compiler = LayoutCompiler(question=with_cache, config=config, describe=describe, plan=plan, say=say)
        compiles = question.compile and has_compiler(pod)
        return search(
            subject,
            pod,
            compile_candidate=compiler if compiles else None,
            ahead=compiler.ahead,
            configured=configured,
            on_event=say,
        )


def _loads(verdict: Verdict) -> tuple[DecodeLoad, ...]:
    report = serving_report(verdict)
    return () if report is None else report.loads


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The rendered result of a search.

    Attributes:
        text: for people.
        values: for `--json`.
    """

    text: str
    values: Mapping[str, object]


def search_run_layouts(run: LayoutCompiler, pod: Accelerator, *, configured: ProgramVerdict | None) -> Searched:
    """`search_layouts` with its result rendered.

    Args:
        run: the run.
        pod, configured: see `search_layouts`.
    """
    result = search_layouts(
        run.question,
        config=run.config,
        describe=run.describe,
        plan=run.plan,
        pod=pod,
        configured=configured,
        say=run.say,
    )
    best = result.best or result.closest
    keys = {} if best is None else layout_keys(run.plan, best.candidate)
    return Searched(
        text=render(result, target=pod.name, keys=keys), values=search_to_json(result, target=pod.name, keys=keys)
    )


def search_run_decode(run: LayoutCompiler, pod: Accelerator) -> Searched:
    """Searches rows, mesh and cache of a run that generates text, compiled as the run would be.

    Args:
        run: the run.
        pod: the target.

    Raises:
        NothingToSearch: the run does not have the keys of `generate`, or the memory of a device is not known.
    """
    plan, question = run.plan, run.question
    served, limit = decode_cost(plan), plan.target.limit_bytes
    assert served is not None
    if not hasattr(run.config, "inference"):
        raise NothingToSearch(f"{plan.entry_point}: rows are searched with the keys of `generate`")
    if limit is None:
        raise NothingToSearch(f"{plan.entry_point}: the memory of a device is not known")

    def compiled(layout: DecodeLayout) -> tuple[bool, str]:
        run.say(f"compiling {layout}")
        varied_keys = {"candidate": dataclasses.asdict(layout.candidate), "candidate_keys": layout.keys}
        varied = with_layout(run.config, layout.candidate, layout.keys)
        layout_question = dataclasses.replace(
            question,
            describe=lambda target: run.describe(varied, target),
            payload={**question.payload, **varied_keys},
            require_inputs=False,
            scope="timed",
        )
        verdict = preflight(layout_question)
        # The report has times for several numbers of rows; the goal is judged at those of this layout.
        steps = [load for load in _loads(verdict) if load.rows == layout.rows]
        took = f"; {seconds_text(steps[-1].time[1])} a token" if steps and steps[-1].time is not None else ""
        return verdict.exit_code == OK, f"{verdict.headline.partition(';')[0]}{took}"

    goal = run.config.plan.goal
    result = search_decode(
        served,
        pod,
        goal,
        limit=limit,
        compile_layout=compiled if question.compile and has_compiler(pod) else None,
        overrides=run.config.trainer.mesh.overrides,
    )
    return Searched(
        text=render_decode_search(result, target=pod.name), values=decode_search_to_json(result, target=pod.name)
    )


def with_candidate(config: Any, payload: Mapping[str, Any]) -> Any:
    """The configuration for a worker's payload, with the layout of a candidate if the payload has one."""
    fields = payload.get("candidate")
    if fields is None:
        return config
    # JSON turned the tuple into a list.
    return with_layout(config, Candidate(**{**fields, "cut": tuple(fields["cut"])}), payload["candidate_keys"])
