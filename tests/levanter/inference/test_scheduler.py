"""The schedule against a device that only remembers which token was written where (`helpers.schedule_device`).

Random traces of requests, cancellations and early ends run through `Schedule` and the stand-in.
"""

import dataclasses

import numpy as np
import pytest
from helpers.schedule_device import POISON, Run, request, small, started
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.inference.requests import ChoiceId, Request, SamplingParams
from levanter.inference.scheduler import QueueFullError, RefusedError, Schedule
from levanter.inference.scheduler_state import (
    OutOfPagesError,
    PagePool,
    SequenceState,
    cached_pages,
    page_hashes,
    replace_fields,
)


@st.composite
def traces(draw):
    shards = draw(st.sampled_from([1, 1, 1, 2]))
    page_size = draw(st.sampled_from([1, 2, 4]))
    context = draw(st.integers(8, 40))
    fixed = draw(st.integers(0, 7)) == 0
    places = draw(st.integers(1, 4))
    row_pages = -(-context // page_size)
    shares = draw(st.booleans())
    pages = places * row_pages if fixed else draw(st.integers(max(2, row_pages // 2), 2 * row_pages))
    schedule = Schedule(
        rows=places * shards,
        pages=pages,
        page_size=page_size,
        context=context,
        buckets=draw(
            st.sampled_from([((shards, 8), (2 * shards, 3)), ((shards, 2),), ((4 * shards, 16), (shards, 64))])
        ),
        steps=draw(st.sampled_from([1, 1, 3])),
        max_queued_tokens=draw(st.sampled_from([10, 60, 1000])),
        shards=shards,
        fixed=fixed,
        share_prefixes=shares,
        snapshots=draw(st.sampled_from([0, 1, 2, 5])) if shares and not fixed else 0,
    )
    behind = draw(st.integers(0, 2))
    likely = st.sampled_from([1, 2] * 10 + [POISON])
    prefixes = draw(st.lists(st.lists(likely, min_size=0, max_size=12), min_size=1, max_size=3))
    events = []
    for n in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["offer", "offer", "step", "step", "cancel"]))
        if kind == "offer":
            tokens = draw(st.sampled_from(prefixes)) + draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
            copies = draw(st.sampled_from([1, 1, 1, 3]))
            new = draw(st.one_of(st.none(), st.integers(1, 12)))
            penalty = draw(st.sampled_from([{}] * 4 + [{"repetition_penalty": 1.5}, {"frequency_penalty": 0.5}]))
            events.append((kind, (str(n), tokens, copies, new, draw(st.integers(1, 12)), penalty)))
        else:
            events.append((kind, draw(st.integers(1, 4) if kind == "step" else st.integers(0, 50))))
    return schedule, behind, events


CLIENTS = (("a", "1"), ("a", "2"), ("b", "3"))


def play(trace, *, clients=False):
    schedule, behind, events = trace
    run = Run(schedule, {}, behind, clients=clients)
    offered = []
    for kind, what in events:
        if kind == "step":
            for _ in range(what):
                run.step()
        elif kind == "cancel":
            if offered:
                run.end(offered[what % len(offered)])
        else:
            id, tokens, copies, new, ends, penalty = what
            submitted = request(id, tokens, n=copies, max_tokens=new, **penalty)
            if clients:
                submitted = dataclasses.replace(submitted, client=CLIENTS[sum(tokens) % 3])
            before = run.state.queued_tokens
            try:
                run.offer(submitted)
            except RefusedError:
                limit = schedule.context - len(tokens) if new is None else new
                positions = len(tokens) + limit
                pages = -(-(positions - 1) // schedule.page_size)
                assert limit < 1 or positions > schedule.context or pages > schedule.pages
                continue
            except QueueFullError:
                assert before and before + copies * len(tokens) > schedule.max_queued_tokens
                continue
            for c in range(copies):
                one = ChoiceId(id, c)
                offered.append(one)
                run.lengths[one] = ends + c
                run.limits[one] = submitted.new_tokens(schedule.context)
            assert run.state.queued_tokens <= max(schedule.max_queued_tokens, copies * len(tokens))
    most = (50 + 4 * sum(schedule.context + run.limits[one] for one in offered) * (1 + behind)) * (1 + 3 * clients)
    run.drain(most)
    assert run.finished == set(offered)
    assert run.lost == {one for one in run.lost if POISON in run.prompts[one.request]}
    for pool in run.state.pools:
        assert pool.in_use == 0 and pool.available == pool.size
        assert not pool._loading, "a snapshot waits for nobody"
    return run


@settings(max_examples=100)
@given(traces())
def test_traces(trace):
    """No page is lost or shared wrongly, everybody finishes, and the queue is bounded."""
    play(trace)


@settings(max_examples=40)
@given(traces())
def test_traces_of_several_clients(trace):
    """The same where rows change hands between clients: nobody starves, and every text stays the same."""
    play(trace, clients=True)


@pytest.mark.slow
@settings(max_examples=2000)
@given(traces(), st.booleans())
def test_many_traces(trace, clients):
    play(trace, clients=clients)


def test_prompts_are_computed_in_parts_beside_decoding():
    run = started(small(), request("a", [1, 2], max_tokens=20))
    assert [len(part.tokens) for part in run.step().prefill] == [2]
    run.offer(request("b", range(1, 20), max_tokens=2))
    run.lengths[ChoiceId("b", 0)], run.limits[ChoiceId("b", 0)] = 99, 2
    plans = [run.step() for _ in range(3)]
    assert [[(part.start, len(part.tokens), part.ends) for part in plan.prefill] for plan in plans] == [
        [(0, 8, False)], [(8, 8, False)], [(16, 3, True)],
    ]  # fmt: skip
    assert all([row.id.request for row in plan.decode] == ["a"] for plan in plans)
    assert [row.id.request for row in run.step().decode] == ["a", "b"]


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [(1, [32]), (32, [32]), (33, [32, 32]), (64, [32, 32]), (65, [128]), (128, [128]), (130, [128, 32]),
     (200, [128, 128]), (257, [512]), (1100, [512, 512, 128])],
)  # fmt: skip
def test_how_a_prompt_is_cut_depends_on_its_length_alone(tokens, parts):
    schedule = small(rows=16, pages=1000, context=2000, buckets=((1, 512), (4, 128), (8, 32)))
    left, found = tokens, []
    while left:
        rows, size = schedule.bucket_for(left)
        assert rows * size in (256, 512)
        found.append(size)
        left -= min(left, size)
    assert found == parts
    # Among others of all lengths too, of which whoever came first is served first.
    others = [request(n, [n] * (17 * n % 140 + 1)) for n in range(1, 9)]
    run = started(schedule, *others[:4], request("own", [9] * tokens), *others[4:])
    sizes: dict[str, list[int]] = {}
    while not run.state.idle:
        plan = run.step()
        for part in plan.prefill:
            sizes.setdefault(part.id.request, []).append(plan.bucket[1])
    assert sizes["own"] == parts


def test_short_prompts_go_into_one_call():
    run = started(small(), *(request(n, [n, n, n]) for n in range(1, 4)))
    plan = run.step()
    assert plan.bucket == (4, 4) and [part.lane for part in plan.prefill] == [0, 1, 2]
    assert all(part.fresh and part.ends for part in plan.prefill)


def test_a_prefix_is_computed_once():
    """A second prompt starts behind the full pages it has in common with the first, as soon as those are read."""
    schedule = small(pages=16)
    run = started(schedule, request("a", range(1, 11), max_tokens=2))
    run.step(), run.step()
    run.offer(request("b", [*range(1, 9), 77, 78], max_tokens=2))
    run.lengths[ChoiceId("b", 0)], run.limits[ChoiceId("b", 0)] = 99, 2
    (part,) = run.step().prefill
    assert (part.start, part.tokens, part.fresh, part.ends) == (8, (77, 78), True, True)
    run.drain(20)
    # Behind the end of both, too; but at least one token is always computed.
    run.offer(request("c", range(1, 9), max_tokens=2))
    run.lengths[ChoiceId("c", 0)], run.limits[ChoiceId("c", 0)] = 99, 2
    (part,) = run.step().prefill
    assert (part.start, part.tokens) == (4, (5, 6, 7, 8))


def test_what_nobody_has_read_is_not_shared():
    """Whether it is numbers is not known yet: a second prompt that cannot wait computes it too."""
    run = started(small(pages=16), request("a", range(1, 11), max_tokens=2), behind=2)
    run.step(), run.step()
    run.offer(request("b", range(1, 11), max_tokens=2))
    run.lengths[ChoiceId("b", 0)], run.limits[ChoiceId("b", 0)] = 99, 2
    assert run.step().prefill[0].start == 0
    run.drain(20)


def test_a_row_that_is_lost_leaves_what_was_sound_before():
    """The third page of `a` is lost, and with it whoever begins with it; the first two are there for `c`."""
    poisoned = [*range(1, 9), 3, POISON, 5, 6, 7, 8]
    run = started(small(pages=16), request("a", poisoned, max_tokens=2))
    run.offer(request("b", poisoned, max_tokens=2))
    run.lengths[ChoiceId("b", 0)], run.limits[ChoiceId("b", 0)] = 99, 2
    run.drain(20)
    assert run.lost == {ChoiceId("a", 0), ChoiceId("b", 0)}
    run.offer(request("c", [*range(1, 9), 3, 4, 5, 6, 7], max_tokens=2))
    run.lengths[ChoiceId("c", 0)], run.limits[ChoiceId("c", 0)] = 99, 2
    assert run.step().prefill[0].start == 8
    run.drain(20)
    assert ChoiceId("c", 0) in run.finished - run.lost


def test_what_a_row_made_is_counted_again_when_it_comes_back():
    schedule = small(pages=16)
    made = request("a", [1, 2, 3, 4, 5], max_tokens=20, frequency_penalty=0.5)
    pool = schedule.start().pools[0]
    known = (1, 2, 3, 4, 5, 6, 7, 8)
    pages = pool.take(2)
    for page, name in zip(pages, page_hashes(known, 4), strict=True):
        pool.name(page, name)
    pool.release(pages)
    for penalty, start in ((0.5, 4), (0.0, 8)):
        params = dataclasses.replace(made.params, frequency_penalty=penalty)
        offered = schedule.offered(schedule.start(), dataclasses.replace(made, params=params))
        waits = dataclasses.replace(offered.queue[0], generated=(6, 7, 8, 9), preempted=True)
        (part,) = schedule.step(dataclasses.replace(offered, queue=(waits,), pools=(pool.copy(),))).prefill
        assert (part.start, part.tokens) == (start, (*known, 9)[start:])


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.1}, {"echo": True}])
def test_prompts_that_are_counted_or_scored_are_computed_whole(more):
    run = started(small(pages=16), request("a", range(1, 11), max_tokens=2))
    run.drain(20)
    run.offer(request("b", range(1, 11), max_tokens=2, **more))
    run.lengths[ChoiceId("b", 0)], run.limits[ChoiceId("b", 0)] = 99, 2
    assert run.step().prefill[0].start == 0


