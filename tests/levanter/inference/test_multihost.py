"""What process 0 calls is called elsewhere: the same calls with the same arrays, told in small messages."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from levanter.distributed import broadcast
from levanter.distributed.broadcast import FRAME, receive_message, send_message
from levanter.inference.multihost import LeaderRunner, run_follower
from levanter.inference.programs import PromptScores
from levanter.inference.requests import ChoiceId, SamplingParams
from levanter.inference.sampling import SlotSampling, host_params
from levanter.inference.scheduler_state import DecodeSlot, PrefillChunk

ROWS, PAGES, WORDS = 6, 40, 1563


class Calls:
    """Stands for the rows on devices: notes what it is called with, as arrays."""

    programs: Any = SimpleNamespace()

    def __init__(self):
        self.noted: list[tuple] = []

    def prefill(self, bucket, parts, tables, sampling, masks=None):
        anonymous = [dataclasses.replace(p, id=None) for p in parts]
        return self._note("prefill", bucket, anonymous, tables, sampling, masks)

    def decode(self, rows, tables, sampling, masks=None):
        return self._note("decode", None, [(r.slot, r.start, r.tokens) for r in rows], tables, sampling, masks)

    def _note(self, name, bucket, told, tables, sampling, masks):
        arrays = {key: array.copy() for key, array in host_params(sampling).items()}
        arrays |= {f"mask {n}": mask for n, mask in (masks or {}).items()}
        self.noted.append((name, bucket, told, {**arrays, "tables": tables.copy()}))
        return cast(Any, np.zeros(1))


def sampled(rng: random.Random, n: int) -> SlotSampling:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.randrange(5),
        top_p=rng.uniform(0.1, 1),
        seed=rng.choice([None, rng.randrange(2**63)]),
        logit_bias={rng.randrange(50_000): rng.uniform(-5, 5) for _ in range(rng.randrange(300))},
        stop=("\n\n", '日本 \\"') if rng.random() < 0.5 else (),
        stop_token_ids=tuple(rng.randrange(100) for _ in range(rng.randrange(4))),
        logprobs=rng.choice([None, 0, 20]),
        max_tokens=rng.choice([None, 9]),
    )
    return SlotSampling(params=params, seed=rng.randrange(2**63), choice=n, prompt_tokens=n + 1, stop_ids=(2, n))


def drive(leading: LeaderRunner, seed: int, steps: int) -> list[tuple]:
    """Random calls, as an engine makes them: rows and tables change now and then. Returns the scored prompts."""
    rng, scored = random.Random(seed), []
    tables = np.full((ROWS, PAGES), 9, np.int32)
    sampling: list[SlotSampling | None] = [None] * ROWS
    for _ in range(steps):
        for n in range(ROWS):
            if rng.random() < 0.3:
                sampling[n] = None if rng.random() < 0.3 else sampled(rng, n)
            if rng.random() < 0.3:
                tables[n, rng.randrange(PAGES)] = rng.randrange(1000)
        running = [n for n in range(ROWS) if sampling[n] is not None]
        masks = {n: np.frombuffer(rng.randbytes(4 * WORDS), "<u4").astype(np.uint32) for n in running[:2]}
        of = ChoiceId("somebody", 0)
        if rng.random() < 0.5:
            rows = [DecodeSlot(id=of, slot=n, start=rng.randrange(900), tokens=4) for n in running]
            leading.decode(rows, tables, list(sampling), masks if rng.random() < 0.3 else None)
        elif rng.random() < 0.8:
            parts = [
                PrefillChunk(
                    **{"id": of, "slot": n, "lane": lane, "start": 8 * lane, "fresh": lane == 0, "ends": lane == 1},
                    tokens=tuple(rng.randrange(128_000) for _ in range(rng.randrange(1, 2048))),
                    remaining=rng.randrange(99),
                    earlier=tuple(rng.randrange(128_000) for _ in range(rng.randrange(3))),
                    load=rng.choice([None, 0, 5]),
                    save=rng.choice([None, 0, 7]),
                )
                for lane, n in enumerate(running)
            ]
            leading.prefill((8, 2048), parts, tables, list(sampling), masks)
        else:
            tokens = tuple(rng.randrange(100) for _ in range(5))
            leading.score(tokens, 3)
            scored.append((list(tokens), 3))
    leading.end()
    return scored


@pytest.mark.parametrize("seed", range(3))
def test_others_call_what_process_0_calls(seed):
    frames: list[str] = []
    asked: list[tuple] = []

    def score(tokens, top):
        asked.append((list(tokens), top))
        return PromptScores(logprobs=(), top=())

    own, others = Calls(), Calls()
    scored = drive(LeaderRunner(own, frames.append, score), seed, 40)
    assert asked == scored
    asked.clear()
    waiting = iter(frames)
    assert run_follower(others, lambda: next(waiting), score) == 40
    assert next(waiting, None) is None and asked == scored
    assert len(own.noted) == len(others.noted) > 20
    for mine, theirs in zip(own.noted, others.noted, strict=True):
        assert mine[:3] == theirs[:3]
        assert mine[3].keys() == theirs[3].keys()
        for name in mine[3]:
            np.testing.assert_array_equal(mine[3][name], theirs[3][name], err_msg=name)
    assert max(map(len, frames)) < 64 * 1024


def test_what_did_not_change_is_not_told_again():
    frames: list[str] = []
    leading = LeaderRunner(Calls(), frames.append)
    tables, sampling = np.zeros((ROWS, PAGES), np.int32), [sampled(random.Random(1), n) for n in range(ROWS)]
    for _ in range(2):
        leading.decode([DecodeSlot(id=ChoiceId("a", 0), slot=0, start=3, tokens=1)], tables, sampling)
    first, second = (receive_message(iter([frame]).__next__) for frame in frames)
    assert len(first["sampling"]) == ROWS and second["sampling"] == second["tables"] == {}


def test_a_long_message_goes_in_several(monkeypatch):
    monkeypatch.setattr(broadcast, "FRAME", 16)
    frames: list[str] = []
    send_message({"call": "x", "text": "".join(random.Random(0).choices("abcdef", k=500))}, frames.append)
    assert len(frames) > 10 and all(len(frame) <= 17 for frame in frames) and FRAME > 16
    waiting = iter(frames)
    assert len(receive_message(lambda: next(waiting))["text"]) == 500
