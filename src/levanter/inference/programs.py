"""`GenerationPrograms`: the Programs that generate text. They start the cache, prefill, decode and score prompts.

`prefill_RxT` computes up to T prompt tokens of each of R rows, at any position of the prompts; `decode_R` samples the
next tokens of the running rows. The cache and the state of the rows are donated and updated in place. Tables, lengths
and sampling parameters are small host arrays that are passed with every call, so no request ever compiles a Program.

The cache is sharded; the state of the rows, a few integers each, is replicated on every device.

`score_RxT` computes the log-probabilities of a prompt, which `echo` returns with its text. It runs the model without a
cache over whole prompts, padded to T tokens. The log-probability of a token and the likeliest tokens at its position
come from one array of logits, so the likeliest token of a greedy text has exactly the largest log-probability.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import Mesh

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.planner import ShardingPlan
from haliax_ext.prefetch import place
from haliax_ext.program import Input, Jit, Program
from haliax_ext.pytree import PyTree, is_named
from levanter.inference.kv_cache import CachePlan
from levanter.inference.row_leaves import model_leaves, put_lanes, take_lanes
from levanter.inference.sampling import Sampled, SlotParams, Top, noise_keys, sample, top_tokens
from levanter.inference.slot_state import SlotState
from levanter.layers.attention.cache_positions import NewPositions
from levanter.layers.decode_state import EARLIER, DecodeState
from levanter.models.base import Decodes
from levanter.models.lm_head.chunks import head_logits

T = TypeVar("T")
SUBLANES = 8
"""Rows of a TPU tile: a product with 8 queries takes as long as one with 2."""


class SampledSlots(eqx.Module):
    """The next tokens of some rows.

    Attributes:
        sampled: the sampled tokens.
        active: boolean, whether the row was running; the other fields of a row that was not mean nothing.
        finite: boolean, whether all activations of the row's tokens were finite. If those of a part of a prompt were
            not, the results of all later parts mean nothing.
    """

    sampled: Sampled
    active: NamedArray
    finite: NamedArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """The model that the Programs run, and how they are compiled.

    Attributes:
        abstract: the module with shapes instead of arrays.
        sharding: the shardings of its parameters.
        counts_tokens: whether rows count their tokens, which penalties need.
        policy_logprobs: whether each token comes with its log-probability at the temperature of its row, which a
            policy that is trained on its own answers needs.
        matmul_precision: see `Program`.
        compiler_options: see `Program`.
        cache_block: see `NewPositions.block`.
        matrix_unit: whether the Programs are for TPUs: a decode step then pads a product of a single row or query,
            which a TPU would compute without its matrix unit, in three times as long; see also `NewPositions.flat`.
    """

    abstract: Decodes
    sharding: ShardingPlan
    counts_tokens: bool = False
    policy_logprobs: bool = False
    cache_block: int | None = None
    matrix_unit: bool = False
    matmul_precision: str | None = None
    compiler_options: dict[str, str] = field(default_factory=dict[str, str])


def start_program(model: ServedModel, cache: CachePlan) -> Program:
    """Makes an empty cache, and a state in which every row is unused."""

    def start() -> tuple[DecodeState, SlotState]:
        return _map_named(lambda x: hax.zeros(x.axes, dtype=x.dtype), cache.abstract), _empty_state(model, cache)

    return _program("start_rows", start, (), cache, model)


def prefill_program(model: ServedModel, cache: CachePlan, *, rows: int, tokens: int) -> Program:
    """Computes parts of prompts, and samples the first token of each prompt that ends in this call.

    Its inputs: the model, the cache, the state, the sampling parameters of the rows and their masks (see
    `decode_program`); `tokens [batch, position]`, ids; `first` and `count [batch]`, the position of the first of them
    and their number; `tables [batch, table]`, the pages of these rows; `row [batch]`, their rows of the state, or the
    number of rows for an unused lane; `fresh` and `ends [batch]`, whether the prompt begins and ends here; `remaining
    [batch]`, how many tokens the row may get; `prompt [batch]`, the length of the request's prompt; if the model reads
    earlier ids, `earlier [batch, earlier]`, those before the first of `tokens`; with snapshots, `load` and `save
    [batch]`, the snapshots that lanes begin with and write, or -1.

    Args:
        model: the model.
        cache: the cache.
        rows: prompts per call, over all shards.
        tokens: tokens of each prompt per call.
    """
    Batch, Pos = Axis("batch", rows), Axis("position", tokens)
    # Inputs that only some models need.
    optional_axes: dict[str, tuple[Axis, ...]] = {}
    if cache.snapshots:
        optional_axes |= {"load": (Batch,), "save": (Batch,)}
    if cache.earlier_token_ids:
        optional_axes["earlier"] = (Batch, Axis(EARLIER, cache.earlier_token_ids))

    def prefill(
        net, cache_, state, params, masks, ids, first, count, tables, row, fresh, ends, remaining, prompt, *optional
    ):
        # Keys and values are written at positions first … first + count - 1 of each row; the rest of the lane is
        # padding.
        at = NewPositions.consecutive(first, count, Pos, tables=tables, block=model.cache_block, flat=model.matrix_unit)
        more = dict(zip(optional_axes, optional, strict=True))
        load, save, earlier = (more.get(name) for name in ("load", "save", "earlier"))
        lanes = take_lanes(cache_, row, fresh=fresh, earlier=earlier, load=load, total=cache.rows)
        activations, lanes = net.advance(ids, lanes, at, length=cache.max_seq_len)
        cache_ = put_lanes(cache_, lanes, row, save=save, total=cache.rows)
        # Padding after the end of a chunk may be anything: it must not end the row.
        finite = hax.all(hax.isfinite(activations.astype(jnp.float32)) | ~at.valid, ("position", "embed"))
        # The activations of the last token of each row, as a masked sum: rows end at different positions.
        is_last = at.valid & (at.positions == first + count - 1)
        last = hax.sum(hax.where(is_last, activations, 0), Pos)
        # The same in every chunk; the state keeps it from the first token on.
        noise = noise_keys(params.seed, params.choice)
        # Counted before sampling: the penalties of the first token cover the whole prompt.
        state = state.count_prompt(row, ids, starts=first, lengths=count, prompts=prompt, fresh=fresh != 0)
        # The position of the sampled token, if the prompt ends here.
        next_position = first + count
        counts = state.take_rows(row).counts
        sampled = _sample_tokens(
            net, last, params, noise, next_position, counts, finite, masks, policy_logprobs=model.policy_logprobs
        )
        # A row index past the end drops the update: the prompt of that row continues in the next call.
        target_row = hax.where(ends != 0, row, cache.rows)
        state = state.begin(target_row, sampled, params, noise=noise, position=next_position, remaining=remaining)
        # Every lane samples, whether its prompt ends or not: the shapes must not depend on the requests.
        return cache_, state, SampledSlots(sampled=sampled, active=ends != 0, finite=finite)

    input_axes = {
        "tokens": (Batch, Pos),
        "first": (Batch,),
        "count": (Batch,),
        "tables": (Batch, Axis("table", cache.pages_per_row)),
        "row": (Batch,),
        "fresh": (Batch,),
        "ends": (Batch,),
        "remaining": (Batch,),
        "prompt": (Batch,),
    }
    return _program(
        f"prefill_{rows}x{tokens}",
        prefill,
        (*_slot_inputs(Batch, model, cache), *_integer_inputs({**input_axes, **optional_axes})),
        cache,
        model,
    )


def decode_program(model: ServedModel, cache: CachePlan, *, steps: int) -> Program:
    """Samples up to `steps` tokens of each running row, and ends rows by their stop ids and limits.

    Its inputs: the model, the cache, the state, the parameters of all rows; `masks [batch, vocab]`, boolean, which ids
    a row may sample, all of them without a constraint; `tables [batch, table]`, their pages; `going [batch]`, which
    rows decode: 0 leaves a row as it is, 1 gives it up to `steps` tokens, 2 one token, because its mask holds for one
    only. The results have a leading axis `step`.

    Args:
        model: the model.
        cache: the cache.
        steps: maximum number of tokens of a row in a call.
    """
    Batch, Step = Axis("batch", cache.rows), Axis("step", steps)
    # One position per row. On TPUs a single row gets a second, invalid one, so that products have two rows.
    Pos = Axis("position", 2 if model.matrix_unit and cache.rows_per_shard == 1 else 1)
    lone_queries = SUBLANES if model.matrix_unit else 1
    options = {"block": model.cache_block, "lone_queries": lone_queries, "flat": model.matrix_unit}

    def one(
        net, cache_: DecodeState, state: SlotState, params, masks, tables
    ) -> tuple[DecodeState, SlotState, SampledSlots]:
        running = ~state.done
        # A fixed cache has one page a row, in the order of the rows: no table, and no gather.
        row_tables = None if cache.allocation == "fixed" else tables
        at = NewPositions.consecutive(state.position, running.astype(jnp.int32), Pos, tables=row_tables, **options)
        ids = state.last_token.broadcast_axis(Pos).rearrange((Batch, Pos))
        activations, leaves = net.advance(ids, model_leaves(cache_), at, length=cache.max_seq_len)
        cache_ = {**cache_, **leaves}
        last = activations["position", 0]
        finite = hax.all(hax.isfinite(last.astype(jnp.float32)), "embed")
        sampled = _sample_tokens(
            net,
            activations,
            params,
            state.noise,
            state.position + 1,
            state.counts,
            finite,
            masks,
            policy_logprobs=model.policy_logprobs,
        )
        return cache_, state.advance(sampled, params), SampledSlots(sampled=sampled, active=running, finite=finite)

    def decode(net, cache_, state, params, masks, tables, going):
        # Rows that are not part of this call are marked as done for its duration, and restored after it.
        paused = (going == 0) & ~state.done
        cache_, state, paused, drawn = several(net, cache_, state.release(paused), paused, params, masks, tables, going)
        return cache_, eqx.tree_at(lambda s: s.done, state, state.done & ~paused), drawn

    def several(net, cache_, state, paused, params, masks, tables, going):
        if steps == 1:
            cache_, state, drawn = one(net, cache_, state, params, masks, tables)
            return cache_, state, paused, _map_named(lambda x: hax.named(x.array[None], (Step, *x.axes)), drawn)
        # A while loop needs its outputs allocated before: their shapes come from tracing one step.
        shapes = eqx.filter_eval_shape(one, net, cache_, state, params, masks, tables)[2]
        empty_outputs = _map_named(lambda x: hax.zeros((Step, *x.axes), dtype=x.dtype), shapes)

        def more(carry) -> jax.Array:
            step, _, state, _, _ = carry
            # The loop ends early when all rows have ended.
            return (step < steps) & ~jnp.all(state.done.array)

        def body(carry):
            step, cache_, state, paused, outputs = carry
            cache_, state, drawn = one(net, cache_, state, params, masks, tables)
            outputs = jax.tree.map(
                lambda all_, new: hax.named(all_.array.at[step].set(new.array), all_.axes),
                outputs,
                drawn,
                is_leaf=is_named,
            )
            # A constrained row gets one token a call, because its mask holds for that token only.
            constrained = (going == 2) & ~state.done
            return step + 1, cache_, state.release(constrained), paused | constrained, outputs

        begin = (jnp.int32(0), cache_, state, paused, empty_outputs)
        _, cache_, state, paused, outputs = jax.lax.while_loop(more, body, begin)
        return cache_, state, paused, outputs

    input_axes = {"tables": (Batch, Axis("table", cache.pages_per_row)), "going": (Batch,)}
    return _program(
        f"decode_{cache.rows}",
        decode,
        (*_slot_inputs(Batch, model, cache), *_integer_inputs(input_axes)),
        cache,
        model,
    )


def _sample_tokens(
    net: Decodes,
    activations: NamedArray,
    params: SlotParams,
    noise: NamedArray,
    position: NamedArray,
    counts: NamedArray | None,
    finite: NamedArray,
    masks: NamedArray,
    *,
    policy_logprobs: bool,
) -> Sampled:
    """Samples from activations `[batch, embed]`, or the first of `[batch, position, embed]`; `ok` only if finite."""
    config = net.config
    logits = head_logits(activations, net.head, vocab_size=config.vocab_size, soft_cap=config.logit_soft_cap)
    # The decode Program passes its padding position through the head too, and drops it only here: a product with a
    # single row would miss the TPU's matrix unit.
    logits = logits["position", 0] if "position" in [axis.name for axis in logits.axes] else logits
    sampled = sample(logits, params, noise, position, counts=counts, mask=masks, policy_logprobs=policy_logprobs)
    return eqx.tree_at(lambda s: s.ok, sampled, sampled.ok & finite)


def _map_named(change: Callable[[NamedArray], NamedArray], tree: T) -> T:
    return jax.tree.map(change, tree, is_leaf=is_named)


def _empty_state(model: ServedModel, cache: CachePlan) -> SlotState:
    return SlotState.empty(Axis("batch", cache.rows), model.abstract.Vocab if model.counts_tokens else None)


def _state_mapping(cache: CachePlan) -> AxisMapping:
    """The state is replicated, except for counts, which are sharded over the vocabulary like logits."""
    return AxisMapping({"vocab": cache.mappings.compute.mesh_axes("vocab") or None})


def _slot_inputs(Batch: Axis, model: ServedModel, cache: CachePlan) -> tuple[Input, Input]:
    """The sampling parameters of rows, and their masks, which are sharded like logits."""
    Vocab = model.abstract.Vocab
    masks = NamedArray(jax.ShapeDtypeStruct((Batch.size, Vocab.size), np.dtype(np.bool_)), (Batch, Vocab))  # pyright: ignore
    return (
        Input(name="params", value=SlotParams.abstract(Batch), placement=AxisMapping()),
        Input(name="masks", value=masks, placement=_state_mapping(cache)),
    )


def _integer_inputs(shapes: Mapping[str, tuple[Axis, ...]]) -> tuple[Input, ...]:
    """Small integer arrays of the host, replicated on every device."""
    return tuple(
        Input(
            name=name,
            value=NamedArray(
                jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), np.dtype(np.int32)),  # pyright: ignore
                axes,
            ),
            placement=AxisMapping(),
        )
        for name, axes in shapes.items()
    )


def _program(
    name: str, function: Callable[..., PyTree], inputs: tuple[Input, ...], cache: CachePlan, model: ServedModel
) -> Program:
    """A Program of the model, the cache and the state with some more inputs; it returns cache, state and results."""
    # Only `start_rows` has no inputs: it makes the cache and the state that the other Programs take.
    state_inputs: tuple[Input, ...] = ()
    if inputs:
        state = eqx.filter_eval_shape(_empty_state, model, cache)
        state_inputs = (
            Input(name="model", value=model.abstract, placement=model.sharding),
            Input(name="cache", value=cache.abstract, placement=cache.mappings.compute),
            Input(name="state", value=state, placement=_state_mapping(cache)),
        )
    # The outputs are donated inputs: they must have the same sharding, or XLA could not reuse the buffers.
    output_mappings = (("0", cache.mappings.compute), ("1", _state_mapping(cache)))
    return Program(
        name=name,
        function=function,
        inputs=(*state_inputs, *inputs),
        mappings=cache.mappings,
        out_placement=Mappings(params=AxisMapping(), overrides=output_mappings),
        donate=("cache", "state") if inputs else (),
        matmul_precision=model.matmul_precision,
        compiler_options=model.compiler_options,
    )


CHUNK = 16
"""Positions of a prompt whose logits are in memory at the same time."""


class ScoredPositions(eqx.Module):
    """The scores of the token after each position.

    Attributes:
        logprobs: float32 `[batch, position]`.
        top_ids: int32 `[batch, position, top]`, the likeliest tokens after it, the likeliest first.
        top_logprobs: float32 `[batch, position, top]`.
    """

    logprobs: NamedArray
    top_ids: NamedArray
    top_logprobs: NamedArray


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """A prompt's log-probabilities.

    Attributes:
        logprobs: log-probability of each token but the first, given the tokens before it.
        top: ids and log-probabilities of the likeliest tokens at the position of each.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


