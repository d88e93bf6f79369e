"""The shapes that a config implies for a checkpoint's tensors, said in config.json's words.

They follow from the weight rules, so that every family has them.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import haliax as hax
import jax

from haliax_ext.abstract import abstract, leaves
from levanter.models.decoder.config import DecoderConfig
from levanter.models.registry import LmConfig


@dataclass(frozen=True)
class ExpectedTensor:
    """Tensors of one shape that a config implies.

    Attributes:
        names: what a checkpoint calls them, all spellings.
        shape: of each.
        reason: the shape in the words of config.json.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    reason: str


def expected_tensors(config: LmConfig) -> tuple[ExpectedTensor, ...]:
    """The shapes that a config implies, from its weight rules."""
    return _decoder_tensors(config) if isinstance(config, DecoderConfig) else _leaf_tensors(config)


def _leaf_tensors(config: LmConfig) -> tuple[ExpectedTensor, ...]:
    """The shapes of the tensors that a model's leaves come from, one by one."""
    assert config.vocab_size is not None
    Vocab = hax.Axis("vocab", config.vocab_size)
    rules = config.weight_rules(Vocab)
    module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    return tuple(
        ExpectedTensor(tuple(rules.spellings(name)), tuple(shape), "the model's own sizes")
        for name, (shape, _) in rules.sources(leaves(module)).items()
    )


def _decoder_tensors(config: DecoderConfig) -> tuple[ExpectedTensor, ...]:
    """The shapes of a decoder's tensors, with a reason in config.json's words; alike ones of all layers together."""
    head = config.HeadSize.size
    words = {
        ("embed",): f"hidden_size {config.hidden_dim}",
        ("mlp",): f"intermediate_size {config.intermediate_dim}",
        ("kv_head", "q_heads_per_group", "head_size"): f"num_attention_heads {config.num_heads} × head_dim {head}",
        ("kv_head", "head_size"): f"num_key_value_heads {config.num_kv_heads} × head_dim {head}",
        ("head_size",): f"head_dim {head}",
        ("vocab",): f"vocab_size {config.vocab_size}",
    }
    assert config.vocab_size is not None
    outside = {"embed": config.hidden_dim, "vocab": config.vocab_size, "position": config.max_seq_len}
    # Unrolled, a rule is one tensor (or one for each expert) of one layer.
    rules = dataclasses.replace(config, scan_layers=False).weight_rules(hax.Axis("vocab", config.vocab_size))
    by_kind: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], str, dict[str, None]]] = {}

    def add(names: list[str], shape: Sequence[int], reasons: Sequence[str]) -> None:
        # Layers of several kinds may have tensors of one name and several shapes.
        kind = re.sub(r"\.\d+\.", ".N.", names[0]), tuple(shape)
        _, _, kind_names = by_kind.setdefault(kind, (tuple(shape), " by ".join(reasons), {}))
        kind_names.update((spelling, None) for name in names for spelling in rules.spellings(name))

    for rule in rules.rules:
        layer = re.match(r"transformer\.layers\.blocks\.(\d+)\.", rule.target)
        axes = {} if layer is None else config.layers[int(layer[1])].axes
        sizes = outside | {name: axis.size for name, axis in axes.items()}
        shape = [math.prod(sizes[name] for name in group) for group in rule.axes]
        reasons = [words.get(group) or " × ".join(f"{name} {sizes[name]}" for name in group) for group in rule.axes]
        if rule.part is not None:
            shape[rule.part.axis] = rule.part.length(sizes)
            reasons[rule.part.axis] = f"{shape[rule.part.axis]} in all"
        indices = itertools.product(*(range(sizes[name]) for name in rule.stacked))
        add([rule.source_name(index) for index in indices], shape, reasons)
    if config.tie_word_embeddings:
        # A tied head may be stored a second time; it must then have the right shape.
        heads = [name for name in rules.ignored if "*" not in name]
        add(heads, (config.vocab_size, config.hidden_dim), (words[("vocab",)], words[("embed",)]))
    return tuple(ExpectedTensor(tuple(names), shape, reason) for shape, reason, names in by_kind.values())
