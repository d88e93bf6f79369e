"""Converts config.json to our model configs and back, and checks that they describe the given weights.

`read_config` is strict about everything that affects results: an unknown model type or RoPE type, a contradiction, or a
field known to change the arithmetic is an error; an unknown field is a finding. `check_tensors` compares the config
with the tensors' shapes and dtypes, `check_model_block` with the user's YAML. Each reports all disagreements together
and reads no weight.

The expected shapes follow from the weight rules, so they exist for every family.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import abstract, leaves
from haliax_ext.errors import nearest
from haliax_ext.sources import TensorInfo
from levanter.compat.hf.errors import CheckpointError, ConfigMismatchError, UnknownModelError, raise_if
from levanter.layers.activation import ACTIVATIONS
from levanter.models.config_json import HARMLESS, ConfigJson, ConfigJsonReader, FieldFinding, Spelling
from levanter.models.decoder.config import DecoderConfig
from levanter.models.decoder.pattern import PatternedConfig, expand_pattern
from levanter.models.family import Family
from levanter.models.registry import (
    LmConfig,
    broken_families,
    families_of_config_json,
    family_for_config,
    family_names,
    family_of_config_json,
)


@dataclass(frozen=True)
class ExpectedTensor:
    """Tensors of one shape that a config implies.

    Attributes:
        names: their names in a checkpoint, in all spellings.
        shape: the shape of each.
        reason: the shape in terms of config.json's fields.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    reason: str


def expected_tensors(config: LmConfig) -> tuple[ExpectedTensor, ...]:
    """The shapes that a config implies, from its weight rules."""
    return _decoder_tensors(config) if isinstance(config, DecoderConfig) else _leaf_tensors(config)


def _leaf_tensors(config: LmConfig) -> tuple[ExpectedTensor, ...]:
    """The shapes of the source tensors of any model, computed from its abstract leaves."""
    assert config.vocab_size is not None
    Vocab = hax.Axis("vocab", config.vocab_size)
    rules = config.weight_rules(Vocab)
    module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    return tuple(
        ExpectedTensor(tuple(rules.spellings(name)), tuple(shape), "the model's own sizes")
        for name, (shape, _) in rules.sources(leaves(module)).items()
    )


def _decoder_tensors(config: DecoderConfig) -> tuple[ExpectedTensor, ...]:
    """The shapes of a decoder's tensors, with reasons in config.json's terms; equal ones of all layers are grouped."""
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
    # Axes of tensors outside the layers; a layer's own sizes override them below, since layers may differ.
    outside = {"embed": config.hidden_dim, "vocab": config.vocab_size, "position": config.max_seq_len}
    outside |= {axis.name: axis.size for axis in config.residual.ends_axes}
    # Unrolled, a rule is one tensor (or one for each expert) of one layer.
    rules = dataclasses.replace(config, scan_layers=False).weight_rules(hax.Axis("vocab", config.vocab_size))
    by_kind: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], str, dict[str, None]]] = {}

    def add(names: list[str], shape: Sequence[int], reasons: Sequence[str]) -> None:
        # Layers of several kinds may have tensors of one name and several shapes.
        # Names that differ only in the layer number, with one shape, share a report line.
        kind = re.sub(r"\.\d+\.", ".N.", names[0]), tuple(shape)
        _, _, kind_names = by_kind.setdefault(kind, (tuple(shape), " by ".join(reasons), {}))
        kind_names.update((spelling, None) for name in names for spelling in rules.spellings(name))

    for rule in rules.rules:
        layer = re.match(r"transformer\.layers\.blocks\.(\d+)\.", rule.target)
        axes = {} if layer is None else config.layers[int(layer[1])].axes
        sizes = outside | {name: axis.size for name, axis in axes.items()}
        # Each source axis is the product of the named axes flattened into it.
        shape = [math.prod(sizes[name] for name in group) for group in rule.axes]
        reasons = [words.get(group) or " × ".join(f"{name} {sizes[name]}" for name in group) for group in rule.axes]
        # A fused tensor (qkv) is longer than its part: the length of the whole is what the file must have.
        if rule.part is not None:
            shape[rule.part.axis] = rule.part.length(sizes)
            reasons[rule.part.axis] = f"{shape[rule.part.axis]} in all"
        # One tensor per index of the stacked axes (experts): a checkpoint stores each under its own name.
        indices = itertools.product(*(range(sizes[name]) for name in rule.stacked))
        add([rule.source_name(index) for index in indices], shape, reasons)
    if config.tie_word_embeddings:
        # A tied head may be stored a second time; it must then have the right shape.
        table = next(rule.source for rule in rules.rules if rule.axes[0] == ("vocab",))
        heads = [name for name in rules.ignored if "*" not in name and name not in rules.spellings(table)]
        if heads:
            add(heads, (config.vocab_size, config.hidden_dim), (words[("vocab",)], words[("embed",)]))
    return tuple(ExpectedTensor(tuple(names), shape, reason) for shape, reason, names in by_kind.values())