def test_a_prefix_is_shared_up_to_the_last_snapshot():
    """A prompt of 13 tokens is cut at its calls of 8 and at the end of its last page, 12; both get a snapshot."""
    schedule = small(pages=16, snapshots=2)
    run = started(schedule, request("a", range(1, 14), max_tokens=2))
    plans = [run.step() for _ in range(3)]
    cuts = [(part.start, len(part.tokens), part.load, part.save) for plan in plans for part in plan.prefill]
    assert cuts == [(0, 8, None, 0), (8, 4, None, 1), (12, 1, None, None)]
    run.drain(20)
    for id, tokens, first in (("b", [*range(1, 13), 77], (12, 1)), ("c", [*range(1, 12), 78, 79], (8, 0))):
        run.offer(request(id, tokens, max_tokens=2))
        run.lengths[ChoiceId(id, 0)], run.limits[ChoiceId(id, 0)] = 99, 2
        (part,) = run.step().prefill
        assert (part.start, part.load, part.fresh) == (*first, True)
        run.drain(20)


def test_choices_of_a_request_share_its_prompt_by_a_snapshot():
    run = started(small(pages=16, snapshots=1), request("a", range(1, 14), n=3, max_tokens=9))
    plans = [run.step() for _ in range(5)]
    computed = [(part.id.choice, part.start, part.load) for plan in plans for part in plan.prefill]
    assert computed == [(0, 0, None), (0, 8, None), (0, 12, None), (1, 12, 0), (2, 12, 0)]


