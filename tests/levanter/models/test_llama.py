"""The Llama config and its weights table; blocks stacked, unrolled and checkpointed compute the same."""

import re

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.llama_on_mesh import VOCAB, abstract_model, mappings_for, program_for, random_arrays, run_on, tiny_config
from helpers.losses import mean_loss

from haliax_ext.abstract import leaves
from haliax_ext.hlo.op_metadata import parse_scope
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.layers.attention import grouped
from levanter.layers.rotary import Llama3RotaryConfig
from levanter.models import LlamaConfig, LmConfig
from levanter.models.scoring import next_tokens, token_logprobs
from levanter.models.stack import POLICY_NAMES

TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 16)).astype(np.int32)
ONE = MeshSpec.of(data=1, model=1)


def test_yaml_makes_a_config():
    found = draccus.decode(
        LmConfig,
        {
            "type": "llama",
            "hidden_dim": 2048,
            "num_heads": 32,
            "num_kv_heads": 8,
            "gradient_checkpointing": "nested",
            "rope": {"type": "llama3", "factor": 32},
        },
    )
    assert found == LlamaConfig(
        hidden_dim=2048, num_kv_heads=8, gradient_checkpointing="nested", rope=Llama3RotaryConfig(factor=32.0)
    )
    assert hash(found) != hash(LlamaConfig())


def test_an_unknown_family_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"model.type: 'lama' is not a model family .*did you mean llama\?"):
        LmConfig.get_choice_class("lama")


def test_everything_wrong_with_a_config_is_listed():
    with pytest.raises(ValueError) as error:
        LlamaConfig(
            num_heads=9,
            num_kv_heads=2,
            hidden_dim=100,
            activation_function="sillu",
            gradient_checkpointing="nestd",
            attn_backend="splsh",
        )
    text = str(error.value)
    for part in (
        "model.num_kv_heads 2 does not divide num_heads 9; legal: [1, 3, 9]",
        "model.hidden_dim 100 is not a multiple of num_heads 9; set model.head_dim",
        "(did you mean silu?)",
        "(did you mean nested?)",
        "(did you mean splash?)",
    ):
        assert part in text
    with pytest.raises(ValueError, match=r"model.num_layers: must be at least 1, got 0"):
        LlamaConfig(num_layers=0)
    with pytest.raises(ValueError, match=r"no such fields: \['save_carry'\] \(did you mean save_carries"):
        LlamaConfig(gradient_checkpointing={"save_carry": True})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"use_qk_norm": True},
        {"scan_layers": False},
    ],
    ids=str,
)
def test_the_weights_table_is_complete_and_speaks_hugging_face(changes):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = tiny_config(**changes)
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with torch.device("meta"):
        if config.use_qk_norm:  # Llama has none; Qwen 3 is the family that names them
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
        else:
            biases = dict(attention_bias=config.attention_bias, mlp_bias=config.mlp_bias)
            model = LlamaForCausalLM(HfLlamaConfig(**shape, **biases))
    theirs = {key: tuple(p.shape) for key, p in model.named_parameters()}
    ours = {name: shape for name, (shape, _) in config.weight_rules().sources(leaves(abstract_model(config))).items()}
    assert ours == theirs


def test_a_longer_vocabulary_axis_may_lack_rows():
    config = tiny_config(vocab_size=250)
    assert config.weight_rules(Axis("vocab", 256)).by_target()["lm_head.weight"].padded == ("vocab",)
    assert config.weight_rules(Axis("vocab", 250)).by_target()["lm_head.weight"].padded == ()
    assert config.weight_rules().by_target()["lm_head.weight"].padded == ()


def gradients(model, tokens):
    return eqx.filter_value_and_grad(lambda m: mean_loss(m, tokens, next_tokens(tokens)).array)(model)


def logprobs(model, tokens):
    return token_logprobs(model, tokens, next_tokens(tokens))


def run(config, devices, arrays=None, function=gradients):
    arrays = random_arrays(config) if arrays is None else arrays
    return run_on(function, config, arrays, TOKENS, ONE, mappings_for(config, ONE), devices)


