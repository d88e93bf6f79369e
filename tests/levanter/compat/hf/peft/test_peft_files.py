"""Files of `peft`, made by hand, against torch with merged weights; what is refused of them; ours written and read.

`tests/parity/test_peft.py` has the package itself for a judge, where it is installed.
"""

import json
import shutil

import numpy as np
import pytest
from helpers.adapted_models import TOKENS, loaded, logits, read_adapter, write_adapter
from helpers.family_models import make_checkpoint
from safetensors.numpy import load_file

from haliax_ext.abstract import leaves, map_arrays
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.export_dir import ExportPathError
from levanter.compat.hf.peft import open_peft, plan_peft, write_peft
from levanter.models.adapters.lora_targets import target_groups


def factors(model, modules: dict[str, int]) -> dict[str, np.ndarray]:
    """Random factors of modules of a torch model, by name; ranks by module."""
    rng = np.random.default_rng(3)
    found = {}
    for name, rank in modules.items():
        rows, columns = model.get_submodule(name).weight.shape
        found[f"{name}.lora_A"] = rng.standard_normal((rank, columns)).astype(np.float32) * 0.2
        found[f"{name}.lora_B"] = rng.standard_normal((rows, rank)).astype(np.float32) * 0.2
    return found


def merged_logits(model, tensors, scale) -> np.ndarray:
    """Logits of the torch model whose weights have the products added."""
    import torch

    with torch.no_grad():
        for name in {each.rsplit(".", 1)[0] for each in tensors}:
            product = tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
            model.get_submodule(name).weight += torch.from_numpy(scale(name) * product)
        return model(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """A tiny Phi-3, whose q, k and v are one matrix: (folder, architecture, rules, our model, an adapter's folder,
    logits with it)."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("phi3")
    theirs = make_checkpoint("phi3", folder)
    ranks = {}
    for n in range(3):
        ranks[f"model.layers.{n}.self_attn.qkv_proj"] = 4
        ranks[f"model.layers.{n}.mlp.gate_up_proj"] = 6
        ranks[f"model.layers.{n}.mlp.down_proj"] = 4
    tensors = factors(theirs, ranks)
    adapter = write_adapter(
        folder / "adapter",
        tensors,
        use_rslora=True,
        rank_pattern={"gate_up_proj": 6},
        alpha_pattern={"down_proj": 3.0},
        target_modules=["qkv_proj", "gate_up_proj", "down_proj"],
    )

    def scale(name):
        return (3.0 if name.endswith("down_proj") else 8.0) / np.sqrt(ranks[name])

    return folder, *loaded(folder), adapter, merged_logits(theirs, tensors, scale)


def test_an_adapter_of_fused_matrices_gives_the_merged_logits(phi3):
    _, _, rules, model, adapter, expected = phi3
    targets, adapters = read_adapter(adapter, model, rules)
    by_path = {group.path.rsplit(".", 1)[-1]: group for group in targets}
    assert {name: group.rank for name, group in by_path.items()} == {"qkv_proj": 4, "gate_up_proj": 6, "down_proj": 4}
    assert [member.name for member in by_path["qkv_proj"].members] == ["q_proj", "k_proj", "v_proj"]
    found = logits(adapters.bound_to(model))
    assert np.abs(found - logits(model)).max() > 0.1, "the adapter must matter for this to say anything"
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


def arrays_of(adapters):
    found = {}
    map_arrays(lambda leaf, x: found.__setitem__(leaf.path, x) or x, adapters)
    return found


def test_what_is_read_is_written_bit_for_bit(phi3, tmp_path):
    _, _, rules, model, adapter, _ = phi3
    targets, adapters = read_adapter(adapter, model, rules)
    every = target_groups(model, rules)
    plan = plan_peft(targets, every, rules, leaves(adapters), use_rslora=True, base="microsoft/phi")
    written = write_peft(plan, arrays_of(adapters), tmp_path / "out")
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (written, adapter))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].tobytes() == tensor.tobytes(), name
    said = json.loads((written / "adapter_config.json").read_text())
    assert said["target_modules"] == ["down_proj", "gate_up_proj", "qkv_proj"]
    assert (said["r"], said["rank_pattern"], said["lora_alpha"], said["alpha_pattern"]) == (
        4,
        {"gate_up_proj": 6},
        8,
        {"down_proj": 3.0},
    )
    assert said["use_rslora"] and said["base_model_name_or_path"] == "microsoft/phi" and not said["fan_in_fan_out"]
    with pytest.raises(ExportPathError, match="exists already"):
        write_peft(plan, arrays_of(adapters), tmp_path / "out")


def changed(adapter, where, **config):
    """A copy of an adapter with other keys in its configuration."""
    shutil.copytree(adapter, where)
    document = json.loads((where / "adapter_config.json").read_text())
    (where / "adapter_config.json").write_text(json.dumps(document | config))
    return where


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only adapters of type LORA"),
        ({"use_dora": True}, "use_dora: True is not implemented"),
        ({"bias": "all"}, "bias: 'all' is not implemented"),
        ({"lora_bias": True}, "lora_bias: True"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication: \[\[0, 2\]\]"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices: \[1\]"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed the base weights"),
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"lora_alpha": "much"}, "lora_alpha must be above 0 and at most 1e6, got 'much'"),
        ({"rank_pattern": {"[": 2}}, "rank_pattern: '\\[' is not a regular expression"),
        ({"use_dora": True, "bias": "all"}, "(?s)2 problems.*use_dora.*bias|2 problems.*bias.*use_dora"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(phi3, tmp_path, config, says):
    with pytest.raises(CheckpointError, match=says):
        open_peft(str(changed(phi3[4], tmp_path / "changed", **config)))


def with_tensors(adapter, where, change):
    shutil.copytree(adapter, where)
    tensors = load_file(where / "adapter_model.safetensors")
    change(tensors)
    from safetensors.numpy import save_file

    save_file(tensors, where / "adapter_model.safetensors", metadata={"format": "pt"})
    return where


QKV = "base_model.model.model.layers.1.self_attn.qkv_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{QKV}.lora_B.weight"), r"(?s)does not go with the model.*layers\.1\.self_attn\.qkv_proj"),
        (lambda t: t.pop(f"{QKV}.lora_A.weight"), r"layers\.1\.self_attn\.qkv_proj has no adapter, and 2 of the 3"),
        (
            lambda t: t.update({f"{QKV}.lora_B.weight": np.zeros((65, 4), np.float32)}),
            r"(?s)does not go with the model.*\[65, 4\]",
        ),
        (
            lambda t: t.update({f"{QKV.replace('qkv', 'q')}.lora_A.weight": np.zeros((4, 64), np.float32)}),
            r"(?s)does not go with the model.*layers\.1\.self_attn\.q_proj",
        ),
        (
            lambda t: t.update({f"{QKV}.lora_magnitude_vector": np.zeros(4, np.float32)}),
            "(?s)does not go with the model.*lora_magnitude_vector",
        ),
        (lambda t: t[f"{QKV}.lora_A.weight"].__setitem__((2, 3), np.nan), "qkv_proj.lora_A.weight: 1 numbers are not"),
        (
            lambda t: t.update({f"{QKV}.lora_A.weight": np.zeros((5, 64), np.float32)}),
            r"layers\.1\.self_attn\.qkv_proj: rank 5, but adapter_config\.json says 4",
        ),
        (lambda t: t.clear(), "it has no adapter of any projection"),
    ],
    ids=["no B", "no A", "shape", "unknown", "dora", "nan", "rank", "nothing"],
)
def test_tensors_that_do_not_go_with_the_model_are_refused(phi3, tmp_path, change, says):
    _, _, rules, model, adapter, _ = phi3
    with pytest.raises(CheckpointError, match=says):
        read_adapter(with_tensors(adapter, tmp_path / "changed", change), model, rules)


def test_other_folders_are_refused(phi3, tmp_path):
    folder, *_, adapter, _ = phi3
    with pytest.raises(CheckpointError, match="it is a model and not an adapter"):
        open_peft(str(folder))
    cut = tmp_path / "cut"
    shutil.copytree(adapter, cut)
    (cut / "adapter_config.json").write_text('{"peft_type": "LO')
    with pytest.raises(CheckpointError, match="not UTF-8 JSON"):
        open_peft(str(cut))
    pickled = tmp_path / "pickled"
    shutil.copytree(adapter, pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="its weights are pickled"):
        open_peft(str(pickled))