def test_choices_of_a_request_share_its_prompt():
    run = started(small(pages=16), request("a", range(1, 14), n=3, max_tokens=9))
    plans = [run.step() for _ in range(4)]
    computed = [part for plan in plans for part in plan.prefill]
    assert [(part.id.choice, part.start) for part in computed] == [(0, 0), (0, 8), (1, 12), (2, 12)]
    assert run.state.pools[0].in_use == 3 + 3


def test_the_youngest_gives_way_and_says_the_same_later():
    schedule = small(pages=6, rows=3, share_prefixes=False)
    alone = {}
    for n in range(3):
        run = started(schedule, request(n, [n + 1] * 3, max_tokens=14))
        run.drain(100)
        alone[n] = run.texts[ChoiceId(str(n), 0)]
    run = started(schedule, *(request(n, [n + 1] * 3, max_tokens=14) for n in range(3)), behind=1)
    order = []
    while not run.state.idle or run.unread:
        before = set(run.finished)
        if run.step().empty:
            run.read()
        order += sorted(run.finished - before)
    assert run.preempted > 0
    assert [id.request for id in order] == ["0", "1", "2"]
    assert {int(id.request): text for id, text in run.texts.items()} == alone


def test_who_gave_way_comes_back_when_its_tokens_are_known():
    """The device has more tokens of it than were read; what it is prefilled with later has to have them all."""
    schedule = small()
    made = request("a", [1, 2, 3], max_tokens=9)
    waits = schedule.offered(schedule.start(), made).queue[0]
    waits = dataclasses.replace(waits, generated=(5,), due=(2, 1), preempted=True)
    standing = dataclasses.replace(schedule.start(), queue=(waits,), arrived=1)
    assert schedule.step(standing).empty
    standing = standing.read(waits.id, (6, 7))
    assert schedule.step(standing).empty
    (part,) = schedule.step(standing.read(waits.id, (8,))).prefill
    assert part.tokens == (1, 2, 3, 5, 6, 7, 8) and part.remaining == 5 and part.fresh and part.ends


