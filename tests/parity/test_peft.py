"""Adapters of the package `peft` (extra `judges`): its files read by us, ours by it. Skipped where it is absent."""

import numpy as np
import pytest
from helpers.adapted_models import TOKENS, loaded, logits, read_adapter
from helpers.family_models import make_checkpoint

from haliax_ext.abstract import leaves, map_arrays, with_arrays
from levanter.compat.hf.peft import plan_peft, write_peft
from levanter.models.adapters import Adapters, LoraConfig, find_targets, target_groups

peft = pytest.importorskip("peft")
# It says so of patterns that it makes itself, for parameters of experts.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
torch = pytest.importorskip("torch")

TARGETS = {
    "llama": None,
    "gpt2": None,
    "gpt_neox": None,
    "phi3": None,
    "gemma3": None,
    "olmo2": None,
    "qwen3": None,
    "mixtral": None,
    "qwen3_moe": None,
}


EXPERTS = ("mixtral", "qwen3_moe")


def randomize(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def their_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


RANKS_BY_PATTERN = {"use_rslora": True, "rank_pattern": {"down_proj": 2}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, {}, id=f"{name}-plain") for name in TARGETS),
        pytest.param("llama", RANKS_BY_PATTERN, id="llama-rs"),
    ],
)
def test_files_of_peft_are_read_and_written_back(name, options, tmp_path):
    theirs = make_checkpoint(name, tmp_path / "base")
    _, rules, model = loaded(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=TARGETS[name] or "all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=name == "gpt2",
        **options,
    )
    adapted = peft.get_peft_model(theirs, config)
    randomize(adapted)
    expected = their_logits(adapted)
    adapted.save_pretrained(tmp_path / "theirs")
    targets, adapters = read_adapter(tmp_path / "theirs", model, rules)
    found = logits(adapters.bound_to(model))
    assert np.abs(found - logits(model)).max() > 0.1, "the adapter must matter for this to say anything"
    close(found, expected)
    _written_is_read_by_peft(name, model, rules, targets, adapters, tmp_path, options, expected)


def _written_is_read_by_peft(name, model, rules, targets, adapters, tmp_path, options, expected):
    arrays = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, x) or x, adapters)
    rslora = options.get("use_rslora", False)
    plan = plan_peft(targets, target_groups(model, rules), rules, leaves(adapters), use_rslora=rslora, base=None)
    write_peft(plan, arrays, tmp_path / "ours")
    _, again = read_adapter(tmp_path / "ours", model, rules)
    if name in EXPERTS:
        # Gate and up of an expert share what they read there: what comes back is the same function, of another rank.
        close(logits(again.bound_to(model)), expected)
    else:
        map_arrays(lambda leaf, x: np.testing.assert_array_equal(x, arrays[leaf.path]) or x, again)
    close(their_logits(_read_by_peft(tmp_path)), expected)


def _read_by_peft(tmp_path):
    """The base with the adapter in `ours`; every tensor of the file is used, and every factor comes from it."""
    import transformers
    from safetensors.numpy import load_file

    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
    )
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    wanted = set(peft.get_peft_model_state_dict(again))
    assert wanted == set(load_file(tmp_path / "ours" / "adapter_model.safetensors"))
    return again


def test_a_part_of_a_fused_matrix_is_zero_elsewhere(tmp_path):
    """An adapter of k alone in GPT-NeoX, where q, k and v lie in turns in one matrix."""
    make_checkpoint("gpt_neox", tmp_path / "base")
    _, rules, model = loaded(tmp_path / "base")
    every = target_groups(model, rules)
    config = LoraConfig(r=3, target_modules=["k_proj"], zero_init_b=True, a_init_mode="random")
    import jax

    targets = find_targets(every, config)
    tree = Adapters.init(targets, config, key=jax.random.PRNGKey(0))
    rng = np.random.default_rng(0)
    arrays = {leaf.path: rng.standard_normal(leaf.shape).astype(np.float32) * 0.2 for leaf in leaves(tree)}
    adapters = with_arrays(tree, arrays)
    plan = plan_peft(targets, every, rules, leaves(adapters), use_rslora=False, base=None)
    write_peft(plan, arrays, tmp_path / "ours")
    expected = logits(adapters.bound_to(model))
    assert np.abs(expected - logits(model)).max() > 0.1
    close(their_logits(_read_by_peft(tmp_path)), expected)
