"""Adapters of experts in both layouts: a pair for each expert, and one of all experts of a layer."""

import numpy as np
import pytest
from helpers.adapted_models import loaded, logits, read_adapter, write_adapter
from helpers.family_models import make_checkpoint
from safetensors.numpy import load_file, save_file

from haliax_ext.abstract import leaves, map_arrays
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.peft import plan_peft, write_peft
from levanter.models.adapters import target_groups

R, ALPHA, LAYERS = 3, 6, 3
SCALE = np.float32(ALPHA / R)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """(folder, model, its rules, factors by module and expert, logits with the merged weights)"""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("mixtral")
    make_checkpoint("mixtral", folder / "base")
    weights = load_file(folder / "base" / "model.safetensors")
    rng, factors = np.random.default_rng(3), {}
    for name in [each for each in weights if ".experts." in each]:
        rows, columns = weights[name].shape
        module = name.removesuffix(".weight")
        a, b = (rng.standard_normal(shape).astype(np.float32) * np.float32(0.2) for shape in ((R, columns), (rows, R)))
        factors[module] = (a, b)
        weights[name] = weights[name] + SCALE * (b @ a)
    (folder / "merged").mkdir()
    for file in (folder / "base").iterdir():
        (folder / "merged" / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    _, _, merged = loaded(folder / "merged")
    _, rules, model = loaded(folder / "base")
    return folder, model, rules, factors, logits(merged)


def one_each(factors):
    """As transformers 4 has them."""
    return {
        f"{module}.lora_{which}": x for module, pair in factors.items() for which, x in zip("AB", pair, strict=True)
    }


def all_in_one(factors, layer_factors=None):
    """As transformers 5 has them: gate and up in one of twice the rank, B in two blocks."""
    found = {}
    for layer in range(LAYERS):
        old = f"model.layers.{layer}.block_sparse_moe.experts"
        count = sum(f"{old}." in module and module.endswith(".w1") for module in factors)
        gate, up, down = ([factors[f"{old}.{n}.{w}"] for n in range(count)] for w in ("w1", "w3", "w2"))
        name = f"model.layers.{layer}.mlp.experts"
        found[f"{name}.base_layer.lora_A"] = np.concatenate(
            [x for g, u in zip(gate, up, strict=True) for x in (g[0], u[0])]
        )
        zero = np.zeros_like(gate[0][1])
        b = np.stack(
            [np.block([[g[1], zero], [zero, u[1]]]) for g, u in zip(gate, up, strict=True)], axis=-1
        )  # [rows, ranks, experts]
        found[f"{name}.base_layer.lora_B"] = np.ascontiguousarray(b.reshape(b.shape[0], -1))
        found[f"{name}.lora_A"] = np.concatenate([d[0] for d in down])
        b = np.stack([d[1] for d in down], axis=-1)
        found[f"{name}.lora_B"] = np.ascontiguousarray(b.reshape(b.shape[0], -1))
    return found


FUSED = {
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "target_modules": [],
    "rank_pattern": {r".*\.gate_up_proj": 2 * R},
    "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA},
}


@pytest.mark.parametrize("layout", ["one each", "all in one"])
def test_both_layouts_are_read(mixtral, layout, tmp_path):
    _, model, rules, factors, merged = mixtral
    if layout == "one each":
        write_adapter(tmp_path / "adapter", one_each(factors), r=R, lora_alpha=ALPHA)
    else:
        write_adapter(tmp_path / "adapter", all_in_one(factors), r=R, lora_alpha=ALPHA, **FUSED)
    targets, adapters = read_adapter(tmp_path / "adapter", model, rules)
    ranks = {group.members[0].name: group.rank for group in targets}
    wide = R if layout == "one each" else 2 * R
    assert ranks == {"gate_proj": wide, "up_proj": wide, "down_proj": R}
    found = logits(adapters.bound_to(model))
    assert np.abs(found - logits(model)).max() > 0.05, "the adapter must matter for this to say anything"
    np.testing.assert_allclose(found, merged, atol=1e-4 * np.abs(merged).max(), rtol=0)
    if layout == "one each":
        _written(mixtral, targets, adapters, tmp_path)


def _written(mixtral, targets, adapters, tmp_path):
    """What is written is all in one, number for number."""
    _, model, rules, factors, merged = mixtral
    arrays = {}
    map_arrays(lambda leaf, x: arrays.__setitem__(leaf.path, np.asarray(x)) or x, adapters)
    plan = plan_peft(targets, target_groups(model, rules), rules, leaves(adapters), use_rslora=False, base=None)
    write_peft(plan, arrays, tmp_path / "ours")
    found = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    expected = {f"base_model.model.{name}.weight": x for name, x in all_in_one(factors).items()}
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    assert set(plan.config.parameters) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    _, again = read_adapter(tmp_path / "ours", model, rules)
    np.testing.assert_allclose(logits(again.bound_to(model)), merged, atol=1e-4 * np.abs(merged).max(), rtol=0)


def test_factors_of_no_experts_of_the_model_are_refused(mixtral, tmp_path):
    _, model, rules, factors, _ = mixtral
    wrong = all_in_one(factors)
    name = "model.layers.1.mlp.experts.lora_A"
    wrong[name] = np.zeros((wrong[name].shape[0], 7), np.float32)
    write_adapter(tmp_path / "wrong", wrong, r=R, lora_alpha=ALPHA, **FUSED)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts: factors of .* are of no parameter of its experts"
    ):
        read_adapter(tmp_path / "wrong", model, rules)