_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class BridgedConfig:
    """The result of reading a config.json.

    Attributes:
        config: our config.
        family: its family.
        kind: which of the family's kinds of config.json it is.
        findings: fields that were not understood; shown to the user.
    """

    config: LmConfig
    family: Family[Any]
    kind: ConfigJson[Any]
    findings: tuple[FieldFinding, ...]


def _find_family(document: Mapping[str, Any], *, where: object) -> tuple[Family[Any], ConfigJson[Any]]:
    """The family of a config.json, and the kind of config.json that it is.

    Raises:
        UnknownModelError: no family knows the model type; names the nearest one, and the errors of packages whose
            families could not be loaded.
    """
    model_type = document.get("model_type")
    type_name = model_type if isinstance(model_type, str) else None
    if type_name is not None and (family := family_of_config_json(type_name)) is not None:
        return family
    known = families_of_config_json(type_name)
    names = ", ".join(sorted(known))
    if model_type is None:
        raise UnknownModelError(where, f"model_type is missing; known model types: {names}")
    close = nearest(str(model_type), known)
    raise UnknownModelError(
        where,
        [f"unknown model type {model_type!r}; known model types: {names}", *broken_families()],
        suggestion=f"the nearest known one is {close[0]!r}" if close else None,
    )


def read_config(document: Mapping[str, Any], *, where: object = "config.json") -> BridgedConfig:
    """Reads our config from a config.json in the transformers-4 or -5 spelling.

    Raises:
        UnknownModelError: unknown model type.
        CheckpointError: with everything in it that is missing, contradicts itself or cannot be computed here.
    """
    family, kind = _find_family(document, where=where)
    fields = ConfigJsonReader(document)
    config = kind.read(fields)
    # After the family's reader, which marks what it reads as seen: the rest are findings.
    fields.leftovers(HARMLESS)
    raise_if(CheckpointError, where, fields.problems)
    assert config is not None
    return BridgedConfig(config=config, family=family, kind=kind, findings=tuple(fields.findings))


def family_for(config: LmConfig) -> Family[Any]:
    """The family of a config, which must have a Hugging Face format.

    Raises:
        ValueError: there is none, or it has no such format.
    """
    family = family_for_config(type(config))
    if family.config_json:
        return family
    raise ValueError(
        f"{type(config).__name__} cannot be written as a Hugging Face config; families that can: "
        f"{', '.join(family_names())}"
    )


