"""What `plan --search` varies in a run's configuration, and what it must know of the run to price a layout.

A searched layout replaces `trainer.mesh` as a whole, and sets the batch that a device handles at a time; a
training run's `gradient_checkpointing` too. Everything else stays as the user wrote it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from levanter.hardware import Accelerator
from levanter.mesh import MeshConfig, ModelAxes
from levanter.models.activations import EMBEDDED
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.plan.preflight import Question, preflight
from levanter.plan.search import Candidate, SearchResult, Subject, search
from levanter.plan.verdict import ProgramVerdict
from levanter.run import RunPlan, Target


class NothingToSearch(ValueError):
    """The run has no part whose layout can be searched."""


def keys_of(entry_point: str, candidate: Candidate) -> dict[str, Any]:
    """The keys beside `trainer.mesh` that a layout sets, by dotted name."""
    if entry_point == "train_lm":
        return {
            "trainer.per_device_parallelism": candidate.rows,
            "model.gradient_checkpointing": candidate.remat,
        }
    if entry_point == "eval_lm":
        return {"trainer.per_device_eval_parallelism": candidate.rows}
    return {"eval_batch_size": candidate.rows * candidate.batch_ways}


def vary(entry_point: str, config: Any, candidate: Candidate) -> Any:
    """The configuration with the layout of a candidate."""
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
    for dotted, value in keys_of(entry_point, candidate).items():
        config = _with(config, dotted.split("."), value)
    return config


def _with(config: Any, path: list[str], value: Any) -> Any:
    head, *rest = path
    return dataclasses.replace(config, **{head: _with(getattr(config, head), rest, value) if rest else value})


def subject_of(plan: RunPlan) -> Subject:
    """What a plan lays out.

    Raises:
        NothingToSearch: the plan has no workload, or its batch changes during the run.
    """
    if not plan.workloads:
        raise NothingToSearch(f"{plan.entry_point}: nothing in this run takes time, so there is nothing to search")
    work, load = plan.work, plan.workloads[0]
    training = plan.entry_point == "train_lm"
    model = work.model if training else work.pretrained.config
    resolved = work.resolved if training else work.pretrained.resolved
    precision = work.precision if training else work.pretrained.precision
    if training and not isinstance(work.config.trainer.train_batch_size, int):
        raise NothingToSearch("trainer.train_batch_size is a schedule; search with one of its sizes")
    parameters = work.state_plan.parameters if training else plan.sharding
    own = {p.leaf.path for p in parameters.leaves}
    embedded = next(p.leaf for p in plan.activations.leaves if p.leaf.path == EMBEDDED)
    positions = dict(embedded.axes)["position"]
    vocab = dict(next(leaf.axes for leaf in (p.leaf for p in parameters.leaves) if "vocab" in leaf.names))["vocab"]
    sizes = {axis.name: axis.size for axis in model.axes.values()}
    return Subject(
        training=training,
        parameters=tuple(p.leaf for p in parameters.leaves),
        statistics=tuple(
            p.leaf
            for p in plan.sharding.leaves
            if training and p.leaf.path.startswith("optimizer") and p.leaf.path not in own
        ),
        activations=tuple(
            dataclasses.replace(p.leaf, axes=tuple((n, 1 if n == resolved.batch_axis else s) for n, s in p.leaf.axes))
            for p in plan.activations.leaves
        ),
        batch_axis=resolved.batch_axis,
        axes=ModelAxes(sizes={**sizes, "vocab": vocab, "position": positions}, known=KNOWN_AXES, aliases=ALIASES),
        tensor_axes=model.tensor_axes,
        layers=len(model.layers),
        summed=sum(bool(part.tensor_axes) for layer in model.layers for part in layer.parts),
        positions=positions,
        global_batch=work.config.trainer.train_batch_size if training else None,
        flops_per_token=load.flops_causal / load.tokens,
        compute_bytes=np.dtype(precision.compute).itemsize,
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
        varied = vary(plan.entry_point, config, candidate)
        asked = dataclasses.replace(
            question,
            describe=lambda target: describe(varied, target),
            payload={**question.payload, "candidate": dataclasses.asdict(candidate)},
            require_inputs=False,
            all_programs=False,
        )
        verdict = preflight(asked, progress=heard)
        found = next((p for p in verdict.programs if p.name == name), None)
        return found if found is not None else ProgramVerdict(name=name, outcome=None, why_not=(verdict.headline,))

    return search(subject, pod, compile_candidate=compile_candidate, on_event=say)


def with_candidate(entry_point: str, config: Any, payload: Mapping[str, Any]) -> Any:
    """The configuration that a worker's payload means: varied where it names a candidate."""
    given = payload.get("candidate")
    if given is None:
        return config
    # It came as JSON, which has no tuples.
    return vary(entry_point, config, Candidate(**{**given, "cut": tuple(given["cut"])}))
