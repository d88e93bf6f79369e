"""Toy decoders that change the residual stream: two lanes, scalars with the embedded tokens, a captured middle layer.

`ToyConfig` is a Llama whose `residual` and feed-forward parts are replaced; `reference_loss` computes the whole model
another way, in plain `jnp` from one array per layer and name (`2.mlp.up_proj.weight`), without named axes or scans.
`stacked` and `per_layer` convert between those arrays and a model's leaves.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import shard_residual
from levanter.layers.context import ForwardContext
from levanter.layers.embedding import Embedding
from levanter.layers.mlp import GatedMlp, MlpSpec
from levanter.layers.protocols import FeedForward
from levanter.layers.residual import PlainEnds, PlainRule, ResidualSpec
from levanter.models.decoder import DecoderLmHeadModel
from levanter.models.llama.config import LlamaConfig

LANES = Axis("lane", 2)
MIDDLE, FIRST = "middle", "x0"


class TwoLaneRule(eqx.Module):
    """Reads a weighted sum of the lanes; mixes the lanes and gives each of them a share of the branch.

    Attributes:
        read_weights: `[lane]`.
        write_weights: `[lane]`.
        mixing: `[lane, lane_in]`.
    """

    read_weights: NamedArray
    write_weights: NamedArray
    mixing: NamedArray

    def read(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        return hax.dot(stream, self.read_weights, axis="lane")

    def write(self, stream: NamedArray, branch: NamedArray, context: ForwardContext) -> NamedArray:
        mixed = hax.dot(self.mixing, stream.rename({"lane": "lane_in"}), axis="lane_in")
        # An outer product: nothing is contracted.
        shares = hax.dot(self.write_weights, branch, axis=())
        return shard_residual(mixed.rearrange(stream.axes) + shares.rearrange(stream.axes))


class TwoLaneEnds(eqx.Module):
    """Every lane starts as a multiple of the embedded tokens; the end is a weighted sum."""

    start: NamedArray
    end: NamedArray

    def enter(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        return hax.dot(x, self.start, axis=()).rearrange((..., "lane", "embed"))

    def leave(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        return hax.dot(stream, self.end, axis="lane")


@dataclass(frozen=True, kw_only=True)
class TwoLanes(ResidualSpec):
    """A stream of two lanes."""

    @property
    def axes(self):
        return (LANES, LANES.alias("lane_in"))

    @property
    def matmul_parameters(self):
        return 2 * (2 * LANES.size + LANES.size**2)

    def stream_axes(self, Embed):
        return (LANES, Embed)

    def init(self, Embed, branches, *, key):
        ones = hax.ones(LANES)
        rule = TwoLaneRule(read_weights=ones, write_weights=ones, mixing=hax.ones((LANES, LANES.alias("lane_in"))))
        return (rule,) * branches

    def init_ends(self, Embed, *, key):
        return TwoLaneEnds(start=hax.ones(LANES), end=hax.ones(LANES))


class ScaledRule(eqx.Module):
    """`r·x + s·x0` is what the mixer reads, and what its output is added to (x0 of nanochat)."""

    stream_scale: NamedArray
    first_scale: NamedArray

    def read(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        return self.stream_scale * stream + self.first_scale * context.constants[FIRST]

    def write(self, stream: NamedArray, branch: NamedArray, context: ForwardContext) -> NamedArray:
        # The same expression as in `read`; XLA computes it once.
        return shard_residual(self.read(stream, context) + branch)


@dataclass(frozen=True, kw_only=True)
class Scaled(ResidualSpec):
    """Learned scalars in each layer, and the embedded tokens."""

    def init(self, Embed, branches, *, key):
        return (ScaledRule(stream_scale=hax.ones(()), first_scale=hax.ones(())), PlainRule())[:branches]


class BackoutEnds(PlainEnds):
    """A multiple of a middle layer's output is subtracted at the end."""

    scale: NamedArray

    def leave(self, stream: NamedArray, context: ForwardContext) -> NamedArray:
        return stream - self.scale * context.constants[MIDDLE]


@dataclass(frozen=True, kw_only=True)
class Backout(ResidualSpec):
    """Plain rules; a middle layer's output is subtracted at the end."""

    def init_ends(self, Embed, *, key):
        return BackoutEnds(scale=hax.ones(()))


class LookupMlp(eqx.Module):
    """A gated MLP, plus a row of a table per token id."""

    mlp: GatedMlp
    table: Embedding

    def __call__(self, x: NamedArray, context: ForwardContext) -> NamedArray:
        assert context.token_ids is not None
        return self.mlp(x) + self.table(context.token_ids).rearrange(x.axes)


@dataclass(frozen=True, kw_only=True)
class LookupSpec(MlpSpec):
    """The configuration of a `LookupMlp`."""

    Vocab: Axis

    def init(self, *, key):
        return LookupMlp(mlp=super().init(key=key), table=Embedding.init(self.Vocab, self.Embed, scale=0.1, key=key))


RULES = {"plain": ResidualSpec, "lanes": TwoLanes, "scaled": Scaled, "backout": Backout}


