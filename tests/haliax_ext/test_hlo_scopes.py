"""Op names as JAX and XLA write them, and the modules they stand for."""

import pytest

from haliax_ext.hlo.op_metadata import UNNAMED, Scope, parse_scope

pytestmark = pytest.mark.quick

BACKWARD = "jit(step)/transpose(jvp(scan(layers)))/while/body/closed_call/checkpoint"


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/jvp(scan(layers))/while/body/closed_call/mlp/down_proj/add", Scope("layers.mlp.down_proj")),
        ("jit(step)/jvp(scan(layers))/while/body/eval_jaxpr/mlp/down_proj/add", Scope("layers.mlp.down_proj")),
        (f"{BACKWARD}/rematted_computation/self_attn/rope/mul", Scope("layers.self_attn.rope", "remat")),
        (f"{BACKWARD}/input_layernorm/reduce_sum", Scope("layers.input_layernorm", "backward")),
        ("jit(step)/transpose(jvp(lm_head))/scan(chunks)/while/body/exp", Scope("lm_head.chunks", "backward")),
        (
            f"{BACKWARD}/self_attn/q_proj/contract embed -> batch, position, kv_head/0 1 2 , 3 2 -> 0 1 3/dot_general",
            Scope("layers.self_attn.q_proj", "backward", "embed -> batch, position, kv_head"),
        ),
        (
            "jit(step)/jvp(scan(layers))/while/body/self_attn/attention/shard_map/vmap(static_sparsity_splash)/"
            "splash_mha_fwd_segmented_residuals/splash_mha_fwd_segmented_residuals/pallas_call",
            Scope("layers.self_attn.attention"),
        ),
        ("broadcast.89", Scope(UNNAMED)),
        ("jit(step)/mul", Scope(UNNAMED)),
    ],
)
def test_one_instruction(op_name, expected):
    assert parse_scope(op_name) == expected


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        # Three gradients in one all-reduce: what holds them is the attention.
        (
            f"{BACKWARD}/self_attn/(q_proj/contract embed -> kv_head/0 1 -> 2/dot_general:"
            "k_proj/contract embed -> kv_head/0 1 -> 2/dot_general:v_proj/dot_general)",
            Scope("layers.self_attn", "backward"),
        ),
        (
            f"{BACKWARD}/mlp/(gate_proj/contract embed -> mlp/0 1 -> 2/dot_general:"
            "up_proj/contract embed -> mlp/0 1 -> 2/dot_general)",
            Scope("layers.mlp", "backward", "embed -> mlp"),
        ),
        # The same name further down does not make them one module.
        (f"{BACKWARD}/(self_attn/norm/mul:mlp/norm/mul)", Scope("layers", "backward")),
        (
            "jit(x)/(jvp()/reduce_sum:transpose(jvp(embeddings))/scatter-add:transpose(jvp(lm_head))/reduce_sum)",
            Scope(UNNAMED, "backward"),
        ),
    ],
)
def test_several_in_one(op_name, expected):
    assert parse_scope(op_name) == expected
