"""How long what waits will take, and what waits: against times that are put in, and lists that are counted."""

import random

import pytest

from levanter.inference.requests import Request, SamplingParams
from levanter.serving.engine_thread import Backlog, Submission, ThroughputEstimate

pytestmark = pytest.mark.quick


def test_a_pace_is_that_of_the_steps_it_saw():
    """Steps of 10 ms, and of 2 ms more for each token of a prompt that is computed in one."""
    pace = ThroughputEstimate()
    rng = random.Random(0)
    for _ in range(400):
        new = rng.choice([0, 0, 0, 5, 32])
        pace = pace.after(0.010 + 0.002 * new, rows=4, prompt_tokens=new)
    pace = pace.after(5.0, rows=0, prompt_tokens=0)  # nothing was done
    assert pace.token_seconds == pytest.approx(0.010) and pace.prompt_seconds == pytest.approx(0.002, rel=0.1)
    # 800 tokens for 4 rows, and prompts of 100.
    assert pace.drained_in(rows=4, remaining=800, prompt_tokens=100) == pytest.approx(
        200 * 0.010 + 100 * 0.002, rel=0.05
    )
    assert ThroughputEstimate().drained_in(rows=4, remaining=800, prompt_tokens=100) == 0


def submitted(id: str, length: int, n: int, most: int | None) -> Submission:
    return Submission(request=Request(id=id, tokens=(5,) * length, params=SamplingParams(n=n, max_tokens=most), seed=0))


def test_a_backlog_knows_what_is_in_it():
    rng, backlog, there = random.Random(1), Backlog(100), dict[str, Submission]()
    for turn in range(300):
        if there and rng.random() < 0.4:
            gone = rng.choice([*there, "nobody"])
            backlog.discard(gone)
            there.pop(gone, None)
        elif there and rng.random() < 0.3:
            first = next(iter(there))
            assert backlog.pop() is there.pop(first)
        else:
            new = submitted(str(turn), rng.randint(1, 9), rng.randint(1, 3), rng.choice([None, 7]))
            backlog.append(new)
            there[str(turn)] = new
        requests = [each.request for each in there.values()]
        assert bool(backlog) == bool(there)
        assert backlog.tokens == sum(len(each.tokens) * each.params.n for each in requests)
        assert backlog.choices == sum(each.params.n for each in requests)
        left = sum(each.params.n * (each.params.max_tokens or 100 - len(each.tokens)) for each in requests)
        assert backlog.new_tokens == left
    assert backlog.clear() == [each.request for each in there.values()] and not backlog
    assert (backlog.tokens, backlog.choices, backlog.new_tokens) == (0, 0, 0)
