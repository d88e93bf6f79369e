"""Runs train, evaluation and memorization in turns under signals, full and slow disks, damage, lost peers.

    python -m soak --minutes 30 --seed 1 --report docs/reliability.md       (from `tests`; `make soak`)

First each kind of run is made undisturbed. Then, until the time is up, each is begun in a folder of its own and
disturbed again and again until it has come to its end; what came of it must be the undisturbed run's, bit for bit,
every exit code must be one that is promised, and nothing may be left that is no result. Before that a training run
takes steps until it is told to end: its memory may not grow by more than 2 %.

The exit code is 1 where a promise was broken; what broke it is printed.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.tiny_runs import make_inputs

from soak.disturbances import Attempt, Place, Running, disturb, kinds, small_disk
from soak.work import Work, left_behind, works

REPOSITORY = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
MOST_ATTEMPTS = 6
GROWTH = 0.02


@dataclass
class Record:
    """What was seen."""

    attempts: collections.Counter[tuple[str, str, tuple[int, ...]]] = field(default_factory=collections.Counter)
    finished: collections.Counter[str] = field(default_factory=collections.Counter)
    broken: list[str] = field(default_factory=list)
    memory: str = "not measured"
    typical: dict[str, float] = field(default_factory=dict[str, float])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a document whose marked part is written anew")
    args = parser.parse_args()
    began, end = time.monotonic(), time.monotonic() + 60 * args.minutes
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY / "src", REPOSITORY))),
        "JAX_COMPILATION_CACHE_DIR": str(base / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    record, chance = Record(), random.Random(args.seed)
    try:
        (base / "inputs").mkdir()
        everything = works(make_inputs(base / "inputs"))
        references = {work.name: _reference(work, base, environment) for work in everything}
        record.memory = _memory(everything[0], base, environment, min(90.0, 6 * args.minutes), record)
        turn = 0
        while time.monotonic() < end:
            work = everything[turn % len(everything)]
            _trial(work, base / f"trial-{turn}", environment, references[work.name], chance, record, end)
            turn += 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    text = _report(record, minutes=(time.monotonic() - began) / 60, seed=args.seed)
    print(text)
    if args.report is not None:
        before, _, rest = args.report.read_text().partition(BEGIN)
        args.report.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")
    return 1 if record.broken else 0


def _reference(work: Work, base: Path, environment: dict[str, str]) -> tuple[dict[str, object], float]:
    """The result of an undisturbed run and how long it takes when its programs are compiled."""
    seconds, first = 0.0, None
    for number in range(2):
        folder = base / f"reference-{number}" / "run"
        folder.mkdir(parents=True)
        began = time.monotonic()
        running = Running(work, Place(folder=folder, small=False, environment=environment, typical=0.0))
        codes, text = running.ended()
        assert set(codes) == {0}, f"{work.name}, undisturbed: {codes}\n{text[-4000:]}"
        seconds, result = time.monotonic() - began, dict(work.result(folder))
        if first is not None and result != first:
            raise AssertionError(f"{work.name}: two undisturbed runs differ in {_differences(first, result)}")
        first = result
        shutil.rmtree(folder.parent)
    assert first is not None
    print(f"{work.name}: {seconds:.1f} s undisturbed, {len(first)} values to compare", flush=True)
    return first, seconds


def _trial(
    work: Work,
    where: Path,
    environment: dict[str, str],
    reference: tuple[dict[str, object], float],
    chance: random.Random,
    record: Record,
    end: float,
) -> None:
    """One run, disturbed until it has come to its end."""
    expected, typical = reference
    with small_disk(where / "run") as small:
        for number in range(MOST_ATTEMPTS + 1):
            typical = record.typical.setdefault(work.name, typical)
            place = Place(folder=where / "run", small=small, environment=environment, typical=typical)
            kind = _rarest(kinds(work, place), work, record, chance) if number < MOST_ATTEMPTS else "nothing"
            attempt = disturb(kind, work, place, chance)
            record.attempts[work.name, attempt.disturbance, attempt.codes] += 1
            if attempt.too_late_after is not None:
                # The machine is faster now than when the undisturbed run was timed.
                record.typical[work.name] = min(typical, attempt.too_late_after)
            said = f"{work.name}, {attempt.disturbance}: exit codes {attempt.codes}"
            print(said, flush=True)
            if not attempt.promised:
                print(f"BROKEN: {attempt.text[-3000:]}", flush=True)
                record.broken.append(f"{said}\n{attempt.text[-3000:]}")
            if _done(attempt):
                break
            if time.monotonic() > end + 120:
                return
        else:
            record.broken.append(f"{work.name}: does not come to its end undisturbed")
            return
        found = dict(work.result(place.folder))
        if found != expected:
            record.broken.append(f"{work.name}: differs in {_differences(expected, found)}")
        if left := left_behind(place.folder):
            record.broken.append(f"{work.name}: left behind: {', '.join(left[:5])}")
        record.finished[work.name] += 1
    shutil.rmtree(where, ignore_errors=True)


def _rarest(possible: list[str], work: Work, record: Record, chance: random.Random) -> str:
    """One of the disturbances that this kind of run has met least often: half an hour is short for chance alone."""
    met = collections.Counter[str]()
    for (name, kind, _), times in record.attempts.items():
        met[kind] += times if name == work.name else 0
    least = min(met[kind] for kind in possible)
    return chance.choice([kind for kind in possible if met[kind] == least])


def _done(attempt: Attempt) -> bool:
    return (
        attempt.codes[0] == 0
        and set(attempt.codes) <= {0, 2}
        and (attempt.disturbance == "second run" or set(attempt.codes) == {0})
    )


def _memory(work: Work, base: Path, environment: dict[str, str], seconds: float, record: Record) -> str:
    """Resident memory of a training run that takes steps and saves for a while, early and late."""
    folder = base / "memory" / "run"
    folder.mkdir(parents=True)
    endless = replace(work, command=lambda where: [*work.command(where), "--trainer.num_train_steps", "100000000"])
    running = Running(endless, Place(folder=folder, small=False, environment=environment, typical=0.0))
    samples: list[int] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and not running.wait(0.5):
        status = Path(f"/proc/{running.processes[0].pid}/status").read_text()
        samples.append(next((int(x.split()[1]) for x in status.splitlines() if x.startswith("VmRSS")), 0))
    running.send(signal.SIGTERM)
    codes, text = running.ended()
    if codes != (75,):
        record.broken.append(f"the long run: exit codes {codes}\n{text[-2000:]}")
    shutil.rmtree(folder.parent, ignore_errors=True)
    fifth = max(len(samples) // 5, 1)
    early, late = sorted(samples[2 * fifth : 3 * fifth])[fifth // 2], sorted(samples[-fifth:])[fifth // 2]
    growth = late / early - 1
    if growth > GROWTH:
        record.broken.append(f"memory grew by {growth:.1%} between {2 * fifth / 2:.0f} s and the end")
    return f"{early / 1024:,.0f} MiB in its third fifth, {late / 1024:,.0f} MiB in its last, over {seconds:.0f} s"


def _differences(expected: dict[str, object], found: dict[str, object]) -> str:
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    shown = json.dumps([str(found.get(names[0], "nothing"))[:200], str(expected.get(names[0], "nothing"))[:200]])
    return f"{len(names)} values, first {names[0]}: {shown}"


def _report(record: Record, *, minutes: float, seed: int) -> str:
    lines = [
        f"Last run: {time.strftime('%Y-%m-%d', time.gmtime())}, {minutes:.0f} minutes, seed {seed}: "
        f"{sum(record.attempts.values())} attempts, {sum(record.finished.values())} runs compared at their end, "
        f"{len(record.broken)} promises broken.",
        "",
        "| run | compared | what happened: exit codes × times |",
        "|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _, _ in record.attempts):
        found: dict[str, list[str]] = {}
        for (work, kind, codes), times in sorted(record.attempts.items()):
            if work == name:
                found.setdefault(kind, []).append(f"{'/'.join(map(str, codes))} × {times}")
        happened = "; ".join(f"{kind}: {', '.join(each)}" for kind, each in found.items())
        lines.append(f"| `{name}` | {record.finished[name]} | {happened} |")
    lines += ["", f"Resident memory of a training run that saves twice a second: {record.memory}.", ""]
    lines += [f"- BROKEN: {each}" for each in record.broken]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
