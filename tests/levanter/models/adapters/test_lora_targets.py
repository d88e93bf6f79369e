"""Which projections get an adapter, which share a factor, and how many parameters that makes."""

import json
import math

import haliax as hax
import jax
import pytest

from haliax_ext.abstract import abstract, leaves
from levanter.commands.train.lm.lora_config import LoraLmConfig
from levanter.compat.hf.config_bridge import read_config
from levanter.config import load
from levanter.layers.low_rank import LowRank
from levanter.models.adapters import AdapterError, Adapters, LoraConfig, find_targets, target_groups
from levanter.models.llama.config import LlamaConfig

BEGINS = dict(zero_init_b=True, a_init_mode="peft")


def of(config):
    """(abstract model, its groups)"""
    Vocab = hax.Axis("vocab", config.vocab_size)
    model = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    return model, target_groups(model, config.weight_rules(Vocab))


def llama(hidden, mlp, layers, heads, vocab=128_256):
    return LlamaConfig(
        hidden_dim=hidden,
        intermediate_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        vocab_size=vocab,
    )


LLAMA_8B, LLAMA_70B = llama(4096, 14336, 32, 32), llama(8192, 28672, 80, 64)
TINY = llama(64, 96, 2, 8, vocab=61)


@pytest.mark.parametrize(
    ("model", "r", "count"), [(LLAMA_8B, 16, 41_943_040), (LLAMA_8B, 64, 167_772_160), (LLAMA_70B, 16, 207_093_760)]
)
def test_parameters_are_those_of_the_published_counts(model, r, count):
    _, groups = of(model)
    config = LoraConfig(r=r)
    targets = find_targets(groups, config)
    assert sorted(group.path.rsplit(".", 1)[-1] for group in targets) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    adapters = abstract(lambda: Adapters.init(targets, config, key=jax.random.PRNGKey(0)))
    assert sum(math.prod(leaf.shape) for leaf in leaves(adapters)) == count


def names(groups):
    return {group.path.rsplit(".", 1)[-1]: [member.name for member in group.members] for group in groups}


def published(model_type, **changes):
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=61)
    return read_config(
        {"model_type": model_type, "max_position_embeddings": 64, "num_key_value_heads": 4, **sizes, **changes}
    ).config


def test_parts_of_one_matrix_share_a_factor():
    _, groups = of(published("phi3", rms_norm_eps=1e-5, pad_token_id=0))
    assert names(find_targets(groups, LoraConfig())) == {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "o_proj": ["o_proj"],
        "down_proj": ["down_proj"],
    }
    # A part alone has its rows of B, and the factor A of its matrix.
    (only,) = find_targets(groups, LoraConfig(target_modules=["q_proj"], r=3))
    adapters = abstract(lambda: Adapters.init((only,), LoraConfig(), key=jax.random.PRNGKey(0)))
    found = {leaf.path.rsplit("qkv_proj.", 1)[-1]: leaf for leaf in leaves(adapters)}
    assert found["a.weight"].axes == (("layers", 2), ("low_rank", 3), ("embed", 64))
    assert found["b.q_proj.weight"].names == ("layers", "kv_head", "q_heads_per_group", "head_size", "low_rank")
    assert found.keys() == {"a.weight", "b.q_proj.weight"}


def test_experts_are_adapted_and_routers_when_they_are_named():
    _, groups = of(published("mixtral", num_local_experts=4, num_experts_per_tok=2))
    assert "router" not in names(find_targets(groups, LoraConfig()))
    by_name = {group.path.rsplit(".", 1)[-1]: group for group in find_targets(groups, LoraConfig(r=4))}
    assert [axis.name for axis in by_name["gate_proj"].copies] == ["layers", "expert"]
    (router,) = find_targets(groups, LoraConfig(target_modules=["router"], r=2))
    assert [axis.name for axis in router.copies] == ["layers"] and router.members[0].Out[0].name == "expert"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (dict(target_modules=["q_proj", "v_proj"]), {"q_proj", "v_proj"}),
        (dict(target_modules=["self_attn"]), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (dict(target_modules=["**.mlp"]), {"gate_proj", "up_proj", "down_proj"}),
        (dict(target_modules=r".*\.[qk]_proj"), {"q_proj", "k_proj"}),
        (dict(exclude_modules=["mlp"]), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (dict(exclude_modules=["lm_head", "o_proj", "**.mlp"]), {"q_proj", "k_proj", "v_proj"}),
    ],
)
def test_names_patterns_and_expressions(config, expected):
    _, groups = of(TINY)
    assert names(find_targets(groups, LoraConfig(**config))).keys() == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"in": "embed"}, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ({"out": ["mlp"]}, {"gate_proj", "up_proj"}),
        ({"out": "embed"}, {"o_proj", "down_proj"}),
        ({"in": "embed", "out": ["kv_head", "head_size"]}, {"q_proj", "k_proj", "v_proj"}),
        ({"in": "mlp"}, {"down_proj"}),
    ],
)
def test_axes_name_projections(asked, expected):
    """Those whose inputs, or results, have all of them; the head and routers want to be named."""
    _, groups = of(TINY)
    assert set(names(find_targets(groups, LoraConfig(target_modules=asked, r=4)))) == expected
    others = set(names(find_targets(groups, LoraConfig(r=4)))) - expected
    assert set(names(find_targets(groups, LoraConfig(exclude_modules=asked, r=4)))) == others
    read = load(LoraLmConfig, ["--initialize_from_hf", "x", "--lora.target_modules", json.dumps(asked)]).lora
    assert read.target_modules == asked


