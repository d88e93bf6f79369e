"""The state of rows: how they begin, move on and end, and that nothing of it compiles anything."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from levanter.inference.requests import SamplingParams
from levanter.inference.sampling import GENERATED, IN_PROMPT, Sampled, SlotParams, SlotSampling, Top, Word, host_params
from levanter.inference.slot_state import SlotState

Batch, Lane, Vocab = Axis("batch", 5), Axis("batch", 3), Axis("vocab", 12)


def named(values, *axes, dtype=jnp.int32):
    return hax.named(jnp.asarray(values, dtype), axes)


def sampled(tokens, axis, ok=None):
    nothing = hax.zeros((axis, Top), dtype=jnp.int32)
    return Sampled(
        tokens=named(tokens, axis),
        logprobs=hax.zeros(axis),
        top_ids=nothing,
        top_logprobs=nothing.astype(jnp.float32),
        ok=named([True] * axis.size if ok is None else ok, axis, dtype=jnp.bool_),
    )


def params(axis, stops=()):
    row = SlotSampling(params=SamplingParams(), seed=0, choice=0, prompt_tokens=0, stop_ids=tuple(stops))
    return SlotParams.of_arrays(host_params([row] * axis.size), axis)


def begin(state, rows, tokens, *, position, remaining, stops=(), ok=None):
    noise = hax.named(jnp.arange(6, dtype=jnp.uint32).reshape(3, 2) + 1, (Lane, Word))
    return state.begin(
        named(rows, Lane),
        sampled(tokens, Lane, ok),
        params(Lane, stops),
        noise=noise,
        position=named(position, Lane),
        remaining=named(remaining, Lane),
    )


def test_rows_begin_where_they_are_put_and_others_stay():
    state = begin(SlotState.empty(Batch), [3, 5, 0], [7, 8, 9], position=[4, 1, 6], remaining=[2, 2, 1])
    assert state.last_token.array.tolist() == [9, 0, 0, 7, 0]
    assert state.position.array.tolist() == [6, 0, 0, 4, 0]
    assert state.remaining.array.tolist() == [0, 0, 0, 1, 0]
    # Row 0 may have one token, and has it. Row 5 does not exist: its prompt is not at its end.
    assert state.done.array.tolist() == [True, True, True, False, True]
    assert state.noise.array[3].tolist() == [1, 2] and state.noise.array[0].tolist() == [5, 6]
    assert state.counts is None


def test_negative_rows_are_none():
    state = begin(SlotState.empty(Batch), [-1, -5, 2], [7, 8, 9], position=[4, 1, 6], remaining=[2, 2, 2])
    assert state.done.array.tolist() == [True, True, False, True, True]


def test_rows_end_by_a_stop_by_their_length_and_by_having_nothing_to_sample():
    state = begin(SlotState.empty(Batch), [0, 1, 2], [1, 2, 3], position=[5, 5, 5], remaining=[9, 3, 9])
    state = begin(state, [3, 5, 4], [1, 1, 2], position=[5, 5, 5], remaining=[9, 9, 9])
    state = state.advance(sampled([6, 4, 4, 4, 11], Batch, [True, True, False, True, True]), params(Batch, [6]))
    assert state.done.array.tolist() == [True, False, True, False, False]
    assert state.last_token.array.tolist() == [6, 4, 4, 4, 11]
    assert state.position.array.tolist() == [6] * 5
    state = state.advance(sampled([9] * 5, Batch), params(Batch, [6]))
    assert state.done.array.tolist() == [True, True, True, False, False]
    # What is done stays as it was.
    assert state.last_token.array.tolist() == [6, 9, 4, 9, 9]
    assert state.position.array.tolist() == [6, 7, 6, 7, 7]
    assert state.remaining.array.tolist() == [7, 0, 7, 6, 6]


def test_released_rows_are_done():
    state = begin(SlotState.empty(Batch), [0, 1, 2], [1, 2, 3], position=[5, 5, 5], remaining=[9, 9, 9])
    state = state.release(named([False, True, False, False, False], Batch, dtype=jnp.bool_))
    assert state.done.array.tolist() == [False, True, False, True, True]


def test_some_rows_by_themselves_and_back():
    state = begin(SlotState.empty(Batch, Vocab), [0, 1, 2], [1, 2, 3], position=[4, 5, 6], remaining=[9, 9, 9])
    rows = named([2, 5, 0], Lane)
    part = state.take_rows(rows)
    assert part.position.array.tolist()[::2] == [6, 4] and part.done.array.tolist() == [False, True, False]
    moved = part.advance(sampled([8, 8, 7], Lane), params(Lane))
    back = state.replace_rows(rows, moved)
    assert back.last_token.array.tolist() == [7, 2, 8, 0, 0]
    assert back.position.array.tolist() == [5, 5, 7, 0, 0]
    assert back.counts.array[2].tolist() == [0, 0, 0, GENERATED, 0, 0, 0, 0, GENERATED, 0, 0, 0]
    assert back.counts.array[1].tolist() == state.counts.array[1].tolist()


def test_tokens_are_counted_as_prompt_or_as_generated():
    """A prompt in two parts, then tokens; a row that had to give way has tokens of its own among what is prefilled."""
    state = SlotState.empty(Batch, Vocab)
    Pos = Axis("position", 4)
    tokens = named([[1, 1, 2, 9], [3, 4, 4, 5], [8, 8, 8, 8]], Lane, Pos)
    state = state.count_prompt(
        named([4, 1, 5], Lane),
        tokens,
        starts=named([0, 0, 0], Lane),
        lengths=named([3, 4, 4], Lane),
        prompts=named([5, 2, 4], Lane),
        fresh=named([True, True, True], Lane, dtype=jnp.bool_),
    )
    P, G = IN_PROMPT, GENERATED
    assert state.counts.array[4].tolist() == [0, P, P, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert state.counts.array[1].tolist() == [0, 0, 0, P, P + G, G, 0, 0, 0, 0, 0, 0]
    assert not state.counts.array[jnp.array([0, 2, 3])].any()
    state = state.count_prompt(
        named([4, 5, 1], Lane),
        tokens,
        starts=named([3, 0, 0], Lane),
        lengths=named([2, 0, 1], Lane),
        prompts=named([5, 2, 4], Lane),
        fresh=named([False, True, True], Lane, dtype=jnp.bool_),
    )
    # A second part is added; a new request in row 1 begins with nothing.
    assert state.counts.array[4].tolist() == [0, P, P, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert state.counts.array[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, P, 0, 0, 0]
    state = begin(state, [4, 5, 5], [1, 0, 0], position=[5, 0, 0], remaining=[4, 4, 4])
    state = state.advance(sampled([7] * 5, Batch), params(Batch))
    assert state.counts.array[4].tolist() == [0, P + G, P, 0, 0, 0, 0, G, 0, 0, 0, 0]
    assert state.counts.array[1].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, P, 0, 0, 0]


def test_without_penalties_nothing_is_counted():
    state = SlotState.empty(Batch)
    nothing = named([0, 0, 0], Lane)
    tokens = named(np.zeros((3, 2)), Lane, Axis("position", 2))
    same = state.count_prompt(nothing, tokens, starts=nothing, lengths=nothing, prompts=nothing, fresh=nothing > 0)
    assert same is state


def test_new_requests_compile_nothing():
    """Rows that come, end and are released run through the same two executables."""
    traced = []

    @jax.jit
    def begin(state, rows, tokens, position, remaining, arrays):
        traced.append("begin")
        noise = hax.zeros((Lane, Word), dtype=jnp.uint32)
        first = sampled(tokens, Lane)
        return state.begin(
            rows, first, SlotParams.of_arrays(arrays, Lane), noise=noise, position=position, remaining=remaining
        )

    @jax.jit
    def move(state, released, tokens, arrays):
        traced.append("move")
        return state.release(released).advance(sampled(tokens, Batch), SlotParams.of_arrays(arrays, Batch))

    state = SlotState.empty(Batch)
    for n in range(4):
        made = SamplingParams(temperature=n, top_k=n, logit_bias={i: 1.0 for i in range(n)}, stop=("a",) * n)
        row = SlotSampling(params=made, seed=n, choice=n, prompt_tokens=n, stop_ids=tuple(range(n)))
        lanes = [row] * n + [None] * (3 - n) if n < 4 else [row] * 3
        args = named([n, 5, 5], Lane), np.full(3, n), named([n] * 3, Lane), named([3] * 3, Lane)
        state = begin(state, *args, host_params(lanes))
        mask = named(np.arange(5) == n - 1, Batch, dtype=jnp.bool_)
        state = move(state, mask, np.full(5, 11), host_params([row, None, row, None, None]))
    assert traced == ["begin", "move"]
