"""The compiler's two ways of saying that a program does not fit."""

from pathlib import Path

import pytest

from haliax_ext.hlo import Scope, Shape, read_out_of_memory

pytestmark = pytest.mark.quick

GIB = 1 << 30
# libtpu 0.0.42.1, a 70B train step for v4-256.
SHORT = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (31.97G) "
    "exceeds available HBM (30.75G)."
)
LONG = (Path(__file__).parents[1] / "golden" / "hlo" / "refusal_long.txt").read_text()


def test_the_short_text():
    refusal = read_out_of_memory(SHORT)
    assert (refusal.needed, refusal.available) == (round(31.97 * GIB), round(30.75 * GIB))
    assert refusal.allocations == ()
    assert str(refusal) == "31.97 GiB > 30.75 GiB"


def test_the_long_text_lists_allocations_largest_first():
    refusal = read_out_of_memory(LONG)
    assert (refusal.needed, refusal.available) == (round(36.93 * GIB), round(31.25 * GIB))
    weight, logits = refusal.allocations
    assert (weight.nbytes, weight.kind, weight.shape) == (4 * GIB, "Argument", Shape("f32", (32, 4096, 8192)))
    assert logits.nbytes == 512 << 20
    assert logits.scope == Scope("lm_head")


def test_other_errors_are_not_refusals():
    assert read_out_of_memory("INVALID_ARGUMENT: sharding does not match") is None
    assert read_out_of_memory("RESOURCE_EXHAUSTED: too many open files") is None
