"""Operation counts against published sizes, precision strings, and the glossary of axis names."""

from pathlib import Path

import haliax as hax
import jax.numpy as jnp
import pytest
from helpers.llama_on_mesh import abstract_model, tiny_config

import levanter.models.axes as axes
from haliax_ext.abstract import leaves
from levanter.models import LlamaConfig
from levanter.models.flops import flops_per_token
from levanter.models.precision import Precision

pytestmark = pytest.mark.quick

LLAMA2_7B = LlamaConfig()
LLAMA31_405B = LlamaConfig(
    hidden_dim=16384, intermediate_dim=53248, num_layers=126, num_heads=128, num_kv_heads=8, max_seq_len=131072
)


def test_published_sizes():
    """6,738,415,616 and 405,853,388,800 parameters are what the checkpoints' index files add up to."""
    for config, vocab, published in ((LLAMA2_7B, 32000, 6_738_415_616), (LLAMA31_405B, 128256, 405_853_388_800)):
        norms = (2 * config.num_layers + 1) * config.hidden_dim
        table = vocab * config.hidden_dim
        assert config.matmul_parameters(vocab) + table + norms == published


def test_flops_follow_the_published_formulas():
    found = flops_per_token(LLAMA2_7B, vocab_size=32000, context_length=4096, attention="full")
    weights = LLAMA2_7B.matmul_parameters(32000)
    assert found.training == 6 * weights + 12 * 32 * 32 * 128 * 4096
    assert found.scoring == 2 * weights + 4 * 32 * 32 * 128 * 4096
    causal = flops_per_token(LLAMA2_7B, vocab_size=32000, context_length=4096, attention="causal")
    assert causal.weights == found.weights
    assert causal.attention == sum(4 * 32 * 32 * 128 * (t + 1) for t in range(4096)) / 4096


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32", "p=float32,c=float32,o=float32,m=highest"),
        ("bfloat16", "p=bfloat16,c=bfloat16,o=bfloat16,m=default"),
        ("p=f32,c=bf16", "p=float32,c=bfloat16,o=bfloat16,m=default"),
        ("c=f16", "p=float32,c=float16,o=float16,m=default"),
        ("compute=bfloat16, params=float32, output=f32", "p=float32,c=bfloat16,o=float32,m=default"),
        ("p=f32,c=f32,m=default", "p=float32,c=float32,o=float32,m=default"),
    ],
)
def test_policies_are_read(text, expected):
    policy = Precision.parse(text)
    assert str(policy) == expected
    assert Precision.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "text", ["f32", "bfloat16", "p=f32,c=bf16", "params=float32,compute=half,output=full", "c=bf16"]
)
def test_policies_mean_what_jmp_means(text):
    jmp = pytest.importorskip("jmp")
    theirs, ours = jmp.get_policy(text.replace("half", "float16").replace("full", "float32")), Precision.parse(text)
    assert (ours.params, ours.compute, ours.output) == (
        jnp.dtype(theirs.param_dtype),
        jnp.dtype(theirs.compute_dtype),
        jnp.dtype(theirs.output_dtype),
    )


def test_policies_that_mean_nothing_are_refused_whole():
    with pytest.raises(ValueError) as error:
        Precision.parse("p=f23,q=bf16,c,m=best")
    for part in ("'f23' is not a dtype", "did you mean f32", "'q' is not a key", "'c' is not of the form", "'best'"):
        assert part in str(error.value)


def test_casting_touches_floating_arrays_only():
    tree = {"w": hax.zeros(hax.Axis("embed", 2), dtype=jnp.float32), "n": jnp.arange(3), "s": "text"}
    cast = Precision.parse("p=f32,c=bf16").cast_to_compute(tree)
    assert cast["w"].dtype == jnp.bfloat16 and cast["n"].dtype == jnp.int32 and cast["s"] == "text"


def test_the_glossary_is_rendered():
    path = Path(axes.__file__).with_name("AXES.md")
    assert path.read_text() == axes.glossary(), "render AXES.md again: it is axes.glossary()"


def test_every_axis_of_every_model_is_in_the_glossary():
    everything = tiny_config(use_bias=True, use_qk_norm=True, hybrid_norm=True, input_embedding_norm=True)
    used = {name for leaf in leaves(abstract_model(everything)) for name in leaf.names}
    assert used <= set(axes.KNOWN_AXES)
    assert used == set(everything.axes) | {"vocab"}
    assert set(axes.ALIASES.values()) <= set(axes.KNOWN_AXES)
    assert not set(axes.ALIASES) & set(axes.KNOWN_AXES)
    assert {part for parts in axes.COMPOSITES.values() for part in parts} <= set(axes.KNOWN_AXES)
