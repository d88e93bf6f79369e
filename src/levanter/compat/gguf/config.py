"""Translates GGUF metadata to the fields of a config.json, so that the same code reads both.

llama.cpp stores the scaling of Llama 3's rotary embeddings not as parameters but as a tensor, `rope_freqs.weight`: the
divisor of each pair's frequency. The parameters are recovered by computing that tensor from known candidates; if none
fits, that is an error. Unknown metadata keys are copied into the document under their own name, and the config bridge
reports them.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from levanter.compat.gguf.file import GgufFile
from levanter.compat.hf.errors import CheckpointError, UnknownModelError, raise_if
from levanter.layers.rotary import Llama3RotaryConfig

ARCHITECTURES = ("llama",)
"""Supported architectures: other families lay out queries and keys differently."""

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
# Repetitions of sizes that the tensors or other keys determine; they are checked below where they could disagree.
_HARMLESS = ("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "attention.causal")
_MUST_BE_ABSENT = {
    "expert_count": "mixture-of-experts models",
    "attention.clamp_kqv": "clamped attention inputs",
    "attention.max_alibi_bias": "ALiBi",
    "attention.sliding_window": "sliding windows",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "attention.scale": "attention with a non-standard scale",
}
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

LLAMA3_CANDIDATES = tuple(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
    for original in (8192, 4096, 2048, 16384, 32768)
)
"""Candidates for the parameters behind `rope_freqs.weight`; Llama 3.1, 3.2 and 3.3 use the first."""


def hf_document(file: GgufFile) -> dict[str, Any]:
    """The config.json that describes the model of a GGUF file.

    Raises:
        UnknownModelError: an architecture that is not llama.
        CheckpointError: lists everything in the metadata that is missing or that this family does not have.
    """
    architecture = file.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnknownModelError(
            file.path, f"unknown architecture {architecture!r}; known architectures: {', '.join(ARCHITECTURES)}"
        )
    keys = {
        key.removeprefix(f"{architecture}."): _plain(value)
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    problems: list[str] = []
    document: dict[str, Any] = {"model_type": architecture}
    for key, field in _SIZES.items():
        document[field] = _one_value(keys, key, problems)
    heads = document["num_attention_heads"]
    document["num_key_value_heads"] = _one_value(keys, "attention.head_count_kv", problems, default=heads)
    document["rms_norm_eps"] = keys.pop("attention.layer_norm_rms_epsilon", None)
    if document["rms_norm_eps"] is None:
        problems.append("metadata key 'attention.layer_norm_rms_epsilon' is missing")
    for key, what in _MUST_BE_ABSENT.items():
        # 0 and false count as absent: llama.cpp writes some keys with neutral values.
        if keys.pop(key, 0):
            problems.append(f"metadata key {key!r} is set: {what} are not supported")
    if "token_embd.weight" in file.tensors:
        # The table's rows, not the metadata: `vocab_size` is missing in older files.
        document["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    else:
        problems.append("there is no tensor 'token_embd.weight'")
    # GGUF has no key for tied weights: without an output matrix, the table is the head.
    document["tie_word_embeddings"] = "output.weight" not in file.tensors
    # Nor for biases: they exist if the first layer has them.
    document["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    document["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if not problems:
        head_size = keys.get("attention.key_length", document["hidden_size"] // heads)
        document["head_dim"] = head_size
        for key in ("attention.value_length", "rope.dimension_count"):
            if keys.get(key, head_size) != head_size:
                problems.append(f"metadata key {key!r} is {keys[key]}, but heads have {head_size} features")
        document["rope_parameters"] = _rope(file, keys, head_size, document["max_position_embeddings"], problems)
    raise_if(CheckpointError, file.path, problems)
    for role in ("bos", "eos"):
        document[f"{role}_token_id"] = file.get(f"tokenizer.ggml.{role}_token_id")
    # What remains unread is passed on, so that the bridge reports each such field.
    document |= {f"{architecture}.{key}": value for key, value in keys.items() if key not in _HARMLESS}
    return document


T = TypeVar("T")


def _plain(value: T) -> T | float:
    """Metadata floats are float32: 1e-05 comes as 9.999999747378752e-06. Returns the shortest equivalent decimal."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _one_value(keys: dict[str, Any], key: str, problems: list[str], *, default: int | None = None) -> int | None:
    """A number, or a list of the same number for every layer, which llama.cpp may write."""
    value = keys.pop(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if value is None:
        problems.append(f"metadata key {key!r} is missing")
    elif not isinstance(value, int):
        problems.append(f"metadata key {key!r} is {value!r:.60}, expected one number for all layers")
        value = None
    return value


def _rope(
    file: GgufFile, keys: dict[str, Any], head_size: int, context: int, problems: list[str]
) -> Mapping[str, Any] | None:
    theta = keys.pop("rope.freq_base", 10000.0)
    kind = keys.pop("rope.scaling.type", None)
    factor = keys.pop("rope.scaling.factor", None)
    original = keys.pop("rope.scaling.original_context_length", None)
    keys.pop("rope.scaling.finetuned", None)
    if (linear := keys.pop("rope.scale_linear", None)) is not None:  # the key of 2023
        kind, factor = "linear", linear
    if "rope_freqs.weight" in file.tensors:
        if kind not in (None, "none"):
            problems.append(f"rope.scaling.type is {kind!r}, and there is rope_freqs.weight as well")
        return _llama3(file, float(theta), head_size, original, problems)
    # A linear scaling without a factor, or with factor 1, changes nothing.
    if kind in (None, "none") or (kind == "linear" and factor in (None, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        problems.append(f"rope.scaling.type {kind!r} is not one of none, linear, yarn")
        return None
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original or context
        attention = keys.pop("rope.scaling.attn_factor", None)
        if attention not in (None, 1.0):
            # llama.cpp multiplies the key by YaRN's 0.1 · ln(factor) + 1; transformers' attention_factor is the
            # product.
            rope["attention_factor"] = attention * (0.1 * float(np.log(factor)) + 1.0)
        rope |= {name: keys.pop(key) for key, name in _YARN.items() if key in keys}
    return rope


def _llama3(
    file: GgufFile, theta: float, head_size: int, original: int | None, problems: list[str]
) -> Mapping[str, Any] | None:
    stored = file.tensors["rope_freqs.weight"]
    # The tensor divides the frequency of each pair of features.
    divisors = np.fromfile(file.path, np.float32, count=stored.nbytes // 4, offset=stored.start)
    if stored.kind != "F32" or divisors.shape != (head_size // 2,):
        problems.append(f"rope_freqs.weight is {stored.kind}{list(stored.shape)}, expected F32[{head_size // 2}]")
        return None
    # The lowest frequencies are divided by the full factor, which is thus the largest divisor.
    factor = _plain(float(divisors.max()))
    if np.all(divisors == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    # Frequencies without scaling; a candidate fits if the quotient is the stored tensor.
    plain = 1.0 / theta ** (np.arange(0, head_size, 2) / head_size)
    candidates = list(LLAMA3_CANDIDATES)
    if original is not None:
        candidates.insert(0, {**candidates[0], "original_max_position_embeddings": original})
    for parameters in candidates:
        rope = Llama3RotaryConfig(theta=theta, factor=factor, **parameters)
        # Unscaled over scaled frequencies are the divisors; rtol covers float32 rounding in the file.
        if np.allclose(plain / rope.frequencies(head_size, 1), divisors, rtol=1e-4):
            return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **parameters}
    problems.append(
        "rope_freqs.weight is not the scaling of Llama 3.1 with factor "
        f"{factor:g} over an original context of {original or 8192} (or another usual one)"
    )
    return None
