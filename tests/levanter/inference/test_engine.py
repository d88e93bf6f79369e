"""The engine on a tiny Llama: rows do not disturb each other, whatever becomes of one of them."""

import dataclasses
import functools
from dataclasses import replace

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, abstract_model, mappings_for, place, random_arrays, tiny_config

from haliax_ext.abstract import leaves
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.inference.config import Allocation
from levanter.inference.constraint import ConstraintError
from levanter.inference.engine import DeviceRunner, Engine, make_schedule
from levanter.inference.kv_cache import plan_cache
from levanter.inference.programs import ServedModel, generation_programs
from levanter.inference.requests import ChoiceId, ConstraintSpec, Failed, Finished, Request, SamplingParams, Token
from levanter.inference.scheduler import RefusedError
from levanter.models.decoder import DecoderLmHeadModel

SPEC = MeshSpec.of(data=2, model=2)
POISON = 77
"""A token whose embedding is no number."""


@functools.cache
def made(devices, allocation: Allocation = "fixed", rows: int = 2, pages: int | None = None):
    config = tiny_config(gradient_checkpointing=False)
    mappings = mappings_for(config, SPEC)
    module = abstract_model(config)
    assert isinstance(module, DecoderLmHeadModel)
    cache = plan_cache(
        module,
        mappings,
        SPEC,
        batch_axis="batch",
        rows=rows,
        max_seq_len=48,
        dtype=np.dtype(np.float32),
        allocation=allocation,
        page_size=4,
        pages=pages,
    )
    model = ServedModel(abstract=module, sharding=plan_sharding(leaves(module), mappings, SPEC))
    arrays = random_arrays(config)
    arrays["embeddings.token_embeddings.weight"][POISON] = np.nan
    mesh = SPEC.build(devices[:4])
    programs = generation_programs(model, cache, prefill=[(1, 8)])
    return lambda: Engine(DeviceRunner(programs, mesh, place(config, arrays, mappings, mesh)), make_schedule(programs))


@pytest.fixture
def engine(devices):
    return made(tuple(devices))()


def request(id, *tokens, new=6, **params) -> Request:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": new, **params})
    return Request(id=id, tokens=tokens, params=asked, seed=3)


def prompt(n: int, length: int) -> list[int]:
    ids = np.random.default_rng(n).integers(0, VOCAB, length)
    return np.where(ids == POISON, POISON + 1, ids).tolist()


def texts(events) -> dict[ChoiceId, list[int]]:
    found: dict[ChoiceId, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault(event.of, []).append(event.id)
    return found


GOOD = [request(str(n), *prompt(n, length)) for n, length in enumerate((3, 20, 9, 1, 14))]


@functools.cache
def alone(devices) -> dict[ChoiceId, list[int]]:
    """Each text where nobody else runs."""
    engine = made(devices)()
    found = {}
    for each in GOOD:
        found |= texts(engine.run([each]))
    return found


def test_a_row_that_is_lost_says_so_and_nobody_else_notices(engine, devices):
    """It is lost at the beginning of a prompt of several parts, whose last one has nothing wrong in it; its row and its
    page go to others."""
    lost = request("lost", 5, POISON, *prompt(9, 20))
    late = request("late", *prompt(8, 4), POISON)
    events = list(engine.run([GOOD[0], lost, GOOD[1], late, *GOOD[2:]]))
    failed = [event for event in events if isinstance(event, Failed)]
    assert sorted(event.of.request for event in failed) == ["late", "lost"]
    assert all("not finite" in event.error for event in failed)
    assert texts(events) == alone(tuple(devices))
    assert all(len(each) == 6 for each in texts(events).values())


def test_who_is_given_up_gets_nothing_more_and_the_row_goes_to_the_next(engine, devices):
    found, given_up = [], ChoiceId("long", 0)
    for event in engine.run([request("long", *prompt(7, 5), new=40), *GOOD]):
        found.append(event)
        if len([each for each in found if each.of == given_up]) == 3:
            engine.cancel(given_up)
    own = [event for event in found if event.of == given_up]
    assert len(own) == 3 and all(isinstance(event, Token) for event in own)
    rest = {of: ids for of, ids in texts(found).items() if of != given_up}
    assert rest == alone(tuple(devices))


def test_with_too_few_pages_the_youngest_give_way_and_say_the_same(devices):
    """12 pages of 4 positions in each shard, of which each of two rows needs 7 in the end."""
    long = [request(f"long {n}", *prompt(20 + n, 10), new=18) for n in range(4)]
    roomy = texts(made(tuple(devices))().run(long))
    assert texts(made(tuple(devices), "paged", 4, 24)().run(long)) == roomy
    assert [len(ids) for ids in roomy.values()] == [18] * 4


def test_a_queue_that_is_full_is_waited_for(devices):
    """Prompts of 3 to 20 tokens where 10 may wait."""
    engine = made(tuple(devices))()
    engine.schedule = dataclasses.replace(engine.schedule, max_queued_tokens=10)
    assert texts(engine.run(GOOD)) == alone(tuple(devices))


def test_choices_of_a_request_differ_by_their_noise_alone(engine):
    both = request("both", *prompt(1, 6), n=2, temperature=1.0, new=12)
    one = request("both", *prompt(1, 6), n=1, temperature=1.0, new=12)
    found = texts(engine.run([both]))
    assert found[ChoiceId("both", 0)] != found[ChoiceId("both", 1)]
    assert texts(engine.run([one])) == {ChoiceId("both", 0): found[ChoiceId("both", 0)]}


def test_a_stop_id_ends_a_row_behind_min_tokens(engine, devices):
    whole = alone(tuple(devices))[ChoiceId("2", 0)]
    third = whole[2]
    at = whole.index(third)
    stopped = Request(id="2", tokens=GOOD[2].tokens, params=GOOD[2].params, seed=3, stop_ids=(third,))
    events = list(engine.run([stopped]))
    assert texts(events)[ChoiceId("2", 0)] == whole[: at + 1]
    assert events[-1] == Finished(of=ChoiceId("2", 0), reason="stop", matched=third)
    later = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=5)
    events = list(engine.run([Request(id="2", tokens=GOOD[2].tokens, params=later, seed=3, stop_ids=(third,))]))
    assert third not in texts(events)[ChoiceId("2", 0)][:5]


