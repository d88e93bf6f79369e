"""Drawn bodies of HTTP requests, read as the server reads them; nothing is run."""

import random
from functools import partial
from pathlib import Path

from helpers.mutations.cases import Case

BODIES = 12
"""Bodies of a case."""


def requests(dice: random.Random, here: Path) -> Case:
    """Bodies of HTTP requests."""
    return Case("requests", "", (), (0,), judge=partial(judge_requests, dice.randrange(2**32)))


def judge_requests(seed: int, here: Path) -> list[str]:
    """Reads drawn bodies; lists what is wrong."""
    from helpers.drawn_requests import drawn_body, judge, service

    dice, faults = random.Random(seed), list[str]()
    served = service(here)
    for _ in range(BODIES):
        path, raw = drawn_body(dice)
        faults += [f"{path} {raw!r:.300}: {fault}" for fault in judge(path, raw, served, dice)]
    return faults
