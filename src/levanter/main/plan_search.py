"""What `plan --search` varies in a run's configuration, and what it must know of the run to price a layout.

A searched layout replaces `trainer.mesh` as a whole, and sets the batch that a device handles at a time; a
training run's `gradient_checkpointing` too. Everything else stays as the user wrote it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from levanter.hardware import Accelerator
from levanter.mesh import MeshConfig, ModelAxes
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.plan.preflight import Question, preflight
from levanter.plan.search import Candidate, SearchResult, SearchSubject, search
from levanter.plan.verdict import ProgramVerdict
from levanter.run import RunPlan, Searchable, Target


class NothingToSearch(ValueError):
    """The run has no part whose layout can be searched."""


def keys_of(plan: RunPlan[Any], candidate: Candidate) -> dict[str, Any]:
    """The keys beside `trainer.mesh` that a layout sets, by dotted name."""
    searchable = plan.searchable
    assert isinstance(searchable, Searchable), searchable
    keys: dict[str, Any] = dict(searchable.keys(candidate.rows, candidate.batch_ways))
    if searchable.remat_key is not None:
        keys[searchable.remat_key] = candidate.remat
    return keys


def vary(config: Any, candidate: Candidate, keys: Mapping[str, Any]) -> Any:
    """The configuration with the layout of a candidate, and the keys that `keys_of` gives for it."""
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


def subject_of(plan: RunPlan[Any]) -> SearchSubject:
    """What a plan lays out.

    Raises:
        NothingToSearch: the plan says why there is nothing to search.
    """
    found = plan.searchable
    if isinstance(found, str):
        raise NothingToSearch(f"{plan.entry_point}: {found}")
    load = plan.workloads[0]
    return SearchSubject(
        training=found.training,
        parameters=found.parameters,
        statistics=found.statistics,
        activations=tuple(
            dataclasses.replace(p.leaf, axes=tuple((n, 1 if n == found.batch_axis else s) for n, s in p.leaf.axes))
            for p in plan.activations.leaves
        ),
        batch_axis=found.batch_axis,
        axes=ModelAxes(sizes=found.sizes, known=KNOWN_AXES, aliases=ALIASES),
        tensor_axes=found.tensor_axes,
        layers=found.layers,
        summed=found.summed,
        positions=found.sizes["position"],
        global_batch=found.global_batch,
        flops_per_token=load.flops_causal / load.tokens,
        compute_bytes=found.compute_bytes,
    )


def search_layouts(
    question: Question,
    *,
    config: Any,
    describe: Callable[[Any, Target], RunPlan],
    plan: RunPlan,
    pod: Accelerator,
    say: Callable[[str], None],
) -> SearchResult:
    """Searches the layouts of a run on a pod, with the run's own Programs.

    Args:
        question: as asked for the run itself.
        config: of the run.
        describe: the entry point's.
        plan: the run as it is configured.
        pod: on what.
        say: told what is being done.
    """
    subject = subject_of(plan)
    name = plan.workloads[0].program

    def heard(text: str) -> None:
        # Of a candidate's preflight, the part that takes long.
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
            all_programs=False,
        )
        verdict = preflight(asked, progress=heard)
        found = next((p for p in verdict.programs if p.name == name), None)
        return found if found is not None else ProgramVerdict(name=name, outcome=None, why_not=(verdict.headline,))

    return search(subject, pod, compile_candidate=compile_candidate, on_event=say)


def with_candidate(config: Any, payload: Mapping[str, Any]) -> Any:
    """The configuration that a worker's payload means: varied where it names a candidate."""
    given = payload.get("candidate")
    if given is None:
        return config
    # It came as JSON, which has no tuples.
    return vary(config, Candidate(**{**given, "cut": tuple(given["cut"])}), payload["candidate_keys"])
