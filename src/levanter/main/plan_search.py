"""What `plan --search` varies in a run's configuration, and what it must know about the run to cost a layout.

A searched layout replaces all of `trainer.mesh`, and sets the number of rows that a device handles at a time; for a
training run also `gradient_checkpointing`. Everything else stays as the user wrote it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from levanter.hardware import Accelerator, parse_accelerator
from levanter.mesh import MeshConfig
from levanter.plan.aot import Ahead, compile_ahead
from levanter.plan.kept import KeptAnswers
from levanter.plan.preflight import Question, preflight
from levanter.plan.search import Candidate, SearchResult, search, subject_of
from levanter.plan.targets import target_of_pod
from levanter.plan.verdict import ProgramVerdict
from levanter.plan.workers import scratch_folder
from levanter.run import RunPlan, Searchable, Target


def keys_of(plan: RunPlan[Any], candidate: Candidate) -> dict[str, Any]:
    """The keys besides `trainer.mesh` that a layout sets, by dotted name."""
    searchable = plan.searchable
    assert isinstance(searchable, Searchable), searchable
    keys: dict[str, Any] = dict(searchable.keys(candidate.rows, candidate.batch_ways))
    if searchable.remat_key is not None:
        keys[searchable.remat_key] = candidate.remat
    return keys


def vary(config: Any, candidate: Candidate, keys: Mapping[str, Any]) -> Any:
    """The configuration with the layout of a candidate, and the keys from `keys_of`."""
    mesh: MeshConfig = config.trainer.mesh
    options = candidate.mesh_options()
    laid_out = MeshConfig(
        batch_axis_name=mesh.batch_axis_name,
        dcn_axes=mesh.dcn_axes,
        granule=mesh.granule,
        allow_replicated=mesh.allow_replicated,
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
        question: the one about the run itself.
        config: of the run.
        describe: the entry point's.
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
        """What comes of a layout."""
        verdict = preflight(self.asked(candidate), progress=self._heard)
        found = next((p for p in verdict.programs if p.name == self.program), None)
        return found or ProgramVerdict(name=self.program, outcome=None, why_not=(verdict.headline,))

    def ahead(self, candidates: Sequence[Candidate]) -> None:
        """Compiles layouts side by side that will be asked for, if answers are kept and there is room."""
        pod = parse_accelerator(self.question.target)
        if self.question.kept is None or len(candidates) < 2:
            return
        runs = []
        for asked in map(self.asked, candidates):
            try:
                plan = asked.describe(target_of_pod(pod))
            except ValueError:
                # It will be said when this one is asked for.
                continue
            if not plan.errors:
                runs.append(Ahead(payload=asked.payload, plan=plan))
        compile_ahead(
            self.question.provider,
            runs,
            target=pod,
            programs=(self.program,),
            kept=self.question.kept,
            on_event=lambda event: self._heard(f"{event['event']} {event.get('program')} for {pod}"),
        )

    def asked(self, candidate: Candidate) -> Question:
        """The question about a layout."""
        keys = keys_of(self.plan, candidate)
        varied = vary(self.config, candidate, keys)
        given = {"candidate": dataclasses.asdict(candidate), "candidate_keys": keys}
        return dataclasses.replace(
            self.question,
            describe=lambda target: self.describe(varied, target),
            payload={**self.question.payload, **given},
            require_inputs=False,
            scope="timed",
        )

    def _heard(self, text: str) -> None:
        # The slow part of a candidate's preflight.
        if text.startswith("compil"):
            self.say(f"  {text}")


def search_layouts(
    question: Question,
    *,
    config: Any,
    describe: Callable[[Any, Target], RunPlan],
    plan: RunPlan,
    pod: Accelerator,
    own: ProgramVerdict | None = None,
    say: Callable[[str], None],
) -> SearchResult:
    """Searches the layouts of a run on a pod, with the run's own Programs.

    Args:
        question: as asked for the run itself.
        config: of the run.
        describe: the entry point's.
        plan: the run as it is configured.
        pod: on what.
        own: what came of the run's main Program in its own layout, where it was compiled.
        say: told what is being done.
    """
    subject = subject_of(plan)
    with scratch_folder() as scratch:
        # Where nothing is to be kept, answers of candidates that are compiled side by side are kept for the search.
        kept = question.kept or KeptAnswers(folder=scratch)
        asked = dataclasses.replace(question, kept=kept)
        compiler = LayoutCompiler(question=asked, config=config, describe=describe, plan=plan, say=say)
        return search(subject, pod, compile_candidate=compiler, ahead=compiler.ahead, own=own, on_event=say)


def with_candidate(config: Any, payload: Mapping[str, Any]) -> Any:
    """The configuration of a worker's payload: varied if it names a candidate."""
    given = payload.get("candidate")
    if given is None:
        return config
    # It arrived as JSON, which has no tuples.
    return vary(config, Candidate(**{**given, "cut": tuple(given["cut"])}), payload["candidate_keys"])
