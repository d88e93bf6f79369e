"""Parameter and operation counts of every family against `transformers` and by hand, and how layers are scanned."""

import functools
import math
import re
from pathlib import Path

import haliax as hax
import jax
import pytest
from helpers.published_configs import GEMMA3_27B_WITH_VISION, PARAMETERS, PUBLISHED

from haliax_ext.abstract import abstract, leaves
from levanter.compat.hf.config_bridge import read_config
from levanter.models import Gemma2Config, Gemma3Config, MistralConfig, QwenConfig, SmolLM3Config
from levanter.models.decoder.scan_layout import scan_runs
from levanter.models.flops import flops_per_token
from levanter.models.registry import BUILTIN, family_named

DOCS = Path(__file__).parents[3] / "docs/porting-models.md"


@functools.cache
def ours(name: str):
    return read_config(PUBLISHED[name]).config


def described(name: str) -> dict:
    """The published file in the words of most families."""
    document = dict(PUBLISHED[name])
    words = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    document |= {common: document[own] for common, own in words.items() if own in document}
    document.setdefault("intermediate_size", 4 * document["hidden_size"])
    document.setdefault("num_key_value_heads", document["num_attention_heads"])
    return document


def transformers_parameters(name: str) -> int:
    torch = pytest.importorskip("torch")
    import transformers

    config = transformers.AutoConfig.for_model(**PUBLISHED[name])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).num_parameters()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_those_of_transformers(name):
    config = ours(name)
    Vocab = hax.Axis("vocab", config.vocab_size)
    module = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    held = leaves(module)
    count = sum(leaf.nbytes // leaf.dtype.itemsize for leaf in held)
    assert count == transformers_parameters(name) == PARAMETERS.get(name, count)
    # Matrices multiply each token once; a table that is not the head only looks rows up.
    vectors = sum(leaf.nbytes // 4 for leaf in held if "norm.weight" in leaf.path or leaf.path.endswith(".bias"))
    vectors += config.max_Pos.size * config.hidden_dim if config.learned_positions else 0
    table = 0 if config.tie_word_embeddings else Vocab.size * config.hidden_dim
    # Experts that a token does not go to.
    idle = 0
    if (experts := PUBLISHED[name].get("num_local_experts", PUBLISHED[name].get("num_experts"))) is not None:
        idle = config.num_layers * (experts - config.num_experts_per_tok) * 3 * config.hidden_dim * config.Mlp.size
    assert count - vectors - table - idle == config.matmul_parameters(Vocab.size)


def operations_by_hand(document, *, context: int) -> tuple[float, float]:
    """Forward operations per token in products with weights, and in attention under a causal mask."""
    hidden, heads, kv = (document[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head, layers = document.get("head_dim", hidden // heads), document["num_hidden_layers"]
    weights = 2 * hidden * document["vocab_size"]
    pairs = 0
    for layer in range(layers):
        weights += 2 * hidden * head * (heads + 2 * kv) + 2 * heads * head * hidden
        gated = document["model_type"] not in ("gpt2", "gpt_neox")
        mlp = (3 if gated else 2) * 2 * hidden * document.get("moe_intermediate_size", document["intermediate_size"])
        experts = document.get("num_local_experts", document.get("num_experts"))
        weights += mlp if experts is None else document["num_experts_per_tok"] * mlp + 2 * hidden * experts
        windowed = {
            "mistral": True,
            "phi3": True,
            "gemma2": layer % 2 == 0,
            "gemma3_text": layer % 6 != 5,
            "olmo3": layer % 4 != 3,
        }.get(document["model_type"], False)
        window = document["sliding_window"] if windowed else context
        seen = sum(min(at + 1, window) for at in range(context))
        pairs += seen * 4 * heads * head
    return weights, pairs / context


@pytest.mark.parametrize("name", PUBLISHED)
def test_operations_are_those_counted_by_hand(name):
    config = ours(name)
    for context in (300, 9000):
        weights, attention = operations_by_hand(described(name), context=context)
        found = flops_per_token(config, vocab_size=config.vocab_size, context_length=context, attention="causal")
        assert found.weights == weights
        assert found.attention == pytest.approx(attention, rel=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_in_the_docs_says_so(name):
    config = ours(name)
    flops = [
        flops_per_token(config, vocab_size=config.vocab_size, context_length=length, attention="causal")
        for length in (2048, 8192, 32768)
    ]
    Vocab = hax.Axis("vocab", config.vocab_size)
    held = leaves(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))))
    kind = type(config).get_choice_name(type(config))
    cells = [name, f"`{kind}`", f"{sum(math.prod(leaf.shape) for leaf in held):,}", f"{flops[0].weights / 1e9:,.2f}"]
    row = "| " + " | ".join([*cells, *(f"{each.attention / 1e9:,.2f}" for each in flops)]) + " |"
    assert row in DOCS.read_text().splitlines()


# The 12 layers of nanochat differ in windows and tables, with a cut behind the seventh; deeper models repeat.
ALTERNATING = {
    "gemma2": [(2, 13)],
    "gemma3": [(6, 4), (1, 2)],
    "olmo3": [(4, 8)],
    "smollm3": [(4, 9)],
    "nanochat": [(1, 1)] * 12,
}
"""Families whose default layers differ: (places in a period, periods) of each run. Others have one run of one place."""


def default_runs(name: str):
    config = family_named(name).config_class()
    return config, ALTERNATING.get(name, [(1, config.num_layers)])


SHAPES = {
    **{name: default_runs(name) for name in BUILTIN},
    "gemma3_4b": (Gemma3Config(num_layers=34), [(6, 5), (1, 4)]),
    "gemma3_12b": (Gemma3Config(num_layers=48), [(6, 8)]),
    "gemma3_27b": (Gemma3Config(num_layers=62), [(6, 10), (1, 2)]),
    "qwen_late": (QwenConfig(use_sliding_window=True, sliding_window=9, max_window_layers=28), [(1, 28), (1, 4)]),
    "by_list": (
        Gemma2Config(num_layers=5, layer_types=("full_attention",) * 3 + ("sliding_attention", "full_attention")),
        [(1, 3), (1, 1), (1, 1)],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_runs_are_the_layers_in_order(name):
    config, expected = SHAPES[name]
    runs = config.runs
    assert [(len(run.places), run.periods) for run in runs] == expected
    assert tuple(spec for run in runs for _ in range(run.periods) for spec in run.places) == config.layers
    assert [run.start for run in runs] == [sum(r.layers for r in runs[:n]) for n in range(len(runs))]


@pytest.mark.parametrize("name", SHAPES)
def test_every_layer_of_a_checkpoint_is_read_once(name):
    config, _ = SHAPES[name]
    Vocab = hax.Axis("vocab", 64)
    held = leaves(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))))
    rules = config.weight_rules(Vocab)
    rules.check(held)
    table = rules.by_target()
    names = [source for leaf in held for source in table[leaf.path].source_names(leaf)]
    if any(".q_proj." in source for source in names):  # a fused projection is read once by each of its parts
        assert len(names) == len(set(names))
    layers_by_part: dict[str, set[int]] = {}
    for number, part in re.findall(r"\b(?:layers|h)\.(\d+)\.(\S+)", "\n".join(names)):
        layers_by_part.setdefault(part, set()).add(int(number))
    assert len(layers_by_part) >= 6  # two projections of each sublayer, and its norms
    if name == "nanochat":  # every second layer has a table
        for part in [part for part in layers_by_part if "value_embedding" in part]:
            assert layers_by_part.pop(part) == set(range(1, 12, 2))
    assert all(numbers == set(range(config.num_layers)) for numbers in layers_by_part.values()), layers_by_part
    # The layer of a leaf is the one whose window it has.
    for run in config.runs:
        for place, spec in enumerate(run.places):
            for period in range(run.periods):
                assert config.layers[run.start + period * len(run.places) + place] == spec


def test_a_long_period_is_not_looked_for():
    layers = Gemma3Config(num_layers=40, sliding_window_pattern=20).layers
    assert [(len(run.places), run.periods) for run in scan_runs(layers)] == [(1, 19), (1, 1), (1, 19), (1, 1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gemma2Config(num_layers=2, layer_types=("full", "sliding_attention")), "layer_types has 'full'"),
        (lambda: Gemma2Config(num_layers=2, layer_types=("full_attention",)), "1 entries for model.num_layers 2"),
        (lambda: Gemma2Config(final_logit_softcapping=-1.0), "final_logit_softcapping: must be positive, got -1.0"),
        (lambda: MistralConfig(sliding_window=0), "model.sliding_window: must be at least 1, got 0"),
        (lambda: SmolLM3Config(no_rope_layers=(1, 0)), "no_rope_layers has 2 entries for model.num_layers 36"),
        (
            lambda: Gemma2Config(attn_backend="jax_native").for_platform("cpu", compute_dtype="float32"),
            "jax_native: the model soft-caps its attention scores",
        ),
        (
            lambda: Gemma2Config(attn_backend="cudnn").for_platform("gpu", compute_dtype="bfloat16"),
            "cudnn: the model soft-caps its attention scores",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_a_soft_cap_is_taken_into_account_by_the_choice_of_a_kernel():
    chosen, (reason,) = Gemma2Config().for_platform("tpu", compute_dtype="bfloat16", length=4096)
    assert chosen.attn_backend == "splash" and "scores stay on the chip" in reason
    chosen, (reason,) = Gemma2Config(attn_backend="nvte").for_platform("gpu", compute_dtype="bfloat16", length=4096)
    assert chosen.attn_backend == "blockwise" and "soft-caps" in reason


def test_the_text_model_of_one_that_sees_is_found():
    bridged = read_config(GEMMA3_27B_WITH_VISION)
    alone = ours("Gemma 3 27B")
    assert not bridged.findings and bridged.config == alone
    assert alone.rope_local_base_freq == 10_000.0 and alone.rope.theta == 1e6 and alone.vocab_size == 262_208
    rules = alone.weight_rules(hax.Axis("vocab", 262_208))
    assert "language_model.model.layers.3.mlp.up_proj.weight" in list(
        rules.spellings("model.layers.3.mlp.up_proj.weight")
    )