# Offloading needs host memory that the CPU platform does not have; it is lowered for TPU below.
POLICIES = [
    False,
    "nested",
    *(pytest.param(name, marks=pytest.mark.slow) for name in POLICY_NAMES if name not in ("offload", "nested")),
    pytest.param({"save_carries": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_checkpointing_changes_no_number(policy, devices):
    expected_loss, expected = run(tiny_config(num_layers=4), devices)
    loss, found = run(tiny_config(num_layers=4, gradient_checkpointing=policy), devices)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) < 1e-6


@pytest.mark.parametrize(
    "extras",
    [{}, dict(use_qk_norm=True, hybrid_norm=True, input_embedding_norm=True, use_bias=True)],
    ids=["plain", "all_norms"],
)
def test_unrolled_layers_equal_scanned_ones(extras, devices):
    scanned, unrolled = tiny_config(**extras), tiny_config(scan_layers=False, **extras)
    arrays = random_arrays(scanned)
    by_layer = {}
    for path, array in arrays.items():
        if ".stacked." in path:
            for n in range(2):
                by_layer[path.replace(".stacked.", f".blocks.{n}.")] = array[n]
        else:
            by_layer[path] = array
    expected = run(scanned, devices, arrays, logprobs).array
    found = run(unrolled, devices, by_layer, logprobs).array
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert expected.std() > 0.3


@pytest.mark.parametrize(("backend", "upcast"), [("blockwise", False), ("jax_native", True)])
def test_backends_agree_inside_the_model_on_a_mesh(backend, upcast, devices):
    spec = MeshSpec.of(data=1, model=2, group=4)
    config = tiny_config(attn_backend="reference")
    other = tiny_config(attn_backend=backend, flash_attention_block_size=6, upcast_attn=upcast)
    arrays, heads = random_arrays(config), ("model", "group")
    mappings = mappings_for(config, spec, heads=heads)
    expected = run_on(logprobs, config, arrays, TOKENS, spec, mappings, devices).array
    found = run_on(logprobs, other, arrays, TOKENS, spec, mappings, devices).array
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_platform_settles_the_backend():
    config, reasons = tiny_config(attn_backend="nvte").for_platform("gpu", compute_dtype="bfloat16")
    assert config.attn_backend == "cudnn" and "Transformer Engine" in reasons[0]
    config, reasons = tiny_config(use_flash_attention=False).for_platform("tpu", compute_dtype="bfloat16", length=9999)
    assert config.attn_backend == "reference" and reasons == ("attention: reference: as configured",)
    config, reasons = tiny_config().for_platform("tpu", compute_dtype="bfloat16", length=4096)
    assert config.attn_backend == "splash"
    assert reasons == ("attention: splash: blocks of 1024 × 1024; scores stay on the chip",)
    config, _ = tiny_config(attn_backend="nvte", upcast_attn=True).for_platform("gpu", compute_dtype="bfloat16")
    assert config.attn_backend == "reference"
    # Cut over four devices, each has 1,024 queries.
    config, reasons = tiny_config().for_platform("tpu", compute_dtype="bfloat16", length=4096, sequence_shards=4)
    assert (config.attn_backend, config.flash_attention_block_size) == ("splash", 512)
    assert reasons == ("attention: splash: blocks of 512 × 512; scores stay on the chip",)


def backends_of(config, length, monkeypatch):
    """Which backends, and with which blocks, a model's layers attend with; nothing is computed."""
    found = []

    def attended(q, k, v, mask, *, choice, **_):
        found.append((choice.name, choice.block_size))
        return q

    monkeypatch.setattr(grouped, "attend", attended)
    ids = hax.NamedArray(jax.ShapeDtypeStruct((1, length), jnp.int32), (Axis("batch", 1), Axis("position", length)))
    jax.eval_shape(lambda model, ids: model(ids).activations, abstract_model(config), ids)
    return set(found)


@pytest.mark.parametrize(
    ("asked", "platform", "expected"),
    [
        ({}, "tpu", ("splash", 1024)),
        ({}, "cpu", ("blockwise", 512)),
        ({"flash_attention_block_size": 100}, "tpu", ("splash", 128)),
        ({"flash_attention_block_size": 100}, "cpu", ("blockwise", 100)),
        ({"attn_backend": "vanilla"}, "tpu", ("reference", None)),
        ({"attn_backend": "nvte"}, "gpu", ("cudnn", None)),
    ],
)
def test_what_was_chosen_for_the_platform_is_what_runs(asked, platform, expected, monkeypatch):
    """Whatever the length that is traced: a plan that printed one backend never runs another."""
    config, reasons = tiny_config(**asked).for_platform(platform, compute_dtype="bfloat16", length=4096)
    assert reasons[0].startswith(f"attention: {expected[0]}")
    for length in (16, 4096):
        assert backends_of(config, length, monkeypatch) == {expected}


@pytest.mark.parametrize(
    ("asked", "length", "expected"),
    [
        ({}, 2048, ("reference", None)),
        ({}, 2049, ("blockwise", 512)),
        ({"attn_backend": "nvte", "flash_attention_block_size": 64}, 4096, ("blockwise", 64)),
        ({"attn_backend": "jax_flash"}, 16, ("blockwise", None)),
        ({"attn_backend": "splash"}, 16, ("splash", None)),
        ({"use_flash_attention": False}, 4096, ("reference", None)),
    ],
)
def test_a_model_that_was_made_for_no_platform_attends_by_name_or_by_length(asked, length, expected, monkeypatch):
    assert backends_of(tiny_config(**asked), length, monkeypatch) == {expected}


@pytest.mark.parametrize("policy", [True, "offload"])
def test_405b_lowers_for_tpu_without_a_device(policy):
    """No array is made outside of `jit`: scoring and gradients trace under an abstract mesh, at full size."""
    config = LlamaConfig(
        max_seq_len=131072,
        hidden_dim=16384,
        intermediate_dim=53248,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        rope=Llama3RotaryConfig(),
        gradient_checkpointing=policy,
        cross_entropy_block_size=512,
    )
    spec = MeshSpec.of(data=4, model=8, group=4)
    mappings = mappings_for(config, spec, heads=("model", "group"), residual={"position": "model"})
    program = program_for(gradients, config, 128256, (8, 4096), mappings)
    text = program.lower(spec.abstract(), platform="tpu").as_text()
    assert "8x4096x128256" not in text and '"model"' in text


def test_without_mappings_the_model_runs_unconstrained(devices):
    config = tiny_config()
    nothing = Mappings(params=AxisMapping(), compute=AxisMapping())
    found = run_on(logprobs, config, random_arrays(config), TOKENS, MeshSpec.of(x=2), nothing, devices).array
    expected = run(config, devices, function=logprobs).array
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_a_compiled_program_speaks_of_the_models_parts(scan):
    """Every matmul of forward and backward pass, and every norm, is found under the name of its module."""
    config = tiny_config(scan_layers=scan, use_qk_norm=True)

    def gradient(model, ids):
        return eqx.filter_value_and_grad(lambda m: mean_loss(m, ids, next_tokens(ids)).array)(model)

    program = program_for(gradient, config, VOCAB, (2, 24), Mappings())
    text = program.lower(MeshSpec.of(data=1).build(jax.devices()[:1])).compile().as_text()
    scopes = {parse_scope(name) for name in re.findall(r'op_name="([^"]*)"', text)}
    for during in ("forward", "backward"):
        found = {scope.module for scope in scopes if scope.during == during}
        for name in ("q_proj", "k_proj", "v_proj", "qk_norm", "rope", "attention", "o_proj"):
            assert f"layers.self_attn.{name}" in found, (name, during)
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            assert f"layers.{name}" in found, (name, during)
        assert {"embeddings", "norm"} <= found and any(name.startswith("lm_head") for name in found), during
