"""A decoder's weights in Hugging Face checkpoints: tables of tensors, used to load and to export.

Hugging Face stores a projection as a matrix `[out, in]` with heads flattened into one of its axes, query heads ordered
by key/value head first; a layer is one tensor each. Here the axes keep their names and layers are stacked, so a tensor
of a block is a name and the axes in it (`BlockTensor`), and `decoder_rules` says for all layers where they are. Where
layers are of several kinds, each kind has a table of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRule, WeightRules
from levanter.layers.layer import LayerSpec, NormPlace
from levanter.layers.norm import NormSpec
from levanter.models.decoder.config import DecoderConfig

Q_HEADS = ("kv_head", "q_heads_per_group", "head_size")
KV_HEADS = ("kv_head", "head_size")
EMBED = ("embed",)
MLP = ("mlp",)

ATTENTION: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "self_attn.q_proj": (Q_HEADS, EMBED),
    "self_attn.k_proj": (KV_HEADS, EMBED),
    "self_attn.v_proj": (KV_HEADS, EMBED),
    "self_attn.o_proj": (EMBED, Q_HEADS),
}
FEED_FORWARD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mlp.gate_proj": (MLP, EMBED),
    "mlp.up_proj": (MLP, EMBED),
    "mlp.down_proj": (EMBED, MLP),
}
"""For each projection, the axes flattened into the source's output and input axis."""


@dataclass(frozen=True, kw_only=True)
class BlockTensor:
    """One leaf of a block and its tensor in a checkpoint.

    Attributes:
        target: the leaf's path below the block.
        source: the tensor's name below the layer; None where it is the same.
        axes: see `WeightRule`.
        part: see `WeightRule`.
    """

    target: str
    source: str | None = None
    axes: tuple[tuple[str, ...], ...]
    part: FusedPart | None = None


def projections(
    table: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]], *, biases: Iterable[str] = ()
) -> list[BlockTensor]:
    """Weights of projections that are called the same in the checkpoint, and biases of some of them."""
    biased = set(biases)
    tensors = []
    for name, (out, in_) in table.items():
        tensors.append(BlockTensor(target=f"{name}.weight", axes=(out, in_)))
        if name in biased:
            tensors.append(BlockTensor(target=f"{name}.bias", axes=(out,)))
    return tensors


class HasNorms(Protocol):
    """What has norms on the residual stream: a `LayerSpec`, or a config of which all layers have the same."""

    @property
    def norm(self) -> NormSpec:
        """What kind they are."""
        ...

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        """Where they are."""
        ...


def norms(normed: HasNorms, names: Mapping[str, str] | None = None) -> list[BlockTensor]:
    """Weights and biases of a block's norms.

    Args:
        normed: which norms there are.
        names: what the checkpoint calls them, where it is not our name for the place.
    """
    named = names or {}
    return [
        BlockTensor(target=f"{place}.{part}", source=f"{named.get(place, place)}.{part}", axes=(EMBED,))
        for place in normed.norms
        for part in _parameter_names(normed.norm)
    ]


def _parameter_names(norm: NormSpec) -> list[str]:
    """The leaves of a norm."""
    return ["weight"] * norm.use_weight + ["bias"] * norm.use_bias


def query_norms(config: DecoderConfig) -> list[BlockTensor]:
    """Weights of the norms on queries and keys, if there are any."""
    spec = config.attention
    if spec.norm is None or not spec.norm.use_weight:
        return []
    q, k = (("head_size",), ("head_size",)) if spec.normed == "head" else (Q_HEADS, KV_HEADS)
    return [
        BlockTensor(target="self_attn.q_norm.weight", axes=(q,)),
        BlockTensor(target="self_attn.k_norm.weight", axes=(k,)),
    ]


def attention_biases(config: DecoderConfig) -> list[str]:
    """The projections of attention that have biases."""
    spec = config.attention
    of_qkv = [name for name in ATTENTION if not name.endswith("o_proj")] if spec.qkv_bias else []
    return of_qkv + (["self_attn.o_proj"] if spec.out_bias else [])


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """What a checkpoint calls what is not inside of a block.

    Attributes:
        embedding: the token table.
        layers: what a layer's number is behind.
        norm: the final norm.
        head: the output head.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


def decoder_rules(
    config: DecoderConfig,
    Vocab: Axis | None,
    block: Iterable[BlockTensor] | Callable[[LayerSpec], Iterable[BlockTensor]],
    *,
    names: CheckpointNames = CheckpointNames(),
    more: Iterable[WeightRule] = (),
    aliases: tuple[tuple[str, str], ...] = (),
    ignored: tuple[str, ...] = (),
) -> WeightRules:
    """Where each leaf of a decoder comes from.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; if it is longer than `config.vocab_size`, checkpoints may lack the rows
            that were added (scoring leaves those out).
        block: the tensors of a layer, below its number; where layers are of several kinds, what gives those of a kind.
        names: what the checkpoint calls the rest.
        more: rules for leaves outside of the blocks that only this family has.
        aliases: see `WeightRules`.
        ignored: see `WeightRules`.
    """
    longer = Vocab is not None and config.vocab_size is not None and Vocab.size > config.vocab_size
    padded = ("vocab",) if longer else ()

    def by_token(target: str, source: str) -> WeightRule:
        return WeightRule(target=target, source=source, axes=(("vocab",), EMBED), padded=padded)

    table_of = block if callable(block) else (lambda _, table=tuple(block): table)

    def of_layer(target: str, layer: str, spec: LayerSpec) -> list[WeightRule]:
        return [
            WeightRule(
                target=f"{target}.{tensor.target}",
                source=f"{names.layers}.{layer}.{tensor.source or tensor.target}",
                axes=tensor.axes,
                part=tensor.part,
            )
            for tensor in table_of(spec)
        ]

    table = [by_token("embeddings.token_embeddings.weight", f"{names.embedding}.weight"), *more]
    if config.scan_layers:
        for n, run in enumerate(config.runs):
            stack = "transformer.layers.stacked" if n == 0 else f"transformer.later.{n - 1}.stacked"
            for place, spec in enumerate(run.places):
                target = stack if len(run.places) == 1 else f"{stack}.places.{place}"
                table += of_layer(target, run.template(place), spec)
    else:
        for n, spec in enumerate(config.layers):
            table += of_layer(f"transformer.layers.blocks.{n}", str(n), spec)
    for part in _parameter_names(config.norm):
        table.append(WeightRule(target=f"transformer.norm.{part}", source=f"{names.norm}.{part}", axes=(EMBED,)))
    ignored = ("*.rotary_emb.inv_freq", *ignored)
    if config.tie_word_embeddings:
        ignored = (*ignored, f"{names.head}.weight")
    else:
        table.append(by_token("lm_head.weight", f"{names.head}.weight"))
    return WeightRules(rules=tuple(table), aliases=aliases, ignored=ignored)
