"""Per-token log-probabilities equal `transformers` (torch, float32) for every variant of Llama, on every mesh."""

import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, mappings_for, named_arrays, run_on
from helpers.losses import LossMean, sequence_sums

from haliax_ext.errors import IndivisibleError
from haliax_ext.meshspec import MeshSpec
from levanter.compat.hf.config_bridge import read_config
from levanter.layers.rotary import (
    DefaultRotaryConfig,
    DynamicRotaryConfig,
    LinearRotaryConfig,
    Llama3RotaryConfig,
    RotaryConfig,
    YarnRotaryConfig,
)
from levanter.models import LlamaConfig
from levanter.models.scoring import has_target, next_tokens, token_logprobs

BATCH, LENGTH = 8, 56
CONTEXT = 32
"""Original context of the RoPE scalings: shorter than the sequences."""


@dataclass(frozen=True)
class Variant:
    """Changes to a config.json, and by hand what our config must have for them."""

    hf: dict
    ours: dict
    rope: RotaryConfig = DefaultRotaryConfig()


def rope5(kind: str, **values) -> dict:
    """The transformers-5 spelling."""
    return {"rope_parameters": {"rope_type": kind, **values}}


def rope4(kind: str, theta: float, **values) -> dict:
    """The transformers-4 spelling."""
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **values}}


