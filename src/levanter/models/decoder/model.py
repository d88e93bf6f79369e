"""A decoder-only transformer on named axes, built from its config's specs (Vaswani et al., arXiv:1706.03762).

Blocks of grouped-query attention and a feed-forward part around a residual stream. Constraint points, where an
activation is pinned to the mesh by its names: the embedded tokens; queries, keys and values; the features inside the
feed-forward part; attention's output before its projection; the final activations (all by the compute mapping); and
the residual stream at every block boundary (by the residual mapping).

Each part runs in a `jax.named_scope` of its attribute's name, so that compilers, profilers and the figures of a
compiled Program name `layers.self_attn.q_proj` and `lm_head`.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, Stacked

from haliax_ext.mapping import into_residual, out_of_residual, shard_residual
from levanter.layers.attention import AttentionMask, GroupedQueryAttention
from levanter.layers.attention.cache_positions import NewPositions
from levanter.layers.context import ForwardContext, RotaryTables
from levanter.layers.decode_state import EARLIER, TOKEN_IDS, DecodeState, StackState, StateSizes
from levanter.layers.embedding import Embedding, PositionEmbedding, positions_in_segments
from levanter.layers.layer import LayerSpec
from levanter.layers.linear import Linear
from levanter.layers.norm import Norm
from levanter.layers.outputs import Outputs, Sums
from levanter.layers.param_roles import role
from levanter.layers.protocols import Mixer
from levanter.layers.residual import ResidualRule, StreamEnds
from levanter.layers.unstacked import numbered
from levanter.models.base import LmHeadModel, ModelOutputs
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.decode import (
    empty_state,
    entering_stacks,
    following_ids,
    leaving_stacks,
    with_page_indices,
)
from levanter.models.decoder.scan_layout import Run
from levanter.models.stack import Period, checkpoint_policy, stack_builder


class DecoderBlock(eqx.Module):
    """One layer. Parts that its spec does not have are None.

    Attributes:
        self_attn: the mixer where it is attention.
        mixer: the mixer where it is of another kind.
        mlp: the feed-forward part.
        input_layernorm: before the mixer.
        post_attention_layernorm: before the feed-forward part.
        post_attn_layernorm: on the mixer's output.
        post_mlp_layernorm: on the feed-forward part's output.
        residual: how the mixer, and then the feed-forward part, read the stream and are added to it.
        mixer_spec: the mixer's spec, which says what the layer remembers while text is generated.
    """

    self_attn: GroupedQueryAttention | None
    mixer: eqx.Module | None
    mlp: Any
    input_layernorm: Norm | None
    post_attention_layernorm: Norm | None
    post_attn_layernorm: Norm | None
    post_mlp_layernorm: Norm | None
    residual: tuple[ResidualRule, ...]
    mixer_spec: Mixer = eqx.field(static=True)

    @staticmethod
    def init(spec: LayerSpec, *, key: jax.Array) -> "DecoderBlock":
        """A freshly initialized layer."""
        mixer_key, mlp_key = jax.random.split(key)

        def norm(place: str) -> Norm | None:
            return spec.residual.norm.init(spec.Embed) if place in spec.norms else None

        # Attention keeps the attribute `self_attn`, which is in the
        # paths of leaves and of checkpoints; other kinds use `mixer`.
        mixers = {"self_attn": None, "mixer": None, spec.mixer.attribute: spec.mixer.init(key=mixer_key)}
        return DecoderBlock(
            **mixers,
            mlp=None if spec.feed_forward is None else spec.feed_forward.init(key=mlp_key),
            input_layernorm=norm("input_layernorm"),
            post_attention_layernorm=norm("post_attention_layernorm"),
            post_attn_layernorm=norm("post_attn_layernorm"),
            post_mlp_layernorm=norm("post_mlp_layernorm"),
            residual=spec.residual.init(spec.Embed, len(spec.parts), key=key),
            mixer_spec=spec.mixer,
        )

    def __call__(
        self, carry: tuple[Outputs, StackState | None], context: ForwardContext
    ) -> tuple[Outputs, StackState | None]:
        """Maps the residual stream and the layers' state to their next values.

        Args:
            carry: the stream, `[…, position]` and `ResidualSpec.stream_axes`, with its auxiliary sums; and the decode
                state of the stack, None for whole sequences.
            context: what all layers read beside the stream.
        """
        outputs, state = carry
        rule, *later_rules = self.residual
        x = rule.read(outputs.activations, context)

        def norm(name: str, y: NamedArray) -> NamedArray:
            module = getattr(self, name)
            with jax.named_scope(name):
                return y if module is None else module(y)

        # Pre-norm families have a module here; for others `norm` is the
        # identity. `out_of_residual` is the reverse of `into_residual` below.
        normed = out_of_residual(norm("input_layernorm", x))
        attribute = "mixer" if self.self_attn is None else "self_attn"
        with jax.named_scope(attribute):
            layer_state = None if state is None else state.of(self.mixer_spec)
            mixed, layer_state = getattr(self, attribute)(normed, context, layer_state)
            state = None if state is None else state.replaced(self.mixer_spec, layer_state)
        # `into_residual` first reduces the partial sums into the compute
        # mapping's shards, then reshards to the stream's finer ones.
        mixed = norm("post_attn_layernorm", into_residual(mixed)).rearrange(x.axes)
        stream = rule.write(outputs.activations, mixed, context)
        if self.mlp is None:
            return dataclasses.replace(outputs, activations=stream), state
        (rule,) = later_rules
        x = rule.read(stream, context)
        normed = out_of_residual(norm("post_attention_layernorm", x))
        with jax.named_scope("mlp"):
            fed = Outputs.of(self.mlp(normed, context))
        branch = norm("post_mlp_layernorm", into_residual(fed.activations)).rearrange(x.axes)
        stream = rule.write(stream, branch, context)
        return Outputs(activations=stream, auxiliary=outputs.auxiliary.plus(fed.auxiliary)), state


class DecoderTransformer(eqx.Module):
    """The decoder's blocks and the final norm.

    Attributes:
        layers: the first run of layers; all layers in most families, and always if they are not scanned.
        later: the runs that follow the first, in order. The names `layers` and `later` are in the paths of leaves, and
            so in checkpoints.
        norm: the final norm.
        ends: how the residual stream begins and ends.
        config: the architecture.
    """

    layers: Stacked | BlockSeq
    later: tuple[Stacked, ...]
    norm: Norm
    ends: StreamEnds
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, *, key: jax.Array) -> "DecoderTransformer":
        """Freshly initialized blocks."""
        # One key a layer, split before the layers are grouped: a layer's
        # initial weights do not depend on how layers are scanned.
        keys = jax.random.split(key, config.num_layers)
        norm, ends = config.norm.init(config.Embed), config.residual.init_ends(config.Embed, key=key)
        if not config.scan_layers:
            blocks = [DecoderBlock.init(spec, key=keys[n]) for n, spec in enumerate(config.layers)]
            policy = checkpoint_policy(config.gradient_checkpointing)
            unrolled = BlockSeq(blocks, Axis("layers", config.num_layers), policy)
            return DecoderTransformer(layers=unrolled, later=(), norm=norm, ends=ends, config=config)
        first, *later = (_scanned(run, config, keys[run.start : run.start + run.layers]) for run in config.runs)
        return DecoderTransformer(layers=first, later=tuple(later), norm=norm, ends=ends, config=config)

    def __call__(
        self,
        x: NamedArray,
        mask: AttentionMask,
        positions: NamedArray | None,
        *,
        token_ids: NamedArray,
        auxiliary: Sequence[str] = (),
    ) -> Outputs:
        """Maps embedded tokens to the activations that the head reads.

        Args:
            x: `[…, position, embed]`.
            mask: which positions see which.
            positions: the position of each token, if it is not its index.
            token_ids: the tokens, `[…, position]`.
            auxiliary: names of the sums to collect from the blocks.

        Returns:
            The activations with those sums.
        """
        Pos = x.resolve_axis("position")
        index = hax.arange(Pos) if positions is None else positions
        # Rotary tables are computed once and shared by all layers; in the scan they are constants, not carry.
        tables = self._tables(index, length=Pos.size)
        context = ForwardContext(mask=mask, tables=tables, positions=positions, token_ids=self._ids_if_read(token_ids))
        outputs, _ = self._through(x, context, (None,) * len(self._stacks), auxiliary=auxiliary)
        return outputs

    def advance(
        self,
        x: NamedArray,
        new: NewPositions,
        state: DecodeState,
        *,
        length: int,
        token_ids: NamedArray,
        earlier_embedded: NamedArray | None = None,
    ) -> tuple[NamedArray, DecodeState]:
        """The forward pass for tokens that continue sequences; see `DecoderLmHeadModel.advance`.

        Args:
            x: the embedded tokens, `[batch, position, embed]`.
            new: their positions, in their sequences and in the pages.
            state: the decode state.
            length: positions that a row may have: rotary embeddings of some kinds depend on it.
            token_ids: the tokens, `[batch, position]`.
            earlier_embedded: see `ForwardContext`.
        """
        # Which page and slot each new token goes to is the same for
        # all layers, so it is computed once, outside the scans.
        new = with_page_indices(self.config, state, new)
        # `length` is the row's capacity, not the number of new tokens: dynamic
        # and longrope tables must equal those of the positions already cached.
        tables = self._tables(new.positions, length=length)
        (earlier,) = state.get(TOKEN_IDS, (None,))
        context = ForwardContext(
            mask=AttentionMask.causal(),
            tables=tables,
            positions=new.positions,
            new=new,
            token_ids=self._ids_if_read(token_ids),
            earlier_ids=earlier,
            earlier_embedded=earlier_embedded,
        )
        stacks = entering_stacks(self.config, state, stacks=len(self._stacks))
        outputs, stacks = self._through(x, context, stacks)
        state = leaving_stacks(state, [stack for stack in stacks if stack is not None])
        if earlier is not None:
            state = {**state, TOKEN_IDS: (following_ids(earlier, token_ids, new.valid),)}
        return outputs.activations, state

    @property
    def _stacks(self) -> "tuple[Stacked | BlockSeq, ...]":
        return (self.layers, *self.later)

    def _tables(self, positions: NamedArray, *, length: int) -> RotaryTables:
        with jax.named_scope("rope"):
            ropes = self.config.ropes.items()
            sizes = self.config.rotary_sizes
            return {name: rope.tables(sizes[name], positions, length=length) for name, rope in ropes}

    def _ids_if_read(self, token_ids: NamedArray) -> NamedArray | None:
        # A checkpointed block keeps all of its inputs, so those that no part reads must not be among them.
        return token_ids if self.config.reads_token_ids else None

    def _through(
        self,
        x: NamedArray,
        context: ForwardContext,
        states: Sequence[StackState | None],
        *,
        auxiliary: Sequence[str] = (),
    ) -> tuple[Outputs, Sequence[StackState | None]]:
        """Runs all layers and the final norm; returns the new state of each run of layers, too."""
        # Auxiliary sums start at 0 and travel in the carry, since a
        # scan's carry must have the same structure in every layer.
        x = shard_residual(self.ends.enter(x, context))
        stream = Outputs(activations=x, auxiliary=Sums.zeros(auxiliary))
        new_states: list[StackState | None] = []
        context = self._capture(context, stream, behind=0)
        for parts, state in zip(self._parts, states, strict=True):
            for part, end in parts:
                # A scan is named after its axis; unrolled blocks are given the same name.
                unrolled = isinstance(part, BlockSeq)
                with jax.named_scope("layers") if unrolled else contextlib.nullcontext():
                    # `numbered` tells layers that keep a matrix each (`LayerMatrices`)
                    # their number in the stack; other stacks are unchanged.
                    stream, state = numbered(part).fold((stream, state), context)
                context = self._capture(context, stream, behind=end)
            new_states.append(state)
        x = self.ends.leave(stream.activations, context)
        # After the residual mapping the final activations return to the compute mapping, which the head reads.
        with jax.named_scope("norm"):
            x = hax.auto_sharded(self.norm(x))
        return Outputs(activations=x, auxiliary=stream.auxiliary), new_states

    def _capture(self, context: ForwardContext, stream: Outputs, *, behind: int) -> ForwardContext:
        """The context with the constants that are taken behind so many layers."""
        captures = self.config.captures.items()
        return context.with_constants({name: stream.activations for name, layer in captures if layer == behind})

    @property
    def _parts(self) -> Sequence[Sequence[tuple[Stacked | BlockSeq, int]]]:
        """For each stack, its parts between which constants are taken, with the number of layers up to their end."""
        if not isinstance(self.layers, BlockSeq):
            # Scanned layers are stacked in runs, which end wherever a constant is taken.
            runs = zip(self._stacks, self.config.runs, strict=True)
            return [[(stack, run.start + run.layers)] for stack, run in runs]
        blocks = self.layers.blocks
        ends = sorted({*self.config.captures.values(), len(blocks)} - {0})
        between = itertools.pairwise([0, *ends])
        return [[(_blocks(self.layers, slice(start, end)), end) for start, end in between]]


def _blocks(layers: BlockSeq, part: slice) -> BlockSeq:
    """Some of the unrolled layers."""
    blocks = layers.blocks[part]
    return dataclasses.replace(layers, blocks=blocks, Block=layers.Block.resize(len(blocks)))


def _scanned(run: Run, config: DecoderConfig, keys: jax.Array) -> Stacked:
    """A run of layers, stacked for a scan."""
    Layers = Axis("layers", run.periods)
    if len(run.places) == 1:
        build = stack_builder(Layers, DecoderBlock, scan=True, gradient_checkpointing=config.gradient_checkpointing)
        return build(run.places[0], key=keys)  # type: ignore[return-value]
    # Each layer's policy is applied inside the period (`Period.__call__`). Only what concerns the scan itself (nested
    # scans, carries offloaded to the host) applies to whole periods.
    policy = checkpoint_policy(config.gradient_checkpointing)
    of_scan = policy.nested or "offload" in (policy.save_carries, policy.save_inputs)
    none = checkpoint_policy(False)
    build = stack_builder(Layers, Period, scan=True, gradient_checkpointing=policy if of_scan else none)
    # [layers] keys → [periods, places]: the layer at (period, place) gets the key of its number, as if unrolled.
    grouped = keys.reshape(run.periods, len(run.places), *keys.shape[1:])
    return build(DecoderBlock, run.places, none if of_scan else policy, key=grouped)  # type: ignore[return-value]


class DecoderEmbedding(eqx.Module):
    """The token embedding table; in some models, a table of positions and a norm, too."""

    token_embeddings: Embedding
    position_embeddings: PositionEmbedding | None
    norm: Norm | None
    scale: float | None = eqx.field(static=True)

    @staticmethod
    def init(Vocab: Axis, config: DecoderConfig, *, key: jax.Array) -> "DecoderEmbedding":
        """A freshly initialized table."""
        return DecoderEmbedding(
            token_embeddings=Embedding.init(Vocab, config.Embed, scale=config.initializer_range, key=key),
            position_embeddings=(
                PositionEmbedding.init(
                    # fold_in rather than another split: the token table's
                    # key stays the same whether or not there are positions.
                    config.max_Pos,
                    config.Embed,
                    scale=config.initializer_range,
                    key=jax.random.fold_in(key, 1),
                )
                if config.learned_positions
                else None
            ),
            norm=config.norm.init(config.Embed) if config.normed_embedding else None,
            scale=config.embedding_scale,
        )

    def __call__(self, ids: NamedArray, positions: NamedArray | None, *, in_branches: bool = False) -> NamedArray:
        """Embeds token ids, whose positions are their indices if not given."""
        with jax.named_scope("embeddings"):
            x = self.token_embeddings(ids)
            if self.scale is not None:
                # The scale is rounded to the activations' dtype, as in transformers (Gemma multiplies by √embed in
                # bfloat16).
                x = x * jnp.asarray(self.scale, x.dtype)
            if self.position_embeddings is not None:
                index = hax.arange(ids.resolve_axis("position")) if positions is None else positions
                x = x + self.position_embeddings(index, in_branches=in_branches)
            return x if self.norm is None else self.norm(x)


class DecoderLmHeadModel(LmHeadModel):
    """A decoder with its output head, which has its own weights or shares the embedding table when tied."""

    embeddings: DecoderEmbedding
    transformer: DecoderTransformer
    lm_head: Linear | None = eqx.field(metadata=role("head"))
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(Vocab: Axis, config: DecoderConfig, *, key: jax.Array) -> "DecoderLmHeadModel":
        """A freshly initialized model; call it inside `jit` or `eval_shape`.

        Args:
            Vocab: the axis `vocab`.
            config: the architecture.
            key: of the random weights.
        """
        assert Vocab.name == "vocab", f"the vocabulary's axis is called vocab, not {Vocab.name}"
        table, body, head = jax.random.split(key, 3)
        lm_head = None
        if not config.tie_word_embeddings:
            scale = config.initializer_range
            lm_head = Linear.init((config.Embed,), (Vocab,), scale=scale, use_bias=False, key=head)
        return DecoderLmHeadModel(
            embeddings=DecoderEmbedding.init(Vocab, config, key=table),
            transformer=DecoderTransformer.init(config, key=body),
            lm_head=lm_head,
            config=config,
        )

    def __call__(
        self,
        input_ids: NamedArray,
        *,
        segment_ids: NamedArray | None = None,
        attn_mask: AttentionMask | None = None,
        positions: NamedArray | None = None,
        auxiliary: Sequence[str] = (),
    ) -> ModelOutputs:
        positions = self._positions(positions, segment_ids)
        in_branches = attn_mask is not None and attn_mask.query_trunks is not None
        embedded = self.embeddings(input_ids, positions, in_branches=in_branches)
        mask = _mask(attn_mask, segment_ids)
        outputs = self.transformer(embedded, mask, positions, token_ids=input_ids, auxiliary=auxiliary)
        return ModelOutputs(
            activations=outputs.activations,
            auxiliary=outputs.auxiliary,
            head=self.head,
            soft_cap=self.config.logit_soft_cap,
        )

    def start(self, sizes: StateSizes) -> DecodeState:
        """An empty decode state; see `Decodes`."""
        return empty_state(self.config, sizes)

    def advance(
        self, tokens: NamedArray, state: DecodeState, at: NewPositions, *, length: int
    ) -> tuple[NamedArray, DecodeState]:
        """Maps new tokens to activations, and adds what the layers remember of them to the state; see `Decodes`."""
        # Learned position embeddings need true positions, not indices into the block of new tokens.
        embedded = self.embeddings(tokens, at.positions)
        return self.transformer.advance(
            embedded,
            at,
            state,
            length=length,
            token_ids=tokens,
            earlier_embedded=self._earlier_embedded(state) if self.config.reads_earlier_embedding else None,
        )

    def _earlier_embedded(self, state: DecodeState) -> NamedArray:
        """The embedding of the token before the new ones; that of id 0 where there is none."""
        (earlier,) = state[TOKEN_IDS]
        assert earlier is not None
        # The embedding is computed again from the id, which takes less memory than keeping it, and no snapshots.
        # A row without tokens has `NO_TOKEN` here, which is no row of the table; the context knows that there is none.
        last = earlier[EARLIER, -1:].rename({EARLIER: "position"})
        return self.embeddings(hax.where(last < 0, 0, last), None)["position", 0]

    @property
    def head(self) -> Linear:
        # When tied, the head is a view of the table: both gradients add up in the one leaf.
        return self.embeddings.token_embeddings.as_linear() if self.lm_head is None else self.lm_head

    def _positions(self, positions: NamedArray | None, segment_ids: NamedArray | None) -> NamedArray | None:
        """Positions, if they are not indices: a learned position counts from the beginning of its segment.

        Rotary embeddings depend on differences only, so indices serve them.
        """
        if positions is not None or segment_ids is None or not self.config.learned_positions:
            return positions
        return positions_in_segments(segment_ids)


def _mask(attn_mask: AttentionMask | None, segment_ids: NamedArray | None) -> AttentionMask:
    mask = AttentionMask.causal() if attn_mask is None else attn_mask
    return mask if segment_ids is None else mask.with_segment_ids(segment_ids)
