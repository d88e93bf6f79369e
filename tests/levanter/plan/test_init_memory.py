"""Programs that draw values: their bytes by hand, and when no compiler is asked for them."""

import math

import pytest
from helpers.plan_cases import CASES

from levanter.plan import compile_selection
from levanter.plan.compile_selection import coresident_bytes, known_to_fit, select_programs
from levanter.plan.init_memory import init_memory, tile_padding
from levanter.plan.target_from_name import pod_target

GIB = 1 << 30


@pytest.fixture(scope="module")
def plan():
    case = CASES["llama2_7b_v4-32"]
    return case.describe(pod_target(case.target))


def test_bytes_by_hand(plan):
    """Llama 2 7B in f32 with two moments over 16 chips, as the compiler has it: 4.71 GiB of results, a peak of 4.73."""
    (name,) = init_memory(plan)
    drawn = init_memory(plan)[name]
    assert name == "init_state"
    # Every array is cut 16 ways.
    assert drawn.results == pytest.approx(3 * 4 * 6_738_415_616 / 16, rel=1e-6)
    # The largest arrays are those of the feed-forward part, of 32 layers.
    assert drawn.working == 8 * 32 * 4096 * 11008 // 16
    assert 4.71 * GIB < drawn.total < 1.2 * 4.73 * GIB


@pytest.mark.parametrize(
    ("shape", "times"),
    [
        # 32 of 128 lanes and 64 of a multiple of 8: or 64 of 128 lanes, which is better.
        ((16, 64, 32), 2),
        ((16, 64, 128), 1),
        # Two rows take a tile of two.
        ((2, 128), 1),
        ((3, 128), 4 / 3),
        ((100,), 1),
        ((1, 1), 128),
    ],
)
def test_what_tiles_add(shape, times):
    nbytes = 4 * math.prod(shape)
    assert tile_padding(nbytes, shape) == pytest.approx((times - 1) * nbytes, abs=1)


def test_what_has_room_is_not_compiled(plan):
    assert select_programs(plan, "timed") == ("train_step",)
    assert set(known_to_fit(plan, "run")) == {"init_state"}
    assert "init_state" not in select_programs(plan, "run") and select_programs(plan, "run")[0] == "train_step"
    assert set(select_programs(plan, "all")) == {program.name for program in plan.programs}


def test_where_it_does_not_obviously_fit_the_compiler_is_asked(plan, monkeypatch):
    limit = init_memory(plan)["init_state"].total
    monkeypatch.setattr(
        compile_selection, "coresident_bytes", lambda plan: {"init_state": plan.target.limit_bytes - limit + 1}
    )
    assert "init_state" in select_programs(plan, "run")


def test_scoring_draws_nothing():
    case = CASES["405b_v4-256"]
    plan = case.describe(pod_target(case.target))
    assert init_memory(plan) == {}
    # What is loaded before stays while the next leaf is exchanged.
    beside = coresident_bytes(plan)
    assert set(beside) == {program.name for program in plan.load.programs} - {"load.seconds"}
    order = [name for step in plan.load.steps for name in (p.name for p in plan.load.step_programs(step))]
    firsts = {name: order.index(name) for name in beside}
    leaf = max(math.prod(load.leaf.shape) for load in plan.load.loads)
    assert leaf and min(beside.values()) >= 0
    assert max(beside.values()) < plan.load.bytes_per_device
    assert min(beside, key=lambda name: beside[name]) in {name for name, at in firsts.items() if at <= 2}
