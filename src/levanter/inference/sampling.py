"""Sampling: from the logits of each row to its next token, with log-probabilities of the model's own distribution.

`SlotParams` holds the sampling parameters of all rows as arrays, so a new request compiles nothing. They are made on
the host (`host_params`) and passed with every call: a few hundred numbers a row. A parameter that a request does not
use has the value that changes nothing.

A threshold on logits decides which tokens may be sampled. It is found bit by bit: float32 numbers are ordered like
integers, so 32 masked sums give the largest threshold above which there is still enough (top-k: enough tokens; top-p:
enough probability). That is exact and needs no sort, and each device sums its own shard of the vocabulary. Tokens equal
to the threshold stay.

The token is the maximum of log-probability plus Gumbel noise, which is a draw from the distribution. The noise of an id
depends on the row's seed and choice, the position and the id, and on nothing else: not on the batch, the mesh, or the
rows that pad the vocabulary.

`top_tokens` finds the likeliest tokens of each row. Each shard of the vocabulary finds its own, and only those are
gathered and compared. This is written per device, because the partitioner gathers the whole operand of a top-k. Of
equal logits the lowest ids come first, on every mesh.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelector, NamedArray
from jax.sharding import PartitionSpec

from haliax_ext.mapping import compute_mapping_in_scope
from levanter.inference.requests import MAX_BIASES, MAX_STOP_IDS, MAX_TOP_LOGPROBS, SamplingParams
from levanter.layers.attention.reference import HIDDEN
from levanter.models.suffix_scores import BLOCK

Word = Axis("seed_word", 2)
"""The halves of a 64-bit seed, high first; also those of a key of JAX's threefry."""
Stop = Axis("stop_id", MAX_STOP_IDS)
Bias = Axis("biased_id", MAX_BIASES)
NO_ID = -1
"""Padding of lists of ids."""


class SlotParams(eqx.Module):
    """The sampling parameters of each row; `SamplingParams` defines the first seven.

    Attributes:
        temperature, top_p, min_p, presence, frequency, repetition: float32 `[batch]`.
        top_k: int32 `[batch]`; 0 or less for all.
        seed: uint32 `[batch, seed_word]`.
        choice: int32 `[batch]`, the row's index among the choices of its request.
        first_end: int32 `[batch]`, the first position whose token may end the row.
        stop_ids: int32 `[batch, stop_id]`, the ids that end it, then -1.
        biased_ids: int32 `[batch, biased_id]`, the ids whose logits are changed, then -1.
        biases: float32 `[batch, biased_id]`.
        top_logprobs: int32 `[batch]`, number of likeliest tokens to return; -1 for no log-probabilities.
    """

    temperature: NamedArray
    top_k: NamedArray
    top_p: NamedArray
    min_p: NamedArray
    presence: NamedArray
    frequency: NamedArray
    repetition: NamedArray
    seed: NamedArray
    choice: NamedArray
    first_end: NamedArray
    stop_ids: NamedArray
    biased_ids: NamedArray
    biases: NamedArray
    top_logprobs: NamedArray

    @staticmethod
    def of_arrays(arrays: Mapping[str, np.ndarray | jax.Array], Batch: Axis) -> "SlotParams":
        """The result of `host_params`, with axes."""
        return SlotParams(**{name: hax.named(arrays[name], (Batch, *extra)) for name, (_, _, extra) in _FIELDS.items()})

    @staticmethod
    def abstract(Batch: Axis) -> "SlotParams":
        """The parameters of `Batch` rows without memory, for a Program's input."""
        shapes = {
            name: NamedArray(jax.ShapeDtypeStruct((Batch.size, *(a.size for a in extra)), dtype), (Batch, *extra))  # pyright: ignore[reportArgumentType]
            for name, (dtype, _, extra) in _FIELDS.items()
        }
        return SlotParams(**shapes)