def test_what_could_never_finish_is_refused_at_the_door():
    schedule = small()
    for made, said in [
        (request("a", [], max_tokens=1), "the prompt is empty"),
        (request("a", [1] * 30, max_tokens=3), "prompt of 30 tokens and 3 new tokens .* the context of 32"),
        (request("a", [1] * 32, max_tokens=None), "prompt of 32 tokens and one new token"),
    ]:
        with pytest.raises(RefusedError, match=said):
            schedule.offered(schedule.start(), made)
    with pytest.raises(RefusedError, match="take 8 pages of 4 positions, and the cache has 7"):
        small(pages=7).check(request("a", [1] * 20, max_tokens=12))
    small(pages=7).check(request("a", [1] * 20, max_tokens=9))  # the last token is not written
    small(pages=8).check(request("a", [1] * 31, max_tokens=None))


def test_the_queue_is_bounded_by_tokens():
    schedule = small(max_queued_tokens=10)
    standing = schedule.offered(schedule.start(), request("long", [1] * 20))
    with pytest.raises(QueueFullError, match="20 prompt tokens"):
        schedule.offered(standing, request("b", [1]))
    plan = schedule.step(standing)
    standing = schedule.offered(plan.after, request("c", [1] * 5, n=2))
    assert standing.queued_tokens == 10
    with pytest.raises(QueueFullError):
        schedule.offered(standing, request("d", [1]))


def test_a_cancelled_choice_leaves_at_once():
    run = started(small(), request("a", range(1, 8)), request("b", [9]))
    run.step()
    held = run.state.pools[0].in_use
    run.end(ChoiceId("a", 0))
    assert run.state.pools[0].in_use == held - 2
    plan = run.step()
    assert plan.released == (0,)
    run.end(ChoiceId("a", 0))
    run.end(ChoiceId("nobody", 3))
    run.drain(20)


def test_tables_name_pages_of_the_rows_own_shard():
    schedule = small(shards=2, buckets=((2, 8),))
    run = started(schedule, *(request(n, [n + 1] * 5) for n in range(4)))
    plan = run.step()
    places = [row.slot for row in run.state.rows if row is not None]
    assert places == [0, 1, 2, 3] and plan.tables.shape == (4, 8)
    assert plan.tables.dtype == np.int32
    # Each shard counts its pages from 0, and each has a lane of its own in a call.
    assert set(plan.tables[:2, :2].ravel()) == set(plan.tables[2:, :2].ravel()) == {0, 1, 2, 3}
    assert (plan.tables[:, 2:] == schedule.fill).all()
    assert [(part.lane, part.slot) for part in plan.prefill] == [(0, 0), (1, 2)]