def write_config(
    config: LmConfig, *, vocab_size: int | None = None, dtype: str | None = None, spelling: Spelling = "transformers5"
) -> dict[str, Any]:
    """The config.json of a model, the inverse of `read_config`.

    Args:
        config: our config.
        vocab_size: rows of the embedding table, used if the config leaves it open.
        dtype: dtype of the weights in the same folder, e.g. `bfloat16`.
        spelling: the version of transformers whose field names are written. transformers 5 reads both.

    Raises:
        ValueError: the model has a part that a Hugging Face config cannot describe.
    """
    family = family_for(config)
    if config.vocab_size is None and vocab_size is not None:
        config = dataclasses.replace(config, vocab_size=vocab_size)
    if config.vocab_size is None:
        raise ValueError("model.vocab_size must be known to write config.json")
    kind = family.config_json[0]
    document: dict[str, Any] = {"architectures": [kind.transformers_class], "model_type": kind.model_type}
    document |= kind.write(config, spelling)
    if dtype is not None:
        # transformers 5 renamed torch_dtype to dtype, and still reads the old name.
        document["dtype" if spelling == "transformers5" else "torch_dtype"] = dtype
    return document


def check_tensors(
    document: Mapping[str, Any],
    bridged: BridgedConfig,
    tensors: Mapping[str, TensorInfo],
    *,
    where: object,
    quantized: Collection[str] = (),
) -> tuple[FieldFinding, ...]:
    """Checks config.json against the shapes and dtypes of the checkpoint's tensors.

    Args:
        document: the config.json.
        bridged: our config, read from it.
        tensors: the checkpoint's tensors.
        where: the name of config.json in messages.
        quantized: names of quantized weights, whose dtype follows from the stored format.

    Missing and unexpected tensors are not reported here but by the loader, which knows the nearest names.

    Returns:
        Tensors of another floating dtype than config.json's, which are read as they are stored.

    Raises:
        ConfigMismatchError: with every shape that disagrees and every tensor of integers; layers with the same
            disagreement share a line.
    """
    problems: list[str] = []
    for expected in expected_tensors(bridged.config):
        problems += _shape_problems(expected, tensors)
    # Decoded weights, int8 weights and their scales have dtypes that config.json's `dtype` does not describe.
    floating = {name: info for name, info in tensors.items() if name.removesuffix("_scale") not in quantized}
    problems += _integer_problems(floating)
    raise_if(
        ConfigMismatchError, where, problems, suggestion=("config.json and the weights do not belong to the same model")
    )
    return tuple(_dtype_findings(document, floating))


def _shape_problems(expected: ExpectedTensor, tensors: Mapping[str, TensorInfo]) -> list[str]:
    wrong: dict[tuple[int, ...], list[str]] = {}
    for name in expected.names:
        if name in tensors and tensors[name].shape != expected.shape:
            wrong.setdefault(tensors[name].shape, []).append(name)
    return [
        f"tensor {_some(names)} has shape {list(shape)}, config.json says {list(expected.shape)} ({expected.reason})"
        for shape, names in wrong.items()
    ]


def _integer_problems(tensors: Mapping[str, TensorInfo]) -> list[str]:
    # Scalars are left out: some checkpoints hold counters beside the weights.
    integers = [name for name, info in tensors.items() if info.dtype.kind in "iub" and info.shape]
    if not integers:
        return []
    dtypes = ", ".join(sorted({tensors[name].dtype.name for name in integers}))
    return [f"tensor {_some(integers)} has dtype {dtypes}: quantized or packed weights are not read"]


