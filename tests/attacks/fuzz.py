# ruff: noqa: E501 - rows of tables
"""Mutations of everything that comes from outside, made by a seed: `make fuzz`, or this file with `--seed` and `--count`.

A *case* is a folder with one sound run in it and one mutation of one of its files. The kinds of files are modules of
`helpers.mutations`: documents and command lines, checkpoints, texts, tokenizers, adapters, records, templates and
requests. The mutation says what must come of it: refused (exit code 2), does not fit (3), or that it changes nothing a
run looks at, and may pass. Judged for every case:

- no traceback, no assertion, no bare errno;
- no more than 20 seconds of processor time (a machine that does other work is slower by the clock), no more than some
  minutes by the clock, and not the end of the process;
- the exit code: where the mutation is known to make no sense, 0 is nonsense that was accepted.

Requests, records, templates and drawn tokenizers are read without a run: each is read, or refused with a `ValueError`;
what is wrong with each is in its own words.

Cases run one after the other in a process of their own, which is replaced where one of them ends it. A failure is
printed with the seed and number that make it again (`--only N`).
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.mutations.adapters import adapters
from helpers.mutations.cases import Case, Mutation, evaluation, sound
from helpers.mutations.checkpoints import checkpoint, config_json, damaged_json, gguf_file, weights
from helpers.mutations.documents import (
    any_key,
    command_line,
    damaged_document,
    huge_size,
    misspelt_key,
    other_type,
    senseless_number,
    unknown_choice,
)
from helpers.mutations.records import records
from helpers.mutations.requests import requests
from helpers.mutations.templates import templates
from helpers.mutations.texts import files, path_of, text
from helpers.mutations.tokenizers import tokenizer_json, tokenizers

PATIENCE_SECONDS = 400.0
WALL_SECONDS = 80.0
"""Before the patience of the attacks' frame, which multiplies it."""
SLOW_SECONDS = 20.0
"""Of processor time."""
STDERR = Path(tempfile.gettempdir()) / f"fuzz-{os.getuid()}.stderr"
"""What a worker printed last."""


def unchanged(dice: random.Random, here: Path) -> Case:
    """A run that is sound: it must go through, or the others are refused for another reason than their mutation."""
    if dice.random() < 0.5:
        return Case("sound training", "train_lm", ("--config_path", str(here / "train.yaml")), (0,))
    return evaluation(here, "sound evaluation", (0,))


KINDS: dict[str, tuple[tuple[Mutation, int], ...]] = {
    "documents": (
        (senseless_number, 4), (other_type, 3), (huge_size, 2), (misspelt_key, 2), (unknown_choice, 2),
        (damaged_document, 4), (command_line, 3), (any_key, 8),
    ),
    "checkpoints": ((checkpoint, 6), (config_json, 4), (damaged_json, 3), (weights, 5), (gguf_file, 4)),
    "texts": ((text, 4), (files, 2), (path_of, 3)),
    "tokenizers": ((tokenizer_json, 4), (tokenizers, 5)),
    "adapters": ((adapters, 6),),
    "records": ((records, 6),),
    "templates": ((templates, 6),),
    "requests": ((requests, 6),),
    "sound": ((unchanged, 1),),
}  # fmt: skip
"""Every mutation by the kind of what it changes, and how often it is drawn."""


def make(seed: int, number: int, here: Path, kinds: tuple[str, ...] = tuple(KINDS)) -> Case:
    """Lays out a case.

    Args:
        seed, number: of the case.
        here: its folder.
        kinds: those of `KINDS` that are drawn from.
    """
    dice = random.Random(f"{seed}/{number}")
    sound(here)
    mutations, shares = zip(*(pair for kind in kinds for pair in KINDS[kind]), strict=True)
    return dice.choices(mutations, shares)[0](dice, here)


