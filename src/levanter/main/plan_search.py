"""What `plan --search` varies in a run's configuration, and what it must know about the run to cost a layout.

A searched layout replaces all of `trainer.mesh`, and sets the number of rows that a device handles at a time; for a
training run also `gradient_checkpointing`. Everything else stays as the user wrote it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from levanter.hardware import Accelerator
from levanter.mesh import MeshConfig
from levanter.plan.preflight import Question, preflight
from levanter.plan.search import Candidate, SearchResult, search, subject_of
from levanter.plan.verdict import ProgramVerdict
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


def layout_compiler(
    question: Question,
    *,
    config: Any,
    describe: Callable[[Any, Target], RunPlan],
    plan: RunPlan,
    say: Callable[[str], None],
) -> Callable[[Candidate], ProgramVerdict]:
    """What compiles a run's main Program in other layouts.

    Args:
        question: the one about the run itself.
        config: of the run.
        describe: the entry point's.
        plan: the run as configured.
        say: receives progress messages.
    """
    name = plan.workloads[0].program

    def heard(text: str) -> None:
        # The slow part of a candidate's preflight.
        if text.startswith("compil"):
            say(f"  {text}")

    def compile_candidate(candidate: Candidate) -> ProgramVerdict:
        keys = keys_of(plan, candidate)
        varied = vary(config, candidate, keys)
        asked = dataclasses.replace(
            question,
            describe=lambda target: describe(varied, target),
            payload={**question.payload, "candidate": dataclasses.asdict(candidate), "candidate_keys": keys},
            require_inputs=False,
            scope="timed",
        )
        verdict = preflight(asked, progress=heard)
        found = next((p for p in verdict.programs if p.name == name), None)
        return found if found is not None else ProgramVerdict(name=name, outcome=None, why_not=(verdict.headline,))

    return compile_candidate


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
    compile_candidate = layout_compiler(question, config=config, describe=describe, plan=plan, say=say)
    return search(subject, pod, compile_candidate=compile_candidate, own=own, on_event=say)


def with_candidate(config: Any, payload: Mapping[str, Any]) -> Any:
    """The configuration of a worker's payload: varied if it names a candidate."""
    given = payload.get("candidate")
    if given is None:
        return config
    # It arrived as JSON, which has no tuples.
    return vary(config, Candidate(**{**given, "cut": tuple(given["cut"])}), payload["candidate_keys"])
