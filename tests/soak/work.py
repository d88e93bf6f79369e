"""What the soak runs: a small training run, an evaluation, a memorization run, and the training run in two processes.

Each is a command that continues or repeats itself when it is started again in its folder, and a result that must not
depend on what happened on the way.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.tiny_runs import Inputs

from levanter.checkpoint import CheckpointSource, find_checkpoints

STEPS, KEPT = 60, 20
TOGETHER = 12
"""Steps of the run of two processes, whose collectives are slow on a machine of two cores."""
VOLATILE = re.compile(r"second|time|duration|per_s|rate$|throughput|^run$")
LEFT = re.compile(r"(^|/)(\.lease|\.probe-|.*\.tmp$|.*\.incomplete|.*\.replaced|parts(/|$))")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of run.

    Attributes:
        name: for the report.
        command: the module and its words, for a folder.
        result: what must come of it, whatever happened: name → comparable value.
        preempted: exit codes of a run that is told to end.
        processes: how many it has.
    """

    name: str
    command: Callable[[Path], list[str]]
    result: Callable[[Path], Mapping[str, Any]]
    preempted: frozenset[int]
    processes: int = 1


def works(inputs: Inputs) -> list[Work]:
    """Every kind of run, in the order in which they take turns."""

    def train(folder: Path, steps: int = STEPS) -> list[str]:
        return inputs.train_lm(
            folder,
            steps=steps,
            hf_save_path=str(folder / "hf"),
            hf_save_steps=KEPT,
            trainer={
                "checkpointer": {
                    "base_path": str(folder / "checkpoints"),
                    "keep": [{"every": KEPT}],
                    "save_interval": "0.5s",
                }
            },
        )

    return [
        Work(name="train_lm", command=train, result=_trained, preempted=frozenset({75, -15})),
        Work(name="eval_lm", command=inputs.eval_lm, result=_evaluated, preempted=frozenset({-15})),
        Work(name="eval_careless_lm", command=inputs.eval_careless_lm, result=_memorized, preempted=frozenset({-15})),
        Work(
            name="train_lm × 2",
            command=lambda folder: train(folder, TOGETHER),
            result=_trained,
            preempted=frozenset({75, -15}),
            processes=2,
        ),
    ]


def _trained(folder: Path) -> dict[str, Any]:
    """The losses of all steps over all attempts, every kept checkpoint's arrays, and the exports."""
    found: dict[str, Any] = {}
    curve: dict[int, set[float]] = {}
    for file in sorted((folder / "tracker").rglob("*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            record = json.loads(line) if line.endswith("\n") else {}
            if "train/loss" in record:
                curve.setdefault(record["step"], set()).add(record["train/loss"])
    found["losses"] = {step: sorted(values) for step, values in sorted(curve.items())}
    for ref in find_checkpoints(str(folder / "checkpoints/run")):
        if ref.kind == "kept":
            source = CheckpointSource(ref)
            for name, info in source.tensors.items():
                whole = source.read(name, tuple(slice(0, size) for size in info.shape))
                found[f"step {ref.step} {name}"] = whole.tobytes()
    for path in sorted((folder / "hf").rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def _evaluated(folder: Path) -> dict[str, Any]:
    """Every number of an evaluation but those of the clock."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(each) for key, each in value.items() if not VOLATILE.search(key)}
        return [kept(each) for each in value] if isinstance(value, list) else value

    text = (folder / "out.json").read_text().replace(str(folder), "")
    return {f"out.json {key}": each for key, each in kept(json.loads(text)).items()}


def _memorized(folder: Path) -> dict[str, Any]:
    """Every file, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir()) if path.is_file()}


def left_behind(folder: Path) -> list[str]:
    """Files that are no result: of leases, probes, half-written files, parts."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if "arrays-" not in str(path.parent)]
    checkpoints = folder / "checkpoints/run"
    temporary = [ref.path for ref in find_checkpoints(str(checkpoints)) if ref.kind == "temporary"]
    halves = [str(path) for path in checkpoints.glob("step-*") if not (path / "metadata.json").exists()]
    return sorted([name for name in names if LEFT.search(name)] + temporary[1:] + halves)
