"""What a plan costs with two trees of this project, in turn: CPU seconds of `plan` on shipped configurations.

    python benchmarks/plan_times.py --before ../before [--after .] [--pairs 3] [--only llama_100m] [--no-compile]
    python benchmarks/plan_times.py --timed-only [--pairs 1]

Every plan is a process of its own, with its compile workers, and keeps nothing (`--no_cache`). Trees take turns in
alternating order. CPU seconds of the process and everything it started are compared: what the kernel counts once they
have ended. Reported for each configuration: both medians, and the median of the pairs' ratios with the least and the
largest of them.

A plan of before was of the Programs that make up a job's time. `--timed-only` takes this tree's plan of these alone in
the other tree's place: the same sources, options and machine, so the ratio is what judging everything else costs.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLANS = {
    "llama_100m": ("train_lm", "config/train/llama_100m_v6e-8.yaml", "v6e-8"),
    "llama3.1_405b": ("eval_lm", "config/eval/llama3.1_405b_v4-256.yaml", "v4-256"),
    "llama2_7b": ("train_lm", "config/train/llama2_7b_v4-32.yaml", "v4-32"),
    "llama_1b": ("train_lm", "config/train/llama_1b_v6e-64.yaml", "v6e-64"),
}
"""Name → entry point, configuration, target."""


def plan(tree: Path, name: str, options: list[str]) -> tuple[float, int, str]:
    """CPU seconds of one plan, its exit code, and the line of its verdict."""
    entry_point, config, target = PLANS[name]
    words = [entry_point, "--config_path", config, "--target", target, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "src"))), "JAX_PLATFORMS": "cpu"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(
        [sys.executable, "-m", "levanter.main.plan", *words], cwd=tree, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if found.returncode not in (0, 3):
        sys.exit(f"{' '.join(words)} in {tree}: exit code {found.returncode}\n{found.stderr[-2000:]}")
    verdicts = ("FITS", "DOES NOT FIT", "NOT COMPILED")
    headline = next((line for line in str(found.stdout).splitlines() if line.lstrip().startswith(verdicts)), "")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, found.returncode, headline.strip()


def main() -> None:
    """Compares, and prints a line for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--before", type=Path)
    other.add_argument("--timed-only", action="store_true", help="this tree's plans of what makes up a job's time")
    parser.add_argument("--after", type=Path, default=ROOT)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--no-compile", action="store_true", help="arithmetic alone")
    args = parser.parse_args()
    options = ["--no-compile"] if args.no_compile else ["--no_cache"]
    trees = {"before": (args.before or args.after).resolve(), "after": args.after.resolve()}
    added = {"before": ["--timed_only"] if args.timed_only else [], "after": []}
    for name in args.only:
        took: dict[str, list[float]] = {"before": [], "after": []}
        said: dict[str, str] = {}
        for pair in range(args.pairs):
            for which in ("before", "after")[:: 1 if pair % 2 == 0 else -1]:
                seconds, code, said[which] = plan(trees[which], name, [*options, *added[which]])
                took[which].append(seconds)
                print(f"{name} {which} {seconds:.1f} s, exit code {code}: {said[which]}", file=sys.stderr, flush=True)
        ratios = [after / before for before, after in zip(took["before"], took["after"], strict=True)]
        print(
            f"{name:14} {statistics.median(took['before']):7.1f} → {statistics.median(took['after']):7.1f} CPU s, "
            f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)",
            flush=True,
        )


if __name__ == "__main__":
    main()
