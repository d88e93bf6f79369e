"""Trip counts from conditions, bodies and initial values."""

import operator
import random

import pytest

from haliax_ext.hlo.parser import HloTextError, parse_module
from haliax_ext.hlo.trip_counts import trip_count

pytestmark = pytest.mark.quick

TEMPLATE = """HloModule loop, is_scheduled=true, entry_computation_layout={{()->s32[]}}, num_partitions=1

%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %p = (s32[]{{:T(128)}}, f32[8]{{0:T(8)}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %x = f32[8]{{0:T(8)}} get-tuple-element(%p), index=1
  %n = s32[]{{:T(128)}} get-tuple-element(%p), index=2
  %step = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)S(6)}} {op}(%i, %step)
  %moved = s32[]{{:T(128)}} copy(%next)
  ROOT %out = (s32[]{{:T(128)}}, f32[8]{{0:T(8)}}, s32[]{{:T(128)}}) tuple(%moved, %x, {carried})
}}

%cond (q: (s32[], f32[8], s32[])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant({limit})
  %q = (s32[]{{:T(128)}}, f32[8]{{0:T(8)}}, s32[]{{:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %m = s32[]{{:T(128)}} get-tuple-element(%q), index=2
  ROOT %less = pred[]{{:T(512)}} compare({left}, {right}), direction={direction}
}}

ENTRY %main (a: f32[8]) -> s32[] {{
  %a = f32[8]{{0:T(8)}} parameter(0)
  %start = s32[]{{:T(128)}} constant({start})
  %started = s32[]{{:T(128)S(6)}} copy(%start)
  %bound = s32[]{{:T(128)}} constant(12)
  %state = (s32[]{{:T(128)}}, f32[8]{{0:T(8)}}, s32[]{{:T(128)}}) tuple(%started, %a, %bound)
  %loop = (s32[]{{:T(128)}}, f32[8]{{0:T(8)}}, s32[]{{:T(128)}}) while(%state), condition=%cond, body=%body{printed}
  ROOT %r = s32[]{{:T(128)}} get-tuple-element(%loop), index=0
}}
"""


def count(**changes: object) -> int | None:
    values = {"step": 1, "op": "add", "limit": 8, "left": "%j", "right": "%limit", "direction": "LT", "start": 0}
    values |= {"carried": "%n", "printed": ""} | changes
    module = parse_module(TEMPLATE.format(**values))
    return trip_count(module, module.entry, module.entry.by_name["loop"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8),
        ({"limit": 80}, 80),
        ({"start": 3}, 5),
        # The partitioner's windowed matmuls are unrolled once: 8 of 16 pieces, two a trip.
        ({"step": 2}, 4),
        ({"step": 3}, 3),
        ({"direction": "LE"}, 9),
        ({"direction": "NE", "step": 2}, 4),
        ({"start": 10, "limit": 0, "op": "subtract", "direction": "GT"}, 10),
        ({"start": 10, "limit": 0, "step": -1, "direction": "GT"}, 10),
        ({"left": "%limit", "right": "%j", "direction": "GT"}, 8),
        ({"start": 9}, 0),
        # The bound sits in the loop's state and is handed on unchanged.
        ({"right": "%m"}, 12),
        ({"printed": ', backend_config={"known_trip_count":{"n":"17"}}'}, 17),
    ],
)
def test_counted_loops(changes, expected):
    start, step = int(changes.get("start", 0)), int(changes.get("step", 1))
    assert count(**changes) == expected
    assert start >= 0 and step != 0


@pytest.mark.parametrize(
    "changes",
    [
        # The bound changes in the body.
        {"right": "%m", "carried": "%next"},
        # Steps over the value it waits for.
        {"direction": "NE", "step": 3},
        # Compares something that is no counter.
        {"left": "%m", "right": "%m"},
        {"step": 0},
        {"op": "multiply"},
    ],
)
def test_what_cannot_be_told_is_none(changes):
    assert count(**changes) is None


def run_the_loop(start: int, limit: int, step: int, direction: str) -> int | None:
    """Runs the loop as the device does, but gives up where only a wrap-around would end it."""
    counter, trips = start, 0
    while getattr(operator, direction.lower())(counter, limit):
        counter, trips = counter + step, trips + 1
        if trips > 1000:
            return None
    return trips


def test_drawn_loops_run_as_often_as_counted():
    draw = random.Random(5)
    outcomes = set()
    for _ in range(300):
        start, limit, step = draw.randint(-20, 20), draw.randint(-20, 20), draw.choice([-3, -2, -1, 1, 2, 3])
        direction = draw.choice(["LT", "LE", "GT", "GE", "NE", "EQ"])
        expected = run_the_loop(start, limit, step, direction)
        subtracted = draw.random() < 0.5
        changes = {"op": "subtract", "step": -step} if subtracted else {"step": step}
        loop = {"start": start, "limit": limit, "direction": direction} | changes
        assert count(**loop) == expected, loop
        outcomes.add((direction, step > 0, expected is None))
    assert len(outcomes) >= 16, outcomes


def test_text_without_an_entry_is_refused():
    with pytest.raises(HloTextError, match="no ENTRY"):
        parse_module("HloModule nothing\n\n")