class EveryThird:
    """Stands for llguidance: the n-th token is one of the ids that are n modulo 3; after the fifth there is none."""

    def __init__(self):
        self.count = 0

    def mask(self) -> np.ndarray:
        if self.count == 5:
            raise ConstraintError("nothing conforms")
        allowed = np.arange(VOCAB + -VOCAB % 32) % 3 == self.count % 3
        return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)

    def accept(self, id: int) -> None:
        assert id % 3 == self.count % 3
        self.count += 1


class Following:
    """Stands for `Constraints`."""

    def __init__(self, follows: type[EveryThird] = EveryThird):
        self.follows = follows

    def start(self, spec: ConstraintSpec) -> EveryThird:
        assert spec.text == "a"
        return self.follows()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_row_keeps_to_its_masks_and_no_other_row_notices(engine, devices, temperature):
    """It fails where nothing is allowed any more, and says why."""
    engine.constraints = Following()
    constraint = ConstraintSpec(kind="regex", text="a")
    asked = [request(f"c{n}", *prompt(30 + n, 12), new=new, temperature=temperature) for n, new in enumerate((4, 9))]
    bound = [replace(each, constraint=constraint) for each in asked]
    events = list(engine.run([GOOD[0], bound[0], GOOD[1], bound[1], *GOOD[2:]]))
    found = texts(events)
    for n, count in enumerate((4, 5)):
        assert [id % 3 for id in found.pop(ChoiceId(f"c{n}", 0))] == [k % 3 for k in range(count)]
    assert [event for event in events if isinstance(event, Failed)] == [
        Failed(of=ChoiceId("c1", 0), error="nothing conforms")
    ]
    assert found == alone(tuple(devices))


class GivesUp(EveryThird):
    """The same, whose limit is reached while it follows the third token."""

    def accept(self, id: int) -> None:
        if self.count == 2:
            raise ConstraintError("too much to follow")
        super().accept(id)


def test_a_row_that_cannot_be_followed_any_more_ends_alone(engine, devices):
    engine.constraints = Following(GivesUp)
    asked = replace(request("c", *prompt(30, 12), new=9), constraint=ConstraintSpec(kind="regex", text="a"))
    events = list(engine.run([GOOD[0], asked, *GOOD[1:]]))
    found = texts(events)
    assert len(found.pop(ChoiceId("c", 0))) == 2
    assert [event for event in events if isinstance(event, Failed)] == [
        Failed(of=ChoiceId("c", 0), error="too much to follow")
    ]
    assert found == alone(tuple(devices))


def test_what_no_row_can_hold_is_refused(engine):
    with pytest.raises(RefusedError, match="45 tokens"):
        list(engine.run([request("long", *prompt(1, 45))]))


def test_rows_get_a_token_a_step_whether_or_not_a_prompt_is_computed(engine):
    """The calls of a step are read together: one call each would leave the others without a token at times."""
    first, second = request("a", *prompt(1, 3), new=30), request("b", *prompt(2, 20))
    engine.offer(first)
    tokens, parts = [], []
    prefill = engine.device.prefill
    vars(engine.device)["prefill"] = lambda *args: parts.append(len(tokens)) or prefill(*args)
    while not engine.idle:
        if len(tokens) == 8:
            engine.offer(second)
        made = [event.of.request for event in engine.step() if isinstance(event, Token)]
        tokens.append(made.count("a"))
    # Of 20 tokens 8 at a time, while the other one gets its own.
    assert len([step for step in parts if step >= 8]) == 3
    begun = tokens.index(1)
    assert tokens[begun : begun + 30] == [1] * 30 and sum(tokens) == 30
