"""The tiny Llama of `llama_on_mesh` by torch and transformers, to judge losses and gradients."""

from typing import Any

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB

from levanter.models import LlamaConfig


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a tiny Llama's tensors by Hugging Face name, with as many key/value heads as query heads."""
    width, inner = config.hidden_dim, config.intermediate_dim
    found = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    found["lm_head.weight"] = (VOCAB, width)
    for n in range(config.num_layers):
        layer = f"model.layers.{n}"
        found |= {f"{layer}.self_attn.{k}_proj.weight": (width, width) for k in "qkvo"}
        found |= {f"{layer}.mlp.{k}_proj.weight": (inner, width) for k in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        found |= {f"{layer}.{k}_layernorm.weight": (width,) for k in ("input", "post_attention")}
    return found


def random_tensors(config: LlamaConfig, *, seed: int = 3) -> dict[str, np.ndarray]:
    """Random float32 tensors by Hugging Face name; norm weights around 1."""
    rng, found = np.random.default_rng(seed), {}
    for key, shape in tensor_shapes(config).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        found[key] = 1 + np.float32(0.1) * noise if key.endswith("norm.weight") else np.float32(0.15) * noise
    return found


def torch_llama(config: LlamaConfig, tensors: dict[str, np.ndarray]) -> Any:
    """The model of these tensors, float32; skips the test where torch is not installed."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(
        HfLlamaConfig(
            vocab_size=VOCAB,
            hidden_size=config.hidden_dim,
            intermediate_size=config.intermediate_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            rms_norm_eps=1e-5,
            attn_implementation="eager",  # pyright: ignore
        )
    ).float()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(tensors[name].copy())
    return model