_FIELDS: Mapping[str, tuple[type, float, tuple[Axis, ...]]] = {
    "temperature": (np.float32, 0.0, ()),
    "top_k": (np.int32, 0, ()),
    "top_p": (np.float32, 1.0, ()),
    "min_p": (np.float32, 0.0, ()),
    "presence": (np.float32, 0.0, ()),
    "frequency": (np.float32, 0.0, ()),
    "repetition": (np.float32, 1.0, ()),
    "seed": (np.uint32, 0, (Word,)),
    "choice": (np.int32, 0, ()),
    "first_end": (np.int32, 0, ()),
    "stop_ids": (np.int32, NO_ID, (Stop,)),
    "biased_ids": (np.int32, NO_ID, (Bias,)),
    "biases": (np.float32, 0.0, (Bias,)),
    "top_logprobs": (np.int32, -1, ()),
}
"""For each array: its dtype, its value in an unused row, and its axes after `batch`."""


@dataclass(frozen=True, kw_only=True)
class SlotSampling:
    """How one row is sampled.

    Attributes:
        params: parameters of its request.
        seed: seed of the request.
        choice: index among the choices of the request.
        prompt_tokens: tokens of the request's prompt.
        stop_ids: the ids that end it: the model's own (unless they are ignored) and the request's.
    """

    params: SamplingParams
    seed: int
    choice: int
    prompt_tokens: int
    stop_ids: tuple[int, ...]


