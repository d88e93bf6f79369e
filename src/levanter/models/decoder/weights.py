"""Maps a decoder's leaves to tensors of Hugging Face checkpoints, for loading and for export.

Hugging Face stores a projection as a matrix `[out, in]` with heads flattened into one of its axes, query heads ordered
by key/value head first, and one tensor a layer. Here the axes keep their names and layers are stacked. `BlockTensor`
names a tensor of one block and its axes; `decoder_rules` turns a table of them into rules for all layers. If layers are
of several kinds, each kind has its own table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from haliax import Axis

from haliax_ext.rules import FusedPart, WeightRule, WeightRules
from levanter.layers.layer import LayerSpec
from levanter.layers.norm import NormSpec
from levanter.layers.residual import NormPlace
from levanter.models.decoder.config import DecoderConfig

# Query head h of HF is (h // group, h % group) here: HF repeats each key/value head for a contiguous group of query
# heads, so the flattened order is kv_head major.
Q_HEADS = ("kv_head", "q_heads_per_group", "head_size")
KV_HEADS = ("kv_head", "head_size")
EMBED = ("embed",)
MLP = ("mlp",)

ATTENTION: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # torch.nn.Linear stores [out, in]: q_proj.weight is [heads ·
    # head_size, hidden], o_proj.weight [hidden, heads · head_size].
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
    """The tensors of projections that have our names in the checkpoint: all weights, and the biases listed."""
    biased = set(biases)
    tensors = []
    for name, (out, in_) in table.items():
        tensors.append(BlockTensor(target=f"{name}.weight", axes=(out, in_)))
        if name in biased:
            tensors.append(BlockTensor(target=f"{name}.bias", axes=(out,)))
    return tensors


class HasNorms(Protocol):
    """An object with norms on the residual stream: a `LayerSpec`, or a config whose layers all have the same."""

    @property
    def norm(self) -> NormSpec:
        """The kind of the norms."""
        ...

    @property
    def norms(self) -> tuple[NormPlace, ...]:
        """The places of the norms."""
        ...


def norms(normed: HasNorms, names: Mapping[str, str] | None = None) -> list[BlockTensor]:
    """Weights and biases of a block's norms.

    Args:
        normed: which norms a block has.
        names: the checkpoint's name for each place, if it is not ours.
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
    # Qwen 3 and Gemma 3 norm each head by itself, with one weight
    # of head_size; OLMo 2 norms all heads' features together.
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
    """A checkpoint's names of the tensors outside the blocks.

    Attributes:
        embedding: the token table.
        layers: the prefix of a layer's number.
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
    """The weight rules of a decoder: the source of each leaf.

    Args:
        config: the architecture.
        Vocab: the model's vocabulary axis; if it is longer than `config.vocab_size`, checkpoints may lack the rows
            that were added (scoring leaves those out).
        block: the tensors of a layer, below its number; if layers are of several kinds, a function from a
            kind to its tensors.
        names: the checkpoint's names of the other tensors.
        more: rules for leaves outside of the blocks that only this family has.
        aliases: see `WeightRules`.
        ignored: see `WeightRules`.
    """
    # A table rounded up so that a mesh axis divides it: rows from
    # `config.vocab_size` on may be missing in the file and are then zero.
    longer = Vocab is not None and config.vocab_size is not None and Vocab.size > config.vocab_size
    padded = ("vocab",) if longer else ()

    def by_token(target: str, source: str) -> WeightRule:
        return WeightRule(target=target, source=source, axes=(("vocab",), EMBED), padded=padded)

    # One table for all layers is the common case; it is iterated many times, hence the tuple.
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
        # Leaves of a scanned run are stacked along `layers`; the template numbers the source layers, e.g.
        # "{6*layers+2}" for the third of a period of six.
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
    # Old checkpoints store the rotary frequencies, which follow from the config.
    ignored = ("*.rotary_emb.inv_freq", *ignored)
    # A folder of the bare transformer (`LlamaModel`) has the names without their first part, and no head.
    aliases = (*aliases, (f"{names.embedding.partition('.')[0]}.*", "*"))
    if config.tie_word_embeddings:
        # With tied embeddings a checkpoint may hold the table twice, or under the name of the head alone. Two tables
        # that differ are not tied, whatever config.json says: `compat.hf.tied` compares them.
        aliases = (*aliases, (f"{names.embedding}.weight", f"{names.head}.weight"))
        ignored = (*ignored, f"{names.head}.weight")
    else:
        table.append(by_token("lm_head.weight", f"{names.head}.weight"))
    return WeightRules(rules=tuple(table), aliases=aliases, ignored=ignored)