def run(seed: int, number: int, kinds: tuple[str, ...]) -> dict:
    """Makes a case, runs it and judges it."""
    from helpers.attacks import NEVER, Attack, Hang, strike

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            case = make(seed, number, Path(folder), kinds)
            if case.judge is not None:
                begun, wrong = time.process_time(), case.judge(Path(folder))
                used = time.process_time() - begun
                return {"number": number, "what": case.name, "wrong": wrong, "text": "", "code": 0, "seconds": used}
            attack = Attack(
                name=case.name, command=case.command, words=case.words, code=case.codes[0], seconds=WALL_SECONDS
            )
            begun = time.process_time()
            try:
                outcome = strike(attack, Path(folder))
            except Hang as hang:
                return {
                    "number": number,
                    "what": case.name,
                    "wrong": [str(hang)],
                    "text": "",
                    "code": None,
                    "seconds": WALL_SECONDS,
                }
        finally:
            os.chdir(before)
    used = time.process_time() - begun
    wrong = [f"says {text!r}" for text in NEVER if text in outcome.text]
    if used > SLOW_SECONDS:
        wrong.append(f"took {used:.0f} s of processor time")
    if outcome.code not in case.codes:
        wrong.append(f"exit code {outcome.code}, right would be {' or '.join(map(str, case.codes))}")
    elif outcome.code == 2 and case.says and case.says not in outcome.text:
        wrong.append(f"{case.says!r} is not said")
    return {"number": number, "what": case.name, "wrong": wrong, "text": outcome.text, "code": outcome.code,
            "seconds": used}  # fmt: skip


def _work(connection: Connection, seed: int, kinds: tuple[str, ...]) -> None:
    """Runs the cases whose numbers come through the connection."""
    # What libraries print beside what the run prints is not for here; what a process dies of is.
    os.dup2(os.open(STDERR, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    faulthandler.enable()
    while True:
        number = connection.recv()
        if number is None:
            return
        connection.send(run(seed, number, kinds))


def main() -> int:
    """Runs a round and prints what was wrong; 0 where nothing was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, default=None, help="one case, with everything that it prints")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds of input, separated by commas")
    asked = parser.parse_args()
    kinds = tuple(asked.kinds.split(","))
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.update(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9", RUN_ID="fuzz")
    if asked.only is not None:
        found = run(asked.seed, asked.only, kinds)
        print(
            json.dumps({key: value for key, value in found.items() if key != "text"}, indent=1), found["text"], sep="\n"
        )
        return bool(found["wrong"])
    context = multiprocessing.get_context("spawn")
    codes: Counter[int | None] = Counter()
    failures, slowest, began = [], 0.0, time.monotonic()
    worker, mine = None, None
    for number in range(asked.count):
        if worker is None or not worker.is_alive():
            mine, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, asked.seed, kinds), daemon=True)
            worker.start()
            theirs.close()
        assert mine is not None
        mine.send(number)
        try:
            if not mine.poll(PATIENCE_SECONDS):
                raise EOFError
            found = mine.recv()
        except (EOFError, OSError):
            worker.kill()
            worker.join()
            found = {"number": number, "what": "?", "wrong": [f"the process hung or died ({worker.exitcode})"], "code": None,
                     "seconds": PATIENCE_SECONDS, "text": STDERR.read_text(errors="replace")[-3000:]}  # fmt: skip
        codes[found["code"]] += 1
        slowest = max(slowest, found["seconds"])
        if found["wrong"]:
            failures.append(found)
            print(
                f"{number}: {found['what']}: {'; '.join(found['wrong'])}\n    {found['text'].strip()[-300:]!r}",
                flush=True,
            )
    if worker is not None and mine is not None and worker.is_alive():
        mine.send(None)
    told = ", ".join(f"{count} × {code}" for code, count in sorted(codes.items(), key=str))
    print(f"seed {asked.seed}: {asked.count} mutations in {time.monotonic() - began:.0f} s, the most took {slowest:.0f} s of the processor; "
          f"exit codes {told}; {len(failures)} wrong")  # fmt: skip
    return bool(failures)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    sys.exit(main())