def score_program(model: ServedModel, cache: CachePlan, *, tokens: int) -> Program:
    """Scores one prompt in each shard of the batch.

    Its inputs: the model; `tokens [batch, position]`, ids; `targets [batch, position]`, the ids that follow them.

    Args:
        model: the model.
        cache: the cache of the run, for its mappings and the shards of its batch.
        tokens: tokens of a prompt.
    """
    size = min(CHUNK, tokens)
    Batch, Pos = Axis("batch", cache.shards), Axis("position", tokens)
    Chunks, Chunk = Axis("chunks", -(-tokens // size)), Axis("position", size)

    def cut(x: NamedArray) -> NamedArray:
        # `[batch, position, …]` to `[batch, chunks, position of a chunk, …]`.
        padded = hax.pad(x, {Pos: (0, Chunks.size * size - tokens)})
        return padded.unflatten_axis("position", (Chunks, Chunk))

    def score(net, ids: NamedArray, targets: NamedArray) -> ScoredPositions:
        activations, config = net(ids).activations, net.config
        # Logits of a long prompt over the whole vocabulary would not fit, so the head runs chunk by chunk. Its weights
        # are placed once, before the scan.
        head = hax.auto_sharded(net.head)

        def some(_: None, x: NamedArray, target: NamedArray) -> tuple[None, ScoredPositions]:
            # The head and `top_tokens` take `[batch, embed]`: every position of a chunk is a row.
            flat = x.flatten_axes(("batch", "position"), "batch")
            logits = head_logits(flat, head, vocab_size=config.vocab_size, soft_cap=config.logit_soft_cap)
            return None, _score_positions(logits, target.flatten_axes(("batch", "position"), "batch"), (Batch, Chunk))

        _, scores = hax.scan(some, Chunks)(None, cut(activations), cut(targets))

        def joined(x: NamedArray) -> NamedArray:
            # The scan stacks chunks first; positions that pad the last chunk are cut off.
            whole = Axis("position", Chunks.size * size)
            others = tuple(axis for axis in x.axes if axis.name not in ("chunks", "batch", "position"))
            flat = x.rearrange(("batch", "chunks", "position", *(a.name for a in others)))
            return flat.flatten_axes(("chunks", "position"), whole)["position", 0:tokens]

        return jax.tree.map(joined, scores, is_leaf=lambda x: isinstance(x, NamedArray))

    def integers(name: str) -> Input:
        array = NamedArray(jax.ShapeDtypeStruct((Batch.size, Pos.size), np.dtype(np.int32)), (Batch, Pos))  # pyright: ignore
        return Input(name=name, value=array, placement=AxisMapping())

    return Program(
        name=f"score_{Batch.size}x{tokens}",
        function=score,
        inputs=(
            Input(name="model", value=model.abstract, placement=model.sharding),
            integers("tokens"),
            integers("targets"),
        ),
        mappings=cache.mappings,
        out_placement=Mappings(params=AxisMapping()),
        matmul_precision=model.matmul_precision,
        compiler_options=model.compiler_options,
    )


def _score_positions(logits: NamedArray, targets: NamedArray, axes: tuple[Axis, Axis]) -> ScoredPositions:
    """The scores of targets `[batch]` under logits `[batch, vocab]`, where `batch` holds the positions of prompts."""
    Vocab = logits.resolve_axis("vocab")
    logits = hax.auto_sharded(logits)
    # log Σ exp, as in `sampling.sample`, so that scores equal the log-probabilities of sampled tokens.
    largest = hax.max(logits, Vocab)
    normalizer = hax.log(hax.sum(hax.exp(logits - largest), Vocab)) + largest
    ids = hax.arange(Vocab, dtype=jnp.int32).broadcast_to(logits.axes)
    # A sum with one nonzero term: it needs no gather over a sharded vocabulary.
    target_logits = hax.sum(hax.where(ids == targets, logits, 0.0), Vocab)
    Candidates = Top.resize(min(Top.size, Vocab.size))
    values, top_ids = top_tokens(logits, Candidates)
    scores = ScoredPositions(logprobs=target_logits - normalizer, top_ids=top_ids, top_logprobs=values - normalizer)
    return jax.tree.map(
        lambda x: hax.auto_sharded(x.unflatten_axis("batch", axes)), scores, is_leaf=lambda x: isinstance(x, NamedArray)
    )


ScorePromptFn = Callable[[Sequence[int], int], PromptScores]
"""Scores the tokens of a prompt; the second argument is the number of likeliest tokens to return at each."""


class PromptScorer:
    """Scores prompts, one per call.

    Args:
        programs: Programs by the number of tokens that they take.
        mesh: the devices.
        model: the model on them.
        jit: makes a Program callable.
    """

    def __init__(self, programs: Mapping[int, Program], mesh: Mesh, model: PyTree, *, jit: Jit = Program.jit):
        self._programs, self._mesh, self._model, self._jit = dict(programs), mesh, model, jit
        self._calls: dict[int, Callable[..., PyTree]] = {}

    def __call__(self, tokens: Sequence[int], top: int) -> PromptScores:
        """The scores of a prompt that is at most as long as the longest Program.

        Args:
            tokens: its ids.
            top: number of likeliest tokens to return at the position of each.
        """
        # The shortest Program that takes the prompt; the rest of it is padding.
        size = min(size_ for size_ in self._programs if size_ >= len(tokens))
        program = self._programs[size]
        ids = np.zeros((program.inputs[1].value.axes[0].size, size), np.int32)
        targets = np.zeros_like(ids)
        # Every shard of the batch scores the same prompt: the Program has a row for each.
        ids[:, : len(tokens)], targets[:, : len(tokens) - 1] = tokens, tokens[1:]
        if size not in self._calls:
            self._calls[size] = self._jit(program, self._mesh)
        named = {"tokens": ids, "targets": targets}
        values = [place(one, named[one.name], self._mesh) for one in program.inputs[1:]]
        outputs = self._calls[size](self._model, *values)
        # Position i scores token i + 1: the first token has no score, and the result at the last position means
        # nothing.
        count = len(tokens) - 1
        logprobs, top_ids, top_logprobs = (
            np.asarray(x.array.addressable_data(0))[0, :count]
            for x in (outputs.logprobs, outputs.top_ids, outputs.top_logprobs)
        )
        likeliest = [
            tuple(zip(ids[:top].tolist(), values[:top].tolist(), strict=True))
            for ids, values in zip(top_ids, top_logprobs, strict=True)
        ]
        return PromptScores(logprobs=tuple(logprobs.tolist()), top=tuple(likeliest))


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationPrograms:
    """The Programs of a run that generates text.

    Attributes:
        cache: the cache that they share.
        start: makes the cache and the state of the rows.
        prefill: Programs that compute parts of prompts, by (rows, tokens).
        decode: samples the next tokens of rows.
        steps: maximum number of tokens of a row in a decode call.
        score: Programs that score prompts, by tokens; empty without `inference.prompt_logprobs`.
    """

    cache: CachePlan
    start: Program
    prefill: Mapping[tuple[int, int], Program]
    decode: Program
    steps: int
    score: Mapping[int, Program] = field(default_factory=dict[int, Program])

    @property
    def all(self) -> tuple[Program, ...]:
        """All Programs, in the order in which they are first called."""
        return (self.start, *self.prefill.values(), self.decode, *self.score.values())


def generation_programs(
    model: ServedModel,
    cache: CachePlan,
    *,
    prefill: Sequence[tuple[int, int]],
    steps: int = 1,
    score: Sequence[int] = (),
) -> GenerationPrograms:
    """The Programs of a run.

    Args:
        model: the model.
        cache: the cache.
        prefill: for each prefill call the number of prompts per shard, and tokens of each.
        steps: maximum number of tokens of a row in a decode call.
        score: tokens of each Program that scores prompts.
    """
    # By tokens, then rows: the order in which the Programs are listed and compiled.
    buckets = sorted({(rows * cache.shards, tokens) for rows, tokens in prefill}, key=lambda bucket: bucket[::-1])
    return GenerationPrograms(
        cache=cache,
        start=start_program(model, cache),
        prefill={(rows, tokens): prefill_program(model, cache, rows=rows, tokens=tokens) for rows, tokens in buckets},
        decode=decode_program(model, cache, steps=steps),
        steps=steps,
        score={tokens: score_program(model, cache, tokens=tokens) for tokens in sorted(set(score))},
    )
