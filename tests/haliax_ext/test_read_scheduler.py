"""What is begun within a budget of host memory, step by step, against a reader that reads nothing."""

from dataclasses import dataclass, field

import pytest

from haliax_ext.read_scheduler import ReadBatch, read_all

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Plan:
    number: int
    source_bytes: int = 0


@dataclass(frozen=True)
class Request:
    number: int
    filled_bytes: int


@dataclass
class Reader:
    """Keeps account of what was begun and what was finished, as the loop tells it."""

    sizes: dict[int, list[int]]
    held: dict[int, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    peak: int = 0

    def requests(self, plans, remaining):
        (plan,) = plans
        return iter([((Request(plan.number, size),),) for size in self.sizes[plan.number]])

    def start(self, plan):
        assert plan.number not in self.held
        self.held[plan.number] = 0
        self.events.append(f"start {plan.number}")

    def submit(self, slices):
        (request,) = slices[0]
        self.held[request.number] += request.filled_bytes
        self.events.append(f"read {request.number}")
        self.peak = max(self.peak, sum(self.held.values()))

    def finish(self, batch):
        (plan,) = batch.plans
        assert plan.number == next(iter(self.held)), "in order"
        assert self.held[plan.number] == sum(self.sizes[plan.number]), "complete"
        del self.held[plan.number]
        self.events.append(f"finish {plan.number}")


def run(sizes: dict[int, list[int]], budget: int, ahead: int = 0) -> Reader:
    reader = Reader(sizes)
    batches = [ReadBatch(steps=(), plans=[Plan(number)], completes=True) for number in sizes]
    read_all(batches, reader, reader.finish, budget=budget, nbytes=0, ahead=ahead)
    return reader


@pytest.mark.parametrize("ahead", [0, 15])
@pytest.mark.parametrize("budget", [0, 10, 35, 100, 1000])
@pytest.mark.parametrize(
    "sizes",
    [
        {0: [10] * 3, 1: [10] * 3, 2: [10] * 3},
        {0: [10], 1: [50] * 2, 2: [], 3: [1] * 5},
        {0: [100], 1: [10] * 10, 2: [10]},
    ],
)
def test_the_budget_bounds_what_is_held_or_the_oldest_alone(sizes, budget, ahead):
    reader = run(sizes, budget, ahead)
    assert reader.peak <= max([budget, *(sum(each) + ahead for each in sizes.values() if sum(each) > budget)])
    assert not reader.held and reader.events[-1] == f"finish {max(sizes)}"


def test_beside_one_that_is_larger_than_the_budget_a_few_reads_are_under_way():
    """Those that follow it are begun, up to what may be ahead, before it is waited for; else none would be."""
    events = run({0: [10] * 20, 1: [10] * 10}, 150, 40).events
    assert events.index("finish 0") == events.index("start 1") + 5
    alone = run({0: [10] * 20, 1: [10] * 10}, 150).events
    assert alone.index("finish 0") < alone.index("start 1")
    within = run({0: [10] * 15, 1: [10] * 10}, 150, 40).events
    assert within.index("finish 0") < within.index("start 1"), "what is within the budget keeps to it"


def test_the_next_one_is_begun_while_the_oldest_has_its_last_reads():
    """With room for one and a half: half of the second is under way before the first is waited for."""
    events = run({0: [10] * 10, 1: [10] * 10}, 150).events
    assert events.index("finish 0") == events.index("start 1") + 6
    whole = run({0: [10] * 10, 1: [10] * 10}, 200).events
    assert whole[-2:] == ["finish 0", "finish 1"]