def test_parts_of_a_group_are_named_by_axes():
    _, groups = of(published("mixtral", num_local_experts=4, num_key_value_heads=8))
    found = names(find_targets(groups, LoraConfig(target_modules={"in": ["embed"]}, r=2)))
    assert "router" not in found and {"gate_proj", "up_proj", "q_proj"} <= found.keys()


def test_axes_that_no_projection_has_are_refused():
    _, groups = of(TINY)
    with pytest.raises(
        AdapterError, match=r"no projection has the axes \{'in': 'embd'\}; `in` may be embed, head_size"
    ):
        find_targets(groups, LoraConfig(target_modules={"in": "embd"}))
    for wrong, says in (
        ({"from": "embed"}, "projections are named by `in`, `out` or both"),
        ({}, "projections are named by `in`, `out` or both"),
        ({"in": []}, r"target_modules.in: must be an axis or a list of axes, got \[\]"),
        ({"out": [3]}, r"target_modules.out: must be an axis or a list of axes, got \[3\]"),
    ):
        with pytest.raises(ValueError, match=says):
            LoraConfig(target_modules=wrong)


def test_the_checkpoint_s_names_are_names():
    _, groups = of(published("gpt2", n_embd=64, n_head=8, n_layer=2, n_positions=64, n_inner=None))
    assert names(find_targets(groups, LoraConfig(target_modules=["c_attn"]))) == {
        "c_attn": ["q_proj", "k_proj", "v_proj"]
    }
    assert names(find_targets(groups, LoraConfig(target_modules=["mlp.c_proj"]))) == {"down_proj": ["down_proj"]}


def test_patterns_of_ranks_and_alpha():
    _, groups = of(TINY)
    config = LoraConfig(r=4, alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"mlp": 16}, use_rslora=True, **BEGINS)
    found = {group.path.rsplit(".", 1)[-1]: group for group in find_targets(groups, config)}
    assert (found["q_proj"].rank, found["k_proj"].rank) == (2, 4)
    assert (found["up_proj"].alpha, found["q_proj"].alpha) == (16, 8)
    adapters = Adapters.init(tuple(found.values()), config, key=jax.random.PRNGKey(0))
    scales = {path.rsplit(".", 1)[-1]: pair.scale for path, pair in adapters.pairs.items()}
    assert scales["q_proj"] == pytest.approx(8 / math.sqrt(2)) and scales["up_proj"] == pytest.approx(8)


def refused(**config):
    _, groups = of(TINY)
    with pytest.raises(AdapterError) as caught:
        find_targets(groups, LoraConfig(**config))
    return str(caught.value)


def test_everything_that_is_wrong_is_listed_with_the_nearest_names():
    said = refused(target_modules=["q_porj", "v_proj", "attention_gate"], exclude_modules=["dwn_proj"], r=100)
    assert "adapter.target_modules: 'q_porj' names no projection; did you mean q_proj" in said
    assert "adapter.target_modules: 'attention_gate' names no projection" in said
    assert "adapter.exclude_modules: 'dwn_proj' names no projection; did you mean down_proj" in said
    assert "adapter.r: rank 100 of transformer.layers.stacked.self_attn.v_proj is above 64" in said
    assert "is not a regular expression" in refused(target_modules="(")
    assert "did you mean the list [q_proj]" in refused(target_modules="q_proj")
    assert "adapter.target_modules is empty" in refused(target_modules=[])
    assert "'norm' is no projection, and gets no adapter; adapter.modules_to_save: [norm] trains it whole" in refused(
        target_modules=["norm"]
    )
    assert "no projection is left" in refused(exclude_modules=["self_attn", "mlp"])
    assert "is no projection, and gets no adapter" in refused(target_modules=["input_layernorm"])
    assert "adapter.rank_pattern: 'x_proj' names no projection" in refused(rank_pattern={"x_proj": 3})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (dict(zero_init_b=True), "both factors would begin as 0"),
        (dict(a_init_mode="random"), "neither factor would begin as 0"),
        (dict(dropout=1.0), "dropout: 1 leaves nothing of what A is multiplied by"),
        (dict(r=0), "r: must be at least 1"),
        (dict(alpha=0), "alpha: must be positive"),
        (dict(rank_pattern={"q_proj": 0}), "rank_pattern"),
    ],
)
def test_impossible_settings_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        LoraConfig(**config)


@pytest.mark.parametrize("begins", [{}, BEGINS, dict(zero_init_b=True, a_init_mode="random")])
def test_factors_begin_so_that_nothing_changes(begins):
    model, groups = of(TINY)
    config = LoraConfig(r=4, **begins)
    targets = find_targets(groups, config)
    adapters = Adapters.init(targets, config, key=jax.random.PRNGKey(1))
    for path, pair in adapters.pairs.items():
        a, bs = pair.a.weight.array, [each.weight.array for each in pair.b.values()]
        zero, other = ([a], bs) if not begins else (bs, [a])
        assert not any(x.any() for x in zero), path
        fan_in = 4 if not begins else math.prod(a.shape[2:])
        (drawn,) = other
        # Uniform between ±1/√n: a deviation of 1/√3n; a normal of 1/√n cut off at two deviations: 0.88/√n.
        expected = {"peft": 1 / math.sqrt(3)}.get(config.a_init_mode, 0.8796) / math.sqrt(fan_in)
        assert float(drawn.std()) == pytest.approx(expected, rel=0.1), path
        assert float(abs(drawn).max()) <= (1.0 if config.a_init_mode == "peft" else 2.0) / math.sqrt(fan_in) + 1e-6
    bound = adapters.bound_to(model)
    assert isinstance(bound.transformer.layers.stacked.mlp.up_proj.weight, LowRank)
    assert bound.lm_head is model.lm_head