VARIANTS: dict[str, Variant] = {
    "gqa2": Variant(hf={}, ours={}),
    "mqa": Variant(hf={"num_key_value_heads": 1}, ours={"num_kv_heads": 1}),
    "mha": Variant(hf={"num_key_value_heads": 8}, ours={"num_kv_heads": 8}),
    "tied": Variant(hf={"tie_word_embeddings": True}, ours={"tie_word_embeddings": True}),
    "attention_bias": Variant(hf={"attention_bias": True}, ours={"attention_bias": True}),
    "all_biases": Variant(
        hf={"attention_bias": True, "mlp_bias": True}, ours={"attention_bias": True, "mlp_bias": True}
    ),
    "head_size_24": Variant(hf={"head_dim": 24}, ours={"head_dim": 24}),
    "gelu": Variant(hf={"hidden_act": "gelu"}, ours={"activation_function": "gelu"}),
    "theta": Variant(hf={"rope_theta": 5e5}, ours={}, rope=DefaultRotaryConfig(theta=5e5)),
    "linear": Variant(
        hf=rope5("linear", rope_theta=1e4, factor=2.5), ours={}, rope=LinearRotaryConfig(theta=1e4, factor=2.5)
    ),
    "linear_v4": Variant(hf=rope4("linear", 2e4, factor=2.0), ours={}, rope=LinearRotaryConfig(theta=2e4, factor=2.0)),
    "dynamic": Variant(
        hf={"max_position_embeddings": CONTEXT} | rope5("dynamic", rope_theta=1e4, factor=2.0),
        ours={},
        rope=DynamicRotaryConfig(theta=1e4, factor=2.0, original_max_position_embeddings=CONTEXT),
    ),
    "llama3": Variant(
        hf=rope5(
            "llama3",
            rope_theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=CONTEXT,
        ),
        ours={},
        rope=Llama3RotaryConfig(theta=500.0, original_max_position_embeddings=CONTEXT),
    ),
    "llama3_v4": Variant(
        hf=rope4(
            "llama3",
            5e5,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=CONTEXT,
        ),
        ours={},
        rope=Llama3RotaryConfig(factor=32.0, original_max_position_embeddings=CONTEXT),
    ),
    "yarn": Variant(
        hf=rope5("yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=CONTEXT),
        ours={},
        rope=YarnRotaryConfig(factor=4.0, original_max_position_embeddings=CONTEXT),
    ),
    "yarn_mscale": Variant(
        hf=rope5(
            "yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=CONTEXT,
            mscale=1.3,
            mscale_all_dim=0.7,
            beta_fast=8.0,
            beta_slow=0.5,
            truncate=False,
        ),
        ours={},
        rope=YarnRotaryConfig(
            factor=4.0,
            original_max_position_embeddings=CONTEXT,
            mscale=1.3,
            mscale_all_dim=0.7,
            beta_fast=8.0,
            beta_slow=0.5,
            truncate=False,
        ),
    ),
    "yarn_factor_v4": Variant(
        hf=rope4("yarn", 1e4, factor=4.0, original_max_position_embeddings=CONTEXT, attention_factor=1.25),
        ours={},
        rope=YarnRotaryConfig(factor=4.0, original_max_position_embeddings=CONTEXT, attention_factor=1.25),
    ),
}

MESHES: dict[str, MeshSpec] = {
    "1x1": MeshSpec.of(data=1, model=1),
    "8x1": MeshSpec.of(data=8, model=1),
    "4x2": MeshSpec.of(data=4, model=2),
    "2x4": MeshSpec.of(data=2, model=4),
    "1x8": MeshSpec.of(data=1, model=8),
    "group": MeshSpec.of(data=1, model=2, group=4),
}

DIAGONAL = [("gqa2", mesh) for mesh in ("1x1", "2x4", "group")] + [
    # Llama 3's way to say the same before transformers 5 is read in test_config_bridge.py, and linear_v4 computes here.
    (variant, list(MESHES)[n % len(MESHES)])
    for n, variant in enumerate(VARIANTS)
    if variant not in ("gqa2", "llama3_v4")
]
"""Every variant, and every mesh with some of them."""
REST = [(variant, mesh) for variant in VARIANTS for mesh in MESHES if (variant, mesh) not in DIAGONAL]


@cache
def reference(name: str) -> tuple[LlamaConfig, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Our config, Hugging Face's tensors, the tokens, and torch's log-probabilities of the next tokens."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import LlamaForCausalLM

    variant = VARIANTS[name]
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of unusual RoPE values
        hf_config = HfLlamaConfig(**(shape | variant.hf), attn_implementation="eager")
        model = LlamaForCausalLM(hf_config).eval().float()
    rng = np.random.default_rng(sorted(VARIANTS).index(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
            parameter.copy_(1 + 0.2 * noise if key.endswith("norm.weight") else 0.2 * noise)
        tokens = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
        logits = model(torch.from_numpy(tokens).long()).logits.double()
        logprobs = torch.log_softmax(logits, dim=-1)[:, :-1]
        target = torch.from_numpy(tokens[:, 1:]).long()[..., None]
        found = logprobs.gather(-1, target)[..., 0].numpy()
    tensors = {key: value.numpy() for key, value in model.state_dict().items()}
    document = {"model_type": "llama", "hidden_act": "silu"} | shape | variant.hf
    bridged = read_config(document)
    assert not bridged.findings or name.startswith("yarn"), [str(f) for f in bridged.findings]
    config = bridged.config
    for field, value in {"rope": variant.rope, **variant.ours}.items():
        assert getattr(config, field) == value, field
    return config, tensors, tokens, np.pad(found, ((0, 0), (0, 1)))


def score(model, tokens):
    return token_logprobs(model, tokens, next_tokens(tokens), chunk=20)


def check(name: str, mesh_name: str, devices) -> None:
    config, tensors, tokens, expected = reference(name)
    spec = MESHES[mesh_name]
    heads = ("model", "group") if mesh_name == "group" else ("model",)
    if name != "mqa" and name != "mha" and mesh_name == "1x8":
        with pytest.raises(IndivisibleError, match=r"8 attention heads = 2 kv_head × 4 q_heads_per_group") as error:
            mappings_for(config, spec, heads=heads)
        assert "axes: {model: 2, group: 4}" in str(error.value)
        spec, heads = MeshSpec.of(data=1, model=2, group=4), ("model", "group")
    mappings = mappings_for(config, spec, heads=heads)
    arrays = named_arrays(config, tensors)
    found = run_on(score, config, arrays, tokens, spec, mappings, devices).array
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    assert np.std(expected[:, :-1]) > 0.5, "the model's predictions must differ for this to say anything"


@pytest.mark.parametrize(("variant", "mesh"), DIAGONAL)
def test_log_probabilities_equal_transformers(variant, mesh, devices):
    check(variant, mesh, devices)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "mesh"), REST)
def test_log_probabilities_equal_transformers_on_every_mesh(variant, mesh, devices):
    check(variant, mesh, devices)


def test_mean_loss_does_not_depend_on_the_batch_size(devices):
    config, tensors, tokens, expected = reference("gqa2")
    arrays = named_arrays(config, tensors)
    spec = MeshSpec.of(data=1, model=2)
    mappings = mappings_for(config, spec)

    def sums(model, ids):
        return sequence_sums(score(model, ids), has_target(next_tokens(ids)))

    losses = []
    for size in (1, 4, 8):
        mean = LossMean()
        for start in range(0, BATCH, size):
            batch = tokens[start : start + size]
            total, count = run_on(sums, config, arrays, batch, spec, mappings, devices)
            mean += LossMean.of(total.array, count.array)
        assert mean.count == BATCH * (LENGTH - 1)
        losses.append(mean.loss)
    assert max(losses) - min(losses) < 1e-6
    assert losses[0] == pytest.approx(-expected[:, :-1].mean(), abs=1e-5)
