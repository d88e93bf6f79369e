"""Turns of clients: in the queue, in the backlog of the engine, and in the threads that read requests."""

import asyncio
import random
import threading
from collections import Counter

import pytest

from levanter.inference.requests import Request, SamplingParams
from levanter.inference.scheduler import QueueFullError
from levanter.serving.engine_thread import Backlog, Inbox, Submission
from levanter.serving.service import WorkQueue

pytestmark = pytest.mark.quick


def submission(id: str, *client: str, tokens: int = 3, n: int = 1) -> Submission:
    params = SamplingParams(n=n)
    return Submission(request=Request(id=id, tokens=(5,) * tokens, params=params, seed=0, client=client))


def test_a_full_queue_has_room_for_those_who_did_not_fill_it():
    inbox = Inbox(max_queued_tokens=1600)
    inbox.submit([submission("0", "many", "0", tokens=1600)])
    with pytest.raises(QueueFullError, match="1600 prompt tokens are queued; 900 more"):
        inbox.submit([submission("1", "many", "1", tokens=900)])
    # Half of the limit is another address's, and a third of it a third one's.
    inbox.submit([submission("2", "few", "2", tokens=800)])
    with pytest.raises(QueueFullError):
        inbox.submit([submission("3", "few", "3", tokens=101)])
    inbox.submit([submission("4", "third", "4", tokens=500)])
    # Short requests wait beyond the limit, up to twice of it.
    inbox = Inbox(max_queued_tokens=1600)
    inbox.submit([submission("0", "many", "0", tokens=1600)])
    for n in range(16):
        inbox.submit([submission(f"s{n}", "many", f"s{n}", tokens=100)])
    with pytest.raises(QueueFullError):
        inbox.submit([submission("s", "many", "s", tokens=100)])
    assert inbox.queued_tokens == 3200


def test_the_queue_is_bounded_however_many_clients_there_are():
    rng, inbox = random.Random(3), Inbox(max_queued_tokens=1000)
    for n in range(3000):
        try:
            inbox.submit([submission(str(n), f"c{rng.randrange(200)}", str(n), tokens=rng.choice([1, 30, 400]))])
        except QueueFullError:
            continue
    # The sum of the shares 1/2 + 1/3 + … of 200 clients.
    assert inbox.queued_tokens < 7_000


def test_clients_take_turns_in_the_backlog():
    backlog = Backlog(100)
    for n in range(6):
        backlog.append(submission(f"a{n}", "a", "call-1"))
    for n in range(3):
        backlog.append(submission(f"b{n}", "a", "call-2"))
    backlog.append(submission("c0", "c", "call-3"))
    # One of each address in turn, and of each call of an address.
    assert [backlog.pop().request.id for _ in range(10)] == [
        *("a0", "c0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"),
    ]
    assert not backlog and backlog.tokens == 0 and not backlog.tokens_of


def test_those_with_the_least_at_the_engine_are_next():
    backlog = Backlog(100)
    for id, *client in (("a0", "a", "1"), ("b0", "b", "2"), ("b1", "b", "3")):
        backlog.append(submission(id, *client))
    shares = Counter({("a",): 4, ("a", "1"): 4, ("b",): 3, ("b", "2"): 2, ("b", "3"): 1})
    assert backlog.first(shares).request.id == "b1"
    backlog.discard("b1")
    backlog.discard("b1")
    assert backlog.pop(shares).request.id == "b0"
    assert [request.id for request in backlog.clear()] == ["a0"]


def test_choices_of_a_request_are_taken_in_parts():
    backlog = Backlog(100)
    backlog.append(submission("a", "a", "1", n=5))
    backlog.append(submission("b", "b", "2", n=2))
    assert (backlog.tokens, backlog.choices) == (21, 7)
    taken = [backlog.take(2) for _ in range(2)]
    assert [(request.id, choices) for request, choices in taken] == [("a", range(2)), ("b", range(2))]
    assert (backlog.tokens, backlog.choices, backlog.new_tokens) == (9, 3, 48)
    (request,) = backlog.requests()
    assert backlog.waiting_choices(request) == range(2, 5)
    assert backlog.take(2)[1] == range(2, 4) and backlog.take(2)[1] == range(4, 5)
    assert not backlog and (backlog.tokens, backlog.choices, backlog.new_tokens) == (0, 0, 0)


def test_work_of_one_client_does_not_keep_others_waiting():
    async def run() -> None:
        queue, order, go_on = WorkQueue(1, name="test"), list[str](), threading.Event()

        def work(name: str) -> str:
            assert name == "many 0" or go_on.is_set()
            go_on.wait(60)
            order.append(name)
            return name

        tasks = [asyncio.ensure_future(queue.run(lambda n=n: work(f"many {n}"), ("many", str(n)))) for n in range(20)]
        await asyncio.sleep(0)
        few = [asyncio.ensure_future(queue.run(lambda n=n: work(f"few {n}"), ("few", str(n)))) for n in range(2)]
        await asyncio.sleep(0)
        # Whoever leaves before its turn is not worked for.
        tasks[1].cancel()
        go_on.set()
        assert await asyncio.gather(*few) == ["few 0", "few 1"]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order.index("few 0") <= 2 and order.index("few 1") <= 4
        assert "many 1" not in order and len(order) == 21
        with pytest.raises(ZeroDivisionError):
            await queue.run(lambda: 1 / 0)
        queue.close()

    asyncio.run(run())