def host_params(
    rows: Sequence[SlotSampling | None],
    *,
    before: tuple[Sequence[SlotSampling | None], Mapping[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of `SlotParams` by name, for rows in the order of `batch`; None for an unused row.

    Args:
        rows: the parameters of each row.
        before: the same number of rows of an earlier call, and its result: only rows that changed are computed again.
            The arrays are copied all the same, since a call in flight may still read the earlier ones.
    """
    if before is None:
        known: Sequence[SlotSampling | None] = [None] * len(rows)
        arrays = {
            name: np.full((len(rows), *(axis.size for axis in extra)), value, dtype)
            for name, (dtype, value, extra) in _FIELDS.items()
        }
    else:
        known, arrays = before[0], {name: array.copy() for name, array in before[1].items()}
    for n, (row, old) in enumerate(zip(rows, known, strict=True)):
        if row is old:
            continue
        if old is not None:
            # The new sequence may have fewer stop ids or biases than the old one: the rest of the lists must be padding
            # again.
            for name, (_, value, _) in _FIELDS.items():
                arrays[name][n] = value
        if row is not None:
            _fill(arrays, n, row)
    return arrays


def _fill(arrays: Mapping[str, np.ndarray], n: int, row: SlotSampling) -> None:
    params = row.params
    arrays["temperature"][n] = params.temperature
    arrays["top_k"][n] = params.top_k
    arrays["top_p"][n] = params.top_p
    arrays["min_p"][n] = params.min_p
    arrays["presence"][n] = params.presence_penalty
    arrays["frequency"][n] = params.frequency_penalty
    arrays["repetition"][n] = params.repetition_penalty
    # A seed has 63 bits, and the key of threefry two words of 32.
    arrays["seed"][n] = row.seed >> 32, row.seed & 0xFFFFFFFF
    arrays["choice"][n] = row.choice
    # Position of the first token that may end the text.
    arrays["first_end"][n] = row.prompt_tokens + params.min_tokens
    arrays["stop_ids"][n, : len(row.stop_ids)] = row.stop_ids
    arrays["biased_ids"][n, : len(params.logit_bias)] = list(params.logit_bias)
    arrays["biases"][n, : len(params.logit_bias)] = list(params.logit_bias.values())
    arrays["top_logprobs"][n] = -1 if params.logprobs is None else params.logprobs


def top_tokens(logits: NamedArray, Top: Axis) -> tuple[NamedArray, NamedArray]:
    """The largest logits, descending, and their ids: float32 and int32, `[batch, Top]`.

    Args:
        logits: `[batch, vocab]`.
        Top: how many; at most the size of `vocab`.
    """
    Vocab = logits.resolve_axis("vocab")
    (Batch,) = (axis for axis in logits.axes if axis != Vocab)
    array = logits.rearrange((Batch, Vocab)).array
    if jax.sharding.get_abstract_mesh().empty:
        values, ids = _largest(array, Top.size)
    else:
        values, ids = _sharded(array, Top.size)
    return hax.named(values, (Batch, Top)), hax.named(ids, (Batch, Top))


def _sharded(array: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    mapping = compute_mapping_in_scope()
    spec = mapping.spec(("batch", "vocab"))
    over = mapping.mesh_axes("vocab")

    def of_shard(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = _largest(part, min(k, part.shape[-1]))
        if not over:
            return values, ids
        # From indices within the shard to ids of the vocabulary.
        ids = ids + jax.lax.axis_index(over).astype(jnp.int32) * np.int32(part.shape[-1])
        # `[batch, k · shards]`, in the order of the shards, so in the order of ids; `top_k` prefers the first of equal
        # values.
        values, ids = (jax.lax.all_gather(array, over, axis=1, tiled=True) for array in (values, ids))
        best, indices = jax.lax.top_k(values, k)
        return best, jnp.take_along_axis(ids, indices, axis=1)

    out = PartitionSpec(spec[0], None)
    # After the gather the results are equal on all devices of `over`, which the checker cannot prove.
    return jax.shard_map(of_shard, in_specs=spec, out_specs=(out, out), check_vma=False)(array)


def _largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis and their indices; of equal ones the first.

    They are in the k blocks with the largest maxima (see `suffix_scores.largest`). The blocks are taken in the order of
    their indices, so that equal values keep that order.
    """
    # `top_k` sorts its whole operand, so the blocks narrow it down first. With few blocks that gains nothing.
    count = -(-x.shape[-1] // BLOCK)
    if count < 2 * k:
        return jax.lax.top_k(x, k)
    padded = jnp.pad(x, [(0, 0), (0, count * BLOCK - x.shape[-1])], constant_values=-np.inf)
    blocks = padded.reshape(x.shape[0], count, BLOCK)
    # A block that contains one of the k largest values has one of the k largest maxima.
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=1).reshape(x.shape[0], k * BLOCK)
    values, indices = jax.lax.top_k(candidates, k)
    # From an index among the candidates to its block, and to the index in the whole array.
    block = jnp.take_along_axis(chosen, indices // BLOCK, axis=1)
    return values, (block * BLOCK + indices % BLOCK).astype(jnp.int32)


Top = Axis("top", MAX_TOP_LOGPROBS)
"""The likeliest tokens that are given with each token."""
IN_PROMPT = 1
"""The lowest bit of a count: the token is in the prompt. The others count how often it was generated."""
GENERATED = 2
"""The increment of a token's count for each time that it was generated."""


class Sampled(eqx.Module):
    """The next token of each row.

    Attributes:
        tokens: int32 `[batch]`.
        logprobs: float32 `[batch]`, of the model's own distribution.
        top_ids: int32 `[batch, top]`, the likeliest tokens, the likeliest first; 0 if no row wants them.
        top_logprobs: float32 `[batch, top]`, their log-probabilities; 0 in rows that do not want them.
        ok: boolean `[batch]`; false where there is no token to sample: the logits are no numbers, or all are forbidden.
        policy_logprobs: float32 `[batch]`, log softmax(logits / temperature) of the tokens: the distribution that they
            are from if nothing else bends it; of greedy rows at temperature 1. None if Programs do not compute it.
    """

    tokens: NamedArray
    logprobs: NamedArray
    top_ids: NamedArray
    top_logprobs: NamedArray
    ok: NamedArray
    policy_logprobs: NamedArray | None = None


def sample(
    logits: NamedArray,
    params: SlotParams,
    noise: NamedArray,
    position: NamedArray,
    *,
    counts: NamedArray | None = None,
    mask: NamedArray | None = None,
    policy_logprobs: bool = False,
) -> Sampled:
    """Samples a token for each row.

    Args:
        logits: float32 `[batch, vocab]`, of the model, with the rows that pad `vocab` hidden (`head_logits`).
        params: of each row.
        noise: uint32 `[batch, seed_word]`, see `noise_keys`.
        position: int32 `[batch]`, where in its sequence the token will be.
        counts: int32 `[batch, vocab]`, how often each token occurred (`IN_PROMPT`, `GENERATED`); None if penalties are
            not configured.
        mask: boolean `[batch, vocab]`, which ids may be sampled; None for all.
        policy_logprobs: whether to compute `Sampled.policy_logprobs`, a second sum over the vocabulary.
    """
    Vocab = logits.resolve_axis("vocab")
    assert logits.dtype == jnp.float32, f"logits must be float32, got {logits.dtype}"
    logits = hax.auto_sharded(logits)
    # log Σ exp(logits), shifted by the maximum so that no exponential overflows.
    top = hax.max(logits, Vocab)
    normalizer = hax.log(hax.sum(hax.exp(logits - top), Vocab)) + top
    # Log-probabilities are those of the model's own distribution, so `logits` are kept as well as `adjusted`.
    adjusted = hax.auto_sharded(adjust_logits(logits, params, position, counts=counts, mask=mask))
    best = hax.max(adjusted, Vocab)
    # A row whose ids are all hidden by masks has no token to sample.
    ok = hax.isfinite(top) & (best > HIDDEN / 2)
    scores = _scores(adjusted - best, params, noise, position)
    ids = hax.arange(Vocab, dtype=jnp.int32).broadcast_to(logits.axes)
    is_best = scores == hax.max(scores, Vocab)
    # The lowest of the best ids, as a minimum: devices reduce their shards first and exchange one number a row, where
    # an argmax would reduce pairs of value and index.
    tokens = hax.min(hax.where(is_best, ids, Vocab.size - 1), Vocab)
    tokens = hax.where(ok, tokens, 0)
    # A sum with one nonzero term selects an entry of a sharded axis without a gather.
    token_logits = hax.sum(hax.where(ids == tokens, logits, 0.0), Vocab)
    top_ids, top_logits = _top(logits, params)
    wants_top = params.top_logprobs.broadcast_axis(Top) > 0
    policy = None
    if policy_logprobs:
        # Of the model's logits, as the scorer computes it (`token_logprobs`): biases and penalties are not in it.
        # A greedy row has no distribution of its own: its temperature 0 would divide by zero.
        temperature = hax.where(params.temperature > 0, params.temperature, 1.0)
        policy_normalizer = hax.log(hax.sum(hax.exp((logits - top) / temperature), Vocab))
        policy = hax.where(ok, (token_logits - top) / temperature - policy_normalizer, 0.0)
    return Sampled(
        tokens=tokens,
        logprobs=hax.where(ok, token_logits - normalizer, 0.0),
        top_ids=top_ids,
        top_logprobs=hax.where(wants_top, top_logits - normalizer, 0.0).rearrange(top_logits.axes),
        ok=ok,
        policy_logprobs=policy,
    )


def adjust_logits(
    logits: NamedArray,
    params: SlotParams,
    position: NamedArray,
    *,
    counts: NamedArray | None = None,
    mask: NamedArray | None = None,
) -> NamedArray:
    """The logits that are sampled from, before the temperature; see `sample` for the arguments.

    In this order: biases, penalties, and forbidden ids (stop ids before `min_tokens`, and the mask).
    """
    biased = params.biased_ids.array >= 0
    logits = _where_any(biased, lambda x: _add_biases(x, params), logits)
    if counts is not None:
        logits = _penalize(logits, params, counts)
    early = position < params.first_end
    # Ends of text are hidden until a choice has `min_tokens`.
    has_stop = early.array[:, None] & (params.stop_ids.array >= 0)
    logits = _where_any(has_stop, lambda x: _hide_stop_ids(x, params, early), logits)
    if mask is not None:
        logits = _where_any(~mask.array, lambda x: hax.where(mask, x, HIDDEN), logits)
    return logits


def noise_keys(seed: NamedArray, choice: NamedArray) -> NamedArray:
    """The key of a row's noise, `fold_in(key(seed), choice)`; uint32 `[batch, seed_word]`.

    Args:
        seed: uint32 `[batch, seed_word]`.
        choice: int32 `[batch]`.
    """

    def of_row(seed: jax.Array, choice: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(_key(seed), choice))

    (Batch,) = choice.axes
    return hax.named(jax.vmap(of_row)(seed.rearrange((Batch, Word)).array, choice.array), (Batch, Word))


def gumbel_noise(noise: NamedArray, position: NamedArray, Vocab: Axis) -> NamedArray:
    """Gumbel noise of every id, float32 `[batch, vocab]`, from the key `fold_in(noise, position)`.

    From 32 random bits u in (0, 1) is made such that the smallest values are exact to the last bit, and they decide
    what is sampled: with noise −log(−log1p(−u)) the smallest u wins.
    """

    def of_row(noise: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(_key(noise), position), (Vocab.size,), jnp.uint32)

    (Batch,) = position.axes
    # With this generator the bits of an id do not depend on how many ids there are, or on how the process configured
    # JAX. The noise must be the same on every mesh, or a seed would not reproduce a text.
    with jax.threefry_partitionable(True):
        bits = jax.vmap(of_row)(noise.rearrange((Batch, Word)).array, position.array)
    # The middle of each interval of width 2⁻³²: never 0. The minimum keeps the largest ones below 1.
    uniform = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = jnp.minimum(uniform, np.float32(1 - 2.0**-24))
    return hax.auto_sharded(hax.named(-jnp.log(-jnp.log1p(-uniform)), (Batch, Vocab)))


def _key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _scores(distance: NamedArray, params: SlotParams, noise: NamedArray, position: NamedArray) -> NamedArray:
    """The scores whose maximum is the next token: logits minus the largest one, plus noise in rows that are sampled."""
    Vocab = distance.resolve_axis("vocab")
    sampled = params.temperature > 0

    def with_noise(distance: NamedArray) -> NamedArray:
        # Division by 1 instead of 0 in greedy rows, whose result is discarded below.
        x = distance / hax.where(sampled, params.temperature, 1.0)
        drawn = x + gumbel_noise(noise, position, Vocab)
        drawn = hax.where(allowed_tokens(x, params), drawn, -jnp.inf)
        return hax.where(sampled, drawn, distance).rearrange(distance.axes)

    # A batch of greedy rows alone draws no noise.
    return _where_any(sampled.array, with_noise, distance)


def allowed_tokens(x: NamedArray, params: SlotParams) -> NamedArray:
    """Which tokens may be sampled, boolean `[batch, vocab]`: by top-k, then top-p of those, and min-p.

    Args:
        x: float32 `[batch, vocab]`, logits over the temperature, the largest of each row 0.
        params: of each row.
    """
    Vocab = x.resolve_axis("vocab")
    sampled = params.temperature > 0
    # `x` is 0 at the most likely token, so the weights are probabilities relative to its probability.
    keys, weights = _ordered_bits(x), hax.exp(x)
    has_k, has_p = sampled & (params.top_k > 0), sampled & (params.top_p < 1)
    everything = hax.zeros(has_k.axes, dtype=jnp.uint32)

    def by_count(_: NamedArray) -> NamedArray:
        # A row without top-k may sample all tokens.
        k = hax.where(has_k & (params.top_k < Vocab.size), params.top_k, Vocab.size)
        return _threshold(keys, lambda mask: hax.sum(mask.astype(jnp.int32), Vocab) >= k)

    # A threshold of 0 admits every token: all keys are unsigned.
    k_threshold = _where_any(has_k.array, by_count, everything)
    stays = keys >= k_threshold

    def by_probability(least: NamedArray) -> NamedArray:
        remaining = hax.where(stays, weights, 0.0)
        # The sum is at least 1, the weight of the likeliest token. Every threshold would satisfy a share that rounds to
        # 0, up to one that no token reaches.
        share = hax.maximum(params.top_p * hax.sum(remaining, Vocab), 1e-30)
        # No threshold reaches infinity, so rows without top-p get 0, and keep the threshold of top-k.
        enough = hax.where(has_p, share, jnp.inf)
        threshold = _threshold(keys, lambda mask: hax.sum(hax.where(mask, remaining, 0.0), Vocab) >= enough)
        return cast(NamedArray, hax.maximum(least, threshold))

    p_threshold = _where_any(has_p.array, by_probability, k_threshold)
    return cast(NamedArray, (keys >= p_threshold) & (weights >= params.min_p))


def _threshold(keys: NamedArray, enough: Callable[[NamedArray], NamedArray]) -> NamedArray:
    """The largest threshold, uint32 `[batch]`, that leaves enough of the keys at or above it; 0 if none does."""
    rows = tuple(axis for axis in keys.axes if axis.name != "vocab")

    def step(n: jax.Array, threshold: NamedArray) -> NamedArray:
        # Binary search from the highest bit: keep the bit if enough keys remain at or above the threshold with it.
        bit = jnp.uint32(1) << (jnp.uint32(31) - n.astype(jnp.uint32))
        tried = hax.named(threshold.array | bit, rows)
        return hax.where(enough(keys >= tried).rearrange(rows), tried, threshold)

    return jax.lax.fori_loop(0, 32, step, hax.zeros(rows, dtype=jnp.uint32))


def _ordered_bits(x: NamedArray) -> NamedArray:
    """Unsigned integers in the order of the numbers; −0 and 0 are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x.array == 0, np.float32(0), x.array), jnp.uint32)
    # IEEE floats compare like sign-magnitude integers: flipping all bits of negative numbers, and the sign bit of the
    # others, makes the order that of unsigned integers.
    negative = bits >> 31 == 1
    return hax.named(jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31)), x.axes)


def _where_any(condition: jax.Array, change: Callable[[NamedArray], NamedArray], x: NamedArray) -> NamedArray:
    """`change(x)` if the condition holds anywhere, else `x`: a parameter that no row uses costs nothing."""
    return jax.lax.cond(jnp.any(condition), lambda x: change(x).rearrange(x.axes), lambda x: x, x)


def _add_biases(logits: NamedArray, params: SlotParams) -> NamedArray:
    ids, biases = params.biased_ids, params.biases
    return _scatter(logits, ids, lambda at: at.add(biases.array, mode="drop"))


def _hide_stop_ids(logits: NamedArray, params: SlotParams, early: NamedArray) -> NamedArray:
    ids = hax.where(early, params.stop_ids, -1).rearrange(params.stop_ids.axes)
    return _scatter(logits, ids, lambda at: at.set(HIDDEN, mode="drop"))


def _scatter(logits: NamedArray, ids: NamedArray, change: Callable) -> NamedArray:
    """Changes the logits at the ids of each row; negative ids are padding."""
    (Batch, _), Vocab = ids.axes, logits.resolve_axis("vocab")
    array = logits.rearrange((Batch, Vocab)).array
    rows = jnp.arange(Batch.size)[:, None]
    # An index past the end, which `mode="drop"` ignores; JAX counts negative indices from the end.
    columns = jnp.where(ids.array >= 0, ids.array, Vocab.size)
    return hax.auto_sharded(hax.named(change(array.at[rows, columns]), (Batch, Vocab)))


def _penalize(logits: NamedArray, params: SlotParams, counts: NamedArray) -> NamedArray:
    # The lowest bit of a count marks the prompt; the penalties of OpenAI's interface count generated tokens only.
    generated = hax.named(counts.array >> 1, counts.axes)
    # Repetition: of prompt and generated tokens alike. Multiplying negative logits makes these tokens less likely too.
    logits = hax.where(
        counts > 0, hax.where(logits > 0, logits / params.repetition, logits * params.repetition), logits
    )
    times = generated.astype(jnp.float32)
    return logits - params.frequency * times - params.presence * (generated > 0).astype(jnp.float32)


def _top(logits: NamedArray, params: SlotParams) -> tuple[NamedArray, NamedArray]:
    """Ids and logits of the likeliest tokens, if any row wants them."""
    Vocab = logits.resolve_axis("vocab")
    (Batch,) = (axis for axis in logits.axes if axis != Vocab)
    Candidates = Top.resize(min(Top.size, Vocab.size))

    def top_k(logits: NamedArray) -> tuple[NamedArray, NamedArray]:
        values, ids = top_tokens(logits, Candidates)
        # A vocabulary smaller than `Top` is padded, so that the result has the same shape for every model.
        more: dict[AxisSelector, tuple[int, int]] = {Candidates: (0, Top.size - Candidates.size)}
        return (
            hax.pad(ids, more).rearrange((Batch, Top)),
            hax.pad(values, more, constant_values=-jnp.inf).rearrange((Batch, Top)),
        )

    def none(_: NamedArray) -> tuple[NamedArray, NamedArray]:
        return hax.zeros((Batch, Top), dtype=jnp.int32), hax.zeros((Batch, Top), dtype=jnp.float32)

    wants_top = jnp.any(params.top_logprobs.array > 0)
    return cast("tuple[NamedArray, NamedArray]", jax.lax.cond(wants_top, top_k, none, logits))
