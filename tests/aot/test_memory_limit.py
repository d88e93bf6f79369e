"""By which number the TPU compiler refuses a Program: a probe with ballast finds the threshold of each generation.

The threshold is compared with the memory that our table has for a chip (`levanter.hardware`), and the heaps of compiled
Programs with what the compiler accepts. `tests/golden/hbm_thresholds.json` keeps the thresholds.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
from helpers.golden import GOLDEN, updating

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, Outcome, compile_programs

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
PROGRAMS = f"{Path(__file__).parent / 'ballast_programs.py'}:ballast"
KEPT = GOLDEN / "hbm_thresholds.json"
TARGETS = ("v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8")
MIB = 1 << 20
OTHERS = {"argument": 1, "result": 1, "temporaries": 512}
"""MiB of the second argument. Of `temporaries` two more arrays are as large."""
# Ballast that is not donated is there twice, as argument and as result.
COPIES = {"argument": 1, "result": 2, "temporaries": 1}


def outcomes(target: str, kind: str, totals: list[int]) -> list[Outcome]:
    """The compiler's answers to Programs of given bytes."""
    others = OTHERS[kind] * (3 if kind == "temporaries" else 1)
    mebibytes = [(total // MIB - others) // COPIES[kind] for total in totals]
    payload = {"kind": kind, "mebibytes": mebibytes, "others": OTHERS[kind]}
    outcomes = compile_programs(PROGRAMS, payload, target=target)
    by_name = {outcome.name: outcome for outcome in outcomes}
    return [by_name[f"{kind}_{size}"] for size in mebibytes]


def threshold(target: str) -> tuple[int, int]:
    """The largest total that is accepted and the smallest that is refused, a thousandth of the memory apart.

    One worker has all sizes, because its start takes longer than these compilations.
    """
    limit = parse_accelerator(target).hbm_bytes
    sizes = [round(limit * (0.995 + n / 1000)) for n in range(11)]
    fitting = [isinstance(outcome, Compiled) for outcome in outcomes(target, "argument", sizes)]
    assert fitting[0] and not fitting[-1] and fitting == sorted(fitting, reverse=True)
    return sizes[sum(fitting) - 1], sizes[sum(fitting)]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_threshold_is_the_memory_of_our_table(target):
    accepted, refused = threshold(target)
    version = importlib.metadata.version("libtpu")
    if updating():
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"thresholds": {}}
        kept["made_with"] = {"libtpu": version}
        kept["thresholds"][target] = {"accepted_bytes": accepted, "refused_bytes": refused}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    assert accepted <= parse_accelerator(target).hbm_bytes <= refused
    kept = json.loads(KEPT.read_text())
    if kept["made_with"]["libtpu"] != version:
        pytest.skip(f"kept of libtpu {kept['made_with']['libtpu']}, here is {version}")
    assert kept["thresholds"][target] == {"accepted_bytes": accepted, "refused_bytes": refused}


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(target, kind, marks=[] if (target, kind) == ("v5e-8", "argument") else [pytest.mark.slow])
        for target in TARGETS
        for kind in COPIES
    ],
)
def test_a_program_is_refused_by_its_heap(target, kind):
    """The heap of the one that is accepted is that of its arrays, and what is printed of it adds up to that."""
    limit = parse_accelerator(target).hbm_bytes
    sizes = [round(0.9985 * limit), round(1.0015 * limit)]
    fits, refused = outcomes(target, kind, sizes)
    assert isinstance(fits, Compiled) and not isinstance(refused, Compiled)
    assert fits.memory.heap == pytest.approx(sizes[0], rel=2e-4)
    assert refused.refusal.needed == pytest.approx(sizes[1], rel=1e-3)
    assert fits.peak_bytes == fits.memory.heap == fits.memory.argument + fits.result_bytes + fits.temporary_bytes