@dataclass(frozen=True, kw_only=True)
class ToyConfig(LlamaConfig):
    """A Llama with another residual stream.

    Attributes:
        rule: a key of `RULES`.
        middle: the number of layers behind which the stream is taken.
        lookup: the layer with a table of token ids; None for none.
    """

    rule: str = "plain"
    middle: int = 2
    lookup: int | None = None

    @property
    def residual(self) -> ResidualSpec:
        return RULES[self.rule](norm=self.norm, norms=self.norms)

    @property
    def captures(self) -> Mapping[str, int]:
        return {"scaled": {FIRST: 0}, "backout": {MIDDLE: self.middle}}.get(self.rule, {})

    @property
    def reads_token_ids(self) -> bool:
        return self.lookup is not None

    def layer_feed_forward(self, layer: int) -> FeedForward:
        if layer != self.lookup:
            return self.mlp
        return LookupSpec(**vars(self.mlp), Vocab=Axis("vocab", self.vocab_size))

    def build(self, Vocab, *, key):
        return DecoderLmHeadModel.init(Vocab, self, key=key)


def _rows(config: ToyConfig, leaf: Leaf) -> Iterator[tuple[str, int | None]]:
    """The names of a leaf's arrays in order, each with its index along `layers`; None if it is not stacked."""
    _, _, below = leaf.path.partition("transformer.layers.blocks.")
    if below or ".stacked." not in leaf.path:
        yield below or leaf.path, None
        return
    stack, _, below = leaf.path.partition(".stacked.")
    run = config.runs[0 if stack.endswith("layers") else int(stack.rpartition(".")[2]) + 1]
    place = 0
    if len(run.places) > 1:
        _, number, below = below.split(".", 2)
        place = int(number)
    for period in range(run.periods):
        yield f"{run.start + len(run.places) * period + place}.{below}", period


def stacked(config: ToyConfig, leaf: Leaf, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """A leaf of the model, of one array for each layer."""
    rows = [arrays[name] for name, _ in _rows(config, leaf)]
    return rows[0] if ".stacked." not in leaf.path else np.stack(rows)


def per_layer(config: ToyConfig, leaf: Leaf, array: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of each layer, of a leaf of the model."""
    return {name: array if row is None else array[row] for name, row in _rows(config, leaf)}


def reference_loss(t: Mapping[str, jax.Array], config: ToyConfig, ids: np.ndarray) -> jax.Array:
    """The mean negative log-likelihood of the next tokens."""
    x = t["embeddings.token_embeddings.weight"][ids]
    first, middle = x, None
    if config.rule == "lanes":
        x = x[:, :, None, :] * t["transformer.ends.start"][:, None]
    for n in range(config.num_layers):

        def branch(m, part, x, n=n):
            """One branch of a layer: read, compute, write."""
            rule = {k.removeprefix(f"{n}.residual.{m}."): v for k, v in t.items() if k.startswith(f"{n}.residual.{m}.")}
            if config.rule == "lanes":
                y = part(jnp.einsum("bple,l->bpe", x, rule["read_weights"]))
                kept = jnp.einsum("bple,kl->bpke", x, rule["mixing"])
                return kept + rule["write_weights"][:, None] * y[:, :, None, :]
            if rule:
                x = rule["stream_scale"] * x + rule["first_scale"] * first
            return x + part(x)

        here = {k.removeprefix(f"{n}."): v for k, v in t.items() if k.startswith(f"{n}.")}
        x = branch(0, lambda x, here=here: _attention(config, here, x), x)
        x = branch(1, lambda x, here=here, n=n: _feed_forward(config, here, x, ids, lookup=n == config.lookup), x)
        middle = x if n + 1 == config.middle else middle
    if config.rule == "lanes":
        x = jnp.einsum("bple,l->bpe", x, t["transformer.ends.end"])
    if config.rule == "backout":
        x = x - t["transformer.ends.scale"] * middle
    logits = _norm(config, x, t["transformer.norm.weight"]) @ t["lm_head.weight"].T
    logs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logs, ids[:, 1:, None], axis=-1).mean()


def _norm(config, x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.layer_norm_epsilon) * weight


def _feed_forward(config, t, x, ids, *, lookup):
    x = _norm(config, x, t["post_attention_layernorm.weight"])
    inside = "mlp.mlp" if lookup else "mlp"
    gate, up, down = (t[f"{inside}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    y = (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return y + t["mlp.table.weight"][ids] if lookup else y


def _attention(config, t, x):
    x = _norm(config, x, t["input_layernorm.weight"])
    size, length = config.HeadSize.size, x.shape[1]
    angles = jnp.arange(length)[:, None] / config.rope.theta ** (jnp.arange(0, size, 2) / size)

    def rotated(y, angles):
        a, b = y[..., : size // 2], y[..., size // 2 :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q = rotated(jnp.einsum("bpe,kghe->bpkgh", x, t["self_attn.q_proj.weight"]), angles[:, None, None])
    k = rotated(jnp.einsum("bpe,khe->bpkh", x, t["self_attn.k_proj.weight"]), angles[:, None])
    v = jnp.einsum("bpe,khe->bpkh", x, t["self_attn.v_proj.weight"])
    scores = jnp.einsum("bpkgh,bskh->bkgps", q, k) / math.sqrt(size)
    weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bkgps,bskh,ekgh->bpe", weights, v, t["self_attn.o_proj.weight"])
