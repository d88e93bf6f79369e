"""Step time of GPUs, whose compiler prints no cycles: an estimate from FLOPs, bytes and links.

`search.estimate` counts what a step must compute, move through HBM and send over links; each is taken at a stated share
of the rate in the data sheet (`FLOPS`, `HBM`, `LINKS`). The shorter two overlap mostly with the longest, as for
candidates of a search; the sums of tensor parallelism do not overlap. The low end of the range has everything at its
full rate and overlapped, the high end is `SPREAD` times the estimate.
"""

from collections.abc import Mapping

from levanter.hardware import Accelerator
from levanter.models.stack import checkpoint_policy
from levanter.plan.calibration import TimeCalibration
from levanter.plan.search.estimate import HIDDEN, MATMUL_EFFICIENCY, estimate_layout, search_subject
from levanter.plan.step_time_model import LinkUse, StepTime
from levanter.runplan import RunPlan, Workload

FLOPS: Mapping[str, float] = {"a100": 0.7, "h100": 0.55, "h200": 0.55}
"""The share of peak that a step reaches, recomputation included: from published runs of dense models of 7 to 70 B
parameters under PyTorch FSDP, 0.65 to 0.77 on A100 and 0.46 to 0.58 on H100 (llm-foundry)."""
HBM, LINKS = 0.8, 0.8
"""The shares of their stated bandwidths that memory and links reach."""
SPREAD = 1.5
"""The high end over the estimate."""
TENSOR = "tensor parallelism"


def estimated_time(plan: RunPlan, workload: Workload, pod: Accelerator) -> StepTime | None:
    """The time of one execution of a run's main Program; None for other Programs and for runs without a layout.

    Args:
        plan: the run.
        workload: of the Program.
        pod: the target.
    """
    if isinstance(plan.searchable, str) or workload is not plan.workloads[0] or pod.generation.name not in FLOPS:
        return None
    subject = search_subject(plan)
    ways = plan.mesh.ways(plan.sharding.mappings.compute.mesh_axes(subject.batch_axis))
    rows = max(dict(leaf.leaf.axes)[subject.batch_axis] for leaf in plan.activations.leaves) // ways
    rows = max(rows, 1)
    policy = checkpoint_policy(getattr(getattr(plan.work, "model", None), "gradient_checkpointing", True))
    recomputed = not (policy.disable or policy.save_block_internals is True)
    estimate = estimate_layout(
        subject, pod, mesh=plan.mesh, mappings=plan.sharding.mappings, rows=rows, remat=recomputed
    )
    if estimate.problem:
        return None
    share = FLOPS[pod.generation.name]
    # The estimate divides by the efficiency of a TPU; multiplied by it again it is the time at peak.
    at_peak = estimate.compute * MATMUL_EFFICIENCY
    hiding = {
        "compute": at_peak / share,
        "HBM": estimate.memory / HBM,
        "parameters": estimate.gathers / LINKS,
        "gradients": estimate.gradients / LINKS,
    }
    sent = hiding["parameters"] + hiding["gradients"]
    longest = max(hiding["compute"], hiding["HBM"], sent)
    # Compute, HBM and links overlap: the longest counts in full, of the others the part that is not hidden.
    whole = longest + (1 - HIDDEN) * (sum(hiding.values()) - longest)
    device = hiding["compute"] + hiding["HBM"]
    # The total is divided over the terms in proportion to their length: which of them hides which is not known.
    shown = {name: whole * seconds / (device + sent) for name, seconds in hiding.items()}
    shown[TENSOR] = estimate.tensor / LINKS
    busy = {"parameters": estimate.gathers, "gradients": estimate.gradients, TENSOR: estimate.tensor}
    return StepTime(
        cycles=0.0,
        kernels_at_peak=at_peak,
        kernels_expected=shown["compute"] + shown["HBM"],
        memory=estimate.memory,
        links=tuple(
            LinkUse(over=name, network="links", busy=seconds, exposed=shown[name], total_bytes=0)
            for name, seconds in busy.items()
            if seconds
        ),
        peak=workload.flops_causal / (pod.devices * pod.peak_flops()),
        calibration=TimeCalibration(
            reason=f"an estimate by arithmetic, without a compiler: computation at {share:.0%} of peak, HBM at "
            f"{HBM:.0%} and links at {LINKS:.0%} of their stated bandwidths, {HIDDEN:.0%} of the shorter terms hidden "
            f"behind the longest; the range goes from full rates, all overlapped, to {SPREAD:g} times the estimate",
            spread=(1.0, SPREAD),
            estimate=True,
        ),
    )