def _dtype_findings(document: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[FieldFinding]:
    """Tensors of another floating dtype than config.json's."""
    key = "dtype" if document.get("dtype") is not None else "torch_dtype"
    stated = document.get(key)
    if not isinstance(stated, str) or stated.removeprefix("torch.") not in _DTYPES:
        return []
    expected = _DTYPES[stated.removeprefix("torch.")]
    wrong: dict[str, list[str]] = {}
    for name, info in tensors.items():
        # Vectors kept in float32 beside 16-bit matrices are what mixed-precision training saves.
        kept_exact = len(info.shape) < 2 and info.dtype == np.float32
        if info.dtype.kind not in "iub" and info.dtype.name != expected and not kept_exact:
            wrong.setdefault(info.dtype.name, []).append(name)
    # Not an error: the files say what dtype each number has. FSDP, for one, saves float32 beside a bfloat16 config.
    return [
        FieldFinding(key, stated, f"tensor {_some(names)} is stored as {dtype}, and is read as it is stored")
        for dtype, names in wrong.items()
    ]


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def check_model_block(
    block: Mapping[str, Any], config: LmConfig, *, block_name: str = "model", where: object = "config.json"
) -> None:
    """Checks the keys of the user's YAML `model:` block against the checkpoint's config.

    Only keys written in the block are compared, and only those that change what the model computes; a shorter
    `max_seq_len` or another attention backend is the user's choice.

    Args:
        block: the keys of the YAML block, as written.
        config: the checkpoint's.
        block_name: the name of the block in messages.
        where: the name of the checkpoint's config in messages.

    Raises:
        ConfigMismatchError: with every key that disagrees, and both values.
    """
    problems = []
    family = family_for_config(type(config))
    if block.get("type", family.name) != family.name:
        problems.append(f"{block_name}.type is {block['type']!r}, the checkpoint's model is {family.name!r}")
    for name in family.architecture_fields:
        # The checkpoint's config may hold the same pattern as a list, or as its family's default.
        if name not in block or (name == "pattern" and _same_layers(block[name], config)):
            continue
        problems += _compare(f"{block_name}.{name}", block[name], _effective(config, name), where)
    raise_if(
        ConfigMismatchError,
        f"{block_name}: contradicts {where}",
        problems,
        suggestion="remove these keys to use the checkpoint's own",
    )


def _same_layers(pattern: object, config: LmConfig) -> bool:
    """Whether a pattern gives the checkpoint's kinds of layers, in whatever form its config has them."""
    if not isinstance(pattern, str) or not isinstance(config, PatternedConfig):
        return False
    try:
        return expand_pattern(pattern, kinds=config.kinds, layers=config.num_layers) == config.types
    except ValueError:
        return False


def _effective(config: LmConfig, name: str) -> object:
    # These fields may be None in the config (derived), while the user wrote the derived value.
    if name == "head_dim":
        return config.axes["head_size"].size
    if name == "use_bias":
        return config.has_attention_bias and config.has_mlp_bias  # type: ignore[attr-defined]
    if name == "layer_types" and isinstance(config, PatternedConfig):
        return config.types
    return getattr(config, name)


def _compare(key: str, configured: object, expected: object, where: object) -> list[str]:
    if isinstance(configured, Mapping) and dataclasses.is_dataclass(expected):
        # A nested block, such as `rope`: compare field by field, so that keys the user left out are not compared.
        values = {f.name: getattr(expected, f.name) for f in dataclasses.fields(expected)}
        values["type"] = type(expected).get_choice_name(type(expected))  # type: ignore[attr-defined]
        return [
            problem
            for name, value in configured.items()
            for problem in _compare(f"{key}.{name}", value, values.get(name), where)
        ]
    # YAML has lists where our configs have tuples.
    configured = tuple(configured) if isinstance(configured, list) else configured
    # A null in YAML means the default, which here is the checkpoint's own value.
    if (
        configured is None
        or configured == expected
        or _close(configured, expected)
        or _same_function(configured, expected)
    ):
        return []
    return [f"{key} is {configured!r}, {where} says {expected!r}"]


def _same_function(a: object, b: object) -> bool:
    """Whether two names are of one activation function (`gelu_new`, `gelu_pytorch_tanh`)."""
    if not (isinstance(a, str) and isinstance(b, str)):
        return False
    return a in ACTIVATIONS and b in ACTIVATIONS and ACTIVATIONS[a] is ACTIVATIONS[b]


def _close(a: object, b: object) -> bool:
    """Whether two numbers are the same up to how float32 metadata was written in decimal."""
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return False
    # Float32 metadata (GGUF) printed in decimal differs in the eighth digit, e.g. 1e-5 from 9.99999974e-06.
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