class TestPages:
    def test_idle_pages_are_given_away_the_least_used_first(self):
        pool = PagePool(4)
        a, b = pool.take(2), pool.take(1)
        names = page_hashes(range(3), 1)
        for page, name in zip(a + b, names, strict=True):
            pool.name(page, name)
        pool.release(a)
        pool.release(b)
        assert cached_pages(pool, names) == a + b and (pool.idle, pool.available) == (3, 4)
        (first,) = pool.take(1)
        assert first not in a + b
        # Of the row that ended first the last page goes first: without the one before it, it would be of no use.
        assert pool.take(1) == (a[1],) and cached_pages(pool, names) == (a[0],)
        pool.share([a[0]])
        assert pool.take(1) == b
        with pytest.raises(OutOfPagesError, match="1 pages wanted, 0 of 4 available"):
            pool.take(1)
        pool.check()

    def test_equal_contents_are_known_once(self):
        pool = PagePool(3)
        (name,) = page_hashes([5], 1)
        a, b = pool.take(1), pool.take(1)
        pool.name(a[0], name)
        pool.name(b[0], name)
        pool.release(b)
        assert pool.find(name) == a[0] and pool.idle == 0
        pool.share(a)
        pool.release(a)
        assert pool.holders(a[0]) == 1
        pool.check()

    def test_names_depend_on_everything_before(self):
        one, other = page_hashes([1, 2, 3, 4, 5], 2), page_hashes([9, 2, 3, 4, 5], 2)
        assert len(one) == 2 and one[1] != other[1] and one[0] != other[0]
        assert page_hashes([1, 2, 3, 4], 2, one[:1]) == one
        assert page_hashes([2**31 - 1, 0], 1)[0] != page_hashes([0, 2**31 - 1], 1)[0]


def test_a_changed_value_is_what_dataclasses_would_make():
    request = Request(id="a", tokens=(1, 2), params=SamplingParams(), seed=0)
    row = SequenceState(id=ChoiceId("a", 0), request=request, order=3, limit=4, generated=(7,), due=(1,))
    new = replace_fields(row, generated=(7, 8), due=())
    assert new == dataclasses.replace(row, generated=(7, 8), due=())
    assert row.generated == (7,), "what is changed stays what it is"
    with pytest.raises(AssertionError, match=r"SequenceState has none of \['mde'\]"):
        replace_fields(row, mde=())


def from_client(made, *client):
    return dataclasses.replace(made, client=client)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("address", ["many", "few"])
def test_a_client_with_many_choices_gives_up_rows(address, fixed):
    """One request with a choice for every row, and another that comes later: from the same address, or another."""
    schedule = small(pages=32, fixed=fixed)
    run = started(schedule, from_client(request("many", [1, 2, 3], n=12, max_tokens=20), "many", "1"))
    run.clients = True
    for _ in range(6):
        run.step()
    assert [row.id.request for row in run.state.rows] == ["many"] * 4
    for n, prompt in enumerate([[4, 5], [6], [7, 8, 9]]):
        few = from_client(request(f"few{n}", prompt, max_tokens=20), address, f"few{n}")
        run.offer(few)
        run.lengths[ChoiceId(few.id, 0)], run.limits[ChoiceId(few.id, 0)] = 99, 20
    for _ in range(3):
        run.step()
    rows = [row.id.request for row in run.state.rows]
    # Every request has a row within a few steps: by address, the two have half of the rows each.
    expected = 2 if address == "few" else 1
    assert rows.count("many") == expected and len(set(rows)) == 1 + (4 - expected)
    oldest = min((row for row in run.state.rows), key=lambda row: row.order)
    assert oldest.id == ChoiceId("many", 0), "the oldest was preempted"
    run.drain(400)
    assert len(run.finished) == 15


def test_rows_do_not_change_hands_for_ever():
    """Clients with equal shares, or one more, keep their rows."""
    schedule = small(pages=32)
    run = started(
        schedule, *(from_client(request(f"r{n}", [n + 1, 2], max_tokens=20), f"c{n % 3}", str(n)) for n in range(9))
    )
    run.clients = True
    for _ in range(15):
        run.step()
    assert run.preempted == 0


def test_pages_are_taken_from_the_client_with_most_rows():
    """A client with one row keeps its pages, although it is the youngest."""
    schedule = small(pages=9, share_prefixes=False)
    many = from_client(request("many", [1, 2, 3, 4], n=3, max_tokens=16), "many", "1")
    run = started(schedule, many)
    run.clients = True
    for _ in range(4):
        run.step()
    few = from_client(request("few", [5, 6, 7], max_tokens=12), "few", "2")
    run.offer(few)
    run.lengths[ChoiceId("few", 0)], run.limits[ChoiceId("few", 0)] = 99, 12
    preempted = set()
    for _ in range(40):
        plan = run.step()
        preempted |= {one.request for one in plan.preempted}
        if ChoiceId("few", 0) in run.finished:
            break
    assert preempted == {"many"}
    run.drain(400)
    assert len(run.finished) == 4
