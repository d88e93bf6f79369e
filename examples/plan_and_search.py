"""Plan a training run for a pod and search for a better layout, by arithmetic: no TPU and no TPU compiler is needed.

    python examples/plan_and_search.py [POD]

POD is the name of an accelerator such as v4-32, v5p-128 or v6e-256; the default is v4-32. With the extra `plan`, the
command `python -m levanter.main.plan train_lm --config_path … --target POD --search` also compiles the best layouts
with the TPU compiler, which decides whether they fit and models their speed.
"""

import sys
from pathlib import Path

import yaml

from levanter.config import parse
from levanter.hardware import parse_accelerator
from levanter.main.train_lm import TrainLmConfig, describe
from levanter.plan import pod_target
from levanter.plan.search import candidates, estimate, search_subject
from levanter.plan.search.space import layout_keys

CONFIG = Path(__file__).parents[1] / "config" / "train" / "llama2_7b_v4-32.yaml"
SHOWN = 3


def main(name: str) -> None:
    """Prints how the run is sharded on a pod, then the layouts that arithmetic expects to be fastest."""
    pod = parse_accelerator(name)
    plan = describe(parse(TrainLmConfig, paths=[str(CONFIG)]), pod_target(pod))
    used = plan.sharding.bytes_per_device / 2**30
    print(f"{pod}: mesh {plan.mesh}", *(f"refused: {error}" for error in plan.errors), sep="\n")
    print(f"as configured: {used:.2f} of {pod.hbm_bytes / 2**30:.0f} GiB for weights and optimizer state on each chip")

    # A layout is a mesh, a mapping of logical axes to it, a microbatch and a choice of what to rematerialize.
    subject = search_subject(plan)
    layouts = candidates(
        subject.axes.sizes,
        tensor_axes=subject.tensor_axes,
        devices=pod.devices // pod.slices,
        global_batch=subject.global_batch,
        slices=pod.slices,
    )
    estimates = {layout: estimate(layout, subject, pod) for layout in layouts}
    fitting = [layout for layout, cost in estimates.items() if cost.fits(pod.hbm_bytes)]
    fitting.sort(key=lambda layout: estimates[layout].seconds_per_token)
    print(f"{len(layouts)} layouts divide the axes of the model, {len(fitting)} fit:")
    for layout in fitting[:SHOWN]:
        cost = estimates[layout]
        print(f"  {1 / cost.seconds_per_token:,.0f} tokens/s, bound by {cost.waits_for}: {layout}")
    if fitting:
        options = {"trainer.mesh": fitting[0].mesh_options(subject.overrides), **layout_keys(plan, fitting[0])}
        print(yaml.safe_dump(options, sort_keys=False, default_flow_style=None), end="")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "v4-32")
