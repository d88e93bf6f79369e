"""What parameters are for, by paths and axes of several families."""

import numpy as np
import pytest

from haliax_ext.abstract import Leaf
from levanter.models.param_groups import parameter_group

pytestmark = pytest.mark.quick

LAYER = "transformer.layers.stacked"
EMBED, HEADS = ("embed",), ("kv_head", "head_size", "embed")


@pytest.mark.parametrize(
    ("path", "names", "group"),
    [
        # Llama
        ("embeddings.token_embeddings.weight", ("vocab", "embed"), "embedding"),
        (f"{LAYER}.self_attn.q_proj.weight", HEADS, "attention"),
        (f"{LAYER}.self_attn.q_norm.weight", ("head_size",), "norm"),
        (f"{LAYER}.mlp.up_proj.weight", ("mlp", "embed"), "mlp"),
        (f"{LAYER}.post_attention_layernorm.weight", EMBED, "norm"),
        ("transformer.norm.weight", EMBED, "norm"),
        ("lm_head.weight", ("vocab", "embed"), "head"),
        # GPT-2
        ("embeddings.position_embeddings.weight", ("position", "embed"), "embedding"),
        ("transformer.wte.weight", ("vocab", "embed"), "embedding"),
        ("transformer.h.3.attn.c_attn.weight", ("embed", "qkv", "heads", "head_size"), "attention"),
        ("transformer.h.3.ln_1.bias", EMBED, "norm"),
        ("transformer.ln_f.weight", EMBED, "norm"),
        ("transformer.h.3.mlp.c_fc.weight", ("embed", "mlp"), "mlp"),
        # Mixture of experts
        (f"{LAYER}.block_sparse_moe.gate.weight", ("experts", "embed"), "mlp"),
        (f"{LAYER}.mlp.experts.w1.weight", ("experts", "mlp", "embed"), "mlp"),
        # Only axes say what these are
        ("a.weight", ("mlp", "embed"), "mlp"),
        ("b.weight", HEADS, "attention"),
        ("c.weight", ("vocab", "embed"), "embedding"),
        ("d", (), "other weights"),
        ("e.weight", EMBED, "other weights"),
    ],
)
def test_groups(path, names, group):
    assert parameter_group(Leaf(path, tuple((name, 2) for name in names), np.dtype(np.float32))) == group
