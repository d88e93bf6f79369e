"""Small llama GGUF files written with the gguf library the way llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT = 64, 96, 2, 4, 2, 300, 128
HEAD_DIM = HIDDEN // HEADS

METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": VOCAB,
    "general.file_type": 3,
}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute` of q and k rows, as its converter documents it."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def hf_weights(*, tied: bool = True, bias: bool = False) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names."""
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for n in range(LAYERS):
        prefix = f"model.layers.{n}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if bias and name.startswith("self_attn"):
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under llama.cpp's names, q and k permuted."""
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    made = {}
    for name, array in weights.items():
        stem, _, kind = name.rpartition(".")
        if ".q_proj" in name:
            array = permute(array, HEADS)
        if ".k_proj" in name:
            array = permute(array, KV_HEADS)
        layer = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        part = next(ours for theirs, ours in parts.items() if stem == theirs or stem.endswith(theirs))
        made[f"{layer}{part}.{kind}"] = np.ascontiguousarray(array)
    return made


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes a file; matrices in `kind`, vectors in F32. A metadata value of `...` leaves the key out."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in (METADATA | (metadata or {})).items():
        if value is ...:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in (gguf_tensors(hf_weights()) if tensors is None else tensors).items():
        stored = kind if array.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
